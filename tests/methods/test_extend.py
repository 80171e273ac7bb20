"""Rejection and what becomes of the rejected."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from opencon.config import MethodConfig
from opencon.errors import ConfigError
from opencon.methods import FeatureBank, Task
from opencon.methods.extend import check_rejection, cluster_rejected, expected_novel, reject_and_cluster, rejected

TASK = Task(num_seen=2, num_classes=5, labeled_ratio=0.5, num_images=10)
FREE = torch.full((10,), -1)


def reject(score, labels=FREE, task=TASK, share=None, threshold=None):
    return rejected(torch.tensor(score), labels, task, share=share, threshold=threshold).nonzero().flatten().tolist()


SCORES = [0.9, 0.1, 0.8, 0.2, 0.7, 0.3, 0.6, 0.4, 0.5, 0.0]


def test_as_many_are_rejected_as_are_expected_to_be_novel():
    assert expected_novel(TASK, 10) == 6  # three of five classes
    assert reject(SCORES) == [1, 3, 5, 7, 8, 9]


def test_labeled_rows_count_as_images_but_are_never_rejected():
    labels = FREE.clone()
    labels[[1, 9]] = 0  # the lowest two
    assert reject(SCORES, labels) == [3, 4, 5, 6, 7, 8]
    labels[:] = 0
    labels[4] = -1
    assert reject(SCORES, labels) == [4]  # six are expected, one is free
    labels[4] = 1
    assert reject(SCORES, labels) == []
    assert reject(SCORES, labels, share=1.0) == []


def test_a_share_is_of_the_unlabeled_rows():
    labels = FREE.clone()
    labels[[1, 9]] = 0
    assert reject(SCORES, labels, share=0.5) == [3, 5, 7, 8]
    assert reject(SCORES, labels, share=0.0) == []
    assert reject(SCORES, labels, share=1.0) == [0, 2, 3, 4, 5, 6, 7, 8]


def test_a_threshold_rejects_what_lies_below_it():
    labels = FREE.clone()
    labels[1] = 0
    assert reject(SCORES, labels, threshold=0.3) == [3, 9]  # 0.3 itself is kept
    assert reject(SCORES, threshold=0.0) == []


def test_equal_scores_are_rejected_in_order():
    assert reject([0.5] * 10) == [0, 1, 2, 3, 4, 5]


def test_the_rejected_are_clustered_and_nobody_else():
    corners = torch.eye(3).repeat_interleave(3, dim=0)  # three groups of three
    z = torch.cat([corners, torch.full((1, 3), 5.0)])
    is_novel = torch.tensor([True] * 9 + [False])
    classes = torch.ones(10, dtype=torch.long)
    got = cluster_rejected(z, classes, is_novel, TASK)
    assert got[9] == 1
    assert sorted({tuple(got[i : i + 3].unique().tolist()) for i in (0, 3, 6)}) == [(2,), (3,), (4,)]
    assert (classes == 1).all()  # the input is left alone


@pytest.mark.parametrize("num", [0, 1, 2])
def test_fewer_rejected_than_novel_classes_are_groups_of_one(num):
    is_novel = torch.arange(10) < num
    got = cluster_rejected(torch.randn(10, 3), torch.zeros(10, dtype=torch.long), is_novel, TASK)
    assert sorted(got[:num].tolist()) == list(range(2, 2 + num))
    assert (got[num:] == 0).all()


def test_a_classifier_rejects_by_its_largest_probability():
    logits = torch.tensor([[5.0, 0.0], [0.0, 5.0], [0.1, 0.0], [0.0, 0.2], [0.3, 0.0]])
    z = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 9.0]])
    task = Task(num_seen=2, num_classes=4, labeled_ratio=0.5, num_images=5)
    got = reject_and_cluster(FeatureBank(z, torch.full((5,), -1)), logits, task, share=0.6, threshold=None)
    assert got.classes[:2].tolist() == [0, 1]
    assert got.classes[2] == got.classes[3]  # of one direction, whatever their length
    assert sorted(got.classes[3:].tolist()) == [2, 3]
    assert got.seen_logits is logits
    torch.testing.assert_close(got.novelty, 1 - logits.softmax(dim=1).amax(dim=1))
    kept = reject_and_cluster(FeatureBank(z, torch.full((5,), -1)), logits, task, share=None, threshold=0.5)
    assert kept.classes.tolist() == [0, 1, 0, 1, 0]  # no probability of two is below a half


@dataclass(frozen=True, kw_only=True)
class Settings(MethodConfig):
    name: ClassVar[str] = "settings"
    reject_share: float | None = None
    reject_threshold: float | None = None


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("key", ["reject_share", "reject_threshold"])
def test_both_lie_between_0_and_1(key, value):
    with pytest.raises(ConfigError, match=f"method.{key} = {value} must lie between 0 and 1"):
        check_rejection(Settings(**{key: value}))
    check_rejection(Settings(**{key: 0.0}))
    check_rejection(Settings(**{key: 1.0}))


def test_only_one_rule_at_a_time():
    with pytest.raises(ConfigError, match=r"reject_share = 0.2 and method.reject_threshold = 0.3 .* Give one"):
        check_rejection(Settings(reject_share=0.2, reject_threshold=0.3))
    check_rejection(Settings())
