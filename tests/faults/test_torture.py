"""A part of `make torture`: a few tries of every kind, none of which may be lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_few_tries_of_every_kind_survive(tmp_path):
    script = [sys.executable, str(ROOT / "benchmarks/torture.py"), "--quick", "--seed", "7"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "OPENCON_RESULTS": str(tmp_path),
    }
    ran = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    rows = json.loads((tmp_path / "torture.json").read_text())["runs"][0]["numbers"]["kinds"]
    kinds = {row["kind"]: row for row in rows}
    assert set(kinds) == {"kills", "settings", "tables", "arrays", "images", "weights", "archives", "damage", "all"}
    assert all(row["survived"] == row["tried"] > 0 for row in rows)
    assert all(row["tracebacks"] == row["hangs"] == row["otherwise"] == 0 for row in rows)
    assert f"all{kinds['all']['tried']:>19}" in ran.stdout


@pytest.fixture
def torture(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return run_path(str(ROOT / "benchmarks/torture.py"))


def test_what_is_lost_is_counted_and_told(torture, capsys):
    tally = torture["Tally"]()

    def fails():
        raise KeyError("a")

    def hangs():
        raise torture["HangError"]

    for attempt in (fails, hangs, lambda: "wrong", lambda: None):
        tally.run("made", "a try", attempt)
    row = {"tried": 4, "survived": 1, "tracebacks": 1, "hangs": 1, "otherwise": 1}
    assert tally.table() == [{"kind": "made"} | row, {"kind": "all"} | row]
    assert tally.show() == 3
    out = capsys.readouterr().out
    assert "lost, made, tracebacks: a try: KeyError: 'a'" in out
    assert "lost, made, hangs: a try: takes more than" in out
    assert "lost, made, otherwise: a try: wrong" in out


def test_a_try_that_hangs_is_stopped(torture):
    def forever():
        while True:
            pass

    with pytest.raises(torture["HangError"]), torture["limited"](0.1):
        forever()
