"""The books of a simulated run: what every site made, what left it, and what the base took, to the last update.

    made = left + held + done since the last push,   and every push that left is taken, once.

Where the aggregator is a mean of updates, the base is in the books as well: where it started, plus the mean of what
was taken in each round, is where it is and what the server still holds. Sums are kept in double precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.kernels import fixed
from weightgrad.sim.site import SimSite, Step
from weightgrad.wan.global_server import Closed, GlobalServer
from weightgrad.wan.messages import Push
from weightgrad.wan.strategies import Strategy

_TOLERANCE = 0.02  # of a mean step: rounding in float32 stays far below, a single lost step far above


@dataclass(frozen=True)
class Balance:
    """What the books say at the end."""

    pushes: int  # that left
    lost: tuple[tuple[str, int], ...]  # (site, round) of pushes that left and were never taken
    twice: tuple[tuple[str, int], ...]  # taken more than once, or never made
    unbalanced: tuple[str, ...]  # sites, or the server, whose sums do not add up


class Accounts:
    """Of one world. `samples` says how much a site's updates weigh."""

    def __init__(self, strategy: Strategy, samples: Mapping[str, int], first: Tensor) -> None:
        self._strategy, self._samples = strategy, samples
        plan = strategy.for_site()
        # A codec that forgets its noise, or adds momentum of its own, does not send what it was given.
        self._sums = strategy.keep_loss and not getattr(plan.up, "momentum", 0.0)
        averages = strategy.aggregator == "mean" and strategy.shares == "updates"
        self._base = first.double() if averages and not plan.consistency.alone else None
        zero = torch.zeros(first.numel(), dtype=torch.float64)
        self._made = {name: zero.clone() for name in samples}
        self._left = {name: zero.clone() for name in samples}
        self._steps = dict.fromkeys(samples, (0, 0.0))  # how many, and the sum of their largest entries
        self._open: dict[tuple[str, int], Tensor] = {}  # left, and not taken yet
        self._pushes: set[tuple[str, int]] = set()
        self._taken: Counter[tuple[str, int]] = Counter()

    # -- what the world tells ---------------------------------------------------------------

    def compute(self, one: SimSite) -> Step:
        """A site does a step; what it makes is written down."""
        before = one.end.model.double() if not one.end.plan.shares_gradients else None
        step = one.compute()
        made = one.end.model.double() - before if before is not None else _present(step.gradient).double()
        name = one.place.name
        self._made[name] += made
        steps, largest = self._steps[name]
        self._steps[name] = (steps + 1, largest + float(made.abs().max()))
        return step

    def left(self, push: Push) -> None:
        """A push leaves pending, or is sent again."""
        key = (push.site, push.round)
        if key in self._pushes:
            return
        vector = torch.zeros(self._left[push.site].numel())
        for part in push.parts:
            part.into(vector, fixed.ADD)
        self._left[push.site] += vector.double()
        self._pushes.add(key)
        self._open[key] = vector

    def taken(self, closed: Closed) -> None:
        """A round has closed."""
        total = sum(self._samples[site] for site, _ in closed.pushes)
        for key in closed.pushes:
            self._taken[key] += 1
            vector = self._open.pop(key, None)
            if vector is not None and self._base is not None:
                self._base += vector.double() * (self._samples[key[0]] / total)

    # -- at the end -------------------------------------------------------------------------

    def balance(self, sites: list[SimSite], server: GlobalServer) -> Balance:
        """Close the books."""
        unbalanced = [one.place.name for one in sites if self._sums and not self._adds_up(one)]
        if self._base is not None:
            held = server.checkpoint()["out.held"].double()
            steps, largest = (sum(x) for x in zip(*self._steps.values(), strict=True))
            away = float((self._base - server.base.vector.double() - held).abs().max())
            if self._sums and away > _TOLERANCE * largest / max(steps, 1):
                unbalanced.append("the server")
        return Balance(
            pushes=len(self._pushes),
            lost=tuple(sorted(self._pushes - set(self._taken))),
            twice=tuple(sorted(k for k, times in self._taken.items() if times > 1 or k not in self._pushes)),
            unbalanced=tuple(unbalanced),
        )

    def _adds_up(self, one: SimSite) -> bool:
        name, state = one.place.name, one.end.state()
        kept = state["pending.held"].double()
        if "model" in state:
            kept += state["model"].double() - state["mark"].double()
        away = float((self._made[name] - self._left[name] - kept).abs().max())
        steps, largest = self._steps[name]
        return away <= _TOLERANCE * largest / max(steps, 1)


def _present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient
