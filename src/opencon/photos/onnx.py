"""A model as one ONNX graph, for programs without Python or PyTorch.

    images (B, 3, S, S) float32, RGB in [0, 1]
        --> normalization, encoder (batch norms folded), head, prototypes -->
    probabilities (B, C), novelty (B,), similarity (B,), unlike_everything (B,), embedding (B, D)

The graph computes in float32. It is compared with PyTorch before the file gets its name.

Letters: B images, any number of them; S side in pixels, C classes and groups, D embedding size.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opencon.data.color import to_gray
from opencon.encoders.pretrained import PretrainedEncoder
from opencon.errors import MissingExtraError, RunError
from opencon.openworld.model import OpenWorldModel
from opencon.photos.model import OpenConModel
from opencon.runtime import generator
from opencon.training.run_folder import RunFolder
from opencon.version import __version__

INPUT = "images"
OUTPUTS = ("probabilities", "novelty", "similarity", "unlike_everything", "embedding")
BATCHES = (1, 3, 7)  # compared with PyTorch; none is the size that the graph is recorded with, which is 2
# Ours: fifty layers in another order of summation differ by some 1e-6 in the embedding, a wrong layer by far more.
TOLERANCE = 1e-4
ROUNDING = 1e-6  # of a cosine, eight times that of float32
MOST_BYTES = 2**31 - 1  # what one ONNX file can hold


class PhotoNetwork(nn.Module):
    """Images to all that the model says of them, as plain tensors."""

    mean: Tensor
    std: Tensor
    name_of: Tensor | None  # (C, K), where several classes carry the same name

    def __init__(self, encoder: PretrainedEncoder, classifier: OpenWorldModel, name_of: Tensor | None = None) -> None:
        super().__init__()
        self.net, self.classifier = encoder.net, classifier
        self.register_buffer("name_of", name_of)
        for name, values in (("mean", encoder.mean), ("std", encoder.std)):
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(B, 3, S, S) in [0, 1] -> the tensors that `OUTPUTS` names."""
        x = to_gray(images) if self.net.in_channels == 1 else images
        z = self.classifier.embed(self.net((x - self.mean) / self.std))
        p, novelty, similarity = self.classifier.judge(z)
        p = p if self.name_of is None else p @ self.name_of
        return p, novelty, similarity, similarity < self.classifier.outlier_threshold, z


@dataclass(frozen=True)
class OnnxExport:
    """A written graph, and how far it is from PyTorch."""

    path: Path
    difference: dict[str, float]  # output to its largest absolute difference over the images compared


def export_onnx(model: OpenConModel, path: str | Path) -> OnnxExport:
    """Write the model as one ONNX file, after comparing it with PyTorch on random images in batches of several sizes."""
    onnx, _, runtime = (_extra(package) for package in ("onnx", "onnxscript", "onnxruntime"))
    path = Path(path).expanduser()
    if not path.parent.is_dir() or path.is_dir():
        raise RunError(f"cannot write {path}: give the name of a file in a folder that exists, such as model.onnx.")
    encoder = model.load_encoder()
    network = PhotoNetwork(encoder, model.classifier, model.name_of).eval()
    weight = sum(t.numel() * t.element_size() for t in network.state_dict().values())
    if weight > MOST_BYTES:
        raise RunError(
            f"encoder {encoder.name!r} has {weight / 1e9:.1f} GB of weights; one ONNX file holds {MOST_BYTES / 1e9:.1f}. "
            f"Use a smaller encoder, or `save_pretrained`."
        )
    content, difference = _recorded(network, encoder, metadata(model, encoder), onnx, runtime)
    RunFolder(path.parent).write_file(path.name, lambda partial: partial.write_bytes(content))
    return OnnxExport(path, difference)


def _recorded(
    network: PhotoNetwork, encoder: PretrainedEncoder, facts: dict[str, str], onnx: Any, runtime: Any
) -> tuple[bytes, dict[str, float]]:
    """The first graph that computes what the network does, and by how much it differs."""
    failures = []
    for record in RECORDERS:
        try:
            graph = record(network, encoder.image_size)
            for part in (*graph.graph.node, *graph.graph.input, *graph.graph.output, *graph.graph.value_info):
                del part.metadata_props[:]  # the exporter's notes, with paths of this machine
            onnx.helper.set_model_props(graph, facts)
            content: bytes = graph.SerializeToString()
            return content, compare(content, network, encoder.image_size, runtime)
        except Exception as err:  # an exporter that does not know an operation fails in many ways
            failures.append(f"  {record.__name__}: {next(iter(str(err).splitlines()), type(err).__name__)}")
    raise RunError(
        f"encoder {encoder.name!r} cannot be written as ONNX with torch {torch.__version__}:\n"
        + "\n".join(failures)
        + "\nRun: pip install --upgrade 'opencon[onnx]'. Or take the folder that `save_pretrained` writes."
    )


