"""The estimator itself, in scikit-learn's contract.

    X --> rows --> fit_features --> classes_ = seen classes, then new groups

Letters: M samples, F features, D embedding size, S seen classes, C classes and groups together, P prototypes.
"""

from __future__ import annotations

import numbers
import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone
from sklearn.metrics import accuracy_score
from sklearn.utils import _safe_indexing, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from opencon.errors import require
from opencon.estimator.groups import agreement, draw_map, tree_of_classes, typical_rows, unlike_their_labels
from opencon.estimator.labels import check_outlier_label, encode_labels, with_new
from opencon.estimator.samples import ROWS, DiscoveryWarning, InputError, as_value_errors, dense, read_samples
from opencon.openworld.engine import most_classes
from opencon.openworld.fit import OpenWorldConfig, fit_features
from opencon.openworld.model import OpenWorldModel, Prediction, in_parts
from opencon.photos.features import FeatureSettings, views_for
from opencon.runtime import calm_threads, seeded

Array = npt.NDArray[Any]

# Columns are divided by their standard deviation where the largest is so many times the median. Ours: units that differ
# make it hundreds or thousands (wine 388, breast cancer 7,829), features of one kind a few (iris 2.2, digits 1.5), counts of
# all words of a text 34. Scaling wins 5 to 35 points on the first two, nothing on iris, and loses 12 on the digits.
WILD = 100.0


class Said(NamedTuple):
    """What is said of M samples, in the classes of the estimator."""

    p: Array  # (M, C)
    classes: Array  # (M,) in [0, C)
    novelty: Array  # (M,)
    is_stranger: Array  # (M,) bool


