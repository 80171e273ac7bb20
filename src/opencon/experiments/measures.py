"""Numbers of a finished run by name: short names, which are shares, which are better small; and whether two rows differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opencon.errors import ConfigError
from opencon.registry import did_you_mean
from opencon.report.grid import shown

# What is shown of a run that has the first of these: an accuracy, a number without truth, one of pre-training.
MEASURES = {
    "all": ("all", "novel", "seen"),
    "stability": ("held_out", "stability", "classes_in_use"),
    "knn20": ("knn20",),
}
SHORT = {"nmi": "nmi_all", "ari": "ari_all", "classes": "classes_in_use", "seconds": "total_seconds"}
# Measures that are shares, shown in percent; all others are shown as they are.
SHARES = {"all", "novel", "seen", "nmi_all", "nmi_novel", "ari_all", "ari_novel", "fpr95", "auroc", "aupr", "knn20"}
SHARES |= {"share_novel", "held_out", "stability"}
SMALLER_IS_BETTER = {"fpr95", "total_seconds", "seconds_per_epoch"}
NO_CONTEST = {"share_novel", "stability"}  # shares of which more need not be better: a collapse is very stable
FEW_DIGITS = {"total_seconds", "epoch"}
LEAST_SEEDS = 3  # of a paired test, ours: two differences tell next to nothing


def measures_of(result: Mapping[str, Any]) -> tuple[str, ...]:
    """What is shown of a run, unless columns are chosen; nothing where it was not measured."""
    names = next((names for key, names in MEASURES.items() if key in result), ())
    return tuple(name for name in names if name in result)


def value_of(record: Mapping[str, Any], column: str) -> float | None:
    """A number of a finished run; dots lead into parts (novelty.prototype.fpr95). None where it has none.

    `record` has the run's `result`, and `seconds_per_epoch`. Shares are in percent.
    """
    key = SHORT.get(column, column)
    if key == "seconds_per_epoch":
        value = record["seconds_per_epoch"]
    else:
        value = record["result"]
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return 100.0 * value if key.rpartition(".")[2] in SHARES else float(value)


def check_columns(records: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Refuse a column that no finished run has. Seconds per epoch may be empty: the first two epochs do not count."""
    records = list(records)
    known = sorted({key for record in records for key in _numbers(record["result"])})
    for column in columns:
        if column != "seconds_per_epoch" and known and all(value_of(record, column) is None for record in records):
            names = [*SHORT, "seconds_per_epoch", *known]
            raise ConfigError(
                f"no run has a measure {column!r}.{did_you_mean(column, names)} There are: {', '.join(names)}."
            )


def shown_as(column: str, mean: float | None, std: float | None) -> str:
    """Mean and spread of a column in text."""
    return shown(mean, std, 0 if SHORT.get(column, column) in FEW_DIGITS else 1)


def best_of(column: str, means: Sequence[float | None]) -> float | None:
    """The best of several means; None where one is no better than another, or is alone."""
    key = SHORT.get(column, column).rpartition(".")[2]
    known = [mean for mean in means if mean is not None]
    if len(known) < 2 or key in NO_CONTEST or key not in SHARES | SMALLER_IS_BETTER:
        return None
    return min(known) if key in SMALLER_IS_BETTER else max(known)


def paired_p(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Two-sided p of Student's paired t-test over the seeds that both have; None where these are fewer than three.

    With d the differences of n seeds, t = mean(d) / (std(d) / sqrt(n)) has n - 1 degrees of freedom.
    """
    from scipy.stats import ttest_rel  # late: slow to import

    seeds = sorted(set(one) & set(other))
    if len(seeds) < LEAST_SEEDS:
        return None
    apart = [one[seed] - other[seed] for seed in seeds]
    if len(set(apart)) == 1:  # all alike: no spread to compare with
        return 1.0 if apart[0] == 0 else 0.0
    return float(ttest_rel([one[seed] for seed in seeds], [other[seed] for seed in seeds]).pvalue)


def _numbers(result: Mapping[str, Any], at: str = "") -> list[str]:
    """Dotted names of all numbers of a record."""
    names = []
    for key, value in result.items():
        if isinstance(value, Mapping):
            names += _numbers(value, f"{at}{key}.")
        elif isinstance(value, (int, float)):
            names.append(at + key)
    return names
