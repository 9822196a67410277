"""The conservation audit of a simulated run: no update is lost, and none is applied twice.

    computed = pushed + residual + computed since the last push,   and every push is applied exactly once.

Where the aggregator is a mean of updates, the audit also checks the global model: the initial model plus the mean of
the pushes of every round equals the global model plus what the server's own residual holds. Sums are kept in double
precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.core.server.state import ClosedRound, ServerState
from weightgrad.core.strategies import Strategy
from weightgrad.kernels import fixed
from weightgrad.lab.sim.site import SimSite, Step
from weightgrad.wire.messages import Push

_TOLERANCE = 0.02  # of a mean step: rounding in float32 stays far below, one lost step is far above


@dataclass(frozen=True)
class AuditResult:
    """What the audit found.

    Attributes:
        pushes: Number of pushes that left a site.
        lost: (site, round) of pushes that were never applied.
        twice: (site, round) of pushes that were applied more than once, or that no site made.
        unbalanced: The sites, or the server, whose sums do not match.
    """

    pushes: int
    lost: tuple[tuple[str, int], ...]
    twice: tuple[tuple[str, int], ...]
    unbalanced: tuple[str, ...]


class ConservationAudit:
    """Follows every update of one simulation.

    Args:
        strategy: The strategy of the run.
        samples: By site, the number of samples in a step: the weight of its updates in the mean.
        first: The initial model as a flat vector.
    """

    def __init__(self, strategy: Strategy, samples: Mapping[str, int], first: Tensor) -> None:
        self._strategy, self._samples = strategy, samples
        plan = strategy.for_site()
        # A codec without error feedback, or with momentum of its own, does not send what it was given.
        self._sums = strategy.keep_loss and not getattr(plan.up, "momentum", 0.0)
        averages = strategy.aggregator == "mean" and strategy.shares == "updates"
        self._global_model = first.double() if averages and not plan.consistency.alone else None
        zero = torch.zeros(first.numel(), dtype=torch.float64)
        self._computed = {name: zero.clone() for name in samples}
        self._pushed = {name: zero.clone() for name in samples}
        self._steps = dict.fromkeys(samples, (0, 0.0))  # how many, and the sum of their largest entries
        self._open: dict[tuple[str, int], Tensor] = {}  # pushed, and not applied yet
        self._pushes: set[tuple[str, int]] = set()
        self._applied: Counter[tuple[str, int]] = Counter()

    # -- during the run ---------------------------------------------------------------------

    def compute(self, site: SimSite) -> Step:
        """Compute a site's next step, and record its update."""
        before = site.state.model.double() if not site.state.plan.shares_gradients else None
        step = site.compute()
        made = site.state.model.double() - before if before is not None else _present(step.gradient).double()
        name = site.place.name
        self._computed[name] += made
        steps, largest = self._steps[name]
        self._steps[name] = (steps + 1, largest + float(made.abs().max()))
        return step

    def record_push(self, push: Push) -> None:
        """Record that a site sends a push; one that is sent again counts once."""
        key = (push.site, push.round)
        if key in self._pushes:
            return
        vector = torch.zeros(self._pushed[push.site].numel())
        for segment in push.segments:
            segment.into(vector, fixed.ADD)
        self._pushed[push.site] += vector.double()
        self._pushes.add(key)
        self._open[key] = vector

    def record_round(self, closed: ClosedRound) -> None:
        """Record that the server has closed a round."""
        total = sum(self._samples[site] for site, _ in closed.pushes)
        for key in closed.pushes:
            self._applied[key] += 1
            vector = self._open.pop(key, None)
            if vector is not None and self._global_model is not None:
                self._global_model += vector.double() * (self._samples[key[0]] / total)

    # -- at the end -------------------------------------------------------------------------

    def result(self, sites: list[SimSite], server: ServerState) -> AuditResult:
        """Compare all sums at the end of the run."""
        unbalanced = [site.place.name for site in sites if self._sums and not self._adds_up(site)]
        if self._global_model is not None:
            residual = server.residual().double()
            steps, largest = (sum(x) for x in zip(*self._steps.values(), strict=True))
            away = float((self._global_model - server.global_model.vector.double() - residual).abs().max())
            if self._sums and away > _TOLERANCE * largest / max(steps, 1):
                unbalanced.append("the server")
        return AuditResult(
            pushes=len(self._pushes),
            lost=tuple(sorted(self._pushes - set(self._applied))),
            twice=tuple(sorted(k for k, times in self._applied.items() if times > 1 or k not in self._pushes)),
            unbalanced=tuple(unbalanced),
        )

    def _adds_up(self, site: SimSite) -> bool:
        name = site.place.name
        kept = site.state.residual().double() + site.state.fresh_update().double()
        away = float((self._computed[name] - self._pushed[name] - kept).abs().max())
        steps, largest = self._steps[name]
        return away <= _TOLERANCE * largest / max(steps, 1)


def _present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient
