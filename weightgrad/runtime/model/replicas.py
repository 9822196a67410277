"""Ranks of a site that have the same weights, and how they stay the same.

Where every rank has the whole model, or HSDP keeps several copies of each shard, the work of the WAN is dealt among the
ranks that have the same elements (`core/pieces.py`), or falls to the rank that serves them inside the site
(`local/serving.py`). What one of them writes into its weights, the others are sent, unless they get it from the local
server anyway. A round result that only changes entries is passed on as it came, encoded, and each rank makes the same
changes; so is a round result that is a gradient. What changes all weights, such as a push that leaves them, is sent as
weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weightgrad.core import pieces
from weightgrad.core.layout import Layout
from weightgrad.core.site.local_changes import (
    LocalChange,
    changes_nbytes,
    changes_of_holder,
    pack_changes,
    unpack_changes,
    worth_passing_on,
)
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.runtime.payload_exchange import as_floats
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.message_parts import of_holder
from weightgrad.wire.messages import ResultPart, Segment


@dataclass(frozen=True)
class Sharding:
    """Who has what in a site, and who holds what.

    Attributes:
        available: for each rank, the elements whose weights it has.
        held: for each rank, the elements that it holds: each is held by one rank that has it.
    """

    available: tuple[Intervals, ...]
    held: tuple[Intervals, ...]

    @staticmethod
    def of(
        own: Intervals,
        layout: Layout,
        group: SiteGroup,
        served: Sequence[Intervals],
        *,
        per_tensor: bool,
        serving: Sequence[Intervals] | None = None,
    ) -> Sharding:
        """Find out who has what, together with all ranks, and deal the elements.

        Args:
            own: the elements whose weights this rank has.
            layout: where the tensors lie.
            group: the ranks of the site.
            served: what each process of the global server serves.
            per_tensor: whether each tensor is a piece of its own.
            serving: what each rank serves inside the site, if ranks that have the whole model have a local server.
        """
        flat = torch.tensor([bound for span in own.spans for bound in span], dtype=torch.int64)
        blobs = group.exchange(flat.view(torch.uint8))
        found = []
        for blob in blobs:
            bounds = blob.clone().view(torch.int64).tolist()
            found.append(Intervals.of(zip(bounds[::2], bounds[1::2], strict=True)))
        if serving is not None and all(have.numel == layout.numel for have in found):
            return Sharding(tuple(found), tuple(serving))
        held = pieces.deal(found, layout, per_tensor=per_tensor, served=served)
        return Sharding(tuple(found), tuple(held))

    @property
    def replicated(self) -> bool:
        """Whether some elements are on more than one rank."""
        return sum(one.numel for one in self.available) > sum(one.numel for one in self.held)

    @property
    def whole(self) -> bool:
        """Whether every rank has all elements."""
        return len(set(self.available)) == 1

    def shares_with(self, rank: int) -> list[Intervals]:
        """For each rank, what it must be sent of what `rank` holds."""
        return [self.held[rank] & have if other != rank else Intervals(()) for other, have in enumerate(self.available)]


class ReplicaExchange:
    """Sends the other ranks what this one has written, and takes what they have written.

    Args:
        sharding: who has and holds what.
        group: the ranks of the site.
        weights: what is sent and written: weights, or gradients.
    """

    def __init__(self, sharding: Sharding, group: SiteGroup, weights: ModuleWeights) -> None:
        self._group, self._weights, self._sharding = group, weights, sharding
        self._out = [_bounded(one) for one in sharding.shares_with(group.rank)]
        self._in = [_bounded(sharding.shares_with(other)[group.rank]) for other in range(group.size)]
        self.needed = sharding.replicated

    def of(self, weights: ModuleWeights) -> ReplicaExchange:
        """The same exchange for other values of the same parameters."""
        found = copy(self)
        found._weights = weights
        return found

    def names(self, own: list[str]) -> set[str]:
        """The names that any rank has; called on every rank."""
        blobs = self._group.exchange(torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8))
        return {name for blob in blobs for name in json.loads(bytes(blob.numpy()))}

    def share(self) -> None:
        """Bring all ranks to what the holder of each element has; called on every rank."""
        if not self.needed:
            return
        rounds = self._group.maximum(max((len(one) for one in (*self._out, *self._in)), default=0))
        for turn in range(rounds):
            outgoing = [self._piece(parts, turn) for parts in self._out]
            for parts, blob in zip(self._in, self._sent(outgoing), strict=True):
                piece = self._piece(parts, turn)
                if piece:
                    self._weights.write(piece, as_floats(blob))

    def share_changes(self, changes: Sequence[LocalChange] | None) -> None:
        """Have all ranks make the changes that the holders of elements have made; called on every rank.

        Args:
            changes: what this rank has changed; None if its weights have moved in another way. Then, and where the
                weights take fewer bytes, all ranks send those.
        """
        if not self.needed:
            return
        own = None if changes is None else changes_of_holder(changes, self._sharding.held[self._group.rank])
        size = -1 if own is None else changes_nbytes(own)
        told = self._group.exchange(torch.tensor([size]).view(torch.uint8))
        sizes = [int(one.clone().view(torch.int64)) for one in told]
        numel = sum(one.numel for one in self._sharding.held)
        if own is None or not worth_passing_on([None if one < 0 else one for one in sizes], numel):
            self.share()
            return
        for rank, blob in enumerate(self._group.pass_on(pack_changes(own))):
            for change in unpack_changes(blob) if rank != self._group.rank else ():
                for segment in change.segments:
                    self._weights.add_segment(segment, change.mode, share=change.share)

    @property
    def takes_changes(self) -> bool:
        """Whether changes can be passed on: every rank has all elements."""
        return self.needed and self._sharding.whole

    def _sent(self, outgoing: Sequence[Intervals]) -> list[Tensor]:
        """What every rank sends to this one, if this one sends these elements to the others."""
        if self._sharding.whole:  # the same to all
            own = max(outgoing, key=lambda one: one.numel)
            return self._group.pass_on(self._read(own).view(torch.uint8))
        return self._group.deal([self._read(one).view(torch.uint8) for one in outgoing])

    def pass_on(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Give the other ranks the segments of a round result that they need; called on every rank.

        Returns:
            The segments that came to any rank and have elements of this one, its own among them.
        """
        if not self.needed:
            return tuple(segments)
        if self._sharding.whole:
            blobs = self._group.pass_on(_to_bytes(segments))
        else:
            have = self._sharding.available
            blobs = self._group.deal([_to_bytes(of_holder(segments, one)) for one in have])
        blobs[self._group.rank] = _to_bytes(())
        received = [segment for blob in blobs for segment in _segments(blob)]
        return tuple(sorted((*segments, *received), key=lambda segment: segment.start))

    @staticmethod
    def _piece(parts: Sequence[Intervals], turn: int) -> Intervals:
        return parts[turn] if turn < len(parts) else Intervals(())

    def _read(self, intervals: Intervals) -> Tensor:
        return self._weights.read(intervals, torch.empty(intervals.numel, dtype=torch.float32)).contiguous()


def _to_bytes(segments: Sequence[Segment]) -> Tensor:
    if not segments:
        return torch.empty(0, dtype=torch.uint8)
    data = bytearray(pack(ResultPart(version=0, segments=tuple(segments), last=True)))
    return torch.frombuffer(data, dtype=torch.uint8)


def _segments(blob: Tensor) -> tuple[Segment, ...]:
    if not blob.numel():
        return ()
    part = unpack(blob.numpy().data)
    assert isinstance(part, ResultPart)
    return part.segments


def _bounded(elements: Intervals) -> list[Intervals]:
    """Elements in pieces, so that an exchange needs memory for a few of them."""
    count = -(-elements.numel // max(1, pieces.PIECE // 4))
    bounds = [place * elements.numel // count for place in range(count + 1)] if count else [0]
    return [elements.storage(start, stop) for start, stop in pairwise(bounds)]
