import numpy as np
import pytest
import torch
import torch.nn.functional as F

from opencon.cluster import merging
from opencon.cluster.merging import FARTHEST_HALVES, LEAST_BRIDGE, _apart, _halves, _most_bridge, can_merge, merge_alike
from opencon.cluster.numbering import by_size
from opencon.openworld.mixture import EXTRA, SHRINKAGE, fit_gaussians, fit_mixture, held_out_accuracy, softness
from tests.naive import mixture as naive


def clouds(sizes, *, dim=6, distance=6.0, seed=0):
    """Round clouds of the given sizes around the axes; rows (M, D) and their cloud (M,)."""
    g = torch.Generator().manual_seed(seed)
    which = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return distance * torch.eye(len(sizes), dim)[which] + torch.randn(len(which), dim, generator=g), which


def unlabeled(rows):
    return torch.full((len(rows),), -1)


# --- fit_gaussians -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_settling_follows_the_formula(seed):
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


# --- numbering and confidence -----------------------------------------------------------------------------------------


def test_groups_are_numbered_by_size_and_seen_classes_keep_theirs():
    #        seen 0, 1; group 2 has one row, 3 none, 4 three
    assert by_size(torch.tensor([1, 0, 4, 2, 4, 4]), 2).tolist() == [1, 0, 2, 3, 2, 2]


def test_softness_reaches_the_confidence_asked_for():
    logits = 20 * torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    factor = softness(logits, 0.7)
    assert (factor * logits).softmax(dim=1).amax(dim=1).mean() == pytest.approx(0.7, abs=1e-3)
    assert softness(logits, 1.0) == 1.0


def test_held_out_rows_are_judged_without_their_own_help():
    """Each class has two labeled rows, orthogonal to everything: with its own help every row would be right."""
    z = torch.eye(4)
    labels = torch.tensor([0, 0, 1, 1])
    assert held_out_accuracy(z, labels, labels) == pytest.approx((1 + 1) / (2 + 2))  # a tie goes to class 0
    assert held_out_accuracy(z, labels, torch.tensor([0, 1, -1, -1])) is None


# --- merging ----------------------------------------------------------------------------------------------------------


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


def test_merging_needs_a_seen_class_of_some_size():
    rows = torch.tensor([0] * 7 + [1] * 3 + [2] * 20)
    assert not can_merge(rows, 2)  # the new group says nothing
    assert can_merge(torch.cat([rows, torch.tensor([0])]), 2)
    assert not can_merge(rows, 0)


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


def plain_merging(z, assignment, num_seen):
    """`merge_alike`, with every pair of groups measured anew in every round."""
    members = [(assignment == c).nonzero()[:, 0] for c in range(int(assignment.max()) + 1)]
    halves = [_apart(*cut) for rows in members[:num_seen] if (cut := _halves(z[rows])) is not None]
    costs, bridges = torch.tensor(halves).T
    limit, least_bridge = float(costs.quantile(FARTHEST_HALVES)), LEAST_BRIDGE * float(bridges.median())
    while True:
        size = torch.tensor([float(len(rows)) for rows in members])
        mean = torch.stack([z[rows].sum(dim=0) for rows in members]) / size.clamp(min=1)[:, None]
        squared = torch.cdist(mean, mean).square()  # as there, for the order of pairs that cost the same
        found = []
        for a in range(len(members)):
            for b in range(max(a + 1, num_seen), len(members)):
                cost = float(squared[a, b] * (size[a] * size[b] / (size[a] + size[b]).clamp(min=1)))
                near = bool(size[a] > 0 and size[b] > 0) and cost <= limit
                if near and _apart(z[members[a]], z[members[b]])[1] >= least_bridge:
                    found.append((cost, a, b))
        partner = {}
        for _, a, b in sorted(found):
            if a not in partner and b not in partner:
                partner[a], partner[b] = b, a
        if not partner:
            break
        joined = [torch.cat([rows, members[partner[c]]]) if c in partner else rows for c, rows in enumerate(members)]
        members = [rows for c, rows in enumerate(joined) if partner.get(c, c) >= c]
    merged = torch.empty_like(assignment)
    for c, rows in enumerate(members):
        merged[rows] = c
    return merged


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kind",
    [{"dim": 5}, {"dim": 12}, {"dim": 40}, {"dim": 6, "grid": True}, {"dim": 5, "offset": 1000.0}],
    ids=["few dimensions", "more", "many", "ties", "far from the origin"],
)
def test_merging_is_that_of_all_pairs_measured_anew(seed, kind):
    z, start = many_groups(seed, **kind)
    merged = merge_alike(z, start, num_seen=2)
    assert merged.tolist() == plain_merging(z, start, 2).tolist()


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
