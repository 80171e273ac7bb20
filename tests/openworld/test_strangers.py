"""How odd a row is, against slow and obvious loops."""

import math

import pytest
import torch

from opencon.errors import ConfigError
from opencon.openworld import strangers as module
from opencon.openworld.model import OpenWorldModel, shared_out
from opencon.openworld.strangers import EXTRA, LENGTH, NEAREST, Strangers


def clouds(num=60, dim=6, seed=0):
    """Two classes around different axes, the second twice as wide."""
    g = torch.Generator().manual_seed(seed)
    classes = torch.arange(2).repeat_interleave(num // 2)
    wide = torch.tensor([0.5, 1.0])[classes][:, None]
    return 6 * torch.eye(2, dim)[classes] + wide * torch.randn(num, dim, generator=g), classes


def places(x, mean_length):
    """Direction and length of each row, one at a time."""
    lengths = [math.sqrt(sum(v * v for v in row)) for row in x.tolist()]
    return [
        [v / length for v in row] + [LENGTH * length / mean_length]
        for row, length in zip(x.tolist(), lengths, strict=True)
    ]


def by_loops(x, references, classes, *, own):
    """The oddness of each row of x, and the places of its nearest reference rows."""
    mean_length = sum(math.sqrt(sum(v * v for v in row)) for row in references.tolist()) / len(references)
    known = places(references, mean_length)

    def nearest(place, skip):
        apart = sorted((math.dist(place, other), i) for i, other in enumerate(known) if i != skip)[:NEAREST]
        return sum(d for d, _ in apart) / NEAREST, [i for _, i in apart]

    usual_of = [nearest(place, i)[0] for i, place in enumerate(known)]
    mean = sum(usual_of) / len(usual_of)
    usual = []
    for c in classes.tolist():
        members = [d for d, other in zip(usual_of, classes.tolist(), strict=True) if other == c]
        usual.append(math.sqrt((sum(members) + EXTRA * mean) / (len(members) + EXTRA) * mean))
    found = []
    for i, place in enumerate(places(x, mean_length)):
        distance, near = nearest(place, i if own else None)
        found.append((distance / (sum(usual[j] for j in near) / NEAREST), near))
    return found


def test_oddness_equals_loops_for_the_rows_of_the_fit_and_for_new_ones():
    x, classes = clouds()
    known, oddness, near = Strangers.fit(x, classes, 2)
    want = by_loops(x, x, classes, own=True)
    torch.testing.assert_close(oddness, torch.tensor([odd for odd, _ in want]), atol=1e-4, rtol=1e-4)
    assert [set(row) for row in near.tolist()] == [set(row) for _, row in want]
    new, _ = clouds(seed=1)
    want = by_loops(new, x, classes, own=False)
    oddness, near_classes = known(new)
    torch.testing.assert_close(oddness, torch.tensor([odd for odd, _ in want]), atol=1e-4, rtol=1e-4)
    assert [sorted(row) for row in near_classes.tolist()] == [sorted(classes[row].tolist()) for _, row in want]


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
def test_the_stated_share_of_new_rows_is_flagged(rate):
    x, classes = clouds(2000)
    known, oddness, _ = Strangers.fit(x, classes, 2)
    assert (oddness > known.threshold(rate)).float().mean() == pytest.approx(rate, abs=0.002)
    new, _ = clouds(2000, seed=1)
    assert (known(new)[0] > known.threshold(rate)).float().mean() == pytest.approx(rate, abs=0.4 * rate + 0.005)


def test_no_false_alarm_at_all_flags_none_of_the_rows_of_the_fit():
    x, classes = clouds()
    known, oddness, _ = Strangers.fit(x, classes, 2)
    assert not (oddness > known.threshold(0.0)).any()


def test_what_lies_elsewhere_or_is_far_longer_is_odd():
    x, classes = clouds()
    known, _, _ = Strangers.fit(x, classes, 2)
    elsewhere = torch.zeros(1, 6)
    elsewhere[0, 4] = 6.0
    for strange in (elsewhere, 20 * x[:1], 1e30 * x[:1]):
        assert known(strange)[0] > known.threshold(0.0)


def test_of_many_rows_a_sample_is_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST", 16)
    x, classes = clouds()
    known, oddness, near = Strangers.fit(x, classes, 2)
    assert known.rows.shape == (15, 7)  # every fourth
    assert (len(oddness), int(near.max())) == (60, 14)
    want = by_loops(x, x[::4], classes[::4], own=False)
    other = 1  # not one of the sample
    assert set(near[other].tolist()) == set(want[other][1])
    assert not any(i in row for i, row in zip(range(15), near[::4].tolist(), strict=True))  # none is its own neighbor


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_unit_of_the_numbers_makes_no_difference(scale):
    x, classes = clouds()
    _, oddness, _ = Strangers.fit(x, classes, 2)
    torch.testing.assert_close(Strangers.fit(x * scale, classes, 2)[1], oddness, atol=1e-4, rtol=1e-4)


def test_rows_that_are_all_the_same_know_a_copy_and_a_stranger():
    known, oddness, _ = Strangers.fit(torch.ones(12, 5), torch.zeros(12, dtype=torch.long), 1)
    assert torch.isfinite(oddness).all()
    assert not (known(torch.ones(1, 5))[0] > known.threshold() + 1).any()
    assert known(torch.tensor([[1.0, -1, 1, -1, 1]]))[0] > 100


def test_a_single_row_and_two():
    for num in (1, 2):
        _, oddness, near = Strangers.fit(torch.randn(num, 3), torch.zeros(num, dtype=torch.long), 1)
        assert torch.isfinite(oddness).all()
        assert near.shape == (num, 1)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_that_is_none(rate):
    model = OpenWorldModel(num_features=2, dim=2, num_seen=1, num_classes=2)
    with pytest.raises(ConfigError, match=f"false_alarms = {rate} must be at least 0 and less than 1"):
        model.predict(torch.ones(1, 2), false_alarms=rate)


# --- confidence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_classes", [2, 3, 40])
def test_the_best_class_has_the_confidence_and_stays_the_best(num_classes):
    g = torch.Generator().manual_seed(num_classes)
    logits = 8 * torch.randn(500, num_classes, generator=g)
    asked = torch.rand(500, generator=g)
    p, confidence = shared_out(logits, asked)
    torch.testing.assert_close(p.sum(dim=1), torch.ones(500))
    assert (p >= 0).all()
    assert torch.equal(p.argmax(dim=1), logits.argmax(dim=1))
    torch.testing.assert_close(p.amax(dim=1), confidence)
    possible = asked > 1.01 / num_classes  # less than an even share would not be the best
    torch.testing.assert_close(confidence[possible], asked[possible])


def test_the_second_best_gets_more_than_the_third():
    p, _ = shared_out(torch.tensor([[9.0, 6.0, 1.0]]), torch.tensor([0.6]))
    assert p[0, 0] == pytest.approx(0.6)
    assert p[0, 1] > p[0, 2] > 0


def test_facts_one_by_one():
    """Two prototypes on the axes; the row is nearer to the first, which is seen, by 3 * (0.8 - 0.6) plus log 2."""
    model = OpenWorldModel(num_features=2, dim=2, num_seen=1, num_classes=2)
    model.prototypes.copy_(torch.eye(2))
    model.sharpness.fill_(3.0)
    model.log_share.copy_(torch.tensor([2 / 3, 1 / 3]).log())
    model.strangers.oddness.fill_(2.0)  # every threshold
    logits = model.logits(torch.tensor([[0.8, 0.6]]))
    facts = model.facts(logits, torch.tensor([1.0]), torch.tensor([[0, 0, 1, 0, 1]]))
    margin = 3 * 0.2 + math.log(2)
    torch.testing.assert_close(facts, torch.tensor([[1.0, math.log1p(margin), 0.6, math.log(0.5), 1.0]]))
    z, oddness = torch.tensor([[0.8, 0.6]]), torch.tensor([1.0])
    p, confidence, novelty = model.judge(z, oddness, torch.tensor([[0, 0, 1, 0, 1]]))
    assert confidence[0] == pytest.approx(float(torch.sigmoid(facts[0] @ model.trust)))
    assert p[0, 0] == confidence[0]
    assert novelty[0] == pytest.approx(max(-0.2 * margin, 10 * math.log(0.5)))


def test_confidence_falls_with_oddness_and_grows_with_like_neighbors():
    model = OpenWorldModel(num_features=2, dim=2, num_seen=1, num_classes=2)
    model.prototypes.copy_(torch.eye(2))
    z = torch.tensor([[0.8, 0.6]]).expand(3, 2)
    near = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    _, confidence, _ = model.judge(z, torch.tensor([0.5, 3.0, 0.5]), near)
    assert confidence[0] > confidence[1]
    assert confidence[0] > confidence[2]
