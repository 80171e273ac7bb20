import pytest
import torch
import torch.nn.functional as F

from opencon.openworld.row_encoder import ResidualHead, RowEmbedder, RowEncoder, set_affine, tamed


def stretched(num_rows=300, seed=0):
    """Rows around (3, 3, ...), with standard deviations 8, 4, 2, 1, 0 along turned axes."""
    g = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=g)).Q
    return torch.randn(num_rows, 5, generator=g) * torch.tensor([8.0, 4, 2, 1, 0]) @ turn + 3


@pytest.mark.parametrize(("power", "want"), [(0.0, [8.0, 4, 2]), (0.5, [8**0.5, 2, 2**0.5]), (1.0, [1.0, 1, 1])])
def test_directions_are_the_main_ones_and_scaled_by_the_power(power, want):
    x = stretched(3000)
    encoder = RowEncoder(5, 3)
    encoder.fit(x, power=power)
    turned = encoder.rotate(x - encoder.mean)
    cov = torch.cov(turned.T)
    spread = cov.diag().sqrt()
    torch.testing.assert_close(spread / spread[0], torch.tensor(want) / want[0], rtol=0.06, atol=0)
    assert (cov - cov.diag().diag()).abs().max() < 0.02 * cov.max()


def test_rows_have_unit_length_and_a_direction_without_spread_is_nothing():
    x = stretched()
    encoder = RowEncoder(5, 5)
    encoder.fit(x, power=1.0)
    torch.testing.assert_close(encoder.rotated(x).norm(dim=1), torch.ones(len(x)))
    assert (encoder.rotate.weight[4] == 0).all()
    assert (encoder.rotated(encoder.mean[None]) == 0).all()


def test_fewer_rows_than_directions():
    encoder = RowEncoder(5, 5)
    encoder.fit(stretched(3), power=0.5)
    assert torch.isfinite(encoder.rotated(stretched(3))).all()


def test_wild_rows_are_drawn_nearer_and_others_left_as_they_are():
    x = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
    assert tamed(x) is x
    y = x.clone()
    y[3] *= 1e6
    near = tamed(y)
    torch.testing.assert_close(near[torch.arange(100) != 3], x[torch.arange(100) != 3], rtol=0, atol=1e-5)
    assert near[3].norm() < 30
    torch.testing.assert_close(F.normalize(near[3], dim=0), F.normalize(x[3], dim=0), rtol=0, atol=0.02)
    same = torch.ones(10, 2).index_fill(0, torch.tensor([3]), 100.0)
    assert tamed(same) is same  # without a usual distance nothing is wild


def test_whitening_is_the_identity_until_it_is_set():
    x, encoder = stretched(), RowEncoder(5, 3)
    encoder.fit(x, power=0.5)
    torch.testing.assert_close(encoder(x), encoder.rotated(x))
    center, matrix = torch.randn(3), torch.randn(3, 3)
    set_affine(encoder.whiten, center, matrix)
    torch.testing.assert_close(encoder(x), (encoder.rotated(x) - center) @ matrix)
    assert not any(p.requires_grad for p in encoder.parameters())


def test_the_head_begins_as_the_identity_and_can_learn():
    head, x = ResidualHead(4, 8), torch.randn(6, 4)
    assert torch.equal(head(x), x)
    head(x).square().sum().backward()
    assert head.second.weight.grad.abs().max() > 0


def test_the_embedder_takes_rows():
    embedder, x = RowEmbedder(ResidualHead(4, 8), 4), torch.randn(6, 4)
    torch.testing.assert_close(embedder(x), torch.nn.functional.normalize(x, dim=1))
    assert embedder.embed_views((x, x)).shape == (12, 4)
