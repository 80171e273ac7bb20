"""Halves of one class become one, others stay apart."""

import pytest
import torch

from opencon.cluster import merging
from opencon.cluster.merging import _apart, _most_bridge, merge_alike
from tests.naive import merging as naive


def clouds(sizes, *, dim=6, distance=6.0, seed=0):
    """Round clouds of the given sizes around the axes; rows (M, D) and their cloud (M,)."""
    g = torch.Generator().manual_seed(seed)
    which = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return distance * torch.eye(len(sizes), dim)[which] + torch.randn(len(which), dim, generator=g), which


def test_apart_measures_cost_and_bridge():
    g = torch.Generator().manual_seed(3)
    a, b = torch.randn(30, 3, generator=g), torch.randn(20, 3, generator=g) + 1.5
    cost, bridge = _apart(a, b)
    assert bridge == pytest.approx(naive.bridge(a.double().numpy(), b.double().numpy()), abs=1e-6)
    both = torch.cat([a, b])

    def inertia(rows):
        return float((rows - rows.mean(dim=0)).square().sum())

    assert cost == pytest.approx(inertia(both) - inertia(a) - inertia(b), rel=1e-4)


def cut(rows, which, c, new):
    """Half of cloud c, across the second axis, becomes group `new`."""
    which = which.clone()
    which[(which == c) & (rows[:, 5] > 0)] = new
    return which


def test_halves_of_one_cloud_become_one_again():
    z, which = clouds([200, 200, 200, 200])
    split = cut(z, cut(z, which, 2, 4), 0, 5)  # a novel cloud, and a seen one
    merged = merge_alike(z, split, num_seen=2)
    assert merged.tolist() == which.tolist()


def test_different_clouds_stay_apart_however_small():
    """The cost of merging two rows with a cloud is below that of two halves; only the empty way between tells."""
    z, which = clouds([200, 200, 200, 2], distance=5.0)
    halves = _apart(z[(which == 0) & (z[:, 5] > 0)], z[(which == 0) & (z[:, 5] <= 0)])
    assert _apart(z[which == 2], z[which == 3])[0] < halves[0]
    assert merge_alike(z, which, num_seen=2).tolist() == which.tolist()


def test_seen_classes_are_never_merged():
    z, which = clouds([200, 200])
    same = cut(z, which, 0, 2)  # three classes by label, of which two are one cloud
    assert merge_alike(z, same, num_seen=3).tolist() == same.tolist()


def test_nothing_is_merged_where_no_class_can_be_cut():
    z, which = clouds([5, 5, 200])
    split = cut(z, which, 2, 3)
    assert merge_alike(z, split, num_seen=2).tolist() == split.tolist()


def many_groups(seed, *, dim, grid=False, offset=0.0):
    """Two seen clouds and three others, 500 rows, in 80 groups: each row goes to the nearest of some rows, drawn."""
    g = torch.Generator().manual_seed(seed)
    z, which = clouds([140, 120, 100, 80, 60], dim=dim, distance=4.0, seed=seed)
    z = z.round() if grid else z  # many rows coincide, many lie on the edge between half way and not
    drawn = torch.randperm(260, generator=g)[:60] + 200
    group = 2 + torch.cdist(z, z[drawn]).argmin(dim=1)
    group[group > 40] += 19  # numbers without a row
    known = (which < 2) & (torch.rand(len(z), generator=g) < 0.6)
    return z + offset, torch.where(known, which, group)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kind",
    [{"dim": 5}, {"dim": 12}, {"dim": 40}, {"dim": 6, "grid": True}, {"dim": 5, "offset": 1000.0}],
    ids=["few dimensions", "more", "many", "ties", "far from the origin"],
)
def test_merging_is_that_of_all_pairs_measured_anew(seed, kind):
    z, start = many_groups(seed, **kind)
    merged = merge_alike(z, start, num_seen=2)
    assert merged.tolist() == naive.merge_alike(z, start, 2).tolist()


@pytest.mark.parametrize("grid", [False, True])
def test_the_bound_on_bridges_is_nearly_the_bridge(grid):
    """Above it where a row lies on an edge only: rare in random data, not so on a grid."""
    z, start = many_groups(0, dim=6, grid=grid)
    members = [(start == c).nonzero()[:, 0] for c in start.unique()]
    bound = _most_bridge(z, members, torch.stack([z[rows].mean(dim=0) for rows in members]))
    pairs = torch.combinations(torch.arange(len(members))).tolist()
    bridge = torch.tensor([_apart(z[members[a]], z[members[b]])[1] for a, b in pairs], dtype=torch.float64)
    assert torch.equal(bound, bound.T)
    bound = torch.stack([bound[a, b] for a, b in pairs])
    assert (bound >= bridge).all()
    assert torch.isclose(bound, bridge, rtol=1e-4).double().mean() > (0.8 if grid else 0.99)


def test_few_pairs_are_measured_one_by_one(monkeypatch):
    calls = []
    monkeypatch.setattr(merging, "_apart", lambda a, b: calls.append(1) or _apart(a, b))
    z, start = many_groups(0, dim=40)
    merged = merge_alike(z, start, num_seen=2)
    num_merged = len(start.unique()) - len(merged.unique())
    assert num_merged <= len(calls) <= len(start.unique())  # there are over a thousand pairs
