"""Broken images, lists, archives, weights and run folders, as a user meets them: one sentence, exit code 2."""

import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from opencon.data.sources import from_arrays
from opencon.errors import DataError
from opencon.training.run_folder import RunFolder
from tests.test_cli import opencon, refused, works

CLASSES = {"circle": "red", "cross": "blue", "square": "lime", "triangle": "yellow"}
SIZE = 16  # pixels
TRAIN = """
[data]
name = "{name}"
root = "{root}"
image_size = 16
[split]
num_seen = 2
[encoder]
name = "convnet"
[method]
name = "opencon"
[train]
epochs = {epochs}
batch_size = 16
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Nothing is written outside tmp_path, and nobody's own data is found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENCON_DATA", str(tmp_path / "no-data"))


def draw_shape(name, path, rng):
    """A colored shape at a random place on a dark ground."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(int(v) for v in rng.integers(0, 60, 3)))
    x, y, r = (int(v) for v in rng.integers([5, 5, 3], [11, 11, 5]))
    pen, color = ImageDraw.Draw(image), CLASSES[name]
    if name == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=color)
    elif name == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=color)
    elif name == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=color)
    else:
        pen.line((x - r, y, x + r, y), fill=color, width=2)
        pen.line((x, y - r, x, y + r), fill=color, width=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


@pytest.fixture
def shapes(tmp_path):
    """A folder with four classes of twenty images."""
    rng = np.random.default_rng(0)
    for name in CLASSES:
        for i in range(20):
            draw_shape(name, tmp_path / "shapes" / name / f"{i:02}.png", rng)
    return tmp_path / "shapes"


def config(tmp_path, root, *, name="folder", epochs=1):
    file = tmp_path / "mine.toml"
    file.write_text(TRAIN.format(name=name, root=root, epochs=epochs))
    return ["train", "--config", file, "--out", tmp_path / "run", "--device", "cpu"]


def stopped(capsys, *args):
    """The sentence of a command that failed after its plan was shown."""
    ran = opencon(capsys, *args)
    assert ran.code == 2
    assert ran.err.startswith("opencon: ")
    return ran.err


# --- what works -------------------------------------------------------------------------------------------------------


def test_a_folder_of_images_from_end_to_end(capsys, tmp_path, shapes):
    out = works(capsys, *config(tmp_path, shapes, epochs=2)).out
    assert "Your own folder: 80 training images of 4 classes, 16 px" in out
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["epoch"], result["protocol"], result["on"]) == (1, "orca", "unlabeled")
    split = json.loads((tmp_path / "run/split.json").read_text())
    assert all(i < 40 for i in split["labeled"])  # of the first two classes, twenty images each
    assert result["num_images"] == 80 - len(split["labeled"])
    record = json.loads(works(capsys, "evaluate", tmp_path / "run", "--json", "--device", "cpu").out)
    assert record["all"] == pytest.approx(result["all"])


def test_a_list_file_from_end_to_end(capsys, tmp_path, shapes):
    lines = [f"shapes/{name}/{i:02}.png,{name}" for name in CLASSES for i in range(20)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines]))
    out = works(capsys, *config(tmp_path, tmp_path / "list.csv", name="list", epochs=2)).out
    assert "Your own list: 80 training images of 4 classes, 16 px" in out
    assert json.loads((tmp_path / "run/result.json").read_text())["epoch"] == 1


# --- folders ----------------------------------------------------------------------------------------------------------


def test_missing_folder(capsys, tmp_path):
    message = refused(capsys, *config(tmp_path, tmp_path / "nowhere"))
    assert f"there is no folder {tmp_path / 'nowhere'}. Give the folder that holds one sub-folder per class." in message


