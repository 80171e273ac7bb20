"""Several processes compute what one does: every method, two and four ranks, over gloo on the CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from opencon.config import with_settings
from opencon.data.shares import Share, Sharing
from opencon.errors import RunError
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import Callbacks, train
from opencon.training.ranks import joined
from opencon.training.run_folder import RunFolder
from tests.training.rank_worker import KILLED, STEPS, TRAINED, some_steps

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests/training/rank_worker.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OPENCON_KEEP_MEMORY": "0"}


def torchrun(ranks, *words, restarts=0, timeout=400):
    """Start some ranks and wait for them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    launcher += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    typed = [*launcher, *map(str, words)]
    ran = subprocess.run(typed, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "results.pt"
    names = TRAINED if request.param == 2 else ("opencon", "orca", "simgcd", "uno", "concord")
    torchrun(request.param, WORKER, "compare", out, *names)
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {name: some_steps(name, STEPS) for name in TRAINED}
    torch.set_num_threads(threads)


def methods_of(ranks):
    return [name for name in TRAINED if name in ranks]


def test_the_weights_after_some_steps_are_those_of_one_process(ranks, alone):
    """The losses are those of the whole batch, and no gradient is scaled by the number of ranks."""
    for name in methods_of(ranks):
        method, start, losses = alone[name]
        assert ranks[name]["losses"] == pytest.approx(losses, rel=1e-4), name
        moved = 0.0
        for key, value in method.state_dict().items():
            if value.is_floating_point():
                value, other = value.nan_to_num(), ranks[name]["state"][key].nan_to_num()
                assert (other - value).abs().max() <= 1e-5 * value.abs().max().clamp(min=1), (name, key)
                moved = max(moved, float((value - start[key]).abs().max()) if "encoder" in key else 0.0)
        assert moved > 1e-3, name  # a hundred times what is allowed: a scaled gradient would show


def test_all_ranks_have_the_same_state(ranks):
    """Weights, prototypes, queues, thresholds, averages and statistics, bit for bit."""
    assert all(ranks[name]["equal"] for name in methods_of(ranks))


def test_ranks_share_the_pairs_of_a_large_loss(ranks):
    shared, alone = ranks["pairs shared"], ranks["pairs alone"]
    assert torch.allclose(shared["loss"], alone["loss"], rtol=1e-6)
    assert torch.allclose(shared["gradient"], alone["gradient"], atol=1e-7)
    assert shared["blocks"] <= alone["blocks"] / 2 + 2


def test_a_rank_without_labeled_rows_does_not_stop_the_others(ranks):
    for norms in ("true", "false"):
        assert all(loss == loss for loss in ranks[f"few labeled, {norms}"]["losses"])


def test_a_killed_rank_comes_back_and_the_run_ends_as_if_nothing_had_happened(tmp_path):
    said = torchrun(2, WORKER, "train", tmp_path, restarts=2)
    assert (tmp_path / "was killed").exists()
    assert "SIGKILL" in said or "exitcode: -9" in said or "Signal 9" in said
    whole, killed = (RunFolder(tmp_path / name).load_checkpoint()["method"] for name in ("whole", "killed"))
    for key, value in whole.items():
        assert torch.equal(value, killed[key]), key
    assert (tmp_path / "killed/result.json").is_file()
    epochs = [record["epoch"] for record in RunFolder(tmp_path / "killed").read_metrics()]
    assert epochs == [0, 1, 2, 3]  # one rank writes


def test_a_rank_that_is_left_alone_says_so(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "127.0.0.1"}
    alone |= {"MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    lost = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1")
    for error, kind, said in (
        (lost, RunError, "rank 0 has lost the others"),
        (dist.DistBackendError("NCCL"), RunError, "--max-restarts"),
        (RuntimeError("shapes differ"), RuntimeError, "shapes differ"),
    ):
        with pytest.raises(kind, match=said), joined(torch.device("cpu")):
            raise error


def test_another_number_of_ranks_is_said(tmp_path):
    config = with_settings(get_recipe("opencon/digits"), KILLED)

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, torch.device("cpu"), callbacks=Callbacks(epoch_done=stop))
    folder = RunFolder(tmp_path)
    folder.save_checkpoint(folder.load_checkpoint() | {"ranks": 2})
    said = []
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, torch.device("cpu"), callbacks=Callbacks(say=said.append, epoch_done=stop))
    assert "The number of ranks was 2 and is now 1. Batches stay the same; results differ by rounding." in said


@pytest.mark.parametrize(("labeled", "rows", "num"), [(4, 10, 2), (5, 11, 3), (1, 9, 4), (0, 8, 3), (3, 3, 4)])
def test_every_row_belongs_to_one_rank(labeled, rows, num):
    parts = [Sharing(r, num, labeled, rows) for r in range(num)]
    owned = [row for s in parts for piece in s.pieces(s.rank) for row in piece]
    assert sorted(owned) == list(range(rows))
    numbers = torch.arange(rows)
    for s in parts:
        share = Share.of(s.own(numbers), s)
        assert share.own.tolist() == share.own_rows()
        assert len(share.own) == s.num_own
        for part in (share[:labeled], share[labeled:], share[1:-1], share[labeled:][1:]):
            assert part.own.tolist() == part.own_rows()
            assert part.shape[0] == len(part) == part.stop - part.start
