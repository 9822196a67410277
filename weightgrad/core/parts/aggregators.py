"""How the global server aggregates the sites' pushes into what moves the global model.

A round is aggregated piece by piece (`core/pieces.py`): the pushes of all sites are decoded for one piece, combined and
forgotten before the next piece. So memory does not grow with the number of sites beyond their encoded pushes, also for
median and trimmed mean, which must see all pushes at once. Pushes are added in the order of the sites' names, so the
bits do not depend on the order of arrival.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from weightgrad.core.local_model import Scratch, scatter
from weightgrad.core.parts.language import check, part
from weightgrad.core.segment_index import SegmentIndex
from weightgrad.errors import ProtocolError, StrategyError
from weightgrad.kernels import dense, fixed
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import RelayedPush, Segment


@dataclass(frozen=True, eq=False, kw_only=True)
class Contribution:
    """What one push contributes to a round."""

    site: str
    round: int
    weight: float
    segments: tuple[Segment, ...]
    scale: float = 1.0  # the part of its weight that a limit has left

    def add_to(self, total: Tensor, intervals: Intervals, scratch: Scratch) -> bool:
        """Add the push, times its weight, to the values of some elements.

        Args:
            total: the values, changed in place.
            intervals: which elements they are.
            scratch: memory for one piece.

        Returns:
            Whether the push has anything there.
        """
        here = self.within(intervals)
        if self.weight == 1.0:
            for segment in here:
                segment.into(total, fixed.ADD, intervals)
        elif here:
            # A product and a sum: a fused multiply-add would round otherwise where vectors are cut otherwise.
            total += self.decoded(intervals, scratch.of("decoded", intervals.numel)).mul_(self.weight)
        return bool(here)

    def fill(self, total: Tensor, intervals: Intervals) -> bool:
        """Store the push instead of adding it to zeros, if that is the same: it has one segment, of all these elements.

        Args:
            total: memory for the values.
            intervals: which elements they are.

        Returns:
            Whether it was stored.
        """
        here = self.within(intervals) if self.weight == 1.0 else []
        # What "uniform" decodes to has no negative zeros, which a sum with zero would make positive.
        if len(here) != 1 or here[0].payload.codec != "uniform" or here[0].intervals != intervals:
            return False
        here[0].into(total, fixed.STORE, intervals)
        return True

    def decoded(self, intervals: Intervals, out: Tensor) -> Tensor:
        """The push in the given elements; zero where it has nothing."""
        out = out[: intervals.numel].zero_()
        for segment in self.within(intervals):
            segment.into(out, fixed.ADD, intervals)
        return out

    def within(self, intervals: Intervals) -> list[Segment]:
        """The segments that have some of these elements."""
        return self._index.within(intervals)

    @cached_property
    def _index(self) -> SegmentIndex:
        return SegmentIndex(self.segments)


def relayed_shares(relayed: Sequence[RelayedPush]) -> list[tuple[Segment, float]]:
    """The mean of relayed pushes, as segments to add in this order, each times its share: the same bits everywhere.

    Raises:
        ProtocolError: a push is left out.
    """
    total = sum(push.weight for push in relayed)
    found: list[tuple[Segment, float]] = []
    for push in relayed:
        if push.segments is None:
            raise ProtocolError(
                f"a round result leaves out the push of {push.site!r} for round {push.round}, which is needed here"
            )
        if push.weight > 0:
            found += [(segment, push.weight / total) for segment in push.segments]
    return found


class Memory:
    """What an aggregator remembers from round to round, in vectors of what is served, by name.

    Args:
        held: the elements.
    """

    def __init__(self, held: Intervals) -> None:
        self._held = held
        self.vectors: dict[str, Tensor] = {}

    def read(self, name: str, intervals: Intervals, scratch: Scratch) -> Tensor:
        """The values of some elements, zeros at first; to be changed and given to `write`."""
        if name not in self.vectors:
            self.vectors[name] = torch.zeros(self._held.numel, dtype=torch.float32)
        return scratch.gather(f"memory {name}", self.vectors[name], self._held, intervals)

    def write(self, name: str, intervals: Intervals, values: Tensor) -> None:
        """Store what `read` gave and the caller has changed."""
        scatter(self.vectors[name], self._held, intervals, values)


class Aggregator(ABC):
    """Turns the pushes of a round into what moves the global model.

    Attributes:
        limit: a push whose norm is more than so many times the median norm of its round weighs less in proportion, so
            that no push moves the mean further than that; 0: no limit.
    """

    word: ClassVar[str]
    limit: float = 0.0

    @abstractmethod
    def combine(
        self, pushes: Sequence[Contribution], intervals: Intervals, weight: float, memory: Memory, scratch: Scratch
    ) -> Tensor | None:
        """Aggregate one piece.

        Args:
            pushes: all pushes of the round, in the order in which they are added.
            intervals: the elements of the piece.
            weight: the weight of all pushes together, also of empty ones.
            memory: what is remembered from round to round.
            scratch: memory for one piece at a time.

        Returns:
            What moves the global model, in scratch memory; None if no push has anything there.
        """


@part("aggregator", "mean")
@dataclass(frozen=True)
class Mean(Aggregator):
    """Mean over all sites of the round; a site that sent nothing counts as zero."""

    limit: float = 0.0

    def __post_init__(self) -> None:
        check("mean", "limit", self.limit, 0, 1e9)

    def combine(
        self, pushes: Sequence[Contribution], intervals: Intervals, weight: float, memory: Memory, scratch: Scratch
    ) -> Tensor | None:
        """Divide the sum by the weights."""
        total = Sum().combine(pushes, intervals, weight, memory, scratch)
        return total if total is None or not weight > 0 else total.div_(weight)


_SILENT = (0.0, 0.25, 0.5)


@part("aggregator", "sender_mean")
@dataclass(frozen=True)
class SenderMean(Aggregator):
    """For each entry, the mean over the sites that sent it (SparseLoCo), or between that and the mean over all.

    An entry that k of n sites sent is divided by k^(1 - silent) n^silent. With silent = 0 an entry of one site counts
    in full, however many there are; with 1 it would be the mean, where one of eight hardly counts.

    Attributes:
        limit: of the norm of a push against those of the others.
        silent: how much a site counts that did not send the entry: 0, 0.25 or 0.5. Square roots make the divisor, since
            they have the same bits on every processor, and powers have not.
    """

    limit: float = 0.0
    silent: float = 0.0

    def __post_init__(self) -> None:
        if self.silent not in _SILENT:
            raise StrategyError(f"sender_mean: silent = {self.silent!r}; wanted one of {', '.join(map(str, _SILENT))}")
        check("sender_mean", "limit", self.limit, 0, 1e9)

    def combine(
        self, pushes: Sequence[Contribution], intervals: Intervals, weight: float, memory: Memory, scratch: Scratch
    ) -> Tensor | None:
        """Divide each entry of the sum by the weights of its senders, and of the others as far as they count."""
        del weight, memory
        total = scratch.of("total", intervals.numel).zero_()
        counts = scratch.of("counts", intervals.numel).zero_()
        present = 0.0
        for push in pushes:
            own = push.weight / push.scale  # or an entry of one sender would have no limit
            present += own
            decoded = push.decoded(intervals, scratch.of("decoded", intervals.numel))
            counts += (decoded != 0) * own
            total += decoded.mul_(push.weight)
        if self.silent:
            both = scratch.of("both", intervals.numel).copy_(counts).mul_(present).sqrt_()
            counts = both if self.silent == 0.5 else counts.mul_(both).sqrt_()
        return total.div_(counts.masked_fill_(counts == 0, 1.0)) if _any(pushes, intervals) else None


@part("aggregator", "sum")
@dataclass(frozen=True)
class Sum(Aggregator):
    """Sum: every site's update counts in full (Gaia)."""

    limit: float = 0.0

    def __post_init__(self) -> None:
        check("sum", "limit", self.limit, 0, 1e9)

    def combine(
        self, pushes: Sequence[Contribution], intervals: Intervals, weight: float, memory: Memory, scratch: Scratch
    ) -> Tensor | None:
        """Add up the pushes."""
        del weight, memory
        total = scratch.of("total", intervals.numel)
        filled = bool(pushes) and pushes[0].fill(total, intervals)
        if not filled:
            total.zero_()
        found = [push.add_to(total, intervals, scratch) for push in pushes[int(filled) :]]
        return total if filled or any(found) else None


