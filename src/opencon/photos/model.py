"""The model that a discovery keeps: encoder, classifier, names of classes and groups, and a few examples of each.

    FOLDER/model.json           format, names, settings, names of the examples
    FOLDER/model.safetensors    the classifier's tensors and the examples' embeddings
    FOLDER/encoder.safetensors  only from `save_pretrained`: the encoder's weights, so that nothing else is needed
    FOLDER/README.md            only from `save_pretrained`: the model card

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
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from opencon.config import from_dict
from opencon.data.listings import images_at
from opencon.encoders.pretrained import RUN_FILE, PretrainedEncoder, open_encoder
from opencon.encoders.stored import EncoderFacts, stored_encoder
from opencon.errors import DataError, RunError
from opencon.openworld.fit import Fitted
from opencon.openworld.model import OpenWorldModel, Prediction
from opencon.photos.cache import FeatureCache
from opencon.photos.features import Extractor, FeatureSettings, stored_features
from opencon.photos.hub import download, upload
from opencon.registry import did_you_mean
from opencon.report.card import CardData, model_card
from opencon.report.table import PhotoRow, PhotoTable
from opencon.runtime import pick_device, seeded
from opencon.training.run_folder import RunFolder
from opencon.version import __version__

FORMAT = 2  # of model.json; raise it when an older opencon could not read it
SETTINGS, TENSORS, CARD = "model.json", "model.safetensors", "README.md"
MOST_EXAMPLES = 20  # of a class, ours: enough to show what it looks like; 10 kB a class
NEAREST = 3  # examples named with a photo, ours: they fit on a line
# Photos that are predicted together, ours: with fewer, cores would wait for the last photos of each part.
CHUNK = 1024
CPU = torch.device("cpu")

Progress = Callable[[int, int], None]  # photos done, and all
Paths = str | Path | Iterable[str | Path]


class Opener(NamedTuple):
    """How folders of another kind are opened as a model."""

    fits: Callable[[Path], bool]
    open: Callable[[Path, torch.device], OpenConModel]


OTHER_KINDS: list[Opener] = []  # `run_model` adds runs of `opencon train`


@dataclass(frozen=True, eq=False, repr=False)
class OpenConModel:
    """Photos to seen classes and new groups.

    Examples:
        >>> model = OpenConModel.from_pretrained("runs/photos")  # doctest: +SKIP
        >>> model.predict("more/").to_csv()  # doctest: +SKIP
    """

    classifier: OpenWorldModel
    class_names: tuple[str, ...]  # C: the seen classes, then the new groups; those with the same name count as one
    features: FeatureSettings
    example_files: tuple[tuple[str, ...], ...]  # C: typical training photos of each, most typical first
    example_rows: Tensor  # (E, D) their embeddings, class after class
    sizes: tuple[int, ...]  # C: training photos that carried the label or fell to the group
    encoder: EncoderFacts  # of the encoder that the classifier was trained with
    first_names: tuple[str, ...] = ()  # C: the names before any renaming; empty: `class_names`
    home: Path | None = None  # the folder with the encoder's weights; None: `features` names them
    device: torch.device = CPU  # where the encoder runs

    def __post_init__(self) -> None:
        names, num = self.class_names, self.classifier.num_classes
        if not self.first_names:
            object.__setattr__(self, "first_names", names)
        if not len(names) == len(self.first_names) == len(self.example_files) == len(self.sizes) == num:
            raise DataError(f"the model has {num} classes and groups, but {len(names)} names. Give one name for each.")
        if self.example_rows.shape != (sum(map(len, self.example_files)), self.classifier.dim):
            raise DataError(f"the examples' embeddings have shape {tuple(self.example_rows.shape)}, not one row each.")

    def __repr__(self) -> str:
        new = len(self.names) - self.num_seen_names
        return f"<OpenConModel: {self.num_seen_names} seen classes and {new} new groups, by {self.encoder.name}>"

    @classmethod
    def of(
        cls,
        fitted: Fitted,
        class_names: Sequence[str],
        features: FeatureSettings,
        encoder: EncoderFacts,
        files: Sequence[str],
        labels: Tensor,
    ) -> OpenConModel:
        """The model of a discovery.

        Args:
            fitted: the fit to n photos.
            class_names: (C) names of the classes and groups.
            features: the settings of the features.
            encoder: facts about the encoder that computed them.
            files: n names of photos, for the examples.
            labels: (n,) the user's class in [0, S), or -1.
        """
        prediction, classifier = fitted.prediction, fitted.model
        classes = torch.where(labels >= 0, labels, prediction.classes)  # (n,)
        belongs = (labels >= 0) | ~prediction.unlike_everything
        # (n,) cosine to the prototype of the photo's own class
        typical = (fitted.z * classifier.prototypes[classes]).sum(dim=1)
        members = [((classes == c) & belongs).nonzero()[:, 0] for c in range(classifier.num_classes)]
        best = [rows[typical[rows].argsort(descending=True, stable=True)][:MOST_EXAMPLES] for rows in members]
        return cls(
            classifier,
            tuple(class_names),
            features,
            example_files=tuple(tuple(files[i] for i in rows.tolist()) for rows in best),
            example_rows=fitted.z[torch.cat(best)].clone(),
            sizes=tuple(map(len, members)),
            encoder=encoder,
        )

    @property
    def num_seen(self) -> int:
        """How many of the class names are seen classes; the others are new groups."""
        return self.classifier.num_seen

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The K different names, those of seen classes first."""
        return tuple(dict.fromkeys(self.class_names))

    @property
    def num_seen_names(self) -> int:
        """How many of `names` belong to seen classes."""
        return len(set(self.class_names[: self.num_seen]))

    @property
    def name_of(self) -> Tensor | None:
        """(C, K) of 0 and 1: turns probabilities of classes into those of names. None where all names differ."""
        if len(self.names) == len(self.class_names):
            return None
        return torch.tensor([[float(own == name) for name in self.names] for own in self.class_names])

    def named(self, p: Tensor) -> tuple[list[str], list[float]]:
        """The likeliest name of each row of probabilities (n, C), and how likely it is."""
        confidence, which = self._of_names(p).max(dim=1)
        return [self.names[i] for i in which.tolist()], confidence.tolist()

    def _of_names(self, values: Tensor) -> Tensor:
        """(n, C) -> (n, K): the sum over classes of the same name."""
        return values if self.name_of is None else values @ self.name_of.to(values)

    def renamed(self, names: Mapping[str, str]) -> OpenConModel:
        """The same model with other names for some groups (or classes): old name to new name.

        The old name is the present one or the first one (new-1). Groups that get the same name count as one.
        """
        renamed = list(self.class_names)
        for old, new in names.items():
            old_names = self.class_names if old in self.class_names else self.first_names
            classes = [c for c, name in enumerate(old_names) if name == old]
            if not classes:
                hint, known = did_you_mean(old, self.names), ", ".join(self.names)
                raise DataError(f"there is no group {old!r} to rename.{hint} There are: {known}.")
            if not new.strip():
                raise DataError(f"the new name of {old!r} is empty. Give a word, or leave {old!r} out.")
            for c in classes:
                renamed[c] = new
        return replace(self, class_names=tuple(renamed))

    # --- prediction ---------------------------------------------------------------------------------------------------

    def predict(
        self, paths: Paths, *, cache: str | Path | None = None, progress: Progress = lambda done, total: None
    ) -> PhotoTable:
        """Predict photos. Returns a table with a row for each, in order.

        Args:
            paths: photos; a folder stands for all images below it. One that cannot be read becomes a row with an error.
            cache: a folder for the features, to use again next time; None: they are not kept.
            progress: called as progress(photos done, photos in all).
        """
        return self.table(tuple(self.predict_each(paths, cache=cache, progress=progress)))

    def predict_each(
        self, paths: Paths, *, cache: str | Path | None = None, progress: Progress = lambda done, total: None
    ) -> Iterator[PhotoRow]:
        """The rows of `predict` one by one, as they are computed."""
        paths = [paths] if isinstance(paths, (str, Path)) else paths
        files = [file for path in paths for file in images_at(Path(path).expanduser())]
        return self._predict(files, None if cache is None else Path(cache).expanduser(), progress)

    def _predict(self, files: Sequence[Path], cache: Path | None, progress: Progress) -> Iterator[PhotoRow]:
        extractor = self._extractor
        store = FeatureCache(cache, extractor.encoder.name, extractor.identity())
        for start in range(0, len(files), CHUNK):
            part = files[start : start + CHUNK]

            def report(done: int, before: int = start) -> None:
                progress(before + done, len(files))

            features = stored_features(part, extractor, store, report)
            rows = iter(self.judge([str(part[i]) for i in features.kept], features.plain) if features.kept else ())
            for i, file in enumerate(part):
                if i in features.problems:
                    error = features.problems[i] if os.path.exists(file) else "does not exist"
                    yield PhotoRow.unread(str(file), error)
                else:
                    yield next(rows)

    @torch.no_grad()
    def judge(self, files: Sequence[str], x: Tensor) -> list[PhotoRow]:
        """Rows of the table from the names and the features (n, F) of photos."""
        z = self.classifier.embed(x)
        return self.rows(files, self.classifier.predict_embedded(z), self.nearest_examples(z))

    def rows(
        self,
        files: Sequence[str],
        prediction: Prediction,
        nearest: Sequence[tuple[str, ...]],
        given: Sequence[str | None] | None = None,
    ) -> list[PhotoRow]:
        """A prediction as rows of the table.

        Args:
            files: n names of photos.
            prediction: what the classifier says of them.
            nearest: for each photo, the examples most like it.
            given: for each photo, the label it came with.
        """
        seen = set(self.class_names[: self.num_seen])
        columns = zip(
            files,
            *self.named(prediction.p),
            prediction.novelty.tolist(),
            prediction.unlike_everything.tolist(),
            nearest,
            given or [None] * len(files),
            strict=True,
        )
        return [
            PhotoRow(
                file=file,
                closest=name,
                kind=None if unlike else "seen" if name in seen else "new",
                confidence=confidence,
                novelty=novelty,
                unlike_everything=unlike,
                nearest=examples,
                given=label,
            )
            for file, name, confidence, novelty, unlike, examples, label in columns
        ]

    def training_table(
        self,
        files: Sequence[str],
        z: Tensor,
        given: Sequence[str | None],
        unread: Iterable[PhotoRow] = (),
        prediction: Prediction | None = None,
    ) -> PhotoTable:
        """The table of the training photos, none of which is its own nearest example.

        Args:
            files: n names of photos.
            z: (n, D) their embeddings.
            given: the labels they came with, or None.
            unread: rows of the photos that cannot be read.
            prediction: what the classifier says of them; None: it is computed.
        """
        prediction = self.classifier.predict_embedded(z) if prediction is None else prediction
        return self.table((*self.rows(files, prediction, self.nearest_examples(z, files), given), *unread))

    def table(self, rows: tuple[PhotoRow, ...]) -> PhotoTable:
        """Rows with the names of classes and groups."""
        return PhotoTable(rows, self.names, self.num_seen_names)

    def nearest_examples(self, z: Tensor, own: Sequence[str] | None = None) -> list[tuple[str, ...]]:
        """The most similar examples of each embedded photo (n, D); with `own` names, never the photo itself."""
        names = [name for files in self.example_files for name in files]  # E
        most = min(NEAREST + (own is not None), len(names))
        best = [i for part in torch.split(z, CHUNK) for i in (part @ self.example_rows.T).topk(most).indices.tolist()]
        own_names = own if own is not None else [None] * len(z)
        near = ([names[e] for e in row if names[e] != file] for row, file in zip(best, own_names, strict=True))
        return [tuple(row[:NEAREST]) for row in near]

    @functools.cached_property
    def _extractor(self) -> Extractor:
        return Extractor(self.load_encoder(), replace(self.features, num_views=0), self.device)

    def load_encoder(self) -> PretrainedEncoder:
        """Read the encoder from its file; refused if it is not the one that the classifier was trained with."""
        with seeded(0):  # a network draws its first weights; the caller's random state must not change
            if self.home is not None:
                where, encoder = str(self.home / RUN_FILE), stored_encoder(self.home / RUN_FILE, self.encoder)
            else:
                where, encoder = self.features.encoder, open_encoder(self.features.encoder, self.features.image_size)
        changes = EncoderFacts.of(encoder).changes(self.encoder)
        if changes:
            raise RunError(
                f"the encoder {where!r} is not the one that this model was trained with (other {', '.join(changes)}). "
                f"Put the old one back, or run the discovery again."
            )
        return encoder

    def to_torch(self) -> nn.Module:
        """The encoder as an ordinary PyTorch module: images (B, channels, S, S) in [0, 1] to features (B, F)."""
        return self.load_encoder().as_module()

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path | RunFolder) -> None:
        """Write model.json and model.safetensors, and the encoder if it came with the model or lies in this folder."""
        run = folder if isinstance(folder, RunFolder) else RunFolder.made(Path(folder).expanduser())
        weights = Path(self.features.encoder).expanduser()
        is_here = weights.is_file() and weights.resolve() == (run.path / RUN_FILE).resolve()
        self._write(run, self.load_encoder() if is_here or self.home is not None else None)

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
            outlier_threshold=float(self.classifier.outlier_threshold),
            version=__version__,
            facts=facts or {},
        )
        run.write_text(CARD, model_card(data))
        self._write(run, encoder)

    def push_to_hub(self, repo: str, *, private: bool = False, title: str = "Seen classes and new groups") -> str:
        """Upload model, encoder and card to the Hugging Face hub (extra `hub`). Returns the address.

        Args:
            repo: "owner/name"; it is made if it does not exist.
            private: whether a new repository is hidden from others.
            title: of the model card.
        """
        return upload(repo, lambda folder: self.save_pretrained(folder, title=title), private=private)

    def _write(self, run: RunFolder, encoder: PretrainedEncoder | None) -> None:
        """Write the model, and the weights of the encoder unless that is None."""
        name, path = self.features.encoder, Path(self.features.encoder).expanduser()
        if encoder is not None:
            name = self.encoder.name  # a folder for others must not name paths of this machine
            run.save_tensors(RUN_FILE, encoder.net.state_dict(), {"encoder": self.encoder.name})
        elif path.suffix == ".safetensors" or path.is_dir():  # so that the model can be used from any folder
            name = str(path.resolve())
        tensors = {f"classifier.{key}": tensor for key, tensor in self.classifier.state_dict().items()}
        run.save_tensors(TENSORS, {**tensors, "examples": self.example_rows}, {"format": str(FORMAT)})
        settings = {
            "what": "a model of opencon: from opencon import OpenConModel; OpenConModel.from_pretrained(FOLDER)",
            "format": FORMAT,
            "opencon": __version__,
            "class_names": self.class_names,
            "first_names": self.first_names,
            "sizes": self.sizes,
            "classifier": self.classifier.settings(),
            "features": asdict(replace(self.features, encoder=name)),
            "encoder": asdict(self.encoder),
            "has_encoder": encoder is not None,
            "example_files": self.example_files,
            "sha256": hashlib.sha256((run.path / TENSORS).read_bytes()).hexdigest(),
        }
        run.write_json(SETTINGS, settings)

    @classmethod
    def from_pretrained(cls, source: str | Path, device: str | torch.device = "cpu") -> OpenConModel:
        """The model in a folder that `opencon discover`, `train` or `export` wrote, or on the Hugging Face hub.

        Args:
            source: such a folder; or, where there is none, "owner/name" on the hub (extra `hub`).
            device: where the encoder runs: "auto", "cpu", "cuda" or "cuda:N".
        """
        folder, device = download(source, SETTINGS), pick_device(str(device))
        for kind in OTHER_KINDS:
            if kind.fits(folder):
                return kind.open(folder, device)
        settings = _read_settings(folder)
        try:
            content = (folder / TENSORS).read_bytes()
            if hashlib.sha256(content).hexdigest() != settings["sha256"]:
                raise ValueError(f"{TENSORS} does not belong to {SETTINGS}, or is damaged")
            tensors = safetensors.torch.load(content)
            rows = tensors.pop("examples")
            with seeded(0):  # for the same reason as in `load_encoder`
                classifier = OpenWorldModel.from_settings(settings["classifier"])
            classifier.load_state_dict({name.removeprefix("classifier."): value for name, value in tensors.items()})
            return cls(
                classifier.eval(),
                tuple(map(str, settings["class_names"])),
                from_dict(FeatureSettings, settings["features"]),
                example_files=tuple(tuple(map(str, files)) for files in settings["example_files"]),
                example_rows=rows,
                sizes=tuple(map(int, settings["sizes"])),
                encoder=from_dict(EncoderFacts, settings["encoder"]),
                first_names=tuple(map(str, settings["first_names"])),
                home=folder if settings["has_encoder"] else None,
                device=device,
            )
        except FileNotFoundError as err:
            raise RunError(f"{folder} has {SETTINGS} but no {TENSORS}. Copy the whole folder.") from err
        except Exception as err:  # wrong settings, or some that do not fit the tensors, fail in many ways
            raise _damaged(folder, err) from err


def identity(run: RunFolder) -> str:
    """Identify the model in a folder, whatever the names of its groups: a table of names fits one model only."""
    return str(run.read_json(SETTINGS)["sha256"])[:12]


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    if not path.is_file():
        wrote = "`opencon discover`, `train` or `export` wrote"
        raise RunError(f"{folder} holds no model (no {SETTINGS}). Give the folder that {wrote}.")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise _damaged(folder, err) from err
    if not isinstance(settings, dict) or "format" not in settings:
        raise RunError(f"{path} is not a model of opencon (it names no format). Give the folder of a model.")
    number, version = settings["format"], settings.get("opencon")
    if isinstance(number, int) and number != FORMAT:
        way_out = "Run: pip install --upgrade opencon" if number > FORMAT else "Run the discovery again."
        raise RunError(
            f"the model in {folder} has format {number} (opencon {version}); this opencon reads format {FORMAT}. {way_out}"
        )
    return settings


def _damaged(folder: Path, err: Exception) -> RunError:
    why = str(err).splitlines()[0] if str(err) and not isinstance(err, KeyError) else f"{type(err).__name__} {err}"
    return RunError(f"the model in {folder} cannot be read ({why}). Copy it again, or run the discovery again.")
