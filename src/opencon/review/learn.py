"""Learn again: what a person decided becomes labels for a new fit, in a process of its own.

    these photos belong here    each is labeled with its group
    this group is a class       somebody put a photo into it, named, merged or split it, or told it apart: its typical photos
                                are labeled, so that the parts of a merge stay together, and those of a split apart
    nobody wants these          they are left out

The fit gives every other photo a group. Groups that nobody touched are recognized by the photos they hold. What was looked
at keeps its place, whatever the fit says. Nothing changes until the person accepts.

    RUN/review/learned/0007/labels.npy, job.json      what the fit starts from
    RUN/review/learned/0007/place.npy, confidence.npy, found.json      what it found
    RUN/review/learned/0007/model.json, model.safetensors      for `opencon predict`

Letters: n photos, C classes and groups.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opencon.review.run import JUNK, STRANGERS
from opencon.review.state import Learned, RefusedError, State
from opencon.review.suggest import parts_of

FOLDER = "learned"
LABELS, PLACE, CONFIDENCE = "labels.npy", "place.npy", "confidence.npy"
JOB, FOUND, FAILED, STAGE = "job.json", "found.json", "failed.txt", "stage.txt"
LEFT_OUT, UNLABELED = -2, -1  # in labels.npy
FEWEST = 4  # photos, ours: two classes of two
MOST_NEW = 1000  # groups that a fit may add, ours: more than anybody would look at
MOST_SHOWN = 60  # photos that a preview shows of a move, ours: what fits on two screens


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a fit starts from."""

    labels: NDArray[np.int32]  # (n,) class, UNLABELED or LEFT_OUT
    groups: list[int]  # the group of each class
    others: list[int]  # groups that nobody touched


def lesson(state: State) -> Lesson:
    """The decisions as labels."""
    labels = np.where(state.place == JUNK, LEFT_OUT, UNLABELED).astype(np.int32)
    sizes = {g: int((state.place == g).sum()) for g in state.groups}
    groups: list[int] = []
    others: list[int] = []
    for g, group in state.groups.items():
        if not sizes[g]:
            continue
        looked = np.flatnonzero((state.place == g) & state.looked)
        if not len(looked) and not group.is_named and not group.is_touched:
            others.append(g)
            continue
        labels[_typical(state, g)] = len(groups)
        labels[looked] = len(groups)
        groups.append(g)
    return Lesson(labels, groups, others)


