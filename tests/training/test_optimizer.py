import pytest
import torch
from torch import nn

from opencon.config import TrainConfig
from opencon.errors import ConfigError
from opencon.training.optimizer import build_optimizer, learning_rate, restore, set_learning_rate


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
