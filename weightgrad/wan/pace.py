"""What `auto` settles and what it settles it from: a pace goes down with an answer, a report up with a push.

A pace takes effect at every site with the answer that carries it, so all start the same rounds at the same
steps, whatever their links were like.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.errors import ProtocolError, SpecError

MAX_TEXT_BYTES = 255
PACE_FIXED_BYTES = 9  # every (4), overlap (4), length of the text (1)
REPORT_BYTES = 28  # step_seconds (8), round (4), round_seconds (8), trip_seconds (8)


@dataclass(frozen=True)
class Pace:
    """How often sites speak, how many steps later they hear the answer, and with which codec they speak."""

    every: int
    overlap: int
    up: str

    def __post_init__(self) -> None:
        if not 1 <= self.every < 2**32 or not 0 <= self.overlap < 2**32:
            raise ProtocolError(
                f"a pace of every {self.every} steps with overlap {self.overlap}; wanted every from 1 and overlap "
                "from 0; its sender is wrong"
            )
        if not self.up.isascii() or not 1 <= len(self.up) <= MAX_TEXT_BYTES:
            raise ProtocolError(
                f"a pace with the codec {self.up[:40]!r}; wanted 1 to {MAX_TEXT_BYTES} ASCII characters"
            )
        try:
            codecs.parse(self.up)
        except SpecError as error:
            raise ProtocolError(f"a pace with the codec {self.up!r}: {error}") from None

    @property
    def nbytes(self) -> int:
        """On the wire."""
        return PACE_FIXED_BYTES + len(self.up)


@dataclass(frozen=True)
class Report:
    """What a site has measured: a step of its own, how long its push of `round` took to be answered, and its line."""

    step_seconds: float
    round: int = 0  # 0: none has been answered since the last report
    round_seconds: float = 0.0
    trip_seconds: float = 0.0  # there and back on the line, of a message without bytes; 0: not known

    def __post_init__(self) -> None:
        for name in ("step_seconds", "round_seconds", "trip_seconds"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ProtocolError(f"a report with {name} = {value}; it must be finite and not negative")


_SMOOTH = 0.3  # of a new step in the mean of a site's steps


class Stopwatch:
    """A site's own measurements, from the times it is told. Waiting for answers is not part of a step."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._step = 0.0
        self._round = 0
        self._round_seconds = 0.0
        self.trip = 0.0  # as the driver knows it

    def begins(self, now: float) -> None:
        """The workers may go on from now."""
        self._began = now

    def ends(self, now: float) -> None:
        """They have done a step."""
        if self._began is not None:
            seconds = max(0.0, now - self._began)
            self._step = seconds if self._step == 0 else (1 - _SMOOTH) * self._step + _SMOOTH * seconds
            self._began = now

    def answered(self, number: int, seconds: float) -> None:
        """The push of that round was answered after so long."""
        self._round, self._round_seconds = number, max(0.0, seconds)

    def report(self) -> Report:
        """All of it; the answer's time is told once."""
        found = Report(self._step, self._round, self._round_seconds, self.trip)
        self._round, self._round_seconds = 0, 0.0
        return found


def pace_tensor(pace: Pace) -> Tensor:
    """For a checkpoint."""
    return torch.frombuffer(
        bytearray(struct.pack("<II", pace.every, pace.overlap) + pace.up.encode()), dtype=torch.uint8
    ).clone()


def tensor_pace(found: Tensor) -> Pace:
    """What `pace_tensor` made."""
    raw = bytes(found.numpy())
    every, overlap = struct.unpack("<II", raw[:8])
    return Pace(every, overlap, raw[8:].decode())
