"""A small made-up discovery: 40 photos on disk in four clear groups, of which two are seen classes. No encoder is needed.

It kept no features, so that no test waits for a process that would learn from them.
"""

import csv
import json

import numpy as np
from PIL import Image

from opencon.files import ASSIGNMENTS, DISCOVERY, EMBEDDINGS
from opencon.report.table import COLUMNS

NAMES = ("cat", "dog", "new-1", "new-2")
COLORS = ((220, 40, 40), (40, 190, 60), (50, 70, 220), (230, 200, 40))
EACH, LABELED = 10, 2  # photos of a group, and how many of a seen class came with a label


def make_discovery(folder, *, each=EACH, side=16, files=None, names=NAMES):
    """Photos in folder/photos and what a discovery leaves in folder/run. Photo i belongs to group i // each."""
    rng = np.random.default_rng(0)
    photos, run = folder / "photos", folder / "run"
    photos.mkdir(parents=True)
    run.mkdir()
    n = len(names) * each
    group = np.arange(n) // each
    centers = np.linalg.qr(rng.normal(size=(16, 16)))[0][: len(names)]
    z = centers[group] + 0.15 * rng.normal(size=(n, 16))
    z = (z / np.linalg.norm(z, axis=1, keepdims=True)).astype(np.float32)
    files = files or [f"IMG_{i:04d}.jpg" for i in range(n)]
    for i, file in enumerate(files):
        color = np.clip(np.array(COLORS[group[i] % 4]) + rng.normal(0, 20, (side, side, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(color).save(photos / file, "JPEG")
    with (run / ASSIGNMENTS).open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for i in range(n):
            g = int(group[i])
            given = names[g] if g < 2 and i % each < LABELED else ""
            values = {
                "file": files[i],
                "predicted": names[g],
                "kind": "seen" if g < 2 else "new",
                "confidence": f"{0.5 + 0.4 * rng.random():.4f}",
                "novelty": "0.1",
                "unlike_everything": "no",
                "given": given,
            }
            table.writerow([values.get(column, "") for column in COLUMNS])
    np.save(run / EMBEDDINGS, z)
    model = {"class_names": list(names), "classifier": {"num_seen": 2}, "sha256": "0" * 64}
    (run / "model.json").write_text(json.dumps(model))
    (run / DISCOVERY).write_text(json.dumps({"what": "made up", "photos": str(photos)}))
    return run
