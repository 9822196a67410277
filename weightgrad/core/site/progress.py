"""How far a site has come: its steps and rounds as plain counters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class SiteProgress:
    """The counters of a site. Memory: no full-size vector.

    Attributes:
        version: the version of the site's global model.
        global_step: the step of the site's global model.
        step: local steps done.
        round: the last round that the site has pushed for, or knows to be closed.
        pushed_round: the last round that the site has pushed for.
        sent_step: the step of the last push with anything in it.
        round_step: the step at which the last round began.
        requested_round: the last round that the server has requested a push for.
        finishing: whether training is over and the last push has been made.
    """

    version: int = 0
    global_step: int = 0
    step: int = 0
    round: int = 0
    pushed_round: int = 0
    sent_step: int = 0
    round_step: int = 0
    requested_round: int = 0
    finishing: bool = False

    def catch_up(self, step: int, round_: int) -> None:
        """Go on at the step and the round where the other sites are, unless this site is ahead of them.

        Args:
            step: the step of the other sites.
            round_: the last round that has closed.
        """
        self.step = max(self.step, step) if not self.finishing else self.step
        self.round_step = max(self.round_step, step)
        self.round = max(self.round, round_)

    def start_round(self) -> int:
        """Count the next round, and return its number. It never passes a requested round: each waits for its push."""
        self.round += 1
        return self.round

    def pushed(self) -> None:
        """The push for the round just started has been made."""
        self.pushed_round, self.round_step = self.round, self.step

    def to_tensor(self) -> Tensor:
        """The counters for a checkpoint."""
        own = [self.step, self.round, self.pushed_round, self.sent_step, self.requested_round]
        return torch.tensor([self.version, self.global_step, *own, int(self.finishing), self.round_step])

    def load_tensor(self, tensor: Tensor) -> None:
        """Restore what `to_tensor` wrote."""
        self.version, self.global_step, *own, finishing, self.round_step = (int(number) for number in tensor)
        self.step, self.round, self.pushed_round, self.sent_step, self.requested_round = own
        self.finishing = bool(finishing)
