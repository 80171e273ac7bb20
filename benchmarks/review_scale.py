"""The page of a review at scale: 50,000 photos, 100,000 points on the map, a hundred kills.

python benchmarks/review_scale.py [--chromium PATH] [--quick]

Made photos (48 pixels, 500 groups of color and noise), embeddings and tables as `discover` writes them. Measured:

    first screen   from opening the link in Chromium to the first photos on it, with nothing cached
    actions        move, name, confirm, merge, split, undo, redo, whole groups and single photos: the time of a request with
                   its answer, which includes the write to the disk
    looking        merges, similar, more, parts, search: the same for questions
    memory         of the server's process after all of it (VmHWM: the most it ever held)
    map            frames a second while 100,000 points turn and zoom, in the headless browser, without a GPU
    kills          a script decides, the server is killed (SIGKILL) at a random moment, and started again: how many answered
                   decisions are missing afterwards, out of how many
"""

from __future__ import annotations

import collections
import contextlib
import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image
from playwright.sync_api import sync_playwright

from measure import Benchmark
from opencon.files import ASSIGNMENTS, DISCOVERY, EMBEDDINGS
from opencon.report.table import COLUMNS
from opencon.review.log import LOG, read_log
from opencon.review.run import open_run

CPU = torch.device("cpu")
GROUPS, DIM, DIFFERENT = (
    500,
    128,
    2000,
)  # groups, size of an embedding, files that differ (the others are links to them)


