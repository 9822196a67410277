"""What has moved a rank's local model, encoded, so that ranks with the same weights can make the same moves.

A round result moves the local model by the entries of a few segments. Passing those on takes a small part of the bytes
of the weights themselves. A push that is not in the local model any more, or a download, moves all of it: then there is
no list, and the weights are sent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.core.local_model import LocalModel
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.message_parts import of_holder
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import ResultPart, Segment

_HEAD = struct.Struct("<bdQ")  # mode, share, bytes of the segments


@dataclass(frozen=True)
class LocalChange:
    """Segments that were added to the local model, or subtracted: `fixed.ADD` or `fixed.SUBTRACT`, and a share."""

    segments: tuple[Segment, ...]
    mode: int
    share: float = 1.0


class LocalChanges:
    """The changes of a local model since `begin`, in their order.

    Attributes:
        listed: the changes; None if nobody asked for them, or if the local model has also moved in another way.
    """

    def __init__(self) -> None:
        self.listed: list[LocalChange] | None = None

    def begin(self) -> None:
        """List the changes from now on."""
        self.listed = []

    def end(self) -> None:
        """List nothing any more: nobody asks, or the local model has moved in a way that no list says."""
        self.listed = None

    def make(self, local: LocalModel, segment: Segment, mode: int, share: float = 1.0) -> None:
        """Change a local model, and list the change."""
        local.add_segment(segment, mode, share=share)
        if self.listed is not None:
            self.listed.append(LocalChange((segment,), mode, share))


def changes_of_holder(changes: Iterable[LocalChange], held: Intervals) -> list[LocalChange]:
    """Of some changes, those of the elements that a rank holds; what is alike and in ascending order becomes one."""
    found: list[tuple[list[Segment], int, float]] = []
    for one in changes:
        for segment in of_holder(one.segments, held):
            if found and found[-1][1:] == (one.mode, one.share) and found[-1][0][-1].end <= segment.start:
                found[-1][0].append(segment)
            else:
                found.append(([segment], one.mode, one.share))
    return [LocalChange(tuple(segments), mode, share) for segments, mode, share in found]


def changes_nbytes(changes: Iterable[LocalChange]) -> int:
    """The bytes that `pack_changes` makes."""
    return sum(_HEAD.size + nbytes(_part(one)) for one in changes)


def pack_changes(changes: Iterable[LocalChange]) -> Tensor:
    """Changes as a tensor of bytes."""
    found = bytearray()
    for one in changes:
        body = pack(_part(one))
        found += _HEAD.pack(one.mode, one.share, len(body)) + body
    return torch.frombuffer(found, dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)


def unpack_changes(data: Tensor) -> list[LocalChange]:
    """The changes that `pack_changes` packed."""
    view, place, found = data.numpy().data, 0, []
    while place < len(view):
        mode, share, size = _HEAD.unpack_from(view, place)
        part = unpack(view[place + _HEAD.size : place + _HEAD.size + size])
        assert isinstance(part, ResultPart)
        found.append(LocalChange(part.segments, mode, share))
        place += _HEAD.size + size
    return found


def worth_passing_on(nbytes_by_rank: Sequence[int | None], numel: int) -> bool:
    """Whether the ranks of a site pass their changes on, rather than the weights.

    Args:
        nbytes_by_rank: the bytes of each rank's changes; None: it has no list.
        numel: the elements that the ranks hold together.
    """
    return None not in nbytes_by_rank and sum(one or 0 for one in nbytes_by_rank) < 4 * numel


def _part(change: LocalChange) -> ResultPart:
    return ResultPart(version=0, segments=change.segments, last=True)
