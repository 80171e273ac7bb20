"""None of these: are photos of things that a model never saw told apart, and does 0.9 mean nine of ten.

python benchmarks/strangers.py --data FOLDER [--cifar FOLDER --weights FILE] [--cache FOLDER] [--part reported]
    [--only WORD] [--learn]

The piles are those of worlds.py. A quarter of the classes of each (new ones first) is taken out before the fit: their
rows are the strangers. A fifth of the unlabeled rows of every other class is held out: new rows of known classes. In the
mean over the piles:

flagged          share of the strangers that are flagged where 5 % of the new rows are, that is with the threshold which
                 these rows themselves give; the same for the mean distance to the 5 nearest rows, of unit length
flagged, own     share that the model's own threshold flags, and its false alarms among the new rows
in the pile      the same for strangers that are in some piles from the beginning, against all their other rows
calibration      the confidence of unlabeled and new rows in ten bins, each pile with the same weight: the mean distance
                 between the confidence of a bin and the share in it that is right
sure             share of the rows with a confidence of 0.9 or more, and how many of these are right
mixture          the same two for the mixture's own probability, to compare with

A seen class is right where it is the row's own. A new group is right where the row's class is that of most of its rows.
Strangers in a pile count, and are never right unless they are flagged, which takes them out.

--learn prints the numbers `TRUST` of openworld/model.py, fitted to the development part, each design with three seeds.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from measure import Benchmark
from opencon.openworld.fit import Fitted, OpenWorldConfig, fit_features
from opencon.openworld.model import TRUST, Prediction
from worlds import CPU, DESIGNS, Pile, Sources, arguments, draw, piles

TAKEN_OUT, HELD_OUT = 1 / 4, 1 / 5  # of the classes, and of the unlabeled rows of each of the others
FALSE_ALARMS, SURE, BINS, NEAREST = 0.05, 0.9, 10, 5
LEARN_FROM = (0, 500, 700)  # first seeds of the piles that --learn draws


class Trial:
    """A pile, of which some rows are kept from the fit."""

    def __init__(self, pile: Pile) -> None:
        rng = np.random.default_rng([pile.seed, 7])
        seen, num = pile.num_seen, pile.num_classes
        order = [*(seen + rng.permutation(num - seen)), *rng.permutation(seen)]  # new ones first
        out = set(order[: max(1, round(TAKEN_OUT * num))])
        kept = [c for c in range(num) if c not in out]
        number = torch.full((num + 1,), -1)  # the last entry is for -1
        number[kept] = torch.arange(len(kept))
        is_stranger = torch.tensor([int(c) in out for c in pile.truth])
        is_new = torch.zeros(len(pile.truth), dtype=torch.bool)
        for c in kept:
            free = rng.permutation(((pile.truth == c) & (pile.labels < 0)).nonzero()[:, 0].numpy())
            is_new[free[: int(HELD_OUT * len(free))]] = True
        rest = ~is_stranger & ~is_new
        self.name, self.seed = pile.name, pile.seed
        self.x, self.labels, self.truth = pile.x[rest], number[pile.labels[rest]], number[pile.truth[rest]]
        self.new, self.new_truth = pile.x[is_new], number[pile.truth[is_new]]
        self.strangers = pile.x[is_stranger]


def flagged(strangers: Tensor, known: Tensor) -> float:
    """Share of the strangers beyond the value that 5 % of the known rows exceed."""
    return float((strangers > known.quantile(1 - FALSE_ALARMS)).float().mean())


def distances(x: Tensor, rows: Tensor, own: bool = False) -> Tensor:
    """Mean distance to the nearest rows, of unit length; `own`: the rows are the same, and none counts for itself."""
    apart = torch.cdist(F.normalize(x, dim=1), F.normalize(rows, dim=1))
    if own:
        apart.fill_diagonal_(torch.inf)
    return apart.topk(min(NEAREST, len(rows) - own), largest=False).values.mean(dim=1)


def is_right(fitted: Fitted, trial: Trial, said: Prediction, truth: Tensor) -> Tensor:
    """Whether the class of a row is right, see the top of this file."""
    stands_for, known = torch.arange(fitted.model.num_classes), trial.truth >= 0
    for c in range(fitted.model.num_seen, fitted.model.num_classes):
        members = trial.truth[known & (fitted.prediction.classes == c)]
        stands_for[c] = members.mode().values if len(members) else -2
    return stands_for[said.classes] == truth


def measure(trial: Trial) -> dict[str, Any]:
    fitted = fit_features(trial.x, trial.labels, OpenWorldConfig(seed=trial.seed))
    model, pile = fitted.model, fitted.prediction
    new, strangers = model.predict(trial.new), model.predict(trial.strangers)
    free = trial.labels < 0
    pile_counts, new_counts = free & ~pile.unlike_everything, ~new.unlike_everything
    right = (
        is_right(fitted, trial, pile, trial.truth)[pile_counts],
        is_right(fitted, trial, new, trial.new_truth)[new_counts],
    )
    record = {
        "name": trial.name,
        "rows": len(trial.x),
        "strangers": len(trial.strangers),
        "flagged": flagged(strangers.oddness, new.oddness),
        "flagged_5nn": flagged(distances(trial.strangers, trial.x), distances(trial.new, trial.x)),
        "flagged_own": float(strangers.unlike_everything.float().mean()),
        "false_alarms": float(new.unlike_everything.float().mean()),
        "confidence_of_strangers": float(strangers.confidence.mean()),
        "right": torch.cat(right).numpy(),
        "confidence": torch.cat([pile.confidence[pile_counts], new.confidence[new_counts]]).numpy(),
        "mixture": sharp(fitted, trial)[torch.cat([pile_counts, new_counts])].numpy(),
        "facts": facts(fitted, trial)[torch.cat([pile_counts, new_counts])].numpy(),
    }
    inside, others = free & (trial.truth < 0), free & (trial.truth >= 0)
    if inside.any():
        near = distances(trial.x, trial.x, own=True)
        record["in_pile"] = flagged(pile.oddness[inside], pile.oddness[others])
        record["in_pile_5nn"] = flagged(near[inside], near[others])
        record["in_pile_own"] = float(pile.unlike_everything[inside].float().mean())
    return record


def sharp(fitted: Fitted, trial: Trial) -> Tensor:
    """The probability that the mixture gives to its choice, for the pile and the new rows."""
    z = torch.cat([fitted.z, fitted.model.embed(trial.new)])
    return fitted.model.logits(z).softmax(dim=1).amax(dim=1)


def facts(fitted: Fitted, trial: Trial) -> Tensor:
    """What the confidence is made of, for the pile and the new rows."""
    model, every = fitted.model, -(-len(trial.x) // len(fitted.model.strangers.rows))
    own = torch.full((len(trial.x),), -1)
    own[::every] = torch.arange(len(model.strangers.rows))
    near = model.strangers.classes[model.strangers.nearest(trial.x, own)[1]]
    oddness, new_near = model.strangers(trial.new)
    pile = model.facts(model.logits(fitted.z), fitted.prediction.oddness, near)
    return torch.cat([pile, model.facts(model.logits(model.embed(trial.new)), oddness, new_near)])


# --- over all piles ---------------------------------------------------------------------------------------------------


def calibration(records: list[dict[str, Any]], name: str) -> float:
    """Expected calibration error in ten bins, every pile with the same weight."""
    weight = np.concatenate([np.full(len(r["right"]), 1 / len(r["right"])) for r in records])
    said, right = (np.concatenate([r[key] for r in records]) for key in (name, "right"))
    bins = np.minimum((BINS * said).astype(int), BINS - 1)
    total = 0.0
    for b in np.unique(bins):
        here = bins == b
        total += weight[here].sum() * abs(np.average(said[here] - right[here], weights=weight[here]))
    return float(total / weight.sum())


def sure(records: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Share of the rows that are sure, and how many of them are right, in the mean over piles."""
    are = [r[name] >= SURE for r in records]
    right = [r["right"][of].mean() for r, of in zip(records, are, strict=True) if of.any()]
    return float(np.mean([of.mean() for of in are])), float(np.mean(right))


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    def mean(key: str) -> float:
        return statistics.mean(r[key] for r in records if key in r)

    keys = ("flagged", "flagged_5nn", "flagged_own", "false_alarms", "confidence_of_strangers")
    inside = [key for key in ("in_pile", "in_pile_5nn", "in_pile_own") if any(key in r for r in records)]
    found: dict[str, Any] = {"piles": len(records)} | {key: mean(key) for key in (*keys, *inside)}
    found["right"] = float(np.mean([r["right"].mean() for r in records]))
    for name in ("confidence", "mixture"):
        share, right = sure(records, name)
        each = statistics.mean(calibration([r], name) for r in records)
        own = {"calibration_error": calibration(records, name), "calibration_error_of_a_pile": each}
        found[name] = own | {"sure": share, "right_where_sure": right}
    return found


