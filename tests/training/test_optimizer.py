import copy
import io
import math

import pytest
import torch
from torch import nn

from opencon.config import GroupConfig, TrainConfig
from opencon.errors import ConfigError
from opencon.training.optimizer import (
    OPTIMIZERS,
    SCHEDULES,
    ScheduleEntry,
    build_optimizer,
    learning_rate,
    restore,
    set_learning_rate,
    unread,
)


def test_step_schedule_divides_by_ten_at_the_milestones():
    config = TrainConfig(epochs=200, lr=0.02, milestones=(100, 150))
    got = [learning_rate(config, e) for e in (0, 99, 100, 149, 150, 199)]
    assert got == pytest.approx([0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002])


def test_cosine_falls_from_lr_toward_zero():
    config = TrainConfig(epochs=10, lr=1.0, schedule="cosine")
    rates = [learning_rate(config, e) for e in range(10)]
    assert rates[0] == 1.0
    assert rates[5] == pytest.approx(0.5)
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.05


def test_cosine_ends_where_it_is_told():
    config = TrainConfig(epochs=10, lr=1.0, lr_end=0.2, schedule="cosine")
    assert learning_rate(config, 0) == 1.0
    assert learning_rate(config, 5) == pytest.approx(0.6)
    assert learning_rate(config, 10) == pytest.approx(0.2)


@pytest.mark.parametrize("nesterov", [False, True])
def test_nesterov_is_handed_on(nesterov):
    optimizer = build_optimizer(nn.Linear(2, 2), TrainConfig(epochs=1, nesterov=nesterov))
    assert optimizer.param_groups[0]["nesterov"] == nesterov


def test_warm_up_climbs_to_lr():
    config = TrainConfig(epochs=10, lr=1.0, schedule="constant", warmup_epochs=4)
    assert [learning_rate(config, e) for e in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_only_what_learns_is_optimized():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    optimizer = build_optimizer(net, TrainConfig(epochs=1, weight_decay=0.5, momentum=0.8))
    (group,) = optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in net[1].parameters()}
    assert (group["weight_decay"], group["momentum"]) == (0.5, 0.8)


def test_nothing_to_learn_is_an_error():
    net = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing learns"):
        build_optimizer(net, TrainConfig(epochs=1))


def test_weight_decay_and_momentum_reach_the_update():
    """One SGD step by hand: v = m v + g + wd w; w -= lr v."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 2.0)
    optimizer = build_optimizer(net, TrainConfig(epochs=1, lr=0.1, momentum=0.5, weight_decay=0.1))
    for _ in range(2):
        net.weight.grad = torch.ones(1, 1)
        optimizer.step()
    # v1 = 1.2, w1 = 1.88; v2 = 0.6 + 1 + 0.188 = 1.788, w2 = 1.7012
    assert net.weight.item() == pytest.approx(1.7012)


def test_restoring_brings_momentum_back_and_leaves_the_rate_where_it_lives():
    """A recorded step reads its rate from one tensor: loading must not put another in its place."""
    config = TrainConfig(epochs=1, lr=0.1)
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    old = build_optimizer(first, config)
    first(torch.ones(1, 2)).sum().backward()
    old.step()
    new = build_optimizer(second, config)
    place = torch.tensor(0.1)
    new.param_groups[0].update(lr=place, fused=True)
    restore(new, old.state_dict())
    assert new.param_groups[0]["lr"] is place
    assert new.param_groups[0]["fused"] is True
    set_learning_rate(new, 0.05)
    assert float(place) == pytest.approx(0.05)
    buffers = [new.state[p]["momentum_buffer"] for p in second.parameters()]
    torch.testing.assert_close(buffers, [old.state[p]["momentum_buffer"] for p in first.parameters()])


# --- by step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["step", "cosine", "constant"])
def test_by_step_is_by_epoch_where_an_epoch_begins(schedule):
    by_epoch, by_step = (
        TrainConfig(epochs=10, lr=1.0, lr_end=0.1, schedule=schedule, milestones=(4,), per_step=p)
        for p in (False, True)
    )
    for epoch in range(10):
        assert learning_rate(by_step, epoch, 0, 7) == pytest.approx(learning_rate(by_epoch, epoch, 3, 7))


def test_a_cosine_by_step_is_one_smooth_curve():
    config = TrainConfig(epochs=2, lr=1.0, schedule="cosine", per_step=True)
    rates = [learning_rate(config, e, i, 5) for e in range(2) for i in range(5)]
    assert rates == pytest.approx([0.5 * (1 + math.cos(math.pi * t / 10)) for t in range(10)])


def test_warm_up_by_step_counts_steps():
    config = TrainConfig(epochs=4, lr=1.0, schedule="constant", warmup_epochs=1.5, per_step=True)
    rates = [learning_rate(config, e, i, 4) for e in range(2) for i in range(4)]
    assert rates == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 1])
    with pytest.raises(
        ConfigError, match=r"train\.warmup_epochs = 1\.5: a part of an epoch needs train\.per_step=true"
    ):
        TrainConfig(epochs=4, warmup_epochs=1.5)


def test_a_schedule_of_one_s_own_goes_by_its_name(monkeypatch):
    monkeypatch.setattr(SCHEDULES, "_entries", dict(SCHEDULES._entries))
    SCHEDULES.add("line", ScheduleEntry(lambda config, epoch: config.lr * (1 - epoch / config.epochs), "to zero"))
    config = TrainConfig(epochs=4, lr=2.0, schedule="line", per_step=True)
    assert [learning_rate(config, 1, i, 2) for i in (0, 1)] == pytest.approx([1.5, 1.25])
    with pytest.raises(ConfigError, match=r"unknown schedule 'lin'. Did you mean 'line'\?"):
        learning_rate(TrainConfig(epochs=4, schedule="lin"), 0)


# --- groups -----------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Named as the parts of a method are."""

    def __init__(self):
        super().__init__()
        self.embedder = nn.Module()
        self.embedder.encoder = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4))
        self.embedder.head = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
        self.classifier = nn.Linear(2, 3, bias=False)


