"""Threads together never hold more pixels than the budget, and an image larger than it is still read, alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from opencon.data import sources
from opencon.data.pixel_budget import PixelBudget


class Watched(PixelBudget):
    """Notes the most pixels and images that were held at the same time."""

    def __init__(self, most):
        super().__init__(most)
        self.seen, self.inside, self.together, self.lock = 0, 0, 0, threading.Lock()

    def take(self, pixels):
        held, watched = super().take(pixels), self

        class Noted:
            def __enter__(self):
                held.__enter__()
                with watched.lock:
                    watched.inside += 1
                    watched.seen = max(watched.seen, watched.taken)
                    watched.together = max(watched.together, watched.inside)

            def __exit__(self, *error):
                with watched.lock:
                    watched.inside -= 1
                return held.__exit__(*error)

        return Noted()


def test_threads_wait_for_room_and_a_large_one_comes_alone():
    budget, barrier = Watched(100), threading.Barrier(8)

    def work(pixels):
        barrier.wait()
        with budget.take(pixels):
            assert budget.taken <= 100

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [60, 60, 60, 40, 40, 1000, 1000, 100]))
    assert budget.taken == 0
    assert budget.seen <= 100


def test_what_goes_wrong_inside_gives_its_pixels_back():
    budget = PixelBudget(10)

    def fail():
        with budget.take(10):
            raise ValueError

    for _ in range(3):
        with pytest.raises(ValueError):
            fail()
    assert budget.taken == 0


def test_images_are_decoded_within_the_budget(tmp_path, monkeypatch):
    paths = [tmp_path / f"{i}.png" for i in range(6)]
    for path in paths:
        Image.fromarray(np.zeros((40, 50, 3), np.uint8)).save(path)
    budget = Watched(2 * 40 * 50)
    monkeypatch.setattr(sources, "BUDGET", budget)
    images, kept, problems = sources.read_images(paths, 8)
    assert (len(images), kept, problems) == (6, [0, 1, 2, 3, 4, 5], ())
    assert 40 * 50 <= budget.seen <= 2 * 40 * 50
    assert budget.together <= 2
