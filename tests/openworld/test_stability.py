import torch

from opencon.openworld.fit import OpenWorldConfig, fit_features
from opencon.openworld.stability import stability
from tests.openworld.test_fit import problem


def test_classes_that_stand_apart_come_back():
    x, labels, _ = problem((40, 40, 40, 40), num_seen=2)
    found = fit_features(x, labels, OpenWorldConfig(num_novel=2))
    stable = stability(found.model, x, found.prediction.classes, labels)
    assert stable.shape == (4,)
    assert (stable > 0.95).all()
    assert torch.equal(stable, stability(found.model, x, found.prediction.classes, labels))


def test_groups_of_one_cloud_do_not():
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    labels = torch.full((200,), -1)
    found = fit_features(x, labels, OpenWorldConfig(num_novel=5))
    stable = stability(found.model, x, found.prediction.classes, labels)
    assert stable.nanmean() < 0.8


def test_a_class_whose_labels_are_all_in_one_half():
    x, labels, _ = problem((30, 30, 30), num_seen=2, num_labeled=1)
    found = fit_features(x, labels, OpenWorldConfig(num_novel=1))
    assert (stability(found.model, x, found.prediction.classes, labels) > 0.8).all()


def test_too_few_rows_to_halve():
    x, labels = torch.tensor([[0.0, 0], [0, 1], [9, 9]]), torch.tensor([0, -1, -1])
    found = fit_features(x, labels, OpenWorldConfig(num_novel=1))
    stable = stability(found.model, x, found.prediction.classes, labels)
    assert ((stable >= 0) | stable.isnan()).all()
