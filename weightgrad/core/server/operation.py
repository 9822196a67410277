"""What the operator of a run may have the global server do while it runs: the operations, and the pause.

An operation is an input like a message of a site: it comes with its time and is in the log before it has an effect, so
that a server which reads its log again closes the same rounds with the same pushes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from weightgrad.errors import ProtocolError


class Action(str, Enum):
    """What is done."""

    REMOVE = "remove"
    """A site takes no part any more: what it has pushed counts, and nobody waits for it."""
    SET_ASIDE = "set-aside"
    """Rounds do not wait for a site; what it pushes counts, and it is sent the results."""
    TAKE_BACK = "take-back"
    """Rounds wait for it again."""
    PAUSE = "pause"
    """No round closes and no deadline expires; the sites wait after their next decision."""
    RESUME = "resume"
    """Rounds close again."""


@dataclass(frozen=True)
class Operation:
    """An action, and the site it concerns, if it concerns one."""

    action: Action
    site: str = ""

    def to_bytes(self) -> bytes:
        """As a record of the log."""
        return json.dumps({"action": self.action.value, "site": self.site}).encode()

    @classmethod
    def parse(cls, data: bytes) -> Operation:
        """Read what `to_bytes` wrote.

        Raises:
            ProtocolError: the bytes are not an operation.
        """
        try:
            found = json.loads(data)
            return cls(Action(found["action"]), str(found["site"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"an operation that cannot be read ({error!r})") from error


class Pause:
    """Whether the run is paused, and since when."""

    def __init__(self) -> None:
        self._since: float | None = None

    @property
    def on(self) -> bool:
        """Whether the run is paused."""
        return self._since is not None

    def begin(self, now: float) -> bool:
        """Pause; whether that is new."""
        new = self._since is None
        self._since = now if new else self._since
        return new

    def end(self, now: float) -> float:
        """Go on; the seconds that the pause took, 0 if there was none."""
        seconds = 0.0 if self._since is None else max(0.0, now - self._since)
        self._since = None
        return seconds

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint; empty without a pause."""
        return {} if self._since is None else {"since": torch.tensor(self._since, dtype=torch.float64)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._since = float(state["since"]) if "since" in state else None
