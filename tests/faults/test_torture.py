"""A part of `make torture`: a few tries of every kind, none of which may be lost."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_few_tries_of_every_kind_survive():
    script = [sys.executable, str(ROOT / "benchmarks/torture.py"), "--seed", "7", "--share", "0.06"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    kinds = {line.split()[0]: list(map(int, line.split()[1:])) for line in ran.stdout.splitlines()[1:]}
    assert set(kinds) == {"kills", "settings", "tables", "arrays", "images", "weights", "damage", "all"}
    assert all(tried > 0 and survived == tried and lost == 0 for tried, survived, lost in kinds.values())
