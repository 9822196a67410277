"""A small GPT over characters: learnt positions, blocks with the norm first, GELU (Radford et al., 2019).

Weights start as GPT-2's: N(0, 0.02²), the layers that add to the residual stream divided by √(2 · layers).
No dropout, no biases outside the norms, embedding and output not tied: the last layer is the last layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.errors import WeightGradError


class Block(nn.Module):
    """Attention to what came before, then two linear layers; each adds to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) to the same."""
        n, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(n, length, width))
        added: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return added


class Gpt(nn.Module):
    """Characters in, scores of each next character out."""

    def __init__(
        self,
        *,
        classes: int,
        channels: int = 1,
        size: int = 128,
        context: int | None = None,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        if width % heads:
            raise WeightGradError(f"gpt: width {width} is not a multiple of heads {heads}")
        self.context = size if context is None else context
        self.tokens = nn.Embedding(classes, width)
        self.places = nn.Embedding(self.context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, classes, bias=False)
        for name, tensor in self.named_parameters():
            if tensor.dim() > 1:
                adds = name.endswith(("project.weight", "narrow.weight"))
                nn.init.normal_(tensor, std=0.02 / (2 * layers) ** 0.5 if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (n, classes, length) of tokens (n, length): the shape `cross_entropy` and argmax(1) want."""
        length = tokens.shape[1]
        if length > self.context:
            raise WeightGradError(f"gpt reads {self.context} characters at a time, not {length}; set its context")
        x = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        scores: Tensor = self.last(self.norm(self.blocks(x)))
        return scores.transpose(1, 2)
