"""CGDL from its definitions, one image and one latent variable at a time."""

from __future__ import annotations

import math

import numpy as np


def naive_step(weights, features, images, labels, noise, *, dims, side, beta, weight_ladder):
    """The loss of labeled images and its terms.

    weights: name to array, as in the method's state; features: (L, F); images: (L, channels, H, W) in [0, 1]; noise: a
    list of arrays (L, E_r), the lowest rung first.
    """
    L, R = len(features), len(dims)
    h, ups = features, []
    for r in range(R):
        h = _layer(weights, f"up.{r}", h)
        ups.append(_gaussian(_linear(weights, f"up_latent.{r}", h)))

    mean, variance = ups[-1]
    latent = mean + np.sqrt(variance) * noise[-1]
    logits = _linear(weights, "classifier", latent)
    loss_ce = np.mean([math.log(sum(math.exp(v) for v in row)) - row[y] for row, y in zip(logits, labels, strict=True)])
    loss_class = np.mean(
        [naive_kl(mean[i], variance[i], weights["means"][y], np.ones(dims[-1])) for i, y in enumerate(labels)]
    )
    loss_middle = 0.0
    for r in reversed(range(R - 1)):
        p_mean, p_variance = _gaussian(_linear(weights, f"down_latent.{r}", _layer(weights, f"down.{r}", latent)))
        q_mean, q_variance = np.zeros_like(p_mean), np.zeros_like(p_mean)
        for i in range(L):
            for j in range(dims[r]):
                a, b = 1 / ups[r][1][i, j], 1 / p_variance[i, j]  # precisions
                q_variance[i, j] = 1 / (a + b)
                q_mean[i, j] = (a * ups[r][0][i, j] + b * p_mean[i, j]) / (a + b)
        loss_middle += np.mean([naive_kl(q_mean[i], q_variance[i], p_mean[i], p_variance[i]) for i in range(L)])
        latent = q_mean + np.sqrt(q_variance) * noise[r]
    decoded = 1 / (1 + np.exp(-_linear(weights, "decoder.1", _layer(weights, "decoder.0", latent))))
    loss_rec = np.mean([np.sum((naive_pool(x, side) - y) ** 2) for x, y in zip(images, decoded, strict=True)])
    total = loss_ce + weight_ladder * (loss_rec + beta * (loss_class + loss_middle))
    terms = {"loss_ce": loss_ce, "loss_rec": loss_rec, "loss_class": loss_class, "loss_middle": loss_middle}
    return total, terms


def naive_kl(q_mean, q_variance, p_mean, p_variance):
    """KL between normals, one variable at a time: the integral of q log(q / p) in closed form."""
    total = 0.0
    for m, v, n, w in zip(q_mean, q_variance, p_mean, p_variance, strict=True):
        total += math.log(math.sqrt(w) / math.sqrt(v)) + (v + (m - n) ** 2) / (2 * w) - 0.5
    return total


def naive_pool(image, side):
    """(channels, H, W) -> (channels * side * side,): each pixel the mean of its block; H and W are multiples of side."""
    channels, height, width = image.shape
    a, b = height // side, width // side
    return np.array(
        [
            image[c, i * a : (i + 1) * a, j * b : (j + 1) * b].mean()
            for c in range(channels)
            for i in range(side)
            for j in range(side)
        ]
    )


def naive_novelty(latent, error, labels, *, num_seen, sigmas, limit):
    """Both limits of the paper, as one number that is 1 at the limit."""
    classes = []
    for k in range(num_seen):
        own = latent[labels == k]
        classes.append((own.mean(axis=0), own.var(axis=0, ddof=1)))
    known = error[labels >= 0]
    out = []
    for z, e in zip(latent, error, strict=True):
        far = min(sum((z - m) ** 2 / v) for m, v in classes) / limit
        blurred = (e - known.mean()) / (sigmas * known.std())
        out.append(max(far, blurred) if blurred > 1 else far)
    return np.array(out)


def _linear(weights, name, x):
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _layer(weights, name, x):
    """Linear, batch norm by this batch's statistics, PReLU."""
    y = _linear(weights, f"{name}.0", x)
    y = (y - y.mean(axis=0)) / np.sqrt(y.var(axis=0) + 1e-5)
    return np.where(y > 0, y, weights[f"{name}.2.weight"] * y)


def _gaussian(outputs):
    half = outputs.shape[1] // 2
    return outputs[:, :half], np.log1p(np.exp(outputs[:, half:])) + 1e-8
