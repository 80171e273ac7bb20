"""Recipes against the numbers of the paper and of the released code."""

import dataclasses
import json

import pytest
import torch

from opencon.config import differences, to_dict, with_settings
from opencon.data.benchmarks import DATASETS
from opencon.data.layouts import class_order
from opencon.encoders import ENCODERS
from opencon.encoders.vit import VisionTransformer
from opencon.errors import ConfigError
from opencon.experiments.recipes import SETTINGS, get_recipe, read_config, recipe_names, run_config
from opencon.methods import METHODS, OpenConConfig, SimCLRConfig

VARIANTS = ("released", "paper")
OWN = "photos"  # the recipe for images of one's own, of which the papers say nothing
ONE_OF_EACH_KIND = {SETTINGS[name].kind: name for name in SETTINGS.names() if name != OWN}.values()


def data_sets(method):
    """Those on which the recipe of a method has something of its own: a kind of images, or settings for this data set.

    OpenCon, whose settings are the same within a kind, is tried on all.
    """
    published = {name for name in SETTINGS.names() if name != OWN}
    return published if method == "opencon" else {*ONE_OF_EACH_KIND, *METHODS[method].build.special}


def between_variants(name):
    """What the paper variant changes: dotted key to (released, paper)."""
    return differences(*(to_dict(get_recipe(name, variant=variant)) for variant in VARIANTS))


PAPER_METHOD = {
    f"method.{f.name}": (getattr(OpenConConfig(), f.name), getattr(OpenConConfig.paper(), f.name))
    for f in dataclasses.fields(OpenConConfig)
    if getattr(OpenConConfig(), f.name) != getattr(OpenConConfig.paper(), f.name)
}


@pytest.fixture(scope="module", params=METHODS.names())
def recipes(request):
    """Recipes of one method, in both variants: (method, data set, variant) to its configuration."""
    cases = [(request.param, data, variant) for data in data_sets(request.param) for variant in VARIANTS]
    return {case: get_recipe("/".join(case[:2]), variant=case[2]) for case in cases}


class TestEveryMethod:
    def test_its_recipes_name_things_that_exist(self, recipes):
        for case, config in recipes.items():
            method, data, _ = case
            assert isinstance(config.method, METHODS[method].config), case
            assert config.method.name == method, case
            assert config.data.name in DATASETS, case
            assert config.data.name == data.removesuffix("_gcd"), case
            assert config.encoder.name in ENCODERS, case

    def test_its_recipes_survive_json(self, recipes):
        for case, config in recipes.items():
            assert run_config(json.loads(json.dumps(to_dict(config)))) == config, case

    def test_it_normalizes_with_the_statistics_of_the_data(self, recipes):
        for case, config in recipes.items():
            info = DATASETS[config.data.name].info
            assert (config.encoder.mean, config.encoder.std) == (info.mean, info.std), case

    def test_it_is_measured_as_the_published_tables_are(self, recipes):
        for case, config in recipes.items():
            assert (config.eval.protocol, config.eval.on) == (SETTINGS[case[1]].protocol, "unlabeled"), case
            assert (config.split.labeled_ratio, config.split.seed, config.train.seed) == (0.5, 0, 0), case
            assert config.split.num_classes is None, case  # as many as the data has


def test_every_method_on_every_data_set_is_a_recipe():
    names = recipe_names()
    assert len(names) == len(set(names)) == len(METHODS.names()) * len(SETTINGS.names())
    for name in names:
        method, data = name.split("/")
        assert method in METHODS, name
        assert data in SETTINGS, name


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_seen"), [("cifar10", 5), ("cifar100", 50)])
def test_cifar_as_released(name, num_seen):
    config = get_recipe(name)
    assert config.data.name == name
    assert config.split.num_seen == num_seen
    assert (config.encoder.name, config.encoder.train_from) == ("resnet18_cifar", "layer4")
    # Ours; the released code takes statistics of each batch, and one view after the other.
    assert (config.encoder.frozen_norm, config.encoder.views_together) == ("measured", True)
    assert (config.encoder.head_hidden, config.encoder.head_dim) == (None, 128)  # Linear(f, f), ReLU, Linear(f, 128)
    train = config.train
    assert (train.epochs, train.milestones, train.schedule) == (200, (100, 150), "step")
    assert (train.batch_size, train.lr, train.momentum, train.weight_decay) == (512, 0.02, 0.9, 5e-4)
    augment = config.augment
    assert (augment.size, augment.crop_scale, augment.flip_p) == (None, (0.2, 1.0), 0.5)
    assert (augment.jitter, augment.jitter_p) == ((0.4, 0.4, 0.4, 0.1), 0.8)
    assert (augment.gray_p, augment.blur_p) == (0.2, 0.0)
    assert (augment.rotate, augment.shift, augment.zoom) == (0.0, 0.0, (1.0, 1.0))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("name", "temperature_unlabeled"), [("cifar100", 0.4), ("imagenet100", 0.6)])