class OpenWorldClassifier(ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Recognize the classes that have labels, and group what belongs to none of them.

    `y` holds the class of each labeled row. Unlabeled rows, of seen classes and of new ones, are -1 or NaN among numbers
    and None (or what pandas makes of it, NaN or NA) among strings, where "-1" is a class like any other. All of them may be.

    Args:
        n_novel: how many new groups to look for; (low, high) to have a number between these chosen, or "auto" for any.
        max_classes: the most classes and groups to look for, together, where the number is not given; None: 100, or twice
            the seen classes if that is more.
        scale: whether columns of 2-D `X` are divided by their standard deviation; "auto": where it is very unequal.
        method: name of the method whose losses the steps use.
        steps: steps of training a head on the features with the method's losses. On fixed features they gain nothing
            that can be measured (docs/how-discover-works.md), so there are none unless you ask.
        lr: learning rate at the start.
        encoder: what turns images and photos into features, see `open_encoder`; not used for 2-D `X`.
        cache: folder for the features of photo files; None: they are computed again each time.
        outlier_label: what `predict` says of a row that is unlike every class and group; None: the nearest of them, as
            scikit-learn wants it.
        random_state: seed, generator, or None for another result each time.

    Attributes:
        classes_: (C,) labels of the seen classes, sorted, then those of the new groups, largest group first: max + 1,
            max + 2, ... after numbers; "new-1", "new-2", ... after strings, without those that are classes.
        n_seen_, n_novel_: S, and the number of new groups; they add up to C.
        labels_: (M,) prediction for the rows of `fit`.
        embedding_: (M, D) their unit embedding.
        count_: the `CountEstimate`; None where `n_novel` is a number.
        scale_: (F,) what columns were divided by; None: they were not.
        model_: the `OpenWorldModel`; it takes rows that are divided by `scale_`.
        n_features_in_: F.
    """

    classes_: Array
    n_seen_: int
    n_novel_: int
    labels_: Array
    embedding_: Array
    scale_: Array | None
    model_: OpenWorldModel
    n_features_in_: int

    def __init__(
        self,
        n_novel: int | tuple[int, int] | str = "auto",
        *,
        max_classes: int | None = None,
        scale: bool | str = "auto",
        method: str = "opencon",
        steps: int = 0,
        lr: float = OpenWorldConfig.lr,
        encoder: str | os.PathLike[str] = "efficientnet_lite0",
        cache: str | os.PathLike[str] | None = None,
        outlier_label: int | str | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_novel = n_novel
        self.max_classes = max_classes
        self.scale = scale
        self.method = method
        self.steps = steps
        self.lr = lr
        self.encoder = encoder
        self.cache = cache
        self.outlier_label = outlier_label
        self.random_state = random_state

    @as_value_errors()
    def fit(self, X: Any, y: Any, **others: Any) -> OpenWorldClassifier:
        """Learn from labeled and unlabeled samples together.

        Args:
            X: (M, F) embeddings, also sparse; or images (M, H, W) or (M, H, W, 3), uint8 or floats in [0, 1]; or paths of
                photo files.
            y: (M,) class, or -1 (None among strings) for unlabeled.
            others: none; `sample_weight` is refused.
        """
        if others:
            raise TypeError(f"fit takes no {', '.join(others)}: all rows count alike. Repeat a row that counts twice.")
        calm_threads()
        classes, codes = encode_labels(y)
        if self.outlier_label is not None:
            check_outlier_label(self.outlier_label, classes)
        samples = read_samples(X)
        check_consistent_length(samples.values, codes)
        config = self._config(num_seen=len(classes), is_all_labeled=bool((codes >= 0).all()))
        rows, views = samples.rows(self._settings(num_views=views_for(config.steps)), self.cache)
        rows = dense(validate_data(self, rows, dtype=np.float32, accept_sparse="csr", ensure_min_samples=2))
        self._kind = samples.kind
        self.scale_ = self._scale(rows) if samples.kind == ROWS else None
        x = self._scaled(rows)
        with seeded(config.seed):  # building networks draws from torch's default generator, which must stay as it was
            fitted = fit_features(x, torch.from_numpy(codes), config, views=views)

        self.model_, self.count_ = fitted.model, fitted.count
        self.n_seen_ = len(classes)
        self.n_novel_ = fitted.model.num_classes - len(classes)
        self.classes_ = with_new(classes, self.n_novel_, taken=self.outlier_label)
        self._owner = np.arange(fitted.model.num_classes)  # class of each prototype
        self.embedding_ = fitted.z.numpy()
        self._n_features_out = self.embedding_.shape[1]
        self._prediction = fitted.prediction
        self.labels_ = self._labels(self._said(fitted.prediction))
        self._warn_of_doubts(config, x.numpy(), codes)
        return self

    def predict(self, X: Any) -> Array:
        """(M,) the class or new group of each sample, as in `classes_`; or `outlier_label` where one is set."""
        said = self._judge(X)  # first: it says so where nothing was fitted
        return self._labels(said)

    def predict_proba(self, X: Any) -> Array:
        """(M, C) probability of each of `classes_`."""
        return self._judge(X).p

    def novelty_score(self, X: Any) -> Array:
        """(M,) larger is newer; above zero, a new group or none at all is likelier than all seen classes together."""
        return self._judge(X).novelty

    def is_novel(self, X: Any) -> Array:
        """(M,) bool: whether the nearest of `classes_` is a new group."""
        return self._judge(X).classes >= self.n_seen_

    def is_stranger(self, X: Any) -> Array:
        """(M,) bool: whether a sample is unlike every class and group."""
        return self._judge(X).is_stranger

    def transform(self, X: Any) -> Array:
        """(M, D) unit embedding, in which classes and groups are compact."""
        rows = self._valid(X)
        return in_parts(self.model_.embed, rows).numpy()

    def fit_predict(self, X: Any, y: Any) -> Array:
        """Fit, and the prediction for the same samples."""
        return self.fit(X, y).labels_

    def fit_transform(self, X: Any, y: Any) -> Array:
        """Fit, and the embedding of the same samples."""
        return self.fit(X, y).embedding_

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy on the rows whose label in `y` is a seen class; all others are left out.

        It says nothing of the new groups: we made up their labels, so no `y` can contain them. Where you know the true
        classes, use `opencon.open_world_accuracy`.
        """
        predicted = self.predict(X)
        y = column_or_1d(y)
        check_consistent_length(predicted, y, sample_weight)
        seen = np.isin(y, self.classes_[: self.n_seen_])
        if not seen.any():
            raise InputError("no label in y is a seen class (see classes_[:n_seen_]): there is nothing to score.")
        weight = None if sample_weight is None else np.asarray(sample_weight)[seen]
        return float(accuracy_score(y[seen].astype(predicted.dtype), predicted[seen], sample_weight=weight))

    # --- groups -------------------------------------------------------------------------------------------------------

    def representatives(self, X: Any = None, n: int = 5) -> dict[Any, Array]:
        """The numbers of the `n` most typical rows of each class and group, the most typical first.

        Args:
            X: samples to choose from; None: those of `fit`.
            n: how many of each, at most.
        """
        z, said = self._embedded(X)
        member = np.where(said.is_stranger, -1, said.classes)
        rows = typical_rows(z, member, self.model_.prototypes.numpy(), self._owner, n)
        return dict(zip(self.classes_.tolist(), rows, strict=True))

    def merge(self, *labels: Any) -> OpenWorldClassifier:
        """Make one of several new groups, or of new groups and one seen class. It has the first label, or the seen one.

        Probabilities add up. Two seen classes are not merged: give their rows one label in `y`.
        """
        numbers_of = list(dict.fromkeys(self._number_of(label) for label in labels))
        seen = [c for c in numbers_of if c < self.n_seen_]
        if len(numbers_of) < 2:
            raise InputError(f"merge{labels} takes two labels or more.")
        if len(seen) > 1:
            raise InputError(f"merge{labels}: two of these are seen classes. Give their rows one label in y instead.")
        own = (seen or numbers_of)[0]
        gone = [c for c in numbers_of if c != own]
        kept = [c for c in range(len(self.classes_)) if c not in gone]
        number = {c: i for i, c in enumerate(kept)} | {c: kept.index(own) for c in gone}
        self._owner = np.array([number[int(c)] for c in self._owner])
        self.classes_, self.n_novel_ = self.classes_[kept], len(kept) - self.n_seen_
        self.labels_ = self._labels(self._embedded(None)[1])
        return self

    def rename(self, names: Mapping[Any, Any]) -> OpenWorldClassifier:
        """Give new groups other labels, such as {"new-1": "dragonfly"}; they must be of the kind that `classes_` has."""
        labels = self.classes_.tolist()
        for old, new in names.items():
            at = self._number_of(old)
            if at < self.n_seen_:
                raise InputError(f"{old!r} is a seen class: its label comes from y. Only new groups are renamed.")
            if isinstance(new, str) != (self.classes_.dtype.kind == "U") or isinstance(new, bool):
                raise InputError(f"the label {new!r} is not of the kind that classes_ has ({self.classes_.dtype}).")
            labels[at] = new
        if len(set(labels)) < len(labels) or self.outlier_label in labels:
            raise InputError(
                f"rename({dict(names)}): a label would stand for two things. To make one of two, use merge."
            )
        self.classes_ = np.array(labels, dtype=None if self.classes_.dtype.kind == "U" else self.classes_.dtype)
        self.labels_ = self._labels(self._embedded(None)[1])
        return self

    def linkage(self) -> Array:
        """(C - 1, 4) how alike classes and groups are, as SciPy's linkage matrix with `classes_` as leaves.

        Draw it with `scipy.cluster.hierarchy.dendrogram(model.linkage(), labels=model.classes_)`.
        """
        check_is_fitted(self)
        share = self.model_.log_share.softmax(dim=0).numpy()
        return tree_of_classes(self.model_.prototypes.numpy(), share, self._owner)

    def stability(self, X: Any, y: Any, n_resamples: int = 5) -> Array:
        """(C,) how much of each of `classes_` comes back when four fifths of the rows are fitted again, 0 to 1.

        By Hennig (CSDA 2007), a group below 0.6 should not be trusted, and one above 0.85 is very stable. This takes the
        time of `n_resamples` fits.

        Args:
            X: the samples of `fit`.
            y: their labels.
            n_resamples: how many times.
        """
        _, said = self._embedded(None)
        _, codes = encode_labels(y)
        check_consistent_length(said.classes, codes)

        def refit(rows: Array, seed: int) -> Array:
            again = clone(self).set_params(random_state=seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DiscoveryWarning)
                again.fit(_safe_indexing(X, rows), _safe_indexing(y, rows))
            said: Said = again._embedded(None)[1]
            return said.classes

        return agreement(
            said.classes, len(self.classes_), self.n_seen_, codes, refit, _count("n_resamples", n_resamples)
        )

    def plot(self, X: Any = None, *, ax: Any = None) -> Any:
        """Draw samples in the plane, a color for each class and group; needs matplotlib. Returns the axes.

        Args:
            X: samples; None: those of `fit`.
            ax: the axes of matplotlib to draw on; None: the current ones.
        """
        z, said = self._embedded(X)
        return draw_map(z, np.where(said.is_stranger, -1, said.classes), self.classes_.tolist(), self.n_seen_, ax)

    # --- inside -------------------------------------------------------------------------------------------------------

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True  # gray images; paths are a list, for which there is no tag
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float32"]  # for every input type
        return tags

    def _config(self, *, num_seen: int, is_all_labeled: bool) -> OpenWorldConfig:
        """The parameters, checked."""
        n_novel, between, most = None, None, self.max_classes
        if isinstance(self.n_novel, (tuple, list)):
            require(len(self.n_novel) == 2, f'n_novel = {self.n_novel!r} must be a number, (low, high) or "auto".')
            between = _count("n_novel[0]", self.n_novel[0]), _count("n_novel[1]", self.n_novel[1])
            require(between[0] <= between[1], f"n_novel = {self.n_novel!r}: low must not be above high.")
        elif not (isinstance(self.n_novel, str) and self.n_novel == "auto"):
            n_novel = _count("n_novel", self.n_novel)
        if most is not None:
            least = max(num_seen + (n_novel or 0) + (between[0] if between else 0), 1)
            most = _count("max_classes", most)
            require(
                most >= least, f"max_classes = {most} must be at least {least}: {num_seen} seen classes, and n_novel."
            )
        steps = _count("steps", self.steps)
        require(isinstance(self.lr, numbers.Real), f"lr = {self.lr!r} must be a number above zero.")
        is_known = isinstance(self.scale, (bool, np.bool_)) or (isinstance(self.scale, str) and self.scale == "auto")
        require(is_known, f'scale = {self.scale!r} must be True, False or "auto".')
        require(
            isinstance(self.encoder, (str, os.PathLike)),
            f"encoder = {self.encoder!r} must be the name of an encoder, or the path of a finished run.",
        )
        if is_all_labeled:
            warnings.warn(
                "y has no unlabeled row (-1, or None among strings): there is nothing to discover, and no new group "
                "will be found.",
                DiscoveryWarning,
                stacklevel=4,
            )
            n_novel, between = 0, None
        seed = self.random_state
        if not isinstance(seed, numbers.Integral):
            seed = check_random_state(seed).randint(np.iinfo(np.int32).max)
        return OpenWorldConfig(
            num_novel=n_novel,
            novel_range=between,
            max_classes=most,
            method=self.method,
            seed=int(seed),
            steps=steps,
            lr=float(self.lr),
        )

    def _scale(self, rows: Array) -> Array | None:
        """(F,) what to divide columns by; None: nothing. Warns where it should be done and must not."""
        spread = rows.std(axis=0, dtype=np.float64)
        varies = spread > 0
        times = float(spread.max() / np.median(spread[varies])) if varies.any() else 1.0
        if not self.scale or (times <= WILD and self.scale == "auto"):
            if times > WILD:
                warnings.warn(
                    f"one column of X varies {times:,.0f} times as much as the median column and decides nearly alone. "
                    f'Scale the columns: scale="auto", or StandardScaler in a pipeline.',
                    DiscoveryWarning,
                    stacklevel=4,
                )
            return None
        return np.where(varies, spread, 1.0).astype(np.float32)

    def _scaled(self, rows: Array) -> Tensor:
        """Rows as the model takes them: a copy, because the caller's array may be read-only or may change."""
        return torch.tensor(rows if self.scale_ is None else rows / self.scale_, dtype=torch.float32)

    def _warn_of_doubts(self, config: OpenWorldConfig, x: Array, codes: Array) -> None:
        """Say so where groups were lost, a limit was reached, or nothing new was found that may be there."""
        asked = config.novel_range[0] if config.novel_range else config.num_novel or 0
        most = config.max_classes or most_classes(self.n_seen_)
        doubt = None
        if self.n_novel_ < asked:
            doubt = (
                f"n_novel = {asked} was asked for, and {self.n_novel_} are left: other groups had no rows of their own, or "
                f"lay no farther from a class than its halves from each other. Ask for fewer, or label some rows of what "
                f"is missing."
            )
        elif self.count_ is not None and config.novel_range is None and self.count_.num_classes >= most:
            doubt = (
                f"{self.count_.num_classes} classes are the most that were looked for, so there may be more. Look further "
                f"with max_classes above {most}."
            )
        elif self.count_ is not None and self.n_novel_ == 0:
            odd = unlike_their_labels(x, self._embedded(None)[1].classes, codes)
            if odd:
                names = ", ".join(str(self.classes_[c]) for c in odd)
                doubt = (
                    f"no new group was found, but unlabeled rows that went to {names} do not look like the labeled ones: "
                    f"another class may be among them, unless you labeled rows of one kind only. If you know that there are "
                    f"new classes, say how many: n_novel."
                )
        if doubt:
            warnings.warn(doubt, DiscoveryWarning, stacklevel=4)

    def _settings(self, *, num_views: int) -> FeatureSettings:
        return FeatureSettings(encoder=os.fspath(self.encoder), num_views=num_views)

    @as_value_errors()
    def _valid(self, X: Any) -> Tensor:
        """Samples for a fitted estimator as rows (M, F)."""
        check_is_fitted(self)
        samples = read_samples(X)
        if samples.kind != self._kind:
            raise InputError(f"X holds {samples.kind}, but fit was given {self._kind}. Give the same kind.")
        rows, _ = samples.rows(self._settings(num_views=0), self.cache)
        return self._scaled(dense(validate_data(self, rows, dtype=np.float32, accept_sparse="csr", reset=False)))

    def _judge(self, X: Any) -> Said:
        rows = self._valid(X)
        return self._said(self.model_.predict(rows))

    def _embedded(self, X: Any) -> tuple[Array, Said]:
        """The embedding of samples (None: those of `fit`), and what is said of them."""
        check_is_fitted(self)
        if X is None:
            return self.embedding_, self._said(self._prediction)
        rows = self._valid(X)
        return in_parts(self.model_.embed, rows).numpy(), self._said(self.model_.predict(rows))

    def _said(self, prediction: Prediction) -> Said:
        """A prediction of the model, with merged groups taken together."""
        p, classes, novelty = (t.numpy() for t in (prediction.p, prediction.classes, prediction.novelty))
        is_stranger = prediction.unlike_everything.numpy()
        if len(self._owner) > len(self.classes_):
            p = p @ np.eye(len(self.classes_), dtype=p.dtype)[self._owner]
            classes = p.argmax(axis=1)
            if (self._owner[self.n_seen_ :] < self.n_seen_).any():  # a group has become part of a seen class
                seen = p[:, : self.n_seen_].sum(axis=1).clip(1e-12, 1 - 1e-6)
                odds = np.log1p(-seen) - np.log(seen)
                novelty = np.where(is_stranger, np.maximum(novelty, odds), odds)
        return Said(p, classes, novelty, is_stranger)

    def _labels(self, said: Said) -> Array:
        labels = np.asarray(self.classes_[said.classes])
        if self.outlier_label is None or not said.is_stranger.any():
            return labels
        return np.where(said.is_stranger, np.asarray(self.outlier_label), labels)

    def _number_of(self, label: Any) -> int:
        check_is_fitted(self)
        labels = self.classes_.tolist()
        if label not in labels:
            raise InputError(f"{label!r} is none of the labels in classes_: {', '.join(map(str, labels[:20]))}.")
        return int(labels.index(label))


def _count(name: str, value: Any) -> int:
    is_count = isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0
    or_auto = ', or "auto"' if name == "n_novel" else ""
    require(is_count, f"{name} = {value!r} must be a whole number, 0 or more{or_auto}.")
    return int(value)
