"""A review of 20 birds: how many actions until 95 % of the photos are right, against labeling one by one.

python benchmarks/review_birds.py --data FOLDER [--cache FOLDER] [--quick]

The pile: 20 classes of FOLDER/worlds/birds (the odd ones; everything was chosen on the even ones), 45 photos each. Of ten
classes five photos are labeled. `opencon discover` sorts the pile; then a scripted reviewer who knows the truth sits at the
page of `opencon review`, and uses what the page has: the same requests, in the same views.

What the reviewer does: each new group gets the name of most of its photos; a class without a group becomes one when its
first photos are moved. Then, largest first, photos of one class that lie in one wrong group are selected and sent to their
class. Twice on the way the machine learns again, and what it found is taken if more of it is right than wrong.

Counted: actions (name, send a selection, learn, accept or throw away), and, finer, every click and key: to open a group, to
select (a single photo: one click; photos in a row: two, the second with Shift; in the page's order "alike together"), to
send, to name. Photos looked at: all of every group that was opened, and of every preview. One by one: a key for each photo.
"""

from __future__ import annotations

import collections
import contextlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

import opencon
from measure import Benchmark

GOAL = 0.95
STEPS = (16, "learn", 8, "learn", 4, 2, 1)  # photos of one class in one wrong group, at least
SEEN, LABELS = 10, 5
CPU = torch.device("cpu")