def test_weights_and_temperatures(name, variant, temperature_unlabeled):
    """Those of table 9 and appendix I, where paper and code agree."""
    m = get_recipe(name, variant=variant).method
    assert (m.weight_novel, m.weight_labeled, m.weight_unlabeled, m.weight_prior) == (0.1, 0.2, 1.0, 0.05)
    assert (m.temperature_novel, m.temperature_labeled) == (0.7, 0.1)
    assert m.temperature_unlabeled == temperature_unlabeled
    assert (m.momentum, m.percentile, m.labeled_loss) == (0.9, 70.0, "labeled")
    assert m.ramp_epochs == (100 if variant == "released" else 0)


@pytest.mark.parametrize(("name", "num_seen"), [("imagenet100", 50), ("imagenet1k", 500)])
def test_imagenet_as_released(name, num_seen):
    config = get_recipe(name)
    assert (config.data.name, config.split.num_seen, config.eval.protocol) == (name, num_seen, "orca")
    assert (config.encoder.name, config.encoder.train_from, config.encoder.head_dim) == ("resnet50", "layer4", 128)
    assert (config.data.image_size, config.augment.size, config.augment.crop_scale) == (256, 224, (0.2, 1.0))
    train = config.train
    assert (train.epochs, train.milestones, train.batch_size) == (120, (60, 90), 512)
    assert (train.lr, train.momentum, train.weight_decay) == (0.01, 0.9, 1e-4)


@pytest.mark.parametrize("name", ["cub200", "stanford_cars", "herbarium19", "fgvc_aircraft"])
def test_fine_grained_as_in_gcd(name):
    config = get_recipe(name)
    assert config.split.num_seen == len(class_order(name).seen)
    assert (config.encoder.name, config.encoder.train_from) == ("vit_b16", "last_block")
    assert (config.data.image_size, config.augment.size) == (256, 224)
    assert config.eval.protocol == "gcd"
    assert (config.train.batch_size, config.train.epochs) == (128, 200)


@pytest.mark.parametrize("method", METHODS.names())
def test_every_method_has_a_recipe_for_photos_of_ones_own(method):
    config = get_recipe(f"{method}/{OWN}")
    assert (config.data.name, config.split.num_seen, config.encoder.weights) == ("folder", None, "installed")
    entry = ENCODERS["efficientnet_lite0"]
    assert (config.encoder.mean, config.encoder.std) == (entry.mean, entry.std)  # as its weights expect
    with torch.device("meta"):
        ENCODERS[config.encoder.name].build(3, 224).freeze(config.encoder.train_from)  # a stage that it has


def test_the_title_tells_seen_and_novel_classes():
    for name in set(SETTINGS.names()) - {"digits", OWN}:  # the digits are called 0-4 and 5-9
        setting, num_classes = SETTINGS[name], DATASETS[SETTINGS[name].data.name].info.num_classes
        assert f"{setting.num_seen} seen / {num_classes - setting.num_seen} novel" in setting.title


@pytest.mark.parametrize(("name", "num_seen"), [("cifar10_gcd", 5), ("cifar100_gcd", 80)])
def test_cifar_as_in_gcd_differs_in_classes_and_protocol_alone(name, num_seen):
    config = to_dict(get_recipe(name))
    changed = differences(to_dict(get_recipe(name.removesuffix("_gcd"))), config)
    assert changed.keys() <= {"split.num_seen", "split.rule", "eval.protocol"}
    assert (config["split"]["num_seen"], config["eval"]["protocol"]) == (num_seen, "gcd")


