"""Recipes: a paper's experiment as a function that returns a full RunConfig.

A name is METHOD/DATASET. A method brings a schedule for every kind of images, a data set its classes and its encoder.
The method may be left out when it is OpenCon. The variant is `released` (the settings behind the published numbers) or
`paper` (the text of the paper where it differs).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from opencon.config import (
    DataConfig,
    EncoderConfig,
    EvalConfig,
    FrozenNorm,
    Protocol,
    RunConfig,
    SplitConfig,
    from_dict,
    to_dict,
    with_settings,
)
from opencon.data.benchmarks import DATASETS
from opencon.encoders import ENCODERS, INSTALLED
from opencon.errors import ConfigError, require
from opencon.files import parse_json, read_file
from opencon.methods import METHODS, Kind, Method, Variant
from opencon.registry import Registry, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Setting:
    """A data set as the papers use it: which classes are seen, which encoder, which protocol."""

    title: str
    kind: Kind  # of images: picks a method's schedule
    data: DataConfig
    num_seen: int | None  # None: as the labels of the files say
    encoder: str
    train_from: str = "all"  # first stage that learns
    protocol: Protocol = "orca"
    weights: str | None = None


SETTINGS: Registry[Setting] = Registry("data set with recipes")
SETTINGS.add(
    "digits",  # ours: from scratch on a CPU
    Setting("scikit-learn's digits, 0-4 seen, 5-9 novel", "digits", DataConfig(name="digits"), 5, "convnet"),
)
SETTINGS.add(  # OpenCon, Table 8
    "cifar10",
    Setting("CIFAR-10, 5 seen / 5 novel", "cifar", DataConfig(name="cifar10"), 5, "resnet18_cifar", "layer4"),
)
SETTINGS.add(  # OpenCon, Table 2
    "cifar100",
    Setting("CIFAR-100, 50 seen / 50 novel", "cifar", DataConfig(name="cifar100"), 50, "resnet18_cifar", "layer4"),
)
SETTINGS.add(  # GCD, Table 1
    "cifar10_gcd",
    Setting(
        "CIFAR-10, 5 seen / 5 novel, as in GCD",
        "cifar",
        DataConfig(name="cifar10"),
        5,
        "resnet18_cifar",
        "layer4",
        "gcd",
    ),
)
SETTINGS.add(  # GCD, Table 1
    "cifar100_gcd",
    Setting(
        "CIFAR-100, 80 seen / 20 novel, as in GCD",
        "cifar",
        DataConfig(name="cifar100"),
        80,
        "resnet18_cifar",
        "layer4",
        "gcd",
    ),
)


def photos(name: str) -> DataConfig:
    """Photos stored at 256 pixels, for views of 224: the usual sizes for ImageNet."""
    return DataConfig(name=name, image_size=256)


IMAGENET = partial(Setting, kind="imagenet", encoder="resnet50", train_from="layer4")
SETTINGS.add(  # OpenCon, Table 2
    "imagenet100", IMAGENET("ImageNet-100, 50 seen / 50 novel", data=photos("imagenet100"), num_seen=50)
)
SETTINGS.add(  # OpenCon, appendix "Performance on ImageNet-1k", which does not say which 500
    "imagenet1k", IMAGENET("ImageNet-1k, 500 seen / 500 novel", data=photos("imagenet1k"), num_seen=500)
)
# GCD, Table 1 and section 4.1: ViT-B/16 from DINO's weights, of which the last block learns. OpenCon's appendix on
# fine-grained data sets has the first three; Aircraft belongs to the Semantic Shift Benchmark, as CUB and Cars do.
FINE_GRAINED = partial(Setting, kind="fine_grained", encoder="vit_b16", train_from="last_block", protocol="gcd")
SETTINGS.add("cub200", FINE_GRAINED("CUB-200, 100 seen / 100 novel", data=photos("cub200"), num_seen=100))
SETTINGS.add(
    "stanford_cars", FINE_GRAINED("Stanford Cars, 98 seen / 98 novel", data=photos("stanford_cars"), num_seen=98)
)
SETTINGS.add("herbarium19", FINE_GRAINED("Herbarium19, 341 seen / 342 novel", data=photos("herbarium19"), num_seen=341))
SETTINGS.add(
    "fgvc_aircraft", FINE_GRAINED("FGVC-Aircraft, 50 seen / 50 novel", data=photos("fgvc_aircraft"), num_seen=50)
)


SETTINGS.add(  # ours: the encoder that `opencon discover` has; its stage "last" is only a 1x1 convolution
    "photos",
    Setting(
        "your own photos (--labeled, --unlabeled)",
        "imagenet",
        photos("folder"),
        None,
        "efficientnet_lite0",
        "stage7",
        "gcd",
        INSTALLED,
    ),
)


def make_recipe(method: str, name: str, variant: Variant) -> RunConfig:
    """The schedule of a method on a data set."""
    return _made(METHODS[method].build, SETTINGS[name], name, variant)


@cache  # by the class of the method: another plugin may bring the same name
def _made(build: type[Method[Any]], setting: Setting, name: str, variant: Variant) -> RunConfig:
    schedule = build.schedule(setting.kind, variant)
    info: Any = DATASETS[setting.data.name].info
    if setting.weights == INSTALLED:  # images are normalized as those weights expect
        info = ENCODERS[setting.encoder]
    # We measure the statistics of the frozen part once, which takes a third less time; released code takes each batch's own.
    norm: FrozenNorm = "batch" if setting.train_from == "all" else "measured"
    encoder = EncoderConfig(
        name=setting.encoder,
        weights=setting.weights,
        train_from=setting.train_from,
        frozen_norm=norm,
        mean=info.mean,
        std=info.std,
    )
    config = RunConfig(
        data=setting.data,
        split=SplitConfig(num_seen=setting.num_seen, rule="exact" if setting.protocol == "gcd" else "coin"),
        encoder=replace(encoder, **schedule.encoder),
        augment=schedule.augment,
        strong=schedule.strong,
        views=schedule.views,
        method=schedule.method,
        train=schedule.train,
        eval=EvalConfig(protocol=setting.protocol, every=schedule.eval_every, **schedule.eval),
    )
    return with_settings(config, build.special.get(name, ()))


def get_recipe(name: str, *, variant: str = "released", method: str = "opencon") -> RunConfig:
    """The RunConfig of METHOD/DATASET; `cifar100` is short for `opencon/cifar100`."""
    require(variant in ("released", "paper"), f"--variant {variant!r} must be 'released' or 'paper'.")
    before, slash, after = name.partition("/")
    method, data = (before, after) if slash else (method, name)
    if not slash and name in METHODS:
        raise ConfigError(f"{name} is a method. Add a data set: {name}/digits, for example; see `opencon list data`.")
    if slash and method in SETTINGS and data in METHODS:
        raise ConfigError(f"unknown recipe {name!r}. Did you mean '{data}/{method}'?")
    METHODS[method]  # raises with a hint
    if data not in SETTINGS:
        own = " Images of your own: photos, with --labeled and --unlabeled (docs/quickstart.md)."
        hint = did_you_mean(data, SETTINGS.names())
        raise ConfigError(f"unknown recipe {name!r}.{hint} Data sets with recipes: {', '.join(SETTINGS.names())}.{own}")
    return make_recipe(method, data, "paper" if variant == "paper" else "released")


def recipe_names() -> list[str]:
    """Every METHOD/DATASET."""
    return [f"{method}/{data}" for method in METHODS.names() for data in SETTINGS.names()]


def run_config(data: Mapping[str, Any]) -> RunConfig:
    """A RunConfig from plain data (a run's config.json, or a file); method.name picks the method's settings."""
    method = data.get("method")
    named = isinstance(method, Mapping) and isinstance(method.get("name"), str)
    require(named, "method.name is missing or not text: it says which method's settings these are.")
    return from_dict(RunConfig, data, method=METHODS[method["name"]].config)  # type: ignore[index]


def start_config(recipe: str | Path | RunConfig, variant: str | None, files: Mapping[str, str]) -> RunConfig:
    """The configuration that settings are then applied to.

    Args:
        recipe: a name, a TOML or JSON file, or a configuration.
        variant: of a recipe by name; None: "released".
        files: images of your own, as `data` names them: root (those with labels), unlabeled, truth, test. With them the
            labels say which classes are seen, unless names of classes do.
    """
    brings_labels = "root" in files or "unlabeled" in files
    require(
        not brings_labels or "unlabeled" in files,
        "labeled images alone leave nothing to discover. Give the others, too, as unlabeled (--unlabeled).",
    )
    is_file = isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith((".toml", ".json")))
    require(
        variant is None or (isinstance(recipe, str) and not is_file),
        'a variant belongs to a recipe. In a configuration file, write: variant = "paper"',
    )
    if isinstance(recipe, RunConfig):
        config = recipe
    elif is_file:
        config = read_config(Path(recipe), brings_labels=brings_labels)
    else:
        config = get_recipe(str(recipe), variant=variant or "released")
        has_two = variant != "paper" or config != get_recipe(str(recipe))
        require(
            has_two, f"{config.method.name} has one variant, which follows its released code. Leave the variant out."
        )
    if brings_labels:
        config = replace(config if is_file else seen_by_labels(config), data=replace(config.data, name="folder"))
    return replace(config, data=replace(config.data, **files)) if files else config  # type: ignore[arg-type]


def seen_by_labels(config: RunConfig) -> RunConfig:
    """The same configuration for images that bring their labels: these say which classes are seen, unless it names some."""
    return config if config.split.seen_classes else replace(config, split=replace(config.split, num_seen=None))


def read_config(path: Path, *, brings_labels: bool = False) -> RunConfig:
    """A RunConfig from a TOML or JSON file. `recipe = "cifar100"` at its top starts from a recipe and changes some keys.

    With `brings_labels` it is for images that bring their labels: the recipe's number of seen classes does not count.
    """
    try:
        text = read_file(path).decode("utf-8").replace("\r\n", "\n")
        data = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as err:
        raise ConfigError(f"cannot read the configuration {path} ({err.strerror}).") from err
    except (ValueError, RecursionError) as err:  # every way in which text is no TOML or JSON
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path} is not valid {kind}: {err}.") from err
    require(isinstance(data, dict), f"{path} must hold sections with settings.")
    recipe, variant = data.pop("recipe", None), data.pop("variant", "released")
    if recipe is None:
        return run_config(data)
    require(isinstance(recipe, str), f"recipe = {recipe!r} must be the name of a recipe.")
    method = data.get("method", {})
    name = method.get("name") if isinstance(method, Mapping) else None
    base = get_recipe(recipe, variant=variant)
    if "/" not in recipe and isinstance(name, str):  # a data set's recipe is that of the method the file names
        base = get_recipe(recipe, variant=variant, method=name)
    require(
        base.strong is None or "augment" not in data or "strong" in data,
        f"{base.method.name} makes its second view by [strong]. The file changes [augment], the first one: give both.",
    )
    return run_config(_merged(to_dict(seen_by_labels(base) if brings_labels else base), data))


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in change.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], value) if both else value
    return out
