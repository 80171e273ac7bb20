import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from opencon.prototypes import ema_update, novelty_threshold, random_prototypes, seen_score
from tests.naive.prototypes import naive_ema, naive_seen_score


def unit(rows, dim, seed):
    return F.normalize(
        torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=1
    )


@given(seed=st.integers(0, 10_000), rows=st.integers(0, 30), classes=st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_update_equals_one_sample_at_a_time(seed, rows, classes):
    labels = torch.randint(-1, classes, (rows,), generator=torch.Generator().manual_seed(seed))
    prototypes, z = unit(classes, 5, seed + 1), unit(rows, 5, seed + 2)
    got = ema_update(prototypes, z, labels, momentum=0.9)
    np.testing.assert_allclose(got.numpy(), naive_ema(prototypes, z, labels.tolist(), 0.9), atol=1e-12)


def test_update_leaves_its_input_and_the_unvisited_alone():
    prototypes = unit(4, 5, 0)
    before = prototypes.clone()
    got = ema_update(prototypes, unit(3, 5, 1), torch.tensor([2, -1, 2]), momentum=0.9)
    torch.testing.assert_close(prototypes, before, rtol=0, atol=0)
    torch.testing.assert_close(got[[0, 1, 3]], before[[0, 1, 3]], rtol=0, atol=0)
    assert not torch.equal(got[2], before[2])


def test_order_of_the_samples_matters():
    """So a batch mean would be another algorithm."""
    prototypes, z, labels = unit(1, 5, 0), unit(6, 5, 1), torch.zeros(6, dtype=torch.long)
    forward = ema_update(prototypes, z, labels, momentum=0.5)
    backward = ema_update(prototypes, z.flip(0), labels, momentum=0.5)
    assert (forward - backward).abs().max() > 1e-2


def test_momentum_zero_jumps_to_the_last_sample():
    z = unit(5, 4, 3)
    got = ema_update(unit(1, 4, 0), z, torch.zeros(5, dtype=torch.long), momentum=0.0)
    torch.testing.assert_close(got[0], z[-1])


@pytest.mark.parametrize("form", ["cosine", "standardized"])
def test_seen_score_matches_the_formula(form):
    cosine = unit(12, 6, 0) @ unit(9, 6, 1).T
    got = seen_score(cosine, num_seen=4, form=form)
    np.testing.assert_allclose(got.numpy(), naive_seen_score(cosine, 4, form), atol=1e-9)


def test_seen_score_looks_at_seen_classes_only():
    cosine = torch.tensor([[0.1, 0.2, 0.9], [0.8, 0.1, 0.0]])
    assert seen_score(cosine, num_seen=2, form="cosine").tolist() == pytest.approx([0.2, 0.8])


def test_the_two_forms_order_samples_differently():
    # The second is nearer to its seen class, but just as near to all others.
    cosine = torch.tensor([[0.5, 0.0, 0.0, 0.1], [0.6, 0.55, 0.58, 0.6]])
    plain = seen_score(cosine, num_seen=1, form="cosine")
    standardized = seen_score(cosine, num_seen=1, form="standardized")
    assert plain[0] < plain[1]
    assert standardized[0] > standardized[1]


def test_equal_similarities_stay_finite():
    assert seen_score(torch.full((2, 5), 0.3), num_seen=2, form="standardized").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("percentile", [0, 10, 50, 70, 90, 100])
def test_threshold_is_numpys_percentile(percentile):
    scores = torch.rand(101, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = novelty_threshold(scores, percentile=percentile)
    assert got.item() == pytest.approx(np.percentile(scores.numpy(), 100 - percentile))


def test_seventy_percent_of_the_labeled_lie_above():
    scores = torch.arange(100, dtype=torch.float64)
    assert (scores > novelty_threshold(scores, percentile=70)).float().mean().item() == pytest.approx(0.7)


def test_random_start_is_on_the_sphere():
    norms = random_prototypes(7, 16).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(7))


def test_normalized_mean_is_the_best_prototype():
    """Lemma 4.2 and section 4.2 (a): among unit vectors the normalized mean maximizes the summed similarity."""
    z = unit(9, 6, 0)
    best = F.normalize(z.mean(dim=0), dim=0)
    value = (z @ best).sum()
    assert value.item() == pytest.approx(z.sum(dim=0).norm().item())  # Cauchy-Schwarz with equality
    others = unit(2000, 6, 1)
    assert (others @ z.T).sum(dim=1).max() < value


def test_the_moving_average_settles_near_the_normalized_mean():
    """The running estimate of the paper's Eq. 6 tends to the optimum of Lemma 4.2."""
    center = F.normalize(torch.ones(6, dtype=torch.float64), dim=0)
    z = F.normalize(
        center + 0.3 * torch.randn(4000, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1
    )
    moved = ema_update(unit(1, 6, 5), z, torch.zeros(len(z), dtype=torch.long), momentum=0.99)
    angle = math.degrees(math.acos(min(1.0, (moved[0] @ F.normalize(z.mean(dim=0), dim=0)).item())))
    assert angle < 3