def test_empty_folder(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    message = refused(capsys, *config(tmp_path, tmp_path / "empty"))
    assert "holds no class folder (it is empty). Make one sub-folder per class." in message


def test_a_class_folder_without_images(capsys, tmp_path, shapes):
    (shapes / "star").mkdir()
    (shapes / "star" / "notes.txt").write_text("to do")
    message = refused(capsys, *config(tmp_path, shapes))
    assert f"class folder {shapes / 'star'} holds no image (found only 1 x .txt). Remove it, or add images" in message


def test_all_images_unreadable(capsys, tmp_path, shapes):
    for path in shapes.rglob("*.png"):
        path.write_bytes(b"no picture")
    message = stopped(capsys, *config(tmp_path, shapes))
    assert "none of the 80 images can be read. The first: " in message
    assert "00.png is not an image, whatever its name says" in message


def test_a_class_whose_images_are_all_unreadable(capsys, tmp_path, shapes):
    for path in (shapes / "cross").iterdir():
        path.write_bytes(b"")
    message = stopped(capsys, *config(tmp_path, shapes))
    assert "class 'cross' has no readable image. One of its files: " in message
    assert "00.png is empty" in message


def test_one_unreadable_image_among_good_ones(capsys, tmp_path, shapes):
    (shapes / "square/03.png").write_bytes(b"no picture")
    out = works(capsys, *config(tmp_path, shapes)).out
    assert f"set aside: {shapes / 'square/03.png'} is not an image, whatever its name says\n" in out
    split = json.loads((tmp_path / "run/split.json").read_text())
    assert split["num_images"] == 79


def test_an_image_that_has_gone_since_the_run_began(capsys, tmp_path, shapes):
    works(capsys, *config(tmp_path, shapes))
    (shapes / "square/03.png").unlink()
    message = refused(capsys, "evaluate", tmp_path / "run", "--device", "cpu")
    assert "the split is for 80 training images, but the data has 79" in message


def test_a_folder_too_small_for_a_batch(capsys, tmp_path, shapes):
    message = refused(capsys, *config(tmp_path, shapes), "--set", "train.batch_size=81")
    assert "train.batch_size = 81 is more than the 80 training images" in message
    assert "Lower it to at most 80." in message


def test_a_folder_too_small_for_the_split(capsys, tmp_path):
    rng = np.random.default_rng(0)
    for name in CLASSES:
        for i in range(1 if name == "circle" else 10):
            draw_shape(name, tmp_path / "shapes" / name / f"{i}.png", rng)
    # Seed 0 draws 0.55 first, so the only circle is not labeled.
    message = stopped(capsys, *config(tmp_path, tmp_path / "shapes"))
    assert "seen class 0 has 1 training images and none of them is labeled" in message
    assert "Raise labeled_ratio, or give the class more images." in message


def test_more_seen_classes_than_classes(capsys, tmp_path, shapes):
    for num_seen in (4, 7):
        message = refused(capsys, *config(tmp_path, shapes), "--set", f"split.num_seen={num_seen}")
        assert f"split.num_seen = {num_seen} leaves no novel class: the data has 4 classes." in message
        assert "Lower num_seen to at most 3." in message


def test_a_batch_without_labeled_images(capsys, tmp_path, shapes):
    message = refused(capsys, *config(tmp_path, shapes), "--set", "train.batch_size=3")
    assert "train.batch_size = 3 leaves no labeled image in a batch: about 20 of 80" in message
    assert "The smallest batch size that would do is 4" in message


def test_an_unknown_key(capsys, tmp_path, shapes):
    message = refused(capsys, *config(tmp_path, shapes), "--set", "data.imagesize=16")
    assert (
        "unknown setting 'data.imagesize'. Did you mean 'image_size'? Known here: decode, image_size, memory_gb,"
        in message
    )


def test_images_that_do_not_fit_the_encoder(capsys, tmp_path, shapes):
    message = stopped(capsys, *config(tmp_path, shapes), "--set", "data.image_size=100")
    assert "encoder 'convnet' takes images of 8 to 64 pixels, but these have 100" in message


# --- lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["shapes/circle/00.png circle", "shapes/circle/99.png circle"], "line 2: there is no file"),
        (["# classes: circle cross star", "shapes/circle/00.png circle", "shapes/cross/00.png cross"], "images: star"),
        (["shapes/circle/00.png 0", "shapes/cross/00.png 2"], "class in the list without images: 1"),
        (["# classes: circle cross", "shapes/circle/00.png circel"], "'circel' is not among those declared. Did you"),
        (["shapes/circle/00.png circle", "shapes/circle/00.png cross"], "Keep one of the two"),
        (["shapes/circle/00.png"], "line 1 cannot be understood"),
        ([], "names no image. Give one image and its class a line"),
    ],
)
def test_lists_that_cannot_be_used(capsys, tmp_path, shapes, lines, message):
    (tmp_path / "list.txt").write_text("\n".join(lines))
    err = refused(capsys, *config(tmp_path, tmp_path / "list.txt", name="list"))
    assert message in err
    assert "list.txt" in err


def test_no_list_file(capsys, tmp_path):
    message = refused(capsys, *config(tmp_path, tmp_path / "none.txt", name="list"))
    assert f"there is no list file {tmp_path / 'none.txt'}" in message


# --- arrays and archives ----------------------------------------------------------------------------------------------


def test_nan_in_arrays():
    images = np.zeros((5, 8, 8))
    images[1, 2, 3], images[4, 0, 0] = np.nan, np.inf
    with pytest.raises(DataError, match=r"2 of 5 images hold NaN or infinite pixels\. Remove or repair them"):
        from_arrays(images, [0, 1, 2, 3, 4])


def test_missing_archive(capsys, tmp_path):
    message = refused(capsys, "train", "cifar100", "--data", tmp_path / "data", "--device", "cpu")
    assert f"looked for {tmp_path / 'data/cifar-100-python.tar.gz'} and the unpacked folder" in message
    assert "add --download to fetch it" in message


def test_corrupt_archive(capsys, tmp_path):
    archive = tmp_path / "cifar-10-python.tar.gz"
    archive.write_bytes(b"<html>404</html>")
    message = stopped(capsys, "train", "cifar10", "--data", tmp_path, "--device", "cpu")
    assert f"corrupt archive {archive} (" in message
    assert "delete it and download again with --download" in message


# --- run folders ------------------------------------------------------------------------------------------------------


def test_a_run_with_other_settings(capsys, tmp_path, shapes):
    args = config(tmp_path, shapes)
    works(capsys, *args)
    message = stopped(capsys, *args, "--set", "train.lr=0.5")
    assert f"{tmp_path / 'run'} holds a run with other settings:\n  train.lr: 0.02 in the run, 0.5 now\n" in message
    assert "Start over in a new folder (--out), or put the settings back to resume." in message


def test_a_checkpoint_of_other_settings(capsys, tmp_path, shapes):
    """The checkpoint was copied from another run, say."""
    args = config(tmp_path, shapes)
    works(capsys, *args)
    folder = RunFolder(tmp_path / "run")
    state = folder.load_checkpoint()
    state["config"]["train"]["lr"] = 0.5
    folder.save_checkpoint(state)
    (tmp_path / "run/result.json").unlink()
    message = stopped(capsys, *args)
    assert "checkpoint.pt was trained with other settings:\n  train.lr: 0.5 in the checkpoint, 0.02 now" in message


def test_a_folder_that_holds_other_things(capsys, tmp_path, shapes):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("precious")
    message = stopped(capsys, *config(tmp_path, shapes))
    assert "run is not empty and holds no run. Give an empty or a new folder with --out." in message
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_folder(capsys, tmp_path, shapes):
    (tmp_path / "run").write_text("a file")
    message = stopped(capsys, *config(tmp_path, shapes))
    assert f"cannot create the run folder {tmp_path / 'run'} (File exists). Give another --out." in message


