"""What is read and written of the photos of a shard, as text. Nothing slow to import is needed: processes do this.

Letters: n photos that can be read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from opencon.errors import RunError
from opencon.files import explained, parse_json, read_file, write_whole
from opencon.report.table import PhotoRow, PhotoTable

UNLIKE = ""  # in the counts: photos that are unlike everything


def read_records(path: Path) -> list[dict[str, str]]:
    """A record for each photo of a shard: name, label, error."""
    try:
        # All lines as one list: a call for each would take four times as long.
        records: list[dict[str, str]] = parse_json(b"[" + b",".join(read_file(path).splitlines()) + b"]")
        if not all(isinstance(r, dict) and "name" in r and set(map(type, r.values())) == {str} for r in records):
            raise ValueError("it holds something else than photos")
    except (OSError, ValueError) as err:
        raise damaged(path, err) from err
    return records


def damaged(path: Path, why: object) -> RunError:
    """What to say of a file of a shard that cannot be used."""
    done = path.with_suffix(".done").name
    return RunError(f"{path} is damaged ({why}). Delete {done} beside it and run the same `opencon embed` again.")


def labels_of(path: Path, labels: Mapping[str, str] | None) -> tuple[list[str], npt.NDArray[np.int32]]:
    """The labels in a shard's file of records, and for each readable photo which of them it has, or -1."""
    number = {"": -1}
    readable = (record for record in read_records(path) if "error" not in record)
    texts = (r.get("label", "") if labels is None else labels.get(r["name"], "") for r in readable)
    of = np.array([number.setdefault(text, len(number) - 1) for text in texts], np.int32)
    return list(number)[1:], of


def write_table(
    records: Path,
    said: tuple[npt.NDArray[Any], ...] | None,
    names: tuple[str, ...],
    num_seen: int,
    labels: Mapping[str, str] | None,
    out: Path,
    shard: int,
) -> None:
    """One shard: its table, then its counts, which mark it as done.

    Args:
        records: the shard's file of photos.
        said: name, confidence, novelty and unlike everything, of each photo that can be read; None: there is none.
        names: of classes and groups.
        num_seen: how many of them are those of seen classes.
        labels: of photos by name, in place of those that came with the photos.
        out: the folder of tables.
        shard: its number.
    """
    photos = read_records(records)
    if labels is not None:
        photos = [{**photo, "label": labels.get(photo["name"], "")} for photo in photos]
    readable = [photo for photo in photos if "error" not in photo]
    if len(readable) != (len(said[0]) if said else 0):
        raise damaged(records, f"it has {len(readable)} photos that can be read, and not as many features")
    columns = [values.tolist() for values in said] if said else [[]] * 4
    rows = [
        PhotoRow(
            file=photo["name"],
            closest=names[c],
            kind=None if unlike else "seen" if c < num_seen else "new",
            confidence=confidence,
            novelty=novelty,
            unlike_everything=unlike,
            given=photo.get("label") or None,
        )
        for photo, c, confidence, novelty, unlike in zip(readable, *columns, strict=True)
    ]
    unread = [PhotoRow.unread(p["name"], p["error"], p.get("label") or None) for p in photos if "error" in p]
    table = PhotoTable((*rows, *unread), names, num_seen).to_csv()
    counts = json.dumps(Counter(row.predicted or UNLIKE for row in rows))
    for ending, text in (("csv", table), ("json", counts)):
        path, content = out / f"{shard:05}.{ending}", text.encode("utf-8", "surrogateescape")
        with explained(path):
            write_whole(path, lambda partial, content=content: partial.write_bytes(content))  # type: ignore[misc]
