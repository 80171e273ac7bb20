"""What all commands share: the application, two consoles, common options.

Heavy rooms (torch, scikit-learn) are imported inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
# Output holds the user's paths and names, in which [brackets] and :colons: have no meaning.
console = Console(highlight=False, markup=False, emoji=False)
errors = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Imports = Annotated[
    list[Path] | None,
    typer.Option("--import", metavar="FILE", help="A Python file with methods, encoders, ... of your own; repeatable."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and the settings, compute nothing.")]
EVERY = 10.0  # seconds between two lines of progress; ours: an hour is 360 lines
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_memory() -> None:
    """Let freed memory stay with the process, where the C library is glibc (unless OPENCON_KEEP_MEMORY is 0).

    Otherwise, depending on the layout of the heap, every training step on a CPU returns much of its memory to the system
    and gets it back page by page, zeroed. The setting holds for the whole process, so a library must not decide it.
    """
    if sys.platform == "linux" and os.environ.get("OPENCON_KEEP_MEMORY") != "0":
        with suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            # Some versions refuse more than 32 MB. Alone, the second call would do harm: it also ends the adaptation of the
            # first threshold, which starts at 128 kB.
            if mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25):
                mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def print_anything() -> None:
    """Let both streams print what the terminal cannot show, as escapes: a file name may hold bytes that are no text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_out_of_memory(err: BaseException) -> bool:
    """Whether Python, or torch on either device, has found no memory. torch reports it as RuntimeError on a CPU."""
    words = ("can't allocate memory", "out of memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(err, MemoryError) or any(word in str(err) for word in words)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Open-world contrastive learning: recognize the classes you named, discover the ones you did not."""
    if version:
        console.print(f"opencon {__version__}")
        raise typer.Exit


class Lines:
    """Progress where the output is no terminal: a line now and then, none for what is quick."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.say, self.clock = say, clock
        self.began: dict[str, float] = {}
        self.said: dict[str, float] = {}

    def update(self, stage: str, done: int, total: int, note: str = "") -> None:
        """So many of all are done; said if the last line is ten seconds old, or if it was the last part."""
        now = self.clock()
        began = self.began.setdefault(stage, now)
        last = self.said.get(stage)
        if now - (began if last is None else last) < EVERY and (last is None or done < total):
            return
        self.said[stage] = now
        left = f", about {(now - began) * (total - done) / done:,.0f} s left" if 0 < done < total else ""
        self.say(f"{stage}: {done:,} of {total:,}, {now - began:,.0f} s{left}{note and f'; {note}'}")


def import_plugins(files: Iterable[Path] | None) -> None:
    """Import what installed packages bring, then the files that were given."""
    from opencon.plugins import import_file, import_installed

    for problem in import_installed():
        errors.print(f"opencon: {problem}")
    for file in files or ():
        import_file(file)


def show_plan(plan: Mapping[str, str]) -> None:
    """Print a plan as aligned lines."""
    for key, text in plan.items():
        console.print(Text.assemble((f"{key:>10}", "bold"), f"  {text}"), soft_wrap=True)


def show_count(estimate: CountEstimate) -> None:
    """Print an estimate and the reason for it."""
    span = f" (between {estimate.low} and {estimate.high})" if estimate.low < estimate.high else ""
    console.print(f"About {estimate.num_classes} classes{span}. {estimate.why}", soft_wrap=True)


@contextmanager
def resumable(what: str = "The same command resumes from the last finished epoch.") -> Iterator[None]:
    """Ctrl-C inside ends with one line and code 130; SIGTERM, by which schedulers and containers stop a job, with 143."""
    signals: list[int] = []

    def stop(number: int, frame: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop) if threading.current_thread() is threading.main_thread() else None
    try:
        yield
    except KeyboardInterrupt:
        errors.print(f"opencon: interrupted. {what}")
        raise typer.Exit(128 + (signals or [signal.SIGINT])[0]) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """Show our warnings as plain lines, without their position in the code."""

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            errors.print(f"note: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield
