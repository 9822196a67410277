"""A sync schedule as a tensor, as the checkpoints of sites and of the global server keep it."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from weightgrad.wire.sync_schedule import SyncSchedule


def schedule_to_tensor(schedule: SyncSchedule) -> Tensor:
    """A sync schedule as a tensor of bytes, for a checkpoint."""
    return torch.frombuffer(
        bytearray(struct.pack("<II", schedule.every, schedule.overlap) + schedule.up.encode()), dtype=torch.uint8
    ).clone()


def schedule_from_tensor(tensor: Tensor) -> SyncSchedule:
    """The sync schedule that `schedule_to_tensor` wrote."""
    raw = bytes(tensor.numpy())
    every, overlap = struct.unpack("<II", raw[:8])
    return SyncSchedule(every=every, overlap=overlap, up=raw[8:].decode())