def test_a_full_disk_keeps_the_old_checkpoint_and_the_run_can_go_on(capsys, tmp_path, shapes, monkeypatch):
    args = [*config(tmp_path, shapes, epochs=3), "--set", "train.save_seconds=0"]
    plain_save, calls = torch.save, []

    def save(state, path):
        calls.append(1)
        if len(calls) > 1:
            path.write_bytes(b"torn")
            raise OSError(28, "No space left on device")
        plain_save(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        message = stopped(capsys, *args)
    assert f"cannot write {tmp_path / 'run/checkpoint.pt'}: the disk is full." in message
    assert "What checkpoint.pt held before is intact. Make room or choose another --out." in message
    assert RunFolder(tmp_path / "run").load_checkpoint()["epochs_done"] == 1
    assert not list((tmp_path / "run").glob("*.partial"))
    assert "after 1 of 3 epochs" in works(capsys, *args).out


@pytest.mark.parametrize("content", [b"", b"torn", None], ids=["empty", "no checkpoint", "cut"])
def test_a_damaged_checkpoint(capsys, tmp_path, shapes, content):
    args = config(tmp_path, shapes)
    works(capsys, *args)
    file = tmp_path / "run/checkpoint.pt"
    file.write_bytes(file.read_bytes()[:5000] if content is None else content)
    for command in (["evaluate", tmp_path / "run", "--device", "cpu"], args):
        (tmp_path / "run/result.json").unlink(missing_ok=True)
        message = stopped(capsys, *command)
        assert f"cannot read {file} (" in message
        assert "Delete it to start this run over." in message


def test_damaged_records(capsys, tmp_path, shapes):
    works(capsys, *config(tmp_path, shapes))
    split = tmp_path / "run/split.json"
    split.write_text(split.read_text().replace('"num_seen": 2', '"num_seen": 3'))
    assert "does not match its fingerprint" in refused(capsys, "evaluate", tmp_path / "run", "--device", "cpu")
    (tmp_path / "run/config.json").write_text("{")
    assert "The run folder is damaged." in refused(capsys, "evaluate", tmp_path / "run", "--device", "cpu")


def test_a_run_that_was_never_trained(capsys, tmp_path, shapes):
    works(capsys, *config(tmp_path, shapes))
    (tmp_path / "run/checkpoint.pt").unlink()
    assert "its checkpoint is gone" in refused(capsys, "evaluate", tmp_path / "run", "--device", "cpu")
    (tmp_path / "run/result.json").unlink()
    message = refused(capsys, "evaluate", tmp_path / "run", "--device", "cpu")
    assert "has no checkpoint yet. Train it first: opencon train ... --out" in message


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_that_are_not_there(capsys, tmp_path, shapes):
    message = refused(capsys, *config(tmp_path, shapes), "--weights", tmp_path / "none.pt")
    assert f"encoder.weights = {tmp_path / 'none.pt'} is not a file. Give a checkpoint, or none." in message


def test_weights_of_another_network(capsys, tmp_path, shapes):
    torch.save({"fc.weight": torch.zeros(3, 3), "fc.bias": torch.zeros(3)}, tmp_path / "other.pt")
    message = stopped(capsys, *config(tmp_path, shapes), "--weights", tmp_path / "other.pt")
    assert f"the weights {tmp_path / 'other.pt'} do not fit the encoder. Only 0 of" in message
    assert "Choose the encoder they were trained with (encoder.name), or other weights (encoder.weights)." in message


@pytest.mark.parametrize(("name", "reason"), [("w.pt", "torch.load"), ("w.safetensors", "safetensors")])
def test_weights_that_cannot_be_read(capsys, tmp_path, shapes, name, reason):
    (tmp_path / name).write_bytes(b"no weights")
    message = stopped(capsys, *config(tmp_path, shapes), "--weights", tmp_path / name)
    assert f"the weights {tmp_path / name} cannot be read" in message
    assert reason in message
    assert "Get the file again." in message
