"""Models as people write them: each can be planned, or is refused with words that say what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.errors import PlanError
from weightgrad.lab.plan.made_model import Built
from weightgrad.lab.plan.model_cost import ModelCost, cost_of

SGD = ("sgd", {"lr": 0.1})
GLOBAL = torch.ones(8)


def cost(build: Callable[[], Any], **given: Any) -> ModelCost:
    return cost_of(build, SGD, **given)


class Answer(nn.Module):
    """One layer, and what its `forward` makes of its output."""

    def __init__(self, answer: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.layer(x))


class Masked(nn.Module):
    """Tensors that are no parameters and no buffers, where people keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self._mask = torch.tril(torch.ones(8, 8))
        self.tables: Any = [torch.ones(8), {"shift": torch.ones(8)}]

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) @ self._mask * self.tables[0] * GLOBAL
        found: Tensor = y + self.tables[1]["shift"].to(x.device) + torch.arange(8, device=x.device)
        return found


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.last = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.last.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.last(self.tokens(ids))
        return {"scores": scores, "loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


class Experts(nn.Module):
    """A mixture in which every expert sees every sample."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(8, experts)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        return torch.stack([shares[:, [n]] * expert(x) for n, expert in enumerate(self.experts)]).sum(0)


class Own(nn.Module):
    """A model that needs no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10))

    def forward(self) -> Tensor:
        return self.weight.square().sum()


class Attention(nn.Module):
    """Layers that are copies of one another."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def reads_values() -> Built:
    model = nn.Linear(8, 8)
    assert model.weight.abs().sum().item() > 0
    return model, torch.zeros(2, 8)


def ids() -> Tensor:
    return torch.zeros(4, 6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("build", "parameters", "batch"),
    [
        (lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(torch.bfloat16),
                  torch.zeros(2, 3, 8, 8).bfloat16()), 120, 2),
        (lambda: (nn.Linear(8, 8).half(), torch.zeros(3, 8).half()), 72, 3),
        (lambda: (nn.Linear(8, 8).cuda(), torch.zeros(2, 8, device="cuda")), 72, 2),
        (lambda: (nn.Linear(8, 8).to("cuda", torch.bfloat16), torch.zeros(2, 8).to("cuda").bfloat16()), 72, 2),
        (lambda: (nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(2)), torch.zeros(2, 4)), 58, 2),
        (lambda: (Attention(), torch.zeros(2, 5, 16)), 2 * 2224, 2),
        (lambda: (nn.Transformer(16, 2, 1, 1, 32, batch_first=True), (torch.zeros(3, 5, 16), torch.zeros(3, 6, 16))),
         5632, 3),
        (lambda: (nn.LSTM(8, 16, batch_first=True), torch.zeros(2, 5, 8)), 1664, 2),
        (lambda: (Tied(), (ids(), ids())), 800, 4),
        (lambda: (Tied(), {"ids": ids(), "labels": ids()}), 800, 4),
        (lambda: (Experts(), torch.zeros(5, 8)), 36 + 4 * 72, 5),
        (lambda: (Masked(), torch.zeros(2, 8)), 72, 2),
        (lambda: (nn.Embedding(20, 4, sparse=True), ids()), 80, 4),
        (lambda: (Answer(lambda y: {"scores": y}), torch.zeros(2, 8)), 72, 2),
        (lambda: (Answer(lambda y: (y.argmax(-1), y)), torch.zeros(2, 8)), 72, 2),
        (reads_values, 72, 2),
        (Own, 10, 1),
    ],
)  # fmt: skip
def test_models_as_people_write_them(build: Callable[[], Built], parameters: int, batch: int) -> None:
    found = cost(build)
    assert (found.layout.numel, found.batch) == (parameters, batch)
    assert found.peak_bytes >= found.parameter_bytes + found.gradient_bytes


def test_a_recurrent_layer_computes_something() -> None:
    found = cost(lambda: (nn.LSTM(8, 16, bias=False, batch_first=True), torch.zeros(2, 5, 8)))
    assert found.work("forward").flops == 2 * (2 * 5) * (8 + 16) * 64


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_on_the_meta_device_costs_what_one_with_values_does(dtype: torch.dtype | None) -> None:
    def with_values() -> Built:
        model = nn.LSTM(8, 16, 2)
        assert next(model.parameters())[0, 0].item() is not None
        return model, torch.zeros(5, 2, 8)

    on_meta = cost(lambda: (nn.LSTM(8, 16, 2), torch.zeros(5, 2, 8)), dtype=dtype)
    assert cost(with_values, dtype=dtype) == on_meta
    assert on_meta.parameter_bytes == on_meta.layout.numel * (4 if dtype is None else 2)


def test_real_steps_have_the_type_that_was_asked_for() -> None:
    found = cost(lambda: (nn.LSTM(8, 16), torch.zeros(5, 2, 8)), dtype=torch.bfloat16, real=True)
    assert not found.fp32
    assert found.parameter_bytes == 2 * found.layout.numel


def test_samples_of_a_text_have_tokens() -> None:
    assert cost(lambda: (Tied(), (ids(), ids()))).tokens == 6
    assert cost(lambda: (nn.Linear(8, 8), torch.zeros(2, 8))).tokens is None
    assert cost(lambda: (Answer(), torch.zeros(2, 8)), batch=7).batch == 7


def numpy_inside() -> Built:
    return Answer(lambda y: y * float(y.detach().numpy().sum())), torch.zeros(2, 8)


def more_than_there_is() -> Built:
    size = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024 // 4
    model = nn.Linear(size, 1, bias=False)
    assert model.weight[0, 0].item() is not None  # so that it is made with values
    return model, torch.zeros(1, size)


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (lambda: (nn.Linear(8, 8), torch.zeros(2, 8), torch.zeros(2)), "returned 3 values; wanted"),
        (lambda: [nn.Linear(8, 8), torch.zeros(2, 8)], "returned list; wanted"),
        (lambda: nn.Linear(8, 8), "return \\(model, batch\\), or give --input"),
        (lambda: (nn.Linear(8, 8).requires_grad_(False), torch.zeros(2, 8)), "no parameter that is trained"),
        (
            lambda: (Answer(lambda y: y.argmax(-1)), torch.zeros(2, 8)),
            "a tensor of int64, with nothing that has a grad",
        ),
        (lambda: (Answer(lambda y: None), torch.zeros(2, 8)), "returned NoneType, with nothing"),
        (lambda: (nn.Linear(8, 8), torch.zeros(2, 9)), "give --measure.*failed: RuntimeError"),
        (numpy_inside, "give --measure.*numpy"),
        (more_than_there_is, "meta device, which takes no memory"),
    ],
)
def test_what_cannot_be_planned_says_what_to_do(build: Callable[[], Any], wanted: str) -> None:
    with pytest.raises(PlanError, match=wanted):
        cost(build)
