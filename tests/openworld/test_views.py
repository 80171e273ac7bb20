import torch

from opencon.data.loader import TwoStreamLoader
from opencon.openworld.views import NUM_NOISES, FeatureViews


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def views_of(num_rows=50, num_views=3, dim=4):
    """Row i, view v, is (i, v, i, v): a view names its row and its number."""
    i = torch.arange(num_rows).float()[:, None].expand(num_rows, num_views)
    v = torch.arange(num_views).float().expand(num_rows, num_views)
    return torch.stack([i, v, i, v], dim=2)


def test_a_view_is_one_of_the_cached_ones_of_its_own_row():
    views, augment = views_of(), FeatureViews(torch.zeros(4), generator=stream())
    got = augment.apply(views, augment.draw(50, (3, 4), stream(1)))
    assert got[:, 0].tolist() == list(range(50))
    assert set(got[:, 1].tolist()) == {0.0, 1.0, 2.0}
    assert torch.equal(got[:, :2], got[:, 2:])


def test_noise_has_the_scale_asked_for_in_each_feature():
    augment = FeatureViews(torch.tensor([0.0, 0.5, 2.0]), generator=stream())
    rows = torch.zeros(20_000, 1, 3)
    got = augment.apply(rows, augment.draw(20_000, (1, 3), stream(1)))
    torch.testing.assert_close(got.std(dim=0), torch.tensor([0.0, 0.5, 2.0]), atol=0.05, rtol=0.05)
    assert len(got.unique(dim=0)) <= NUM_NOISES


def test_half_precision_in_float32_out():
    augment = FeatureViews(torch.ones(4), generator=stream())
    assert augment.apply(views_of().half(), augment.draw(50, (3, 4), stream())).dtype == torch.float32


def test_the_loader_takes_them_and_repeats_an_epoch():
    labels = torch.full((50,), -1)
    labels[:10] = 0
    augment = FeatureViews(torch.full((4,), 0.01), generator=stream())
    loader = TwoStreamLoader(views_of(), labels, batch_shares=(2, 6), augments=(augment, augment), seed=0)
    step = torch.zeros(1, dtype=torch.long)
    first, again, other = (loader.batch(loader.draw(epoch), step) for epoch in (0, 0, 1))
    assert torch.equal(first.views[0], again.views[0])
    assert not torch.equal(first.views[0], other.views[0])
    # Both views show the same rows, but not the same numbers.
    assert torch.equal(first.views[0][:, 0].round(), first.views[1][:, 0].round())
    assert not torch.equal(first.views[0], first.views[1])
    assert (first.labels[:2] == 0).all()
    assert (first.views[0][:2, 0].round() < 10).all()
