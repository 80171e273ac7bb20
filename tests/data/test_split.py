import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opencon.config import SplitConfig
from opencon.data.split import Split, batch_shares, check_split, make_split
from opencon.errors import ConfigError, DataError


def naive_labeled(classes, num_seen, ratio, seed):
    """The rule in words: one image after the other, one draw for each image of a seen class."""
    rng = np.random.RandomState(seed)
    labeled = []
    for i, c in enumerate(classes):
        if c < num_seen and rng.rand() < ratio:
            labeled.append(i)
    return labeled


def some_classes(seed, num_classes=6, num_images=300):
    rng = random.Random(seed)
    return torch.tensor([rng.randrange(num_classes) for _ in range(num_images)])


def a_split(**changes):
    config = SplitConfig(**{"num_seen": 3, "labeled_ratio": 0.4, "seed": 7, **changes})
    return make_split(some_classes(0), config, num_data_classes=6)


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize(("num_seen", "ratio"), [(1, 0.5), (3, 0.2), (5, 0.9)])
def test_matches_the_loop(seed, num_seen, ratio):
    classes = some_classes(seed)
    split = make_split(classes, SplitConfig(num_seen=num_seen, labeled_ratio=ratio, seed=seed), num_data_classes=6)
    labeled = naive_labeled(classes.tolist(), num_seen, ratio, seed)
    assert split.labeled.tolist() == labeled
    assert split.unlabeled.tolist() == [i for i in range(300) if i not in labeled]


@pytest.mark.parametrize("seed", [0, 5])
def test_the_exact_rule_draws_a_share_of_the_pooled_images(seed):
    classes = some_classes(seed)
    config = SplitConfig(num_seen=3, labeled_ratio=0.4, seed=seed, rule="exact")
    split = make_split(classes, config, num_data_classes=6)
    pooled = (classes < 3).nonzero().flatten().tolist()
    drawn = np.random.RandomState(seed).choice(len(pooled), int(0.4 * len(pooled)), replace=False)
    assert split.labeled.tolist() == sorted(pooled[i] for i in drawn)
    assert max(np.diff(split.labeled.numpy())) > 1  # drawn from all over the file, not its beginning


def test_small_example_by_hand():
    # RandomState(0) begins .5488 .7152 .6028 .5449 .4237 .6459 .4376; images 1 and 4 are novel and draw nothing.
    classes = torch.tensor([0, 2, 0, 1, 2, 0, 1, 0, 1])
    split = make_split(classes, SplitConfig(num_seen=2, labeled_ratio=0.55), num_data_classes=3)
    assert split.labeled.tolist() == [0, 5, 6, 8]
    assert split.unlabeled.tolist() == [1, 2, 3, 4, 7]
    assert split.visible_labels(classes).tolist() == [0, -1, -1, -1, -1, 0, 1, -1, 1]


def test_the_released_counts_for_cifar100():
    """With 500 images in each class, the counts do not depend on the order of the images."""
    classes = torch.arange(100).repeat_interleave(500)[
        torch.randperm(50_000, generator=torch.Generator().manual_seed(3))
    ]
    split = make_split(classes, SplitConfig(num_seen=50), num_data_classes=100)
    assert (len(split.labeled), len(split.unlabeled)) == (12_597, 37_403)
    assert batch_shares(split, 512) == (128, 384)


def test_hidden_labels_of_novel_images_do_not_matter():
    classes = some_classes(4)
    novel = torch.nonzero(classes >= 3).flatten()
    shuffled = classes.clone()
    shuffled[novel] = classes[novel[torch.randperm(len(novel), generator=torch.Generator().manual_seed(0))]]
    assert not torch.equal(classes, shuffled)
    config = SplitConfig(num_seen=3)
    one, two = (make_split(c, config, num_data_classes=6) for c in (classes, shuffled))
    assert torch.equal(one.labeled, two.labeled)
    assert one.fingerprint == two.fingerprint
    assert torch.equal(one.visible_labels(classes), two.visible_labels(shuffled))


