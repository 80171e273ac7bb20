"""The process that learns again: python -m opencon.review.refit. Each line that it reads is a job of `learn.Learner`.

It is a process of its own because it needs torch, which the server does without, and because it can be stopped.

Letters: n photos of the job, of which k are not left out.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opencon.files import FEATURES, write_whole
from opencon.openworld.fit import OpenWorldConfig, fit_features
from opencon.photos.model import OpenConModel
from opencon.review.learn import (
    CONFIDENCE,
    FAILED,
    FOUND,
    JOB,
    LABELS,
    LEFT_OUT,
    PLACE,
    STAGE,
    Lesson,
    place_of,
    recognized,
)
from opencon.review.run import open_run
from opencon.training.run_folder import RunFolder


def refit(job: Path) -> None:
    """Fit, and write what was found beside the job."""
    began = time.monotonic()

    def stage(words: str) -> None:
        write_whole(job / STAGE, lambda partial: partial.write_text(words, encoding="utf-8"))

    stage("reading")
    plan: dict[str, Any] = json.loads((job / JOB).read_text(encoding="utf-8"))
    run = Path(plan["run"])
    labels = np.load(job / LABELS, allow_pickle=False)
    before = np.load(job / PLACE, allow_pickle=False)
    looked = np.zeros(len(labels), dtype=bool)
    looked[plan["looked"]] = True
    kept = np.flatnonzero(labels != LEFT_OUT)
    features = np.load(run / FEATURES, mmap_mode="r", allow_pickle=False)
    x = torch.from_numpy(np.asarray(features[kept], dtype=np.float32))
    given = torch.from_numpy(labels[kept].astype(np.int64))

    stage("learning")
    settings = OpenWorldConfig(num_novel=plan["num_novel"])
    fitted = fit_features(x, given, settings)

    stage("comparing")
    classes = fitted.prediction.classes.numpy()
    lesson = Lesson(labels, plan["groups"], plan["others"])
    groups = recognized(classes, lesson, before[kept])
    groups += [None] * (fitted.model.num_classes - len(groups))
    fresh, names = _fresh(groups, plan)
    unlike = fitted.prediction.unlike_everything.numpy()
    ids = [g if g is not None else fresh[c] for c, g in enumerate(groups)]
    place, confidence = before.copy(), np.zeros(len(labels), dtype=np.float32)
    place[kept] = place_of(classes, unlike, ids, looked[kept], before[kept])
    confidence[kept] = fitted.prediction.confidence.numpy()
    held = {int(g) for g in np.unique(place)}
    gone = [g for g in plan["others"] if g not in held]
    _save_model(job, run, fitted, names, kept, given)
    np.save(job / PLACE, place)
    np.save(job / CONFIDENCE, confidence)
    new = {str(fresh[c]): names[c] for c in fresh if fresh[c] in held}
    found = {"groups": new, "gone": gone, "seconds": round(time.monotonic() - began, 1)}
    write_whole(job / FOUND, lambda partial: partial.write_text(json.dumps(found), encoding="utf-8"))


def _fresh(groups: list[int | None], plan: dict[str, Any]) -> tuple[dict[int, int], list[str]]:
    """Numbers for the groups that were not there before, and the name of every class."""
    fresh: dict[int, int] = {}
    names: list[str] = []
    spare = iter(plan["spare_names"])
    for c, g in enumerate(groups):
        if g is None:
            fresh[c] = plan["next_id"] + len(fresh)
            names.append(next(spare))
        else:
            names.append(plan["names"][str(g)])
    return fresh, names


def _save_model(job: Path, run: Path, fitted: Any, names: list[str], kept: Any, given: torch.Tensor) -> None:
    """The model, for `opencon predict`; the encoder is the one of the discovery."""
    old, files = OpenConModel.from_pretrained(run), open_run(run).files
    model = OpenConModel.of(fitted, names, old.features, old.encoder, [files[i] for i in kept], given)
    replace(model, home=old.home).save(RunFolder(job))


def main() -> None:
    """Jobs until there are no more lines."""
    for line in sys.stdin:
        job = Path(line.rstrip("\n"))
        try:
            refit(job)
        except Exception as err:  # whatever it is, the page must be able to say it
            why = str(err) or type(err).__name__
            write_whole(job / FAILED, lambda partial, why=why: partial.write_text(why, encoding="utf-8"))  # type: ignore[misc]


if __name__ == "__main__":
    main()
