"""The method contract: all that the trainer, the command line and the tests know about a method.

Letters: B images in a batch, V views, N = V * B rows (view by view), D embedding size, S seen classes, C all classes,
M images in a set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from torch import Tensor, nn

from opencon.config import MethodConfig
from opencon.data.loader import Batch
from opencon.encoders import Embedder
from opencon.methods.parts import WeightAverage
from opencon.methods.schedule import Kind, Schedule, Variant, usual


@dataclass(frozen=True)
class Task:
    """What a method may know about the problem: counts, never the hidden labels."""

    num_seen: int
    num_classes: int  # seen + novel: how many to look for
    labeled_ratio: float  # share of the seen classes' images that are labeled
    num_images: int  # M, of the training set
    is_counted: bool = False  # whether num_classes is an estimate


@dataclass(frozen=True)
class StepOutput:
    """What one step computed. Nothing here has been read by the host."""

    loss: Tensor  # scalar, to be differentiated
    logs: dict[str, Tensor] = field(default_factory=dict)  # detached scalars, still on the device
    carry: tuple[Tensor, ...] = ()  # detached, handed on to after_step


@dataclass(frozen=True)
class FeatureBank:
    """A set of images, embedded once, in order."""

    z: Tensor  # (M, D) what `embed` gives
    labels: Tensor  # (M,) class of a labeled image, -1 elsewhere


@dataclass(frozen=True)
class Assignment:
    """A class for every image of a bank."""

    classes: Tensor  # (M,) in [0, C); at least S means novel
    p: Tensor | None = None  # (M, C) probabilities, where the method has them
    seen_logits: Tensor | None = None  # (M, S) of the seen classes, where it has a classifier of them
    novelty: Tensor | None = None  # (M,) larger is newer, where the method has a score
    novelty_threshold: Tensor | None = None  # scalar: above it an image counts as novel
    seen_prototypes: Tensor | None = None  # (S, D) unit rows among the embeddings, where it has learned some

    @classmethod
    def from_logits(cls, logits: Tensor, num_seen: int) -> Assignment:
        """The class of the largest logit; logits are (M, C), the seen classes first."""
        return cls(classes=logits.argmax(dim=1), p=logits.softmax(dim=1), seen_logits=logits[:, :num_seen])


@dataclass(frozen=True)
class Epoch:
    """What `before_epoch` receives."""

    index: int
    num_epochs: int
    features: Callable[[], FeatureBank]  # embeds the training images when called; costs a pass over them


__all__ = ["Assignment", "Batch", "Epoch", "FeatureBank", "Kind", "Method", "Schedule", "StepOutput", "Task", "Variant"]

ConfigT = TypeVar("ConfigT", bound=MethodConfig)


class Method(nn.Module, ABC, Generic[ConfigT]):
    """Five verbs: embed, step, after_step, before_epoch, assign; and `start_from`, where there is a guess."""

    settings: ClassVar[type[MethodConfig]]  # the class of its configuration
    special: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # data set: the settings that differ there, as for --set
    kernels: bool = True  # use Triton kernels where there are some; set from TrainConfig
    differentiates_twice: ClassVar[bool] = False  # through the encoder, which its kernels cannot

    def __init__(self, config: ConfigT, task: Task, embedder: Embedder) -> None:
        super().__init__()
        self.config = config
        self.task = task
        self.embedder = embedder
        self.twin: WeightAverage | None = None  # its weights averaged, where eval.average asks for them

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """How its paper trains it on one kind of images; OpenCon's way unless it says otherwise."""
        return usual(cls.settings(), kind)

    @property
    def reads_nothing(self) -> bool:
        """Whether step and after_step make the host wait for nothing, so that a GPU can record them."""
        return True

    def embed(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1] -> (B, D), float32: all that `assign` gets to see of an image.

        Unit rows, unless a method needs something else.
        """
        z: Tensor = self.embedder(images)
        return z

    @abstractmethod
    def step(self, batch: Batch) -> StepOutput:
        """The loss of one batch. Reads state, changes none (but for the running statistics of batch norms)."""

    @abstractmethod
    def assign(self, bank: FeatureBank) -> Assignment:
        """A class for every image, once training is over."""

    def row_logits(self, z: Tensor) -> Tensor | None:
        """(M, D) from `embed` -> (M, C) logits, or (M, S) where it knows the seen classes alone; each row by itself.

        None for a method that groups whole sets. This is how a trained run judges new images; `assign` may name outputs
        otherwise, by labeled images.
        """
        return None

    def start_from(self, bank: FeatureBank, classes: Tensor) -> None:
        """Start from a class for every image of a bank, (M,) in [0, C), where there is a good guess.

        A method that keeps no state about classes does nothing.
        """

    def before_epoch(self, epoch: Epoch) -> None:
        """Schedules and re-clustering."""

    def after_step(self, *carry: Tensor) -> None:
        """State that no gradient reaches: prototypes, queues, teachers."""