def test_the_global_random_state_is_left_alone():
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    a_split()
    assert (np.random.get_state()[1] == before).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=30, max_size=80), st.integers(1, 4), st.floats(0.05, 0.95), st.integers(0, 99)
)
def test_labeled_and_unlabeled_are_all_images_once(classes, num_seen, ratio, seed):
    classes = torch.tensor(classes)
    try:
        split = make_split(classes, SplitConfig(num_seen=num_seen, labeled_ratio=ratio, seed=seed), num_data_classes=5)
    except DataError:  # a seen class without labels: the other tests look at the message
        return
    assert sorted(split.labeled.tolist() + split.unlabeled.tolist()) == list(range(len(classes)))
    assert bool((split.labeled.diff() > 0).all())
    assert bool((split.unlabeled.diff() > 0).all())
    visible = split.visible_labels(classes)
    assert torch.equal(visible[split.labeled], classes[split.labeled])
    assert bool((visible[split.unlabeled] == -1).all())
    assert int(visible.max()) < num_seen


def test_number_of_classes_to_look_for():
    assert a_split().num_classes == 6
    assert a_split(num_classes=20).num_classes == 20
    assert a_split(num_classes=4).num_classes == 4


def test_no_novel_class():
    with pytest.raises(ConfigError, match=r"num_seen = 6 leaves no novel class: the data has 6 classes.*at most 5"):
        a_split(num_seen=6)


def test_seed_too_large():
    with pytest.raises(ConfigError, match=r"split.seed = 4294967296 must be a whole number from 0 to"):
        a_split(seed=2**32)
    a_split(seed=2**32 - 1)


def test_seen_class_without_labels():
    classes = torch.tensor([0] * 50 + [1] * 2 + [2] * 50)
    assert all(i < 50 for i in naive_labeled(classes.tolist(), 2, 0.1, 0))
    with pytest.raises(DataError, match=r"seen class 1 has 2 training images and none.* = 0.1\. Raise labeled_ratio"):
        make_split(classes, SplitConfig(num_seen=2, labeled_ratio=0.1, seed=0), num_data_classes=3)
    with pytest.raises(DataError, match=r"seen class 1 has 0 training images"):
        make_split(torch.tensor([0, 0, 0, 2]), SplitConfig(num_seen=2, labeled_ratio=0.9), num_data_classes=3)


def test_nothing_unlabeled():
    with pytest.raises(DataError, match=r"all 2 training images are labeled .* nothing is left to discover.*Raise"):
        make_split(torch.tensor([0, 0]), SplitConfig(num_seen=1, labeled_ratio=0.99), num_data_classes=2)


# --- saved and read back ----------------------------------------------------------------------------------------------


def test_json_round_trip():
    split = a_split(num_classes=9)
    back = Split.from_json(json.loads(json.dumps(split.to_json())))
    assert (back.num_seen, back.num_classes, back.labeled_ratio, back.seed) == (3, 9, 0.4, 7)
    assert torch.equal(back.labeled, split.labeled)
    assert torch.equal(back.unlabeled, split.unlabeled)
    assert back.labeled.dtype == back.unlabeled.dtype == torch.int64
    assert back.fingerprint == split.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["labeled"].pop(),
        lambda d: d["labeled"].__setitem__(0, d["labeled"][0] + 1),
        lambda d: d.update(num_images=d["num_images"] + 1),
        lambda d: d.update(num_seen=2),
        lambda d: d.update(extra=1),
        lambda d: d.pop("seed"),
        lambda d: d.pop("fingerprint"),
    ],
)
def test_changed_json_is_refused(change):
    data = json.loads(json.dumps(a_split().to_json()))
    change(data)
    with pytest.raises(DataError, match="does not match its fingerprint"):
        Split.from_json(data)


@pytest.mark.parametrize("facts", [{}, {"num_images": 3, "labeled": [7]}, {"num_images": "x", "labeled": [0]}])
def test_json_that_is_no_split(facts):
    from opencon.data.split import _fingerprint

    with pytest.raises(DataError, match="this is not a saved split"):
        Split.from_json({**facts, "fingerprint": _fingerprint(facts)})