def test_the_last_block_is_a_stage_of_the_encoder():
    encoder = VisionTransformer(width=16, depth=2, num_heads=2, image_size=32)
    assert encoder.stages[encoder.named_starts()["last_block"]] == "block1"


@pytest.mark.parametrize(("name", "num_seen"), [("simclr/cifar10", 5), ("simclr/cifar100", 50)])
def test_simclr_for_small_images(name, num_seen):
    config = get_recipe(name)
    assert config.split.num_seen == num_seen
    assert (config.encoder.name, config.encoder.train_from) == ("resnet18_cifar", "all")
    assert config.method.temperature == 0.1
    train = config.train
    assert (train.epochs, train.batch_size, train.lr, train.schedule) == (500, 512, 0.4, "cosine")
    assert (train.momentum, train.weight_decay) == (0.9, 1e-4)


def test_digits_stay_small():
    for name in ("opencon/digits", "simclr/digits"):
        config = get_recipe(name)
        assert (config.data.name, config.split.num_seen, config.encoder.name) == ("digits", 5, "convnet")
        assert config.augment.flip_p == 0  # a mirrored 2 is no 2
        assert not config.train.compile


# --- the variants -----------------------------------------------------------------------------------------------------


def test_the_paper_differs_in_eight_settings_of_the_method():
    assert len(PAPER_METHOD) == 8


def test_what_the_paper_says_otherwise_on_cifar():
    assert between_variants("cifar100") == PAPER_METHOD | {
        "train.weight_decay": (5e-4, 1e-4),
        "augment.crop_scale": ([0.2, 1.0], [0.08, 1.0]),
    }


def test_what_the_paper_says_otherwise_on_imagenet():
    assert between_variants("imagenet100") == PAPER_METHOD | {
        "train.lr": (0.01, 0.02),
        "augment.crop_scale": ([0.2, 1.0], [0.08, 1.0]),
    }


def test_the_digits_keep_the_mean():
    """A sum over the batch would drown the other losses at this batch size; the rest follows the paper."""
    changed = between_variants("digits")
    assert changed.keys() == PAPER_METHOD.keys() - {"method.novel_reduction"}


def test_pre_training_has_one_variant():
    for name in ("simclr/cifar10", "simclr/cifar100", "simclr/digits"):
        assert between_variants(name) == {}


# --- names ------------------------------------------------------------------------------------------------------------


def test_the_method_may_be_left_out():
    assert get_recipe("cifar100") == get_recipe("opencon/cifar100")
    assert get_recipe("cifar100", variant="paper") == get_recipe("opencon/cifar100", variant="paper")
    assert get_recipe("cifar100", method="simclr") == get_recipe("simclr/cifar100")
    assert get_recipe("opencon/cifar100", method="simclr").method.name == "opencon"  # what is said counts


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"unknown recipe 'cifar1000'. Did you mean 'cifar100'\?"):
        get_recipe("cifar1000")
    with pytest.raises(ConfigError, match="--variant 'Paper' must be 'released' or 'paper'"):
        get_recipe("cifar100", variant="Paper")


# --- files ------------------------------------------------------------------------------------------------------------


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_changes_the_given_keys_only(tmp_path):
    text = """
    recipe = "cifar100"
    variant = "paper"
    [data]
    root = "/data"
    [train]
    lr = 1
    milestones = [10, 20]
    [method]
    percentile = 50.0
    """
    want = with_settings(
        get_recipe("cifar100", variant="paper"),
        ["data.root=/data", "train.lr=1", "train.milestones=[10,20]", "method.percentile=50"],
    )
    assert read_config(write(tmp_path, text)) == want


def test_a_file_that_only_names_a_recipe_is_the_recipe(tmp_path):
    assert read_config(write(tmp_path, 'recipe = "simclr/digits"')) == get_recipe("simclr/digits")


