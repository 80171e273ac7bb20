"""CGDL: Conditional Gaussian Distribution Learning for Open Set Recognition. Sun et al., CVPR 2020, arXiv:2003.08823.

Letters: B images in a batch, L of them labeled (first), F features, R rungs of the ladder from 1 (bottom) to R (top),
E_r latent size of rung r, E = E_R, P pixel values of a reconstruction, S seen classes, C all classes, M images in a set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.config import MethodConfig
from opencon.data.shares import Share, gather
from opencon.encoders import Embedder
from opencon.errors import require
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
from opencon.methods.extend import check_rejection, cluster_rejected, rejected
from opencon.methods.parts import not_negative, positive
from opencon.methods.schedule import CROP4_FLIP, HALF_CROP_FLIP, usual
from opencon.runtime import generator

LABELED: dict[str, Any] = {"batch_size": 128, "labeled_share": 0.9}  # unlabeled images take no part: few are drawn
SMALLEST_VARIANCE = 1e-8  # released code: added to every variance of the network


@dataclass(frozen=True, kw_only=True)
class CGDLConfig(MethodConfig):
    """Settings of CGDL, and how it is extended to name novel classes."""

    name: ClassVar[str] = "cgdl"
    projects: ClassVar[bool] = False  # the ladder stands on the encoder's features

    latent_dims: tuple[int, ...] = (128, 64, 32)  # E_1 .. E_R; released: ten rungs, 512 to 32. Ours: features are few
    hidden: int = 256  # width of the layers between; ours
    image_side: int = 32  # pixels of a reconstruction; as CIFAR's images
    weight_ladder: float = 0.01  # of reconstruction and KL; the cross-entropy has 1. Released: 1, and 100
    beta_epochs: int = 50  # over which the weight of the KL terms grows from 0 to 1; released, by its comment

    reject_share: float | None = None  # of the unlabeled images; None: as many as are expected to be novel
    reject_threshold: float | None = None  # reject scores 1 / (1 + novelty) below it instead; 0.5 is the paper's rule
    reject_sigmas: float = 2.0  # reconstruction errors above mean + 2 sigma are at the paper's limit; released
    reject_mass: float = 0.5  # so are latents at a corner of the central box that holds this share of a class; released

    def __post_init__(self) -> None:
        positive(self, "hidden", "image_side", "weight_ladder", "reject_sigmas")
        not_negative(self, "beta_epochs")
        require(
            len(self.latent_dims) >= 1 and all(d >= 1 for d in self.latent_dims),
            f"method.latent_dims = {self.latent_dims} must be one size of at least 1 for each rung, the lowest first.",
        )
        check_rejection(self)
        require(0 < self.reject_mass < 1, f"method.reject_mass = {self.reject_mass} must lie strictly between 0 and 1.")


class Gaussian(NamedTuple):
    """Independent normal variables."""

    mean: Tensor
    variance: Tensor


class CGDL(Method[CGDLConfig]):
    """A ladder VAE whose top latent is normal around the mean of the image's class (arXiv:2003.08823).

    Upward, each rung sees x as q_up_r = N(m_r, v_r); the top one is the latent, z_R ~ q_R = q_up_R. Downward, p_r =
    N(m, v) is predicted from z_{r+1}, and z_r ~ q_r is the product of q_up_r and p_r, precisions added. With mu_y the
    learned mean of class y and x' the image decoded from z_1:

        loss = CE(classifier(z_R), y) + weight_ladder [ |x - x'|^2 + beta (KL(q_R || N(mu_y, 1)) + sum_r KL(q_r || p_r)) ]

    the mean over the *labeled* images, of the first view; unlabeled images take no part. An image is novel if its latent
    is far from every class or it is badly reconstructed; those are clustered (OpenCon's extension).
    """

    settings = CGDLConfig

    beta: Tensor  # scalar
    seed: Tensor  # scalar: of the noise
    noise: Tensor  # (M, sum of E_r): this epoch's, drawn ahead

    def __init__(self, config: CGDLConfig, task: Task, embedder: Embedder) -> None:
        super().__init__(config, task, embedder)
        dims, width = config.latent_dims, config.hidden
        features = [embedder.num_features] + [width] * (len(dims) - 1)
        self.up = nn.ModuleList(_layer(below, width) for below in features)
        self.up_latent = nn.ModuleList(nn.Linear(width, 2 * dim) for dim in dims)
        self.down = nn.ModuleList(_layer(above, width) for above in dims[1:])  # to rungs 1 .. R - 1
        self.down_latent = nn.ModuleList(nn.Linear(width, 2 * dim) for dim in dims[:-1])
        self.num_pixels = embedder.encoder.in_channels * config.image_side**2  # P
        self.decoder = nn.Sequential(_layer(dims[0], width), nn.Linear(width, self.num_pixels), nn.Sigmoid())
        self.classifier = nn.Linear(dims[-1], task.num_seen)
        self.means = nn.Parameter(torch.randn(task.num_seen, dims[-1]))
        self.register_buffer("beta", torch.tensor(0.0))
        self.register_buffer("seed", torch.randint(2**31, ()))
        # Drawn again before every epoch, so a checkpoint does not need it.
        self.register_buffer("noise", torch.zeros(task.num_images, sum(dims)), persistent=False)

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """Released code: SGD at 0.001, which at weight_ladder 0.01 and momentum 0.9 is 0.01 here; no weight decay.

        Its milestones are 60, 100 and 150. digits: ours.
        """
        if kind == "digits":
            return usual(CGDLConfig(image_side=8), kind, epochs=60, lr=0.05, **LABELED)
        view = CROP4_FLIP if kind == "cifar" else HALF_CROP_FLIP
        how = {"lr": 0.01, "weight_decay": 0.0, "schedule": "step", "milestones": (60, 100, 150), "epochs": 200}
        return usual(CGDLConfig(), kind, augment=view, **LABELED, **how)

    def before_epoch(self, epoch: Epoch) -> None:
        """Raise beta, and draw the noise that the steps of this epoch use."""
        c = self.config
        self.beta.fill_(min(1.0, epoch.index / c.beta_epochs) if c.beta_epochs else 1.0)
        self.noise.normal_(generator=generator(self.noise.device, int(self.seed), epoch.index))

    def step(self, batch: Batch) -> StepOutput:
        """Cross-entropy, reconstruction and KL of the labeled images."""
        L, images, labels = batch.num_labeled, batch.views[0][: batch.num_labeled], batch.labels[: batch.num_labeled]
        noise = torch.split(self.noise[batch.rows[:L]], list(self.config.latent_dims), dim=1)
        ladder = self.climb(self.embedder.features(images), noise)
        loss_ce = F.cross_entropy(self.classifier(ladder.latents[-1]), labels)
        loss_rec = self.error(self.pooled(images), ladder.latents[0]).mean()
        means = self.means[labels]  # (L, E)
        loss_class = kl_normal(ladder.posteriors[-1], Gaussian(means, torch.ones_like(means))).mean()
        middle = [kl_normal(q, p).mean() for q, p in zip(ladder.posteriors, ladder.priors, strict=False)]
        loss_middle = torch.stack(middle).sum() if middle else torch.zeros_like(loss_class)
        loss = loss_ce + self.config.weight_ladder * (loss_rec + self.beta * (loss_class + loss_middle))
        logs = {"loss_ce": loss_ce, "loss_rec": loss_rec, "loss_class": loss_class, "loss_middle": loss_middle}
        return StepOutput(loss, {name: value.detach() for name, value in logs.items()})

    def climb(self, features: Tensor, noise: tuple[Tensor, ...] | None = None) -> Ladder:
        """Up the ladder and down again, from features (B, F); without noise, every latent is its mean."""
        ups, h = [], features
        for layer, latent in zip(self.up, self.up_latent, strict=True):
            h = layer(h)
            ups.append(_gaussian(latent(h)))
        priors: list[Gaussian] = []
        posteriors, latents = [ups[-1]], [_sample(ups[-1], noise[-1] if noise else None)]
        for r in reversed(range(len(ups) - 1)):
            prior = _gaussian(self.down_latent[r](self.down[r](latents[0])))
            posterior = product(ups[r], prior)
            priors.insert(0, prior)
            posteriors.insert(0, posterior)
            latents.insert(0, _sample(posterior, noise[r] if noise else None))
        return Ladder(latents, posteriors, priors)

    def pooled(self, images: Tensor) -> Tensor:
        """(B, P): images of the size that is decoded; with several ranks, those of all."""
        if isinstance(images, Share):
            return gather(self.pooled(images.own), (images,))
        return F.adaptive_avg_pool2d(images, self.config.image_side).flatten(1)

    def error(self, pooled: Tensor, latent: Tensor) -> Tensor:
        """(B,): squared distance of the image decoded from the lowest latent to the image, pooled to the same size."""
        decoded: Tensor = self.decoder(latent)  # (B, P)
        return (pooled - decoded).square().sum(dim=1)

    def embed(self, images: Tensor) -> Tensor:
        """(B, F + E + 1): unit features, mean of the top latent, reconstruction error (its mean over the pixels).

        Without noise. Features are clustered; latent and error decide whether an image is seen, and of which class.
        """
        features = self.embedder.features(images)
        ladder = self.climb(features)
        error = self.error(self.pooled(images), ladder.latents[0]) / self.num_pixels
        return torch.cat([F.normalize(features, dim=1), ladder.latents[-1], error[:, None]], dim=1)

    def row_logits(self, z: Tensor) -> Tensor:
        """Of the seen classes, by the latent."""
        E = self.config.latent_dims[-1]
        logits: Tensor = self.classifier(z[:, self.embedder.num_features : self.embedder.num_features + E])
        return logits

    @torch.no_grad()
    def assign(self, bank: FeatureBank) -> Assignment:
        """The class of the classifier; for a rejected image, its k-means group among the features of all rejected ones.

        Novelty is in units of the paper's two limits, so that its rule is novelty > 1, a score below one half:

            far     = min_k d_k^2 / limit^2     d_k the distance to class k in standard deviations (`class_gaussians`)
            blurred = (e - mean) / (2 sigma)    e the reconstruction error, mean and sigma over the labeled images
            novelty = max(far, blurred) if blurred > 1, else far: an error within its limit says nothing
            score   = 1 / (1 + novelty)
        """
        c, labels = self.config, bank.labels
        features, latent, error = torch.split(bank.z, [self.embedder.num_features, c.latent_dims[-1], 1], dim=1)
        logits = self.classifier(latent)  # (M, S)
        seen = class_gaussians(latent, labels, self.means)
        # One class at a time: all at once would be (M, S, E).
        distances = [((latent - m).square() / v).sum(dim=1) for m, v in zip(*seen, strict=True)]
        distance = torch.stack(distances).amin(dim=0)  # (M,)
        far = distance / squared_limit(c.reject_mass, latent.shape[1])
        labeled_error = error[labels >= 0] if bool((labels >= 0).any()) else error  # host sync
        blurred = (error[:, 0] - labeled_error.mean()) / (
            c.reject_sigmas * labeled_error.std(correction=0).clamp(min=SMALLEST_VARIANCE)
        )
        novelty = torch.where(blurred > 1.0, torch.maximum(far, blurred), far)
        score = 1.0 / (1.0 + novelty)
        is_novel = rejected(score, labels, self.task, share=c.reject_share, threshold=c.reject_threshold)
        kept = (labels < 0) & ~is_novel
        threshold = novelty.where(kept, novelty.min()).max()  # all images above it were rejected
        classes = cluster_rejected(features, logits.argmax(dim=1), is_novel, self.task)
        return Assignment(classes, seen_logits=logits, novelty=novelty, novelty_threshold=threshold)


class Ladder(NamedTuple):
    """All rungs of a batch, the lowest first."""

    latents: list[Tensor]  # R tensors (B, E_r)
    posteriors: list[Gaussian]  # R, q_r
    priors: list[Gaussian]  # R - 1, p_r


def kl_normal(q: Gaussian, p: Gaussian) -> Tensor:
    """(B,): KL(q || p) = 1/2 sum_j [ log(v_p / v_q) + (v_q + (m_q - m_p)^2) / v_p - 1 ], summed over the last axis."""
    ratio = (q.variance + (q.mean - p.mean).square()) / p.variance
    return 0.5 * (p.variance.log() - q.variance.log() + ratio - 1.0).sum(dim=-1)


def product(a: Gaussian, b: Gaussian) -> Gaussian:
    """The normal whose density is proportional to the product of two: precisions add, means are weighted by them."""
    precision = 1.0 / a.variance + 1.0 / b.variance
    return Gaussian((a.mean / a.variance + b.mean / b.variance) / precision, 1.0 / precision)


def class_gaussians(latent: Tensor, labels: Tensor, means: Tensor) -> Gaussian:
    """Mean and variance (S, E) of each class's labeled latents; N(means, 1), as trained, for a class with fewer than two.

    Args:
        latent: (M, E).
        labels: (M,) class of a labeled row, -1 elsewhere.
        means: (S, E), the learned ones.
    """
    mean, variance = means.clone(), torch.ones_like(means)
    for k in range(len(means)):
        own = latent[labels == k]
        if len(own) >= 2:
            mean[k], variance[k] = own.mean(dim=0), own.var(dim=0).clamp(min=SMALLEST_VARIANCE)
    return Gaussian(mean, variance)


def squared_limit(mass: float, dims: int) -> float:
    """Squared length, in standard deviations, of a corner of the central box that holds `mass` of a normal in E dimensions.

    A coordinate lies within q with chance erf(q / sqrt(2)) = mass^(1/E), and the corner at E q^2. Densities below the
    corner's are outside (released code).
    """
    inside = torch.tensor(mass, dtype=torch.float64) ** (1.0 / dims)
    return dims * 2.0 * float(torch.erfinv(inside)) ** 2


def _layer(below: int, above: int) -> nn.Sequential:
    """As in the released code, for rows: batch norm without scale, and a learned slope."""
    return nn.Sequential(nn.Linear(below, above, bias=False), nn.BatchNorm1d(above, affine=False), nn.PReLU())


def _gaussian(outputs: Tensor) -> Gaussian:
    mean, raw = outputs.chunk(2, dim=1)
    return Gaussian(mean, F.softplus(raw) + SMALLEST_VARIANCE)


def _sample(of: Gaussian, noise: Tensor | None) -> Tensor:
    return of.mean if noise is None else of.mean + of.variance.sqrt() * noise