def test_fingerprint_tells_splits_apart():
    prints = {a_split().fingerprint, a_split(seed=8).fingerprint, a_split(num_classes=7).fingerprint}
    assert len(prints) == 3


def test_split_of_other_data():
    split = a_split()
    with pytest.raises(DataError, match=r"the split is for 300 training images, but the data has 299"):
        split.visible_labels(some_classes(0)[:-1])
    with pytest.raises(DataError, match=r"labels images of classes other than the 3 seen ones"):
        split.visible_labels(some_classes(1))


# --- batches ----------------------------------------------------------------------------------------------------------


def hand_made(num_labeled, num_unlabeled):
    labeled = torch.arange(num_labeled)
    return Split(1, 2, 0.5, 0, labeled, torch.arange(num_unlabeled) + num_labeled)


def test_batch_shares_round_down():
    assert batch_shares(hand_made(25, 75), 10) == (2, 8)
    assert batch_shares(hand_made(25, 75), 4) == (1, 3)
    assert batch_shares(hand_made(99, 1), 100) == (99, 1)


def test_batch_without_labeled_images():
    with pytest.raises(ConfigError, match=r"batch_size = 3 leaves no labeled image .*: 25 of 100 .* 25.00%.* do is 4;"):
        batch_shares(hand_made(25, 75), 3)


def test_batch_larger_than_the_data():
    with pytest.raises(ConfigError, match=r"batch_size = 101 is more than the 100 training images"):
        batch_shares(hand_made(25, 75), 101)
    with pytest.raises(ConfigError, match=r"batch_size = 101 is more than the 100 training images"):
        check_split(SplitConfig(num_seen=5), 10, 100, 101)


@pytest.mark.parametrize("num_images", [100, 997, 1797])
@pytest.mark.parametrize("num_labeled", [1, 3, 7, 49])
def test_the_smallest_batch_named_is_the_smallest(num_images, num_labeled):
    split = hand_made(num_labeled, num_images - num_labeled)
    works = [b for b in range(1, num_images + 1) if int(b * num_labeled / num_images) >= 1]
    with pytest.raises(ConfigError, match=rf"would do is {works[0]};"):
        batch_shares(split, works[0] - 1)
    assert batch_shares(split, works[0])[0] == 1


def test_check_split_before_anything_is_loaded():
    check_split(SplitConfig(num_seen=50), 100, 50_000, 512)
    check_split(SplitConfig(num_seen=5, labeled_ratio=0.1), 10, 1797, 20)
    with pytest.raises(ConfigError, match=r"batch_size = 19 leaves .*: about 90 of 1797 .* 5.00%.* would do is 20;"):
        check_split(SplitConfig(num_seen=5, labeled_ratio=0.1), 10, 1797, 19)
    with pytest.raises(ConfigError, match=r"num_seen = 10 leaves no novel class: the data has 10"):
        check_split(SplitConfig(num_seen=10), 10, 1797, 512)
    # looking for more classes than there are does not change how many images are labeled
    check_split(SplitConfig(num_seen=5, num_classes=100), 10, 1797, 4)


def test_a_given_share_of_a_batch():
    assert batch_shares(hand_made(25, 75), 20, 0.5) == (10, 10)
    assert batch_shares(hand_made(25, 75), 16, 1 / 8) == (2, 14)
    assert batch_shares(hand_made(25, 75), 50, 0.5) == (25, 25)  # all labeled images at once


@pytest.mark.parametrize(("batch", "share"), [(52, 0.5), (90, 0.1), (4, 0.1), (4, 0.9)])
def test_a_share_that_cannot_be_had(batch, share):
    """More labeled or more unlabeled images than there are, or none of one kind."""
    with pytest.raises(ConfigError, match=rf"train.labeled_share = {share} of train.batch_size = {batch} asks for"):
        batch_shares(hand_made(25, 75), batch, share)
