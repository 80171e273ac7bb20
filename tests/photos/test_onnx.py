"""One ONNX graph that says what PyTorch says."""

import json
import logging
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from opencon.encoders.pretrained import open_encoder
from opencon.errors import MissingExtraError, RunError
from opencon.openworld.strangers import Strangers
from opencon.photos import onnx as export
from opencon.photos.model import OpenConModel
from opencon.photos.onnx import BATCHES, OUTPUTS, RECORDERS, PhotoNetwork, compare, export_onnx
from tests.small_model import MEAN, NAMES, STD, make_model, make_photos, make_run

onnx = pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")

SIDE = 8


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def model(photos, tmp_path_factory):
    return make_model(photos, make_run(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def done(model, tmp_path_factory):
    """The graph, after a look at what recording it leaves behind."""
    level, state = logging.root.manager.disable, torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = export_onnx(model, tmp_path_factory.mktemp("onnx") / "model.onnx")
    assert not [str(w.message) for w in caught]
    assert logging.root.manager.disable == level
    assert torch.equal(torch.get_rng_state(), state)
    return done


@pytest.fixture(scope="module")
def session(done):
    return onnxruntime.InferenceSession(done.path)


@pytest.fixture
def recorded(done, monkeypatch):
    """The graph of the fixture above, without the time to record it again."""

    def again(network, size):
        return onnx.load(done.path)

    monkeypatch.setattr(export, "RECORDERS", (again,))


def images_of(batch, side=SIDE, seed=3):
    return torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))


def by_hand(model, images):
    """What the graph should say, one image and one channel at a time, with batch norms as they were trained."""
    encoder = model.load_encoder()
    rows = []
    for image in images:
        channels = [(image[k] - encoder.mean[k]) / encoder.std[k] for k in range(3)]
        rows.append(encoder.net(torch.stack(channels)[None])[0])
    x = torch.stack(rows).detach()
    return model.classifier.predict(x), model.classifier.embed(x).detach()


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_the_graph_says_what_the_model_says(model, session, batch):
    images = images_of(batch)
    got = dict(zip(OUTPUTS, session.run(list(OUTPUTS), {"images": images.numpy()}), strict=True))
    said, z = by_hand(model, images)
    shapes = {"probabilities": (batch, 4), "embedding": (batch, z.shape[1])}
    assert {name: value.shape for name, value in got.items()} == {name: shapes.get(name, (batch,)) for name in OUTPUTS}
    np.testing.assert_allclose(got["embedding"], z.numpy(), atol=1e-5)
    np.testing.assert_allclose(got["oddness"], said.oddness.numpy(), rtol=1e-4)
    np.testing.assert_allclose(got["probabilities"], said.p.numpy(), atol=1e-4)
    np.testing.assert_allclose(got["confidence"], said.confidence.numpy(), atol=1e-4)
    np.testing.assert_allclose(got["novelty"], said.novelty.numpy(), atol=1e-2)
    assert got["unlike_everything"].dtype == np.bool_
    assert got["unlike_everything"].tolist() == said.unlike_everything.tolist()


