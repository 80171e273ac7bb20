"""The sections of a run's settings: frozen dataclasses that check themselves. A value out of range is a `ConfigError`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal

from opencon.errors import require, require_seed, shown

Protocol = Literal["orca", "gcd"]
EvaluationSet = Literal["unlabeled", "test"]
Precision = Literal["fp32", "bf16", "fp16"]
FrozenNorm = Literal["batch", "running", "measured"]

LARGEST_SIDE = 8192  # pixels of a stored image or a view, ours: a batch of one such image is 0.2 GB
SIDES = f"between 8 and {LARGEST_SIDE:,} pixels"  # for messages
MOST_RAND_OPS = 100  # in a row, ours: after a few of RandAugment's operations nothing of an image is left
LARGEST_LAYER = 1 << 16  # numbers in a layer of the head, ours: ten times the widest that any paper here has


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images to use."""

    name: str  # a data set by name, or "folder" / "list" for your own files
    root: str | None = None  # where its files lie; None: ~/.cache/opencon
    unlabeled: str | None = None  # with "folder": another folder, of images without a label
    truth: str | None = None  # their classes, to measure with: "folders" (its sub-folders), or a table file,class
    test: str | None = (
        None  # with "folder" and "list": held-out images, a folder with a sub-folder per class, or a list
    )
    image_size: int | None = None  # side in pixels at which photos are stored; digits and CIFAR have their own
    # Photos in files: images that take more than this (1e9 bytes) are read from their files while training; 0: always.
    memory_gb: float | None = None  # None: half of the memory of the machine or of its GPU, whichever is smaller
    decode: Literal["auto", "threads", "processes"] = "auto"  # who decodes them then; auto: processes where they pay

    def __post_init__(self) -> None:
        size, gb = self.image_size, self.memory_gb
        require(size is None or 8 <= size <= LARGEST_SIDE, f"data.image_size = {shown(size)} must lie {SIDES}.")
        require(gb is None or 0 <= gb < float("inf"), f"data.memory_gb = {gb} must be a number of GB, 0 or more.")
        for key, names in (("unlabeled", ("folder",)), ("truth", ("folder",)), ("test", ("folder", "list"))):
            value = getattr(self, key)
            require(
                value is None or self.name in names,
                f"data.{key} = {value!r} is for data.name = {' or '.join(names)}, not for {self.name!r}. Leave it out.",
            )
        require(
            self.truth is None or self.unlabeled is not None,
            f"data.truth = {self.truth!r} says the classes of data.unlabeled (--unlabeled), and there is none.",
        )


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Which classes have labels, and how many of their images."""

    num_seen: int | None = None  # classes that have labels, the first ones in class order; None: as the data says
    seen_classes: tuple[str, ...] = ()  # their names, instead of their number
    # Classes to look for, seen + novel. None: as many as the data has. "auto": as many as the first features suggest.
    num_classes: int | Literal["auto"] | None = None
    labeled_ratio: float = 0.5  # chance of an image of a seen class to keep its label, or the exact share
    rule: Literal["coin", "exact"] = "coin"  # a draw for each image (ORCA, OpenCon), or a share of all of them (GCD)
    # Only the labeled images, half of whose classes are seen: to choose settings without looking at the others (OpenCon,
    # appendix on hyperparameters).
    validation: bool = False
    held_out: float = 0.1  # where the data itself gives labels: the share of them that is kept back, to measure with
    seed: int = 0  # fixes the split only, not the training

    def __post_init__(self) -> None:
        if self.seen_classes:
            twice = next((name for name in self.seen_classes if self.seen_classes.count(name) > 1), None)
            require(twice is None, f"split.seen_classes names {twice!r} twice.")
            object.__setattr__(self, "num_seen", len(self.seen_classes))
        require(self.num_seen is None or self.num_seen >= 1, f"split.num_seen = {self.num_seen} must be at least 1.")
        require(0 <= self.held_out < 1, f"split.held_out = {self.held_out} must be at least 0 and below 1.")
        require(
            self.known_classes is None or self.num_seen is None or self.num_seen < self.known_classes,
            f"split.num_seen = {self.num_seen} leaves no novel class among split.num_classes = {self.num_classes}. "
            f"Lower num_seen, or raise num_classes.",
        )
        require(
            0.0 < self.labeled_ratio < 1.0,
            f"split.labeled_ratio = {self.labeled_ratio} must lie strictly between 0 and 1: at 0 nothing is labeled, "
            f"at 1 no image of a seen class is left among the unlabeled.",
        )
        # NumPy's generator, which draws the released splits, takes no more.
        require(0 <= self.seed < 2**32, f"split.seed = {shown(self.seed)} must be a whole number from 0 to 2^32 - 1.")

    @property
    def known_classes(self) -> int | None:
        """`num_classes` where it is a number."""
        return self.num_classes if isinstance(self.num_classes, int) else None


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """How a view is made from an image. Probabilities are per image; the defaults are the released ones for CIFAR."""

    section: ClassVar[str] = "augment"  # in messages

    name: str = "standard"  # who makes the view: `opencon list views`; the settings below are those of "standard"
    size: int | None = None  # side of a view in pixels; None: as the images are stored
    crop_scale: tuple[float, float] | None = (0.2, 1.0)  # share of the area a random resized crop keeps; None: no crop
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # its width over height, log-uniform (torchvision's default)
    flip_p: float = 0.5
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)  # brightness, contrast, saturation, hue
    jitter_p: float = 0.8
    gray_p: float = 0.2
    blur_p: float = 0.0  # the released code does not blur
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    rotate: float = 0.0  # degrees, uniform in +-rotate
    shift: float = 0.0  # share of the side, uniform in +-shift, each axis
    whole_pixels: bool = False  # shift by whole pixels, which leaves the image sharp: a crop after padding
    zoom: tuple[float, float] = (1.0, 1.0)  # scale of rotate/shift warps, uniform
    rand_ops: int = 0  # N of RandAugment (arXiv:1909.13719): operations in a row, each drawn from fourteen
    rand_magnitude: float = 9.0  # M, of at most 30; 9 is the paper's for ResNet-50
    # Images of a batch mixed in pairs, for methods that can learn from such images; 0: never.
    mixup: float = 0.0  # a of the share's Beta(a, a) (arXiv:1710.09412)
    cutmix: float = 0.0  # likewise, where a box is replaced (arXiv:1905.04899); with both, either is as likely
    mix_p: float = 1.0  # of an image to be mixed

    def __post_init__(self) -> None:
        at = self.section
        for name in ("flip_p", "jitter_p", "gray_p", "blur_p", "mix_p"):
            p = getattr(self, name)
            require(0.0 <= p <= 1.0, f"{at}.{name} = {p} must lie between 0 and 1.")
        size = self.size
        require(size is None or 8 <= size <= LARGEST_SIDE, f"{at}.size = {shown(size)} must lie {SIDES}.")
        low, high = self.crop_scale or (1.0, 1.0)
        require(0.0 < low <= high <= 1.0, f"{at}.crop_scale = {self.crop_scale} must satisfy 0 < low <= high <= 1.")
        for name in ("crop_ratio", "blur_sigma", "zoom"):
            low, high = getattr(self, name)
            require(0.0 < low <= high, f"{at}.{name} = {(low, high)} must satisfy 0 < low <= high.")
        require(
            all(j >= 0 for j in self.jitter) and self.jitter[3] <= 0.5,
            f"{at}.jitter = {self.jitter} must not be negative, and hue (the last) at most 0.5.",
        )
        require(0.0 <= self.rotate <= 180.0, f"{at}.rotate = {self.rotate} must lie between 0 and 180 degrees.")
        require(0.0 <= self.shift < 1.0, f"{at}.shift = {self.shift} must lie in [0, 1).")
        most = MOST_RAND_OPS
        require(0 <= self.rand_ops <= most, f"{at}.rand_ops = {shown(self.rand_ops)} must lie between 0 and {most}.")
        m = self.rand_magnitude
        require(0.0 <= m <= 30.0, f"{at}.rand_magnitude = {m} must lie between 0 and 30.")
        for name in ("mixup", "cutmix"):
            a = getattr(self, name)
            require(a == 0 or 0.05 <= a < float("inf"), f"{at}.{name} = {a} must be 0 (off) or at least 0.05.")

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed with each other."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_p > 0


@dataclass(frozen=True, kw_only=True)
class ViewConfig(AugmentConfig):
    """Further views, after the two full ones: how each is made, and how many there are."""

    section: ClassVar[str] = "views"

    size: int | None = None  # None: as the full views
    count: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.count >= 1, f"views.count = {self.count} must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The network, the weights it starts from, and which part of it learns."""

    name: str
    weights: str | None = None  # a file; "installed": those that come with the encoder; None: random
    train_from: str = "all"  # first stage that learns: a stage name, "all" or "head"
    frozen_norm: FrozenNorm = "batch"  # statistics of frozen batch norms; released: batch
    fold_frozen: bool = True  # without batch statistics: frozen batch norms folded into the convolutions before them
    views_together: bool = True  # both views in one forward pass (batch norm sees them together)
    mean: tuple[float, ...] = (0.5,)  # per channel, or one for all
    std: tuple[float, ...] = (0.5,)
    head_hidden: int | None = None  # None: as wide as the features
    head_dim: int = 128  # paper, section 5

    def __post_init__(self) -> None:
        require(len(self.mean) == len(self.std), f"encoder.mean has {len(self.mean)} values, std {len(self.std)}.")
        require(all(s > 0 for s in self.std), f"encoder.std = {self.std} must be above zero.")
        most, dim, hidden = LARGEST_LAYER, self.head_dim, self.head_hidden
        require(2 <= dim <= most, f"encoder.head_dim = {shown(dim)} must lie between 2 and {most:,}.")
        require(
            hidden is None or 1 <= hidden <= most,
            f"encoder.head_hidden = {shown(hidden)} must lie between 1 and {most:,}, or be none: as wide as the features.",
        )


