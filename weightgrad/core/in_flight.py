"""The pushes of a site that no round result has answered yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightgrad.kernels import fixed
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import Push, RoundResult


@dataclass
class SentPush:
    """A push and the time at which it was last sent."""

    push: Push
    sent_at: float


class InFlightPushes:
    """Pushes in the order of their rounds, until the round result that contains them is applied.

    Memory: the encoded segments of these pushes; no full-size vector.
    """

    def __init__(self) -> None:
        self._sent: list[SentPush] = []

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def oldest(self) -> SentPush:
        """The push that has waited longest for its result."""
        return self._sent[0]

    @property
    def newest(self) -> SentPush:
        """The push that was made last."""
        return self._sent[-1]

    @property
    def rounds(self) -> set[int]:
        """The rounds of all pushes in flight."""
        return {sent.push.round for sent in self._sent}

    def add(self, push: Push, now: float) -> None:
        """Remember a push that is sent now."""
        self._sent.append(SentPush(push, now))

    def remove_through(self, round_: int) -> None:
        """Forget the pushes up to and including this round: they are in the global model."""
        self._sent = [sent for sent in self._sent if sent.push.round > round_]

    def clear(self) -> None:
        """Forget all pushes."""
        self._sent = []

    def first_step_through(self, round_: int) -> int | None:
        """The step of the oldest push up to and including this round, or None if there is no such push."""
        return next((sent.push.step for sent in self._sent if sent.push.round <= round_), None)

    def sent_at(self, round_: int | None) -> float | None:
        """When the push of this round was sent, or None if it is not in flight."""
        return next((sent.sent_at for sent in self._sent if sent.push.round == round_), None)

    def resend_after(self, round_: int, now: float) -> list[Push]:
        """The pushes after this round, to be sent again now."""
        again = [sent for sent in self._sent if sent.push.round > round_]
        for sent in again:
            sent.sent_at = now
        return [sent.push for sent in again]

    def add_to(self, vector: Tensor) -> None:
        """Add what the pushes decode to, oldest first, to a flat vector in place."""
        for sent in self._sent:
            for segment in sent.push.segments:
                segment.into(vector, fixed.ADD)

    def fill_in(self, result: RoundResult, site: str) -> RoundResult:
        """Put the site's own pushes into a relayed result, from which the server leaves them out.

        Args:
            result: a round result as it was received.
            site: the name of this site.

        Returns:
            The same result, complete.
        """
        own = {sent.push.round: sent.push.segments for sent in self._sent}
        relayed = [
            replace(push, segments=own.get(push.round)) if push.segments is None and push.site == site else push
            for push in result.relayed
        ]
        return replace(result, relayed=tuple(relayed))

    def state(self) -> dict[str, Tensor]:
        """Copies of all pushes as packed messages, by round, for a checkpoint."""
        return {
            str(sent.push.round): torch.frombuffer(bytearray(pack(sent.push)), dtype=torch.uint8) for sent in self._sent
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. The pushes count as sent at time 0."""
        pushes = [unpack(bytes(state[round_].numpy())) for round_ in sorted(state, key=int)]
        self._sent = [SentPush(push, 0.0) for push in pushes if isinstance(push, Push)]
