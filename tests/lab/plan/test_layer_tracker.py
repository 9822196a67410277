"""Which layer an operation belongs to: in forward, in backward, and where it is computed again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weightgrad.lab.plan.model_cost import ModelCost, cost_of

SGD = ("sgd", {"lr": 0.1})


class _Two(nn.Module):
    """Two inputs, neither of which has a gradient; its parts take keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.long_name = nn.Linear(64, 128, bias=False)
        self.b = nn.Linear(32, 128, bias=False)
        self.last = nn.Linear(128, 10, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        joined = self.long_name(input=x) + self.b(input=y)
        scores: Tensor = self.last(input=joined)
        return scores


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = torch.relu(self.inner(hidden))
        return found


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden=hidden)
        return hidden


class _Tied(nn.Module):
    """A body within a model, as libraries of transformers build them, and a head that shares its matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _Body()
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.body.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(tokens=tokens)).transpose(1, 2)
        return scores


def _flops(cost: ModelCost, phase: str) -> dict[str, float]:
    return {layer.name: layer.work[phase].flops for layer in cost.layers if phase in layer.work}


def _cost(build: Any, **more: Any) -> ModelCost:
    return cost_of(build, SGD, **more)


def test_layers_whose_inputs_have_no_gradient_keep_their_own_backward() -> None:
    found = _cost(lambda: (_Two(), {"x": torch.zeros(8, 64), "y": torch.zeros(8, 32)}))
    forward = {"long_name": 2 * 8 * 64 * 128, "b": 2 * 8 * 32 * 128, "last": 2 * 8 * 128 * 10}
    assert {name: flops for name, flops in _flops(found, "forward").items() if flops} == forward
    backward = {**forward, "last": 2 * forward["last"]}  # its input has a gradient
    assert {name: flops for name, flops in _flops(found, "backward").items() if flops} == backward


def test_a_model_within_a_model_is_opened_to_its_list_of_blocks() -> None:
    found = _cost(_Tied, inputs=lambda: torch.zeros(2, 8, dtype=torch.int64))
    names = ["body.embed", *(f"body.blocks.{n}" for n in range(3)), "head", "the rest"]
    assert [layer.name for layer in found.layers] == names
    assert len({layer.work["backward"].flops for layer in found.layers if "blocks" in layer.name}) == 1


def test_a_shared_parameter_is_counted_once_where_it_is_first() -> None:
    found = _cost(_Tied, inputs=lambda: torch.zeros(2, 8, dtype=torch.int64))
    parameters = {layer.name: layer.parameters for layer in found.layers}
    assert (parameters["body.embed"], parameters["head"], parameters["the rest"]) == (50 * 16, 0, 0)
    assert sum(parameters.values()) == found.layout.numel


def test_what_is_computed_again_is_the_blocks_own_backward() -> None:
    def inputs() -> Tensor:
        return torch.zeros(2, 8, dtype=torch.int64)

    plain, again = (_cost(_Tied, inputs=inputs, checkpointing=own) for own in (False, True))
    for name, forward in _flops(plain, "forward").items():
        more = forward if ".blocks." in name else 0
        assert _flops(again, "backward").get(name, 0) == _flops(plain, "backward").get(name, 0) + more
