"""Work in other processes. What holds Python's lock, such as making text and much of Pillow, runs in several at once there.

A worker is a fresh Python that waits for calls on a connection. It does not import the program of the user again, which
`multiprocessing` would, and it ends when its connection does, so none is left behind by a kill.

    parent, a thread for each worker  --(function, arguments)-->  worker
                                      <--(answer or error)------
"""

from __future__ import annotations

import itertools
import mmap
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from opencon.errors import RunError

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Address = tuple[str, tuple[int, ...], int]  # path, shape, and a number that is never used again, as the path may be
BESIDE = "OPENCON_BESIDE"  # in the environment of a worker: how many there are, and a file that one of them may lock
FEWEST_CORES = 4  # from which processes pay, ours: up to there threads decode as fast (benchmarks/worker_path.py)


def usable_cores() -> int:
    """Cores that this process may run on; ranks on the same machine share them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def can_share() -> bool:
    """Whether this system has what workers need: connections that are inherited, and memory without a name."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class Processes(Executor):
    """Workers, each a process. Functions and arguments must be importable and plain; a worker starts with its first call."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="worker")
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(number):
            self._idle.put(None)
        self._lock = SharedBytes((1,))

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call a function in a worker that is free."""
        assert not kwargs
        return self._threads.submit(self._call, function, args)

    def _call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        worker = self._idle.get()
        try:
            worker = worker or _Worker(f"{self.number} {self._lock.address[0]}")
            return worker.call(function, args)
        finally:
            self._idle.put(worker)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers; calls that have begun are finished, unless nobody waits for them."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        if not wait:
            return
        for _ in range(self.number):
            worker = self._idle.get()
            if worker is not None:
                worker.end()


class _Worker:
    def __init__(self, beside: str) -> None:
        self.connection, other = Pipe()
        code = f"from opencon.processes import answer; answer({other.fileno()})"
        # The same modules as here, wherever they come from. One thread each: there are as many workers as cores.
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", BESIDE: beside}
        own |= {"PYTHONWARNINGS": "ignore"}  # what is wrong with a file is said here
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, env=os.environ | own
        )
        other.close()

    def call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        try:
            self.connection.send((function, args))
            result, error = self.connection.recv()
        except (EOFError, OSError) as err:
            raise RunError(
                "a process that helped was ended from outside, perhaps because memory ran out. Run it again; with less "
                "memory, decode in threads."
            ) from err
        if error is not None:
            raise error
        answered: T = result
        return answered

    def end(self) -> None:
        self.connection.close()
        self.process.wait()

    def __del__(self) -> None:
        self.connection.close()


def answer(descriptor: int) -> None:
    """What a worker does: calls, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks
    with Connection(descriptor) as connection:
        while True:
            try:
                function, args = connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # at once: there is nothing to put in order
            reply: tuple[Any, Exception | None]
            try:
                reply = function(*args), None
            except Exception as err:  # it is raised where the function was called
                reply = None, err
            connection.send(reply)


def beside() -> tuple[int, str]:
    """In a worker: how many there are, and a file that one of them may lock. Elsewhere: 1 and nothing."""
    number, _, lock = os.environ.get(BESIDE, "1 ").partition(" ")
    return int(number), lock


class SharedBytes:
    """Memory that workers can write into. It has no name, so nothing of it is left when its processes have ended."""

    _serial = itertools.count()

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.number = shape, next(self._serial)
        self.descriptor = os.memfd_create("opencon")
        os.ftruncate(self.descriptor, max(int(np.prod(shape)), 1))
        self.array: Bytes = _mapped(self.descriptor, shape)

    @property
    def address(self) -> Address:
        """What a worker gives to `shared_array`."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}", self.shape, self.number

    def __del__(self) -> None:
        os.close(self.descriptor)


@lru_cache(maxsize=8)
def shared_array(address: Address) -> Bytes:
    """In a worker: the memory of a `SharedBytes`."""
    path, shape, _ = address
    descriptor = os.open(path, os.O_RDWR)
    try:
        return _mapped(descriptor, shape)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, shape: tuple[int, ...]) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, 0), dtype=np.uint8)[: int(np.prod(shape))].reshape(shape)
