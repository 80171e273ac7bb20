"""A run of `opencon train` as a model of photos: `OpenConModel.from_pretrained` opens it like a discovery.

A run folder is read as it is. An exported one holds

    model.json           names, settings of the run, how its classes are judged
    model.safetensors    the method without its encoder, the classes, rows of the examples
    encoder.safetensors  the encoder alone, under its own names, for use without opencon
    README.md            the model card
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.config import FrozenNorm, RunConfig, to_dict
from opencon.encoders import Encoder
from opencon.encoders.pretrained import RUN_FILE, PretrainedEncoder, fingerprint
from opencon.encoders.stored import EncoderFacts
from opencon.errors import OpenConError, RunError
from opencon.experiments.classes import (
    FILE,
    TENSORS,
    Facts,
    RunClasses,
    facts_from,
    judged_state,
    learned_classes,
    task_of,
)
from opencon.experiments.recipes import run_config
from opencon.experiments.workbench import build_method, open_run, without_weights
from opencon.files import parse_json, read_file
from opencon.methods import METHODS, Method
from opencon.photos.features import Extractor, FeatureSettings
from opencon.photos.model import OTHER_KINDS, OpenConModel, Opener
from opencon.photos.model import TENSORS as MODEL_TENSORS
from opencon.photos.model_settings import FORMAT, SETTINGS
from opencon.plugins import RECORD, needs, recall
from opencon.runtime import seeded
from opencon.training.run_folder import DISCOVERY, RunFolder
from opencon.version import __version__

RUN = "run"  # as "kind" in model.json
ENCODER = "embedder.encoder."  # where a method keeps its encoder


class RunNet(Encoder):
    """The method of a run in the place of an encoder: images in [0, 1] to the rows that it judges."""

    channels_last = False  # the method sees to it

    def __init__(self, method: Method[Any], facts: Facts, *, mirror: bool) -> None:
        super().__init__()
        self.stages = ()
        self.method, self.view_size, self.mirror = method, facts.view_size, mirror
        self.in_channels, self.num_features = facts.channels, int(facts.settings["dim"])

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1] -> (B, D)."""
        if x.shape[-1] != self.view_size:  # as `plain_view`
            size = (self.view_size, self.view_size)
            x = F.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False).clamp(0.0, 1.0)
        if self.mirror:  # as `embed_images`
            return F.normalize(self.method.embed(x) + self.method.embed(x.flip(-1)), dim=1)
        return self.method.embed(x)

    def named_starts(self) -> dict[str, int]:
        """There is nothing to train."""
        return {}

    def freeze(self, train_from: str, norm: FrozenNorm = "batch") -> None:
        """Nothing learns any more."""
        self.requires_grad_(False)


