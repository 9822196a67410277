"""Large models on the meta device, to be planned, in the root of the repository:

weightgrad plan --model benchmarks.plan_models:seventy --sites virginia=64xH100,tokyo=64xA100 \\
    --link "ohio-virginia=1Gbit/s,11ms ohio-tokyo=500Mbit/s,80ms" --input 4096:int64 --sharding fsdp2 \\
    --dtype bfloat16 --checkpointing --strategies baseline,diloco,auto
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

HEAD = 128


class Block(nn.Module):
    """Attention with fewer heads of keys than of queries, and a gated layer."""

    def __init__(self, width: int, keys: int, inner: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.queries, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.keys, self.values = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """States (batch, length, width) after the block."""
        y = self.before(x)
        query, key, value = (
            made(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for made in (self.queries, self.keys, self.values)
        )
        grouped = query.shape[1] != key.shape[1]
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        y = self.between(x)
        found: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return found


class Llama(nn.Module):
    """A decoder like Llama 2, without its rotations, which have no parameters."""

    def __init__(self, width: int, layers: int, keys: int, inner: int, tokens: int = 32000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, keys, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (batch, tokens, length)."""
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return scores


def seven() -> nn.Module:
    """7 billion parameters."""
    with torch.device("meta"):
        return Llama(4096, 32, 4096, 11008)


def seventy() -> nn.Module:
    """69 billion parameters."""
    with torch.device("meta"):
        return Llama(8192, 80, 1024, 28672)
