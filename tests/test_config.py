import json
from dataclasses import replace

import pytest

from opencon.config import (
    AugmentConfig,
    DataConfig,
    EncoderConfig,
    EvalConfig,
    RunConfig,
    SplitConfig,
    TrainConfig,
    ViewConfig,
    differences,
    from_dict,
    to_dict,
    with_settings,
)
from opencon.errors import ConfigError
from opencon.methods import METHODS, ConcordConfig, OpenConConfig


def config():
    return RunConfig(
        data=DataConfig(name="digits"),
        split=SplitConfig(num_seen=5, num_classes=10),
        encoder=EncoderConfig(name="convnet"),
        method=OpenConConfig(),
        train=TrainConfig(epochs=3),
    )


def test_round_trip_through_json():
    before = config()
    text = json.dumps(to_dict(before))
    assert from_dict(RunConfig, json.loads(text), method=OpenConConfig) == before


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_config_round_trips(name):
    settings = METHODS[name].config()
    assert from_dict(type(settings), to_dict(settings)) == settings
    assert to_dict(settings)["name"] == name


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("train.lr=0.5", lambda c: c.train.lr == 0.5),
        ("train.lr=1", lambda c: c.train.lr == 1.0 and isinstance(c.train.lr, float)),
        ("train.milestones=[1,2]", lambda c: c.train.milestones == (1, 2)),
        ("train.milestones=1,2", lambda c: c.train.milestones == (1, 2)),
        ("train.compile=true", lambda c: c.train.compile is True),
        ("train.compile=False", lambda c: c.train.compile is False),
        ("encoder.weights=a b.pt", lambda c: c.encoder.weights == "a b.pt"),
        ("encoder.weights=none", lambda c: c.encoder.weights is None),
        ("augment.crop_scale=None", lambda c: c.augment.crop_scale is None),
        ("augment.crop_scale=0.1,1", lambda c: c.augment.crop_scale == (0.1, 1.0)),
        ("method.percentile=50", lambda c: c.method.percentile == 50.0),
        ("method.prior=uniform", lambda c: c.method.prior == "uniform"),
        ("method.prior=[1,2,3]", lambda c: c.method.prior == (1.0, 2.0, 3.0)),
        ("data.root=a=b", lambda c: c.data.root == "a=b"),
    ],
)
def test_set_reads_values_by_type(setting, read):
    assert read(with_settings(config(), [setting]))


def test_set_changes_nothing_else():
    changed = differences(to_dict(config()), to_dict(with_settings(config(), ["train.lr=0.5"])))
    assert changed == {"train.lr": (0.02, 0.5)}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.lrr=1", r"unknown setting 'train.lrr'. Did you mean 'lr'\?"),
        ("trian.lr=1", r"there is no section 'trian'. Did you mean 'train'\?"),
        ("lr=1", "--set lr: did you mean train.lr"),
        ("train.lr", "not of the form"),
        ("train.lr=fast", "train.lr = 'fast' must be a number"),
        ("train.epochs=2.5", "train.epochs = 2.5 must be a whole number"),
        ("train.epochs=true", "train.epochs = True must be a whole number"),
        ("train.compile=1", "train.compile = 1 must be true or false"),
        ("train.precision=fp8", "must be one of 'fp32', 'bf16', 'fp16'"),
        ("augment.jitter=1,2", "must have 4 values"),
        ("method.name=gcd", "does not belong to the settings of 'opencon'"),
        ("train=5", "must be a section"),
        ("method.prior=flat", r"method.prior = 'flat'|must be a number|must be a list"),
    ],
)
def test_set_refuses_what_does_not_fit(setting, message):
    with pytest.raises(ConfigError, match=message):
        with_settings(config(), [setting])


# Every rule of every section, with a value that breaks it.
BAD = [
    (DataConfig, {"name": "x", "image_size": 4}, "data.image_size = 4"),
    (SplitConfig, {"num_seen": 0}, "split.num_seen = 0"),
    (SplitConfig, {"num_seen": 5, "num_classes": 5}, "split.num_seen = 5 leaves no novel class"),
    (SplitConfig, {"num_seen": 5, "labeled_ratio": 1.0}, "split.labeled_ratio = 1.0"),
    (SplitConfig, {"num_seen": 5, "labeled_ratio": 0.0}, "split.labeled_ratio = 0.0"),
    (SplitConfig, {"num_seen": 5, "seed": -1}, "split.seed = -1"),
    (AugmentConfig, {"size": 4}, "augment.size = 4"),
    (AugmentConfig, {"flip_p": 1.5}, "augment.flip_p = 1.5"),
    (AugmentConfig, {"crop_scale": (0.0, 1.0)}, "augment.crop_scale"),
    (AugmentConfig, {"crop_scale": (0.5, 0.2)}, "augment.crop_scale"),
    (AugmentConfig, {"crop_ratio": (2.0, 1.0)}, "augment.crop_ratio"),
    (AugmentConfig, {"blur_sigma": (0.0, 1.0)}, "augment.blur_sigma"),
    (AugmentConfig, {"zoom": (2.0, 1.0)}, "augment.zoom"),
    (AugmentConfig, {"jitter": (0.4, 0.4, 0.4, 0.6)}, "augment.jitter"),
    (AugmentConfig, {"jitter": (-0.4, 0.4, 0.4, 0.1)}, "augment.jitter"),
    (AugmentConfig, {"rotate": 200.0}, "augment.rotate = 200.0"),
    (AugmentConfig, {"shift": 1.0}, "augment.shift = 1.0"),
    (ViewConfig, {"count": 0}, "views.count = 0 must be at least 1"),
    (ViewConfig, {"size": 4}, "views.size = 4"),
    (EncoderConfig, {"name": "x", "mean": (0.5, 0.5)}, "encoder.mean has 2 values, std 1"),
    (EncoderConfig, {"name": "x", "std": (0.0,)}, "encoder.std"),
    (EncoderConfig, {"name": "x", "head_dim": 1}, "encoder.head_dim = 1"),
    (TrainConfig, {"epochs": -1}, "train.epochs = -1"),
    (TrainConfig, {"epochs": 1, "lr": 0.1, "lr_end": 0.2}, "train.lr_end = 0.2 must not be above train.lr = 0.1"),
    (TrainConfig, {"epochs": 1, "lr_end": -0.1}, "train.lr_end = -0.1"),
    (TrainConfig, {"epochs": 1, "momentum": 0.0, "nesterov": True}, "train.nesterov needs train.momentum"),
    (TrainConfig, {"epochs": 1, "labeled_share": 0.0}, "train.labeled_share = 0.0"),
    (TrainConfig, {"epochs": 1, "labeled_share": 1.0}, "train.labeled_share = 1.0"),
    (TrainConfig, {"epochs": 1, "batch_size": 0}, "train.batch_size = 0"),
    (TrainConfig, {"epochs": 1, "log_every": 0}, "train.log_every = 0"),
    (TrainConfig, {"epochs": 1, "lr": 0.0}, "train.lr = 0.0"),
    (TrainConfig, {"epochs": 1, "momentum": 1.0}, "train.momentum = 1.0"),
    (TrainConfig, {"epochs": 1, "weight_decay": -1.0}, "train.weight_decay = -1.0"),
    (TrainConfig, {"epochs": 1, "warmup_epochs": -1}, "train.warmup_epochs = -1"),
    (TrainConfig, {"epochs": 1, "milestones": (5, 2)}, "train.milestones"),
    (TrainConfig, {"epochs": 1, "seed": -1}, "train.seed = -1"),
    (EvalConfig, {"every": 0}, "eval.every = 0"),
    (EvalConfig, {"size": 7}, "eval.size = 7 must lie between 8 and"),
]


