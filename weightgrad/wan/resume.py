"""Where the local model goes on when an answer has moved the base.

`base`: from the base; what is held waits for a later round. `base_and_pending(share)`: from the base plus
everything of one's own that is not in it, or a share of that: with nothing of it in the model a site does again and
again what waits, with all of it the sites drift apart. `mix(alpha)`: alpha of where it was, the rest the base
(Streaming DiLoCo). Whatever it is, what was done locally since the push is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
    """The base and `share` of everything pending."""

    share: float = 1.0

    def __post_init__(self) -> None:
        check("base_and_pending", "share", self.share, 0, 1)

    @property
    def pending_share(self) -> float:
        """As said."""
        return self.share


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
