import errno
import os
import signal
import warnings

import pytest
import torch

from opencon.errors import ConfigError, RunError
from opencon.training.run_folder import RunFolder

CONFIG = {"train": {"lr": 0.1, "epochs": 3}}
STATE = {"config": CONFIG, "epochs_done": 0, "method": {"w": torch.arange(3.0)}}


def folder(tmp_path):
    return RunFolder.open_for_training(tmp_path / "run", CONFIG)


def test_a_folder_opens_again_for_the_same_config(tmp_path):
    folder(tmp_path).write_json("config.json", CONFIG)
    folder(tmp_path)


def test_another_config_is_refused_by_name(tmp_path):
    folder(tmp_path).write_json("config.json", CONFIG)
    with pytest.raises(ConfigError, match=r"other settings:\n  train.lr: 0.1 in the run, 0.2 now"):
        RunFolder.open_for_training(tmp_path / "run", {"train": {"lr": 0.2, "epochs": 3}})


def test_further_views_make_another_run_and_none_are_the_old_way(tmp_path):
    folder(tmp_path).write_json("config.json", CONFIG)  # from before there were further views
    RunFolder.open_for_training(tmp_path / "run", CONFIG | {"views": []})
    with pytest.raises(ConfigError, match=r"other settings:\n  views"):
        RunFolder.open_for_training(tmp_path / "run", CONFIG | {"views": [{"size": 20}]})


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        RunFolder.open_for_training(tmp_path, CONFIG)


