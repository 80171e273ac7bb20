import math

import pytest
import torch

from opencon.losses.balance import kl_to_prior
from tests.naive.losses import naive_kl


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
