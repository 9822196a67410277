"""Models and habits that are rare, on the pretend accelerator: more cases for `run_case.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from tests.accelerator import pretend
from tests.accelerator.cases import DEVICE, NUMEL, STEPS, Trial, _Anything, case, raises, same
from tests.accelerator.pretend import ACCELERATOR
from tests.runtime import user_sites
from tests.runtime.user_sites import Meet
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.errors import StrategyError
from weightgrad.runtime.session import Site

Change = Callable[[nn.Module], object]
SHARED = (
    "diloco, every: 4",
    "sparseloco, every: 3, overlap: 2",
    "streaming",
    "weightgrad, every: 4",
    "baseline",
    "dgc",
)
MOVED_AT = 3  # a push of sparseloco is on its way


class Odd(nn.Module):
    """A scalar, an empty matrix, parameters in another order than their elements, and one of another dtype."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.filters = nn.Parameter(torch.randn(4, 3, 3, 3, generator=draw).to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(torch.randn(5, 7, generator=draw).t())
        self.every_other = nn.Parameter(torch.randn(40, generator=draw)[::2])
        self.narrow = nn.Parameter(torch.randn(11, generator=draw).to(dtype))


class HostMomentum(Optimizer):
    """Its momentum is on the host, as in optimizers that spare the device their state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros(parameter.shape))
                momentum.mul_(0.9).add_(pretend.values(parameter.grad))
                parameter.sub_((group["lr"] * momentum).to(parameter.device))


def stays(model: nn.Module) -> None:
    """The model stays on the host."""


def half_moved(model: nn.Module) -> None:
    """Every other parameter goes to the device, as in models that do not fit one."""
    for name in [name for name, _ in model.named_parameters()][::2]:
        setattr(model, name, nn.Parameter(getattr(model, name).detach().to(DEVICE)))


def swapped(change: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    """Parameters stay the objects that they are, and their values change, as by `Module.to`."""
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(change(parameter.detach())))


def _momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(
    strategy: str,
    place: Change,
    *,
    state_on: str = "host",
    make: Callable[[nn.Module], Optimizer] = _momentum,
    later: Change = stays,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Train an odd model at one site, to its end; the global model."""

    def script(site: Site, meet: Meet) -> None:
        model = Odd(dtype)
        place(model)
        _, optimizer = site.prepare(model, make(model), state_on=state_on)
        meet()
        for step in range(STEPS):
            if step == MOVED_AT:
                optimizer.zero_grad()
                later(model)
            draw = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
                parameter.grad = gradient.to(parameter.device)
            optimizer.step()
        site.leave()

    return user_sites.run_sites(strategy, script, "east")[1]


@case
def odd_parameters(state_on: str) -> None:
    """Shapes, orders of memory and dtypes make no difference between a site on the device and one on the host."""
    ACCELERATOR.readers = _Anything()
    for strategy in SHARED:
        same(trained(strategy, pretend.moved, state_on=state_on), trained(strategy, stays))


@case
def parameters_on_device_and_host() -> None:
    """A model may lie on both, unless its state is to be on the device."""
    ACCELERATOR.readers = _Anything()
    for strategy in SHARED:
        same(trained(strategy, half_moved), trained(strategy, stays))
        raises(StrategyError, functools.partial(trained, strategy, half_moved, state_on="device"))


@case
def moved_after_prepare(state_on: str) -> None:
    """Parameters that are moved between two steps, to the device or from it, are shared as if they had stayed."""
    ACCELERATOR.readers = _Anything()
    there = functools.partial(swapped, lambda values: values.to(DEVICE))
    back = functools.partial(swapped, pretend.values)

    def make(model: nn.Module) -> Optimizer:
        return HostMomentum(model.parameters())

    for strategy in ("diloco, every: 4", "sparseloco, every: 3, overlap: 2", "streaming", "baseline"):
        expected = trained(strategy, stays, make=make)
        same(trained(strategy, stays, make=make, later=there, state_on=state_on), expected)
        same(trained(strategy, pretend.moved, make=make, later=back, state_on=state_on), expected)
        same(trained(strategy, pretend.moved, make=make, state_on=state_on), expected)


@case
def dtypes_of_parameters() -> None:
    """Half and double precision work, also when changed later; what cannot be shared is refused with its name."""
    ACCELERATOR.readers = _Anything()
    for dtype in (torch.float16, torch.float64):
        found = trained("diloco, every: 4", pretend.moved, dtype=dtype)
        same(found, trained("diloco, every: 4", stays, dtype=dtype))
    for dtype in (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2):
        with pytest.raises(StrategyError, match=f"narrow is {dtype}"):
            trained("diloco, every: 4", pretend.moved, dtype=dtype)
    halved = functools.partial(swapped, lambda values: values.to(torch.float16))

    def make(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    expected = trained("diloco, every: 4", stays, make=make, later=halved)
    same(trained("diloco, every: 4", pretend.moved, make=make, later=halved), expected)


@case
def pinned_memory_is_bounded() -> None:
    """The state is not pinned: what is pinned are the buffers through which weights cross, six of a piece at most."""
    Trial("diloco, every: 4", DEVICE)
    buffer = -(-4 * NUMEL // 16) * 16  # a piece: all of this model
    assert 0 < ACCELERATOR.pinned_bytes() <= 6 * buffer, ACCELERATOR.pinned_bytes()


@case
def one_pass_only_in_host_memory(strategy: str) -> None:
    """A push goes over memory once where weights are float32 on the host, and nowhere else; the bits are the same."""
    ACCELERATOR.readers = _Anything()
    at_once = UpdateShard._taken_at_once
    taken: set[bool] = set()

    def watched(self: UpdateShard, *args: Any) -> bool:
        found = at_once(self, *args)
        assert not found or self.local.views(self.held) is not None
        taken.add(found)
        return found

    def ended(device: torch.device, **options: Any) -> tuple[Tensor, set[bool]]:
        taken.clear()
        with mock.patch.object(UpdateShard, "_taken_at_once", watched):
            trial = Trial(strategy, device, **options)
        return torch.cat((trial.global_model, trial.model)), set(taken)

    host = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        with mock.patch.object(UpdateShard, "_taken_at_once", return_value=False):
            trial = Trial(strategy, host, dtype=dtype)
        expected = torch.cat((trial.global_model, trial.model))
        here, ways = ended(host, dtype=dtype)
        same(here, expected)
        assert (True in ways) == (dtype == torch.float32), ways
        for place in ("host", "device"):
            there, ways = ended(DEVICE, dtype=dtype, state_on=place)
            same(there, expected)
            assert ways == {False}, (place, dtype, ways)
    with mock.patch.object(UpdateShard, "_taken_at_once", watched):
        taken.clear()
        several = trained(strategy, stays, dtype=torch.float16)  # one parameter is narrow, and the others are not
        assert taken == {False}
    same(trained(strategy, half_moved, dtype=torch.float16), several)