@dataclass(frozen=True, eq=False, repr=False)
class RunModel(OpenConModel):
    """A trained run: photos to its seen classes and new groups."""

    config: RunConfig | None = None
    facts: Facts | None = None

    @classmethod
    def made(
        cls, config: RunConfig, facts: Facts, classes: RunClasses, examples: Tensor, home: Path, device: torch.device
    ) -> RunModel:
        """The model of a run whose method has its weights."""
        encoder = _as_encoder(classes.method, config, facts, facts.view_size)
        return cls(
            classes.eval(),
            facts.class_names,
            FeatureSettings(encoder=config.encoder.name, image_size=facts.stored_size, num_views=0),
            example_files=facts.example_files,
            example_rows=examples,
            sizes=facts.sizes,
            encoder=EncoderFacts.of(encoder),
            first_names=facts.first_names,
            home=home,
            device=device,
            config=config,
            facts=facts,
        )

    def __repr__(self) -> str:
        new, name = len(self.names) - self.num_seen_names, self._config.method.name
        return f"<OpenConModel of a run of {name}: {self.num_seen_names} seen classes and {new} new groups>"

    @property
    def _config(self) -> RunConfig:
        assert self.config is not None
        return self.config

    @property
    def _facts(self) -> Facts:
        assert self.facts is not None
        return self.facts

    @property
    def method(self) -> Method[Any]:
        """The trained method."""
        assert isinstance(self.classifier, RunClasses)
        return self.classifier.method

    @functools.cached_property
    def _extractor(self) -> Extractor:
        stored = _as_encoder(self.method, self._config, self._facts, self._facts.stored_size)
        return Extractor(stored, self.features, self.device)

    def load_encoder(self) -> PretrainedEncoder:
        """The method in the place of an encoder, for images of the size of a view."""
        return _as_encoder(self.method, self._config, self._facts, self._facts.view_size)

    def to_torch(self) -> nn.Module:
        """The encoder alone as an ordinary PyTorch module: images (B, channels, S, S) in [0, 1] to features (B, F)."""
        net, own = self.method.embedder.encoder, self._config.encoder
        encoder = PretrainedEncoder(own.name, net, self._facts.view_size, own.mean, own.std, fingerprint(net))
        return encoder.as_module()

    def card_facts(self) -> dict[str, str]:
        """Lines for the model card."""
        entry, data = METHODS[self._config.method.name], self._config.data.name
        rules = {
            "outputs": "the method's own output for each class",
            "seen": "the method's outputs for seen classes; unsure photos go to the nearest new group",
            "means": "the nearest mean of the groups found in training",
        }
        plugins = needs(self.home) if self.home is not None else []
        return ({"needs": "; ".join(plugins)} if plugins else {}) | {
            "method": f"{entry.title} ({entry.paper}), {self._config.train.epochs} epochs on {data}",
            "head": f"{rules[self._facts.settings['rule']]}; it agrees with the run on {self._facts.agrees:.1%} of its "
            f"unlabeled training images",
        }

    def save(self, folder: str | Path | RunFolder) -> None:
        """Write a folder that needs nothing but opencon; in the folder of a run, only the names of its classes."""
        run = folder if isinstance(folder, RunFolder) else RunFolder.made(Path(folder).expanduser())
        if run.has(FILE):
            run.write_json(FILE, asdict(self._named_facts()))
        else:
            self._write(run, None)

    def save_pretrained(
        self, folder: str | Path, *, title: str = "Seen classes and new groups", facts: Mapping[str, str] | None = None
    ) -> None:
        """Write a folder that needs nothing but opencon: model, encoder and a model card; see `OpenConModel`."""
        super().save_pretrained(folder, title=title, facts={**self.card_facts(), **(facts or {})})

    def _named_facts(self) -> Facts:
        return replace(self._facts, class_names=self.class_names, first_names=self.first_names)

    def _write(self, run: RunFolder, encoder: PretrainedEncoder | None) -> None:
        assert isinstance(self.classifier, RunClasses)
        state = self.method.state_dict()
        net = {name.removeprefix(ENCODER): tensor for name, tensor in state.items() if name.startswith(ENCODER)}
        run.save_tensors(RUN_FILE, net, {"encoder": self._config.encoder.name})
        tensors = {f"method.{name}": tensor for name, tensor in state.items() if not name.startswith(ENCODER)}
        tensors |= {f"classes.{name}": tensor for name, tensor in self.classifier.own_tensors().items()}
        plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}  # none may share memory
        run.save_tensors(MODEL_TENSORS, {**plain, "examples": self.example_rows}, {"format": str(FORMAT)})
        config = to_dict(without_weights(self._config))
        config["data"] = {"name": self._config.data.name}  # a folder for others must not name paths of this machine
        settings = {
            "what": "a model of opencon: from opencon import OpenConModel; OpenConModel.from_pretrained(FOLDER)",
            "format": FORMAT,
            "kind": RUN,
            "opencon": __version__,
            "config": config,
            "classes": asdict(self._named_facts()),
            "preprocessing": {
                "image_size": self._facts.view_size,
                "mean": self._config.encoder.mean,
                "std": self._config.encoder.std,
                "how": "upright, RGB, short side scaled to image_size (bicubic), central square, to [0, 1], minus mean, "
                "over std",
            },
            "sha256": hashlib.sha256((run.path / MODEL_TENSORS).read_bytes()).hexdigest(),
        }
        if self.home is not None and (self.home / RECORD).is_file():
            run.write_text(RECORD, (self.home / RECORD).read_text(encoding="utf-8"))
        run.write_json(SETTINGS, settings)


def is_run(folder: Path) -> bool:
    """Whether a folder is one of `opencon train`, or exported from one."""
    if (folder / "split.json").is_file() and not (folder / DISCOVERY).is_file():
        return True
    try:
        return bool(parse_json(read_file(folder / SETTINGS)).get("kind") == RUN)
    except (OSError, ValueError, AttributeError):
        return False