@pytest.mark.parametrize(("section", "values", "message"), BAD, ids=[m for _, _, m in BAD])
def test_bad_values_are_refused(section, values, message):
    with pytest.raises(ConfigError, match=message):
        section(**values)


def test_missing_keys_are_named():
    data = to_dict(config())
    del data["train"]["epochs"]
    with pytest.raises(ConfigError, match=r"missing setting: train.epochs"):
        from_dict(RunConfig, data, method=OpenConConfig)


def test_differences_name_both_sides():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == {"a.c": (2, 3), "d": (None, 4)}


def test_both_views_are_of_one_size():
    config = RunConfig(
        data=DataConfig(name="digits"),
        split=SplitConfig(num_seen=5),
        encoder=EncoderConfig(name="convnet"),
        method=OpenConConfig(),
        train=TrainConfig(epochs=3),
        augment=AugmentConfig(size=32),
        strong=AugmentConfig(size=32, flip_p=0),
    )
    assert with_settings(config, ["strong.flip_p=0.2"]).strong.flip_p == 0.2
    assert from_dict(RunConfig, to_dict(config), method=OpenConConfig) == config
    with pytest.raises(ConfigError, match=r"strong\.size = 64 must be augment\.size = 32"):
        with_settings(config, ["strong.size=64"])


def many_views():
    """Two full views and three kinds of further ones."""
    views = (ViewConfig(size=20, crop_scale=(0.2, 0.6), count=4), ViewConfig(count=2), ViewConfig(size=16))
    return replace(config(), method=ConcordConfig(), views=views)


def test_further_views_are_a_list_that_survives_files():
    before = many_views()
    data = json.loads(json.dumps(to_dict(before)))
    assert [(view["size"], view["count"]) for view in data["views"]] == [(20, 4), (None, 2), (16, 1)]
    assert from_dict(RunConfig, data, method=ConcordConfig) == before
    del data["views"]  # a run from before there were any
    assert from_dict(RunConfig, data, method=ConcordConfig).views == ()


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("views.0.size=18", lambda views: [view.size for view in views] == [18, None, 16]),
        ("views.1.crop_scale=0.5,1", lambda views: views[1].crop_scale == (0.5, 1.0) and views[0].crop_scale[1] == 0.6),
        ('views=[{"size": 24, "count": 3}]', lambda views: views == (ViewConfig(size=24, count=3),)),
        ("views=[]", lambda views: views == ()),
    ],
)
def test_set_reaches_further_views_by_their_number(setting, read):
    assert read(with_settings(many_views(), [setting]).views)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("views.3.size=18", r"there is no section 'views\.3'.* Known here: 0, 1, 2"),
        ("views.0.sise=18", r"unknown setting 'views\.0\.sise'\. Did you mean 'size'\?"),
        ("views.0.count=two", r"views\.0\.count = 'two' must be a whole number"),
        ("views.0=5", r"views is a list\. Give all of it"),
        ("views=5", r"views = 5 must be a list"),
        ("views=[5]", r"views\.0 = 5 must be a section"),
    ],
)
def test_set_refuses_further_views_that_do_not_fit(setting, message):
    with pytest.raises(ConfigError, match=message):
        with_settings(many_views(), [setting])


def test_a_method_of_two_views_refuses_more():
    with pytest.raises(ConfigError, match=r"opencon uses two views of an image and can do nothing with more"):
        with_settings(config(), ['views=[{"size": 20}]'])


def test_a_setting_without_its_section_is_told_its_full_name():
    with pytest.raises(ConfigError, match=r"--set epochs: did you mean train\.epochs\?"):
        with_settings(config(), ["epochs=3"])
    with pytest.raises(ConfigError, match=r"data\.name or encoder\.name or method\.name"):
        with_settings(config(), ["name=3"])
