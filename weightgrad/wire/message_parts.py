"""Pushes, round results and models as parts: what a message holds is cut into messages of a few megabytes.

Between processes a push, a round result or a download is a control message without values and, on the bulk lane, the
parts that each rank makes or needs. Parts of one sender arrive in order, and the last one says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import TypeAlias

from weightgrad.errors import ProtocolError
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_fields import check_disjoint
from weightgrad.wire.messages import (
    ModelPart,
    Push,
    PushPart,
    RelayedPush,
    ResultPart,
    RoundResult,
    Segment,
    segments_bytes,
)

PART_BYTES = 4 << 20
"""A part is closed when its segments have so many bytes; one segment may be longer."""


def push_parts(push: Push, rank: int) -> Iterator[PushPart]:
    """The parts of what one rank contributes to a push; at least one."""
    return cut_push(push.site, push.round, rank, push.segments)


def result_parts(result: RoundResult, held: Intervals) -> Iterator[ResultPart]:
    """The parts of a round result for a rank that holds these elements; at least one."""
    relayed = tuple(
        push if push.segments is None else replace(push, segments=of_holder(push.segments, held))
        for push in result.relayed
    )
    return cut_result(replace(result, segments=of_holder(result.segments, held), relayed=relayed))


def cut_push(site: str, round_: int, rank: int, segments: Iterable[Segment]) -> Iterator[PushPart]:
    """The values of a push as parts of about PART_BYTES; at least one. A part is made as soon as it is full."""
    for group, last in _grouped((None, (segment,)) for segment in segments):
        own = tuple(segment for _, of_group in group for segment in of_group)
        yield PushPart(site=site, round=round_, rank=rank, segments=own, last=last)


def cut_result(result: RoundResult) -> Iterator[ResultPart]:
    """The values of a round result as parts of about PART_BYTES; at least one.

    Every relayed push is in one part or more, also if it has no segments or is left out.
    """
    items: list[_Item] = [(None, (segment,)) for segment in result.segments]
    for push in result.relayed:
        items += [(push, (segment,)) for segment in push.segments] if push.segments else [(push, ())]
    for group, last in _grouped(items):
        segments: tuple[Segment, ...] = ()
        relayed = []
        for push_or_none, of_push in groupby(group, key=lambda item: item[0]):
            found = tuple(segment for _, own in of_push for segment in own)
            if push_or_none is None:
                segments = found
            else:
                relayed.append(replace(push_or_none, segments=None if push_or_none.segments is None else found))
        yield ResultPart(version=result.version, segments=segments, last=last, relayed=tuple(relayed))


_Item: TypeAlias = tuple[RelayedPush | None, tuple[Segment, ...]]
"""A segment, or none, and the relayed push that it is of."""


def _grouped(items: Iterable[_Item]) -> Iterator[tuple[list[_Item], bool]]:
    """Items in groups of about PART_BYTES, each with whether it is the last one."""
    group: list[_Item] = []
    size = 0
    for item in items:
        if size >= PART_BYTES:
            yield group, False
            group, size = [], 0
        group.append(item)
        size += segments_bytes(item[1])
    yield group, True


def model_parts(version: int, vectors: Iterable[tuple[str, Iterable[Segment]]]) -> Iterator[ModelPart]:
    """The parts of a model, made when they are asked for; at least one.

    Args:
        version: the version of the global model.
        vectors: each vector by name, as segments that may be made one by one.
    """
    before: ModelPart | None = None
    for name, segments in vectors:
        for segment in segments:
            if before is not None:
                yield before
            before = ModelPart(version=version, vector=name, segments=(segment,), last=False)
    yield replace(before, last=True) if before else ModelPart(version=version, vector="weights", segments=(), last=True)


def of_holder(segments: Sequence[Segment], held: Intervals) -> tuple[Segment, ...]:
    """The segments that have some of the elements that a rank holds."""
    return tuple(segment for segment in segments if held.runs(segment.intervals))


def without_values(message: Push | RoundResult) -> Push | RoundResult:
    """The control message of a push or a round result: everything but the values."""
    if isinstance(message, Push):
        return replace(message, segments=())
    relayed = tuple(push if push.segments is None else replace(push, segments=()) for push in message.relayed)
    return replace(message, segments=(), relayed=relayed)


@dataclass
class ResultAssembly:
    """Collects the parts of round results from all server processes that one rank hears from.

    Args:
        sources: the server processes that send parts of every result.
    """

    sources: frozenset[int]
    _parts: dict[int, dict[int, list[ResultPart]]] = field(default_factory=dict)  # by version and server process

    def add(self, source: int, part: ResultPart) -> None:
        """Take a part; a part of a result that is sent again replaces what was there.

        A part from any other server process is left aside: that process serves nothing of what the rank holds.
        """
        if source not in self.sources:
            return
        own = self._parts.setdefault(part.version, {}).setdefault(source, [])
        if own and own[-1].last:
            own.clear()
        own.append(part)

    def complete_from(self, version: int, source: int) -> bool:
        """Whether a server process has sent its last part of this result."""
        own = self._parts.get(version, {}).get(source)
        return own is not None and own[-1].last

    def complete(self, version: int) -> bool:
        """Whether every server process has sent its last part of this result."""
        return all(self.complete_from(version, source) for source in self.sources)

    def take(self, result: RoundResult, *, without: Collection[int] = ()) -> RoundResult:
        """The values of a result, put into its control message; older ones are forgotten.

        Args:
            result: the control message.
            without: server processes whose values are not wanted.

        Raises:
            ProtocolError: a part is missing, or two have the same elements.
        """
        wanted = [source for source in sorted(self.sources) if source not in without]
        if not all(self.complete_from(result.version, source) for source in wanted):
            raise ProtocolError(f"the result of version {result.version} is not complete here")
        found = self._parts.pop(result.version, {})
        parts = [part for source in wanted for part in found[source]]
        self._parts = {version: own for version, own in self._parts.items() if version > result.version}
        relayed = merge_relayed([result.relayed, *(part.relayed for part in parts)])
        return replace(result, segments=_merged(part.segments for part in parts), relayed=relayed)

    def forget(self, source: int | None = None) -> None:
        """Drop what a server process has sent, or everything, because it will be sent again."""
        for own in self._parts.values():
            for one in [source] if source is not None else list(own):
                own.pop(one, None)


def join_result(header: RoundResult, parts: Sequence[RoundResult]) -> RoundResult:
    """A result with the values that the shards have made, as far as they are in this process."""
    if len(parts) == 1:
        return replace(header, segments=parts[0].segments, relayed=parts[0].relayed)
    segments = sorted((one for part in parts for one in part.segments), key=lambda one: one.start)
    return replace(header, segments=tuple(segments), relayed=merge_relayed(part.relayed for part in parts))


def merge_relayed(parts: Iterable[Sequence[RelayedPush]]) -> tuple[RelayedPush, ...]:
    """The relayed pushes of several parts as one list, sorted by site and round.

    A push that one part leaves out is left out: its site has all of it.

    Raises:
        ProtocolError: a push has two weights, or two of its segments have the same elements.
    """
    found: dict[tuple[str, int], list[RelayedPush]] = {}
    for push in chain.from_iterable(parts):
        found.setdefault((push.site, push.round), []).append(push)
    return tuple(_one_push(found[key]) for key in sorted(found))


def _one_push(parts: Sequence[RelayedPush]) -> RelayedPush:
    first = parts[0]
    if any(part.weight != first.weight for part in parts):
        raise ProtocolError(
            f"the push of {first.site!r} for round {first.round} weighs {sorted({part.weight for part in parts})} in "
            "parts of one result; the server processes are not of one run"
        )
    if any(part.segments is None for part in parts):
        return replace(first, segments=None)
    return replace(first, segments=_merged(part.segments or () for part in parts))


def _merged(parts: Iterable[Sequence[Segment]]) -> tuple[Segment, ...]:
    """The segments of several parts, sorted; ProtocolError if two have the same elements."""
    segments = sorted(chain.from_iterable(parts), key=lambda segment: segment.start)
    check_disjoint(segments)
    return tuple(segments)
