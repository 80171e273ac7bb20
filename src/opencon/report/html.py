"""The report of a discovery: one HTML file that opens offline, for the person whose photos they are.

File names and labels come from outside and may hold anything. Three walls keep them text. Python writes them through
`as_html`; the script reads them from a JSON block and sets them as text content; and a content security policy lets only our
own script run, by its hash, and lets the page load nothing.

Letters: M photos, C = S + new groups, S = num_seen. "Labeled" photos carry the user's label; the others were sorted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from opencon.errors import DataError
from opencon.files import write_whole
from opencon.metrics import OpenWorldAccuracy
from opencon.report.charts import count_curve, histogram
from opencon.report.embed import as_html, as_jpeg, as_json, policy_hash, readable
from opencon.report.figures import COLORS
from opencon.report.table import PhotoTable, number_of
from opencon.version import __version__

if TYPE_CHECKING:
    from opencon.counting.base import CountEstimate

Ids = NDArray[np.int64]

MAX_PICTURES = 1500  # ours, because the page then has about 6 MB
MAX_PHOTOS = 10_000  # ours: names and dots beyond this make the page heavy and the map no clearer
NUM_TYPICAL, NUM_UNSURE = 8, 4  # in a gallery; three rows of four on a phone
UNCERTAIN = 0.5  # ours, because below it the other classes together are likelier than the chosen one
MAP_UNITS = 10_000  # map positions are whole numbers up to this
# 24 colors, after which they come again with another shape. The first are made for color blindness: `figures.COLORS`, and
# on a dark page Paul Tol's light scheme without its olive, near pear. Each further one is the farthest from all before it
# (ours, in OKLab) among those that stand out from the page.
MORE_COLORS = "00c800 0078fc 8400fc fc00fc f09cfc 546078 fc8400 fc0090 fc0000 0000d8 9084d8 9c5400 2ccc88 c060fc"
FOR_DARK = (
    "77aadd ee8866 44bb99 eedd88 ffaabb 99ddff dddddd bbcc33 c000fc f00090 00fc00 a860b4 606cfc 908430 fc0018 0cb400 fc78fc "
    "60fca8 9c8490 c09cfc cc5478 f000d8 fca800 00fcfc"
)
LIGHT_COLORS = (*COLORS, *(f"#{color}" for color in MORE_COLORS.split(" ")))
DARK_COLORS = tuple(f"#{color}" for color in FOR_DARK.split(" "))


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportData:
    """All that the page shows."""

    title: str  # of the page
    table: PhotoTable  # what the model says of each photo; M of them can be read
    picture: Callable[[int], Image.Image | None]  # of a readable photo, by its index, of any size; None: no picture
    novelty_threshold: float | None
    xy: ArrayLike  # (M, 2) positions on the map
    projection: str  # what made them, e.g. "t-SNE"
    count: CountEstimate | None = None  # None: the user said how many
    next_steps: Sequence[tuple[str, str]] = ()  # (what it does, the command)
    names_command: str = ""  # the command that reads names.csv; empty: groups cannot be named here
    names_for: str = ""  # the discovery that names.csv belongs to
    facts: Mapping[str, object] = field(default_factory=dict)  # settings, versions, seconds: the footer
    doubt: str = ""  # why the result is shaky and what would help
    accuracy: OpenWorldAccuracy | None = None  # where the truth is known
    accuracy_on: str = "the unlabeled photos"  # which photos it was measured on


class _Rows(NamedTuple):
    """The readable photos as arrays, and the class each is shown under."""

    files: list[str]
    predicted: Ids  # the nearest class, for labeled photos too
    given: Ids  # the user's label in [0, S), or -1
    confidence: NDArray[np.float64]
    novelty: NDArray[np.float64]
    threshold: float | None
    xy: NDArray[np.float64]
    shown_as: Ids  # the user's label where there is one, else the model's class
    is_free: NDArray[np.bool_]  # unlabeled: the model sorted it
    is_odd: NDArray[np.bool_]  # free, and unlike everything
    is_uncertain: NDArray[np.bool_]  # free, not odd, and the choice has less than an even chance
    is_doubtful: NDArray[np.bool_]  # labeled, but the model sees another class
    is_twin: NDArray[np.bool_]  # nearly the same as another


def write_report(data: ReportData, path: Path) -> Path:
    """Write the page, under a temporary name first; return its path. The folder must exist."""
    rows = _arrays(data)
    template, style, script = (
        (files("opencon.report") / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    galleries = _galleries(data, rows)
    pictured, kept = _sample(galleries, len(rows.files))
    parts = {
        "style": style,
        "style_hash": policy_hash(style),
        "script": script,
        "script_hash": policy_hash(script),
        "title": as_html(data.title),
        "doubt": f'<p class="doubt">{as_html(data.doubt)}</p>' if data.doubt else "",
        "headline": as_html(data.table.headline),
        "shares": _shares(data, rows),
        "sureness": " ".join(filter(None, (_sureness(rows), _twins(data), _unread(data)))),
        "accuracy": _accuracy(data),
        "sample": _sample_note(len(rows.files), len(pictured), len(kept)),
        "names_command": f"Then run:<pre>{as_html(data.names_command)}</pre>" if data.names_command else "",
        "projection": as_html(data.projection),
        "novelty": _novelty(data, rows),
        "count": _count(data),
        "problems": _problems(data),
        "next_steps": "".join(f"<li>{as_html(what)}<pre>{as_html(how)}</pre></li>" for what, how in data.next_steps),
        "facts": "".join(f"<dt>{as_html(key)}</dt><dd>{as_html(value)}</dd>" for key, value in data.facts.items()),
        "version": as_html(__version__),
        "data": as_json(_payload(data, rows, galleries, pictured, kept)),
    }
    # One pass, so that inserted text is not searched for further placeholders.
    page = re.sub(r"\{\{(\w+)\}\}", lambda placeholder: parts[placeholder[1]], template)
    return write_whole(path, lambda partial: partial.write_bytes(page.encode()))


# --- words ------------------------------------------------------------------------------------------------------------


def _sureness(rows: _Rows) -> str:
    outliers, uncertain = int(rows.is_odd.sum()), int(rows.is_uncertain.sum())
    sentences = []
    if rows.is_free.any():
        sure = f"{_be(uncertain)} uncertain (the choice has less than an even chance)"
        odd = f'<a href="#outliers">{_be(outliers)} unlike everything</a>' if outliers else "none is unlike everything"
        sentences.append(f"{sure}; {odd}." if uncertain else f"None is uncertain; {odd}.")
    labeled, wrong = int((~rows.is_free).sum()), int(rows.is_doubtful.sum())
    if labeled:
        classes = number_of(len(np.unique(rows.given[~rows.is_free])), "class", "classes")
        sentences.append(f"Learned from {number_of(labeled, 'photo')} you labeled ({classes}).")
    if wrong:
        look = "looks" if wrong == 1 else "look"
        sentences.append(f'<a href="#doubtful">{wrong:,} of your labels {look} doubtful</a>.')
    return " ".join(sentences)


def _twins(data: ReportData) -> str:
    twins = data.table.num_twins
    return (
        f"{_be(twins)} nearly the same as {'another' if twins == 1 else 'others'}, and counted once." if twins else ""
    )


def _unread(data: ReportData) -> str:
    unread = len(data.table.unreadable)
    return f'<a href="#problems">{number_of(unread, "file")} could not be read</a>.' if unread else ""


def _accuracy(data: ReportData) -> str:
    if data.accuracy is None:
        return ""
    a = data.accuracy
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{share:.1%}</dd></div>"
        for name, share in (("all", a.all), ("novel", a.novel), ("seen", a.seen))
        if not np.isnan(share)  # none of the photos is of such a class
    )
    how = f"Accuracy against the truth, on {as_html(data.accuracy_on)}, protocol {as_html(a.protocol)}"
    return f'<div class="score"><p>{how}</p><dl>{cells}</dl></div>'


def _sample_note(total: int, pictures: int, photos: int) -> str:
    notes = []
    if pictures < total:
        notes.append(f"To stay small, this page holds the pictures of {pictures:,} of the {total:,} photos: a sample.")
    if photos < total:
        notes.append(f"Map and lists show {photos:,} photos, drawn at random; all counts are of all photos.")
    return f'<p class="note sample">{" ".join(notes)}</p>' if notes else ""


def _novelty(data: ReportData, rows: _Rows) -> str:
    free = rows.is_free if rows.is_free.any() else ~rows.is_free
    is_new = rows.shown_as[free] >= data.table.num_seen
    return histogram(rows.novelty[free], is_new, threshold=rows.threshold)


def _count(data: ReportData) -> str:
    new = number_of(len(data.table.class_names) - data.table.num_seen, "new group")
    if data.count is None:
        return f"<p>The number was given: {number_of(data.table.num_seen, 'seen class', 'seen classes')} and {new}.</p>"
    c = data.count
    chart = count_curve(c.curve, chosen=c.num_classes, low=c.low, high=c.high)
    between = f"{c.low} to {c.high}" if c.low != c.high else f"{c.low}"
    return f"<p>{as_html(c.why)} Chosen: <b>{c.num_classes}</b>, of which {new}; likely {between}.</p>{chart}"


def _problems(data: ReportData) -> str:
    unread = data.table.unreadable
    if not unread:
        return "<p>Every file could be read.</p>"
    items = "".join(f"<li><bdi>{as_html(row.file)}</bdi> <span>{as_html(row.error)}</span></li>" for row in unread)
    left_out = f"could not be read and {'is' if len(unread) == 1 else 'are'} left out"
    return f"<p>{number_of(len(unread), 'file')} {left_out}.</p><ul>{items}</ul>"


def _shares(data: ReportData, rows: _Rows) -> str:
    """A bar of the unlabeled photos, class by class; it is decoration, because the headline says the same."""
    counts = np.bincount(rows.predicted[rows.is_free & ~rows.is_odd], minlength=len(data.table.class_names))
    at, bars = 0.0, []
    for c, count in enumerate(counts.tolist()):
        wide = 1000 * count / max(int(rows.is_free.sum()), 1)  # photos unlike everything leave a gap at the end
        if count:
            kind = "seen" if c < data.table.num_seen else "novel"
            bars.append(f'<rect class="{kind}" x="{at:.1f}" width="{max(wide - 2, 0.5):.1f}" height="10"/>')
        at += wide
    return (
        f'<svg class="shares" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">{"".join(bars)}</svg>'
    )


def _be(count: int) -> str:
    return "1 is" if count == 1 else f"{count:,} are"


# --- galleries -------------------------------------------------------------------------------------------------------


def _galleries(data: ReportData, rows: _Rows) -> list[dict[str, Any]]:
    """One gallery for each new group, each seen class, the outliers and the doubtful labels, as rows of photos."""
    galleries = []
    # Where classes are many, each shows fewer photos, but at least one.
    room = MAX_PICTURES // max(len(data.table.class_names), 1)
    num_typical, num_unsure = min(NUM_TYPICAL, max(room * 2 // 3, 1)), min(NUM_UNSURE, room // 3)

    def add(kind: str, c: int, members: Ids, labeled: Ids) -> None:
        if len(members) + len(labeled):
            chosen = members if len(members) else labeled  # a class without a new member shows its labeled photos
            order = chosen[np.lexsort((-rows.confidence[chosen], rows.is_twin[chosen]))]  # a twin shows nothing more
            typical, rest = order[:num_typical].tolist(), order[num_typical:].tolist()
            counts = {"found": len(members), "labeled": len(labeled)}
            galleries.append(
                {"kind": kind, "class": c, "typical": typical, "unsure": rest[::-1][:num_unsure], **counts}
            )

    for c in [*range(data.table.num_seen, len(data.table.class_names)), *range(data.table.num_seen)]:
        here = rows.shown_as == c
        kind = "seen" if c < data.table.num_seen else "new"
        add(kind, c, np.flatnonzero(here & rows.is_free & ~rows.is_odd), np.flatnonzero(here & ~rows.is_free))
    none = np.empty(0, np.int64)
    add("outliers", -1, np.flatnonzero(rows.is_odd), none)
    add("doubtful", -1, none, np.flatnonzero(rows.is_doubtful))
    return galleries


def _sample(galleries: list[dict[str, Any]], M: int) -> tuple[Ids, Ids]:
    """Rows with a picture and rows in the page, both sorted: the galleries first, then others at random."""
    first = [row for g in galleries for row in (*g["typical"], *g["unsure"])]
    others = np.random.default_rng(0).permutation(M).tolist()
    order = np.array(list(dict.fromkeys([*first, *others])), dtype=np.int64)
    return np.sort(order[:MAX_PICTURES]), np.sort(order[:MAX_PHOTOS])


def _payload(
    data: ReportData, rows: _Rows, galleries: list[dict[str, Any]], pictured: Ids, kept: Ids
) -> dict[str, Any]:
    """The data of the script; photos are numbered by their position in `kept`."""
    position = {int(row): i for i, row in enumerate(kept)}
    guesses = {group.name: group.looks_like for group in data.table.groups}
    twin_of = [row.twin_of for row in data.table.readable]
    spread = rows.xy - rows.xy.min(axis=0)
    xy = np.rint(spread * (MAP_UNITS / (float(spread.max()) or 1.0))).astype(np.int64)  # (M, 2)
    return {
        "num_seen": int(data.table.num_seen),
        "can_name": bool(data.names_command),
        "names_for": data.names_for,
        "threshold": rows.threshold,
        "colors": LIGHT_COLORS,
        "dark_colors": DARK_COLORS,
        "classes": [readable(name) for name in data.table.class_names],
        "guesses": [guesses.get(name) for name in data.table.class_names],
        "galleries": [
            g | {part: [position[row] for row in g[part] if row in position] for part in ("typical", "unsure")}
            for g in galleries
        ],
        "size": xy.max(axis=0).tolist(),
        "photos": {
            "file": [readable(rows.files[row]) for row in kept],
            "predicted": rows.predicted[kept].tolist(),
            "given": rows.given[kept].tolist(),
            "confidence": rows.confidence[kept].round(4).tolist(),
            "novelty": [float(f"{value:.4g}") for value in rows.novelty[kept]],
            "twin_of": [None if (twin := twin_of[row]) is None else readable(twin) for row in kept.tolist()],
            "doubt": np.where(rows.is_odd, 2, rows.is_uncertain)[kept].tolist(),
            "x": xy[kept, 0].tolist(),
            "y": xy[kept, 1].tolist(),
        },
        "pictures": {position[int(row)]: as_jpeg(partial(data.picture, int(row))) for row in pictured},
    }


# --- arrays -----------------------------------------------------------------------------------------------------------


def _arrays(data: ReportData) -> _Rows:
    readable_rows, names = data.table.readable, data.table.class_names
    M = len(readable_rows)
    if not M:
        raise DataError("there is no photo to report on. Give at least one file that can be read.")
    number = {name: c for c, name in reversed(list(enumerate(names)))}
    predicted = np.array([number[row.closest] for row in readable_rows if row.closest is not None], dtype=np.int64)
    given = np.array([-1 if row.given is None else number[row.given] for row in readable_rows], dtype=np.int64)
    confidence, novelty = (
        np.array([getattr(row, column) for row in readable_rows], dtype=np.float64)
        for column in ("confidence", "novelty")
    )
    xy = np.asarray(data.xy, dtype=np.float64)
    if xy.shape != (M, 2):
        raise DataError(f"xy has shape {xy.shape}, but there are {M} photos. Give two positions for each.")
    for name, values in (("confidence", confidence), ("novelty", novelty), ("xy", xy)):
        if not np.isfinite(values).all():
            raise DataError(f"{name} holds entries that are not finite numbers; they cannot be shown.")
    threshold = data.novelty_threshold
    threshold = float(threshold) if threshold is not None and np.isfinite(threshold) else None
    is_free = given < 0
    is_odd = np.array([row.unlike_everything for row in readable_rows], dtype=bool) & is_free
    return _Rows(
        files=[row.file for row in readable_rows],
        predicted=predicted,
        given=given,
        confidence=confidence,
        novelty=novelty,
        threshold=threshold,
        xy=xy,
        shown_as=np.where(is_free, predicted, given),
        is_free=is_free,
        is_odd=is_odd,
        is_uncertain=is_free & ~is_odd & (confidence < UNCERTAIN),
        is_doubtful=~is_free & (given != predicted),
        is_twin=np.array([row.twin_of is not None for row in readable_rows], dtype=bool),
    )
