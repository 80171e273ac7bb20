"""One thread per test process: two processes with two threads each on two cores crawl.

Examples that hypothesis draws are the same in every run; pytest --hypothesis-profile=explore looks for new ones.
The common checks run over a plugin, too: pytest tests/methods/test_every_method.py --plugin my_method.py
"""

import sys

import pytest
import torch
from hypothesis import settings

from opencon.plugins import import_file
from opencon.registry import Registry

torch.set_num_threads(1)
sys.modules["umap"] = None  # it takes a minute to start; one test asks for it
settings.register_profile("explore", derandomize=False, deadline=None)
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")


def pytest_addoption(parser):
    parser.addoption("--plugin", action="append", default=[], metavar="FILE", help="a plugin to check with the others")


def pytest_configure(config):
    for file in config.getoption("--plugin"):
        import_file(file)


@pytest.fixture
def own_plugins(tmp_path, monkeypatch):
    """What is registered or imported in the test is gone afterwards, and the user has imported nothing before."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for registry in Registry.every:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
