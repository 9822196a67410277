"""Where the local model goes on when an answer has moved the base.

`base`: from the base; what is held waits for a later round. `base_and_pending(share)`: from the base plus
everything of one's own that is not in it, or a share of that: with nothing of it in the model a site does again and
again what waits, with all of it the sites drift apart. `mix(alpha)`: alpha of where it was, the rest the base
(Streaming DiLoCo). Whatever it is, what was done locally since the push is kept.

What is in flight is in the model, all of it, unless `damped`. A push comes back as one of several in a mean, so its
answer throws the model back; with several rounds under way at a time and sites unlike, whose pushes the mean does not
repeat, that swings, and a site may leave the road altogether. `damped`, with m rounds under way by the pace each of
them weighs 1/sqrt(m): one alone as ever, several together no more than if they were independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightgrad.errors import StrategyError
from weightgrad.wan.parts import check, part


@dataclass(frozen=True)
class Resume:
    """The common face of the three."""

    word: ClassVar[str]

    @property
    def pending_share(self) -> float:
        """How much of what is held the model includes."""
        return 0.0

    @property
    def lets_go(self) -> bool:
        """Whether what a push takes out of the model leaves it with the push, where answers are late."""
        return self.pending_share < 1

    def flight_share(self, rounds: int) -> float:
        """How much of each push in flight the model includes, with so many rounds under way at a time."""
        del rounds
        return 1.0

    @property
    def own_share(self) -> float:
        """How much of the model's old place it keeps."""
        return 0.0


@part("resume", "base")
@dataclass(frozen=True)
class FromBase(Resume):
    """The base; what is held waits."""


@part("resume", "base_and_pending")
@dataclass(frozen=True)
class FromBaseAndPending(Resume):
    """The base and `share` of everything held; what is in flight as well, `damped` if there is much of it."""

    share: float = 1.0
    damped: bool = False

    def __post_init__(self) -> None:
        check("base_and_pending", "share", self.share, 0, 1)
        if not isinstance(self.damped, bool):
            raise StrategyError(f"base_and_pending: damped = {self.damped!r}; it is True or False")

    @property
    def pending_share(self) -> float:
        """As said."""
        return self.share

    @property
    def lets_go(self) -> bool:
        """Unless all of it stays."""
        return self.share < 1 or self.damped

    def flight_share(self, rounds: int) -> float:
        """As said."""
        return rounds**-0.5 if self.damped and rounds > 1 else 1.0


@part("resume", "mix")
@dataclass(frozen=True)
class Mix(Resume):
    """`alpha` of the local model and the rest of the base, on what the answer moved."""

    alpha: float = 0.5

    def __post_init__(self) -> None:
        check("mix", "alpha", self.alpha, 0, 1)

    @property
    def own_share(self) -> float:
        """As said."""
        return self.alpha

    @property
    def lets_go(self) -> bool:
        """It goes on from where it is."""
        return not self.alpha
