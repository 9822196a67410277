"""What a controller of `auto` has decided: the sync schedule, the codec of results, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightgrad.wire.sync_schedule import SyncSchedule


@dataclass(frozen=True)
class Decision:
    """A sync schedule, the codec of results, and the reason."""

    schedule: SyncSchedule
    down: str
    why: str
    relayed: bool = False  # results relay the pushes, and their codec is not used

    def to_dict(self) -> dict[str, Any]:
        """The decision for an event log."""
        schedule, down = self.schedule, "the others' pushes" if self.relayed else self.down
        return {"every": schedule.every, "overlap": schedule.overlap, "up": schedule.up, "down": down, "why": self.why}

    def to_tensor(self) -> Tensor:
        """The decision for a checkpoint, except for whether results relay the pushes."""
        schedule = self.schedule
        text = f"{schedule.every}\n{schedule.overlap}\n{schedule.up}\n{self.down}\n{self.why}"
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()

    @classmethod
    def from_tensor(cls, tensor: Tensor, *, relayed: bool = False) -> Decision:
        """The decision that `to_tensor` wrote."""
        every, overlap, up, down, why = bytes(tensor.numpy()).decode().split("\n", 4)
        return cls(SyncSchedule(int(every), int(overlap), up), down, why, relayed)