def metadata(model: OpenConModel, encoder: PretrainedEncoder) -> dict[str, str]:
    """What a program needs to know of the graph, in the file itself; lists are JSON."""
    size = encoder.image_size
    return {
        "opencon": __version__,
        "class_names": json.dumps(model.names),  # in ASCII: a name may hold what no text can
        "num_seen": str(model.num_seen_names),
        "outlier_threshold": repr(float(model.classifier.outlier_threshold)),
        "image_size": str(size),
        "encoder": encoder.name,
        "input": f"{INPUT}: float32 (batch, 3, {size}, {size}), RGB in [0, 1]: the photo upright, its short side scaled to "
        f"{size} pixels (bicubic), the central square",
        "output": "probabilities: of the class_names, of which the first num_seen are seen classes, the others new groups; "
        "novelty: larger is newer, above 0 more likely new than seen; similarity: cosine to the nearest prototype; "
        "unlike_everything: similarity below outlier_threshold, none of the classes; embedding: of unit length",
    }


# --- recording --------------------------------------------------------------------------------------------------------
#
# Which of torch's ways to a graph works depends on the versions of torch and onnxscript, and on the encoder. So they are
# tried in turn, the one with the best graph first, and a graph counts only if it computes what PyTorch does.


def exported(network: nn.Module, size: int) -> Any:
    """By torch.export: a graph whose sizes are all fixed but the batch, which onnxruntime runs fastest."""
    images = torch.zeros(2, 3, size, size)  # a batch of one would be taken for the only size there is
    shapes = {INPUT: {0: torch.export.Dim("batch", max=2**16)}}  # torch 2.6 wants some end
    with torch.no_grad(), _quiet():
        program = torch.export.export(network, (images,), dynamic_shapes=shapes, strict=False)
        done = torch.onnx.export(program, dynamo=True, verbose=False, input_names=[INPUT], output_names=list(OUTPUTS))
    assert done is not None
    graph = done.model_proto
    for value in (*graph.graph.input, *graph.graph.output):  # else it is called as torch numbers its symbols
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return graph


def traced(network: nn.Module, size: int) -> Any:
    """By TorchScript: in every torch up to now, but sizes are computed on the way, which cost a third of the speed."""
    onnx, file = _extra("onnx"), io.BytesIO()
    axes = {name: {0: "batch"} for name in (INPUT, *OUTPUTS)}
    images = torch.zeros(2, 3, size, size)
    with torch.no_grad(), _quiet():
        torch.onnx.export(
            network,
            (images,),
            file,  # type: ignore[arg-type, unused-ignore]
            dynamo=False,
            input_names=[INPUT],
            output_names=list(OUTPUTS),
            dynamic_axes=axes,
            opset_version=17,  # the first with all that is needed, so that older runtimes read it
        )
    return onnx.load_from_string(file.getvalue())


RECORDERS: tuple[Callable[[nn.Module, int], Any], ...] = (exported, traced)


@torch.no_grad()
def compare(content: bytes, network: PhotoNetwork, size: int, runtime: Any) -> dict[str, float]:
    """The largest difference in each output between the graph and PyTorch; refuses a graph that computes something else.

    Logits are the sharpness times a cosine. Where the embedding differs by d, they may differ by sharpness * |d|, and
    novelty, a difference of two such numbers, by twice as much.
    """
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # its errors are raised as well
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    largest, allowed = dict.fromkeys(OUTPUTS, 0.0), dict.fromkeys(OUTPUTS, TOLERANCE)
    draw = generator(torch.device("cpu"), 0)
    for batch in BATCHES:
        # From flat to full contrast, so that not all fall to one class.
        images = torch.rand(batch, 3, size, size, generator=draw) * torch.rand(batch, 3, 1, 1, generator=draw)
        got = dict(zip(OUTPUTS, session.run(list(OUTPUTS), {INPUT: images.numpy()}), strict=True))
        want = dict(zip(OUTPUTS, (t.numpy() for t in network(images)), strict=True))
        # A similarity at the very threshold may fall on either side of it: each is held to its own.
        want["unlike_everything"] = got["similarity"] < np.float32(network.classifier.outlier_threshold)
        for name in OUTPUTS:
            if got[name].shape != want[name].shape:
                raise RunError(f"{name!r} has shape {got[name].shape} instead of {want[name].shape}")
            distance = np.abs(got[name].astype(np.float64) - want[name].astype(np.float64)).max()
            largest[name] = float(np.maximum(largest[name], distance))  # NaN stays NaN
        d = np.linalg.norm(got["embedding"] - want["embedding"], axis=1).max()
        slack = TOLERANCE + 2 * float(network.classifier.sharpness) * (float(d) + ROUNDING)
        for name in ("probabilities", "novelty"):
            allowed[name] = max(allowed[name], slack)
    for name, distance in largest.items():
        if not distance <= allowed[name]:  # NaN too
            raise RunError(f"{name!r} differs from PyTorch's by {distance:.2g}, more than {allowed[name]:.2g}")
    return largest


def _extra(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except Exception as err:  # one that does not fit the others fails in many ways, not only ImportError
        raise MissingExtraError(package, "onnx", "export to ONNX", err) from err


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's words about itself: packages it could use, calls of its own that are deprecated."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