def learn(records: list[dict[str, Any]]) -> dict[str, float]:
    """Logistic regression of what is right, every pile with the same weight."""
    from sklearn.linear_model import LogisticRegression

    x, y = (np.concatenate([r[key] for r in records]) for key in ("facts", "right"))
    weight = np.concatenate([np.full(len(r["right"]), 300 / len(r["right"])) for r in records])
    fit = LogisticRegression(max_iter=1000).fit(x[:, 1:], y, sample_weight=weight)
    return dict(zip(TRUST, (round(float(v), 2) for v in (fit.intercept_[0], *fit.coef_[0])), strict=True))


def show(record: dict[str, Any]) -> None:
    print(
        f"{record['name']:60} strangers {record['flagged']:5.1%} (5-NN {record['flagged_5nn']:5.1%})  own threshold "
        f"{record['flagged_own']:5.1%} at {record['false_alarms']:5.1%}  right {record['right'].mean():5.1%} "
        f"said {record['confidence'].mean():5.1%}",
        flush=True,
    )


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--learn", action="store_true", help="print the numbers of the confidence")
    args = arguments(benchmark)
    torch.set_num_threads(min(torch.get_num_threads(), 2))
    sources = Sources(args.data, args.cache, args.cifar)
    chosen = list(piles(sources, args.part, draws=args.draws))
    if args.learn:
        args.part = "development"
        chosen = [draw(d, sources, args.part, first + i) for first in LEARN_FROM for i, d in enumerate(DESIGNS)]
    chosen = [pile for pile in chosen if args.only in pile.name]
    records = []
    for pile in chosen[:: 8 if args.quick else 1]:
        records.append(measure(Trial(pile)))
        show(records[-1])
    if args.learn:
        print(learn(records))
        return
    total = summary(records)
    print(json.dumps(total, indent=1))
    table = [
        {key: value for key, value in r.items() if not isinstance(value, np.ndarray)}
        | {"right": float(r["right"].mean()), "said": float(r["confidence"].mean())}
        for r in records
    ]
    benchmark.save({"part": args.part, "summary": total, "table": table}, CPU)


if __name__ == "__main__":
    main()
