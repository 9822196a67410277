"""Where the local model goes on when a round result has moved the global model.

- `global_model`: from the global model; the residual waits for a later round.
- `global_model_and_residual(share)`: from the global model plus a share of the residual. With none of it in the model,
  a site repeats again and again what waits in the residual; with all of it, the sites drift apart.
- `mix(alpha)`: alpha of the local model, the rest the global model (Streaming DiLoCo).
- `ahead`, where gradients are shared: from the global model, after optimizer steps with the site's own pushes in flight
  (`core/site/ahead_model.py`).

In every case the local model keeps what was done locally since the push.

The local model also contains the pushes in flight, all of them unless `damped`. A push comes back as one of several in
a mean, so its result moves the local model back. With several rounds under way and sites with unlike data, whose
pushes the mean does not repeat, this oscillates, and a site may diverge. `damped` weighs each push in flight by
1/sqrt(m), where m is how many rounds the sync schedule has under way: one alone counts in full, and several together no
more than if they were independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weightgrad.core.parts.language import check, part
from weightgrad.errors import StrategyError


@dataclass(frozen=True)
class Resume:
    """The interface of the ways to resume."""

    word: ClassVar[str]

    @property
    def residual_share(self) -> float:
        """How much of the residual the local model contains."""
        return 0.0

    @property
    def removes_residual(self) -> bool:
        """Whether the residual leaves the local model with a push, where results come some steps later."""
        return self.residual_share < 1

    def in_flight_share(self, rounds: int) -> float:
        """How much of each push in flight the local model contains.

        Args:
            rounds: how many rounds are under way at a time.
        """
        del rounds
        return 1.0

    @property
    def own_share(self) -> float:
        """How much of the local model stays where it was."""
        return 0.0

    @property
    def ahead(self) -> bool:
        """Whether the local model takes optimizer steps with pushes in flight."""
        return False


@part("resume", "global_model")
@dataclass(frozen=True)
class FromGlobalModel(Resume):
    """Resume from the global model; the residual waits."""


@part("resume", "global_model_and_residual")
@dataclass(frozen=True)
class FromGlobalModelAndResidual(Resume):
    """Resume from the global model plus `share` of the residual; pushes in flight count in full, or `damped`."""

    share: float = 1.0
    damped: bool = False

    def __post_init__(self) -> None:
        check("global_model_and_residual", "share", self.share, 0, 1)
        if not isinstance(self.damped, bool):
            raise StrategyError(f"global_model_and_residual: damped = {self.damped!r}; wanted True or False")

    @property
    def residual_share(self) -> float:
        """How much of the residual the local model contains: the argument `share`."""
        return self.share

    @property
    def removes_residual(self) -> bool:
        """True unless the local model contains all of the residual."""
        return self.share < 1 or self.damped

    def in_flight_share(self, rounds: int) -> float:
        """1, or 1/sqrt(rounds) if damped."""
        return rounds**-0.5 if self.damped and rounds > 1 else 1.0


@part("resume", "mix")
@dataclass(frozen=True)
class Mix(Resume):
    """Resume from `alpha` of the local model and the rest of the global model, where the result moved it."""

    alpha: float = 0.5

    def __post_init__(self) -> None:
        check("mix", "alpha", self.alpha, 0, 1)

    @property
    def own_share(self) -> float:
        """How much of the local model stays in it: the argument `alpha`."""
        return self.alpha

    @property
    def removes_residual(self) -> bool:
        """False if the local model stays where it is in part."""
        return not self.alpha


@part("resume", "ahead")
@dataclass(frozen=True)
class Ahead(Resume):
    """Where gradients are shared: the global model, after optimizer steps with the site's own pushes in flight."""

    @property
    def ahead(self) -> bool:
        """Always."""
        return True
