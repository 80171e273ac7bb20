"""What a trained run says of its images: predictions with their matching, confusion, embeddings.

Letters: M images, D embedding size, S seen classes, C classes and groups together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opencon.config import EvaluationSet
from opencon.errors import DataError, MissingExtraError, RunError
from opencon.experiments.classes import FILE, class_names, facts_from, file_names
from opencon.experiments.workbench import Workbench
from opencon.metrics import match
from opencon.report.paper_figures import confusion
from opencon.training.run_folder import RunFolder

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Confusion:
    """How many images of each true class went to each class or group."""

    counts: Ints  # (true classes, columns)
    rows: tuple[str, ...]  # names of the true classes
    columns: tuple[str, ...]  # the class that each column's group is matched to; "" for a group without a match

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, a row for each true class."""
        return _pandas().DataFrame(self.counts, index=list(self.rows), columns=list(self.columns))


@dataclass(frozen=True, eq=False)
class Predictions:
    """A class or group for each of M images."""

    files: tuple[str, ...]
    classes: Ints  # (M,) as the method numbers them; `num_seen` and above are new groups
    truth: Ints  # (M,) true class, -1 where nobody knows
    names: tuple[str, ...]  # C: of the classes and groups, by number
    true_names: tuple[str, ...]  # of the true classes, by number
    num_seen: int
    confidence: NDArray[np.float64] | None  # (M,) of the class chosen, where the method has probabilities
    novelty: NDArray[np.float64] | None  # (M,) larger is newer, where it has a score

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def predicted(self) -> list[str]:
        """The name of each image's class or group."""
        return [self.names[c] for c in self.classes]

    @cached_property
    def matching(self) -> dict[int, int]:
        """Groups to true classes, one to one, such that as many images as possible are right."""
        known = self.truth >= 0
        if not known.any():
            raise DataError("no image has a known class, so groups cannot be matched with classes.")
        return match(self.classes[known], self.truth[known])

    @property
    def matched(self) -> Ints:
        """(M,) the true class that each image's group is matched to; -1 for a group without one."""
        return np.array([self.matching.get(int(c), -1) for c in self.classes], dtype=np.int64)

    def confusion(self) -> Confusion:
        """True classes against groups, once these are matched; images of unknown class are left out."""
        known = self.truth >= 0
        if not known.any():
            raise DataError("no image has a known class, so there is nothing to confuse.")
        counts, rows, columns = confusion(self.classes[known], self.truth[known])
        names = [self.true_names[c] if c >= 0 else "" for c in columns]
        return Confusion(counts, tuple(self.true_names[c] for c in rows), tuple(names))

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row for each image."""
        return _pandas().DataFrame(self.columns())

    def columns(self) -> dict[str, list[Any]]:
        """Plain lists, a column each; `matched` only where some class is known."""
        known = bool((self.truth >= 0).any())
        columns: dict[str, list[Any]] = {
            "file": list(self.files),
            "predicted": self.predicted,
            "kind": ["seen" if c < self.num_seen else "new" for c in self.classes],
        }
        if known:
            columns["matched"] = [self.true_names[c] if c >= 0 else None for c in self.matched]
            columns["truth"] = [self.true_names[c] if c >= 0 else None for c in self.truth]
        for name in ("confidence", "novelty"):
            if getattr(self, name) is not None:
                columns[name] = getattr(self, name).tolist()
        return columns


def predictions_of(bench: Workbench, on: EvaluationSet) -> tuple[Predictions, NDArray[np.float32]]:
    """What a run says of its unlabeled or held-out images, all of them; and their embeddings (M, D)."""
    _, bank, assignment = bench.score(on, bench.config.eval.protocol)
    num_train = len(bench.labels)
    images = bench.dataset.held_out() if on == "test" else bench.dataset.train
    rows = bench.split.unlabeled if on == "unlabeled" else num_train + np.arange(len(images)).astype(np.int64)
    rows = np.asarray(rows)
    here = rows - num_train if on == "test" else rows  # in the set itself
    if not bench.config.method.uses_labels:
        with bench.judged_weights():
            assignment = bench.method.assign(bank)
    p, novelty = assignment.p, assignment.novelty
    names = file_names(images.files, bench.config.data.name, len(images))
    found = Predictions(
        files=tuple(names[i] for i in here),
        classes=assignment.classes.cpu().numpy()[rows].astype(np.int64),
        truth=images.classes.numpy()[here],
        names=class_names(bench, assignment.classes[:num_train].cpu()),
        true_names=images.class_names,
        num_seen=bench.split.num_seen if bench.config.method.uses_labels else 0,
        confidence=None if p is None else p.detach().cpu().double().amax(dim=1).numpy()[rows],
        novelty=None if novelty is None else novelty.detach().cpu().double().numpy()[rows],
    )
    return found, bank.z.detach().cpu().float().numpy()[rows]


def renamed(found: Predictions, run: RunFolder) -> Predictions:
    """The same, with the names that groups of this run were given since."""
    if not run.has(FILE):
        return found
    try:
        facts = facts_from(run.read_json(FILE))
    except (KeyError, TypeError, ValueError) as err:
        raise RunError(f"{run.path / FILE} is damaged ({type(err).__name__}: {err}). Train the run again.") from err
    given = dict(zip(facts.first_names, facts.class_names, strict=False))  # no first names: nothing was renamed
    return replace(found, names=tuple(given.get(name, name) for name in found.names))


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as err:
        raise MissingExtraError("pandas", "pandas", "a data frame", err) from err
    return pandas
