"""What all commands share: the application, two consoles, common options.

Heavy rooms (torch, scikit-learn) are imported inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from opencon.version import __version__

if TYPE_CHECKING:
    from opencon.counting.base import CountEstimate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# What is printed holds paths and names of the user's, in which [brackets] and :colons: mean nothing.
console = Console(highlight=False, markup=False, emoji=False)
errors = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and the settings, compute nothing.")]


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_memory() -> None:
    """Let freed memory stay with the process, where the C library is glibc (unless OPENCON_KEEP_MEMORY is 0).

    Otherwise, depending on how the heap happens to lie, every training step on a CPU hands much of its memory back, and is
    given it anew page by page, zeroed. This is for a whole process, so not for a library to decide.
    """
    if sys.platform == "linux" and os.environ.get("OPENCON_KEEP_MEMORY") != "0":
        with suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            # Some versions refuse more than 32 MB. Alone, the second call would do harm: it also ends the adaptation of the
            # first threshold, which starts at 128 kB.
            if mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25):
                mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Open-world contrastive learning: recognize the classes you named, discover the ones you did not."""
    if version:
        console.print(f"opencon {__version__}")
        raise typer.Exit


def show_plan(plan: Mapping[str, str]) -> None:
    """A plan as aligned lines."""
    for key, text in plan.items():
        console.print(Text.assemble((f"{key:>10}", "bold"), f"  {text}"), soft_wrap=True)


def show_count(found: CountEstimate) -> None:
    """An estimate and how it was found."""
    span = f" (between {found.low} and {found.high})" if found.low < found.high else ""
    console.print(f"About {found.num_classes} classes{span}. {found.why}", soft_wrap=True)


@contextmanager
def resumable(what: str = "The same command resumes from the last finished epoch.") -> Iterator[None]:
    """Ctrl-C inside ends with a word and code 130; SIGTERM, by which schedulers and containers stop a job, with 143."""
    asked: list[int] = []

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGTERM, stop) if threading.current_thread() is threading.main_thread() else None
    try:
        yield
    except KeyboardInterrupt:
        errors.print(f"opencon: interrupted. {what}")
        raise typer.Exit(128 + (asked or [signal.SIGINT])[0]) from None
    finally:
        if usual is not None:
            signal.signal(signal.SIGTERM, usual)
