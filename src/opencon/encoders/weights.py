"""Read weights from a file into a module, whatever the names are prefixed with or styled after.

Nothing in a file is ever executed: .safetensors cannot, and torch files are opened with `weights_only=True`.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from opencon.encoders.vit import resize_positions
from opencon.errors import ConfigError, DataError

TORCH_SUFFIXES = (".pt", ".pth", ".pth.tar", ".ckpt")
SUFFIXES = (".safetensors", *TORCH_SUFFIXES)

# Other people's names to ours, for a name that the module does not have.
RENAMES = (
    (re.compile(r"^(conv1|bn1)\."), r"stem.\1."),  # ResNet: torchvision, timm, and the published SimCLR networks
    (re.compile(r"\.shortcut\."), ".downsample."),  # ResNet: the published SimCLR networks for CIFAR
    (re.compile(r"^(cls_token|pos_embed)$"), r"embed.\1"),  # ViT: DINO and timm
    (re.compile(r"^patch_embed\.proj\."), "embed.proj."),
    (re.compile(r"^blocks\.(\d+)\."), r"block\1."),
)

# Where a file holds the same network twice, the prefix with the earlier of these wins: what is trained here (not its
# momentum copy), DINO's teacher (the network its authors evaluate), MoCo's query encoder.
PREFERRED = (re.compile(r"(^|\.)embedder\."), re.compile(r"(^|\.)teacher\."), re.compile(r"(^|\.)encoder_q\."))


@dataclass(frozen=True)
class LoadReport:
    """What was loaded from a file into a module. `unexpected` holds names of the file, the others names of the module."""

    path: str
    prefix: str  # only names of the file that start with it were read
    loaded: tuple[str, ...]
    missing: tuple[str, ...]  # not in the file, left as they were
    unexpected: tuple[str, ...]  # in the file, not used
    wrong_shape: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # name, in the file, in the module
    resized: tuple[str, ...] = ()  # position embeddings of another grid, interpolated

    def __str__(self) -> str:
        under = f" (under {self.prefix!r})" if self.prefix else ""
        total = len(self.loaded) + len(self.missing) + len(self.wrong_shape)
        text = f"Loaded {len(self.loaded)} of {total} tensors from {self.path}{under}."
        rest = [f"position embedding interpolated: {_some(self.resized)}"] if self.resized else []
        if self.missing:
            rest.append(f"missing and left as they were: {_some(self.missing)}")
        if self.wrong_shape:
            rest.append(f"of another shape: {_some(_shapes(*entry) for entry in self.wrong_shape)}")
        if self.unexpected:
            rest.append(f"not used: {_some(self.unexpected)}")
        return f"{text} Note: {'; '.join(rest)}." if rest else text


def load_weights(module: nn.Module, path: str | Path) -> LoadReport:
    """Copy the tensors of a file into `module` and report what fitted.

    The file may hold our own names, torchvision's, timm's, DINO's or those of the published SimCLR networks, behind any
    prefix (`module.`, `teacher.backbone.`, `embedder.encoder.`, ...). The prefix under which most names fit is taken.
    Values are cast to the module's type. A file that lacks a weight of two or more dimensions, or more than half of
    the tensors, is refused, and the module stays as it was.
    """
    path = Path(path).expanduser()
    tensors = read_tensors(path)
    # The counter of batches is bookkeeping that many files leave out; no computation here reads it.
    wanted = {name: t for name, t in module.state_dict().items() if not name.endswith("num_batches_tracked")}
    prefix = _best_prefix(tensors, wanted)
    ours = {_our_name(name[len(prefix) :], wanted): name for name in tensors if name.startswith(prefix)}

    ready: dict[str, Tensor] = {}
    resized: list[str] = []
    wrong_shape: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for name in (name for name in wanted if name in ours):
        tensor, target = tensors[ours[name]], wanted[name]
        if _is_other_grid(name, tensor, target):
            old, new = (math.isqrt(t.shape[1] - 1) for t in (tensor, target))
            tensor = resize_positions(tensor, (new, new))
            resized.append(f"{name} from {old}x{old} to {new}x{new}")
        if tensor.shape == target.shape:
            ready[name] = tensor
        else:
            wrong_shape.append((name, tuple(tensor.shape), tuple(target.shape)))
    used = {ours[name] for name in wanted.keys() & ours.keys()}
    report = LoadReport(
        path=str(path),
        prefix=prefix,
        loaded=tuple(name for name in wanted if name in ready),
        missing=tuple(name for name in wanted if name not in ours),
        unexpected=tuple(name for name in tensors if name not in used and not name.endswith("num_batches_tracked")),
        wrong_shape=tuple(wrong_shape),
        resized=tuple(resized),
    )
    _refuse_misfit(report, wanted)
    with torch.no_grad():
        for name, tensor in ready.items():
            wanted[name].copy_(tensor)
    return report


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor in a file, on the CPU; nested dictionaries become dotted names."""
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise DataError(f"the weights {path} {what}. Allowed: {', '.join(SUFFIXES)} files.")
    content: Any
    if path.name.endswith(".safetensors"):
        try:
            content = safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, OSError) as err:
            raise DataError(f"the weights {path} cannot be read as safetensors ({err}). Get the file again.") from err
    elif path.name.endswith(TORCH_SUFFIXES):
        content = _read_torch(path)
    else:
        raise DataError(f"the weights {path} are in no known format. Allowed: {', '.join(SUFFIXES)}.")
    tensors = dict(_flatten(content, ""))
    if not tensors:
        raise DataError(f"the weights {path} hold no tensor. Give a file with a state dict.")
    return tensors


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as err:
        culprit = re.search(r"GLOBAL (\S+)", str(err))
        if culprit is None:
            raise DataError(f"the weights {path} cannot be read by torch.load. Get the file again.") from err
        raise DataError(
            f"the weights {path} hold more than tensors ({culprit[1]}). Reading such a file could run code, so opencon "
            f"does not. If you trust the file, save its state dict alone, for example with "
            f"torch.save(torch.load(path, weights_only=False)['state_dict'], new_path)."
        ) from err
    except Exception as err:  # a damaged file fails in any of a dozen ways: zip, pickle, end of file, ...
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise DataError(f"the weights {path} cannot be read by torch.load ({reason}). Get the file again.") from err


