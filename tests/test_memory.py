"""Commands keep the memory they have freed."""

import ctypes
import platform
import subprocess
import sys

import pytest

from opencon.cli import base

FILL_AND_FREE = """
import resource, numpy
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
start = faults()
for _ in range(20):
    arrays = [numpy.ones(1 << 20) for _ in range(16)]
    del arrays
print(faults() - start)
"""
KEEP = "from opencon.cli.base import keep_memory; keep_memory()"


def faults(before):
    """Pages that the system hands out while 16 arrays of 8 MB are filled and freed, twenty times, after some lines."""
    code = before + FILL_AND_FREE
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_unless_the_user_says_otherwise():
    usual = faults("")
    assert faults(KEEP) < 0.2 * usual
    assert faults(f"import os; os.environ['OPENCON_KEEP_MEMORY'] = '0'; {KEEP}") > 0.5 * usual


@pytest.mark.parametrize(
    ("largest", "calls"),
    [
        (1 << 30, [(-3, 1 << 30), (-1, 2**31 - 1)]),
        (1 << 25, [(-3, 1 << 30), (-3, 1 << 25), (-1, 2**31 - 1)]),
        (0, None),
    ],
)
def test_a_library_that_refuses_is_left_as_it_is(monkeypatch, largest, calls):
    """Half of the two settings would be worse than none."""
    asked = []

    class Library:
        @staticmethod
        def mallopt(what, value):
            asked.append((what, value))
            return int(what == base.M_TRIM_THRESHOLD or value <= largest)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    base.keep_memory()
    assert asked == (calls or [(-3, 1 << 30), (-3, 1 << 25)])
