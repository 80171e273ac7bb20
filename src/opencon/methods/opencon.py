"""OpenCon: Open-world Contrastive Learning. Sun and Li, TMLR 2023, arXiv:2208.02764.

Letters: B images in a batch, L of them labeled (first), V views, N = V * B rows (view by view), D embedding size, S seen
classes, C all classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.config import AugmentConfig, MethodConfig
from opencon.encoders import Embedder
from opencon.errors import require
from opencon.losses.balance import SMALLEST_PROBABILITY, kl_to_prior
from opencon.losses.contrastive import contrast_within
from opencon.methods.base import (
    Assignment,
    Batch,
    Epoch,
    FeatureBank,
    Kind,
    Method,
    Schedule,
    StepOutput,
    Task,
    Variant,
)
from opencon.methods.correction import APART, LOOKS, NOT_TRIED, Looked, correct, look
from opencon.methods.schedule import usual
from opencon.prototypes import LOGIT_SCALE, SeenScore, ema_update, novelty_threshold, random_prototypes, seen_score
from opencon.runtime import has_triton

CORRECTIONS = ("gone", "merged", "split")
FARTHER_THAN_ANY = -2.0  # a cosine that no row has
SIMCLR_CROP = (0.08, 1.0)  # SimCLR's crop keeps 8 % of the area at least; the released OpenCon code keeps 20 %


@dataclass(frozen=True, kw_only=True)
class OpenConConfig(MethodConfig):
    """Settings of OpenCon. Defaults are the released code's for CIFAR; `paper()` follows the text of the paper.

    The two differ in every setting from `ramp_epochs` down; docs/methods.md has the table.
    """

    name: ClassVar[str] = "opencon"

    weight_novel: float = 0.1  # lambda_n, paper Table 9
    weight_labeled: float = 0.2  # lambda_l
    weight_unlabeled: float = 1.0  # lambda_u
    weight_prior: float = 0.05  # paper, appendix I
    temperature_novel: float = 0.7  # tau_n, paper Table 9
    temperature_labeled: float = 0.1  # tau_l
    temperature_unlabeled: float = 0.4  # tau_u; 0.6 on ImageNet
    momentum: float = 0.9  # gamma, paper, appendix I
    percentile: float = 70.0  # p: this share of the labeled lies above the novelty threshold
    labeled_loss: Literal["labeled", "known"] = "labeled"  # L_l, or L_known of appendix E, which adds D_u \ D_n
    temperature_known: float | None = None  # tau_k of L_known; None: tau_l (the paper prints neither)
    weight_known: float | None = None  # lambda_k; None: lambda_l
    # Ours: whether the number of prototypes is decided in training, see `methods.correction`; until then prior and L_n wait.
    # Released: never. None: where the number of classes is an estimate (split.num_classes=auto).
    correct: bool | None = None
    correct_at: int = 20  # the epoch before which that happens, ours; in a short run after half of the epochs

    ramp_epochs: int = 100  # epochs over which weight_novel grows from 0; paper: 0
    seen_score: SeenScore = "standardized"  # paper: cosine
    # Labeled views of this batch by which images are decided (the first ones, paper: all of them; its Algorithm 1), or all
    # labeled images as they are, once an epoch: without augmentation they score higher, and fewer views lie above.
    threshold_from: Literal["batch", "labeled_set"] = "batch"
    decide_on: Literal["first_view", "each_view"] = "first_view"  # whose score and argmax count; paper: each view's own
    novel_reduction: Literal["mean", "sum"] = "mean"  # of L_n over its anchors; paper: sum
    # Unlabeled images that move prototypes; paper: D_n.
    prototype_members: Literal["novel_argmax", "novel_set"] = "novel_argmax"
    update_views: Literal["first", "all"] = "first"  # which views move prototypes; paper: all
    prior: Literal["unlabeled", "uniform"] | tuple[float, ...] = "unlabeled"  # expected class shares; paper: uniform
    prior_over: Literal["unlabeled", "batch"] = "unlabeled"  # images whose mean prediction is compared; paper: batch

    def __post_init__(self) -> None:
        known = {"temperature_known": self.temperature_known, "weight_known": self.weight_known}
        for key, value in known.items():
            require(value is None or value > 0, f"method.{key} = {value} must be above zero, or none.")
        for key in ("temperature_novel", "temperature_labeled", "temperature_unlabeled"):
            require(getattr(self, key) > 0, f"method.{key} = {getattr(self, key)} must be above zero.")
        require(self.correct_at >= 0, f"method.correct_at = {self.correct_at} must not be negative.")
        for key in ("weight_novel", "weight_labeled", "weight_unlabeled", "weight_prior", "ramp_epochs"):
            require(getattr(self, key) >= 0, f"method.{key} = {getattr(self, key)} must not be negative.")
        require(0.0 <= self.momentum < 1.0, f"method.momentum = {self.momentum} must lie in [0, 1).")
        require(0.0 <= self.percentile <= 100.0, f"method.percentile = {self.percentile} must lie between 0 and 100.")
        if isinstance(self.prior, tuple):
            require(
                len(self.prior) > 0 and all(q > 0 for q in self.prior),
                f"method.prior = {self.prior} must be positive numbers, one for each class.",
            )

    def corrects(self, is_counted: bool) -> bool:
        """By `correct`; without a word, where the number is an estimate."""
        return is_counted if self.correct is None else self.correct

    @classmethod
    def paper(cls) -> OpenConConfig:
        """The variant `paper`: the text where it differs from the released code."""
        return cls(
            ramp_epochs=0,
            seen_score="cosine",
            decide_on="each_view",
            novel_reduction="sum",
            prototype_members="novel_set",
            update_views="all",
            prior="uniform",
            prior_over="batch",
        )


class OpenCon(Method[OpenConConfig]):
    """Three contrastive losses, one for each kind of image, around moving prototypes (arXiv:2208.02764)."""

    settings = OpenConConfig

    prototypes: Tensor  # (C, D) unit rows
    prior: Tensor  # (C,)
    novel_weight: Tensor  # scalar on the device: the ramp must reach a captured step
    epoch_threshold: Tensor  # scalar, for threshold_from = "labeled_set"
    is_started: Tensor  # scalar bool: `start_from` has been called
    live: Tensor  # (C,) bool: prototypes that count; all of them unless they are corrected
    corrected: Tensor  # (3,) how many have gone, were merged, were split, so far
    prior_weight: Tensor  # scalar on the device: 0 until the number is decided; where it is corrected
    chosen: Tensor  # (C,) how often unlabeled images chose a prototype in this epoch; where they are corrected
    in_use: Tensor  # scalar: how many were chosen in the epoch before
    signs: Tensor  # (LOOKS, 2, C + 1) what speaks for each number of groups

    def __init__(self, config: OpenConConfig, task: Task, embedder: Embedder) -> None:
        super().__init__(config, task, embedder)
        self.register_buffer("prototypes", random_prototypes(task.num_classes, embedder.dim))
        self.register_buffer("prior", class_prior(config.prior, task))
        self.register_buffer("novel_weight", torch.tensor(0.0 if config.ramp_epochs else config.weight_novel))
        self.register_buffer("epoch_threshold", torch.tensor(float("-inf")))
        self.register_buffer("is_started", torch.tensor(False))
        self.register_buffer("live", torch.ones(task.num_classes, dtype=torch.bool))
        self.register_buffer("corrected", torch.zeros(len(CORRECTIONS)))
        self.register_buffer("prior_weight", torch.tensor(0.0))
        self.register_buffer("chosen", torch.zeros(task.num_classes))
        self.register_buffer("in_use", torch.tensor(float(task.num_classes)))
        self.register_buffer("signs", torch.full((LOOKS, 2, task.num_classes + 1), NOT_TRIED))
        self.corrects = config.corrects(task.is_counted)
        self._before_head = False  # whether `embed` stops in front of the projection head

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """Paper, appendix I. digits and fine_grained: ours."""
        paper = variant == "paper"
        method = OpenConConfig.paper() if paper else OpenConConfig()
        if kind == "digits":
            # Ten times the paper's prior: of ten prototypes, one that no image chooses costs a tenth of the result. And the
            # mean over anchors: a sum over hundreds of them would diverge.
            ramp = 0 if paper else 30
            method = replace(method, ramp_epochs=ramp, correct_at=30)
            return usual(replace(method, novel_reduction="mean", weight_prior=0.5), kind)
        crop = SIMCLR_CROP if paper else (0.2, 1.0)
        if kind == "cifar":
            return usual(method, kind, augment=AugmentConfig(crop_scale=crop), weight_decay=1e-4 if paper else 5e-4)
        large = AugmentConfig(size=224, crop_scale=crop)
        method = replace(method, temperature_unlabeled=0.6)
        lr = {"lr": 0.02 if paper else 0.01} if kind == "imagenet" else {}  # released code: 0.01 on ImageNet
        return usual(method, kind, augment=large, **lr)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        # Checkpoints from before there was `start_from`, or a correction.
        state.setdefault(f"{prefix}is_started", torch.tensor(False))
        for name in ("live", "corrected", "prior_weight", "chosen", "in_use", "signs"):
            state.setdefault(f"{prefix}{name}", getattr(self, name))
        state.pop(f"{prefix}evidence", None)  # of an earlier way to decide
        super()._load_from_state_dict(state, prefix, *args)

    @torch.no_grad()
    def start_from(self, bank: FeatureBank, classes: Tensor) -> None:
        """Prototypes at the mean of each class, the prior by its size; the novel loss counts in full from the first step.

        The prior adds a row to every class, so that none is impossible.
        """
        total = torch.zeros_like(self.prototypes).index_add_(0, classes, bank.z)
        self.prototypes.copy_(F.normalize(total, dim=1))
        shares = torch.bincount(classes[bank.labels < 0], minlength=self.task.num_classes) + 1.0
        shares = shares / shares.sum()
        self.prior.copy_(shares / shares.sum())  # again, as `class_prior` does: it rounds the last bit
        self.is_started.fill_(True)

    def embed(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1] -> (B, D); features (B, F) while the number is looked for."""
        return self.embedder.features(images) if self._before_head else super().embed(images)

    def before_epoch(self, epoch: Epoch) -> None:
        """Ramp the weight of L_n; refresh the threshold where it comes from all labeled images."""
        c = self.config
        ramps = c.ramp_epochs and not bool(self.is_started)  # host sync: once an epoch
        ramp = min(1.0, epoch.index / c.ramp_epochs) if ramps else 1.0
        left = min(c.correct_at, epoch.num_epochs // 2) - epoch.index  # epochs until the number is decided
        self.novel_weight.fill_(0.0 if self.corrects and left > 0 else c.weight_novel * ramp)
        if self.corrects:
            self._correct(epoch, left)
            if epoch.index:
                self.in_use.copy_((self.chosen > 0).sum())
            self.chosen.zero_()
        if c.threshold_from == "labeled_set":
            self.epoch_threshold.copy_(self._threshold(epoch.features()))

    @torch.no_grad()
    def _correct(self, epoch: Epoch, left: int) -> None:
        """At some epochs look at groups; at the last one decide how many prototypes there are.

        From then on the prior counts, spread over them.
        """
        if left not in range(0, LOOKS * APART, APART):
            return
        self._before_head = True
        try:
            bank = epoch.features()
        finally:
            self._before_head = False
        rows = Looked.at(self.embedder.project(bank.z), bank.z, bank.labels, self.task.num_seen)
        self.signs[left // APART] = look(self.prototypes, self.live, rows).to(self.signs)
        if left:
            return
        found = correct(self.prototypes, self.live, rows, signs=self.signs.cpu())
        self.prototypes.copy_(found.prototypes)
        self.live.copy_(found.live)
        self.corrected += torch.tensor([found.gone, found.merged, found.split]).to(self.corrected)
        # Shares by the sizes of the groups would keep the mistakes of the grouping: worse where the number is right.
        shares = torch.where(self.live, class_prior(self.config.prior, self.task).to(self.prior), 0.0)
        self.prior.copy_((shares / shares.sum()).clamp(min=SMALLEST_PROBABILITY))
        self.prior_weight.fill_(self.config.weight_prior)

    def _cosine(self, z: Tensor) -> Tensor:
        """(..., D) -> (..., C); that of a prototype which does not count is below all others."""
        cosine = z @ self.prototypes.T
        return torch.where(self.live, cosine, FARTHER_THAN_ANY) if self.corrects else cosine

    def _seen_score(self, cosine: Tensor) -> Tensor:
        live = self.live if self.corrects else None
        return seen_score(cosine, num_seen=self.task.num_seen, form=self.config.seen_score, live=live)

    # Where the paper and the released code differ, both forms stand in the piece of the step that they concern.

    def step(self, batch: Batch) -> StepOutput:
        """The weighted sum of L_n, L_l, L_u and the prior term."""
        c, L, V, B = self.config, batch.num_labeled, len(batch.views), len(batch.labels)
        assert L > 0, "a batch without labeled images has no novelty threshold"
        z = self.embedder.embed_views(batch.views)  # (N, D)
        views = z.view(V, B, -1)
        label, novel = self._decide(views.detach(), batch)  # (V, B), (V, B - L)
        z_l, z_u = views[:, :L].flatten(0, 1), views[:, L:].flatten(0, 1)  # (V L, D), (V (B - L), D)

        loss_n = self._novel_loss(z_u, label[:, L:], novel)
        labels_alone = c.labeled_loss == "labeled"
        loss_l = self._labeled_loss(z_l, label[:, :L]) if labels_alone else self._known_loss(z, label, novel)
        loss_u = self._unlabeled_loss(z_u, V)
        loss_prior = self._prior_loss(views[0], L)

        weight_labeled = c.weight_labeled
        if c.labeled_loss == "known" and c.weight_known is not None:
            weight_labeled = c.weight_known
        loss = (
            self.novel_weight * loss_n
            + weight_labeled * loss_l
            + c.weight_unlabeled * loss_u
            + (self.prior_weight if self.corrects else c.weight_prior) * loss_prior
        )
        logs = {"loss_n": loss_n, "loss_l": loss_l, "loss_u": loss_u, "loss_prior": loss_prior}
        logs = {name: value.detach() for name, value in logs.items()} | {"share_novel": novel.float().mean()}
        if self.corrects:
            logs |= {"prototypes": self.live.sum(), "prototypes_in_use": self.in_use}
            logs |= {f"prototypes_{name}": self.corrected[i] for i, name in enumerate(CORRECTIONS)}
        carry = self._movers(views.detach(), batch, novel)
        return StepOutput(loss, logs, carry=(*carry, label[0, L:]) if self.corrects else carry)

    @torch.no_grad()
    def _decide(self, views: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """By the prototypes before this step: a class for every row (V, B), and which unlabeled rows (V, B - L) are novel.

        The class is the label, or else a guess. Released: an image's first view decides for all of them. Paper: each view
        decides for itself.
        """
        c, L, V = self.config, batch.num_labeled, len(views)
        deciders = views[:1] if c.decide_on == "first_view" else views
        cosine = self._cosine(deciders)  # (1 or V, B, C)
        score = self._seen_score(cosine.flatten(0, 1)).view(len(deciders), -1)
        if c.threshold_from == "batch":
            threshold = novelty_threshold(score[:, :L].flatten(), percentile=c.percentile)
        else:
            threshold = self.epoch_threshold
        label = torch.where(batch.labels >= 0, batch.labels, cosine.argmax(dim=2))  # (1 or V, B)
        return label.expand(V, -1), (score < threshold)[:, L:].expand(V, -1)

    def _novel_loss(self, z_u: Tensor, label: Tensor, novel: Tensor) -> Tensor:
        """L_n: contrast within the unlabeled rows that count as novel, by their guessed classes."""
        c, who = self.config, (novel.flatten(), label.flatten())
        return contrast_within(z_u, *who, temperature=c.temperature_novel, reduction=c.novel_reduction)

    def _labeled_loss(self, z_l: Tensor, label: Tensor) -> Tensor:
        """L_l: contrast within the labeled rows, by their labels."""
        everyone = torch.ones_like(label, dtype=torch.bool).flatten()
        return contrast_within(z_l, everyone, label.flatten(), temperature=self.config.temperature_labeled)

    def _known_loss(self, z: Tensor, label: Tensor, novel: Tensor) -> Tensor:
        """L_known: as L_l, with the unlabeled rows that do not count as novel."""
        labeled = novel.new_ones(len(novel), label.shape[1] - novel.shape[1])
        known = torch.cat([labeled, ~novel], dim=1)  # (V, B): D_l and D_u \ D_n
        own = self.config.temperature_known
        temperature = self.config.temperature_labeled if own is None else own
        return contrast_within(z, known.flatten(), label.flatten(), temperature=temperature)

    def _unlabeled_loss(self, z_u: Tensor, num_views: int) -> Tensor:
        """L_u: contrast within all unlabeled rows, in which only views of one image belong together."""
        everyone = torch.ones(len(z_u), dtype=torch.bool, device=z_u.device)
        image = torch.arange(len(z_u) // num_views, device=z_u.device).repeat(num_views)
        return contrast_within(z_u, everyone, image, temperature=self.config.temperature_unlabeled)

    def _prior_loss(self, first: Tensor, num_labeled: int) -> Tensor:
        """KL of the mean prediction to the expected shares: of the first views of the unlabeled, or of all (paper)."""
        if self.config.prior_over == "unlabeled":  # released
            first = first[num_labeled:]
        logits = LOGIT_SCALE * first @ self.prototypes.T
        if self.corrects:
            logits = torch.where(self.live, logits, float("-inf"))
        return kl_to_prior(logits, self.prior)

    @torch.no_grad()
    def _movers(self, views: Tensor, batch: Batch, novel: Tensor) -> tuple[Tensor, Tensor]:
        """The rows (n, D) that move prototypes, in their order, and the class (n,) whose prototype each moves, -1 for none.

        The loader has shuffled labeled and unlabeled images, and the two move disjoint sets of prototypes (seen by labels,
        novel by pseudo-labels), so batch order is a random order.
        """
        c, L, S = self.config, batch.num_labeled, self.task.num_seen
        if c.update_views == "first":  # released; paper: all
            views, novel = views[:1], novel[:1]
        cosine = self._cosine(views[:, L:])  # (v, B - L, C)
        if c.prototype_members == "novel_argmax":  # released: those nearest to a novel prototype
            nearest = cosine.argmax(dim=2)
            target = torch.where(nearest >= S, nearest, -1)
        else:  # paper: D_n, each with its nearest novel prototype
            target = torch.where(novel, cosine[:, :, S:].argmax(dim=2) + S, -1)
        labels = torch.cat([batch.labels[:L].expand(len(views), -1), target], dim=1)  # (v, B)
        return views.flatten(0, 1), labels.flatten()

    def after_step(self, *carry: Tensor) -> None:
        """Install the moved prototypes, and count who was chosen."""
        z, labels, *guesses = carry
        for guess in guesses:  # (B - L,)
            self.chosen.index_add_(0, guess, torch.ones_like(guess, dtype=self.chosen.dtype))
        moved = ema_update(self.prototypes, z, labels, momentum=self.config.momentum, kernel=self.kernels)
        self.prototypes.copy_(moved)

    @property
    def reads_nothing(self) -> bool:
        """The plain prototype update reads its number of rounds from the device; the kernel does not."""
        return self.kernels and has_triton()

    def row_logits(self, z: Tensor) -> Tensor:
        """10 * cosine to each prototype; none for one that does not count."""
        return torch.where(self.live, LOGIT_SCALE * (z @ self.prototypes.T), float("-inf"))

    @torch.no_grad()
    def assign(self, bank: FeatureBank) -> Assignment:
        """The nearest prototype; probabilities from 10 * cosine; novelty is minus the seen score."""
        cosine = self._cosine(bank.z)  # (M, C)
        score = self._seen_score(cosine)
        return Assignment(
            classes=cosine.argmax(dim=1),
            p=self.row_logits(bank.z).softmax(dim=1),
            seen_logits=LOGIT_SCALE * cosine[:, : self.task.num_seen],
            novelty=-score,
            novelty_threshold=-self._threshold(bank),
            seen_prototypes=self.prototypes[: self.task.num_seen],
        )

    @torch.no_grad()
    def _threshold(self, bank: FeatureBank) -> Tensor:
        """The seen score below which an image counts as novel; NaN for a bank without labeled images."""
        labeled = bank.z[bank.labels >= 0]  # host sync: once an epoch at most
        if len(labeled) == 0:
            return torch.tensor(float("nan"))
        score = self._seen_score(self._cosine(labeled))
        return novelty_threshold(score, percentile=self.config.percentile)


def class_prior(prior: str | tuple[float, ...], task: Task) -> Tensor:
    """Expected share of each class among the images, (C,), sums to one.

    "unlabeled" (released code): a seen class has lost its labeled images, so its share to that of a novel one is
    (1 - labeled ratio) to 1.
    """
    shares = torch.ones(task.num_classes)
    if prior == "unlabeled":
        shares[: task.num_seen] = 1.0 - task.labeled_ratio
    elif isinstance(prior, tuple):
        require(
            len(prior) == task.num_classes,
            f"method.prior has {len(prior)} entries for {task.num_classes} classes. Give one share for each class, "
            f"seen classes first.",
        )
        shares = torch.tensor(prior)
    return shares / shares.sum()
