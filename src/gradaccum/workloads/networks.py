"""The small networks that the built-in workloads train."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers of the given widths with GELU between them (smooth, so that no rounding can flip a unit)."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def cnn(channels: int, classes: int) -> nn.Sequential:
    """Three convolutions over 8x8 images and a linear layer; few parameters, large activations.

    Shapes: pixels `[samples, 64]` to logits `[samples, classes]`.
    """
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, channels, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * channels, classes),
    )


class ByteTransformer(nn.Module):
    """Decoder-only transformer over bytes, pre-norm, with tied input and output weights.

    Shapes: bytes `[samples, length]`, integers below 256, to logits `[samples, length, 256]`; length <= context.
    """

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.blocks(self.bytes(inputs) + self.positions(places))
        return F.linear(self.norm(hidden), self.bytes.weight)


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_forward = nn.LayerNorm(width)
        self.forward_layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attend(self.norm_attention(hidden))
        fed: Tensor = self.forward_layers(self.norm_forward(hidden))
        return hidden + fed

    def attend(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(hidden).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out
