"""Pairwise losses against loops and closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from opencon.losses.pairwise import nearest_other, next_of_class, pair_agreement, pair_bce, same_top_k
from tests.naive.pairwise import naive_agreement, naive_nearest, naive_next, naive_pair_bce, naive_top


def some_probabilities(seed, num=7, classes=4):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(num, classes, generator=g, dtype=torch.float64).softmax(dim=1) for _ in range(2))


@pytest.mark.parametrize("seed", range(3))
def test_pair_bce_equals_the_loop(seed):
    p, q = some_probabilities(seed)
    same = torch.rand(7, 7, generator=torch.Generator().manual_seed(seed)) < 0.4  # not symmetric: i is p's, j is q's
    assert pair_bce(p, q, same).item() == pytest.approx(naive_pair_bce(p, q, same), rel=1e-12)


def test_pair_bce_of_uniform_predictions():
    p = torch.full((5, 4), 0.25, dtype=torch.float64)
    everyone = torch.ones(5, 5, dtype=torch.bool)
    assert pair_bce(p, p, everyone).item() == pytest.approx(math.log(4), rel=1e-6)
    assert pair_bce(p, p, ~everyone).item() == pytest.approx(math.log(4 / 3), rel=1e-6)


def test_pair_bce_is_finite_where_a_pair_is_all_wrong():
    """And where rounding has put a chance above one."""
    p = torch.tensor([[1.0, 0.0], [0.0, 1.0]]) * 1.000001
    p.requires_grad_()
    wrong = ~torch.eye(2, dtype=torch.bool)
    loss = pair_bce(p, p, wrong)
    assert loss.item() == pytest.approx(-math.log(1e-7), rel=1e-2)
    loss.backward()
    assert p.grad.isfinite().all()


def test_pair_bce_gradient():
    p, q = some_probabilities(0, num=3)
    same = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 1, 1]], dtype=torch.bool)
    assert torch.autograd.gradcheck(lambda a, b: pair_bce(a, b, same), (p.requires_grad_(), q.requires_grad_()))


def test_pair_bce_pulls_and_pushes():
    """A pair that belongs together gains from more agreement, another pair loses."""
    p, q = torch.tensor([[0.8, 0.2]]), torch.tensor([[0.6, 0.4]])
    closer = torch.tensor([[0.7, 0.3]])
    yes = torch.tensor([[True]])
    assert pair_bce(p, closer, yes) < pair_bce(p, q, yes)
    assert pair_bce(p, closer, ~yes) > pair_bce(p, q, ~yes)


@pytest.mark.parametrize("seed", range(3))
def test_agreement_equals_the_loop(seed):
    p, q = some_probabilities(seed)
    assert pair_agreement(p.log(), q.log()).item() == pytest.approx(naive_agreement(p, q), rel=1e-12)


def test_agreement_of_the_sure_and_the_undecided():
    logits = torch.tensor([[300.0, 0.0], [0.0, 300.0]])
    sure, undecided = logits.log_softmax(dim=1), torch.zeros(2, 2).log_softmax(dim=1)
    assert pair_agreement(sure, sure).item() == 0.0
    assert pair_agreement(undecided, undecided).item() == pytest.approx(math.log(2))
    # No way to agree: p . q underflows in float32, its logarithm does not.
    assert pair_agreement(sure, sure.flip(0)).item() == pytest.approx(300 - math.log(2))


def test_agreement_gradient():
    p, q = (x.log().requires_grad_() for x in some_probabilities(1, num=3))
    assert torch.autograd.gradcheck(pair_agreement, (p, q))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_equals_the_sets(k):
    features = torch.rand(40, 5, generator=torch.Generator().manual_seed(k))
    tops = [naive_top(row, k) for row in features]
    want = torch.tensor([[a == b for b in tops] for a in tops])
    assert want.sum() > 40  # not only each with itself
    assert torch.equal(same_top_k(features, k), want)


def test_order_within_the_top_and_all_below_it_do_not_matter():
    features = torch.tensor([[9.0, 8.0, 1.0, 2.0], [5.0, 7.0, 4.0, 3.0], [9.0, 1.0, 8.0, 2.0]])
    assert same_top_k(features, 2).tolist() == [[True, True, False], [True, True, False], [False, False, True]]


def test_nearest_other_equals_the_loop():
    z = F.normalize(torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1)
    assert nearest_other(z).tolist() == [naive_nearest(z, i) for i in range(12)]


def test_the_nearest_other_of_twins_is_the_twin():
    z = torch.eye(3)[[0, 1, 2, 1]]
    assert nearest_other(z)[[1, 3]].tolist() == [3, 1]


def test_next_of_class_by_hand():
    assert next_of_class(torch.tensor([0, 1, 0, 0, 2, 1])).tolist() == [2, 5, 3, 0, 4, 1]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_next_of_class_is_another_image_of_it_and_nobody_is_left_out(labels):
    partner = next_of_class(torch.tensor(labels)).tolist()
    assert partner == [naive_next(labels, i) for i in range(len(labels))]
    assert sorted(partner) == list(range(len(labels)))
    assert all(j != i or labels.count(labels[i]) == 1 for i, j in enumerate(partner))
