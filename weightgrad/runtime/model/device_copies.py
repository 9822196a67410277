"""Copies between parameters on an accelerator and host memory, beside the user's own work.

A rank's weights cross to the host when a push reads them and back when an answer moves them; at no other time. The
copies are on a stream of their own, between the device and pinned memory of the host, so the device makes them beside
other work and the host does something else meanwhile:

    user's stream    step k ──┐event               ┌─ step k+1 (waits only if weights were written)
    own stream                └─ copy 1  copy 2 ...┘event
    host                              encode 1  encode 2 ...

- Everything is ordered by events. The own stream waits for what the user's stream was given before; the user's stream
  waits for the own stream only where weights are written. Nothing ever waits for the whole device.
- A parameter crosses in its own dtype, bfloat16 as two bytes, and becomes float32 on the host.
- Pinned memory is a few staging buffers of a piece each (`core/pieces.py`): two that pieces of a push are read into by
  turns, so that one is copied while the one before it is encoded, two for everything else that is read, and two that
  are written from. A staging buffer is used again only when the copy from or to it is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: every dtype begins where it may, and 16-byte loads are whole
_MOST_STAGED = 1 << 21  # elements that are copied together, at most: those of a piece


def pinned(nbytes: int, device: torch.device) -> Tensor:
    """Host memory that a device copies from and to by itself."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type in ("cuda", "xpu"))


class _StagingBuffer:
    """Pinned memory, and the event of the last copy that uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self._event: Any = None

    def of(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Flat memory of the dtypes and sizes of these tensors; waits for the last copy."""
        self.wait()
        sizes = [_aligned(one.numel() * one.element_size()) for one in like]
        if self._memory is None or self._memory.numel() < sum(sizes):
            self._memory = pinned(sum(sizes), self._device)
        parts, start = [], 0
        for one, size in zip(like, sizes, strict=True):
            own = self._memory[start : start + one.numel() * one.element_size()]
            parts.append(own.view(one.dtype))
            start += size
        return parts

    def used_until(self, event: Any) -> None:
        """A copy uses the memory until this event."""
        self._event = event

    def wait(self) -> None:
        """Wait for the last copy."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _in_staging_buffers(
    first: Sequence[Tensor], second: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Flat tensors that belong together, pair by pair, as many as are copied at a time; large ones are cut."""
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    count = 0
    for one, other in zip(first, second, strict=True):
        for own, given in zip(one.split(_MOST_STAGED), other.split(_MOST_STAGED), strict=True):
            if ours and count + own.numel() > _MOST_STAGED:
                yield ours, theirs
                ours, theirs, count = [], [], 0
            ours.append(own)
            theirs.append(given)
            count += own.numel()
    if ours:
        yield ours, theirs


class Download:
    """A copy of some tensors of the device to the host, which may be on its way.

    It keeps the tensors: memory that is given back is used again by the stream that it is of, beside the copy.
    """

    def __init__(self, buffer: _StagingBuffer, parts: list[Tensor], sources: Sequence[Tensor]) -> None:
        self._buffer, self._parts, self._sources = buffer, parts, sources

    def wait(self) -> list[Tensor]:
        """The values, each in its own dtype, in memory that the download after the next one uses again."""
        self._buffer.wait()
        self._sources = ()
        return self._parts


def _put(download: Download, targets: list[Tensor]) -> None:
    for target, value in zip(targets, download.wait(), strict=True):
        target.copy_(value)


class DeviceCopies:
    """Copies to and from one device, for one thread.

    Memory: four pinned staging buffers of at most a piece each, and two for each reader that asks for some.

    Args:
        device: An accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device) if hasattr(self._module, "Stream") else None
        self._reading, self._writing = self.staging_buffers(), self.staging_buffers()

    def staging_buffers(self) -> list[_StagingBuffer]:
        """Two staging buffers for downloads of one reader."""
        return [self.staging_buffer(), self.staging_buffer()]

    def staging_buffer(self) -> _StagingBuffer:
        """A staging buffer for downloads."""
        return _StagingBuffer(self._device)

    def hold(self) -> None:
        """Let what the user's stream is given from now on wait for all copies so far."""
        self._applied()

    def download(self, sources: Sequence[Tensor], buffers: list[_StagingBuffer]) -> Download:
        """Start to copy flat tensors of the device to the host, into the staging buffers of a reader by turns."""
        buffer = self._next(buffers)
        parts = buffer.of(sources)
        with self._beside():
            for part, source in zip(parts, sources, strict=True):
                part.copy_(source, non_blocking=self._stream is not None)
            self._mark(buffer)
        return Download(buffer, parts, sources)

    def read(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy flat tensors of the device into memory of the host, and wait for it."""
        before: tuple[Download, list[Tensor]] | None = None
        for own, out in _in_staging_buffers(sources, targets):
            after = (self.download(own, self._reading), out)
            if before is not None:
                _put(*before)
            before = after
        if before is not None:
            _put(*before)

    def store(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Write values of the host to flat tensors of the device, in their dtypes."""
        for own, given in _in_staging_buffers(targets, values):
            buffer = self._next(self._writing)
            parts = buffer.of(own)
            for part, value in zip(parts, given, strict=True):
                part.copy_(value)
            with self._beside():
                for part, target in zip(parts, own, strict=True):
                    target.copy_(part, non_blocking=self._stream is not None)
                self._mark(buffer)
        self._applied()

    def add(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Add float32 values of the host to flat tensors of the device."""
        for own, given in _in_staging_buffers(targets, values):
            for target, arrived in zip(own, self._uploaded(given), strict=True):
                with self._on_stream():
                    target += arrived
        self._applied()

    def add_entries(self, target: Tensor, places: Tensor, values: Tensor) -> None:
        """Add float32 values of the host at some places of a flat tensor of the device."""
        if target.numel() < 1 << 31:
            places = places.to(torch.int32)  # half the bytes
        where, what = self._uploaded([places, values])
        with self._on_stream():
            target.index_add_(0, where, what.to(target.dtype))
        self._applied()

    def upload(self, value: Tensor) -> Tensor:
        """A copy of a flat tensor of the host on the device, for the user's stream."""
        arrived = torch.empty(value.shape, dtype=value.dtype, device=self._device)  # of the user's stream, as its uses
        self.store([arrived], [value])
        return arrived

    def _uploaded(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the device, made on the own stream, for work on it."""
        buffer = self._next(self._writing)
        parts = buffer.of(values)
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)
        arrived = []
        with self._beside():
            for part in parts:
                one = torch.empty(part.shape, dtype=part.dtype, device=self._device)
                arrived.append(one.copy_(part, non_blocking=self._stream is not None))
            self._mark(buffer)
        return arrived

    @staticmethod
    def _next(buffers: list[_StagingBuffer]) -> _StagingBuffer:
        buffers.append(buffers.pop(0))
        return buffers[-1]

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Work on the own stream, behind what the user's stream was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream(self._device))
        with self._on_stream():
            yield

    def _on_stream(self) -> Any:
        return contextlib.nullcontext() if self._stream is None else self._module.stream(self._stream)

    def _mark(self, buffer: _StagingBuffer) -> None:
        if self._stream is not None:
            buffer.used_until(self._stream.record_event())

    def _applied(self) -> None:
        """Weights were written, or read: what the user's stream is given from now on comes after that."""
        if self._stream is not None:
            self._module.current_stream(self._device).wait_stream(self._stream)
