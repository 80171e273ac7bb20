"""A ResNet of which every stage learns: batch norm, shortcut and ReLU are one step, forward and backward.

A plain network in training reads and writes its activations more often for its batch norms than for its convolutions:
statistics, normalization, addition, ReLU, the gradients of each, and a sum of two gradients wherever a shortcut leaves. Here
the kernels of `norm_kernel` do all they can in each pass over memory, and the backward pass is written by hand. The formulas
are those of the plain form, with x^ the normalized input and M the rows of a channel:

    y = ReLU(gamma * x^ + beta + shortcut)
    g = dy where y > 0, else 0            (also the gradient of the shortcut)
    dbeta = sum g,   dgamma = sum g * x^
    dx = gamma * rstd * (g - dbeta / M - x^ * dgamma / M)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from opencon.encoders.folding import padded
from opencon.encoders.norm_kernel import WIDE, gradient, gradient_sums, normalize, statistics
from opencon.encoders.units import ResidualUnits, Unit


class Passed(NamedTuple):
    """What the backward pass of a unit needs."""

    x: Tensor
    weight: Tensor  # of the convolution, in the precision that is computed in
    c: Tensor  # convolved
    stats: Tensor  # (2, C)
    gain: Tensor
    bias: Tensor
    y: Tensor


class FusedResNet:
    """The stages of a ResNet. It has no weights of its own: it reads those of the ResNet's modules."""

    def __init__(self, units: ResidualUnits) -> None:
        self.blocks = units.blocks
        # A stem that pools is computed in its plain form.
        self.pooled_stem = None if units.maxpool is None else (*units.stem, units.maxpool)
        self.stem = units.stem if units.maxpool is None else None
        self.units = [] if self.stem is None else [self.stem]  # in the order of the forward pass
        for branch, down in self.blocks:
            self.units += branch if down is None else [down, *branch]

    @property
    def fits(self) -> bool:
        """Whether the kernels can compute this network."""
        norms = [unit.norm for unit in self.units]
        usual = all(n.track_running_stats and n.momentum is not None and n.weight.dtype == torch.float32 for n in norms)
        return usual and all(n.num_features % WIDE == 0 for n in norms)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def __call__(self, x: Tensor) -> Tensor:
        """(B, 3, H, W), normalized -> the output of the last stage."""
        assert self.stem is None or not x.requires_grad, "images get no gradient"
        if self.pooled_stem is not None:
            conv, norm, maxpool = self.pooled_stem
            x = maxpool(F.relu(norm(conv(x)), inplace=True))
        if not torch.is_grad_enabled():
            return self.forward(x, None)
        parameters = [p for unit in self.units for p in (unit.conv.weight, unit.norm.weight, unit.norm.bias)]
        y: Tensor = _Stages.apply(self, x, *parameters)  # type: ignore[no-untyped-call]
        return y

    def forward(self, x: Tensor, tape: list[Passed] | None) -> Tensor:
        """The output of the last unit. Each unit adds to the tape, if there is one, what its backward pass needs."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        exact = [unit.conv.weight.detach() for unit in self.units]
        weights = [torch.empty_like(w, dtype=dtype) for w in exact]
        torch._foreach_copy_(weights, exact)  # one launch for all, where their precision allows it
        x = x.to(dtype)
        if self.stem is not None:
            x, weights[0] = padded(x), padded(weights[0])
        left = iter(weights)

        def run(unit: Unit, x: Tensor, shortcut: Tensor | None = None, *, relu: bool = True) -> Tensor:
            weight, gain, bias = next(left), unit.norm.weight, unit.norm.bias
            c = F.conv2d(x, weight, None, unit.conv.stride, unit.conv.padding)
            stats = statistics(c, unit.norm)
            y = normalize(c, stats, gain, bias, shortcut, relu=relu)
            if tape is not None:
                tape.append(Passed(x, weight, c, stats, gain, bias, y))
            return y

        with torch.autocast(kind, enabled=False):
            if self.stem is not None:
                x = run(self.stem, x)
            for branch, down in self.blocks:
                shortcut = x if down is None else run(down, x, relu=False)
                for unit in branch[:-1]:
                    x = run(unit, x)
                x = run(branch[-1], x, shortcut)
        return x

    def backward(self, tape: list[Passed], g: Tensor) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """The gradients of x (None for images), of the convolutions' weights, and (2, C) of gain and bias of the norms."""
        weights: list[Tensor] = []
        norms: list[Tensor] = []

        def run(unit: Unit, grads: list[Tensor], *, relu: bool = True, keep: bool = False) -> tuple[Tensor, Tensor]:
            """One or two gradients of y -> that of x, and that of the shortcut."""
            x, weight, c, stats, gain, bias, y = tape[-1 - len(norms)]
            of_norm, g = gradient_sums(grads, c, y, stats, gain, bias, relu=relu, keep=keep)
            g_c = gradient(g, c, stats, gain, bias, of_norm, relu=relu and not keep)
            wanted = [unit is not self.stem, True, False]
            g_x, g_weight, _ = torch.ops.aten.convolution_backward(
                g_c, x, weight, None, unit.conv.stride, unit.conv.padding, (1, 1), False, (0, 0), 1, wanted
            )
            weights.insert(0, g_weight)
            norms.insert(0, of_norm)
            return g_x, g

        grads = [g.contiguous(memory_format=torch.channels_last)]
        for branch, down in reversed(self.blocks):
            g_x, g_shortcut = run(branch[-1], grads, keep=True)
            for unit in reversed(branch[:-1]):
                g_x, _ = run(unit, [g_x])
            if down is not None:
                g_shortcut, _ = run(down, [g_shortcut], relu=False)
            grads = [g_x, g_shortcut]
        if self.stem is not None:
            run(self.stem, grads, keep=True)
            of_image = weights[0][:, : self.stem.conv.in_channels]  # not of the padding
            weights[0] = of_image.contiguous(memory_format=torch.channels_last)
            return None, weights, norms
        return grads[0] + grads[1], weights, norms


class _Stages(torch.autograd.Function):
    """A `FusedResNet` for autograd; its parameters are weight, gain and bias of each unit."""

    @staticmethod
    def forward(ctx: Any, network: FusedResNet, x: Tensor, *parameters: Tensor) -> Tensor:
        tape: list[Passed] = []
        y = network.forward(x, tape)
        ctx.network, ctx.dtype = network, parameters[0].dtype
        ctx.save_for_backward(*(t for passed in tape for t in passed))
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, size = ctx.saved_tensors, len(Passed._fields)
        tape = [Passed(*saved[i : i + size]) for i in range(0, len(saved), size)]
        of_x, reduced, of_norms = ctx.network.backward(tape, g)
        of_weights = [torch.empty_like(w, dtype=ctx.dtype) for w in reduced]
        torch._foreach_copy_(of_weights, reduced)
        return None, of_x, *(g for w, (gain, bias) in zip(of_weights, of_norms, strict=True) for g in (w, gain, bias))
