import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from opencon import runtime
from opencon.errors import ConfigError
from opencon.runtime import environment, generator, has_triton, mix, pick_device, seeded


def test_seeded_block_repeats_and_leaves_the_world_alone():
    torch.manual_seed(5)
    outside = torch.rand(1)
    torch.manual_seed(5)
    with seeded(3):
        a = torch.rand(4)
    assert torch.equal(torch.rand(1), outside)
    with seeded(3):
        b = torch.rand(4)
    with seeded(4):
        c = torch.rand(4)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_threads_do_not_draw_from_each_others_seed():
    def drawn(_):
        with seeded(3):
            time.sleep(0.001)
            return torch.rand(4)

    torch.manual_seed(5)
    outside = torch.rand(1)
    torch.manual_seed(5)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(drawn, range(40)))
    assert all(torch.equal(a, found[0]) for a in found)
    assert torch.equal(torch.rand(1), outside)


def test_streams_of_nearby_numbers_are_unrelated():
    seeds = {mix(seed, epoch, purpose) for seed in range(10) for epoch in range(50) for purpose in range(3)}
    assert len(seeds) == 1500
    assert mix(1, 2) != mix(2, 1)
    assert all(0 <= s < 2**63 for s in seeds)
    cpu = torch.device("cpu")
    draws = torch.stack([torch.rand(1000, generator=generator(cpu, 0, epoch)) for epoch in range(2)])
    assert torch.corrcoef(draws)[0, 1].abs() < 0.1


@pytest.mark.parametrize("name", ["gpu0", "mps", "meta"])
def test_unknown_devices_are_refused(name):
    with pytest.raises(ConfigError, match="Use auto, cpu, cuda or cuda:N"):
        pick_device(name)


def test_an_absent_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="this machine has 0 CUDA devices"):
        pick_device("cuda:0")


def test_environment_names_what_a_number_depends_on():
    assert {"opencon", "torch", "python", "device", "cpu", "command"} <= environment(torch.device("cpu")).keys()


@pytest.mark.parametrize(
    ("package", "compiler", "gpu", "able"),
    [
        (True, "gcc", (9, 0), True),
        (False, "gcc", (9, 0), False),
        (True, None, (9, 0), False),
        (True, "gcc", (6, 1), False),
        (True, "gcc", None, False),
    ],
)
def test_triton_needs_its_package_a_compiler_and_a_gpu_it_knows(monkeypatch, package, compiler, gpu, able):
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: object() if package else None)
    monkeypatch.setattr(runtime.shutil, "which", lambda name: name if name == compiler else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    assert has_triton.__wrapped__() == able


# --- threads that wait ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "said", "policy", "is_held"),
    [
        ("opencon", {}, "PASSIVE", False),
        ("torch", {}, None, sys.platform == "linux"),  # torch has read the environment already
        ("opencon", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", False),
        ("opencon", {"GOMP_SPINCOUNT": "5"}, None, False),
        ("torch", {"KMP_BLOCKTIME": "1"}, None, False),
    ],
)
def test_threads_that_wait_give_way_unless_the_user_said_how(first, said, policy, is_held):
    code = f"""
import {first}, opencon, os, threading, torch
torch.set_num_threads(2)
from opencon.runtime import pick_device
before = torch.get_rng_state()
pick_device("cpu"), pick_device("cpu")
assert torch.equal(before, torch.get_rng_state())
print(os.environ.get("OMP_WAIT_POLICY"), [thread.name for thread in threading.enumerate()].count("opencon-calm"))
"""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environ = {name: value for name, value in os.environ.items() if name not in names} | said
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ).stdout
    assert found.split() == [str(policy), str(int(is_held))]
