"""What new groups look like."""

import pytest
import torch

from opencon.encoders import imagenet
from opencon.encoders.efficientnet_lite import installed_weights
from opencon.encoders.weights import read_tensors
from opencon.photos.guesses import Guess, guess_names, without_twice


@pytest.fixture
def small(monkeypatch):
    """A classifier of three things, by the largest of three features."""
    monkeypatch.setattr(imagenet, "_classifier", lambda: (10 * torch.eye(3), torch.zeros(3)))
    monkeypatch.setattr("opencon.photos.guesses.imagenet_classes", lambda: ("ant", "bee", "cat"))


def test_there_is_a_name_for_every_class_of_the_classifier():
    names = imagenet.imagenet_classes()
    assert len(names) == len(set(names)) == len(read_tensors(installed_weights())["_fc.bias"])
    assert (names[0], names[207], names[999]) == ("tench", "golden retriever", "toilet tissue")
    assert all(name.strip() == name != "" for name in names)


def test_the_mean_is_over_probabilities(small):
    x = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0]])
    want = torch.stack([(10 * row).softmax(dim=0) for row in x]).mean(dim=0)
    torch.testing.assert_close(imagenet.imagenet_mean(x), want)


def test_new_groups_have_a_guess_and_seen_classes_none(small):
    x = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]])
    guesses = guess_names(x, torch.tensor([0, 1, 1, 2, -1]), 1, 4)
    assert [guess and guess.name for guess in guesses] == [None, "bee", "cat", None]  # the last group has no photo
    assert guesses[1].share > 0.99
    assert str(Guess("bee", 0.618)) == "bee, 62%"


def test_where_nothing_is_likely_there_is_no_guess(small, monkeypatch):
    monkeypatch.setattr("opencon.photos.guesses.LEAST", 0.9)
    assert guess_names(torch.zeros(4, 3), torch.ones(4, dtype=torch.long), 0, 2) == (None, None)


def test_another_encoder_has_no_guess():
    assert guess_names(None, torch.tensor([0, 1]), 0, 2) == (None, None)


def test_a_guess_that_becomes_a_name_is_marked_and_taken_once():
    guesses = (Guess("bee", 0.9), None, Guess("bee", 0.5), Guess("cat", 0.5))
    assert without_twice(guesses, {"cat?"}) == ["bee?", None, "bee 2?", "cat 2?"]
