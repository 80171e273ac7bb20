"""UNO+'s step against loops, its state, and its prediction."""

import copy

import pytest
import torch
import torch.nn.functional as F

from opencon.errors import ConfigError
from opencon.losses.balance import sinkhorn
from opencon.methods import UNO, Epoch, FeatureBank, Task, UNOConfig
from opencon.methods.uno import ClusterHeads
from opencon.runtime import seeded
from tests.methods.toys import TASK, ExactEmbedder, toy_batch
from tests.naive.uno import naive_head, naive_head_losses

SMALL = {"num_heads": 2, "hidden": 4, "dim": 3, "overcluster": 2}


def build(seed=0, task=TASK, **settings):
    with seeded(seed):
        return UNO(UNOConfig(**{**SMALL, **settings}), task, ExactEmbedder()).double()


def views_of(method, batch):
    with torch.no_grad():
        x = method.embed(torch.cat(batch.views))
    return x.view(len(batch.views), len(batch.labels), -1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3, "epsilon": 0.2, "rounds": 1},
        {"num_heads": 3, "overcluster": 3, "rounds": 5},
        {"num_heads": 1, "overcluster": 1},
        {"prior": "unlabeled"},
    ],
)
@pytest.mark.parametrize("views", [2, 3])
def test_step_equals_the_definitions(settings, views):
    method, batch = build(**settings), toy_batch(views=views)
    c, rows, labels = method.config, views_of(method, batch), batch.labels.tolist()
    S, novel = TASK.num_seen, TASK.num_classes - TASK.num_seen
    seen_share = 1 - TASK.labeled_ratio if c.prior == "unlabeled" else 1.0
    want = {}
    for name, heads, per_class in (("heads", method.heads, 1), ("over", method.over, c.overcluster)):
        each = 1.0 / per_class if c.prior == "unlabeled" else 1.0
        shares = [seen_share] * S + [each] * (novel * per_class)
        shares = [s / sum(shares) for s in shares]
        want[name] = naive_head_losses(heads, method.seen, rows, labels, shares, c)
    out = method.step(batch)
    mean = {name: sum(losses) / len(losses) for name, losses in want.items()}
    assert out.loss.item() == pytest.approx((mean["heads"] + mean["over"]) / 2, rel=1e-6)
    assert out.logs["loss_heads"].item() == pytest.approx(mean["heads"], rel=1e-6)
    assert out.logs["loss_over"].item() == pytest.approx(mean["over"], rel=1e-6)
    assert out.logs["loss_best_head"].item() == pytest.approx(min(want["heads"]), rel=1e-6)
    assert out.carry[0].tolist() == pytest.approx(want["heads"], rel=1e-6)


