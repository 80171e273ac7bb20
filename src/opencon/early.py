"""Torch's compiler, imported in a thread while everything else starts. This module itself imports nothing heavy.

The compiler has thousands of files: ten seconds, where they are slow to read, in which other modules and the data can be
read as well.
"""

from __future__ import annotations

import importlib
import os
import threading


def _import() -> None:
    importlib.import_module(
        "sympy"
    )  # the compiler needs it, and it needs nothing of torch, which is on its way meanwhile
    if importlib.import_module("torch").cuda.is_available():
        importlib.import_module("torch._inductor.compile_fx")


_thread = threading.Thread(target=_import, daemon=True)


def import_compiler(device: str) -> None:
    """Begin, where training on this device (as for `pick_device`) may compile."""
    if device != "cpu" and not _thread.ident:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # sixteen take longer to start than they save
        _thread.start()


def wait_for_compiler() -> None:
    """Return when the import has ended, if it has begun: two threads must not import one thing."""
    if _thread.ident:
        _thread.join()
