"""Files are written whole or not at all."""

import os
import stat

import pytest
from safetensors.torch import save_file
from torch import ones

from opencon.files import write_whole


def test_a_file_gets_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write(partial):
        assert partial.parent == path.parent  # on the same disk, so that renaming is one step
        partial.write_text("new and longer")
        assert path.read_text() == "old"

    assert write_whole(path, write) == path
    assert path.read_text() == "new and longer"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_goes_wrong_passes_through_and_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write(partial):
        partial.write_text("half of")
        raise error

    with pytest.raises(type(error)) as raised:
        write_whole(path, write)
    assert raised.value is error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_nothing_is_left_where_there_was_nothing(tmp_path):
    def write(partial):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        write_whole(tmp_path / "a.txt", write)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_the_callers_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "a.txt", lambda partial: partial.write_text("x"))


def test_what_a_killed_program_left_is_written_over(tmp_path):
    (tmp_path / "a.txt.partial").write_text("of a program that was killed")
    write_whole(tmp_path / "a.txt", lambda partial: partial.write_text("new"))
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(("mask", "rights"), [(0o022, 0o644), (0o027, 0o640)])
def test_others_may_read_what_the_umask_allows(tmp_path, mask, rights):
    """safetensors makes files that only their owner may read."""
    before = os.umask(mask)
    try:
        path = write_whole(tmp_path / "a.safetensors", lambda partial: save_file({"a": ones(2)}, partial))
        assert stat.S_IMODE(path.stat().st_mode) == rights
        assert os.umask(mask) == mask  # it is left as it was
    finally:
        os.umask(before)
