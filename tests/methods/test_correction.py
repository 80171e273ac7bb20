"""The number of prototypes, decided in training: what nothing chooses goes, twins merge, one that is two splits."""

import pytest
import torch
import torch.nn.functional as F

from opencon.config import with_settings
from opencon.counting import CountEstimate
from opencon.experiments.evaluate import draw_numbers
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import changed_number
from opencon.experiments.workbench import assemble, prepare
from opencon.methods import Epoch, correction
from opencon.methods.correction import NOT_TRIED, Looked, correct, decide, look, signs_of
from opencon.prototypes import seen_score

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


def decided(prototypes, live, z, labels, features=None):
    rows = Looked.at(z, z if features is None else features, labels, SEEN)
    return correct(prototypes, live, rows, signs=look(prototypes, live, rows)[None])


def found(world, prototypes, live=None):
    z, truth, labels, _ = world
    live = torch.ones(len(prototypes), dtype=torch.bool) if live is None else live
    result = decided(prototypes, live, z, labels)
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


def test_where_groups_do_not_come_back_the_number_in_use_stands():
    z = F.normalize(torch.randn(300, DIM, generator=torch.Generator().manual_seed(0)), dim=1)
    labels = torch.where(torch.arange(300) < 60, torch.arange(300) % SEEN, -1)
    result = decided(torch.eye(DIM), torch.ones(DIM, dtype=torch.bool), z, labels)
    assert int(result.live.sum()) == DIM  # every direction has its rows, and no grouping of noise is found again


def test_groups_are_looked_for_in_the_features_and_prototypes_placed_among_projections(world):
    z, truth, labels, _ = world
    blurred = F.normalize(torch.randn(z.shape, generator=torch.Generator().manual_seed(0)), dim=1)
    blurred[truth < SEEN] = z[truth < SEEN]
    result = decided(torch.eye(DIM), torch.ones(DIM, dtype=torch.bool), blurred, labels, features=5 * z)
    assert int(result.live.sum()) == CLASSES  # of sixteen prototypes, among projections that know three classes
    for row in result.prototypes[SEEN:CLASSES]:  # each is the direction of a class's projections
        means = torch.stack([F.normalize(blurred[truth == c].sum(dim=0), dim=0) for c in range(SEEN, CLASSES)])
        assert (means @ row).max() == pytest.approx(1.0, abs=1e-3)


def test_the_largest_sum_of_signs_over_the_epochs_decides():
    signs = torch.full((2, 2, 6), NOT_TRIED)
    signs[:, 0, 2:] = torch.tensor([[0.95, 0.9, 0.9, 0.1], [0.95, 0.9, 0.9, 0.1]])  # of 2, 3, 4, 5 groups
    signs[:, 1, 2:] = torch.tensor([[1.0, 1.2, 1.2, 1.3], [1.0, 1.2, 1.1, 1.3]])
    assert decide(signs, otherwise=7) == 3  # better than 2 and 5 by the sum, than 4 by the second epoch
    assert decide(signs[:1], otherwise=7) == 3  # as good as 4: the smaller
    signs[1, :, 3] = NOT_TRIED  # at one epoch alone a number is not tried
    assert decide(signs, otherwise=7) == 4
    signs[:, 0, 4] = 0.7
    assert decide(signs, otherwise=7) == 2
    signs[:, 0, 2] = 0.5
    assert decide(signs, otherwise=7) == 7  # its groups do not come back
    assert decide(signs, otherwise=None) == 5  # stands apart most in the last look


def test_a_look_that_has_tried_one_number_says_nothing_of_others():
    signs = torch.full((3, 2, 6), NOT_TRIED)
    signs[:2, 0, 2:] = torch.tensor([0.9, 0.85, 0.95, 0.9])
    signs[:2, 1, 2:] = torch.tensor([1.0, 1.1, 1.3, 1.2])
    signs[2, :, 3] = torch.tensor([0.79, 1.1])  # the earliest, before groups came back
    assert decide(signs, otherwise=None) == 4
    assert decide(signs[2:], otherwise=None) == 3  # it has nothing else
    assert decide(signs.flip(0), otherwise=None) == 4


def test_of_many_rows_some_are_looked_at_and_every_label(world):
    z, _, labels, _ = world
    z, labels = z.repeat(200, 1), torch.full((200 * len(z),), -1)
    labels[[1, 3, 5, 7, 9]] = torch.tensor([0, 1, 0, 2, 1])  # on rows that an even step would leave out
    rows = Looked.at(z, z, labels, SEEN)
    assert len(rows.z) <= correction.MOST_ROWS + SEEN
    assert rows.labels.unique().tolist() == [-1, 0, 1, 2]
    assert Looked.at(z[:24000], z[:24000], labels[:24000], SEEN).z.shape[0] <= correction.MOST_ROWS + SEEN
    few = Looked.at(z[:100], z[:100], labels[:100], SEEN)
    assert torch.equal(few.z, z[:100])
    assert torch.equal(few.labels, labels[:100])


def test_where_groups_do_not_come_back_one_number_is_tried(world):
    z, _, labels, _ = world
    clear = signs_of(Looked.at(z, z, labels, SEEN), 9, 12, where_clear=True)
    torch.testing.assert_close(clear, signs_of(Looked.at(z, z, labels, SEEN), 9, 12))
    assert decide(clear[None], otherwise=None) == CLASSES
    noise = F.normalize(torch.randn(len(z), DIM, generator=torch.Generator().manual_seed(0)), dim=1)
    found = signs_of(Looked.at(noise, noise, labels, SEEN), 9, 12, where_clear=True)
    assert int((found > NOT_TRIED).all(dim=0).sum()) == 1


