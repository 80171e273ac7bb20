"""A discovery that can be kept: the encoder, the head, the names of classes and groups, and a few examples of each.

    FOLDER/model.json           format, names, settings, names of the examples
    FOLDER/model.safetensors    the head's tensors and the examples' embeddings
    FOLDER/encoder.safetensors  only of `save_pretrained`: the encoder's weights, so that nothing else is needed
    FOLDER/README.md            only of `save_pretrained`: the model card

Nothing in these files is executed on loading. model.json is written last and holds a checksum of the tensors.

Classes and groups that carry the same name count as one: their probabilities add up.

Letters: n photos, F features, D embedding size, E examples, S seen classes, C classes and groups together, K their names.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from opencon.config import from_dict
from opencon.data.feature_cache import FeatureCache
from opencon.data.listings import images_at
from opencon.encoders.pretrained import RUN_FILE, PretrainedEncoder, open_encoder
from opencon.encoders.stored import EncoderFacts, stored_encoder
from opencon.errors import DataError, RunError
from opencon.features import Extractor, FeatureSettings, plain_rows
from opencon.openworld import Fitted, OpenWorldModel
from opencon.registry import did_you_mean
from opencon.report.card import CardData, model_card
from opencon.runs import RunFolder
from opencon.runtime import pick_device, seeded
from opencon.version import __version__

FORMAT = 1  # of model.json; raise it when an older opencon could not read it
SETTINGS, TENSORS, CARD = "model.json", "model.safetensors", "README.md"
MOST_EXAMPLES = 20  # of a class, ours: enough to show what it looks like; 10 kB a class
NEAREST = 3  # examples named with a photo, ours: they fit on a line
# Photos between two looks of the caller, ours: fewer would leave the cores waiting for the last of each part.
CHUNK = 1024
CPU = torch.device("cpu")

Progress = Callable[[int, int], None]  # photos done, and all


@dataclass(frozen=True)
class PhotoPrediction:
    """What the model says of one photo."""

    file: str
    label: str | None  # name of the class or group; None for an outlier, or a photo that cannot be read
    is_new: bool  # whether the label is a new group
    confidence: float | None  # in [0, 1], of the class or group that is nearest; None for a photo that cannot be read
    novelty: (
        float | None
    )  # larger is newer, compare with `head.novelty_threshold`; None for a photo that cannot be read
    is_outlier: bool  # unlike every class and group
    nearest: tuple[str, ...]  # the most similar examples that the model keeps, nearest first
    error: str | None  # why the photo cannot be read

    @classmethod
    def unread(cls, file: str, error: str) -> PhotoPrediction:
        """Of a photo that cannot be read."""
        return cls(file, None, False, None, None, False, (), error)


@dataclass(frozen=True, eq=False)
class OpenConModel:
    """Photos to seen classes and new groups."""

    head: OpenWorldModel
    class_names: tuple[str, ...]  # C: the seen classes, then the new groups; those called alike count as one
    features: FeatureSettings
    example_files: tuple[tuple[str, ...], ...]  # C: typical training photos of each, most typical first
    example_rows: Tensor  # (E, D) their embeddings, class after class
    sizes: tuple[int, ...]  # C: training photos that carried the label or fell to the group
    first_names: tuple[str, ...] = ()  # C: what they were called before any was renamed; none: as they are called
    encoder: EncoderFacts | None = None  # of the encoder the head was trained with; None: as `features` names it
    home: Path | None = None  # the folder with the encoder's weights; None: where `features` says
    device: torch.device = CPU  # where the encoder runs

    def __post_init__(self) -> None:
        names, num = self.class_names, self.head.num_classes
        if not self.first_names:
            object.__setattr__(self, "first_names", names)
        if not len(names) == len(self.first_names) == len(self.example_files) == len(self.sizes) == num:
            raise DataError(f"the model has {num} classes and groups, but {len(names)} names. Give one name for each.")
        if self.example_rows.shape != (sum(map(len, self.example_files)), self.head.dim):
            raise DataError(f"the examples' embeddings have shape {tuple(self.example_rows.shape)}, not one row each.")

    @classmethod
    def of(
        cls, fitted: Fitted, class_names: Sequence[str], features: FeatureSettings, files: Sequence[str], labels: Tensor
    ) -> OpenConModel:
        """The model of a discovery.

        Args:
            fitted: what was learned from n photos.
            class_names: C of them.
            features: how the photos became rows.
            files: n names, for the examples.
            labels: (n,) the given class in [0, S), or -1.
        """
        said, head = fitted.prediction, fitted.model
        classes = torch.where(labels >= 0, labels, said.classes)  # (n,)
        belongs = (labels >= 0) | ~said.is_outlier
        typical = (fitted.z * head.prototypes[classes]).sum(dim=1)  # (n,) cosine to the prototype of its own class
        members = [((classes == c) & belongs).nonzero()[:, 0] for c in range(head.num_classes)]
        best = [rows[typical[rows].argsort(descending=True, stable=True)][:MOST_EXAMPLES] for rows in members]
        return cls(
            head,
            tuple(class_names),
            features,
            example_files=tuple(tuple(files[i] for i in rows.tolist()) for rows in best),
            example_rows=fitted.z[torch.cat(best)].clone(),
            sizes=tuple(map(len, members)),
        )

    @property
    def num_seen(self) -> int:
        """How many of the class names are seen classes; the others are new groups."""
        return self.head.num_seen

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The K different names, those of seen classes first."""
        return tuple(dict.fromkeys(self.class_names))

    @property
    def num_seen_names(self) -> int:
        """How many of `names` are those of seen classes."""
        return len(set(self.class_names[: self.num_seen]))

    @property
    def name_of(self) -> Tensor | None:
        """(C, K): probabilities of classes @ this are those of names. None where every class has a name of its own."""
        if len(self.names) == len(self.class_names):
            return None
        return torch.tensor([[float(own == name) for name in self.names] for own in self.class_names])

    def named(self, p: Tensor) -> tuple[list[str], list[float]]:
        """The likeliest name of each row of probabilities (n, C), and how likely it is."""
        confidence, which = self._of_names(p).max(dim=1)
        return [self.names[i] for i in which.tolist()], confidence.tolist()

    def _of_names(self, values: Tensor) -> Tensor:
        """(n, C) -> (n, K): added up over classes of the same name."""
        return values if self.name_of is None else values @ self.name_of.to(values)

    def renamed(self, names: Mapping[str, str]) -> OpenConModel:
        """The same with other names for some groups (or classes): old name to new name.

        A group goes by the name it has, or by the one it had first (new-1). Those that get the same name count as one.
        """
        renamed = list(self.class_names)
        for old, new in names.items():
            having = self.class_names if old in self.class_names else self.first_names
            found = [c for c, name in enumerate(having) if name == old]
            if not found:
                hint, known = did_you_mean(old, self.names), ", ".join(self.names)
                raise DataError(f"there is no group {old!r} to rename.{hint} There are: {known}.")
            if not new.strip():
                raise DataError(f"the new name of {old!r} is empty. Give a word, or leave {old!r} out.")
            for c in found:
                renamed[c] = new
        return replace(self, class_names=tuple(renamed))

    # --- prediction ---------------------------------------------------------------------------------------------------

    def predict(
        self,
        paths: str | Path | Iterable[str | Path],
        *,
        cache: Path | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Iterator[PhotoPrediction]:
        """One prediction for each photo, in the given order, as they are computed.

        Args:
            paths: photos; a folder stands for all images below it. One that cannot be read becomes a row with an error.
            cache: a folder to keep features in; None: none.
            progress: told the number of photos that are done, and of all.
        """
        paths = [paths] if isinstance(paths, (str, Path)) else paths
        files = [file for path in paths for file in images_at(Path(path).expanduser())]
        return self._predict(files, cache, progress)

    def _predict(self, files: Sequence[Path], cache: Path | None, progress: Progress) -> Iterator[PhotoPrediction]:
        extractor = self._extractor
        store = FeatureCache(cache, extractor.encoder.name, extractor.identity())
        for start in range(0, len(files), CHUNK):
            part = files[start : start + CHUNK]

            def told(done: int, before: int = start) -> None:
                progress(before + done, len(files))

            rows, problems = plain_rows(part, extractor, store, told)
            said = iter(self.judge([str(part[i]) for i in rows], torch.stack(list(rows.values()))) if rows else ())
            for i, file in enumerate(part):
                if i in rows:
                    yield next(said)
                else:
                    error = problems[i] if os.path.exists(file) else "does not exist"
                    yield PhotoPrediction.unread(str(file), error)

    @torch.no_grad()
    def judge(self, files: Sequence[str], x: Tensor) -> list[PhotoPrediction]:
        """Predictions from features (n, F) of photos that are called so."""
        return self.judge_embedded(files, self.head.embed(x))

    def judge_embedded(self, files: Sequence[str], z: Tensor, among_examples: bool = False) -> list[PhotoPrediction]:
        """The same from embeddings (n, D). `among_examples`: these made the model; none is its own nearest example."""
        said = self.head.predict_embedded(z)
        seen, columns = self.class_names[: self.num_seen], (said.novelty.tolist(), said.is_outlier.tolist())
        nearest_ones = self.nearest_examples(z, files if among_examples else None)
        rows = zip(files, *self.named(said.p), *columns, nearest_ones, strict=True)
        return [
            PhotoPrediction(
                file=file,
                label=None if outlier else name,
                is_new=name not in seen and not outlier,
                confidence=confidence,
                novelty=novelty,
                is_outlier=outlier,
                nearest=nearest,
                error=None,
            )
            for file, name, confidence, novelty, outlier, nearest in rows
        ]

    def nearest_examples(self, z: Tensor, own: Sequence[str] | None = None) -> list[tuple[str, ...]]:
        """The most similar examples of each embedded photo (n, D); with its `own` name, not the photo itself."""
        names = [name for files in self.example_files for name in files]  # E
        most = min(NEAREST + (own is not None), len(names))
        best = [i for part in torch.split(z, CHUNK) for i in (part @ self.example_rows.T).topk(most).indices.tolist()]
        itself = own if own is not None else [None] * len(z)
        near = ([names[e] for e in row if names[e] != me] for row, me in zip(best, itself, strict=True))
        return [tuple(row[:NEAREST]) for row in near]

    @functools.cached_property
    def _extractor(self) -> Extractor:
        return Extractor(self.load_encoder(), replace(self.features, num_views=0), self.device)

    def load_encoder(self) -> PretrainedEncoder:
        """The encoder, read from its file anew; refused if it is not the one that the head was trained with."""
        with seeded(0):  # a network starts at random before it is filled; the caller's random state is left alone
            if self.home is not None and self.encoder is not None:
                where, encoder = str(self.home / RUN_FILE), stored_encoder(self.home / RUN_FILE, self.encoder)
            else:
                where, encoder = self.features.encoder, open_encoder(self.features.encoder, self.features.image_size)
        changes = EncoderFacts.of(encoder).changes(self.encoder) if self.encoder is not None else []
        if changes:
            raise RunError(
                f"the encoder {where!r} is not the one that this model was trained with (other {', '.join(changes)}). "
                f"Put the old one back, or run the discovery again."
            )
        return encoder

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path | RunFolder) -> None:
        """Write model.json and model.safetensors; the encoder too if it came with the model, or lies in this folder."""
        run = folder if isinstance(folder, RunFolder) else RunFolder.made(Path(folder).expanduser())
        named = Path(self.features.encoder).expanduser()
        is_here = named.is_file() and named.resolve() == (run.path / RUN_FILE).resolve()
        takes_it = is_here or self.home is not None
        facts, encoder = self.encoder, None
        if takes_it or facts is None:
            encoder = self.load_encoder()
            facts = EncoderFacts.of(encoder)
        self._write(run, facts, encoder if takes_it else None)

    def save_pretrained(
        self, folder: str | Path, *, title: str = "Seen classes and new groups", facts: Mapping[str, str] | None = None
    ) -> None:
        """Write a folder that needs nothing but opencon: model, encoder and a model card.

        Args:
            folder: new, empty, or with a model in it, which is replaced.
            title: of the model card.
            facts: lines for its table of how the model was made, such as {"photos": "720, taken in 2024"}.
        """
        run = RunFolder.made(Path(folder).expanduser())
        if any(run.path.iterdir()) and not run.has(SETTINGS):
            raise RunError(f"{run.path} is not empty and holds no model. Give an empty or a new folder.")
        encoder = self.load_encoder()
        data = CardData(
            title=title,
            class_names=self.names,
            num_seen=self.num_seen_names,
            sizes=tuple(int(n) for n in self._of_names(torch.tensor([self.sizes]))[0]),
            encoder=encoder.name,
            image_size=encoder.image_size,
            novelty_threshold=float(self.head.novelty_threshold),
            outlier_threshold=float(self.head.outlier_threshold),
            version=__version__,
            facts=facts or {},
        )
        run.write_text(CARD, model_card(data))
        self._write(run, EncoderFacts.of(encoder), encoder)

    def _write(self, run: RunFolder, facts: EncoderFacts, encoder: PretrainedEncoder | None) -> None:
        """With the encoder, if one is given."""
        word, path = self.features.encoder, Path(self.features.encoder).expanduser()
        if encoder is not None:
            word = facts.name  # a folder that may be given away says nothing of this machine
            run.save_tensors(RUN_FILE, encoder.net.state_dict(), {"encoder": facts.name})
        elif path.suffix == ".safetensors" or path.is_dir():  # to be found from wherever the model is used
            word = str(path.resolve())
        tensors = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        run.save_tensors(TENSORS, {**tensors, "examples": self.example_rows}, {"format": str(FORMAT)})
        settings = {
            "what": "a model of opencon: from opencon.model import OpenConModel; OpenConModel.from_pretrained(FOLDER)",
            "format": FORMAT,
            "opencon": __version__,
            "class_names": self.class_names,
            "first_names": self.first_names,
            "sizes": self.sizes,
            "head": self.head.settings(),
            "features": asdict(replace(self.features, encoder=word)),
            "encoder": asdict(facts),
            "has_encoder": encoder is not None,
            "example_files": self.example_files,
            "sha256": hashlib.sha256((run.path / TENSORS).read_bytes()).hexdigest(),
        }
        run.write_json(SETTINGS, settings)

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str | torch.device = "cpu") -> OpenConModel:
        """The model in a folder that `opencon discover`, `save` or `save_pretrained` wrote.

        Args:
            folder: with model.json and model.safetensors.
            device: where the encoder runs: "auto", "cpu", "cuda" or "cuda:N".
        """
        folder, device = Path(folder).expanduser(), pick_device(str(device))
        settings = _read_settings(folder)
        if isinstance(found := settings.get("format"), int) and found > FORMAT:
            raise RunError(
                f"{folder} was written by opencon {settings.get('opencon')} (format {found}); this is opencon "
                f"{__version__}, which reads up to format {FORMAT}. Run: pip install --upgrade opencon"
            )
        try:
            content = (folder / TENSORS).read_bytes()
            if hashlib.sha256(content).hexdigest() != settings["sha256"]:
                raise ValueError(f"{TENSORS} does not belong to {SETTINGS}, or is damaged")
            tensors = safetensors.torch.load(content)
            rows = tensors.pop("examples")
            with seeded(0):  # as for the encoder
                head = OpenWorldModel.from_settings(settings["head"])
            head.load_state_dict({name.removeprefix("head."): tensor for name, tensor in tensors.items()})
            return cls(
                head.eval(),
                tuple(map(str, settings["class_names"])),
                from_dict(FeatureSettings, settings["features"]),
                example_files=tuple(tuple(map(str, files)) for files in settings["example_files"]),
                example_rows=rows,
                sizes=tuple(map(int, settings["sizes"])),
                first_names=tuple(map(str, settings.get("first_names", ()))),
                encoder=from_dict(EncoderFacts, settings["encoder"]),
                home=folder if settings["has_encoder"] else None,
                device=device,
            )
        except FileNotFoundError as err:
            raise RunError(f"{folder} has {SETTINGS} but no {TENSORS}. Copy the whole folder.") from err
        except Exception as err:  # settings that are no settings or do not fit the tensors fail in many ways
            raise _damaged(folder, err) from err


def identity(run: RunFolder) -> str:
    """Of the model in a folder, whatever its groups are called: names for them fit no other model."""
    return str(run.read_json(SETTINGS)["sha256"])[:12]


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    if not path.is_file():
        wrote = "`opencon discover --out` or `save_pretrained` wrote"
        raise RunError(f"{folder} holds no model (no {SETTINGS}). Give the folder that {wrote}.")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise _damaged(folder, err) from err
    if not isinstance(settings, dict) or "format" not in settings:
        raise RunError(f"{path} is not a model of opencon (it names no format). Give the folder of a model.")
    return settings


def _damaged(folder: Path, err: Exception) -> RunError:
    said = str(err).splitlines()[0] if str(err) and not isinstance(err, KeyError) else f"{type(err).__name__} {err}"
    return RunError(f"the model in {folder} cannot be read ({said}). Copy it again, or run the discovery again.")
