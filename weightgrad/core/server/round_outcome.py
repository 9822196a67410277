"""What follows from a round that all shards have closed: the result and its messages, and what the server learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from weightgrad.core.controller.agreement import Signs
from weightgrad.core.controller.decision import Decision
from weightgrad.core.controller.gradient_controller import GradientController
from weightgrad.core.controller.update_controller import Controller
from weightgrad.core.server.close_order import ClosedPart, CloseOrder
from weightgrad.core.server.membership import Members
from weightgrad.core.server.open_round import ClosedRound, OpenRound
from weightgrad.core.server.outbox import Outbox
from weightgrad.core.server.progress import ServerProgress
from weightgrad.core.server.result_headers import ResultHeaders, header_of
from weightgrad.core.server.round_timing import LinkObserver
from weightgrad.core.shared_buffers import SharedBuffers
from weightgrad.wire.message_parts import join_result
from weightgrad.wire.message_sizes import nbytes


class RoundOutcome:
    """Makes the results of rounds that have closed, and tells those who learn from them.

    Args:
        members: the sites, whose pushes are included from then on.
        progress: moves to the version and the step of the result.
        results: remembers the result.
        buffers: those of the sites' modules, which ride on pushes and results.
        links: learns how long pushes were held, and how large the result is.
        controller: sets the sync schedule under `auto`; None where the strategy is fixed.
    """

    def __init__(
        self,
        *,
        members: Members,
        progress: ServerProgress,
        results: ResultHeaders,
        buffers: SharedBuffers,
        links: LinkObserver,
        controller: Controller | GradientController | None,
    ) -> None:
        self._members = members
        self._progress = progress
        self._results = results
        self._buffers = buffers
        self._links = links
        self._controller = controller

    def round_closed(
        self, order: CloseOrder, parts: Sequence[ClosedPart], closing: OpenRound, now: float, out: Outbox
    ) -> None:
        """Make the result of a round and its messages.

        Args:
            order: how it was to close.
            parts: what each shard has made of it.
            closing: its pushes.
            now: the time.
            out: gets the result for every site, and what has happened.
        """
        result = join_result(order.result, [part.result for part in parts])
        decision, signs = self._decide(parts, relayed=order.relays, rate=order.result.rate)
        schedule = decision.schedule if decision is not None else None
        result = replace(result, schedule=schedule, buffers=self._combined_buffers(closing))
        messages = {name: result.without(name) if own else result for name, own in order.receivers.items()}
        sizes = {
            name: nbytes(header_of(message)) + sum(part.sizes.get(name, 0) for part in parts)
            for name, message in messages.items()
        }
        self._links.round_closed(closing, sizes, now, sites=len(self._members.by_name))
        self._progress.version, self._progress.step = result.version, result.step
        for name, round_ in closing.included.items():
            self._members.by_name[name].included_round = round_
        for push in closing.pushes:
            refused = (push.site, push.round) in closing.refused
            if not refused:
                self._members.included(push.site)
            elif self._members.fault(push.site):
                out.aside.append(push.site)
        out.refused += [(site, why) for (site, _), why in closing.verdict.refused.items()]
        out.limited += [(site, why) for (site, _), why in closing.verdict.limited.items()]
        self._results.remember(result, max(part.first_result for part in parts))
        out.messages += messages.items()
        out.closed.append(
            ClosedRound(
                result=result,
                senders=sorted(closing.senders),
                pushes=[(push.site, push.round) for push in closing.pushes],
                up_bytes=closing.up_bytes,
                down_bytes=max(sizes.values(), default=0),
                digest=f"{sum(part.digest for part in parts) % 2**64:016x}",
                decision=decision,
                signs=signs,
            )
        )

    def _combined_buffers(self, closing: OpenRound) -> Mapping[str, Tensor]:
        """The buffers of all sites that count, if a push of this round has brought some."""
        brought = [
            push
            for push in sorted(closing.pushes, key=lambda push: push.round)
            if push.buffers and (push.site, push.round) not in closing.refused
        ]
        for push in brought:
            self._buffers.take(push.site, push.samples, push.buffers)
        members = self._members.by_name.values()
        return self._buffers.combine(one.name for one in members if one.live or one.done) if brought else {}

    def _decide(
        self, parts: Sequence[ClosedPart], *, relayed: bool, rate: float | None
    ) -> tuple[Decision | None, Signs | None]:
        """A new sync schedule, if the controller of `auto` wants one, and how alike the pushes were."""
        if self._controller is None:
            return None, None
        compared = [part.signs for part in parts if part.signs is not None]
        signs = Signs(sum(s.common for s in compared), sum(s.same for s in compared)) if compared else None
        if signs is not None:
            self._controller.compare(signs)
        return self._controller.decide(self._members.awaited, relayed=relayed, rate=rate), signs
