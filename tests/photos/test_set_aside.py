"""Twins and pictures of nothing."""

import numpy as np
import pytest
import torch
from PIL import Image

from opencon.openworld.fit import OpenWorldConfig, fit_features
from opencon.photos.set_aside import SetAside, find, fit_those_that_count, shows_nothing
from tests.openworld.test_fit import problem


def scene(seed, size=(96, 72)):
    """Smooth patches of color, as photos have them."""
    rng = np.random.default_rng(seed)
    patches = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return patches.resize(size, Image.Resampling.BICUBIC)


def saved(folder, pictures):
    paths = []
    for i, picture in enumerate(pictures):
        paths.append(folder / f"{i}.jpg")
        picture.save(paths[-1], quality=90)
    return paths


def rows_of(*which, dim=200):
    """Features: photos of the same number are close, others are far apart."""
    g = torch.Generator().manual_seed(0)
    centers = torch.randn(max(which) + 1, dim, generator=g)
    return centers[list(which)] + 0.1 * torch.randn(len(which), dim, generator=g)


def test_a_smaller_copy_is_a_twin_and_another_photo_with_such_features_is_not(tmp_path):
    first = scene(0)
    paths = saved(tmp_path, [first, first.resize((48, 36)), scene(1), scene(2), scene(3)])
    found = find(rows_of(0, 0, 0, 1, 2), paths, torch.full((5,), -1), 1)
    assert found.twin_of.tolist() == [-1, 0, -1, -1, -1]
    assert not found.is_nothing.any()
    assert found.counts.tolist() == [True, False, True, True, True]


def test_the_same_picture_with_other_features_is_no_twin(tmp_path):
    paths = saved(tmp_path, [scene(0), scene(0), scene(1)])
    assert find(rows_of(0, 1, 2), paths, torch.full((3,), -1), 1).twin_of.tolist() == [-1, -1, -1]


def test_the_labeled_one_counts_and_different_labels_both_do(tmp_path):
    same = [scene(0)] * 4
    paths = saved(tmp_path, [*same, scene(1)])
    x = rows_of(0, 0, 0, 0, 1)
    assert find(x, paths, torch.tensor([-1, 1, -1, 1, -1]), 1).twin_of.tolist() == [1, -1, 1, 1, -1]
    assert find(x, paths, torch.tensor([-1, 1, -1, 0, -1]), 1).twin_of[[1, 3]].tolist() == [-1, -1]


def test_none_is_set_aside_where_too_few_would_be_left(tmp_path):
    paths = saved(tmp_path, [scene(0)] * 4)
    assert find(rows_of(0, 0, 0, 0), paths, torch.full((4,), -1), 4).counts.all()
    assert find(rows_of(0, 0, 0, 0), paths, torch.tensor([0, -1, -1, -1]), 1).counts.all()  # no unlabeled one


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_blank_and_noise_show_nothing_and_photos_do(tmp_path, kind):
    rng = np.random.default_rng(0)
    pictures = {
        "black": Image.new("RGB", (300, 200)),
        "nearly black": Image.fromarray(rng.integers(18, 22, (200, 300, 3), dtype=np.uint8)),
        "noise": Image.fromarray(rng.integers(0, 256, (200, 300, 3), dtype=np.uint8)),
        "photo": scene(0, (300, 200)),
        "small photo": scene(1, (32, 32)),
        "a dot on white": Image.new("RGB", (300, 200), "white"),
    }
    pictures["a dot on white"].paste((0, 0, 0), (100, 80, 140, 110))
    got = {}
    for name, picture in pictures.items():
        picture.save(tmp_path / f"{name}.{kind}")
        got[name] = shows_nothing(tmp_path / f"{name}.{kind}")
    assert got == {name: name in ("black", "nearly black", "noise") for name in pictures}


def test_a_file_that_cannot_be_read_is_left_to_others(tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"no image at all")
    assert not shows_nothing(tmp_path / "broken.jpg")
    assert not shows_nothing(tmp_path / "absent.jpg")


def test_what_does_not_count_is_judged_all_the_same():
    x, labels, truth = problem((40, 40, 40), num_seen=2)
    twin_of = torch.full((120,), -1)
    twin_of[[5, 119]] = torch.tensor([4, 118])
    is_nothing = torch.zeros(120, dtype=torch.bool)
    is_nothing[60] = True
    aside, asked = SetAside(twin_of, is_nothing), []

    def fit(rows):
        asked.append(rows)
        return fit_features(x[rows], labels[rows], OpenWorldConfig(num_novel=1))

    fitted = fit_those_that_count(x, aside, fit)
    assert sorted(set(range(120)) - set(asked[0].tolist())) == [5, 60, 119]
    assert torch.equal(fitted.prediction.classes, truth)
    torch.testing.assert_close(fitted.z, fitted.model.embed(x))
    assert fitted.near.shape == (120, 5)
    assert (fitted.near == truth[:, None]).all()
    assert fitted.prediction.unlike_everything[60]
    assert fitted.prediction.p.shape == (120, 3)


def test_few_photos_and_a_twin_have_as_many_neighbors_each():
    x, labels, _ = problem((3, 2), num_seen=1, num_labeled=1)
    aside = SetAside(torch.tensor([-1, -1, 1, -1, -1]), torch.zeros(5, dtype=torch.bool))
    fitted = fit_those_that_count(
        x, aside, lambda rows: fit_features(x[rows], labels[rows], OpenWorldConfig(num_novel=1))
    )
    assert fitted.near.shape == (5, 3)


def test_what_the_user_labeled_shows_something(tmp_path):
    paths = saved(tmp_path, [Image.new("RGB", (96, 72)), Image.new("RGB", (96, 72), "white"), scene(0), scene(1)])
    assert find(rows_of(0, 1, 2, 3), paths, torch.tensor([0, -1, -1, -1]), 1).is_nothing.tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_where_all_count_the_fit_is_as_it_is():
    x, labels, _ = problem((20, 20), num_seen=1)
    aside = SetAside(torch.full((40,), -1), torch.zeros(40, dtype=torch.bool))
    made = fit_features(x, labels, OpenWorldConfig(num_novel=1))
    assert fit_those_that_count(x, aside, lambda rows: made) is made
