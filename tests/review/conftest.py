"""Fixtures of the review: a made-up discovery, and a server in a process of its own."""

import contextlib
import re
import subprocess
import sys
import time

import httpx
import pytest

from tests.review.made import make_discovery

SECONDS = 60  # to wait for a server: machines may be busy, and nothing is timed here


@pytest.fixture
def run(tmp_path):
    return make_discovery(tmp_path)


class Served:
    """A server of `opencon review`, and clients that its link has let in."""

    def __init__(self, run, *more):
        command = [sys.executable, "-u", "-m", "opencon", "review", str(run), "--no-browser", *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said = []
        self.link = self._next_link()
        self.base = self.link.partition("/?")[0]

    def _next_link(self):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            line = self.process.stdout.readline()
            if not line:
                break
            self.said.append(line)
            if found := re.search(r"http://\S+", line):
                return found[0]
        raise AssertionError(f"the server said no link: {self.said}")

    def client(self):
        client = httpx.Client(base_url=self.base, headers={"origin": self.base}, timeout=SECONDS)
        assert client.get(self.link).status_code == 303
        self.link = self._next_link()
        return client

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def serve():
    """serve(run) starts a server, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(run, *more):
            served = Served(run, *more)
            stack.callback(served.kill)
            return served

        yield start
