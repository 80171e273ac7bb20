"""What a command does first, before anything heavy is imported."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import threading

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_memory() -> None:
    """Let freed memory stay with the process, where the C library is glibc (unless OPENCON_KEEP_MEMORY is 0).

    Otherwise, depending on how the heap happens to lie, every training step on a CPU hands much of its memory back, and is
    given it anew page by page, zeroed. This is for a whole process, so not for a library to decide.
    """
    if sys.platform == "linux" and os.environ.get("OPENCON_KEEP_MEMORY") != "0":
        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(M_MMAP_THRESHOLD, 1 << 30)
            mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


# sympy needs nothing of torch, which others import meanwhile.
_NAMES = ("sympy", "torch", "torch._dynamo", "torch._inductor.compile_fx")
_is_over = threading.Event()


def _import_compiler() -> None:
    for name in _NAMES:
        module = importlib.import_module(name)
        if _is_over.is_set() or (name == "torch" and not module.cuda.is_available()):
            return


_thread = threading.Thread(target=_import_compiler)


def import_compiler(device: str) -> None:
    """Begin to import torch's compiler in a thread, where training on this device (as for `pick_device`) may compile.

    It has thousands of files: ten seconds, where they are slow to read, in which other modules and the data can be read
    as well.
    """
    if device != "cpu" and not _thread.ident:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # sixteen take longer to start than they save
        _thread.start()


def wait_for_compiler(*, is_over: bool = False) -> None:
    """Return when the import has ended, if it has begun: two threads must not import one thing.

    With `is_over` what has not been begun is left out. A process must not end in the middle of it.
    """
    if _thread.ident:
        if is_over:
            _is_over.set()
        _thread.join()
