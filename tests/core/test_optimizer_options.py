"""The numbers among an optimizer's options: read, sent as a list, and put into another optimizer of the same kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from weightgrad.codecs import Fp32
from weightgrad.core.agreed_numbers import AgreedNumbers
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.options import numbers_of, problem_with, put_numbers
from weightgrad.core.optimizers.spec import OptimizerSpec
from weightgrad.wire.messages import Push, Segment


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]


def two_groups() -> Optimizer:
    first, second = parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.05, "weight_decay": 0.0}]
    return AdamW(groups, lr=0.1)


def test_numbers_by_group_and_name() -> None:
    assert numbers_of(two_groups()) == [0.9, 0.999, 1e-8, 1.0, 0.01, 0.9, 0.999, 1e-8, 0.5, 0.0]
    assert numbers_of(SGD(parameters(), lr=0.3, momentum=0.9, nesterov=True)) == [0, 1.0, 0.9, 0]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_they_can_be_put_into_another_one(rate: Any) -> None:
    source, target = two_groups(), two_groups()
    source.param_groups[0]["betas"] = (0.8, 0.999)
    source.param_groups[1]["lr"] = 0.2
    target.param_groups[0]["lr"] = rate
    put_numbers(target, numbers_of(source))
    assert numbers_of(target) == pytest.approx(numbers_of(source))
    assert target.param_groups[0]["betas"] == (0.8, 0.999)
    assert target.param_groups[1]["lr"] == pytest.approx(0.2)
    assert not isinstance(rate, torch.Tensor) or target.param_groups[0]["lr"] is rate


def test_an_optimizer_from_a_description_has_the_same_list() -> None:
    own = two_groups()
    held = [p for group in own.param_groups for p in group["params"]]
    spec = OptimizerSpec.parse(OptimizerSpec.of(own, held).dump())
    built = spec.build(dict(enumerate(parameters())))
    assert numbers_of(built) == numbers_of(own)
    own.param_groups[1]["lr"] = 0.1
    put_numbers(built, numbers_of(own))
    assert built.param_groups[1]["ratio"] == 1.0


def push(site: str, *options: float) -> Push:
    return Push(site=site, round=1, after=0, step=1, seen=0, samples=1, rate=0.1, options=options)


def test_the_median_of_what_sites_state_holds() -> None:
    agreed = AgreedNumbers.options
    assert agreed([push("a", 0.9), push("b", 0.9)]) == (0.9,)
    assert agreed([push("a", 0.9), push("b", 0.8), push("c", 1e9)]) == (0.9,)
    assert agreed([push("a", 0.9), push("b", 0.9), push("c", 1.0, 2.0)]) == (0.9,), "of another length"
    assert agreed([push("a"), push("b"), push("c", 5.0)]) == (), "one alone does not change it"
    assert agreed([]) == ()


KINDS = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
HOSTILE = [-1e308, -1.0, 0.0, 1e-320, 0.5, 1.0, 2.0, 1e308]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_numbers_are_let_through_steps_can_be_taken_with_them(kind: str) -> None:
    parameter = nn.Parameter(torch.ones(12))
    more = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, **more)
    spec, own = OptimizerSpec.of(optimizer, [parameter]), numbers_of(optimizer)
    layout, refused = Layout.of_shapes([("weight", (12,))]), 0
    for place in range(len(own)):
        for number in [*HOSTILE, own[place] * 99, own[place] / 99]:
            numbers = [*own[:place], number, *own[place + 1 :]]
            if problem_with(numbers, spec.numbers(), 0.1, 10.0) is not None:
                refused += 1
                continue
            model = GlobalModel(layout, torch.ones(12), optimizer=spec, rate=lambda step: 0.1)
            for step in range(1, 20):
                gradient = Fp32().encode(torch.ones(12) * (step % 3 - 1), {}, 0)[0]
                model.step_by([Segment(0, gradient)], step, 0.1, numbers)
            assert model.vector.abs().max() < 1e4, (spec.numbers()[place], number)
    assert refused > 2 * len(own)


@pytest.mark.parametrize("numbers", [(0.85, 0.99, 1e-8, 3.0, 0.0), (0.95, 0.9999, 1e-7, 0.0, 0.1)], ids=str)
def test_numbers_that_a_schedule_makes_are_let_through(numbers: tuple[float, ...]) -> None:
    spec = OptimizerSpec.of(torch.optim.AdamW([parameter := nn.Parameter(torch.ones(3))], lr=0.1), [parameter])
    assert problem_with(numbers, spec.numbers(), 0.1, 10.0) is None
    assert problem_with(numbers[:-1], spec.numbers(), 0.1, 10.0) is None, "another count: they are not stepped with"
