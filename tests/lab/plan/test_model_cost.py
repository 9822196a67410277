"""What a step costs: counted on fake tensors as on real ones, and without memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightgrad.lab import models
from weightgrad.lab.plan.devices import DEVICES
from weightgrad.lab.plan.live_bytes import LiveBytes
from weightgrad.lab.plan.model_cost import ModelCost, cost_of

SGD = ("sgd", {"lr": 0.1, "momentum": 0.9})
ADAMW = ("adamw", {"lr": 0.1})


def _gpt(width: int, layers: int, *, context: int = 64, real: bool = False, checkpointing: bool = False) -> ModelCost:
    def build() -> nn.Module:
        options = {"width": width, "layers": layers, "heads": 4, "context": context}
        return models.build("gpt", classes=96, channels=1, size=context, seed=0, **options)

    def inputs() -> torch.Tensor:
        return torch.zeros(2, context, dtype=torch.int64)

    return cost_of(build, ADAMW, inputs=inputs, batch=2, real=real, checkpointing=checkpointing)


def test_fake_tensors_count_as_real_ones_do() -> None:
    fake, real = _gpt(32, 2), _gpt(32, 2, real=True)
    assert fake.peak_bytes == real.peak_bytes
    assert fake.activation_bytes == real.activation_bytes
    assert fake.work("forward").flops == real.work("forward").flops


def test_the_parts_of_memory_are_those_of_a_dense_layer() -> None:
    found = cost_of(lambda: nn.Linear(1000, 500, bias=False), SGD, inputs=lambda: torch.zeros(8, 1000), batch=8)
    assert found.parameter_bytes == found.gradient_bytes == found.optimizer_bytes == 4 * 500_000
    assert found.work("forward").flops == 2 * 8 * 1000 * 500
    assert found.work("backward").flops == 2 * 8 * 1000 * 500  # the input needs no gradient
    assert 3 * 4 * 500_000 <= found.peak_bytes < 3.2 * 4 * 500_000


def test_billions_of_parameters_need_no_memory() -> None:
    found = _gpt(8192, 2)
    assert found.layout.numel > 1.6e9
    assert found.peak_bytes > 16 * found.layout.numel  # weights, gradients and two moments, 4 bytes each
    times = found.seconds(DEVICES["H100"])
    assert times["backward"] > times["forward"] > 0


def test_checkpointing_holds_less_and_computes_more() -> None:
    plain, again = _gpt(64, 6), _gpt(64, 6, checkpointing=True)
    assert again.activation_bytes < 0.5 * plain.activation_bytes
    assert again.work("backward").flops > plain.work("backward").flops


def test_checkpointing_holds_one_block_at_a_time() -> None:
    """A block more has its parameters, gradients and moments more, and its input; what is computed again is freed."""
    few, many = (_gpt(64, layers, checkpointing=True) for layers in (4, 12))

    def kept(own: ModelCost) -> int:
        return own.parameter_bytes + own.gradient_bytes + own.optimizer_bytes

    inputs = 8 * 4 * 2 * 64 * 64  # of eight blocks: two samples of 64 tokens
    assert many.peak_bytes - few.peak_bytes <= kept(many) - kept(few) + 1.1 * inputs


def test_layers_add_up() -> None:
    found = _gpt(32, 3)
    assert sum(layer.parameters for layer in found.layers) == found.layout.numel
    assert {"tokens", "blocks.0", "blocks.2", "last"} <= {layer.name for layer in found.layers}
    block = [layer for layer in found.layers if layer.name.startswith("blocks.")]
    assert len({layer.work["forward"].flops for layer in block}) == 1


def test_live_bytes_follow_what_is_freed() -> None:
    with LiveBytes() as live:
        a = torch.ones(1000)
        b = a + 1
        del a
        c = b.view(10, 100)
        assert live.now == 4000
        del b, c
    assert live.now == 0
    assert live.peak == 8000


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.last = nn.Linear(16, 50, bias=False)
        self.last.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.tokens(x)).transpose(1, 2)
        return scores


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_of_the_meta_device_counts_as_any_other(dtype: torch.dtype | None) -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return _Tied()

    def inputs() -> torch.Tensor:
        return torch.zeros(2, 8, dtype=torch.int64)

    found, usual = (cost_of(build, ADAMW, inputs=inputs, batch=2, dtype=dtype) for build in (on_meta, _Tied))
    assert found == usual
    assert found.layout.numel == 800  # the shared matrix once
    assert found.parameter_bytes == 800 * (4 if dtype is None else 2)