def by_name(module, optimizer):
    names = {id(p): name for name, p in module.named_parameters()}
    return {
        names[id(p)]: (round(float(group["lr"]), 6), group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }


def test_rules_say_who_decays_and_how_fast_heads_learn():
    net = Small()
    rules = (
        GroupConfig(match=("head",), lr=1.0),
        GroupConfig(match=("norms", "biases"), weight_decay=0.0),
        GroupConfig(match=("classifier.*",), lr=2.0),
    )
    found = by_name(net, build_optimizer(net, TrainConfig(epochs=1, lr=0.1, weight_decay=0.5, groups=rules)))
    assert found == {
        "embedder.encoder.0.weight": (0.1, 0.5),
        "embedder.encoder.0.bias": (0.1, 0.0),
        "embedder.encoder.1.weight": (0.1, 0.0),
        "embedder.encoder.1.bias": (0.1, 0.0),
        "embedder.encoder.2.weight": (0.1, 0.5),
        "embedder.encoder.2.bias": (0.1, 0.0),
        "embedder.head.0.weight": (1.0, 0.5),
        "embedder.head.0.bias": (1.0, 0.0),
        "embedder.head.1.weight": (1.0, 0.0),
        "embedder.head.1.bias": (1.0, 0.0),
        "classifier.weight": (2.0, 0.5),
    }


def test_without_rules_there_is_one_group_in_the_order_of_the_module():
    net = Small()
    (group,) = build_optimizer(net, TrainConfig(epochs=1)).param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in net.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_the_schedule_keeps_the_ratio_of_every_group(name):
    net, rules = Small(), (GroupConfig(match=("head",), lr=1.0),)
    optimizer = build_optimizer(net, TrainConfig(epochs=1, lr=0.1, optimizer=name, groups=rules))
    for rate in (0.05, torch.tensor(0.05)):
        set_learning_rate(optimizer, rate)
        assert [float(g["lr"]) for g in optimizer.param_groups] == pytest.approx([0.05, 0.5])


def test_a_rule_that_fits_nothing_is_an_error():
    rule = GroupConfig(match=("encoder.*",), lr=1.0)
    with pytest.raises(ConfigError, match=r"'encoder\.\*' fits no parameter that learns\. Known: norms, biases, head"):
        build_optimizer(Small(), TrainConfig(epochs=1, groups=(rule,)))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": (), "lr": 1.0}, "fits no parameter"),
        ({"match": ("head",)}, "changes nothing"),
        ({"match": ("head",), "lr": -1.0}, r"train\.groups\.lr = -1\.0"),
    ],
)
def test_a_rule_that_says_nothing_is_refused(rule, message):
    with pytest.raises(ConfigError, match=message):
        GroupConfig(**rule)


# --- optimizers -------------------------------------------------------------------------------------------------------


def one_weight(value=2.0, **settings):
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, value)
    return net, build_optimizer(net, TrainConfig(epochs=1, lr=0.1, **settings))


