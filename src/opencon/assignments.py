"""What a model says of photos as a table: assignments.csv of a discovery, and the table of `opencon predict`.

file               as it was listed
predicted          name of the class or group; empty for what is unlike everything, or cannot be read
kind               seen, new, or empty
confidence         of the class or group that is nearest, in [0, 1]
novelty            larger is less like the seen classes
unlike_everything  yes or no
given              the label it came with
nearest            the most similar examples, between vertical bars
error              why it cannot be read
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from opencon.errors import RunError
from opencon.model import OpenConModel, PhotoPrediction
from opencon.runs import ASSIGNMENTS, EMBEDDINGS

COLUMNS = ("file", "predicted", "kind", "confidence", "novelty", "unlike_everything", "given", "nearest", "error")


def as_table(rows: Iterable[tuple[PhotoPrediction, str]]) -> str:
    """A line for each photo, with the label it came with (or an empty one)."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for said, given in rows:
        kind = "" if said.label is None else "new" if said.is_new else "seen"
        numbers = ("" if value is None else f"{value:.4f}" for value in (said.confidence, said.novelty))
        unlike = "" if said.error else "yes" if said.is_outlier else "no"
        nearest = "|".join(said.nearest)
        table.writerow([said.file, said.label or "", kind, *numbers, unlike, given, nearest, said.error or ""])
    return text.getvalue()


def renamed_table(run: Path, before: OpenConModel, after: OpenConModel) -> str:
    """assignments.csv with the names of `after`; what it says of each photo comes from embeddings.npy."""
    with (run / ASSIGNMENTS).open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = list(csv.DictReader(file))
    z = torch.from_numpy(np.load(run / EMBEDDINGS, allow_pickle=False))
    read, unread = ([row for row in rows if bool(row["error"]) == failed] for failed in (False, True))
    if len(read) != len(z):
        raise RunError(
            f"{run / ASSIGNMENTS} has {len(read)} photos and {EMBEDDINGS} {len(z)}: one of them was changed. "
            f"Run the discovery again, or take {ASSIGNMENTS} out of the folder."
        )
    names = dict(zip(before.class_names[: before.num_seen], after.class_names, strict=False))
    said = [
        *after.judge_embedded([row["file"] for row in read], z, among_examples=True),
        *(PhotoPrediction.unread(row["file"], row["error"]) for row in unread),
    ]
    return as_table(zip(said, (names.get(row["given"], row["given"]) for row in (*read, *unread)), strict=True))
