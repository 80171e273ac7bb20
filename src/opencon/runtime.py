"""The machine: device, seeds, environment."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from opencon.errors import ConfigError
from opencon.version import __version__


def pick_device(name: str = "auto") -> torch.device:
    """The device to compute on: "auto" takes a GPU where there is one."""
    calm_threads()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise ConfigError(f"--device {name!r} is not a device. Use auto, cpu, cuda or cuda:N.") from err
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported. Use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices. Use cpu.")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams and Triton kernels go to the current one
    return device


@functools.cache
def calm_threads() -> None:
    """Let threads that wait for others sleep, where torch was loaded before `opencon` could ask for that (`__init__.py`).

    GNU's OpenMP, which torch uses on Linux, lets threads run in circles only as long as there are no more of them than
    cores. So one more thread with helpers of its own is held, asleep: from then on all of them give way at once. Nothing
    happens where the user has said how threads are to wait, or where there is only one.
    """
    is_said = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys()
    if sys.platform != "linux" or is_said or torch.get_num_threads() == 1:
        return
    ready = threading.Event()

    def hold() -> None:
        torch.zeros(1 << 20).add_(1)  # large enough for torch to use all its threads
        ready.set()
        threading.Event().wait()

    threading.Thread(target=hold, name="opencon-calm", daemon=True).start()
    ready.wait()


@functools.cache
def has_triton() -> bool:
    """Whether Triton kernels can be made and run here: the package, a C compiler for their launchers, a GPU it knows."""
    compilers = (os.environ.get("CC") or "cc", "gcc", "clang")
    is_there = importlib.util.find_spec("triton") is not None and any(map(shutil.which, compilers))
    return is_there and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (7, 0)


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it in hardware, else float32."""
    if device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        able = any(getattr(torch.cpu, name, lambda: False)() for name in names)
    return torch.bfloat16 if able else torch.float32


_SEEDING = threading.RLock()


@contextlib.contextmanager
def seeded(*seed: int) -> Iterator[None]:
    """Run a block (building a network, say) from a seed, and leave the global random state as it was.

    Only one thread at a time may be inside: torch's functions know a single random state, that of the whole process.
    """
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(mix(*seed))  # torch.manual_seed would reseed the GPUs too
        yield


def generator(device: torch.device, *seed: int) -> torch.Generator:
    """A random stream of its own for each tuple of numbers, such as (seed, epoch, purpose)."""
    return torch.Generator(device=device).manual_seed(mix(*seed))


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers; nearby tuples give unrelated seeds (the splitmix64 finalizer)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def environment(device: torch.device) -> dict[str, Any]:
    """What a number depends on besides the configuration: versions and hardware."""
    return {
        "opencon": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} x {os.cpu_count()}"
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The revision of a checkout this package runs from, None for an installed package."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        result = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, timeout=5, check=True)
        return result.stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git("ls-files", "--error-unmatch", here.name)  # an environment inside another checkout is not that checkout
        return git("describe", "--always", "--dirty") or None
    return None
