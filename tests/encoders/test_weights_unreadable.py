"""Files that cannot or must not be read."""

import argparse

import pytest
import torch
from safetensors.torch import save_file

from opencon.encoders import load_weights
from opencon.errors import DataError
from tests.encoders.test_weights import plain, resnet


def error(path):
    with pytest.raises(DataError) as err:
        load_weights(resnet(1), path)
    return str(err.value)


def test_missing_file(tmp_path):
    message = error(tmp_path / "none.pth")
    assert "none.pth does not exist" in message
    assert ".safetensors, .pt, .pth, .pth.tar, .ckpt" in message


def test_folder(tmp_path):
    (tmp_path / "a.pth").mkdir()
    assert "is a folder, not a file" in error(tmp_path / "a.pth")


def test_unknown_format(tmp_path):
    (tmp_path / "a.h5").write_bytes(b"x")
    assert "in no known format. Allowed: .safetensors, .pt" in error(tmp_path / "a.h5")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_damaged_file(suffix, damage, tmp_path):
    path = tmp_path / f"a{suffix}"
    state = plain(resnet(0).state_dict())
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "text": b"<html>not found</html>" * 9, "empty": b""}[damage])
    message = error(path)
    assert f"the weights {path} cannot be read" in message
    assert message.endswith("Get the file again.")


FIRED = []


def fire():
    FIRED.append(1)


class Tripwire:
    """Unpickling this calls `fire`: a reader that runs pickles is caught."""

    def __reduce__(self):
        return fire, ()


@pytest.mark.parametrize("guest", [argparse.Namespace(lr=0.1), Tripwire()])
def test_a_file_that_could_run_code_is_refused(guest, tmp_path):
    torch.save({"state_dict": resnet(0).state_dict(), "args": guest}, tmp_path / "a.pth")
    message = error(tmp_path / "a.pth")
    assert not FIRED
    assert "hold more than tensors (" in message
    assert "Reading such a file could run code" in message
    assert "weights_only=False)['state_dict']" in message
    if isinstance(guest, argparse.Namespace):
        assert "argparse.Namespace" in message


def test_the_tripwire_works(tmp_path):
    torch.save(Tripwire(), tmp_path / "a.pth")
    torch.load(tmp_path / "a.pth", weights_only=False)
    assert FIRED.pop() == 1


def test_a_file_without_tensors(tmp_path):
    torch.save({"epoch": 3, "names": ["a"]}, tmp_path / "a.pt")
    assert "hold no tensor" in error(tmp_path / "a.pt")
