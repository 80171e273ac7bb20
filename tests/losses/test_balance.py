import math

import pytest
import torch

from opencon.losses.balance import kl_to_prior, sinkhorn
from tests.naive.losses import naive_kl
from tests.naive.uno import naive_sinkhorn


@pytest.mark.parametrize("seed", range(4))
def test_matches_the_formula(seed):
    g = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(6, 5, generator=g, dtype=torch.float64)
    prior = torch.rand(5, generator=g, dtype=torch.float64) + 0.1
    prior = prior / prior.sum()
    assert kl_to_prior(logits, prior).item() == pytest.approx(naive_kl(logits, prior))


def test_zero_exactly_at_the_prior():
    prior = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert kl_to_prior(prior.log()[None], prior).item() == pytest.approx(0.0, abs=1e-12)
    assert kl_to_prior(prior.flip(0).log()[None], prior) > 0.1


def test_collapse_on_one_class_costs_log_of_the_classes():
    logits = torch.zeros(3, 4, dtype=torch.float64)
    logits[:, 0] = 100.0
    assert kl_to_prior(logits, torch.full((4,), 0.25, dtype=torch.float64)).item() == pytest.approx(
        math.log(4), abs=1e-3
    )


def test_it_is_the_mean_prediction_that_counts():
    """Confident but balanced predictions cost nothing."""
    logits = 50 * torch.eye(4, dtype=torch.float64)
    assert kl_to_prior(logits, torch.full((4,), 0.25, dtype=torch.float64)).item() == pytest.approx(0.0, abs=1e-6)


def test_gradient_is_the_derivative():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    prior = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_to_prior(x, prior), logits)


def cosines(*shape, seed=0):
    return 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1


def uniform(num_classes):
    return torch.full((num_classes,), 1 / num_classes, dtype=torch.float64)


@pytest.mark.parametrize("rounds", [1, 3, 10])
@pytest.mark.parametrize("epsilon", [0.05, 0.5])
@pytest.mark.parametrize("shares", [(0.25, 0.25, 0.25, 0.25), (0.1, 0.2, 0.3, 0.4)])
def test_sinkhorn_equals_the_divisions(rounds, epsilon, shares):
    logits, shares = cosines(7, 4), torch.tensor(shares, dtype=torch.float64)
    want = torch.tensor(naive_sinkhorn(logits, shares, epsilon, rounds), dtype=torch.float64)
    torch.testing.assert_close(sinkhorn(logits, shares, epsilon=epsilon, rounds=rounds), want)


def test_sinkhorn_gives_images_one_and_classes_their_shares():
    shares = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
    few, many = (sinkhorn(cosines(40, 4), shares, epsilon=0.1, rounds=rounds) for rounds in (3, 200))
    for q in (few, many):
        torch.testing.assert_close(q.sum(dim=1), torch.ones(40, dtype=torch.float64))
    torch.testing.assert_close(many.sum(dim=0), 40 * shares)
    assert (few.sum(dim=0) - 40 * shares).abs().max() > 1e-3  # three rounds are not the limit


def test_sinkhorn_leading_indices_are_problems_of_their_own():
    logits = cosines(2, 3, 6, 4)
    got = sinkhorn(logits, uniform(4), epsilon=0.1, rounds=3)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(got[i, j], sinkhorn(logits[i, j], uniform(4), epsilon=0.1, rounds=3))


def test_sinkhorn_adding_to_all_logits_changes_nothing():
    logits = cosines(6, 4)
    base = sinkhorn(logits, uniform(4), epsilon=0.1, rounds=3)
    torch.testing.assert_close(sinkhorn(logits + 5, uniform(4), epsilon=0.1, rounds=3), base)
    by_class = logits + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(sinkhorn(by_class, uniform(4), epsilon=0.1, rounds=3), base)


def test_sinkhorn_breaks_a_collapse():
    """All images prefer class 0; those that prefer it least are given to class 1."""
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.8], [1.0, 0.9]], dtype=torch.float64)
    assert sinkhorn(logits, uniform(2), epsilon=0.05, rounds=3).argmax(dim=1).tolist() == [0, 0, 1, 1]


def test_sinkhorn_stays_finite_where_the_divisions_fail():
    """At this epsilon exp overflows, and most of what does not underflows: a class nobody likes has the sum zero."""
    logits = cosines(8, 5).float()
    logits[:, 4] = -1000.0
    q = sinkhorn(logits, uniform(5).float(), epsilon=1e-3, rounds=3)
    assert q.isfinite().all()
    torch.testing.assert_close(q.sum(dim=1), torch.ones(8))
    assert q[:, 4].sum() > 1.0


def test_sinkhorn_has_no_gradient():
    logits = cosines(4, 3).requires_grad_()
    assert not sinkhorn(logits, uniform(3), epsilon=0.1, rounds=3).requires_grad
