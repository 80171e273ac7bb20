"""The numbers of docs/review.md are those of the record."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_the_measured_one():
    runs = json.loads((ROOT / "benchmarks/results/review.json").read_text())["runs"]
    birds = [run["numbers"] for run in runs if run["numbers"]["what"] == "birds"][-1]
    text = (ROOT / "docs/review.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (one by one|review, .+?) \| (.*?) ?\| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    alone = birds["one_by_one"]
    wanted = [("one by one", "", alone["actions"], alone["actions"], alone["photos_looked_at"])]
    for words, way in (("learning again twice", "with learning again"), ("never learning again", "without")):
        own = birds["ways"][way]
        right = f"{100 * own['right_once_groups_have_names']:.1f} %"
        counts = (own["actions"], own["clicks_and_keys"], own["photos_looked_at"])
        wanted.append((f"review, {words}", right, *counts))
        assert own["right_at_the_end"] >= birds["goal"]
    assert [tuple(row) for row in rows] == [(a, b, *map(str, numbers)) for a, b, *numbers in wanted]
    assert f"A pile of {birds['photos']} unlabeled photos of {birds['classes']} birds" in text