def make(folder: Path, photos: int) -> Path:
    """A discovery of made photos."""
    rng = np.random.default_rng(0)
    (folder / "photos").mkdir(parents=True)
    run = folder / "run"
    run.mkdir()
    for i in range(photos):
        path = folder / "photos" / f"IMG_{i:06d}.jpg"
        if i < DIFFERENT:
            pixels = np.clip(rng.integers(0, 256, 3) + rng.normal(0, 25, (48, 48, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(path)
        else:
            os.link(folder / "photos" / f"IMG_{i % DIFFERENT:06d}.jpg", path)
    group = rng.integers(0, GROUPS, photos)
    centers = rng.normal(size=(GROUPS, DIM))
    z = (centers[group] + 0.7 * rng.normal(size=(photos, DIM))).astype(np.float32)
    np.save(run / EMBEDDINGS, z / np.linalg.norm(z, axis=1, keepdims=True))
    names = [f"class {g}" for g in range(GROUPS // 2)] + [f"new-{g}" for g in range(1, GROUPS // 2 + 1)]
    with (run / ASSIGNMENTS).open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")
        table.writeheader()
        for i in range(photos):
            row = {"file": f"IMG_{i:06d}.jpg", "predicted": names[group[i]], "confidence": f"{rng.random():.4f}"}
            table.writerow({**row, "unlike_everything": "no"})
    model = {"class_names": names, "classifier": {"num_seen": GROUPS // 2}, "sha256": "0" * 64}
    (run / "model.json").write_text(json.dumps(model))
    (run / DISCOVERY).write_text(json.dumps({"photos": str(folder / "photos")}))
    return run


class Served:
    """A server in a process of its own."""

    def __init__(self, run: Path) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-u", "-m", "opencon", "review", str(run), "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.link = next(m for line in self.process.stdout if (m := re.search(r"http://\S+", line)))[0]
        self.seconds = time.perf_counter() - began
        self.base = self.link.partition("/?")[0]

    def client(self) -> httpx.Client:
        client = httpx.Client(base_url=self.base, headers={"origin": self.base}, timeout=120)
        client.get(self.link)
        return client

    def most_memory(self) -> float:
        """Megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def percentiles(seconds: list[float]) -> dict[str, float]:
    half, most = (round(1000 * float(np.percentile(seconds, q)), 1) for q in (50, 95))
    return {"median_ms": half, "p95_ms": most, "n": len(seconds)}


def time_requests(client: httpx.Client, photos: int, rounds: int) -> dict[str, Any]:
    """Actions and questions, each as the page sends it."""
    rng, took = random.Random(0), collections.defaultdict(list)

    def timed(kind: str, path: str, body: dict[str, Any] | None = None) -> Any:
        began = time.perf_counter()
        answer = client.get(path) if body is None else client.post(path, json=body)
        took[kind].append(time.perf_counter() - began)
        answer.raise_for_status()
        return answer.json()

    version, groups = 0, [group["id"] for group in client.get("/api").json()["groups"]]

    def do(**asked: Any) -> None:
        nonlocal version
        version = timed("actions", "/api/do", {**asked, "since": version})["version"]

    for k in range(rounds):
        a, b, c = rng.sample(groups, 3)
        do(do="move", photos=[rng.randrange(photos)], to=a)
        do(do="move", photos=rng.sample(range(photos), 100), to=b)
        do(do="name", group=a, name=f"name {k}")
        do(do="confirm", photos=rng.sample(range(photos), 500))
        parts = timed("looking", "/api/parts", {"group": c, "parts": 3})
        do(do="split", group=c, parts=parts)
        do(do="merge", groups=[a, b], into=a)
        do(do="undo")
        do(do="redo")
        do(do="undo")
        do(do="new", photos=rng.sample(range(photos), 30), name=f"made {k}")
        timed("looking", "/api/merges")
        timed("looking", f"/api/similar/{rng.randrange(photos)}")
        timed("looking", f"/api/about/{rng.randrange(photos)}")
        timed("looking", f"/api/more/{a}")
        timed("looking", f"/api/search?q=IMG_0{k}")
    return {kind: percentiles(seconds) for kind, seconds in took.items()}


def first_screen(served: Served, chromium: str) -> dict[str, float]:
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 860})
        began = time.perf_counter()
        page.goto(served.link)
        page.wait_for_selector("body.ready")
        ready = time.perf_counter() - began
        shown = "[...document.querySelectorAll('.tile img')].filter(i => i.complete && i.naturalWidth).length >= 12"
        while not page.evaluate(shown):
            page.wait_for_timeout(10)
        screen = time.perf_counter() - began
        page.wait_for_timeout(3000)
        began = time.perf_counter()
        page.evaluate("document.getElementById('grid').scrollTop = 1e6")
        while not page.evaluate(shown):
            page.wait_for_timeout(10)
        scrolled = time.perf_counter() - began
        browser.close()
    return {
        "page_ready_s": round(ready, 2),
        "first_photos_s": round(screen, 2),
        "after_scrolling_s": round(scrolled, 2),
    }


def frames_per_second(run: Path, chromium: str, frames: int) -> dict[str, float]:
    served = Served(run)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 860})
        page.set_default_timeout(600_000)
        page.goto(served.link)
        page.wait_for_selector("body.ready")
        while not page.evaluate("opencon.store.map !== null"):
            page.wait_for_timeout(50)
        page.wait_for_timeout(2000)
        rates = [page.evaluate(f"opencon.spin({frames})") for _ in range(5)]
        paint = page.evaluate("opencon.timing.milliseconds / opencon.timing.frames")
        points = page.evaluate("opencon.store.photos")
        browser.close()
    served.stop()
    return {"points": points, "frames_per_second": round(float(np.median(rates)), 1), "paint_ms": round(paint, 2)}


def kills(run: Path, times: int) -> dict[str, int]:
    """Decide and kill. What was answered must be in the log afterwards, in order."""
    rng, lost, answered, identity = random.Random(0), 0, [], open_run(run).identity
    for _ in range(times):
        served = Served(run)
        client = served.client()
        timer = threading.Timer(rng.uniform(0.02, 0.3), served.process.kill)
        timer.start()
        with contextlib.suppress(httpx.TransportError):
            while True:
                photo, to = rng.randrange(40), rng.randrange(4)
                client.post("/api/do", json={"do": "move", "photos": [photo], "to": to}).raise_for_status()
                answered.append((photo, to))
        timer.join()
        served.process.wait()
        moves = [(entry["photos"][0], entry["to"]) for entry in read_log(run / "review" / LOG, identity)]
        lost += sum(a != b for a, b in zip(answered, moves, strict=False)) + max(len(answered) - len(moves), 0)
        answered = moves
    return {"kills": times, "decisions": len(answered), "lost": lost}


def main() -> None:
    parser = Benchmark(__doc__)
    parser.claim = "review"
    parser.sentence = "A person puts a discovery right with a fraction of the actions, and the page stays quick."
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    args = parser.begin()
    photos, points, times = (2000, 4000, 3) if args.quick else (50_000, 100_000, 100)
    numbers: dict[str, Any] = {"what": "scale", "photos": photos, "groups": GROUPS, "embedding": DIM}
    with tempfile.TemporaryDirectory() as scratch:
        run = make(Path(scratch, "many"), photos)
        served = Served(run)
        numbers["start_s"] = round(served.seconds, 2)
        numbers["first_screen"] = first_screen(served, args.chromium)
        served.stop()
        served = Served(run)
        numbers |= time_requests(served.client(), photos, 3 if args.quick else 30)
        numbers["server_mb"] = round(served.most_memory(), 1)
        served.stop()
        print(numbers, flush=True)
        numbers["map"] = frames_per_second(make(Path(scratch, "points"), points), args.chromium, 60)
        print(numbers["map"], flush=True)
        numbers["kills"] = kills(make(Path(scratch, "kills"), 400), times)
        print(numbers["kills"], flush=True)
    numbers["load"] = [round(value, 1) for value in os.getloadavg()]
    parser.save(numbers, CPU)


if __name__ == "__main__":
    main()