@dataclass(frozen=True, kw_only=True)
class Views:
    """What a method can do with the views of an image; a run that gives it others is refused."""

    least: int = 2  # views, the two full ones among them
    most: int | None = 2  # None: any number
    sizes: bool = False  # whether further views may have another size than the first two
    mixed: bool = False  # whether it reads `Batch.mixes`, so that images may be mixed with each other


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Base of every method's settings; the class variable says which method."""

    name: ClassVar[str]
    uses_labels: ClassVar[bool] = True  # False: every image is treated as unlabeled (pre-training)
    projects: ClassVar[bool] = True  # False: no projection head, the encoder's features are the embedding
    trains: ClassVar[bool] = True  # False: it has no step, and its runs have no epoch
    views: ClassVar[Views] = Views()  # what it can do with views

    def corrects(self, is_counted: bool) -> bool:
        """Whether it changes the number of classes while it trains; `is_counted`: the number is an estimate."""
        return False


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """A rule for some parameters. Of several rules that fit a parameter, the last one that sets a value counts."""

    # "norms", "biases", "head" (all above the encoder), or names with wildcards, such as "embedder.encoder.layer4.*"
    match: tuple[str, ...]
    lr: float | None = None  # where the schedule starts for them; None: train.lr
    weight_decay: float | None = None  # None: train.weight_decay

    def __post_init__(self) -> None:
        require(len(self.match) > 0, "train.groups.match = () fits no parameter. Give norms, biases, head or a name.")
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"train.groups.{name} = {value} must not be negative.")
        require(
            self.lr is not None or self.weight_decay is not None,
            f"train.groups: the rule for {', '.join(self.match)} changes nothing. Give it lr or weight_decay.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimizer, its schedule, and how the work is done."""

    epochs: int  # one epoch: one pass over the labeled images
    batch_size: int = 512  # labeled and unlabeled images together
    labeled_share: float | None = None  # of a batch; None: in proportion, as many as there are labeled images
    optimizer: str = "sgd"  # or adamw, lars, or one of your own: `opencon list optimizers`
    lr: float = 0.02
    lr_end: float = 0.0  # where a cosine schedule ends
    momentum: float = 0.9  # of sgd and lars
    nesterov: bool = False  # of sgd
    betas: tuple[float, float] = (0.9, 0.999)  # of adamw; the defaults of its paper, arXiv:1711.05101
    trust: float = 0.001  # of lars: its eta, arXiv:1708.03888
    weight_decay: float = 5e-4
    groups: tuple[GroupConfig, ...] = ()  # parameters with a rate or a decay of their own
    clip: float | None = None  # greatest norm of the gradient of all parameters; None: any
    schedule: str = "step"  # or cosine, constant, or one of your own: `opencon list schedules`
    milestones: tuple[int, ...] = ()  # epochs at which a step schedule divides by ten
    warmup_epochs: float = 0  # over which the rate climbs to where the schedule is
    per_step: bool = False  # the rate moves with every step; otherwise with every epoch
    precision: Precision = "fp32"  # of the encoder; losses are float32. A CPU without bfloat16 takes fp32 for bf16
    compile: bool = False  # torch.compile for encoder, losses, and views that have no kernel
    capture: bool = True  # on a GPU: record the step once as a CUDA graph and replay it
    kernels: bool = True  # on a GPU: Triton kernels for small views, a learning ResNet, prototypes (capture needs them)
    sync_norms: bool = True  # under torchrun: batch norms see the whole batch; false: each rank its own share of it
    seed: int = 0
    log_every: int = 50  # steps between two checks of the loss (each makes the host wait)
    save_seconds: float = 30.0  # at most this much work is lost to a kill -9; Ctrl-C loses none but the epoch

    def __post_init__(self) -> None:
        for name in ("batch_size", "log_every"):
            require(getattr(self, name) >= 1, f"train.{name} = {getattr(self, name)} must be at least 1.")
        for name in ("epochs", "lr_end", "momentum", "weight_decay", "warmup_epochs", "save_seconds"):
            require(getattr(self, name) >= 0, f"train.{name} = {getattr(self, name)} must not be negative.")
        require_seed(self.seed, "train.seed")
        require(self.lr > 0, f"train.lr = {self.lr} must be above zero.")
        require(self.lr_end <= self.lr, f"train.lr_end = {self.lr_end} must not be above train.lr = {self.lr}.")
        require(self.momentum < 1, f"train.momentum = {self.momentum} must be below 1.")
        require(
            all(0 <= beta < 1 for beta in self.betas), f"train.betas = {self.betas} must lie in [0, 1), both of them."
        )
        require(self.trust > 0, f"train.trust = {self.trust} must be above zero.")
        require(self.clip is None or self.clip > 0, f"train.clip = {self.clip} must be above zero, or none: no limit.")
        require(
            self.per_step or float(self.warmup_epochs).is_integer(),
            f"train.warmup_epochs = {self.warmup_epochs}: a part of an epoch needs train.per_step=true.",
        )
        require(
            self.momentum > 0 or not self.nesterov,
            "train.nesterov needs train.momentum above zero: it looks ahead along the momentum.",
        )
        share = self.labeled_share
        require(
            share is None or 0 < share < 1,
            f"train.labeled_share = {share} must lie strictly between 0 and 1, or be none: in proportion.",
        )
        require(
            list(self.milestones) == sorted(set(self.milestones)) and all(m >= 1 for m in self.milestones),
            f"train.milestones = {self.milestones} must be increasing epochs from 1.",
        )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How accuracy is measured: protocol and images. Both are printed with every number."""

    protocol: Protocol = "orca"
    on: EvaluationSet = "unlabeled"  # the unlabeled training images, or the held-out test images
    every: int = 10  # epochs between evaluations during training; the last epoch is always evaluated
    average: float = 0.0  # judge weights averaged with this momentum; 0: the weights as they are
    fresh_norms: bool = False  # averaged weights measure their batch norms anew, on plain training images
    mirror: bool = False  # an image is embedded together with its mirror image
    size: int | None = None  # side in pixels at which images are judged; None: that of a full view

    def __post_init__(self) -> None:
        size = self.size
        require(size is None or 8 <= size <= LARGEST_SIDE, f"eval.size = {shown(size)} must lie {SIDES}.")
        require(self.every >= 1, f"eval.every = {self.every} must be at least 1.")
        require(0 <= self.average < 1, f"eval.average = {self.average} must lie in [0, 1).")
        hint = "eval.fresh_norms needs averaged weights. Set eval.average, to 0.999 for example."
        require(self.average > 0 or not self.fresh_norms, hint)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that decides what a run computes."""

    data: DataConfig
    split: SplitConfig
    encoder: EncoderConfig
    method: MethodConfig
    train: TrainConfig
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    strong: AugmentConfig | None = None  # how the second view is made; None: as the first
    views: tuple[ViewConfig, ...] = ()  # further ones, after these two
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        for key, value in _numbers(self, ""):
            require(math.isfinite(value), f"{key} = {value} must be a finite number.")
        self._check_views()
        first, second = self.augment.size, self.strong.size if self.strong is not None else self.augment.size
        require(first == second, f"strong.size = {second} must be augment.size = {first}: both views are of one size.")

    def _check_views(self) -> None:
        """Refuse views that the method can do nothing with."""
        name, can, count = self.method.name, self.method.views, 2 + sum(view.count for view in self.views)
        require(
            can.most is None or count <= can.most,
            f"{name} uses {_in_words(can.most)} views of an image and can do nothing with more. "
            + ("Leave views out (views=[])." if can.most == 2 else f"There are {count}: lower views.count."),
        )
        require(
            count >= can.least,
            f"{name} needs at least {_in_words(can.least)} views of an image, and there are {count}. Add some to views.",
        )
        other = [view.size for view in self.views if view.size not in (None, self.augment.size)]
        require(
            can.sizes or not other,
            f"{name} takes views of one size, and views.size = {other[:1]} is another. Leave views.size out.",
        )
        mixed = [part.section for part in (self.augment, self.strong, *self.views) if part is not None and part.mixes]
        require(
            can.mixed or not mixed,
            f"{name} cannot learn from images that are mixed with each other. Set {'/'.join(mixed)}: mixup and cutmix to 0.",
        )


def _in_words(number: int | None) -> str:
    return {1: "one", 2: "two", 3: "three"}.get(number or 0, str(number))


def _numbers(value: Any, at: str) -> Iterator[tuple[str, float]]:
    """Every floating point number in nested settings, with its dotted key."""
    if isinstance(value, float):
        yield at, value
    elif isinstance(value, tuple):
        for i, inner in enumerate(value):
            yield from _numbers(inner, f"{at}.{i}" if is_dataclass(inner) else at)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _numbers(getattr(value, f.name), f"{at}.{f.name}".lstrip("."))
