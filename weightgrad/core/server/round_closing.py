"""How a round closes: with which pushes, how much each of them weighs, and whether they are relayed.

`RoundClosing.order` makes of a round that is complete the order that all shards carry out.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from weightgrad import codecs
from weightgrad.codecs import Codec, Fp32
from weightgrad.core.agreed_numbers import AgreedNumbers
from weightgrad.core.controller.gradient_controller import GradientController
from weightgrad.core.controller.update_controller import Controller
from weightgrad.core.server.close_order import ClosedPush, CloseOrder
from weightgrad.core.server.membership import Members
from weightgrad.core.server.open_round import OpenRound
from weightgrad.core.server.progress import ServerProgress
from weightgrad.core.server.push_checks import PushChecks
from weightgrad.core.server.strategy import ServerStrategy
from weightgrad.wire.messages import Push, RoundResult


class RoundClosing:
    """Makes the orders to close rounds.

    Args:
        plan: the server's parts of the strategy.
        members: the sites.
        progress: how far the server has come; here it learns that results will have lost something.
        checks: refuses pushes.
        controller: sets the codec of results under `auto`; None where the strategy is fixed.

    Attributes:
        agreed: what the sites have stated about themselves, as far as the others bear it out.
    """

    def __init__(
        self,
        plan: ServerStrategy,
        members: Members,
        progress: ServerProgress,
        checks: PushChecks,
        controller: Controller | GradientController | None,
    ) -> None:
        self.agreed = AgreedNumbers()
        self._plan = plan
        self._members = members
        self._progress = progress
        self._checks = checks
        self._controller = controller

    @property
    def down(self) -> Codec:
        """The codec of the next result."""
        return self._plan.down if self._controller is None else codecs.parse(self._controller.now.down)

    def order(self, number: int, closing: OpenRound, *, first_norm: float, aligned: bool) -> CloseOrder:
        """The order to close a round.

        Args:
            number: the round.
            closing: its pushes; it gets those that are refused because they are out of line.
            first_norm: the norm of the first global model.
            aligned: whether pushes can be relayed: every piece of a push is needed by one rank of each other site.
        """
        plan, members, progress = self._plan, self._members, self._progress
        senders = sorted(closing.pushes, key=lambda push: (push.site, push.round))
        self.agreed.take(senders)
        rate = self.agreed.rate(senders, alone=plan.consistency.alone)
        self._checks.compare(closing, self._weight, rate, first_norm)
        pushes = tuple(
            ClosedPush(
                site=push.site,
                round=push.round,
                weight=0.0 if (push.site, push.round) in closing.refused else self._weight(push),
                seen=push.seen,
                counts=closing.counts(push),
                squares=closing.facts[push.site, push.round].by_process if closing.counts(push) else (),
            )
            for push in senders
        )
        pushes = self._limited(pushes, closing)
        lossy = not isinstance(self.down, Fp32)
        relays = len(members.by_name) <= plan.relay and not progress.has_residual and lossy and aligned
        sent = any(push.counts for push in pushes)
        # A site whose push was refused must not fill it in again.
        told_all = closing.rejoined | {push.site for push in pushes if not push.counts}
        progress.has_residual = progress.has_residual or (lossy and sent and not relays)
        return CloseOrder(
            result=RoundResult(
                version=progress.version + 1,
                round=number,
                step=max(
                    [progress.step, *(one.step for one in senders if (one.site, one.round) not in closing.refused)]
                ),
                included=dict(closing.included),
                rate=rate if sent else None,
                options=self.agreed.options(senders) if sent else (),
            ),
            pushes=pushes,
            weight=self._total_weight(closing, sum(push.weight for push in pushes)),
            down=None if self._controller is None else self._controller.now.down,
            relays=relays,
            last=not members.training,
            compares=self._controller is not None and self._controller.compares(number),
            sites=len(members.by_name),
            receivers={name: relays and name not in told_all for name in members.listening},
        )

    def _weight(self, push: Push) -> float:
        """The weight of a push, by its samples and its staleness."""
        return self.agreed.weight(push) * self._plan.consistency.weight(self._progress.version - push.seen)

    def _limited(self, pushes: tuple[ClosedPush, ...], closing: OpenRound) -> tuple[ClosedPush, ...]:
        """Weigh down the pushes that are larger than the guard or the aggregator's limit allows."""
        limit = self._plan.aggregator.limit
        norms = {push: math.sqrt(closing.facts[push.site, push.round].squares) for push in pushes if push.counts}
        usual = limit * statistics.median_low([norm for norm in norms.values() if norm > 0] or [0.0])
        scales = {push: closing.verdict.scales.get((push.site, push.round), 1.0) for push in pushes}
        if usual > 0:
            scales |= {push: min(scales[push], usual / norm) for push, norm in norms.items() if norm > 0}
        return tuple(
            replace(push, weight=push.weight * scale, scale=scale) if scale < 1 else push
            for push, scale in scales.items()
        )

    def _total_weight(self, closing: OpenRound, weight: float) -> float:
        """Where a round does not contain a push of every site, divide the sum by what a full round would weigh."""
        consistency = self._plan.consistency
        if consistency.alone:
            return consistency.divisor(len(self._members.listening))
        if consistency.missing and closing.late_senders == closing.senders:
            # Late pushes only: the others have finished, and what comes after them has no more than its share.
            return max(weight, float(len(self._members.by_name)))
        return weight