def test_photos_get_the_same_labels_as_from_predict(model, session, photos):
    images = np.stack([np.asarray(Image.open(p).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for p in photos])
    images = images.transpose(0, 3, 1, 2).astype(np.float32) / 255
    p, unlike = session.run(["probabilities", "unlike_everything"], {"images": images})
    labels = [None if odd else NAMES[c] for c, odd in zip(p.argmax(axis=1), unlike, strict=True)]
    want = model.predict(photos)
    assert labels == [photo.predicted for photo in want]
    np.testing.assert_allclose(p.max(axis=1), [photo.confidence for photo in want], atol=1e-4)
    assert set(labels) == set(NAMES)


def test_the_graph_is_one_file_with_all_that_a_program_needs(model, done, session):
    assert [path.name for path in done.path.parent.iterdir()] == ["model.onnx"]
    graph = onnx.load(done.path)
    onnx.checker.check_model(graph, full_check=True)
    kinds = {node.op_type for node in graph.graph.node}
    assert "Conv" in kinds
    assert "BatchNormalization" not in kinds
    (images,) = session.get_inputs()
    assert (images.name, images.shape, images.type) == ("images", ["batch", 3, SIDE, SIDE], "tensor(float)")
    assert {out.name: out.shape[0] for out in session.get_outputs()} == dict.fromkeys(OUTPUTS, "batch")
    facts = session.get_modelmeta().custom_metadata_map
    assert str(Path(export.__file__).parent).encode() not in done.path.read_bytes()  # nothing of this machine
    assert json.loads(facts["class_names"]) == list(NAMES)
    assert facts["num_seen"] == "2"
    assert facts["image_size"] == str(SIDE)
    assert float(facts["outlier_threshold"]) == float(model.classifier.strangers.threshold())
    assert "RGB in [0, 1]" in facts["input"]


def test_groups_of_one_name_are_one_output(model, tmp_path):
    both = model.renamed({"new-1": "sky", "new-2": "sky"})
    session = onnxruntime.InferenceSession(export_onnx(both, tmp_path / "model.onnx").path)
    facts = session.get_modelmeta().custom_metadata_map
    assert (json.loads(facts["class_names"]), facts["num_seen"]) == (["red", "green", "sky"], "2")
    images = images_of(3)
    p = by_hand(model, images)[0].p
    (got,) = session.run(["probabilities"], {"images": images.numpy()})
    np.testing.assert_allclose(got, torch.cat([p[:, :2], p[:, 2:].sum(dim=1, keepdim=True)], dim=1).numpy(), atol=1e-4)


def test_the_difference_to_pytorch_is_stated(done):
    assert set(done.difference) == set(OUTPUTS)
    assert 0 < done.difference["embedding"] < 1e-5
    assert done.difference["unlike_everything"] == 0
    assert BATCHES == (1, 3, 7)


def test_names_that_no_text_can_hold_are_kept(model, recorded, tmp_path):
    names = ("a\udce9", "б|\n", '"', "new-2")
    odd = model.renamed(dict(zip(NAMES, names, strict=True)))
    path = export_onnx(odd, tmp_path / "odd.onnx").path
    facts = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert json.loads(facts["class_names"]) == list(names)


def test_gray_encoders_take_color_images(photos, tmp_path):
    model = make_model(photos, make_run(tmp_path / "run", channels=1))
    images = images_of(5)
    *_, z = PhotoNetwork(model.load_encoder(), model.classifier).eval()(images)
    gray = 0.2989 * images[:, :1] + 0.587 * images[:, 1:2] + 0.114 * images[:, 2:]
    want = model.classifier.embed(model.load_encoder().net((gray - MEAN[0]) / STD[0]))
    torch.testing.assert_close(z, want)


class Classifier(nn.Module):
    """As simple as a classifier can be."""

    def __init__(self, num_features):
        super().__init__()
        self.linear = nn.Linear(num_features, 6)
        self.strangers = Strangers(num_features, 1)
        self.register_buffer("sharpness", torch.tensor(5.0))

    def embed(self, x):
        return nn.functional.normalize(self.linear(x), dim=1)

    def forward(self, x):
        z = self.embed(x)
        return z.softmax(dim=1), z.amax(dim=1), z.sum(dim=1), z.amin(dim=1)


@pytest.mark.parametrize("record", RECORDERS)
@pytest.mark.parametrize("encoder", [pytest.param("efficientnet_lite0", marks=pytest.mark.slow), "convnet"])
def test_every_way_to_a_graph(record, encoder, tmp_path, capfd):
    opened = open_encoder(encoder, 32) if encoder != "convnet" else open_encoder(str(make_run(tmp_path)))
    network = PhotoNetwork(opened, Classifier(opened.net.num_features)).eval()
    try:
        graph = record(network, opened.image_size)
    except torch.onnx.OnnxExporterError:
        if torch.__version__ >= "2.9":
            raise
        pytest.skip("this torch's torch.onnx.export(dynamo=True) does not get on with this onnxscript")
    difference = compare(graph.SerializeToString(), network, opened.image_size, onnxruntime)
    assert 0 < difference["embedding"] < 1e-5
    assert "BatchNormalization" not in {node.op_type for node in graph.graph.node}
    assert graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_efficientnet_lite0(photos, tmp_path):
    model = make_model(photos, "efficientnet_lite0", image_size=32)
    model.save_pretrained(tmp_path)
    done = export_onnx(OpenConModel.from_pretrained(tmp_path), tmp_path / "model.onnx")
    assert max(done.difference[name] for name in ("embedding", "oddness")) < 1e-3


@pytest.mark.parametrize("kind", ["large JPEG", "turned JPEG", "transparent PNG", "gray PNG"])
def test_the_code_on_the_card_says_what_predict_says(model, recorded, photos, tmp_path, monkeypatch, capsys, kind):
    model.save_pretrained(tmp_path)
    export_onnx(OpenConModel.from_pretrained(tmp_path), tmp_path / "model.onnx")
    rng = np.random.default_rng(5)
    small = np.clip(np.array([200, 60, 60]) + rng.normal(0, 40, (9, 13, 3)), 0, 255).astype(np.uint8)
    photo = Image.fromarray(small).resize((390, 270), Image.Resampling.BICUBIC)
    options = {"format": kind.split()[1]}
    if kind == "turned JPEG":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6
    elif kind == "transparent PNG":
        photo.putalpha(Image.linear_gradient("L").resize(photo.size))
    elif kind == "gray PNG":
        photo = photo.convert("L")
    photo.save(tmp_path / "photo.jpg", **options)
    want = model.predict(tmp_path / "photo.jpg")[0]
    monkeypatch.chdir(tmp_path)
    code = (tmp_path / "README.md").read_text("utf-8").split("```python\n")[2].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    name, confidence = capsys.readouterr().out.rsplit(" ", 1)
    assert name == (want.predicted or "none of these")
    assert float(confidence) == pytest.approx(want.confidence, abs=0.0006)


# --- what can go wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["mean", "prototypes", "nan"])
def test_a_graph_that_computes_something_else_is_not_written(model, recorded, tmp_path, monkeypatch, wrong):
    build = PhotoNetwork.__init__

    def change(self, encoder, classifier, name_of):
        other = type(classifier).from_settings(classifier.settings())
        other.load_state_dict(classifier.state_dict())
        build(self, encoder, other)
        if wrong == "mean":
            self.mean += 0.05
        elif wrong == "prototypes":
            self.classifier.prototypes[:] = self.classifier.prototypes.flip(0)
        else:
            self.classifier.prototypes[0, 0] = float("nan")

    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    monkeypatch.setattr(PhotoNetwork, "__init__", change)
    with pytest.raises(RunError, match=r"again: '\w+' differs from PyTorch's by [\w.+-]+, more than"):
        export_onnx(model, path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_a_wrong_shape_is_refused(model, done, tmp_path, monkeypatch):
    def last_two_swapped(network, size):
        graph = onnx.load(done.path)
        new = {"oddness": "embedding", "embedding": "oddness"}
        for node in graph.graph.node:
            node.output[:] = [new.get(name, name) for name in node.output]
            node.input[:] = [new.get(name, name) for name in node.input]
        for out in graph.graph.output:
            out.name = new.get(out.name, out.name)
        return graph

    monkeypatch.setattr(export, "RECORDERS", (last_two_swapped,))
    with pytest.raises(RunError, match=r"last_two_swapped: 'oddness' has shape \(1, \d+\) instead of \(1,\)"):
        export_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_the_next_way_is_tried_where_one_fails(model, done, tmp_path, monkeypatch):
    def fail(network, size):
        raise ValueError("no such operation\nlong story")

    def another(network, size):
        return onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> f (float[1] a) => (float[1] b) {b = Abs(a)}'
        )

    def right(network, size):
        return onnx.load(done.path)

    monkeypatch.setattr(export, "RECORDERS", (fail, another, right))
    assert export_onnx(model, tmp_path / "model.onnx").difference == done.difference
    monkeypatch.setattr(export, "RECORDERS", (fail, another))
    message = (
        r"'convnet' cannot be written as ONNX with torch [\w.+]+:\n  fail: no such operation\n  another: .*\nRun: pip"
    )
    with pytest.raises(RunError, match=message):
        export_onnx(model, tmp_path / "model.onnx")


def test_an_encoder_that_is_too_large(model, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "MOST_BYTES", 1000)
    with pytest.raises(RunError, match=r"GB of weights; one ONNX file holds 0.0. Use a smaller encoder"):
        export_onnx(model, tmp_path / "model.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_names_the_command(model, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"needs {package}, .*pip install 'opencon\[onnx\]'"):
        export_onnx(model, tmp_path / "model.onnx")


def test_a_path_that_is_no_file(model, recorded, tmp_path):
    for path in (tmp_path, tmp_path / "absent" / "model.onnx"):
        with pytest.raises(RunError, match="give the name of a file in a folder that exists"):
            export_onnx(model, path)