def open_run_model(folder: Path, device: torch.device) -> OpenConModel:
    """The model of a run folder, or of an exported one."""
    if (folder / "split.json").is_file():
        return _from_run(folder, device)
    recall(folder)  # the method may be somebody's own
    try:
        plain = parse_json(read_file(folder / SETTINGS))
        content = read_file(folder / MODEL_TENSORS)
        if hashlib.sha256(content).hexdigest() != plain["sha256"]:
            raise ValueError(f"{MODEL_TENSORS} does not belong to {SETTINGS}, or is damaged")
        tensors, encoder = safetensors.torch.load(content), safetensors.torch.load(read_file(folder / RUN_FILE))
        state = {name.removeprefix("method."): t for name, t in tensors.items() if name.startswith("method.")}
        state |= {ENCODER + name: tensor for name, tensor in encoder.items()}
        own = {name.removeprefix("classes."): t for name, t in tensors.items() if name.startswith("classes.")}
        config, facts = run_config(plain["config"]), facts_from(plain["classes"])
        return _assembled(config, facts, state, own, tensors["examples"], folder, device)
    except OpenConError:
        raise
    except Exception as err:  # wrong settings, or some that do not fit the tensors, fail in many ways
        why = f"{type(err).__name__}: {next(iter(str(err).splitlines()), '')}"
        raise RunError(f"the model in {folder} cannot be read ({why}). Copy it again, or export it again.") from err


def _from_run(folder: Path, device: torch.device) -> RunModel:
    run = RunFolder.open_for_reading(folder)
    if run.has(FILE) and run.has("result.json"):
        try:
            config, facts = run_config(run.read_json("config.json")), facts_from(run.read_json(FILE))
            own = safetensors.torch.load(read_file(folder / TENSORS))
            examples, state = own.pop("examples"), {n: own.pop(n) for n in list(own) if n.startswith("method.")}
            state = {name.removeprefix("method."): tensor for name, tensor in state.items()}
            state = state or run.load_checkpoint()["method"]
            return _assembled(config, facts, state, own, examples, folder, device)
        except OpenConError:
            raise
        except Exception as err:  # facts that do not fit the tensors fail in many ways
            why = f"{type(err).__name__}: {next(iter(str(err).splitlines()), '')}"
            raise RunError(f"the classes of {folder} cannot be read ({why}). The run folder is damaged.") from err
    # A run that is not finished, or from before runs kept their classes: its data says them once more.
    bench = open_run(folder, device)
    _, bank, assignment = bench.score("unlabeled", bench.config.eval.protocol)
    with bench.judged_weights():
        facts, classes, examples = learned_classes(bench, bank, assignment)
        own = {name: tensor.cpu() for name, tensor in classes.own_tensors().items()}
        state = {name: tensor.cpu().clone() for name, tensor in judged_state(bench.method).items()}
    return _assembled(bench.config, facts, state, own, examples, folder, device)


def _assembled(
    config: RunConfig,
    facts: Facts,
    state: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    examples: Tensor,
    home: Path,
    device: torch.device,
) -> RunModel:
    size = facts.view_size
    plain = replace(config.eval, average=0.0, fresh_norms=False)  # the weights are those that were judged
    config = replace(config, eval=plain)
    with seeded(0):  # a network draws its first weights; the caller's random state must not change
        method = build_method(without_weights(config), task_of(facts), in_channels=facts.channels, image_size=size)
    method.load_state_dict(dict(state))
    method.requires_grad_(False).eval()
    method.embedder.precision = "fp32"  # the same answer on every machine
    classes = RunClasses(method, **facts.settings)
    classes.load_state_dict({**classes.state_dict(), **own})
    return RunModel.made(config, facts, classes, examples, home, device)


def _as_encoder(method: Method[Any], config: RunConfig, facts: Facts, size: int) -> PretrainedEncoder:
    net = RunNet(method, facts, mirror=config.eval.mirror).eval()
    return PretrainedEncoder(config.encoder.name, net, size, (0.0,), (1.0,), fingerprint(method))


OTHER_KINDS.append(Opener(is_run, open_run_model))
