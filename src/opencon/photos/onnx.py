"""A model as one ONNX graph, for programs without Python or PyTorch.

    images (B, 3, S, S) float32, RGB in [0, 1]
        --> normalization, encoder (batch norms folded), head, prototypes -->
    probabilities (B, C), confidence (B,), novelty (B,), oddness (B,), unlike_everything (B,), embedding (B, D)

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
OUTPUTS = ("probabilities", "confidence", "novelty", "oddness", "unlike_everything", "embedding")
BATCHES = (1, 3, 7)  # sizes that are compared with PyTorch; the graph is recorded with another one, 2
# Ours: fifty layers that sum in another order change the embedding by some 1e-6, a wrong layer by far more.
TOLERANCE = 1e-4
ROUNDING = 1e-6  # of a cosine, eight times that of float32
MOST_BYTES = 2**31 - 1  # what one ONNX file can hold


class PhotoNetwork(nn.Module):
    """From images to all outputs of the model, as plain tensors."""

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
        rows = self.net((x - self.mean) / self.std)
        p, confidence, novelty, oddness = self.classifier(rows)
        if self.name_of is not None:
            p = p @ self.name_of
            confidence = p.amax(dim=1)
        return (
            p,
            confidence,
            novelty,
            oddness,
            oddness > self.classifier.strangers.threshold(),
            self.classifier.embed(rows),
        )


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
    """The first graph that computes the same as the network, and by how much it differs."""
    failures = []
    for record in RECORDERS:
        try:
            graph = record(network, encoder.image_size)
            for part in (*graph.graph.node, *graph.graph.input, *graph.graph.output, *graph.graph.value_info):
                del part.metadata_props[:]  # the exporter's notes, which name paths of this machine
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
    """What a program needs to know about the graph, kept in the file itself; lists are JSON."""
    size = encoder.image_size
    return {
        "opencon": __version__,
        "class_names": json.dumps(model.names),  # in ASCII: a name may hold bytes that are no text
        "num_seen": str(model.num_seen_names),
        "outlier_threshold": repr(float(model.classifier.strangers.threshold())),
        "image_size": str(size),
        "encoder": encoder.name,
        "input": f"{INPUT}: float32 (batch, 3, {size}, {size}), RGB in [0, 1]: the photo upright, its short side scaled to "
        f"{size} pixels (bicubic), the central square",
        "output": "probabilities: of the class_names, of which the first num_seen are seen classes, the others new groups; "
        "confidence: how often such a choice is right; novelty: larger is newer, above 0 more likely new than seen; "
        "oddness: distance to the nearest training photos beside what is usual there; "
        "unlike_everything: oddness above outlier_threshold, none of the classes; embedding: of unit length",
    }


# --- recording --------------------------------------------------------------------------------------------------------
#
# Torch has two ways to record a graph. Which one works depends on the versions of torch and onnxscript, and on the encoder.
# So both are tried, the one with the better graph first, and a graph counts only if it computes the same as PyTorch.


def exported(network: nn.Module, size: int) -> Any:
    """By torch.export: all sizes but the batch are fixed, which onnxruntime runs fastest."""
    images = torch.zeros(2, 3, size, size)  # with a batch of one, one would be the only size
    shapes = {INPUT: {0: torch.export.Dim("batch", max=2**16)}}  # torch 2.6 needs a limit
    with torch.no_grad(), _quiet():
        program = torch.export.export(network, (images,), dynamic_shapes=shapes, strict=False)
        done = torch.onnx.export(program, dynamo=True, verbose=False, input_names=[INPUT], output_names=list(OUTPUTS))
    assert done is not None
    graph = done.model_proto
    for value in (*graph.graph.input, *graph.graph.output):  # otherwise torch's own symbol stays as the name
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return graph


def traced(network: nn.Module, size: int) -> Any:
    """By TorchScript: every torch so far has it, but the graph computes sizes, which costs a third of the speed."""
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
            opset_version=17,  # the first that has every operation, so that older runtimes can read it
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
    options.log_severity_level = 4  # its errors are raised anyway
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    largest, allowed = dict.fromkeys(OUTPUTS, 0.0), dict.fromkeys(OUTPUTS, TOLERANCE)
    draw = generator(torch.device("cpu"), 0)
    for batch in BATCHES:
        # From flat to full contrast, so that not all fall to one class.
        images = torch.rand(batch, 3, size, size, generator=draw) * torch.rand(batch, 3, 1, 1, generator=draw)
        got = dict(zip(OUTPUTS, session.run(list(OUTPUTS), {INPUT: images.numpy()}), strict=True))
        want = dict(zip(OUTPUTS, (t.numpy() for t in network(images)), strict=True))
        # An oddness at the very threshold may fall on either side, so each flag is compared with its own oddness.
        want["unlike_everything"] = got["oddness"] > np.float32(network.classifier.strangers.threshold())
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
        if not distance <= allowed[name]:  # also refuses NaN
            raise RunError(f"{name!r} differs from PyTorch's by {distance:.2g}, more than {allowed[name]:.2g}")
    return largest


def _extra(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except Exception as err:  # a version that does not fit fails in many ways, not only with ImportError
        raise MissingExtraError(package, "onnx", "export to ONNX", err) from err


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's own messages: packages it could use, its own deprecated calls."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