def test_adamw_is_its_definition():
    """Two steps by hand: the decay stands beside Adam's step, not in its gradient."""
    net, optimizer = one_weight(optimizer="adamw", weight_decay=0.5, betas=(0.8, 0.9))
    w, m, v = 2.0, 0.0, 0.0
    for t, g in enumerate((3.0, -1.0), start=1):
        net.weight.grad = torch.full((1, 1), g)
        optimizer.step()
        w -= 0.1 * 0.5 * w
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w -= 0.1 * (m / (1 - 0.8**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-8)
    assert net.weight.item() == pytest.approx(w, rel=1e-5)


def naive_lars(w, slopes, *, lr, momentum, decay, trust, adapts):
    v = [0.0] * len(w)
    for g in slopes:
        w_norm, g_norm = (math.sqrt(sum(x * x for x in values)) for values in (w, g))
        local = trust * w_norm / (g_norm + decay * w_norm) if adapts and w_norm > 0 and g_norm > 0 else 1.0
        v = [momentum * vi + lr * local * (gi + decay * wi) for vi, gi, wi in zip(v, g, w, strict=True)]
        w = [wi - vi for wi, vi in zip(w, v, strict=True)]
    return w


def test_lars_is_its_definition():
    net = nn.Linear(3, 2)
    start = {name: p.detach().flatten().tolist() for name, p in net.named_parameters()}
    rng = torch.Generator().manual_seed(0)
    slopes = {name: [torch.randn(p.shape, generator=rng) for _ in range(3)] for name, p in net.named_parameters()}
    how = {"lr": 0.3, "momentum": 0.8, "trust": 0.02}
    optimizer = build_optimizer(net, TrainConfig(epochs=1, optimizer="lars", weight_decay=0.1, **how))
    for i in range(3):
        for name, p in net.named_parameters():
            p.grad = slopes[name][i].clone()
        optimizer.step()
    for name, p in net.named_parameters():
        flat = [g.flatten().tolist() for g in slopes[name]]
        want = naive_lars(start[name], flat, decay=0.1, adapts=name == "weight", **how)
        assert p.detach().flatten().tolist() == pytest.approx(want, rel=1e-5)


def test_lars_takes_plain_steps_where_a_norm_is_zero():
    net, optimizer = one_weight(0.0, optimizer="lars", momentum=0.0)
    net.weight.grad = torch.full((1, 1), 3.0)
    optimizer.step()
    assert net.weight.item() == pytest.approx(-0.3)
    net.weight.grad.zero_()
    optimizer.step()
    assert net.weight.item() == pytest.approx(-0.3 * (1 - 0.1 * 5e-4))


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_a_restored_optimizer_goes_on_as_if_nothing_had_been(name):
    config = TrainConfig(epochs=1, lr=0.1, optimizer=name, groups=(GroupConfig(match=("biases",), weight_decay=0.0),))
    rng = torch.Generator().manual_seed(0)
    slopes = [[torch.randn(1, 3, generator=rng), torch.randn(1, generator=rng)] for _ in range(4)]

    def go_on(net, optimizer, some):
        for pair in some:
            for p, g in zip(net.parameters(), pair, strict=True):
                p.grad = g.clone()
            optimizer.step()

    whole = nn.Linear(3, 1)
    part = copy.deepcopy(whole)
    go_on(whole, build_optimizer(whole, config), slopes)
    first = build_optimizer(part, config)
    go_on(part, first, slopes[:2])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = build_optimizer(part, config)
    places = [group["lr"] for group in second.param_groups]
    restore(second, torch.load(file, weights_only=True))
    assert all(group["lr"] is place for group, place in zip(second.param_groups, places, strict=True))
    go_on(part, second, slopes[2:])
    assert all(torch.equal(a, b) for a, b in zip(part.parameters(), whole.parameters(), strict=True))


def test_an_unknown_optimizer_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"unknown optimizer 'adam'. Did you mean 'adamw'\?"):
        build_optimizer(nn.Linear(1, 1), TrainConfig(epochs=1, optimizer="adam"))


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"optimizer": "sgd", "momentum": 0.5, "nesterov": True}, []),
        ({"optimizer": "sgd", "betas": (0.9, 0.95), "trust": 0.01}, ["train.betas", "train.trust"]),
        ({"optimizer": "adamw", "momentum": 0.5, "betas": (0.9, 0.95)}, ["train.momentum"]),
        ({"optimizer": "lars", "momentum": 0.5, "trust": 0.01, "nesterov": True}, ["train.nesterov"]),
        ({"schedule": "cosine", "milestones": (3,)}, ["train.milestones"]),
        ({"optimizer": "mine", "trust": 0.5}, []),  # it may read anything
        ({"optimizer": "adamw"}, []),
    ],
)
def test_settings_that_nobody_reads_are_known(settings, idle):
    assert unread(TrainConfig(epochs=1, **settings)) == idle