def _flatten(content: Any, at: str) -> Iterable[tuple[str, Tensor]]:
    if isinstance(content, Tensor):
        yield at, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _flatten(value, f"{at}.{key}" if at else str(key))


def _our_name(name: str, wanted: Mapping[str, Tensor]) -> str:
    if name not in wanted:
        for pattern, ours in RENAMES:
            name = pattern.sub(ours, name)
    return name


def _best_prefix(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """The prefix under which most names of the file are names of the module. A name whose shape fits counts twice."""
    votes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        for start in [0, *(dot.end() for dot in re.finditer(r"\.", name))]:
            ours = _our_name(name[start:], wanted)
            if ours in wanted:
                votes[name[:start]] += 1 + (tensor.shape == wanted[ours].shape)

    def rank(prefix: str) -> tuple[int, int, int]:
        preference = next((i for i, p in enumerate(PREFERRED) if p.search(prefix)), len(PREFERRED))
        return votes[prefix], -preference, -len(prefix)

    return max(votes, key=rank, default="")


def _is_other_grid(name: str, tensor: Tensor, target: Tensor) -> bool:
    """Whether both are position embeddings of a class token and a square grid, with the same width and another grid."""
    if not name.endswith("pos_embed") or tensor.ndim != 3 or tensor.shape[1] == target.shape[1]:
        return False
    patches = tensor.shape[1] - 1
    return patches >= 1 and math.isqrt(patches) ** 2 == patches and tensor.shape[::2] == target.shape[::2]


def _refuse_misfit(report: LoadReport, wanted: Mapping[str, Tensor]) -> None:
    loaded = set(report.loaded)
    lacking = [name for name, tensor in wanted.items() if name not in loaded and tensor.ndim >= 2]
    if not lacking and 2 * len(loaded) >= len(wanted):
        return
    sides = [f"Only {len(loaded)} of {len(wanted)} tensors fit."]
    if report.wrong_shape:
        sides.append(f"Of another shape: {_some(_shapes(*entry) for entry in report.wrong_shape)}.")
    if report.missing:
        sides.append(f"Not in the file: {_some(report.missing)}.")
    sides.append(f"Unused names in the file: {_some(report.unexpected)}." if report.unexpected else "")
    raise ConfigError(
        f"the weights {report.path} do not fit the encoder. {' '.join(filter(None, sides))} "
        f"Choose the encoder they were trained with (encoder.name), or other weights (encoder.weights)."
    )


def _shapes(name: str, in_file: tuple[int, ...], in_module: tuple[int, ...]) -> str:
    return f"{name} is {in_file} in the file, {in_module} here"


def _some(names: Iterable[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
