"""The settings of a run: frozen dataclasses that check themselves.

A run is described once, by a `RunConfig`, and never changed afterwards. It is built by a recipe (a Python function), read
from TOML or JSON with `from_dict`, adjusted with `--set a.b=c` through `with_settings`, and written with `to_dict`.
An unknown key, a value of the wrong type or one out of range is a `ConfigError` that names the key.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, Union

from opencon.errors import ConfigError, require
from opencon.registry import did_you_mean

C = TypeVar("C")

Protocol = Literal["orca", "gcd"]
EvaluationSet = Literal["unlabeled", "test"]
Precision = Literal["fp32", "bf16", "fp16"]
FrozenNorm = Literal["batch", "running", "measured"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images to use."""

    name: str  # a data set by name, or "folder" / "list" for your own files
    root: str | None = None  # where its files lie; None: ~/.cache/opencon
    image_size: int | None = None  # side in pixels at which photos are stored; digits and CIFAR have their own
    # Photos in files: images that take more than this (1e9 bytes) are read from their files while training; 0: always.
    memory_gb: float | None = None  # None: half of the memory of the machine or of its GPU, whichever is smaller

    def __post_init__(self) -> None:
        size, gb = self.image_size, self.memory_gb
        require(size is None or size >= 8, f"data.image_size = {size} must be at least 8 pixels.")
        require(gb is None or 0 <= gb < float("inf"), f"data.memory_gb = {gb} must be a number of GB, 0 or more.")


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Which classes have labels, and how many of their images."""

    num_seen: int  # classes that have labels: the first ones in class order
    num_classes: int | None = None  # classes to look for, seen + novel; None: as many as the data has
    labeled_ratio: float = 0.5  # chance of an image of a seen class to keep its label
    seed: int = 0  # fixes the split only, not the training

    def __post_init__(self) -> None:
        require(self.num_seen >= 1, f"split.num_seen = {self.num_seen} must be at least 1.")
        require(
            self.num_classes is None or self.num_seen < self.num_classes,
            f"split.num_seen = {self.num_seen} leaves no novel class among split.num_classes = {self.num_classes}. "
            f"Lower num_seen, or raise num_classes.",
        )
        require(
            0.0 < self.labeled_ratio < 1.0,
            f"split.labeled_ratio = {self.labeled_ratio} must lie strictly between 0 and 1: at 0 nothing is labeled, "
            f"at 1 no image of a seen class is left among the unlabeled.",
        )
        require(self.seed >= 0, f"split.seed = {self.seed} must not be negative.")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """How a view is made from an image. Probabilities are per image; the defaults are the released ones for CIFAR."""

    section: ClassVar[str] = "augment"  # in messages

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
    zoom: tuple[float, float] = (1.0, 1.0)  # scale of rotate/shift warps, uniform

    def __post_init__(self) -> None:
        at = self.section
        for name in ("flip_p", "jitter_p", "gray_p", "blur_p"):
            p = getattr(self, name)
            require(0.0 <= p <= 1.0, f"{at}.{name} = {p} must lie between 0 and 1.")
        require(self.size is None or self.size >= 8, f"{at}.size = {self.size} must be at least 8 pixels.")
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
    weights: str | None = None  # a file; None: random
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
        require(self.head_dim >= 2, f"encoder.head_dim = {self.head_dim} must be at least 2.")


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Base of every method's settings; the class variable says which method."""

    name: ClassVar[str]
    uses_labels: ClassVar[bool] = True  # False: every image is treated as unlabeled (pre-training)
    projects: ClassVar[bool] = True  # False: no projection head, the encoder's features are the embedding
    trains: ClassVar[bool] = True  # False: it has no step, and its runs have no epoch
    more_views: ClassVar[bool] = False  # True: it can use views beyond the first two, of other sizes, too


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimizer, its schedule, and how the work is done."""

    epochs: int  # one epoch: one pass over the labeled images
    batch_size: int = 512  # labeled and unlabeled images together
    labeled_share: float | None = None  # of a batch; None: in proportion, as many as there are labeled images
    lr: float = 0.02
    lr_end: float = 0.0  # where a cosine schedule ends
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    schedule: Literal["step", "cosine", "constant"] = "step"
    milestones: tuple[int, ...] = ()  # epochs at which a step schedule divides by ten
    warmup_epochs: int = 0
    precision: Precision = "fp32"  # of the encoder; losses are float32. A CPU without bfloat16 takes fp32 for bf16
    compile: bool = False  # torch.compile for encoder, losses, and views that have no kernel
    capture: bool = True  # on a GPU: record the step once as a CUDA graph and replay it
    kernels: bool = True  # on a GPU: Triton kernels for small views, a learning ResNet, prototypes (capture needs them)
    seed: int = 0
    log_every: int = 50  # steps between two checks of the loss (each makes the host wait)
    save_seconds: float = 30.0  # at most this much work is lost to a kill -9; Ctrl-C loses none but the epoch

    def __post_init__(self) -> None:
        for name in ("batch_size", "log_every"):
            require(getattr(self, name) >= 1, f"train.{name} = {getattr(self, name)} must be at least 1.")
        for name in ("epochs", "lr_end", "momentum", "weight_decay", "warmup_epochs", "seed", "save_seconds"):
            require(getattr(self, name) >= 0, f"train.{name} = {getattr(self, name)} must not be negative.")
        require(self.lr > 0, f"train.lr = {self.lr} must be above zero.")
        require(self.lr_end <= self.lr, f"train.lr_end = {self.lr_end} must not be above train.lr = {self.lr}.")
        require(self.momentum < 1, f"train.momentum = {self.momentum} must be below 1.")
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

    def __post_init__(self) -> None:
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
        require(
            not self.views or self.method.more_views,
            f"{self.method.name} uses two views of an image and can do nothing with more. Leave views out (views=[]).",
        )
        first, second = self.augment.size, self.strong.size if self.strong is not None else self.augment.size
        require(first == second, f"strong.size = {second} must be augment.size = {first}: both views are of one size.")


# --- plain data in and out --------------------------------------------------------------------------------------------


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain data, ready for JSON; a method's settings carry its name."""
    out: dict[str, Any] = {"name": config.name} if isinstance(config, MethodConfig) else {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        elif isinstance(value, tuple):
            value = [to_dict(inner) if dataclasses.is_dataclass(inner) else inner for inner in value]
        out[f.name] = value
    return out


def from_dict(cls: type[C], data: Mapping[str, Any], *, method: type[MethodConfig] | None = None, at: str = "") -> C:
    """Build a config from plain data, refusing unknown keys and wrong types.

    `method` is the settings class for the key "method", whose own "name" entry is only checked for agreement.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    data = dict(data)
    if issubclass(cls, MethodConfig):
        name = data.pop("name", cls.name)
        require(
            name == cls.name,
            f"{at}name = {name!r} does not belong to the settings of {cls.name!r}. Every method has recipes of its own: "
            f"METHOD/DATASET.",
        )
    values: dict[str, Any] = {}
    for key, value in data.items():
        require(
            key in known,
            f"unknown setting {at + key!r}.{did_you_mean(key, known)} Known here: {', '.join(sorted(known))}.",
        )
        hint = method if key == "method" and method is not None else hints[key]
        values[key] = _convert(value, hint, at + key)
    missing = [
        at + name
        for name, f in known.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    require(not missing, f"missing setting: {', '.join(missing)}.")
    return cls(**values)


def with_settings(config: C, settings: Iterable[str]) -> C:
    """Apply `a.b=c` settings to a copy. Values are read as JSON where they are JSON, else as text.

    An entry of a list of sections goes by its number: `views.0.size=16`.
    """
    data = to_dict(config)
    for setting in settings:
        key, equals, text = setting.partition("=")
        require(bool(equals) and bool(key), f"--set {setting!r} is not of the form section.key=value.")
        *sections, last = key.strip().split(".")
        holders = [name for name, inner in data.items() if isinstance(inner, dict) and last in inner]
        full = " or ".join(f"{name}.{last}" for name in holders)
        require(bool(sections) or last in data or not holders, f"--set {key}: did you mean {full}?")
        section: Any = data
        for depth, name in enumerate(sections):
            known = {str(i): inner for i, inner in enumerate(section)} if isinstance(section, list) else section
            where = ".".join(sections[: depth + 1])
            require(
                isinstance(known.get(name), (dict, list)),
                f"--set {key}: there is no section {where!r}.{did_you_mean(name, known)} "
                f"Known here: {', '.join(sorted(known)) or 'none'}.",
            )
            section = known[name]
        require(isinstance(section, dict), f"--set {key}: {'.'.join(sections)} is a list. Give all of it.")
        section[last] = _parse(text.strip())
    method = getattr(config, "method", None)
    return from_dict(type(config), data, method=type(method) if method is not None else None)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> dict[str, tuple[Any, Any]]:
    """Every leaf at which two nested configs differ: dotted key to (old value, new value)."""
    out: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(k for k in new if k not in old)]:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out.update(differences(a, b, f"{at}{key}."))
        elif a != b:
            out[f"{at}{key}"] = (a, b)
    return out


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None if text in ("None", "none") else {"True": True, "False": False}.get(text, text)


def _convert(value: Any, hint: Any, at: str) -> Any:
    """`value` as the type `hint`, or a ConfigError that names the key."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [a for a in args if a is not type(None)]
        for option in options[:-1]:
            try:
                return _convert(value, option, at)
            except ConfigError:
                continue
        return _convert(value, options[-1], at)
    if origin is Literal:
        require(value in args, f"{at} = {value!r} must be one of {', '.join(map(repr, args))}.")
        return value
    if origin is tuple:
        if isinstance(value, str):
            value = [_parse(part.strip()) for part in value.strip("()[] ").split(",") if part.strip()]
        require(isinstance(value, (list, tuple)), f"{at} = {value!r} must be a list.")
        if args[-1] is Ellipsis:
            named = dataclasses.is_dataclass(args[0])  # a list of sections: each goes by its number
            return tuple(_convert(v, args[0], f"{at}.{i}" if named else at) for i, v in enumerate(value))
        require(len(value) == len(args), f"{at} = {value!r} must have {len(args)} values.")
        return tuple(_convert(v, a, at) for v, a in zip(value, args, strict=True))
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, Mapping), f"{at} = {value!r} must be a section with settings of its own.")
        return from_dict(typing.cast("type[Any]", hint), value, at=at + ".")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise ConfigError(f"{at} = {value!r} must be {names.get(hint, hint)}.")