def test_a_file_in_the_way_is_said(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(RunError, match="cannot create the run folder"):
        folder(tmp_path)


def test_reading_needs_a_run(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        RunFolder.open_for_reading(tmp_path)


def test_checkpoint_round_trip(tmp_path):
    run = folder(tmp_path)
    run.save_checkpoint(STATE | {"epochs_done": 2})
    state = run.load_checkpoint(CONFIG)
    assert state["epochs_done"] == 2
    assert torch.equal(state["method"]["w"], torch.arange(3.0))


def test_checkpoint_of_another_config_is_refused(tmp_path):
    run = folder(tmp_path)
    run.save_checkpoint(STATE)
    with pytest.raises(ConfigError, match=r"train.epochs: 3 in the checkpoint, 9 now"):
        run.load_checkpoint({"train": {"lr": 0.1, "epochs": 9}})


def test_no_checkpoint_and_a_damaged_one_are_said(tmp_path):
    run = folder(tmp_path)
    finished = RunFolder.made(tmp_path / "finished")
    finished.write_json("result.json", {})
    with pytest.raises(
        RunError, match=r"its checkpoint is gone\. .* \(--keep\)\. Train it again .* --config .*config\.json"
    ):
        finished.load_checkpoint()
    with pytest.raises(RunError, match="has no checkpoint yet"):
        run.load_checkpoint()
    run.checkpoint.write_bytes(b"not a checkpoint")
    with pytest.raises(RunError, match=r"cannot read .*checkpoint.pt"):
        run.load_checkpoint()


@pytest.mark.parametrize(
    "failure",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed: write failed")],
)
def test_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch, failure):
    run = folder(tmp_path)
    run.save_checkpoint(STATE | {"epochs_done": 1})

    def torn(state, path):
        path.write_bytes(b"half of it")
        raise failure

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(RunError, match=r"cannot write .*: the disk is full. What checkpoint.pt held before is intact"):
        run.save_checkpoint(STATE | {"epochs_done": 2})
    monkeypatch.undo()
    assert run.load_checkpoint(CONFIG)["epochs_done"] == 1
    assert not list((tmp_path / "run").glob("*.partial"))


def test_full_disk_for_real(tmp_path):
    """/dev/full refuses every byte, as a full disk does."""
    run = folder(tmp_path)
    run.metrics.symlink_to("/dev/full")
    with pytest.raises(RunError, match="the disk is full"):
        run.append_metrics({"epoch": 0})


def test_metrics_survive_a_torn_line_and_forget_the_future(tmp_path):
    run = folder(tmp_path)
    for epoch in range(4):
        run.append_metrics({"epoch": epoch})
    with run.metrics.open("a") as file:
        file.write('{"epoch": 4, "lo')
    run.forget_metrics_from(2)
    assert [r["epoch"] for r in run.read_metrics()] == [0, 1]
    run.append_metrics({"epoch": 2})
    assert [r["epoch"] for r in run.read_metrics()] == [0, 1, 2]


def test_damaged_json_is_said(tmp_path):
    run = folder(tmp_path)
    (run.path / "split.json").write_text("{")
    with pytest.raises(RunError, match="The run folder is damaged"):
        run.read_json("split.json")
    (run.path / "split.json").write_text("[]")
    with pytest.raises(RunError, match="does not hold a JSON object"):
        run.read_json("split.json")


def test_data_that_were_moved_are_no_other_run(tmp_path):
    run = RunFolder.open_for_training(tmp_path / "run", {"data": {"root": "here"}})
    run.write_json("config.json", {"data": {"root": "here"}})
    run.save_checkpoint(STATE | {"config": {"data": {"root": "here"}}})
    again = RunFolder.open_for_training(tmp_path / "run", {"data": {"root": "there"}})
    assert again.load_checkpoint({"data": {"root": "there"}})


def test_a_folder_is_trained_into_by_one_at_a_time(tmp_path):
    one, other = RunFolder(tmp_path), RunFolder(tmp_path)
    with one.held(), pytest.raises(RunError, match="another process is training into"), other.held():
        pass
    with other.held():
        pass


def test_a_lock_does_not_change_what_went_wrong_inside(tmp_path):
    with pytest.raises(BlockingIOError), RunFolder(tmp_path).held():
        raise BlockingIOError


# --- checkpoints that were damaged ------------------------------------------------------------------------------------


def test_the_checkpoint_before_the_last_one_is_kept_until_the_run_is_finished(tmp_path):
    run = folder(tmp_path)
    for done in (1, 2, 3):
        run.save_checkpoint(STATE | {"epochs_done": done})
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoint.before.pt", "checkpoint.pt"]
    run.checkpoint.unlink()  # as a kill between the two renames leaves it
    assert run.has_checkpoint
    assert run.load_checkpoint(CONFIG)["epochs_done"] == 2
    run.save_checkpoint(STATE | {"epochs_done": 3})
    run.forget_older_checkpoint()
    assert [p.name for p in run.path.iterdir()] == ["checkpoint.pt"]


def test_no_flipped_bit_changes_the_weights_silently(tmp_path):
    """Every byte of the archive, one bit in each: the state is the same, or the checkpoint before it is taken."""
    run = folder(tmp_path)
    run.save_checkpoint(STATE | {"epochs_done": 1})
    run.save_checkpoint(STATE | {"epochs_done": 2})
    whole = run.checkpoint.read_bytes()
    taken = {1: 0, 2: 0}
    for at in range(len(whole)):
        run.checkpoint.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = run.load_checkpoint(CONFIG)
        assert torch.equal(state["method"]["w"], STATE["method"]["w"])
        taken[state["epochs_done"]] += 1
    assert taken[1] > 300  # padding and dates do not matter, what is stored does


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_taken(tmp_path):
    run = folder(tmp_path)
    run.save_checkpoint(STATE | {"epochs_done": 1})
    run.save_checkpoint(STATE | {"epochs_done": 2})
    run.checkpoint.write_bytes(run.checkpoint.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"checkpoint.pt is damaged .* The checkpoint before it is taken, after 1"):
        assert run.load_checkpoint(CONFIG)["epochs_done"] == 1


@pytest.mark.parametrize("content", [{"a": torch.ones(2)}, [1, 2], torch.ones(3), {"config": 3, "epochs_done": "x"}])
def test_a_torch_file_of_something_else_is_said(tmp_path, content):
    run = folder(tmp_path)
    torch.save(content, run.checkpoint)
    with pytest.raises(RunError, match="it is no checkpoint of a run"):
        run.load_checkpoint(CONFIG)


def test_a_checkpoint_that_does_not_fit_its_modules_is_said(tmp_path):
    run = folder(tmp_path)
    with pytest.raises(RunError, match="does not fit this run"), run.restoring():
        torch.nn.Linear(2, 2).load_state_dict({"w": torch.ones(1)})


# --- other files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b'{"a": "\xff"}', b"[" * 100_000, b'{"a": ' * 200 + b"1" + b"}" * 200, b"9" * 5000]
)
def test_json_that_nobody_can_read_is_said(tmp_path, content):
    run = folder(tmp_path)
    (run.path / "config.json").write_bytes(content)
    with pytest.raises(RunError, match="The run folder is damaged"):
        run.read_json("config.json")


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[1]", b'"x"', b'{"epoch": "one"}', b'{"loss": 1}', b"[" * 100_000])
def test_a_line_of_the_log_that_is_damaged_is_left_out(tmp_path, line):
    run = folder(tmp_path)
    run.append_metrics({"epoch": 0})
    with run.metrics.open("ab") as file:
        file.write(line + b"\n")
    run.append_metrics({"epoch": 1})
    assert run.read_metrics() == [{"epoch": 0}, {"epoch": 1}]
    run.forget_metrics_from(1)
    assert run.metrics.read_text() == '{"epoch": 0}\n'


def test_half_of_the_first_file_is_no_strange_folder(tmp_path):
    """A kill while config.json was written leaves only this."""
    (tmp_path / "config.json.partial").write_text("{")
    RunFolder.open_for_training(tmp_path, CONFIG)
    (tmp_path / "split.json.partial").write_text("{")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        RunFolder.open_for_training(tmp_path, CONFIG)


def test_a_pipe_among_the_files_is_said_and_not_waited_for(tmp_path):
    run = folder(tmp_path)
    for name in ("config.json", "metrics.jsonl", "checkpoint.pt"):
        os.mkfifo(run.path / name)
    with pytest.raises(RunError, match="is not a regular file"):
        run.read_json("config.json")
    assert run.read_metrics() == []
    with pytest.raises(RunError, match="it is not a file"):
        run.load_checkpoint()


def test_a_folder_that_is_gone_is_said(tmp_path):
    run = folder(tmp_path)
    run.path.rmdir()
    for write in (
        lambda: run.write_json("a.json", {}),
        lambda: run.save_checkpoint(STATE),
        lambda: run.save_tensors("a.safetensors", {"a": torch.ones(1)}, {}),
        lambda: run.append_metrics({"epoch": 0}),
    ):
        with pytest.raises(RunError, match="its folder is gone"):
            write()
    with pytest.raises(RunError, match="cannot write"), run.held():
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a process whose files may not grow")
@pytest.mark.parametrize("kind", ["torch", "safetensors", "array"])
def test_a_write_that_fails_half_way_is_a_sentence_without_torchs_source_code(tmp_path, kind):
    """Files of this process may not grow beyond 4 kB: what the system does on a full disk, whoever writes."""
    import resource

    run, large = folder(tmp_path), torch.zeros(100_000)
    write = {
        "torch": lambda: run.save_checkpoint(STATE | {"large": large}),
        "safetensors": lambda: run.save_tensors("a.safetensors", {"a": large}, {}),
        "array": lambda: run.write_array("a.npy", large.numpy()),
    }[kind]
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(RunError) as error:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "cannot write" in str(error.value)
    assert "enforce" not in str(error.value)
    assert not list(run.path.iterdir())
