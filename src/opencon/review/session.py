"""One review: the run, its log, the groups now, and who is told of changes. It knows nothing of requests.

All of it belongs to one thread; only pictures and files to take away are made in others.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opencon.errors import RunError
from opencon.files import EMBEDDINGS
from opencon.report.embed import readable
from opencon.review.learn import Learner
from opencon.review.log import LOG, DecisionLog, read_log
from opencon.review.run import Run, open_run
from opencon.review.state import RefusedError, State
from opencon.review.thumbs import Thumbs

REVIEW, MAP = "review", "map.npy"
MANY = 2000  # photos of a change from which on the page fetches whole columns, ours: 2,000 are 20 kB of JSON


class Session:
    """A review that is open."""

    def __init__(self, run: Run) -> None:
        self.run, self.folder = run, run.folder / REVIEW
        self.log = DecisionLog(self.folder, run.identity, len(run.files))
        self.learner = Learner(self.folder)
        self.state = State(run, self.learner.read)
        try:
            replay(self.state, self.log.entries, self.log.path)
        except RunError:
            self.log.close()
            raise
        self.thumbs = Thumbs(run, self.folder / "thumbs")
        self._listeners: set[asyncio.Event] = set()
        self._map: subprocess.Popen[bytes] | None = None
        self.is_closing = False

    # --- decisions ----------------------------------------------------------------------------------------------------

    def decide(self, asked: Mapping[str, Any]) -> None:
        """Take a decision: check it, write it down, replay it, tell everyone."""
        entry = self.learner.accepted(self.state) if asked.get("do") == "learned" else self.state.complete(asked)
        self.log.append(entry)
        self.state.apply(entry)
        if entry["do"] == "learned":
            self.learner.forget()
        if self.run.features.is_file():
            self.learner.warm_up()
        self.tell()

    def changes(self, since: int) -> dict[str, Any]:
        """What a page that has seen this version is missing."""
        state = self.state
        if not 0 <= since <= state.version:
            raise RefusedError("This page is from another review. Load it again.")
        photos = state.changed_since(since)
        columns: dict[str, Any] = {"all": True}
        if len(photos) <= MANY:
            columns = {
                "photos": photos.tolist(),
                "place": state.place[photos].tolist(),
                "looked": state.looked[photos].astype(int).tolist(),
                "confidence": [round(float(c), 4) for c in state.confidence[photos]],
            }
        last = self.log.entries[-1] if self.log.entries else None
        return {
            "version": state.version,
            "groups": self.groups(),
            "canUndo": state.can_undo,
            "canRedo": state.can_redo,
            "last": last and {"do": last["do"]},
            **columns,
        }

    def groups(self) -> list[dict[str, Any]]:
        """Every group, for the page."""
        return [
            {
                "id": g,
                "name": readable(group.name),
                "kind": group.kind,
                "isNamed": group.is_named or group.kind == "seen",
                "suggested": [readable(word) for word in self.run.suggested.get(group.first, ())],
            }
            for g, group in self.state.groups.items()
        ]

    def overview(self) -> dict[str, Any]:
        """What a page needs to begin."""
        return {
            **self.changes(self.state.version),
            "run": self.run.identity,
            "title": readable(self.run.title),
            "folder": readable(self.run.folder.resolve()),
            "photos": len(self.run.files),
            "unreadable": [[readable(name), readable(why)] for name, why in self.run.unreadable[:MANY]],
            "numUnreadable": len(self.run.unreadable),
            "canLearn": self.run.features.is_file(),
        }

    # --- the map ------------------------------------------------------------------------------------------------------

    @property
    def map_kind(self) -> str:
        """The map that there is: "rough" at once, by the two longest axes; "likeness" once that has been made."""
        return "likeness" if (self.folder / MAP).is_file() else "rough"

    def positions(self) -> NDArray[np.float32]:
        """Where each photo goes on the map, (n, 2) in [0, 1]."""
        if self.map_kind == "likeness":
            xy: NDArray[np.float32] = np.load(self.folder / MAP, allow_pickle=False)
            if xy.shape == (len(self.run.files), 2):
                return xy
        return rough_map(np.asarray(self.run.z))

    def start_map(self) -> None:
        """Have the better map made in a process of its own, unless it is there or under way."""
        if self._map is None and self.map_kind == "rough":
            command = [sys.executable, "-m", "opencon.review.mapping", str(self.run.folder / EMBEDDINGS)]
            self._map = subprocess.Popen([*command, str(self.folder / MAP)], stdout=subprocess.DEVNULL)

    # --- who is told --------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Wake everyone who listens."""
        for event in self._listeners:
            event.set()

    async def wait(self, seconds: float) -> None:
        """Until something changes, or for so long."""
        event = asyncio.Event()
        self._listeners.add(event)
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return
        finally:
            self._listeners.discard(event)

    def close(self) -> None:
        """End the processes, and let go of the log."""
        self.is_closing = True
        self.tell()
        self.learner.close()
        if self._map is not None and self._map.poll() is None:
            self._map.terminate()
            self._map.wait()
        self.log.close()


def rough_map(z: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, D) -> (n, 2) in [0, 1]: the two directions in which the photos differ most."""
    if not len(z):
        return np.zeros((0, 2), dtype=np.float32)
    centered = z - z.mean(axis=0)
    axes = np.linalg.eigh((centered.T @ centered).astype(np.float64))[1][:, ::-1][:, :2]
    xy = centered @ axes.astype(np.float32)
    if xy.shape[1] < 2:
        xy = np.concatenate([xy, np.zeros_like(xy)], axis=1)[:, :2]
    return fitted_in(xy)


def fitted_in(xy: NDArray[Any]) -> NDArray[np.float32]:
    """(n, 2) moved and scaled into the unit square, the same in both directions."""
    low, high = xy.min(axis=0), xy.max(axis=0)
    size = max(float((high - low).max()), 1e-9)
    inside: NDArray[np.float32] = ((xy - (low + high) / 2) / size + 0.5).astype(np.float32)
    return inside


def replay(state: State, entries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Apply every decision of a log."""
    for number, entry in enumerate(entries, start=2):  # the first line is the head
        try:
            state.apply(entry)
        except Exception as err:  # a line that was edited by hand fails in many ways
            raise RunError(f"{path}, line {number} does not fit the run ({type(err).__name__}: {err}).") from err


def replayed(folder: Path, photos: Path | None = None) -> State:
    """The groups of a run now, whether it is being reviewed meanwhile or not. Nothing is written.

    Args:
        folder: of the discovery.
        photos: where the photos lie now; None: where they were.
    """
    run = open_run(folder, photos)
    review = run.folder / REVIEW
    state = State(run, Learner(review).read)
    replay(state, read_log(review / LOG, run.identity), review / LOG)
    return state


def set_aside(folder: Path) -> Path | None:
    """Move an earlier review of a run out of the way; nothing is deleted. Returns where it is now."""
    review = folder / REVIEW
    if not (review / LOG).exists():
        return None
    number = next(k for k in range(1, 10_000) if not (folder / f"{REVIEW}-{k}").exists())
    review.rename(folder / f"{REVIEW}-{number}")
    return folder / f"{REVIEW}-{number}"
