"""Settings chosen on the seen classes alone: the appendix' validation strategy, with as many trials for every method.

Half of the seen classes are taken for novel, half of the images of the others keep their label, and all else is left out
(`split.validation`). Each method has a grid of the same size (grids.toml); the trial with the best accuracy over all images
is the choice.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from opencon.errors import ConfigError
from opencon.experiments.sweep import Cell, Sweep
from opencon.experiments.sweep_table import SweepRow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Trial:
    """One setting of a grid."""

    method: str
    settings: tuple[str, ...]  # what it changes in the recipe; none: the recipe itself

    @property
    def label(self) -> str:
        """In words."""
        return ", ".join(setting.partition(".")[2] for setting in self.settings) or "the recipe"


def grids() -> dict[str, list[Trial]]:
    """The trials of every method that has a grid."""
    text = files("opencon.experiments").joinpath("grids.toml").read_text(encoding="utf-8")
    return {
        method: [Trial(method, tuple(settings)) for settings in trials]
        for method, trials in tomllib.loads(text).items()
    }


def trial_cells(
    methods: Sequence[str], data: str, places: Sequence[str], *, seeds: Sequence[int] = (0,)
) -> dict[Trial, list[Cell]]:
    """The runs of the grids of some methods on a data set."""
    known = grids()
    missing = [method for method in methods if method not in known]
    if missing:
        raise ConfigError(f"there is no grid for {', '.join(missing)}. There are: {', '.join(known)}.")
    fixed = (*places, "split.validation=true")
    return {
        trial: [
            Cell(f"{method}/{data}", seed, (*trial.settings, *fixed), {"method": method, "trial": trial.label})
            for seed in seeds
        ]
        for method in methods
        for trial in known[method]
    }


def outcomes(sweep: Sweep, trials: dict[Trial, list[Cell]]) -> list[tuple[Trial, SweepRow, bool]]:
    """Every trial with what was measured, and whether it is the best of its method (of those that are finished)."""
    known = sweep.results()
    rows: dict[Trial, SweepRow] = {}
    for trial, cells in trials.items():
        records = [known[cell.name] for cell in cells if cell.name in known]
        done = tuple(record for record in records if record["state"] == "done")
        rows[trial] = SweepRow(
            {"method": trial.method, "trial": trial.label}, done, len(cells), len(records) - len(done)
        )
    best: dict[str, Trial] = {}
    for trial, row in rows.items():
        mean = row.score("all")[0]
        if mean is not None and (trial.method not in best or mean > (rows[best[trial.method]].score("all")[0] or 0.0)):
            best[trial.method] = trial
    return [(trial, row, best.get(trial.method) is trial) for trial, row in rows.items()]