def _typical(state: State, group: int) -> NDArray[np.int64]:
    """The nearer half of each of the two parts of a group: a merge keeps both, and strays count for neither."""
    halves = []
    for part in parts_of(state, group, 2):
        photos = np.array(part)
        z = np.asarray(state.run.z[photos])
        near = z @ z.mean(axis=0)
        halves.append(photos[np.argsort(-near, kind="stable")[: -(-len(photos) // 2)]])
    return np.concatenate(halves)


def recognized(classes: NDArray[np.int64], lesson: Lesson, place: NDArray[np.int32]) -> list[int | None]:
    """The group of each class of a fit (C); None for one that was not there before.

    The first classes are those of the lesson. Each other one is the untouched group with which it shares the most photos.
    """
    num_classes, num_seen = int(classes.max(initial=-1)) + 1, len(lesson.groups)
    found: list[int | None] = [*lesson.groups, *[None] * max(num_classes - num_seen, 0)]
    shared = [
        (int(((classes == c) & (place == g)).sum()), c, g) for c in range(num_seen, num_classes) for g in lesson.others
    ]
    for number, c, g in sorted(shared, key=lambda one: (-one[0], one[1], one[2])):
        if number and found[c] is None and g not in found:
            found[c] = g
    return found


class Learner:
    """One fit at a time, in a process that waits for the next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self._process: subprocess.Popen[str] | None = None
        self._job: str | None = None
        self._began = 0.0

    def warm_up(self) -> None:
        """Start the process, so that learning need not wait for its libraries."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "opencon.review.refit"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def start(self, state: State, *, look_for_more: bool) -> None:
        """Begin a fit on the decisions so far.

        Args:
            state: the groups now.
            look_for_more: whether new groups may appear; otherwise as many as nobody touched.
        """
        if self.is_running:
            raise RefusedError("It is learning already.")
        if not state.run.features.is_file():
            raise RefusedError(
                "This discovery kept no features to learn from. Run `opencon discover` again, then review."
            )
        learned = lesson(state)
        if not learned.groups:
            raise RefusedError("Name a group or move some photos first: there is nothing new to learn from.")
        if int((learned.labels != LEFT_OUT).sum()) < FEWEST:
            raise RefusedError(f"At least {FEWEST} photos are needed to learn from.")
        self.discard()
        self._job = f"{state.version:06d}"
        job = self.folder / self._job
        shutil.rmtree(job, ignore_errors=True)
        job.mkdir(parents=True)
        np.save(job / LABELS, learned.labels)
        np.save(job / PLACE, state.place)
        plan = {
            "run": str(state.run.folder.resolve()),
            "groups": learned.groups,
            "others": learned.others,
            "names": {g: group.name for g, group in state.groups.items()},
            "looked": [int(i) for i in np.flatnonzero(state.looked)],
            "next_id": state.new_ids(1)[0],
            "spare_names": _spare_names(state),
            "num_novel": None if look_for_more else len(learned.others),
        }
        (job / JOB).write_text(json.dumps(plan), encoding="utf-8")
        self.warm_up()
        assert self._process is not None
        assert self._process.stdin is not None
        self._began = time.monotonic()
        self._process.stdin.write(f"{job.resolve()}\n")
        self._process.stdin.flush()

    @property
    def is_running(self) -> bool:
        """Whether a fit is under way."""
        return self._job is not None and self._ended() is None

    def _ended(self) -> str | None:
        """How the fit ended: "" or why it failed; None while it runs."""
        assert self._job is not None
        assert self._process is not None
        job = self.folder / self._job
        if (job / FOUND).is_file():
            return ""
        if (job / FAILED).is_file():
            return (job / FAILED).read_text(encoding="utf-8")
        if self._process.poll() is None:
            return None
        why = "The process ended without a word. Is there memory left?"
        (job / FAILED).write_text(why, encoding="utf-8")  # so that a new process does not make this one look alive
        return why

    def progress(self) -> dict[str, Any]:
        """How far it is."""
        if self._job is None:
            return {"is": "idle"}
        ended = self._ended()
        if ended is None:
            stage = self.folder / self._job / STAGE
            words = stage.read_text(encoding="utf-8") if stage.is_file() else "starting"
            return {"is": "running", "stage": words, "seconds": round(time.monotonic() - self._began, 1)}
        return {"is": "failed", "why": ended} if ended else {"is": "done"}

    def status(self, state: State) -> dict[str, Any]:
        """How far it is; with what would change, once it is done."""
        now = self.progress()
        return now | self._preview(state) if now["is"] == "done" else now

    def _preview(self, state: State) -> dict[str, Any]:
        assert self._job is not None
        place, _ = self.read(self._job)
        found = self._found(self._job)
        moved = np.flatnonzero((place != state.place) & ~state.looked & (state.place != JUNK))
        ways: dict[tuple[int, int], list[int]] = {}
        for i in moved.tolist():
            ways.setdefault((int(state.place[i]), int(place[i])), []).append(i)
        largest = sorted(ways.items(), key=lambda way: -len(way[1]))
        return {
            "moved": len(moved),
            "ways": [
                {"from": a, "to": b, "number": len(photos), "photos": photos[:MOST_SHOWN]} for (a, b), photos in largest
            ],
            "groups": found["groups"],
            "gone": found["gone"],
            "seconds": found["seconds"],
        }

    def accepted(self, state: State) -> dict[str, Any]:
        """The entry of the log that takes what was found. What was decided meanwhile stays."""
        status = self.status(state)
        if status["is"] != "done" or self._job is None:
            raise RefusedError("There is nothing to accept: learning has not finished, or was thrown away.")
        found = self._found(self._job)
        held = {int(g) for g in np.unique(state.unless_placed(self.read(self._job)[0])) if g >= 0}
        new = {int(g) for g in found["groups"]}
        if new & set(state.groups) or held - set(state.groups) - new:
            raise RefusedError("Groups were merged or made meanwhile. Learn again, then accept.")
        gone = [g for g in found["gone"] if g in state.groups and g not in held]
        return {"do": "learned", "file": self._job, "groups": found["groups"], "gone": gone}

    def forget(self) -> None:
        """Leave what was found where it is: it was accepted."""
        self._job = None

    def discard(self) -> None:
        """Stop, and throw away what was found."""
        if self._job is None:
            return
        if self.is_running:
            self.close()
        shutil.rmtree(self.folder / self._job, ignore_errors=True)
        self.forget()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def read(self, job: str) -> Learned:
        """A place and a confidence for every photo, as a fit left them."""
        name = Path(job).name
        place, confidence = (np.load(self.folder / name / file, allow_pickle=False) for file in (PLACE, CONFIDENCE))
        return place, confidence

    def _found(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / job / FOUND).read_text(encoding="utf-8"))
        return found


def _spare_names(state: State) -> Sequence[str]:
    """new-1, new-2, ... that no group has: as many as a fit could want."""
    taken = {group.name for group in state.groups.values()} | set(state.run.names)
    return [name for k in range(1, len(taken) + MOST_NEW + 1) if (name := f"new-{k}") not in taken]


def place_of(
    classes: NDArray[np.int64],
    unlike: NDArray[np.bool_],
    groups: Sequence[int],
    looked: NDArray[np.bool_],
    before: NDArray[np.int32],
) -> NDArray[np.int32]:
    """The place of each photo after a fit, (n,): its group, or STRANGERS; what was looked at stays."""
    after = np.where(unlike, STRANGERS, np.array(groups, dtype=np.int32)[classes])
    return np.where(looked, before, after).astype(np.int32)
