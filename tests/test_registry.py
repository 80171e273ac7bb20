import pytest

from opencon.errors import ConfigError
from opencon.registry import Registry


def test_unknown_name_gets_a_suggestion_and_the_list():
    things: Registry[int] = Registry("thing")
    things.add("alpha", 1)
    things.add("beta", 2)
    assert things["alpha"] == 1
    assert things.names() == ["alpha", "beta"]
    with pytest.raises(ConfigError, match=r"unknown thing 'alpah'. Did you mean 'alpha'\? Known: alpha, beta."):
        things["alpah"]


def test_a_name_is_taken_once():
    things: Registry[int] = Registry("thing")
    things.add("alpha", 1)
    with pytest.raises(RuntimeError, match="registered twice"):
        things.add("alpha", 2)


def test_one_can_loop_over_it():
    registry = Registry("thing")
    registry.add("b", 2)
    registry.add("a", 1)
    assert list(registry) == ["a", "b"]
    assert len(registry) == 2
