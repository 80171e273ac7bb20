"""Vision Transformers (Dosovitskiy et al. 2021, arXiv:2010.11929), as DINO (arXiv:2104.14294) and timm compute them:
pre-norm, query/key/value with bias, exact GELU, and the class token after the final norm as the feature.

Letters: B images, T tokens (the class token and one per patch), D width of the network (= F features).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.encoders.base import Encoder, require_color
from opencon.errors import DataError, require

PATCH = 16  # pixels, the "16" of ViT-S/16
MLP_RATIO = 4  # paper, table 1
NORM_EPS = 1e-6  # DINO and timm; torch's own default is 1e-5
INIT_STD = 0.02  # DINO; it cuts the normal distribution off at 100 deviations, which is no cut


def resize_positions(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Position embedding (1, 1 + h*h, D) of a square grid, resized (bicubic) to another grid.

    The class token's embedding stays. As in timm, antialiased when the grid shrinks.
    """
    side = math.isqrt(positions.shape[1] - 1)
    assert side * side == positions.shape[1] - 1, "positions must be a class token and a square grid"
    if (side, side) == grid:
        return positions
    of_class, of_grid = positions[:, :1], positions[:, 1:]
    square = of_grid.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)  # (1, D, h, h)
    resized = F.interpolate(square, size=grid, mode="bicubic", antialias=True)
    return torch.cat([of_class, resized.flatten(2).transpose(1, 2).to(positions.dtype)], dim=1)


class Embed(nn.Module):
    """Patches to tokens, the class token in front, positions added."""

    def __init__(self, width: int, image_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + (image_size // PATCH) ** 2, width))
        nn.init.normal_(self.cls_token, std=INIT_STD)
        nn.init.normal_(self.pos_embed, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, T, D). A size other than the one built for gets interpolated positions."""
        height, width = x.shape[-2:]
        if height % PATCH or width % PATCH:
            raise DataError(f"a ViT takes images whose sides are multiples of {PATCH} pixels, got {height} x {width}.")
        patches = self.proj(x).flatten(2).transpose(1, 2)  # (B, T - 1, D)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], dim=1)
        return tokens + resize_positions(self.pos_embed, (height // PATCH, width // PATCH))


class Attention(nn.Module):
    """Multi-head self-attention: softmax(q k^T / sqrt(D / heads)) v, per head."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, T, D / heads)
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Linear, GELU, Linear, on every token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.fc2 = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class TransformerBlock(nn.Module):
    """Attention, then an MLP, each on a normed copy and added back."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(Encoder):
    """Stages "embed", "block0", ..., "norm"; with `train_from = "last_block"` the last block and the norm learn."""

    channels_last = False

    def __init__(self, *, width: int, depth: int, num_heads: int, image_size: int) -> None:
        super().__init__()
        require(
            image_size >= PATCH and image_size % PATCH == 0,
            f"a ViT takes images whose side is a multiple of {PATCH} pixels, but these have {image_size}. "
            f"Use {max(1, round(image_size / PATCH)) * PATCH}.",
        )
        self.in_channels = 3
        self.num_features = width
        blocks = tuple(f"block{i}" for i in range(depth))
        self.stages = ("embed", *blocks, "norm")
        self.embed = Embed(width, image_size)
        for name in blocks:
            self.add_module(name, TransformerBlock(width, num_heads))
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
                nn.init.zeros_(module.bias)

    def named_starts(self) -> dict[str, int]:
        """The stages, and "last_block"."""
        return {**super().named_starts(), "last_block": len(self.stages) - 2}

    def pool(self, x: Tensor) -> Tensor:
        """The class token."""
        return x[:, 0]  # (B, F)


def vit_s16(in_channels: int, image_size: int) -> VisionTransformer:
    """ViT-S/16: 384 wide, 12 blocks, 6 heads."""
    require_color("vit_s16", in_channels)
    return VisionTransformer(width=384, depth=12, num_heads=6, image_size=image_size)


def vit_b16(in_channels: int, image_size: int) -> VisionTransformer:
    """ViT-B/16: 768 wide, 12 blocks, 12 heads."""
    require_color("vit_b16", in_channels)
    return VisionTransformer(width=768, depth=12, num_heads=12, image_size=image_size)
