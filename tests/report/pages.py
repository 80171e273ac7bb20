"""Made-up photos and predictions for the tests of the report page."""

from types import SimpleNamespace

import numpy as np
from PIL import Image

from opencon.report.html import ReportData
from opencon.report.table import PhotoRow, PhotoTable

# What a stranger could call a file or a class; each would set window.hacked if any of it were taken for markup or code.
HOSTILE = [
    "<script>window.hacked=1</script>.jpg",
    "</script><script>window.hacked=1</script>.jpg",
    "<img src=x onerror=window.hacked=1>.jpg",
    '"><svg onload=window.hacked=1>.jpg',
    "' onmouseover='window.hacked=1.jpg",
    "<!--<script>window.hacked=1//.jpg",
    "{{data}}${window.hacked=1}`.jpg",
    "javascript:window.hacked=1",
    "]]>&lt;b&gt; &amp;.jpg",
    "日本語 émoji 🦊 \u2028\u2029.jpg",
    "bytes \udcff\udc80 lone \ud800.jpg",
    "invoice\u202egpj.exe",
    "line\nbreak\ttab\x00nul.jpg",
]


def square(color):
    return Image.new("RGB", (60, 40), color)


def report_data(photos=60, seen=2, new=2, labeled=10, seed=0, **change):
    """`photos` in all; the first `labeled` carry a label, the rest go round the classes."""
    rng = np.random.default_rng(seed)
    row, C = np.arange(photos), seen + new
    given = np.where(row < labeled, row % max(seen, 1), -1)
    predicted = np.where(given >= 0, given, row % C)
    novelty = rng.normal(size=photos) * 0.1 + (predicted >= seen)
    angle = 2 * np.pi * predicted / C
    values = {
        "title": "made-up photos",
        "files": [f"folder/photo-{i:05d}.jpg" for i in row],
        "picture": lambda i: square((40 * int(predicted[i]) % 255, 120, 200)),
        "predicted": predicted,
        "class_names": [f"class {c}" for c in range(seen)] + [f"new-{k + 1}" for k in range(new)],
        "num_seen": seen,
        "given": given,
        "confidence": 0.55 + 0.4 * rng.random(photos),
        "novelty": novelty,
        "novelty_threshold": 0.5,
        "is_odd": np.zeros(photos, bool),
        "xy": np.stack([np.cos(angle), np.sin(angle)], axis=1) + 0.15 * rng.normal(size=(photos, 2)),
        "projection": "PCA",
        "count": SimpleNamespace(
            num_classes=C,
            low=C - 1,
            high=C + 2,
            curve=tuple((k, -abs(k - C) / 10) for k in range(2, 9)),
            why="It fits.",
        ),
        "problems": [("folder/broken.jpg", "is no image")],
        "next_steps": [("Sort more photos:", "opencon predict run/ more/")],
        "names_command": "opencon name run/ names.csv",
        "names_for": "0123abcd",
        "facts": {"Seed": 0, "Seconds": 12.5},
    }
    values |= change
    return ReportData(table=made_table(values), **{key: value for key, value in values.items() if key not in COLUMNS})


COLUMNS = ("files", "predicted", "class_names", "num_seen", "given", "confidence", "novelty", "is_odd", "problems")


def made_table(values):
    """The table of these columns: classes by number, -1 for no label."""
    names, seen = values["class_names"], values["num_seen"]
    columns = (values[name] for name in ("files", "predicted", "given", "confidence", "novelty", "is_odd"))
    rows = [
        PhotoRow(
            file=file,
            closest=names[c],
            kind=None if odd else "seen" if c < seen else "new",
            confidence=float(confidence),
            novelty=float(novelty),
            unlike_everything=bool(odd),
            given=names[label] if label >= 0 else None,
        )
        for file, c, label, confidence, novelty, odd in zip(*columns, strict=True)
    ]
    unread = [PhotoRow.unread(file, reason) for file, reason in values["problems"]]
    return PhotoTable((*rows, *unread), tuple(names), seen)


def hostile_data():
    """A report in which every text from outside is hostile."""
    count = len(HOSTILE)
    return report_data(
        photos=4 * count,
        labeled=count,
        seen=3,
        new=3,
        title=HOSTILE[1],
        files=HOSTILE * 4,
        class_names=HOSTILE[:6],
        projection=HOSTILE[0],
        problems=[(name, name) for name in HOSTILE],
        next_steps=[(name, name) for name in HOSTILE],
        names_command=HOSTILE[1],
        facts={name: name for name in HOSTILE},
        accuracy_on=HOSTILE[0],
        count=SimpleNamespace(num_classes=6, low=5, high=7, curve=((5, 0.1), (6, 0.2)), why=HOSTILE[1]),
    )
