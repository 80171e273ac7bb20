"""`opencon.encoders.norm_kernel` from its definitions, in float64, with the same names: it can stand in for the kernels."""

import torch

WIDE = 64


def per_channel(t):
    return t.double()[None, :, None, None]


def statistics(x, norm):
    rows = x.double().permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    mean, var = rows.mean(0), rows.var(0, unbiased=False)
    norm.running_mean.lerp_(mean.to(norm.weight.dtype), norm.momentum)
    norm.running_var.lerp_(rows.var(0, unbiased=True).to(norm.weight.dtype), norm.momentum)
    norm.num_batches_tracked += 1
    return torch.stack([mean, (var + norm.eps).rsqrt()]).to(norm.weight.dtype)


def normalized(x, stats):
    return (x.double() - per_channel(stats[0])) * per_channel(stats[1])


def before_relu(x, stats, gain, bias):
    return normalized(x, stats) * per_channel(gain) + per_channel(bias)


def normalize(x, stats, gain, bias, shortcut, *, relu):
    y = before_relu(x, stats, gain, bias)
    if shortcut is not None:
        y = y + shortcut.double()
    return (y.relu() if relu else y).to(x.dtype)


def gradient_sums(grads, x, y, stats, gain, bias, *, relu, keep):
    g = sum(g.double() for g in grads)
    if keep:
        g = torch.where(y > 0, g, 0.0)
    elif relu:
        g = torch.where(before_relu(x, stats, gain, bias) > 0, g, 0.0)
    of_norm = torch.stack([(g * normalized(x, stats)).sum((0, 2, 3)), g.sum((0, 2, 3))]).to(gain.dtype)
    return of_norm, g.to(x.dtype) if keep else grads[0]


def gradient(g, x, stats, gain, bias, of_parameters, *, relu):
    rows = x.numel() // x.shape[1]
    g = g.double()
    if relu:
        g = torch.where(before_relu(x, stats, gain, bias) > 0, g, 0.0)
    of_gain, of_bias = (per_channel(t) / rows for t in of_parameters)
    return (per_channel(gain * stats[1]) * (g - of_bias - normalized(x, stats) * of_gain)).to(x.dtype)
