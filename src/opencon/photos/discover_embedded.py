"""A discovery among very many photos whose features are there already: a stated sample first, then everything.

features of `opencon embed` --sample--> a discovery, with its page and its review
                            --all-----> OUT/everything: a table for each shard, and exact counts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from opencon.counting import CountEstimate
from opencon.errors import ConfigError
from opencon.openworld.engine import COUNTERS
from opencon.photos.assign import EVERYTHING, assign
from opencon.photos.discover import DiscoverConfig, Discovery, Prepared, Progress, discover_photos, open_folder, prepare
from opencon.photos.embed import Embedded
from opencon.photos.features import FeatureSettings, PhotoFeatures
from opencon.photos.listing import check, find_photos, read_truth
from opencon.photos.model import OpenConModel
from opencon.photos.sample import SAMPLE, draw_sample, sampled_photos, text_workers


@dataclass(frozen=True, eq=False)
class Sampled(Prepared):
    """A sample of embedded photos, and all of them."""

    embedded: Embedded | None = None
    names: Mapping[str, str] | None = None  # labels of photos by name, in place of those that came with the photos


def prepare_source(
    config: DiscoverConfig,
    out: Path,
    device: torch.device,
    *,
    folder: Path | None = None,
    labels: Path | None = None,
    features: Path | None = None,
    sample: int = SAMPLE,
    dry_run: bool = False,
    **others: Path | None,
) -> Prepared:
    """Photos in any of the ways to name them, checked, with the encoder open.

    Args:
        config: how; with `features`, the encoder is that of the features.
        out: the folder of the discovery; sampled photos from archives are copied there.
        device: for photos whose features are to be computed.
        folder: as `find_photos` takes it, and so are `others`.
        labels: a table path,label for `folder`, or for the names of the photos in `features`.
        features: a folder of `opencon embed`.
        sample: photos of it that are fitted and shown, at most.
        dry_run: whether nothing is to be written.
        others: labeled, unlabeled, manifest.
    """
    if features is None:
        return prepare(find_photos(folder, labels=labels, **others), config, device)
    embedded, names = open_embedded(features, labels, folder, *others.values())
    asked, there = config.features, embedded.plan.record.get("asked_for")
    if config.finetune or asked.num_views or asked.image_size or asked.encoder not in (FeatureSettings.encoder, there):
        raise ConfigError("--features are computed already: leave out --encoder, --size, --views and --finetune.")
    extractor = embedded.extractor(device)
    with text_workers(embedded) as workers:
        drawn = draw_sample(embedded, sample, config.fit.seed, workers, names)
    if not dry_run:
        open_folder(out)
    photos = sampled_photos(embedded, drawn, out, copies=not dry_run)
    check(photos)
    rows = drawn.x.float()
    ready = PhotoFeatures(rows, torch.zeros(len(rows), 0, rows.shape[1]), list(range(len(rows))), {})
    of = drawn.num_photos if drawn.num_photos > len(rows) else None
    return Sampled(photos, replace(config, features=extractor.settings), extractor, ready, of, embedded, names)


def discover_prepared(
    prepared: Prepared,
    out: Path,
    *,
    cache: Path | None,
    truth: Mapping[str, str] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Discovery:
    """What `discover_photos` does; where its photos are a sample, then everything is assigned and counted."""
    found = discover_photos(prepared, out, cache=cache, truth=truth, progress=progress)
    if not isinstance(prepared, Sampled) or prepared.embedded is None or not prepared.sampled_from:
        return found
    counts = assign(
        prepared.embedded,
        OpenConModel.from_pretrained(out),
        out / EVERYTHING,
        labels=prepared.names,
        device=prepared.extractor.device,
        starts_over=True,
        progress=progress,
    )
    return replace(found, everything=counts)


def count_embedded(
    embedded: Embedded,
    names: Mapping[str, str] | None,
    *,
    sample: int = SAMPLE,
    seed: int,
    by: str = "engine",
    max_classes: int | None = None,
) -> CountEstimate:
    """How many classes the photos seem to show, seen and new, by a sample of them and one of `COUNTERS`."""
    count = COUNTERS[by]
    with text_workers(embedded) as workers:
        drawn = draw_sample(embedded, sample, seed, workers, names)
    rows, classes = drawn.x.float(), drawn.class_names
    return count(rows, drawn.labels, num_seen=len(classes), seed=seed, max_classes=max_classes)


def open_embedded(
    features: Path, labels: Path | None, *others: Path | None
) -> tuple[Embedded, Mapping[str, str] | None]:
    """The features of very many photos, and labels by name; other ways to name photos are refused beside them."""
    if any(other is not None for other in others):
        raise ConfigError(
            "--features holds the photos. Leave out other folders and tables of photos; --labels may stay."
        )
    return Embedded.open(features), None if labels is None else read_truth(labels.expanduser())
