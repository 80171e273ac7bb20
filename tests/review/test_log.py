"""The log: on the disk before anyone is told, whole after any end of the program, for one program at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opencon.errors import RunError
from opencon.review.log import LOG, DecisionLog, read_log


def test_entries_come_back_in_order(tmp_path):
    log = DecisionLog(tmp_path / "review", "abc", 40)
    for i in range(3):
        log.append({"do": "confirm", "photos": [i]})
    log.close()
    again = DecisionLog(tmp_path / "review", "abc", 40)
    assert [entry["photos"] for entry in again.entries] == [[0], [1], [2]]
    assert all(entry["at"].endswith("Z") for entry in again.entries)
    again.close()


def test_an_entry_is_synced_before_append_returns(tmp_path, monkeypatch):
    log = DecisionLog(tmp_path, "abc", 40)
    seen = []
    real = os.fsync

    def fsync(descriptor):
        seen.append((tmp_path / LOG).read_text().splitlines()[-1])
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    log.append({"do": "undo"})
    assert json.loads(seen[-1])["do"] == "undo"
    log.close()


@pytest.mark.parametrize("kept", [1, 10, 25])
def test_a_torn_last_line_is_cut_off_and_the_next_one_stands_alone(tmp_path, kept):
    log = DecisionLog(tmp_path, "abc", 40)
    log.append({"do": "confirm", "photos": [1]})
    log.append({"do": "confirm", "photos": [2]})
    log.close()
    path = tmp_path / LOG
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:kept])
    assert len(read_log(path, "abc")) == 1
    again = DecisionLog(tmp_path, "abc", 40)
    again.append({"do": "confirm", "photos": [3]})
    again.close()
    assert [entry["photos"] for entry in read_log(path, "abc")] == [[1], [3]]


def test_a_torn_head_is_begun_again(tmp_path):
    (tmp_path / LOG).write_bytes(b'{"what": "deci')
    log = DecisionLog(tmp_path, "abc", 40)
    log.close()
    assert json.loads((tmp_path / LOG).read_text())["run"] == "abc"


def test_a_damaged_line_in_the_middle_is_refused_and_kept(tmp_path):
    log = DecisionLog(tmp_path, "abc", 40)
    log.append({"do": "undo"})
    log.close()
    path = tmp_path / LOG
    damaged = path.read_bytes().replace(b'{"do"', b'{"do') + b'{"do":"undo"}\n'
    path.write_bytes(damaged)
    with pytest.raises(RunError, match="line 2 is damaged"):
        DecisionLog(tmp_path, "abc", 40)
    assert path.read_bytes() == damaged


def test_decisions_about_another_run_are_refused(tmp_path):
    DecisionLog(tmp_path, "abc", 40).close()
    with pytest.raises(RunError, match="another discovery"):
        DecisionLog(tmp_path, "xyz", 40)
    DecisionLog(tmp_path, "abc", 40).close()  # the refusal has let go of the lock


def test_a_second_program_is_refused(tmp_path):
    pytest.importorskip("fcntl")
    log = DecisionLog(tmp_path, "abc", 40)
    opened = f"DecisionLog(Path({str(tmp_path)!r}), 'abc', 40)"
    code = f"from pathlib import Path; from opencon.review.log import DecisionLog; {opened}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "is being reviewed already" in ran.stderr
    log.close()


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    log = DecisionLog(tmp_path, "abc", 40)
    log.append({"do": "undo"})
    before = (tmp_path / LOG).read_bytes()
    real, calls = os.write, []

    def half(descriptor, data):
        calls.append(data)
        if len(calls) == 1:
            return real(descriptor, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(RunError, match="No space left"):
        log.append({"do": "redo"})
    monkeypatch.undo()
    assert (tmp_path / LOG).read_bytes() == before
    log.append({"do": "redo"})
    assert [entry["do"] for entry in log.entries] == ["undo", "redo"]
    log.close()


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / LOG)
    with pytest.raises(RunError, match="not a regular file"):
        DecisionLog(tmp_path, "abc", 40)
    (tmp_path / LOG).unlink()
    DecisionLog(tmp_path, "abc", 40).close()  # the first one has let go of the lock


def test_a_folder_that_cannot_be_written_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write decisions"):
        DecisionLog(Path(tmp_path / "file" / "review"), "abc", 40)