def make_pile(birds: Path, folder: Path, part: int, quick: bool) -> dict[str, str]:
    """labeled/ and unlabeled/ with names that tell nothing. Returns the true class by file name."""
    rng = random.Random(0)
    classes = sorted(path for path in birds.iterdir() if path.is_dir())[part::2][: 6 if quick else None]
    seen = set(rng.sample(classes, len(classes) // 2 if quick else SEEN))
    truth, rest = {}, []
    for own in classes:
        photos = sorted(own.iterdir())
        rng.shuffle(photos)
        name = own.name.partition(".")[2]
        if own in seen:
            (folder / "labeled" / name).mkdir(parents=True)
            for photo in photos[:LABELS]:
                shutil.copy(photo, folder / "labeled" / name / photo.name)
            photos = photos[LABELS:]
        rest += [(photo, name) for photo in photos]
    rng.shuffle(rest)
    (folder / "unlabeled").mkdir()
    for number, (photo, name) in enumerate(rest):
        shutil.copy(photo, folder / "unlabeled" / f"IMG_{number:04d}.jpg")
        truth[f"IMG_{number:04d}.jpg"] = name
    return truth


@contextlib.contextmanager
def served(run: Path) -> Any:
    """A client of `opencon review`, let in by its link."""
    command = [sys.executable, "-u", "-m", "opencon", "review", str(run), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = next(m for line in process.stdout if (m := re.search(r"http://\S+", line)))
        base = found[0].partition("/?")[0]
        with httpx.Client(base_url=base, headers={"origin": base}, timeout=600) as client:
            client.get(found[0])
            yield client
    finally:
        process.terminate()
        process.wait()


class Reviewer:
    """Knows the truth, and only has the page."""

    def __init__(self, client: httpx.Client, truth: dict[str, str]) -> None:
        self.client = client
        files = [file.rpartition("/")[2] for file in client.get("/api/files").json()]
        self.truth = [truth.get(file) for file in files]  # None: it came with a label
        self.actions: collections.Counter[str] = collections.Counter()
        self.clicks: collections.Counter[str] = collections.Counter()
        self.looked_at: set[int] = set()
        self.curve: list[dict[str, float]] = []
        self.learned: list[dict[str, Any]] = []
        self.opened: int | None = None
        self.once_named = 0.0
        self.refresh()

    def refresh(self) -> None:
        def column(name: str, kind: str) -> list[Any]:
            return np.frombuffer(self.client.get(f"/api/column/{name}").content, dtype=kind).tolist()

        self.place = column("place", "<i4")
        groups = self.client.get("/api").json()["groups"]
        self.names = {group["id"]: group["name"] for group in groups}
        self.named = {group["id"]: group["isNamed"] for group in groups}

    def do(self, **asked: Any) -> None:
        self.client.post("/api/do", json=asked).raise_for_status()
        self.actions[asked["do"]] += 1
        self.refresh()
        self.mark()

    def mark(self) -> None:
        self.curve.append(
            {"actions": self.actions.total(), "clicks": self.clicks.total(), "right": round(self.accuracy(), 4)}
        )

    def members(self, group: int) -> list[int]:
        return [i for i, g in enumerate(self.place) if g == group]

    def is_right(self, photo: int, place: int) -> bool:
        return self.names.get(place) == self.truth[photo]

    def accuracy(self) -> float:
        own = [i for i, name in enumerate(self.truth) if name is not None]
        return sum(self.is_right(i, self.place[i]) for i in own) / len(own)

    def open(self, group: int) -> list[int]:
        if self.opened != group:
            self.clicks["open a group"] += 1
            self.opened = group
        # The pile of what is unlike everything has no order of likeness.
        is_group = group in self.names
        photos = self.client.get(f"/api/alike/{group}").json() if is_group else self.members(group)
        self.looked_at.update(photos)
        return photos

    def name_groups(self) -> None:
        for group in sorted((g for g in self.names if not self.named[g]), key=lambda g: -len(self.members(g))):
            photos = self.open(group)
            name = collections.Counter(self.truth[i] for i in photos).most_common(1)[0][0]
            other = next((g for g, own in self.names.items() if own == name), None)
            self.clicks["name"] += 1
            if other is None:
                self.do(do="name", group=group, name=name)
            else:
                self.do(do="merge", groups=[group, other], into=other)

    def wrong(self) -> list[tuple[int, str, list[int]]]:
        """(group, true class, photos) of the photos in a wrong group, most first."""
        found: dict[tuple[int, str], list[int]] = collections.defaultdict(list)
        for i, name in enumerate(self.truth):
            if name is not None and not self.is_right(i, self.place[i]):
                found[self.place[i], name].append(i)
        rows = [(group, name, photos) for (group, name), photos in found.items()]
        return sorted(rows, key=lambda row: (-len(row[2]), row[0], row[1]))

    def put_right(self, least: int) -> None:
        while self.accuracy() < GOAL and (rows := self.wrong()) and len(rows[0][2]) >= least:
            group, name, photos = rows[0]
            order = self.open(group)
            self.clicks["select"] += clicks_to_select([order.index(i) for i in photos])
            self.clicks["send"] += 1
            target = next((g for g, own in self.names.items() if own == name), None)
            if target is None:
                self.do(do="new", photos=photos, name=name)
            else:
                self.do(do="move", photos=photos, to=target)

    def learn(self) -> None:
        self.client.post("/api/learn", json={"do": "start"}).raise_for_status()
        began = time.perf_counter()
        while (status := self.client.get("/api/learn").json())["is"] == "running":
            time.sleep(0.1)
        seconds = time.perf_counter() - began
        if status["is"] != "done":
            raise RuntimeError(status)
        moved = [(i, way["to"]) for way in status["ways"] for i in way["photos"] if self.truth[i] is not None]
        self.looked_at.update(i for i, _ in moved)
        gained = sum(self.is_right(i, to) - self.is_right(i, self.place[i]) for i, to in moved)
        self.learned.append({"moved": status["moved"], "more_right": gained, "seconds": round(seconds, 1)})
        self.clicks["learn"] += 3
        self.actions["learn"] += 1
        if gained > 0:
            self.do(do="learned")
        else:
            self.client.post("/api/learn", json={"do": "discard"}).raise_for_status()
            self.actions["throw away"] += 1

    def review(self, steps: tuple[int | str, ...]) -> None:
        self.mark()
        self.clicks["order"] += 1  # similar photos together, for all groups from now on
        self.name_groups()
        self.once_named = self.accuracy()
        for step in steps:
            if self.accuracy() >= GOAL:
                break
            if isinstance(step, int):
                self.put_right(step)
            else:
                self.learn()


def clicks_to_select(places: list[int]) -> int:
    """One for a photo alone, two for several in a row."""
    places = sorted(places)
    runs: list[list[int]] = []
    for at in places:
        if runs and at == runs[-1][-1] + 1:
            runs[-1].append(at)
        else:
            runs.append([at])
    return sum(min(len(run), 2) for run in runs)


def main() -> None:
    parser = Benchmark(__doc__)
    parser.claim = "review"
    parser.sentence = "A person puts a discovery right with a fraction of the actions, and the page stays quick."
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--part", type=int, default=1, choices=(0, 1), help="0: the even classes, to develop on")
    args = parser.begin()
    ways = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        truth = make_pile(args.data / "worlds" / "birds", folder / "photos", args.part, args.quick)
        for name, steps in (("with learning again", STEPS), ("without", tuple(s for s in STEPS if s != "learn"))):
            run = folder / name.replace(" ", "-")
            opencon.discover(folder / "photos", out=run, cache=args.cache or folder / "cache")
            with served(run) as client:
                reviewer = Reviewer(client, truth)
                reviewer.review(steps)
                ways[name] = {
                    "right_once_groups_have_names": round(reviewer.once_named, 4),
                    "right_at_the_end": reviewer.curve[-1]["right"],
                    "actions": reviewer.actions.total(),
                    "clicks_and_keys": reviewer.clicks.total(),
                    "photos_looked_at": len(reviewer.looked_at),
                    "by_action": dict(reviewer.actions),
                    "by_click": dict(reviewer.clicks),
                    "learned": reviewer.learned,
                    "curve": reviewer.curve,
                }
            print(name, {key: value for key, value in ways[name].items() if key != "curve"}, flush=True)
    photos = len(truth)
    numbers = {
        "what": "birds",
        "photos": photos,
        "classes": len(set(truth.values())),
        "goal": GOAL,
        "one_by_one": {"actions": int(np.ceil(GOAL * photos)), "photos_looked_at": int(np.ceil(GOAL * photos))},
        "ways": ways,
    }
    parser.save(numbers, CPU)


if __name__ == "__main__":
    main()
