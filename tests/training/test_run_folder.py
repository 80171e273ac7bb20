import errno

import pytest
import torch

from opencon.errors import ConfigError, RunError
from opencon.training.run_folder import RunFolder

CONFIG = {"train": {"lr": 0.1, "epochs": 3}}


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
    run.save_checkpoint({"config": CONFIG, "method": {"w": torch.arange(3.0)}, "epochs_done": 2})
    state = run.load_checkpoint(CONFIG)
    assert state["epochs_done"] == 2
    assert torch.equal(state["method"]["w"], torch.arange(3.0))


def test_checkpoint_of_another_config_is_refused(tmp_path):
    run = folder(tmp_path)
    run.save_checkpoint({"config": CONFIG})
    with pytest.raises(ConfigError, match=r"train.epochs: 3 in the checkpoint, 9 now"):
        run.load_checkpoint({"train": {"lr": 0.1, "epochs": 9}})


def test_no_checkpoint_and_a_damaged_one_are_said(tmp_path):
    run = folder(tmp_path)
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
    run.save_checkpoint({"config": CONFIG, "epochs_done": 1})

    def torn(state, path):
        path.write_bytes(b"half of it")
        raise failure

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(RunError, match=r"cannot write .*: the disk is full. What checkpoint.pt held before is intact"):
        run.save_checkpoint({"config": CONFIG, "epochs_done": 2})
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
    run.save_checkpoint({"config": {"data": {"root": "here"}}})
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
