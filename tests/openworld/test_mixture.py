import numpy as np
import pytest
import torch
import torch.nn.functional as F

from opencon.openworld.mixture import EXTRA, SHRINKAGE, fit_gaussians, fit_mixture
from tests.naive import mixture as naive


def clouds(sizes, *, dim=6, distance=6.0, seed=0):
    """Round clouds of the given sizes around the axes; rows (M, D) and their cloud (M,)."""
    g = torch.Generator().manual_seed(seed)
    which = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return distance * torch.eye(len(sizes), dim)[which] + torch.randn(len(which), dim, generator=g), which


def unlabeled(rows):
    return torch.full((len(rows),), -1)


# --- Gaussians --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_gaussians_follow_the_formula(seed):
    z, which = clouds([9, 6, 12], dim=4, distance=1.5, seed=seed)
    q = F.one_hot(which, 3).double().numpy()
    for _ in range(3):
        q = naive.gaussian_round(z.double().numpy(), q, SHRINKAGE, EXTRA)
    _, got = fit_gaussians(z, which, unlabeled(z), num_seen=0, rounds=3)
    assert got.tolist() == np.argmax(q, axis=1).tolist()


def test_whitening_makes_classes_balls():
    z, which = clouds([400, 400, 400])
    stretch = torch.diag(torch.tensor([5.0, 1, 1, 0.2, 1, 1])) @ torch.linalg.qr(torch.randn(6, 6)).Q
    whitening, got = fit_gaussians(z @ stretch, which, unlabeled(z), num_seen=0, rounds=5)
    assert torch.equal(got, which)
    flat = whitening(z @ stretch)
    within = torch.stack([torch.cov(flat[which == c].T) for c in range(3)]).mean(dim=0)
    # Shrinkage leaves the longest axis a little too long and the shortest a little too short.
    assert torch.linalg.eigvalsh(within).max() < 1.2
    assert torch.linalg.eigvalsh(within)[1:].min() > 0.5
    torch.testing.assert_close(flat.mean(dim=0), torch.zeros(6), atol=1e-3, rtol=0)


def test_a_labeled_row_keeps_its_class():
    z, which = clouds([20, 20])
    labels = unlabeled(z)
    labels[0] = 1  # in the middle of the other class
    assert fit_gaussians(z, which, labels, num_seen=2, rounds=4)[1][0] == 1
    assert fit_mixture(F.normalize(z, dim=1), which, labels, num_seen=2, rounds=4).assignment[0] == 1


def test_rows_that_all_coincide_stay_finite():
    z = torch.ones(6, 4)
    whitening, got = fit_gaussians(z, torch.tensor([0, 0, 0, 1, 1, 1]), unlabeled(z), num_seen=0, rounds=3)
    assert torch.isfinite(whitening.matrix).all()
    assert len(got) == 6


# --- directions -------------------------------------------------------------------------------------------------------


def test_directions_follow_the_formula():
    z, which = clouds([9, 6, 12], dim=4)
    z = F.normalize(z, dim=1)
    mixture = fit_mixture(z, which, unlabeled(z), num_seen=0, rounds=1)
    prototypes, sharpness, share = naive.directional(z.double().numpy(), F.one_hot(which, 3).double().numpy(), EXTRA)
    np.testing.assert_allclose(mixture.prototypes.numpy(), prototypes, atol=1e-6)
    np.testing.assert_allclose(float(mixture.sharpness), sharpness, rtol=1e-5)
    np.testing.assert_allclose(mixture.share.numpy(), share, rtol=1e-6)


def test_a_large_class_wins_a_row_in_the_middle():
    a, b = torch.tensor([1.0, 0.3]), torch.tensor([0.3, 1.0])
    z = F.normalize(torch.cat([a.repeat(90, 1), b.repeat(10, 1), torch.ones(1, 2)]), dim=1)
    start = torch.tensor([0] * 90 + [1] * 11)
    mixture = fit_mixture(z, start, unlabeled(z), num_seen=0, rounds=1)
    mixture = fit_mixture(z + 0.0, mixture.assignment, unlabeled(z), num_seen=0, rounds=1)
    assert mixture.share[0] > 0.8
    tie = F.normalize(mixture.prototypes.sum(dim=0), dim=0)
    assert mixture.logits(tie[None]).argmax() == 0