def test_a_file_without_a_recipe_takes_the_defaults(tmp_path):
    text = """
    data = { name = "digits" }
    split = { num_seen = 3 }
    encoder = { name = "convnet" }
    train = { epochs = 5 }
    method = { name = "simclr", temperature = 0.5 }
    """
    config = read_config(write(tmp_path, text))
    assert config.method == METHODS["simclr"].config(temperature=0.5)
    assert (config.train.epochs, config.train.batch_size) == (5, 512)
    assert (config.split.num_seen, config.split.labeled_ratio) == (3, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"method\.name is missing or not text"),
        ('method = "opencon"', r"method\.name is missing or not text"),
        ('method = { name = "opencon" }', "missing setting: data, split, encoder, train"),
        ('recipe = "digits"\nmethod = 3', r"method\.name is missing or not text"),
        ("[method]\nname = 3", r"method\.name is missing or not text"),
        ('recipe = "digits"\ntrain = 3', "train = 3 must be a section"),
        ('recipe = "digits"\n[train]\nmilestones = 3', "train.milestones = 3 must be a list"),
        ("recipe = 3", "recipe = 3 must be the name of a recipe"),
        ("recipe = 'fotos'", "Did you mean 'photos'.*Images of your own: photos, with --labeled"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_config(write(tmp_path, text))


def test_a_run_s_own_config_can_be_given_back(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(to_dict(get_recipe("digits"))))
    assert read_config(file) == get_recipe("digits")
    file.write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_config(file)


def test_another_method_on_a_recipe_starts_from_its_own_settings(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('recipe = "digits"\n[method]\nname = "simclr"\ntemperature = 0.3\n')
    config = read_config(file)
    assert config.method == SimCLRConfig(temperature=0.3)
    assert config.data == get_recipe("digits").data


def test_a_file_that_names_a_method_starts_from_its_recipe(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('recipe = "digits"\n[method]\nname = "orca"\n')
    assert read_config(file) == get_recipe("orca/digits")
    file.write_text('recipe = "opencon/digits"\n[method]\nname = "orca"\n')
    with pytest.raises(ConfigError):
        read_config(file)


def test_a_weak_view_is_not_changed_without_the_strong_one(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('recipe = "fixmatch/digits"\n[augment]\nflip_p = 0.5\n')
    with pytest.raises(ConfigError, match=r"fixmatch makes its second view by \[strong\]"):
        read_config(file)
    file.write_text('recipe = "fixmatch/digits"\n[augment]\nflip_p = 0.5\n[strong]\nflip_p = 0.4\n')
    config = read_config(file)
    assert (config.augment.flip_p, config.strong.flip_p) == (0.5, 0.4)


def test_a_file_lists_further_views(tmp_path):
    file = tmp_path / "c.toml"
    crops = "[[views]]\nsize = 18\ncount = 2\n[[views]]\nsize = 16\n"
    file.write_text(f'recipe = "concord/cifar100"\n{crops}')
    assert [(view.size, view.count) for view in read_config(file).views] == [(18, 2), (16, 1)]
    file.write_text(f'recipe = "cifar100"\n{crops}')
    with pytest.raises(ConfigError, match="opencon uses two views"):
        read_config(file)


def test_methods_and_data_sets_are_not_mixed_up():
    with pytest.raises(ConfigError, match=r"orca is a method\. Add a data set: orca/digits, for example"):
        get_recipe("orca")
    with pytest.raises(ConfigError, match="Did you mean 'orca/digits'"):
        get_recipe("digits/orca")


@pytest.mark.parametrize(
    ("name", "key", "value", "elsewhere"),
    [
        ("simgcd/cifar10", "method.weight_entropy", 1.0, 4.0),
        ("simgcd/stanford_cars", "method.weight_entropy", 1.0, None),
        ("simgcd/cub200", "method.weight_entropy", 2.0, None),
        ("simgcd/cifar100_gcd", "train.epochs", 63, 100),
        ("gcd/cifar100_gcd", "train.epochs", 125, 200),
        ("rankstats/cifar10", "method.ramp_epochs", 50, 150),
        ("rankstats_plus/cifar10_gcd", "method.weight_consistency", 5.0, 50.0),
        ("fixmatch/cifar10", "train.weight_decay", 5e-4, 1e-3),
    ],
)
def test_what_authors_do_on_one_data_set_only(name, key, value, elsewhere):
    def setting(recipe):
        section, field = key.split(".")
        return getattr(getattr(get_recipe(recipe), section), field)

    assert setting(name) == value
    if elsewhere is not None:
        assert setting(f"{name.split('/')[0]}/cifar100") == elsewhere


def test_special_settings_are_of_data_sets_that_exist():
    for name in METHODS.names():
        assert set(METHODS[name].build.special) <= set(SETTINGS.names()), name