def test_heads_side_by_side_are_heads_on_their_own():
    with seeded(0):
        heads = ClusterHeads(6, 4, torch.full((6,), 1 / 6), UNOConfig(**SMALL)).double()
    x = F.normalize(torch.randn(7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1)
    got = heads(x)
    assert got.shape == (2, 7, 4)
    for h in range(2):
        torch.testing.assert_close(got[h], torch.tensor(naive_head(heads, h, x), dtype=torch.float64))
    assert not torch.allclose(got[0], got[1])


def test_no_gradient_comes_through_the_soft_labels(monkeypatch):
    """With the soft labels put in as constants the gradient is the same."""
    method, batch, kept = build(), toy_batch(), []

    def keeping(*args, **settings):
        kept.append(sinkhorn(*args, **settings).detach().clone())
        return kept[-1]

    monkeypatch.setattr("opencon.methods.uno.sinkhorn", keeping)
    method.step(batch)
    fixed = iter(kept)
    monkeypatch.setattr("opencon.methods.uno.sinkhorn", lambda *args, **settings: next(fixed))
    method.step(batch).loss.backward()
    want, method.seen.grad = method.seen.grad, None
    monkeypatch.undo()
    method.step(batch).loss.backward()
    torch.testing.assert_close(method.seen.grad, want)


def test_perfectly_balanced_and_certain_images_cost_almost_nothing():
    """Every image on the prototype of its class, each class equally often: labels and soft labels are one-hot."""
    task = Task(num_seen=2, num_classes=4, labeled_ratio=0.5, num_images=40)
    method = build(task=task, dim=2)
    logits = torch.eye(4, dtype=torch.float64).repeat(3, 1)[None, None].expand(2, 2, -1, -1)  # (H, V, 12, C)
    batch = toy_batch(num_labeled=4, num_unlabeled=8)
    batch.labels[:4] = torch.arange(4)  # classes 2 and 3 as labels, for the sake of the count
    shares = torch.full((4,), 0.25, dtype=torch.float64)
    loss = method._swapped(logits, shares, batch)
    torch.testing.assert_close(loss, torch.full((2,), 3 * 2.718281828**-10, dtype=torch.float64), rtol=2e-3, atol=0)


def test_prototypes_return_to_the_sphere_and_losses_add_up():
    method, batch = build(), toy_batch()
    with torch.no_grad():
        for p in (method.seen, method.heads.prototypes, method.over.prototypes):
            p.mul_(3.0)
    directions = F.normalize(method.heads.prototypes.detach(), dim=2)
    out = method.step(batch)
    method.after_step(*out.carry)
    for p in (method.seen, method.heads.prototypes, method.over.prototypes):
        torch.testing.assert_close(p.norm(dim=-1), torch.ones_like(p[..., 0]))
    torch.testing.assert_close(method.heads.prototypes.detach(), directions)
    torch.testing.assert_close(method.head_loss, out.carry[0])
    method.after_step(*out.carry)
    torch.testing.assert_close(method.head_loss, 2 * out.carry[0])
    method.before_epoch(Epoch(1, 10, features=lambda: None))
    assert method.head_loss.tolist() == [0.0, 0.0]


def test_assign_takes_the_head_with_the_lowest_loss():
    method, batch = build(), toy_batch()
    method.step(batch)  # moves the running statistics away from 0 and 1
    z = views_of(method, batch)[0]
    bank = FeatureBank(z, batch.labels)
    frozen = copy.deepcopy(method).eval()
    for best in (0, 1):
        method.head_loss.copy_(torch.tensor([3.0, 3.0]).index_fill(0, torch.tensor(best), 2.0))
        before = method.heads.norm.running_mean.clone()
        got = method.assign(bank)
        want = torch.cat([z @ frozen.seen.T, frozen.heads(z)[best]], dim=1) / method.config.temperature
        torch.testing.assert_close(got.p, want.softmax(dim=1))
        torch.testing.assert_close(got.seen_logits, want[:, : TASK.num_seen])
        assert torch.equal(got.classes, want.argmax(dim=1))
        assert torch.equal(method.heads.norm.running_mean, before)
        assert method.heads.training


def test_many_rows_are_assigned_block_by_block(monkeypatch):
    method, batch = build(), toy_batch()
    bank = FeatureBank(views_of(method, batch)[0], batch.labels)
    want = method.assign(bank).p
    monkeypatch.setattr("opencon.methods.uno.ROWS_AT_ONCE", 5)
    torch.testing.assert_close(method.assign(bank).p, want)


def test_over_clustering_has_more_prototypes():
    method = build(num_heads=3, overcluster=4, dim=5)
    assert method.heads.prototypes.shape == (3, 3, 5)
    assert method.over.prototypes.shape == (3, 12, 5)
    assert method.seen.shape == (2, 6)


def test_shares():
    uniform, unlabeled = build(prior="uniform"), build()
    torch.testing.assert_close(uniform.heads.shares, torch.full((5,), 1 / 5, dtype=torch.float64))
    torch.testing.assert_close(uniform.over.shares, torch.full((8,), 1 / 8, dtype=torch.float64))
    want = torch.tensor([0.6, 0.6, 1, 1, 1], dtype=torch.float64) / 4.2
    torch.testing.assert_close(unlabeled.heads.shares, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(unlabeled.over.shares[:2], want[:2], rtol=1e-6, atol=0)
    torch.testing.assert_close(unlabeled.over.shares[2:], want[2:].repeat(2) / 2, rtol=1e-6, atol=0)


def test_one_view_is_refused():
    with pytest.raises(AssertionError, match="second view"):
        build().step(toy_batch(views=1))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", 0.0, "above zero"),
        ("epsilon", -0.1, "above zero"),
        ("num_heads", 0, "at least 1"),
        ("overcluster", 0, "at least 1"),
        ("hidden", 0, "at least 1"),
        ("rounds", 0, "at least 1"),
        ("dim", 1, "at least 2"),
    ],
)
def test_bad_settings_are_refused(key, value, message):
    with pytest.raises(ConfigError, match=f"method.{key} = .*{message}"):
        UNOConfig(**{key: value})
