"""Gradients and weights between the ranks of a site: payloads become frames, frames travel by the process group.

What is not encoded travels as it lies in memory, without frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from weightgrad import wire
from weightgrad.codecs import Payload
from weightgrad.local.gradient_exchange import ServedPart
from weightgrad.runtime.process_group import SiteGroup


class PayloadExchange:
    """The `Exchange` of a real site: this process has one worker, its rank."""

    def __init__(self, group: SiteGroup) -> None:
        self._group = group

    @property
    def size(self) -> int:
        """Ranks of the site."""
        return self._group.size

    @property
    def workers(self) -> Sequence[int]:
        """This rank alone."""
        return (self._group.rank,)

    def all_gather(self, own: Sequence[Sequence[Payload]]) -> list[Sequence[Payload]]:
        """Every rank's payloads."""
        (payloads,) = own
        return [from_frames(blob) for blob in self._group.deal([to_frames(payloads)] * self.size)]

    def mean(self, own: Iterable[Tensor]) -> list[Tensor]:
        """The mean of all ranks' vectors."""
        (vector,) = own
        return [self._group.mean(vector)]

    def all_to_all(self, own: Sequence[Sequence[Payload]]) -> list[Sequence[Payload]]:
        """What all ranks sent to this one; payload i goes to rank i."""
        (payloads,) = own
        blobs = self._group.deal([to_frames([payload]) for payload in payloads])
        return [[from_frames(blob)[0] for blob in blobs]]

    def to_servers(self, own: Sequence[Sequence[Payload]], owners: Sequence[int]) -> list[Sequence[Payload]]:
        """From every rank, the payloads that this one serves."""
        (payloads,) = own
        blobs = [
            to_frames([payload for payload, owner in zip(payloads, owners, strict=True) if owner == rank])
            for rank in range(self.size)
        ]
        return [from_frames(blob) for blob in self._group.deal(blobs)]

    def vectors_to_servers(self, own: Iterable[Tensor], parts: Sequence[ServedPart]) -> list[Tensor]:
        """From every rank, the elements that this one serves."""
        (vector,) = own
        blobs = [
            _joined([vector[part.start : part.stop] for part in parts if part.owner == rank])
            for rank in range(self.size)
        ]
        return [as_floats(blob) for blob in self._group.deal(blobs)]

    # -- weights out -------------------------------------------------------------------------

    def payloads_to_all(self, own: Sequence[Payload]) -> list[Sequence[Payload]]:
        """Every rank's payloads: those of the tensors that it serves."""
        return self.all_gather([own])

    def vectors_to_all(self, own: Tensor) -> list[Tensor]:
        """Every rank's vector: the elements that it serves."""
        return [as_floats(blob) for blob in self._group.deal([_joined([own])] * self.size)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The bytes of vectors, one after the other."""
    return (torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.float32)).view(torch.uint8)


def as_floats(blob: Tensor) -> Tensor:
    """The float32 numbers that some bytes are, in memory that is aligned as they must be."""
    return blob.clone().view(torch.float32)


def to_frames(payloads: Iterable[Payload]) -> Tensor:
    """The frames of some payloads, one after the other, as a tensor of bytes."""
    data = bytearray().join(buffer for payload in payloads for buffer in wire.to_buffers(payload))
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def from_frames(blob: Tensor) -> tuple[Payload, ...]:
    """The payloads whose frames `to_frames` put together."""
    return tuple(wire.frames(blob.numpy().data))
