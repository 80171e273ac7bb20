import platform
import subprocess
import sys

import pytest


def loaded(code):
    """Which of torch, sympy and the compiler are imported after some lines in a new process."""
    names = ("torch", "sympy", "torch._inductor.compile_fx")
    code += f"\nimport sys; print(*(name for name in {names} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


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


def faults(before):
    """Pages that the system hands out while 16 arrays of 8 MB are filled and freed, twenty times, after some lines."""
    code = before + FILL_AND_FREE
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept():
    keeps = "from opencon.early import keep_memory; keep_memory()"
    usual = faults("")
    assert faults(keeps) < 0.2 * usual
    assert faults(f"import os; os.environ['OPENCON_KEEP_MEMORY'] = '0'; {keeps}") > 0.5 * usual


def test_nothing_heavy_comes_with_the_module_or_for_a_cpu():
    assert loaded("from opencon import early; early.import_compiler('cpu'); early.wait_for_compiler()") == []


# A machine that says it has a GPU.
WITH_GPU = "import torch; torch.cuda.is_available = lambda: True\nfrom opencon import early\n"


def test_the_compiler_is_there_after_waiting_where_there_is_a_gpu():
    lines = "early.import_compiler('auto')\n" * 2 + "early.wait_for_compiler()"
    assert loaded(WITH_GPU + lines) == ["torch", "sympy", "torch._inductor.compile_fx"]
    without = WITH_GPU.replace("True", "False")
    assert loaded(without + lines) == ["torch", "sympy"]


def test_a_command_that_ends_early_ends_cleanly():
    """A thread in the middle of an import when the process ends would complain, or bring it down."""
    code = WITH_GPU + "from opencon.cli import main; main(['train', 'nothing-of-that-name'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("opencon: ")
    assert "Traceback" not in ended.stderr
