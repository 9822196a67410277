"""How the global server aggregates the sites' pushes into one vector that moves the global model.

Pushes stream where the mathematics allows: a push is decoded into one accumulator and forgotten, so memory does not
grow with the number of sites. Median and trimmed mean must see all pushes at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from weightgrad.core.parts import check, part
from weightgrad.core.selectors import Interval
from weightgrad.errors import StrategyError
from weightgrad.kernels import fixed
from weightgrad.wire.messages import Segment


class Accumulator:
    """The weighted sum of one round's pushes.

    Memory, in vectors of the model's size: `total`; `counts` if asked for; with `keep_all` one for each push.

    Args:
        numel: the elements of the model.
        reuse: a vector to sum in; fresh memory costs more time than the sum itself.
        counts: whether to count the senders of each entry.
        keep_all: whether to keep every push decoded.
    """

    def __init__(
        self, numel: int, *, reuse: Tensor | None = None, counts: bool = False, keep_all: bool = False
    ) -> None:
        self.total = torch.zeros(numel) if reuse is None else reuse.zero_()
        self.weight = 0.0  # of all senders, also those of empty pushes
        self.senders: list[str] = []
        self.touched: dict[int, tuple[int, ...]] = {}  # start -> shape of the intervals that were sent
        self.counts = torch.zeros(numel) if counts else None
        self.each: list[Tensor] | None = [] if keep_all else None

    def add(self, sender: str, segments: tuple[Segment, ...], weight: float = 1.0) -> None:
        """Decode one push and add it.

        Args:
            sender: the site.
            segments: what it pushed.
            weight: its weight in the sum.
        """
        self.weight += weight
        self.senders.append(sender)
        for segment in segments:
            known = self.touched.get(segment.start, ())
            if not known or math.prod(known) < segment.payload.numel:
                self.touched[segment.start] = segment.payload.shape
        if not segments and self.each is None:
            return
        if weight == 1.0 and self.counts is None and self.each is None:
            for segment in segments:
                segment.into(self.total, fixed.ADD)
            return
        decoded = torch.zeros_like(self.total)
        for segment in segments:
            segment.into(decoded, fixed.STORE)
        if self.each is not None:
            self.each.append(decoded)
        if self.counts is not None:
            self.counts += (decoded != 0) * weight
        self.total.add_(decoded, alpha=weight)

    def intervals(self) -> list[Interval]:
        """The intervals that were sent, in order. Where pushes overlap unevenly, their union is one flat interval."""
        found: list[Interval] = []
        for start in sorted(self.touched):
            interval = Interval(start, self.touched[start])
            if found and interval.start < found[-1].stop:
                stop = max(interval.stop, found[-1].stop)
                found[-1] = Interval(found[-1].start, (stop - found[-1].start,))
            else:
                found.append(interval)
        return found


State = dict[str, Tensor]


class Aggregator(ABC):
    """Turns the pushes of a round into the vector that moves the global model."""

    word: ClassVar[str]

    def open(self, numel: int, reuse: Tensor | None = None) -> Accumulator:
        """The accumulator of a round without pushes.

        Args:
            numel: the elements of the model.
            reuse: a vector to sum in, or None to allocate one.
        """
        return Accumulator(numel, reuse=reuse)

    @abstractmethod
    def close(self, round_: Accumulator, state: State) -> Tensor:
        """Aggregate a round.

        Args:
            round_: the accumulated pushes; their memory is reused.
            state: the aggregator's own memory from round to round, changed in place.

        Returns:
            The vector that moves the global model.
        """


@part("aggregator", "mean")
@dataclass(frozen=True)
class Mean(Aggregator):
    """Mean over all sites of the round; a site that sent nothing counts as zero."""

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """Divide the sum by the weights."""
        del state
        return round_.total.div_(round_.weight) if round_.weight > 0 else round_.total


@part("aggregator", "sender_mean")
@dataclass(frozen=True)
class SenderMean(Aggregator):
    """For each entry, the mean over the sites that sent it (SparseLoCo)."""

    def open(self, numel: int, reuse: Tensor | None = None) -> Accumulator:
        """An accumulator that counts the senders of each entry."""
        return Accumulator(numel, reuse=reuse, counts=True)

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """Divide each entry of the sum by its count."""
        del state
        assert round_.counts is not None
        return round_.total.div_(round_.counts.masked_fill_(round_.counts == 0, 1.0))


@part("aggregator", "sum")
@dataclass(frozen=True)
class Sum(Aggregator):
    """Sum: every site's update counts in full (Gaia)."""

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """The sum as it is."""
        del state
        return round_.total


@part("aggregator", "trimmed_mean")
@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """Mean of each coordinate without its `trim` smallest and largest values; at least one value stays."""

    trim: int = 1

    def __post_init__(self) -> None:
        check("trimmed_mean", "trim", self.trim, 0, 10**6, whole=True)

    def open(self, numel: int, reuse: Tensor | None = None) -> Accumulator:
        """An accumulator that keeps every push."""
        return Accumulator(numel, reuse=reuse, keep_all=True)

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """Sort each coordinate, cut both ends, and take the mean of the rest."""
        del state
        if not round_.each:
            return round_.total
        trim = min(self.trim, (len(round_.each) - 1) // 2)
        ordered = torch.stack(round_.each).sort(0).values
        return ordered[trim : len(round_.each) - trim].mean(0)


@part("aggregator", "median")
@dataclass(frozen=True)
class Median(Aggregator):
    """Median of each coordinate: a minority of faulty sites cannot move it far."""

    def open(self, numel: int, reuse: Tensor | None = None) -> Accumulator:
        """An accumulator that keeps every push."""
        return Accumulator(numel, reuse=reuse, keep_all=True)

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """The mean of the middle one or two values of each coordinate."""
        return TrimmedMean(trim=len(round_.senders)).close(round_, state)


@part("aggregator", "outer")
@dataclass(frozen=True)
class Outer(Aggregator):
    """An outer optimizer on the mean update (DiLoCo): rule "nesterov", "sgd" or "adam"."""

    rule: str = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.rule not in ("nesterov", "sgd", "adam"):
            raise StrategyError(f'outer: rule = {self.rule!r}; wanted "nesterov", "sgd" or "adam"')
        check("outer", "lr", self.lr, 0, 1e6)
        check("outer", "momentum", self.momentum, 0, 1)
        check("outer", "beta2", self.beta2, 0, 1)
        check("outer", "eps", self.eps, 0, 1)
        if self.rule == "adam" and (self.momentum == 1 or self.beta2 == 1 or self.eps == 0):
            raise StrategyError("outer: adam would divide by zero; momentum and beta2 must be below 1, eps above 0")

    def close(self, round_: Accumulator, state: State) -> Tensor:
        """One step of the outer optimizer; its memory of intervals that were not sent stays as it is."""
        mean = Mean().close(round_, {})
        memory = self._memory(state, mean)
        for interval in round_.intervals():
            here = slice(interval.start, interval.stop)
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