@part("aggregator", "trimmed_mean")
@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """Mean of each coordinate without its `trim` smallest and largest values; at least one value stays."""

    trim: int = 1

    def __post_init__(self) -> None:
        check("trimmed_mean", "trim", self.trim, 0, 10**6, whole=True)

    def combine(
        self, pushes: Sequence[Contribution], intervals: Intervals, weight: float, memory: Memory, scratch: Scratch
    ) -> Tensor | None:
        """Sort each coordinate, cut both ends, and take the mean of the rest."""
        del weight, memory
        if not _any(pushes, intervals):
            return None
        trim = min(self.trim, (len(pushes) - 1) // 2)
        each = torch.stack(
            [push.decoded(intervals, torch.empty(intervals.numel, dtype=torch.float32)) for push in pushes]
        )
        return each.sort(0).values[trim : len(pushes) - trim].mean(0)


@part("aggregator", "median")
@dataclass(frozen=True)
class Median(Aggregator):
    """Median of each coordinate: a minority of faulty sites cannot move it far."""

    def combine(
        self, pushes: Sequence[Contribution], intervals: Intervals, weight: float, memory: Memory, scratch: Scratch
    ) -> Tensor | None:
        """The mean of the middle one or two values of each coordinate."""
        return TrimmedMean(trim=len(pushes)).combine(pushes, intervals, weight, memory, scratch)


@part("aggregator", "outer")
@dataclass(frozen=True)
class Outer(Aggregator):
    """An outer optimizer on the mean update (DiLoCo): rule "nesterov", "sgd" or "adam"; `of` another aggregator."""

    rule: str = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    limit: float = 0.0
    of: str = "mean"

    def __post_init__(self) -> None:
        check("outer", "limit", self.limit, 0, 1e9)
        if self.of not in _OF:
            raise StrategyError(f"outer: of = {self.of!r}; wanted {', '.join(_OF)}")
        if self.rule not in ("nesterov", "sgd", "adam"):
            raise StrategyError(f'outer: rule = {self.rule!r}; wanted "nesterov", "sgd" or "adam"')
        check("outer", "lr", self.lr, 0, 1e6)
        check("outer", "momentum", self.momentum, 0, 1)
        check("outer", "beta2", self.beta2, 0, 1)
        check("outer", "eps", self.eps, 0, 1)
        if self.rule == "adam" and (self.momentum == 1 or self.beta2 == 1 or self.eps == 0):
            raise StrategyError("outer: adam would divide by zero; momentum and beta2 must be below 1, eps above 0")

    def combine(
        self, pushes: Sequence[Contribution], intervals: Intervals, weight: float, memory: Memory, scratch: Scratch
    ) -> Tensor | None:
        """One step of the outer optimizer; its memory of elements that were not sent stays as it is."""
        if self.rule == "nesterov" and self.of == "mean":  # in one pass
            total = Sum().combine(pushes, intervals, weight, memory, scratch)
            if total is not None:
                velocity = memory.read("velocity", intervals, scratch)
                dense.nesterov(total, weight if weight > 0 else 1.0, velocity, self.momentum, self.lr)
                memory.write("velocity", intervals, velocity)
            return total
        mean = _OF[self.of].combine(pushes, intervals, weight, memory, scratch)
        if mean is None:
            return None
        names = {"sgd": (), "nesterov": ("velocity",), "adam": ("first", "second", "count")}[self.rule]
        own = {name: memory.read(name, intervals, scratch) for name in names}
        self._step(mean, own)
        for name, values in own.items():
            memory.write(name, intervals, values)
        return mean

    def _step(self, mean: Tensor, memory: dict[str, Tensor]) -> None:
        if self.rule == "nesterov":
            dense.nesterov(mean, 1.0, memory["velocity"], self.momentum, self.lr)
            return
        if self.rule == "adam":
            first = memory["first"].mul_(self.momentum).add_(mean * (1 - self.momentum))
            second = memory["second"].mul_(self.beta2).add_((mean * mean).mul_(1 - self.beta2))
            count = memory["count"].add_(1)
            scale = (second / (1 - self.beta2**count)).sqrt_().add_(self.eps)
            mean.copy_(first / (1 - self.momentum**count) / scale)
        mean.mul_(self.lr)


_OF: dict[str, Aggregator] = {"mean": Mean(), "median": Median(), "trimmed_mean": TrimmedMean()}


def _any(pushes: Sequence[Contribution], intervals: Intervals) -> bool:
    return any(push.within(intervals) for push in pushes)
