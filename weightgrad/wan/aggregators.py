"""What the global server makes of the sites' pushes: one vector that moves every base.

Streaming where the mathematics allows: a push is decoded into one accumulator and forgotten, so
memory does not grow with the number of sites. Median and trimmed mean must see all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from weightgrad.errors import StrategyError
from weightgrad.kernels import fixed
from weightgrad.wan.messages import Part
from weightgrad.wan.parts import check, part
from weightgrad.wan.selectors import Stretch


class Accumulator:
    """The pushes of one round, adding up; in `room`, if there is some: fresh memory costs more than the adding."""

    def __init__(self, numel: int, *, room: Tensor | None = None, counts: bool = False, keep_all: bool = False) -> None:
        self.total = torch.zeros(numel) if room is None else room.zero_()
        self.weight = 0.0  # of all that took part, senders of nothing too
        self.senders: list[str] = []
        self.touched: dict[int, tuple[int, ...]] = {}  # start -> shape of the stretches sent
        self.counts = torch.zeros(numel) if counts else None
        self.each: list[Tensor] | None = [] if keep_all else None

    def add(self, sender: str, parts: tuple[Part, ...], weight: float = 1.0) -> None:
        """One push: decoded, weighted, added."""
        self.weight += weight
        self.senders.append(sender)
        for one in parts:
            known = self.touched.get(one.start, ())
            if not known or math.prod(known) < one.payload.numel:
                self.touched[one.start] = one.payload.shape
        if not parts and self.each is None:
            return
        if weight == 1.0 and self.counts is None and self.each is None:
            for one in parts:
                one.into(self.total, fixed.ADD)
            return
        own = torch.zeros_like(self.total)
        for one in parts:
            one.into(own, fixed.STORE)
        if self.each is not None:
            self.each.append(own)
        if self.counts is not None:
            self.counts += (own != 0) * weight
        self.total.add_(own, alpha=weight)

    def stretches(self) -> list[Stretch]:
        """What was sent, in order; where pushes overlap unevenly, as one flat stretch."""
        found: list[Stretch] = []
        for start in sorted(self.touched):
            stretch = Stretch(start, self.touched[start])
            if found and stretch.start < found[-1].stop:
                stop = max(stretch.stop, found[-1].stop)
                found[-1] = Stretch(found[-1].start, (stop - found[-1].start,))
            else:
                found.append(stretch)
        return found


State = dict[str, Tensor]


class Aggregator(ABC):
    """Turns the pushes of a round into what moves the base."""

    word: ClassVar[str]

    def open(self, numel: int, room: Tensor | None = None) -> Accumulator:
        """An empty round."""
        return Accumulator(numel, room=room)

    @abstractmethod
    def close(self, round_: Accumulator, state: State) -> Tensor:
        """The vector; `state` is the aggregator's own, changed in place."""


@part("aggregator", "mean")
@dataclass(frozen=True)
class Mean(Aggregator):
    """Mean over all sites of the round; one that sent nothing counts as zero."""

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """Total over weight."""
        del state
        return round_.total.div_(round_.weight) if round_.weight > 0 else round_.total


@part("aggregator", "sender_mean")
@dataclass(frozen=True)
class SenderMean(Aggregator):
    """For each entry the mean over the sites that sent it (SparseLoCo)."""

    def open(self, numel: int, room: Tensor | None = None) -> Accumulator:
        """With a count for each entry."""
        return Accumulator(numel, room=room, counts=True)

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """Total over count."""
        del state
        assert round_.counts is not None
        return round_.total.div_(round_.counts.masked_fill_(round_.counts == 0, 1.0))


@part("aggregator", "sum")
@dataclass(frozen=True)
class Sum(Aggregator):
    """The sum: every site's update counts in full (Gaia)."""

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """Total."""
        del state
        return round_.total


@part("aggregator", "trimmed_mean")
@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """Mean of each coordinate without its `trim` smallest and largest (at least one value stays)."""

    trim: int = 1

    def __post_init__(self) -> None:
        check("trimmed_mean", "trim", self.trim, 0, 10**6, whole=True)

    def open(self, numel: int, room: Tensor | None = None) -> Accumulator:
        """Keeps every push."""
        return Accumulator(numel, room=room, keep_all=True)

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """Sort, cut, mean."""
        del state
        if not round_.each:
            return round_.total
        trim = min(self.trim, (len(round_.each) - 1) // 2)
        ordered = torch.stack(round_.each).sort(0).values
        return ordered[trim : len(round_.each) - trim].mean(0)


@part("aggregator", "median")
@dataclass(frozen=True)
class Median(Aggregator):
    """Median of each coordinate: a minority of lying sites cannot move it far."""

    def open(self, numel: int, room: Tensor | None = None) -> Accumulator:
        """Keeps every push."""
        return Accumulator(numel, room=room, keep_all=True)

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """What is left when all but the middle one or two are trimmed."""
        return TrimmedMean(trim=len(round_.senders)).close(round_, state)


@part("aggregator", "outer")
@dataclass(frozen=True)
class Outer(Aggregator):
    """An optimizer on the mean update: rule "nesterov", "sgd" or "adam" (DiLoCo)."""

    rule: str = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.rule not in ("nesterov", "sgd", "adam"):
            raise StrategyError(f'outer: rule = {self.rule!r}; it is "nesterov", "sgd" or "adam"')
        check("outer", "lr", self.lr, 0, 1e6)
        check("outer", "momentum", self.momentum, 0, 1)
        check("outer", "beta2", self.beta2, 0, 1)
        check("outer", "eps", self.eps, 0, 1)
        if self.rule == "adam" and (self.momentum == 1 or self.beta2 == 1 or self.eps == 0):
            raise StrategyError("outer: adam would divide by zero; momentum and beta2 must be below 1, eps above 0")

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """The outer step; memory of stretches that were not sent stays as it is."""
        mean = Mean().close(round_, {})
        memory = self._memory(state, mean)
        for stretch in round_.stretches():
            here = slice(stretch.start, stretch.stop)
            self._step(mean[here], {name: tensor[here] for name, tensor in memory.items()})
        return mean

    def _memory(self, state: State, like: Tensor) -> State:
        names = {"sgd": (), "nesterov": ("velocity",), "adam": ("first", "second", "count")}[self.rule]
        return {name: state.setdefault(name, torch.zeros_like(like)) for name in names}

    def _step(self, mean: Tensor, memory: State) -> None:
        if self.rule == "nesterov":
            velocity = memory["velocity"].mul_(self.momentum).add_(mean)
            mean.add_(velocity, alpha=self.momentum)
        elif self.rule == "adam":
            first = memory["first"].mul_(self.momentum).add_(mean, alpha=1 - self.momentum)
            second = memory["second"].mul_(self.beta2).addcmul_(mean, mean, value=1 - self.beta2)
            count = memory["count"].add_(1)
            scale = (second / (1 - self.beta2**count)).sqrt_().add_(self.eps)
            mean.copy_(first / (1 - self.momentum**count) / scale)
        mean.mul_(self.lr)
