"""Corrections of prototypes: what nothing chooses goes, twins merge, one that is two splits; right ones stay."""

import pytest
import torch
import torch.nn.functional as F

from opencon.config import with_settings
from opencon.experiments.recipes import get_recipe
from opencon.experiments.workbench import assemble, prepare
from opencon.methods import Epoch
from opencon.prototypes import seen_score
from opencon.prototypes.correction import correct

SEEN, CLASSES, DIM, EACH = 3, 6, 16, 40


@pytest.fixture
def world():
    """Rows around six orthogonal directions, of which three are seen; their classes, and labels of some."""
    rng = torch.Generator().manual_seed(0)
    directions = torch.eye(DIM)[:CLASSES]
    truth = torch.arange(CLASSES).repeat_interleave(EACH)
    z = F.normalize(directions[truth] + 0.15 * torch.randn(len(truth), DIM, generator=rng), dim=1)
    labels = torch.where((truth < SEEN) & (torch.arange(len(truth)) % 2 == 0), truth, -1)
    return z, truth, labels, directions


def found(world, prototypes, live=None):
    z, truth, labels, _ = world
    live = torch.ones(len(prototypes), dtype=torch.bool) if live is None else live
    result = correct(prototypes, live, z, labels, num_seen=SEEN)
    nearest = torch.where(result.live, z @ result.prototypes.T, -2.0).argmax(dim=1)
    groups = {tuple(truth[nearest == c].unique().tolist()) for c in nearest.unique()}
    assert groups == {(c,) for c in range(CLASSES)}
    return int(result.live.sum()), (result.gone, result.merged, result.split)


def test_prototypes_that_fit_stay(world):
    assert found(world, world[3]) == (CLASSES, (0, 0, 0))


def test_what_nothing_chooses_goes(world):
    far = -torch.eye(DIM)[:4]
    assert found(world, torch.cat([world[3], far])) == (CLASSES, (4, 0, 0))


def test_twins_become_one(world):
    z, truth, _, directions = world
    rows = z[truth == 5]
    axis = torch.linalg.svd(rows - rows.mean(dim=0)).Vh[0]
    halves = F.normalize(directions[5] + torch.stack([0.3 * axis, -0.3 * axis]), dim=1)
    assert found(world, torch.cat([directions[:5], halves])) == (CLASSES, (0, 1, 0))


def test_one_that_is_two_classes_splits_where_a_place_is_free(world):
    both = F.normalize(world[3][4:5] + world[3][5:6], dim=1)
    prototypes = torch.cat([world[3][:4], both, torch.eye(DIM)[-1:]])
    live = torch.tensor([True] * 5 + [False])
    assert found(world, prototypes, live) == (CLASSES, (0, 0, 1))


def test_seen_prototypes_never_go_and_never_move(world):
    z, truth, labels, directions = world
    rows = truth != 1  # a seen class without an image
    result = correct(directions, torch.ones(CLASSES, dtype=torch.bool), z[rows], labels[rows], num_seen=SEEN)
    assert result.live[:SEEN].all()
    torch.testing.assert_close(result.prototypes[:SEEN], directions[:SEEN])


def test_the_seen_score_over_live_prototypes_is_that_of_those_alone():
    cosine = torch.randn(20, 9, generator=torch.Generator().manual_seed(0))
    live = torch.tensor([True] * 6 + [False] * 3)
    got = seen_score(cosine, num_seen=4, form="standardized", live=live)
    torch.testing.assert_close(got, seen_score(cosine[:, :6], num_seen=4, form="standardized"))


def corrected_digits(*settings):
    config = with_settings(get_recipe("digits"), ["split.num_classes=30", "method.correct=true", *settings])
    return prepare(config, torch.device("cpu"))


def test_a_dead_prototype_is_chosen_by_nothing_and_has_no_share():
    bench = corrected_digits()
    method = bench.method
    method.live[20:] = False
    assignment = method.assign(bench.bank())
    assert assignment.classes.max() < 20
    assert assignment.p[:, 20:].max() == 0
    method._correct(Epoch(10, 100, bench.bank))
    left = int(method.live.sum())
    assert left < 20
    assert method.prior[~method.live].max() <= 1e-5
    assert method.prior[method.live].sum() == pytest.approx(1.0, abs=1e-3)
    assert int(method.corrected.sum()) >= 20 - left


def test_an_estimated_number_is_corrected_and_a_given_one_is_not():
    assert corrected_digits().method.corrects
    assert not prepare(get_recipe("digits"), torch.device("cpu")).method.corrects


def test_auto_counts_on_the_first_features(monkeypatch):
    from opencon.counting.base import CountEstimate
    from opencon.experiments import workbench

    asked = []

    def count(z, labels, *, num_seen, seed):
        asked.append((z.shape, int((labels >= 0).sum()), num_seen))
        return CountEstimate(12, 9, 14, (), "")

    monkeypatch.setattr(workbench, "estimate_classes", count)
    config = with_settings(get_recipe("digits"), ["split.num_classes=auto"])
    dataset = workbench.load_dataset(config.data)
    bench = assemble(config, dataset, torch.device("cpu"))
    assert asked == [((1797, 128), len(bench.split.labeled), 5)]
    assert bench.split.num_classes == 14  # OpenCon corrects, and starts with the upper end
    assert bench.method.corrects
    other = with_settings(get_recipe("orca/digits"), ["split.num_classes=auto"])
    assert assemble(other, dataset, torch.device("cpu")).split.num_classes == 12
