"""Encoded gradients between the ranks of a site: payloads become frames, frames travel by the process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from weightgrad import wire
from weightgrad.codecs import Payload
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

    def all_gather(self, own: Iterable[Sequence[Payload]]) -> list[Sequence[Payload]]:
        """Every rank's payloads."""
        (payloads,) = own
        return [from_frames(blob) for blob in self._group.exchange(to_frames(payloads))]

    def all_gather_vectors(self, own: Iterable[Tensor]) -> list[Tensor]:
        """Every rank's vector; the copies are aligned as float32 must be."""
        (vector,) = own
        blobs = self._group.exchange(vector.view(torch.uint8))
        return [blob.clone().view(torch.float32) for blob in blobs]

    def mean(self, own: Iterable[Tensor]) -> list[Tensor]:
        """The mean of all ranks' vectors."""
        (vector,) = own
        return [self._group.mean(vector)]

    def all_to_all(self, own: Sequence[Sequence[Payload]]) -> list[Sequence[Payload]]:
        """What all ranks sent to this one; payload i goes to rank i."""
        (payloads,) = own
        blobs = self._group.deal([to_frames([payload]) for payload in payloads])
        return [[from_frames(blob)[0] for blob in blobs]]


def to_frames(payloads: Iterable[Payload]) -> Tensor:
    """The frames of some payloads, one after the other, as a tensor of bytes."""
    data = bytearray().join(buffer for payload in payloads for buffer in wire.to_buffers(payload))
    return torch.frombuffer(data, dtype=torch.uint8)


def from_frames(blob: Tensor) -> tuple[Payload, ...]:
    """The payloads whose frames `to_frames` put together."""
    return tuple(wire.frames(blob.numpy().data))
