"""Parts of parameters on their way from a device to the host, one ahead of who reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from weightgrad.runtime.model.device_copies import DeviceCopies, Download
from weightgrad.wire.intervals import Intervals


class ExpectedReads:
    """What will be read next.

    Args:
        copies: Returns how values cross from the device.
        parts: Returns the parts of the parameters that intervals consist of; None unless all are on the device.
    """

    def __init__(self, copies: Callable[[], DeviceCopies], parts: Callable[[Intervals], list[Tensor] | None]) -> None:
        self._copies, self._parts = copies, parts
        self._upcoming: list[Intervals] = []  # the next one last
        self._coming: tuple[Intervals, Download] | None = None  # the next one, on its way
        self._staging: list[Any] | None = None  # where they arrive

    def expect(self, upcoming: Sequence[Intervals]) -> None:
        """Let these come meanwhile, one after the other."""
        self.forget()
        self._upcoming = list(reversed(upcoming))
        self._fetch()

    def take(self, intervals: Intervals) -> list[Tensor] | None:
        """What was expected, while the next comes; None if something else was.

        The memory is used again by the read after the next one.
        """
        if self._coming is None or self._coming[0] != intervals:
            return None
        parts = self._coming[1].wait()
        self._coming = None
        self._fetch()
        return parts

    def forget(self) -> None:
        """Expect nothing more; what is on its way is waited for, since parameters may change from now on."""
        self._upcoming = []
        if self._coming is not None:
            self._coming[1].wait()
            self._coming = None

    def _fetch(self) -> None:
        """Start to copy what will be read next, if it is on the device."""
        while self._upcoming:
            intervals = self._upcoming.pop()
            if parts := self._parts(intervals):
                copies = self._copies()
                self._staging = copies.staging_buffers() if self._staging is None else self._staging
                self._coming = (intervals, copies.download(parts, self._staging))
                return
