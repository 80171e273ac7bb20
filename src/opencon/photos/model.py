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
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from opencon.config import from_dict
from opencon.data.listings import images_at
from opencon.encoders.pretrained import RUN_FILE, PretrainedEncoder, open_encoder
from opencon.encoders.stored import EncoderFacts, stored_encoder
from opencon.errors import DataError, RunError
from opencon.files import read_file
from opencon.openworld.fit import Fitted
from opencon.openworld.model import OpenWorldModel, Prediction
from opencon.openworld.strangers import FALSE_ALARMS, check_false_alarms
from opencon.photos.cache import FeatureCache
from opencon.photos.features import Extractor, FeatureSettings, stored_features
from opencon.photos.guesses import Guess
from opencon.photos.hub import download, upload
from opencon.photos.model_settings import FORMAT, SETTINGS, damaged, read_settings
from opencon.registry import did_you_mean
from opencon.report.card import CardData, model_card
from opencon.report.table import PhotoRow, PhotoTable
from opencon.runtime import pick_device, seeded
from opencon.training.run_folder import RunFolder
from opencon.version import __version__

TENSORS, CARD = "model.safetensors", "README.md"
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
    guesses: tuple[Guess | None, ...] = ()  # C: what each new group looks like; empty: nothing is known
    home: Path | None = None  # the folder with the encoder's weights; None: `features` names them
    device: torch.device = CPU  # where the encoder runs

    def __post_init__(self) -> None:
        names, num = self.class_names, self.classifier.num_classes
        if not self.first_names:
            object.__setattr__(self, "first_names", names)
        if not self.guesses:
            object.__setattr__(self, "guesses", (None,) * num)
        if {len(of) for of in (names, self.first_names, self.example_files, self.sizes, self.guesses)} != {num}:
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
        guesses: tuple[Guess | None, ...] = (),
        counts: Tensor | None = None,
    ) -> OpenConModel:
        """The model of a discovery.

        Args:
            fitted: the fit to n photos.
            class_names: (C) names of the classes and groups.
            features: the settings of the features.
            encoder: facts about the encoder that computed them.
            files: n names of photos, for the examples.
            labels: (n,) the user's class in [0, S), or -1.
            guesses: (C) what each new group looks like.
            counts: (n,) bool: photos that the model was fitted to, twins of others not; None: all.
        """
        prediction, classifier = fitted.prediction, fitted.model
        classes = torch.where(labels >= 0, labels, prediction.classes)  # (n,)
        belongs = (labels >= 0) | ~prediction.unlike_everything
        counts = torch.ones_like(belongs) if counts is None else counts
        # (n,) cosine to the prototype of the photo's own class
        typical = (fitted.z * classifier.prototypes[classes]).sum(dim=1)
        sizes = [int(((classes == c) & belongs).sum()) for c in range(classifier.num_classes)]
        members = [((classes == c) & belongs & counts).nonzero()[:, 0] for c in range(classifier.num_classes)]
        best = [rows[typical[rows].argsort(descending=True, stable=True)][:MOST_EXAMPLES] for rows in members]
        return cls(
            classifier,
            tuple(class_names),
            features,
            example_files=tuple(tuple(files[i] for i in rows.tolist()) for rows in best),
            example_rows=fitted.z[torch.cat(best)].clone(),
            sizes=tuple(sizes),
            encoder=encoder,
            guesses=guesses,
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

    def named(self, prediction: Prediction) -> tuple[list[str], list[float]]:
        """The likeliest name of each row, and how likely it is."""
        which, confidence = self.which_names(prediction)
        return [self.names[i] for i in which.tolist()], confidence.tolist()

    def which_names(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """(n,) the number of the likeliest name of each row among `names`, and (n,) how likely it is."""
        confidence, which = self._of_names(prediction.p).max(dim=1)
        if len(self.names) == 1:  # the only one has a probability of 1, and may be wrong
            confidence = prediction.confidence
        return which, confidence

    def _of_names(self, values: Tensor) -> Tensor:
        """(n, C) -> (n, K): the sum over classes of the same name."""
        return values if self.name_of is None else values @ self.name_of.to(values)

    @property
    def guess_of(self) -> dict[str, str]:
        """What each new group looks like, by the name it has; a group that somebody named needs no guess."""
        columns = zip(self.class_names, self.first_names, self.guesses, strict=True)
        return {name: str(guess) for name, first, guess in columns if guess is not None and name == first}

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
        self,
        paths: Paths,
        *,
        false_alarms: float = FALSE_ALARMS,
        cache: str | Path | None = None,
        progress: Progress = lambda done, total: None,
    ) -> PhotoTable:
        """Predict photos. Returns a table with a row for each, in order.

        Args:
            paths: photos; a folder stands for all images below it. One that cannot be read becomes a row with an error.
            false_alarms: the share of photos of known classes and groups that may be called unlike everything.
            cache: a folder for the features, to use again next time; None: they are not kept.
            progress: called as progress(photos done, photos in all).
        """
        rows = self.predict_each(paths, false_alarms=false_alarms, cache=cache, progress=progress)
        return self.table(tuple(rows))

    def predict_each(
        self,
        paths: Paths,
        *,
        false_alarms: float = FALSE_ALARMS,
        cache: str | Path | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Iterator[PhotoRow]:
        """The rows of `predict` one by one, as they are computed."""
        check_false_alarms(false_alarms)
        paths = [paths] if isinstance(paths, (str, Path)) else paths
        files = [file for path in paths for file in images_at(Path(path).expanduser())]
        return self._predict(files, false_alarms, None if cache is None else Path(cache).expanduser(), progress)

    def _predict(
        self, files: Sequence[Path], false_alarms: float, cache: Path | None, progress: Progress
    ) -> Iterator[PhotoRow]:
        extractor = self._extractor
        store = FeatureCache(cache, extractor.encoder.name, extractor.identity())
        for start in range(0, len(files), CHUNK):
            part = files[start : start + CHUNK]

            def report(done: int, before: int = start) -> None:
                progress(before + done, len(files))

            features = stored_features(part, extractor, store, report)
            names = [str(part[i]) for i in features.kept]
            rows = iter(self.judge(names, features.plain, false_alarms) if names else ())
            for i, file in enumerate(part):
                if i in features.problems:
                    error = features.problems[i] if os.path.exists(file) else "does not exist"
                    yield PhotoRow.unread(str(file), error)
                else:
                    yield next(rows)

    @torch.no_grad()
    def judge(self, files: Sequence[str], x: Tensor, false_alarms: float = FALSE_ALARMS) -> list[PhotoRow]:
        """Rows of the table from the names and the features (n, F) of photos."""
        said = self.classifier.predict(x, false_alarms=false_alarms)
        return self.rows(files, said, self.nearest_examples(self.classifier.embed(x)))

    def rows(
        self,
        files: Sequence[str],
        prediction: Prediction,
        nearest: Sequence[tuple[str, ...]],
        given: Sequence[str | None] | None = None,
        twin_of: Sequence[str | None] | None = None,
    ) -> list[PhotoRow]:
        """A prediction as rows of the table.

        Args:
            files: n names of photos.
            prediction: what the classifier says of them.
            nearest: for each photo, the examples most like it.
            given: for each photo, the label it came with.
            twin_of: for each photo, the one that it is nearly the same as.
        """
        seen = set(self.class_names[: self.num_seen])
        guesses = self.guess_of
        columns = zip(
            files,
            *self.named(prediction),
            prediction.novelty.tolist(),
            prediction.unlike_everything.tolist(),
            nearest,
            given or [None] * len(files),
            twin_of or [None] * len(files),
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
                looks_like=None if unlike else guesses.get(name),
                twin_of=twin,
            )
            for file, name, confidence, novelty, unlike, examples, label, twin in columns
        ]

    def training_table(
        self,
        files: Sequence[str],
        z: Tensor,
        prediction: Prediction,
        given: Sequence[str | None],
        unread: Iterable[PhotoRow] = (),
        twin_of: Sequence[str | None] | None = None,
    ) -> PhotoTable:
        """The table of the training photos, none of which is its own nearest example.

        Args:
            files: n names of photos.
            z: (n, D) their embeddings.
            prediction: what the classifier says of them.
            given: the labels they came with, or None.
            unread: rows of the photos that cannot be read.
            twin_of: for each photo, the one that it is nearly the same as.
        """
        rows = self.rows(files, prediction, self.nearest_examples(z, files), given, twin_of)
        return self.table((*rows, *unread))

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
        # In float32, so that a model says the same on every machine, and the same as its ONNX graph.
        return Extractor(self.load_encoder(), replace(self.features, num_views=0), self.device, torch.float32)

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
            outlier_threshold=float(self.classifier.strangers.threshold()),
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
            "guesses": [None if guess is None else asdict(guess) for guess in self.guesses],
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
        settings = read_settings(folder)
        try:
            content = read_file(folder / TENSORS)
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
                guesses=tuple(None if guess is None else Guess(**guess) for guess in settings["guesses"]),
                home=folder if settings["has_encoder"] else None,
                device=device,
            )
        except FileNotFoundError as err:
            raise RunError(f"{folder} has {SETTINGS} but no {TENSORS}. Copy the whole folder.") from err
        except Exception as err:  # wrong settings, or some that do not fit the tensors, fail in many ways
            raise damaged(folder, err) from err


def identity(run: RunFolder) -> str:
    """Identify the model in a folder, whatever the names of its groups: a table of names fits one model only."""
    return str(run.read_json(SETTINGS)["sha256"])[:12]