def test_where_groups_do_not_come_back_the_tree_says_any_number(world, monkeypatch):
    """Of large numbers some alone are tried: from 40 every second."""
    z, _, labels, _ = world
    curve = tuple((number, 2.0 if number == 51 else 1.0) for number in range(SEEN, 61))
    monkeypatch.setattr(correction, "estimate_classes", lambda *_, **__: CountEstimate(51, 51, 51, curve, ""))
    monkeypatch.setattr(correction, "_come_back", lambda *_: 0.1)
    monkeypatch.setattr(correction, "LEAST_IN_GROUP", 1)
    assert decide(signs_of(Looked.at(z, z, labels, SEEN), 60, 60, where_clear=True)[None], otherwise=None) == 51


def test_seen_prototypes_never_go_and_never_move(world):
    z, truth, labels, directions = world
    rows = (truth != 1) | (torch.arange(len(truth)) == EACH)  # of a seen class, a single labeled image
    assert int((labels[rows] == 1).sum()) == 1
    result = decided(directions, torch.ones(CLASSES, dtype=torch.bool), z[rows], labels[rows])
    assert result.live[:SEEN].all()
    torch.testing.assert_close(result.prototypes[:SEEN], directions[:SEEN])


def test_halves_share_every_label_and_a_lone_one_is_in_both():
    labels = torch.tensor([0, 0, 0, 0, 1, -1, -1, -1, -1, -1])
    for half in correction._halves(labels, torch.Generator().manual_seed(0)):
        assert torch.bincount(labels[half] + 1).tolist() in ([2, 2, 1], [3, 2, 1])


def test_the_seen_score_over_live_prototypes_is_that_of_those_alone():
    cosine = torch.randn(20, 9, generator=torch.Generator().manual_seed(0))
    live = torch.tensor([True] * 6 + [False] * 3)
    got = seen_score(cosine, num_seen=4, form="standardized", live=live)
    torch.testing.assert_close(got, seen_score(cosine[:, :6], num_seen=4, form="standardized"))


def corrected_digits(*settings):
    config = with_settings(get_recipe("digits"), ["split.num_classes=30", "method.correct=true", *settings])
    return prepare(config, torch.device("cpu"))


def test_what_prototypes_shape_waits_until_the_number_is_decided_and_the_prior_is_spread_over_what_is_left():
    bench = corrected_digits()
    method = bench.method
    for index in (0, 20, 24, 25, 30):
        assert float(method.prior_weight) == float(method.novel_weight) == 0.0
        method.before_epoch(Epoch(index, 100, bench.bank))
    assert float(method.prior_weight) == method.config.weight_prior
    assert float(method.novel_weight) == pytest.approx(method.config.weight_novel)
    assert (method.signs > NOT_TRIED).any(dim=2).all()  # every look was taken
    assert bench.bank().z.shape[1] == method.prototypes.shape[1]  # features in front of the head for the looks alone
    left = int(method.live.sum())
    assert left < 30
    assert method.prior[~method.live].max() <= 1e-5
    assert method.prior[method.live].sum() == pytest.approx(1.0, abs=1e-3)
    assert int(method.corrected[0] + method.corrected[1] - method.corrected[2]) == 30 - left
    assignment = method.assign(bench.bank())
    assert assignment.classes.max() < left
    assert assignment.p[:, left:].max() == 0
    # By these a trained run judges new images, even one that lies where a prototype went.
    assert method.row_logits(method.prototypes).argmax(dim=1).max() < left


def test_a_short_run_decides_after_half_of_its_epochs():
    bench = corrected_digits()
    bench.method.before_epoch(Epoch(1, 2, bench.bank))
    assert int(bench.method.live.sum()) < 30


def test_a_step_counts_who_is_chosen_and_the_next_epoch_says_how_many():
    bench = corrected_digits()
    method = bench.method
    guesses = torch.tensor([7, 7, 20])
    method.after_step(torch.empty(0, 128), torch.empty(0, dtype=torch.long), guesses)
    method.before_epoch(Epoch(1, 100, bench.bank))
    assert (int(method.in_use), int(method.chosen.sum())) == (2, 0)


def test_what_happened_is_said_and_drawn(tmp_path):
    before = {"epoch": 9, "prototypes": 30.0, "prototypes_in_use": 11.0}
    after = {"prototypes": 10.0, "prototypes_gone": 19.0, "prototypes_merged": 1.0, "prototypes_split": 0.0}
    said = changed_number(before, after)
    assert said.startswith("30 prototypes became 10: 19 were hardly chosen and went; then 1 fewer")
    assert changed_number(before, before) == changed_number({}, after) == changed_number(before, {}) == ""
    draw_numbers([{"epoch": 0}], tmp_path)
    assert not list(tmp_path.iterdir())
    draw_numbers([before, {"epoch": 10, "prototypes_in_use": 11.0, **after}], tmp_path)
    assert (tmp_path / "numbers.png").stat().st_size > 1000


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

    monkeypatch.setattr(workbench, "count_classes", count)
    config = with_settings(get_recipe("digits"), ["split.num_classes=auto"])
    dataset = workbench.load_dataset(config.data)
    bench = assemble(config, dataset, torch.device("cpu"))
    assert asked == [((1797, 128), len(bench.split.labeled), 5)]
    assert bench.split.num_classes == 24  # OpenCon decides in training, and starts with twice as many
    assert bench.method.corrects
    other = with_settings(get_recipe("orca/digits"), ["split.num_classes=auto"])
    assert assemble(other, dataset, torch.device("cpu")).split.num_classes == 12
