"""The pushes of a site that have no result yet.

What was said about them is here; their segments are with the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import Push


@dataclass
class InFlight:
    """A push without a result: what was said about it, and when it was last sent."""

    push: Push
    sent_at: float


class PushesInFlight:
    """The pushes without a result, in the order of their rounds. Memory: no vector of the model's size."""

    def __init__(self) -> None:
        self._sent: list[InFlight] = []

    def __len__(self) -> int:
        return len(self._sent)

    def __iter__(self) -> Iterator[InFlight]:
        return iter(self._sent)

    @property
    def oldest(self) -> InFlight | None:
        """The push of the earliest round; None if no push is in flight."""
        return self._sent[0] if self._sent else None

    @property
    def rounds(self) -> set[int]:
        """The rounds of all pushes in flight."""
        return {sent.push.round for sent in self._sent}

    def after(self, round_: int) -> list[InFlight]:
        """The pushes for rounds after this one."""
        return [sent for sent in self._sent if sent.push.round > round_]

    def sent_at(self, round_: int | None) -> float | None:
        """When the push for this round was last sent; None if it is not in flight."""
        return next((sent.sent_at for sent in self._sent if sent.push.round == round_), None)

    def add(self, push: Push, now: float) -> None:
        """A push is sent now."""
        self._sent.append(InFlight(push, now))

    def replace_push(self, push: Push, made: Push) -> None:
        """Put another push in the place of one that has not been sent yet."""
        self._sent = [replace(sent, push=made) if sent.push is push else sent for sent in self._sent]

    def remove_through(self, round_: int) -> None:
        """The pushes up to and including this round are in the global model."""
        self._sent = self.after(round_)

    def clear(self) -> None:
        """Forget all pushes."""
        self._sent = []

    def state(self) -> dict[str, Tensor]:
        """The pushes without their segments for a checkpoint, by round."""
        return {str(sent.push.round): _push_to_tensor(sent.push) for sent in self._sent}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. The pushes count as sent at time 0."""
        self._sent = [InFlight(_push_from_tensor(state[round_]), 0.0) for round_ in sorted(state, key=int)]


def _push_to_tensor(push: Push) -> Tensor:
    return torch.frombuffer(bytearray(pack(replace(push, segments=()))), dtype=torch.uint8)


def _push_from_tensor(tensor: Tensor) -> Push:
    push = unpack(bytes(tensor.numpy()))
    assert isinstance(push, Push)
    return push
