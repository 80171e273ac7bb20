"""What a discovery left in its folder, for a person to look at. Nothing here is written, and no photo is opened.

Letters: n photos that could be read, D embedding size.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opencon.errors import RunError
from opencon.files import ASSIGNMENTS, DISCOVERY, EMBEDDINGS, FEATURES, parse_json, read_file
from opencon.report.table import from_text

MODEL = "model.json"
JUNK, STRANGERS = -1, -2  # places that are no group: what nobody wants, and what resembles nothing else
RESULT = "result.json"
NEEDED = ("file", "predicted", "given", "confidence", "error")  # columns of assignments.csv
NOBODY = -1  # in a column of photos: none


@dataclass(frozen=True, eq=False)
class Run:
    """A discovery as it was found."""

    folder: Path
    root: Path  # names of photos start here
    files: list[str]  # n names
    z: NDArray[np.float32]  # (n, D) unit rows
    names: tuple[str, ...]  # of the groups: the seen classes, then the new groups
    num_seen: int
    place: NDArray[np.int32]  # (n,) number of the group, or STRANGERS
    given: NDArray[np.bool_]  # (n,) whether the photo came with a label
    confidence: NDArray[np.float32]  # (n,)
    twin_of: NDArray[np.int32]  # (n,) an earlier photo that looks the same, or NOBODY
    identity: str  # changes with the photos, their order and their groups
    unreadable: tuple[tuple[str, str], ...] = ()  # name and reason
    suggested: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names that may fit a group
    sampled_from: int | None = None  # photos, of which these are a sample; None: these are all

    @property
    def title(self) -> str:
        """The name of the folder of the photos, and whether they are a sample."""
        name = self.root.name or str(self.root)
        return f"{name}, a sample of {self.sampled_from:,} photos" if self.sampled_from else name

    def path(self, photo: int) -> Path:
        """Where a photo lies."""
        return self.root / self.files[photo]

    @property
    def features(self) -> Path:
        """The features to learn again from; older discoveries did not keep them."""
        return self.folder / FEATURES


def open_run(folder: Path, photos: Path | None = None) -> Run:
    """Read the folder of a discovery.

    Args:
        folder: what `opencon discover --out` wrote.
        photos: where the photos lie now; None: where they were.
    """
    folder = folder.expanduser()
    if not (folder / DISCOVERY).is_file() or not (folder / ASSIGNMENTS).is_file():
        raise RunError(f"{folder} holds no finished discovery. Give the folder that `opencon discover --out` wrote.")
    root = photos.expanduser() if photos is not None else _root(folder)
    lines = _assignments(folder / ASSIGNMENTS)
    rows = [line for line in lines if not line["error"]]
    try:
        z = np.load(folder / EMBEDDINGS, mmap_mode="r", allow_pickle=False)
        if z.ndim != 2 or z.dtype != np.float32:
            raise ValueError(f"it holds {z.dtype} of shape {z.shape}")
    except Exception as err:  # a damaged header raises nearly anything
        raise RunError(f"cannot read {folder / EMBEDDINGS} ({err}). Run the discovery again.") from err
    if len(rows) != len(z):
        raise RunError(
            f"{folder / ASSIGNMENTS} has {len(rows)} photos and {EMBEDDINGS} {len(z)}: one of them was changed. "
            f"Run the discovery again."
        )
    files = [row["file"] for row in rows]
    if rows and not (root / files[0]).exists():
        raise RunError(
            f"the photos are not where they were: there is no {root / files[0]}. Say where they are: --photos DIR."
        )
    model = _model(folder)
    names = tuple(dict.fromkeys(model["class_names"]))
    seen = set(model["class_names"][: model["classifier"]["num_seen"]])
    number = {name: g for g, name in enumerate(names)} | {"": STRANGERS}
    try:
        place = np.array([number[row["given"] or row["predicted"]] for row in rows], dtype=np.int32)
    except KeyError as err:
        raise RunError(f"{folder / ASSIGNMENTS} names a group {err} that the model does not have.") from err
    return Run(
        folder,
        root,
        files,
        z,
        names,
        num_seen=sum(name in seen for name in names),
        place=place,
        given=np.array([bool(row["given"]) for row in rows], dtype=bool),
        confidence=np.array([float(row["confidence"] or 0) for row in rows], dtype=np.float32),
        twin_of=_twins(rows, files),
        identity=_identity(rows, model),
        unreadable=tuple((line["file"], line["error"]) for line in lines if line["error"]),
        suggested=_suggested(rows),
        sampled_from=_json(folder / RESULT).get("sampled_from") if (folder / RESULT).is_file() else None,
    )


def _assignments(path: Path) -> list[dict[str, str]]:
    """The lines of assignments.csv."""
    try:
        text = read_file(path).decode("utf-8", "surrogateescape")
        table = csv.DictReader(io.StringIO(text, newline=""))
        lines = [{key: from_text(cell or "") for key, cell in line.items()} for line in table]
        missing = [name for name in NEEDED if lines and name not in lines[0]]
        if missing:
            raise ValueError(f"it has no column {missing[0]}")
        for line in lines:
            float(line["confidence"] or 0)
    except (OSError, ValueError, AttributeError, csv.Error) as err:
        raise RunError(f"{path} cannot be read ({type(err).__name__}: {err}). Run the discovery again.") from err
    return lines


def _root(folder: Path) -> Path:
    where = _json(folder / DISCOVERY).get("photos")
    if not isinstance(where, str):
        raise RunError(f"the discovery in {folder} does not say where its photos lie. Say it: --photos DIR.")
    return Path(where)


def _model(folder: Path) -> dict[str, Any]:
    model = _json(folder / MODEL)
    names, classifier = model.get("class_names"), model.get("classifier")
    has_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not has_names or not isinstance(classifier, dict) or type(classifier.get("num_seen")) is not int:
        raise RunError(f"{folder / MODEL} is not a model of opencon. Run the discovery again.")
    return model


def _json(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(read_file(path))
    except (OSError, ValueError) as err:
        raise RunError(f"cannot read {path} ({err}). Run the discovery again.") from err
    if not isinstance(data, dict):
        raise RunError(f"{path} does not hold a JSON object. Run the discovery again.")
    return data


def _identity(rows: list[dict[str, str]], model: Mapping[str, Any]) -> str:
    """Of the photos, their order and their groups; names of groups may change without harm to what was decided."""
    digest = hashlib.sha256(str(model.get("sha256")).encode("utf-8", "backslashreplace"))
    for row in rows:
        digest.update(row["file"].encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()[:16]


def _twins(rows: list[dict[str, str]], files: list[str]) -> NDArray[np.int32]:
    """The column twin_of as numbers of photos; a discovery that looked for none has no such column."""
    number = {file: i for i, file in enumerate(files)}
    return np.array([number.get(row.get("twin_of") or "", NOBODY) for row in rows], dtype=np.int32)


def _suggested(rows: list[dict[str, str]]) -> dict[str, tuple[str, ...]]:
    """What the new groups look like, by the column looks_like ("dragonfly, 62%"), where the discovery has one."""
    found = {row["predicted"]: row["looks_like"] for row in rows if row["predicted"] and row.get("looks_like")}
    return {name: (words.rpartition(",")[0] or words,) for name, words in found.items()}
