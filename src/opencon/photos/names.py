"""Names for the groups of a discovery."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opencon.data.listings import printable
from opencon.data.tables import read_table
from opencon.errors import DataError, RunError
from opencon.files import read_file
from opencon.photos.guesses import Guess, without_twice
from opencon.photos.model import OpenConModel, identity
from opencon.report.table import PhotoRow, PhotoTable, from_text
from opencon.training.run_folder import ASSIGNMENTS, EMBEDDINGS, NEIGHBORS, RunFolder

_OTHERWISE = f"Run the discovery again, or take {ASSIGNMENTS} out of the folder."


def rename_from_table(run: Path, table: Path) -> tuple[dict[str, str], list[str]]:
    """Give groups the names in a table group,name. This changes the model and assignments.csv.

    The table names a group by its present name, or by its first one (new-1), which the report shows. So a table can be used
    again with more names or corrected ones. Groups with the same name count as one. A table from a report says which
    discovery it belongs to; another discovery refuses it, because its groups have other numbers.

    Returns:
        The new name of each group whose name changed, and the names that several classes or groups now share.
    """
    names, discoveries = read_names(table)
    OpenConModel.from_pretrained(run)  # refuses a folder without one
    if discoveries and discoveries != {identity(RunFolder(run))}:
        raise RunError(
            f"{printable(table)} holds names for another discovery than the one that is in {run} now: groups have other "
            f"numbers there. Name them in its present report.html, or remove the column `discovery` from the table."
        )
    return rename_groups(run, names)


def rename_groups(run: Path, names: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Give groups these names, by present or first name. This changes the model and assignments.csv.

    Returns:
        The new name of each group whose name changed, and the names that several classes or groups now share.
    """
    before = OpenConModel.from_pretrained(run)
    after = before.renamed(names)
    changed = {old: new for old, new in names.items() if before.renamed({old: new}).class_names != before.class_names}
    renamed = _renamed_table(run, before, after) if (run / ASSIGNMENTS).is_file() else None
    after.save(run)
    if renamed is not None:
        RunFolder(run).write_text(ASSIGNMENTS, renamed.to_csv())
    return changed, [name for name, number in Counter(after.class_names).items() if number > 1]


@dataclass(frozen=True)
class GuessedNames:
    """The new groups of a discovery that nobody named yet, and what they look like."""

    groups: list[tuple[str, int, Guess | None]]  # name, training photos, guess
    marked: dict[str, str]  # a name for each that has a guess, with a question mark


def guessed_names(run: Path) -> GuessedNames:
    """What the new groups look like that have their first name still."""
    model = OpenConModel.from_pretrained(run)
    columns = zip(model.class_names, model.first_names, model.sizes, model.guesses, strict=True)
    groups = [(name, size, guess) for name, first, size, guess in list(columns)[model.num_seen :] if name == first]
    if not groups:
        raise RunError(f"{run} has no new group without a name. Give a table group,name to change names.")
    names = without_twice(tuple(guess for *_, guess in groups), set(model.class_names))
    return GuessedNames(groups, {name: new for (name, *_), new in zip(groups, names, strict=True) if new is not None})


def read_names(table: Path) -> tuple[dict[str, str], set[str]]:
    """The name of each group, from a table with the columns group and name; and the entries of its column `discovery`."""
    columns = {name: (name,) for name in ("group", "name", "discovery")}
    rows = [row for _, row in read_table(table, columns, optional=("discovery",))]
    names: dict[str, str] = {}
    for row in rows:
        group, name = row["group"], row["name"]
        if name and names.setdefault(group, name) != name:
            raise DataError(f"{printable(table)} gives {group!r} two names, {names[group]!r} and {name!r}. Keep one.")
    if not names:
        raise DataError(f"{printable(table)} gives no name: its column `name` is empty.")
    return names, {row["discovery"] for row in rows if row["discovery"]}


def _renamed_table(run: Path, before: OpenConModel, after: OpenConModel) -> PhotoTable:
    """The table of a discovery with the names of `after`, predicted again from embeddings.npy and neighbors.npy."""
    lines, z = _read_assignments(run / ASSIGNMENTS), _read_rows(run / EMBEDDINGS, before.classifier.dim)
    beside = _read_rows(run / NEIGHBORS)
    readable = [line for line in lines if not line["error"]]
    if not len(readable) == len(z) == len(beside):
        raise RunError(
            f"{run / ASSIGNMENTS} has {len(readable)} photos and {EMBEDDINGS} {len(z)}: one of them was changed. "
            f"{_OTHERWISE}"
        )
    classifier, oddness = after.classifier, beside[:, 0].contiguous()
    prediction = classifier.said(*classifier.judge(z, oddness, beside[:, 1:].long()), oddness)
    unlike = torch.tensor([line["unlike_everything"] == "yes" for line in readable])  # pictures of nothing are as well
    prediction = replace(prediction, unlike_everything=unlike)
    new_names = dict(zip(before.class_names[: before.num_seen], after.class_names, strict=False))
    labels = [new_names.get(line["given"], line["given"]) or None for line in readable]
    unread = (PhotoRow.unread(line["file"], line["error"], line["given"] or None) for line in lines if line["error"])
    files, twins = ([line[column] for line in readable] for column in ("file", "twin_of"))
    return after.training_table(files, z, prediction, labels, unread, [twin or None for twin in twins])


def _read_assignments(path: Path) -> list[dict[str, str]]:
    """The rows of assignments.csv."""
    try:
        text = read_file(path).decode("utf-8", "surrogateescape")
        lines = [
            {column: from_text(line[column]) for column in ("file", "unlike_everything", "given", "twin_of", "error")}
            for line in csv.DictReader(io.StringIO(text, newline=""))
        ]
    except (OSError, csv.Error, KeyError, TypeError, AttributeError) as err:
        raise RunError(f"{path} cannot be read ({type(err).__name__}: {err}). {_OTHERWISE}") from err
    return lines


def _read_rows(path: Path, dim: int | None = None) -> Tensor:
    """(n, D), from embeddings.npy or neighbors.npy."""
    try:
        z = np.load(io.BytesIO(read_file(path)), allow_pickle=False)
        if z.ndim != 2 or z.shape[1] != (dim or max(z.shape[1], 1)) or z.dtype != np.float32:
            raise ValueError(f"it holds {z.dtype} of shape {z.shape}, not rows of {dim or 'some'} numbers")
    except Exception as err:  # a damaged header raises nearly anything
        raise RunError(f"{path} cannot be read ({type(err).__name__}: {err}). {_OTHERWISE}") from err
    return torch.from_numpy(z)
