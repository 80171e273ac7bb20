"""InfoNCE against its formula, and what must hold whatever the numbers."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from opencon.losses import contrastive
from opencon.losses.blocked import info_nce_within
from opencon.losses.contrastive import (
    BLOCKED_FROM,
    ContrastMasks,
    contrast_terms,
    contrast_within,
    info_nce,
    masks_within,
)
from tests.naive.losses import naive_contrast, naive_info_nce


def batch(seed, rows=10, dim=5, groups=3):
    g = torch.Generator().manual_seed(seed)
    z = F.normalize(torch.randn(rows, dim, generator=g, dtype=torch.float64), dim=1)
    member = torch.rand(rows, generator=g) < 0.7
    return z, member, torch.randint(groups, (rows,), generator=g)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("temperature", [0.07, 0.4, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_matches_the_formula(seed, temperature, reduction):
    z, member, group = batch(seed)
    got = info_nce(z, masks_within(member, group), temperature=temperature, reduction=reduction)
    want = naive_contrast(z, member, group, temperature, reduction)
    assert got.item() == pytest.approx(want, rel=1e-10)


def test_any_masks_will_do():
    z, _, _ = batch(0)
    g = torch.Generator().manual_seed(1)
    candidates = torch.rand(10, 10, generator=g) < 0.6
    candidates.fill_diagonal_(False)
    positives = candidates & (torch.rand(10, 10, generator=g) < 0.3)
    got = info_nce(z, ContrastMasks(positives, candidates), temperature=0.3)
    assert got.item() == pytest.approx(naive_info_nce(z, positives, candidates, 0.3), rel=1e-10)


def test_parallel_embeddings_give_log_of_the_candidates():
    z = F.normalize(torch.ones(8, 3, dtype=torch.float64), dim=1)
    masks = masks_within(torch.ones(8, dtype=torch.bool), torch.arange(4).repeat(2))
    assert info_nce(z, masks, temperature=0.1).item() == pytest.approx(math.log(7))


def test_two_orthogonal_pairs_in_closed_form():
    z = torch.eye(2, dtype=torch.float64).repeat(2, 1)  # views of images 0, 1, 0, 1
    masks = masks_within(torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 0, 1]))
    # positive at similarity 1, two candidates at 0: -1/t + log(e^(1/t) + 2)
    assert info_nce(z, masks, temperature=0.5).item() == pytest.approx(-2 + math.log(math.e**2 + 2))


def test_masks_leave_out_self_and_strangers():
    member = torch.tensor([True, True, False, True])
    positives, candidates = masks_within(member, torch.tensor([0, 1, 0, 0]))
    assert not candidates.diagonal().any()
    assert not candidates[2].any()
    assert not candidates[:, 2].any()
    assert positives.nonzero().tolist() == [[0, 3], [3, 0]]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_row_order_does_not_matter(seed):
    z, member, group = batch(seed)
    perm = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed + 1))
    torch.testing.assert_close(
        info_nce(z, masks_within(member, group), temperature=0.2),
        info_nce(z[perm], masks_within(member[perm], group[perm]), temperature=0.2),
    )


def test_pulling_a_positive_nearer_lowers_the_loss():
    z, member, group = batch(2)
    z.requires_grad_()
    masks = masks_within(torch.ones_like(member), group)
    before = info_nce(z, masks, temperature=0.5)
    (gradient,) = torch.autograd.grad(before, z)
    after = info_nce(F.normalize(z - 0.05 * gradient, dim=1), masks, temperature=0.5)
    assert after < before


def test_no_positive_is_zero_and_has_a_zero_gradient():
    z = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = info_nce(z, masks_within(torch.ones(4, dtype=torch.bool), torch.arange(4)), temperature=0.1)
    loss.backward()
    assert loss.item() == 0.0
    assert (z.grad == 0).all()


def test_gradient_is_the_derivative():
    z, member, group = batch(3, rows=6)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: info_nce(z, masks_within(member, group), temperature=0.3), z)


def test_sharp_temperature_stays_finite_in_float32():
    z, member, group = batch(4)
    z = z.float().requires_grad_()
    loss = info_nce(z, masks_within(torch.ones_like(member), group), temperature=0.005)
    loss.backward()
    assert loss.isfinite()
    assert z.grad.isfinite().all()


def test_loss_is_alignment_plus_uniformity():
    """Section 4.2 of the paper: L_n = L_a + L_b, anchor by anchor."""
    z, member, group = batch(5)
    masks = masks_within(member, group)
    terms = contrast_terms(z, masks, temperature=0.7)
    for i in range(len(z)):
        P, A = masks.positives[i].nonzero().flatten(), masks.candidates[i].nonzero().flatten()
        if len(P) == 0:
            assert terms.alignment[i] == terms.uniformity[i] == 0
            continue
        assert terms.alignment[i].item() == pytest.approx(-(z[i] @ z[P].T).mean().item() / 0.7)
        assert terms.uniformity[i].item() == pytest.approx((z[i] @ z[A].T / 0.7).exp().sum().log().item())
    total = (terms.alignment + terms.uniformity).sum() / terms.is_anchor.sum()
    torch.testing.assert_close(total, info_nce(z, masks, temperature=0.7))


def test_alignment_is_similarity_to_the_normalized_class_mean():
    """Lemma 4.3: up to constants per class, minimizing L_a maximizes the similarity to the normalized mean.

    Exactly: sum_{x in S(c)} L_a(x) = -(n / (n - 1)) / tau * (||m|| * sum_x x . mu* - 1), with m the mean of S(c) and
    mu* = m / ||m||.
    """
    z, _, _ = batch(6, rows=7)
    tau, n = 0.7, len(z)
    terms = contrast_terms(z, masks_within(torch.ones(n, dtype=torch.bool), torch.zeros(n)), temperature=tau)
    mean = z.mean(dim=0)
    best = mean / mean.norm()
    want = -(n / (n - 1)) / tau * (mean.norm() * (z @ best).sum() - 1)
    assert terms.alignment.sum().item() == pytest.approx(want.item())


@pytest.mark.parametrize("tau", [0.4, 50.0])
def test_the_loss_of_the_mean_classifier_bounds_the_contrastive_loss(tau):
    """Appendix D: E L_n >= (1 - gamma) / tau L*_sup, where the paper takes means over sets that hold the anchor itself.

    A loss leaves its anchor out and sums over N - 1 candidates. So the bound is higher by log(N - 1) and, for the anchor
    in its own candidates, lower by the mean of (1 - z . m) / (tau (N - 1)), with m the mean of all rows. At a high
    temperature Jensen's inequality is an equality to 1 / tau^2, and the two meet but for the anchor among its positives.
    """
    num_classes, each = 4, 60
    label = torch.arange(num_classes).repeat(each)
    g = torch.Generator().manual_seed(0)
    spread = torch.randn(len(label), 6, generator=g, dtype=torch.float64)
    z = F.normalize(2 * torch.eye(6, dtype=torch.float64)[label] + spread, dim=1)
    loss = contrast_within(z, torch.ones(len(z), dtype=torch.bool), label, temperature=tau)

    means = torch.stack([z[label == c].mean(dim=0) for c in range(num_classes)])  # the mean classifier
    apart = [means[c] @ (means[c] - means[d]) for c in range(num_classes) for d in range(num_classes) if c != d]
    gamma, supervised = 1 / num_classes, -torch.stack(apart).mean()
    alone = (1 - z @ z.mean(dim=0)).mean() / (tau * (len(z) - 1))
    bound = math.log(len(z) - 1) + (1 - gamma) / tau * supervised - alone
    assert supervised < 0
    assert loss >= bound
    if tau > 1:
        own = (1 - (z * means[label]).sum(dim=1)).mean() / (tau * (each - 1))
        assert (loss - bound - own).abs() < 1 / tau**2


@pytest.mark.parametrize("rows", [BLOCKED_FROM["cpu"] - 1, BLOCKED_FROM["cpu"]])
def test_the_form_taken_by_size_does_not_change_the_loss(rows, monkeypatch):
    z, member, group = batch(7, rows=rows, groups=9)
    calls = []

    def spy(*args, **kwargs):
        calls.append(1)
        return info_nce_within(*args, **kwargs)

    monkeypatch.setattr(contrastive, "info_nce_within", spy)
    got = contrast_within(z, member, group, temperature=0.2, reduction="sum")
    want = info_nce(z, masks_within(member, group), temperature=0.2, reduction="sum")
    torch.testing.assert_close(got, want)
    assert len(calls) == (rows >= BLOCKED_FROM["cpu"])
