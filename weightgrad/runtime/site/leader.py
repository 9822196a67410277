"""What rank 0 of a site does beside the work of every rank: it has the coordinator, decides, and tells the other ranks.

Messages of the global server come to rank 0 alone. What follows from them is an order to all ranks
(`runtime/site/orders.py`), which rank 0 does, too (`runtime/site/rank_work.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.core.site.shard_orders import PushOrder
from weightgrad.event_log import EventLog
from weightgrad.runtime.admission_messages import AdmissionReply
from weightgrad.runtime.optimizer.announced import AnnouncedOptimizer
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.site.orders import (
    Abandon,
    Apply,
    Continue,
    GatherBuffers,
    Keep,
    Load,
    Look,
    Measure,
    PushNothing,
    Release,
    SiteOrder,
    TakeBuffers,
    Wait,
    to_bytes,
)
from weightgrad.runtime.site.progress_log import FlushProgress
from weightgrad.runtime.site.rank_connection import RankConnection
from weightgrad.runtime.site.rank_work import RankWork
from weightgrad.wire.messages import JoinReply, Message, ModelPart, Push, RoundResult

log = logging.getLogger("weightgrad")

_BUFFER_SHARE = 10  # buffers ride when so many times their bytes have been sent since
_FEW_BYTES = 4096  # or if they are no more than this: a few packets
_POLL_S = 0.2  # between two looks at the connection during a wait
_WAIT_TOLD_S = 0.5  # between two words to ranks that wait: their connections may have to be made anew, too


class SiteLeader:
    """Decides for a site, on its rank 0.

    Args:
        coordinator: The site's coordinator.
        work: What this rank does, as every rank.
        group: The ranks of the site.
        connection: Rank 0's connections to the global server.
        optimizer: The user's optimizer, whose learning rate goes with shared gradients.
        events: The site's event log, if there is one.
    """

    def __init__(
        self,
        coordinator: SiteCoordinator,
        work: RankWork,
        group: SiteGroup,
        connection: RankConnection,
        optimizer: AnnouncedOptimizer,
        events: EventLog | None,
    ) -> None:
        self.coordinator = coordinator
        self._work, self._group, self._connection, self._optimizer = work, group, connection, optimizer
        self._events = events
        self._plan = coordinator.plan
        self._exact_follows: JoinReply | None = None
        self._first_digest: int | None = None
        self._progress: FlushProgress | None = None
        self._sent_before = -1  # bytes that had been sent when buffers last rode on a push
        self.waited = 0.0
        """Seconds that training has waited for the global server."""
        self.joined = False
        """Whether the server has been sent a Join, so that it must be sent a Leave."""

    # -- the beginning ----------------------------------------------------------------------

    def join(self, digest: int | None, *, known: bool = False) -> None:
        """Join, and wait until the site may train.

        Args:
            digest: Of the site's weights; None if it goes on from a checkpoint.
            known: Whether those are the weights with which it has left before, in this process.

        Raises:
            RefusedError: The server has ended the session.
        """
        coordinator, connection = self.coordinator, self._connection
        self._first_digest = digest
        if self._events is not None:
            pushed = coordinator.progress.pushed_round
            self._events.write("start", connection.now, site=coordinator.name, step=self._work.steps, pushed=pushed)
            self.write_threshold()
        connection.send_control(coordinator.join(digest=digest if coordinator.version == 0 else None))
        self.joined = True
        self.wait_until_unblocked()
        self._work.steps = coordinator.progress.step
        log.info("%s joins with global model version %d", coordinator.name, coordinator.version)
        if digest is not None and coordinator.full_downloads and not known:
            log.warning(
                "%s: the model has the weights of the global model, version %d, and not those that it had before "
                "prepare(). To begin from others, load them at the site that starts first: they become the global one",
                coordinator.name,
                coordinator.version,
            )

    def server_restarted(self, reply: AdmissionReply) -> None:
        """The global server was restarted, and rank 0 has entered again: join again."""
        if self._connection.loading:
            return  # the download is interrupted, and asked for again when all ranks know
        if reply.init_model:  # the server stopped before the first global model was on its disk
            self._connection.send_model()
        digest = self._first_digest if self.coordinator.version == 0 else None
        self._connection.send_control(self.coordinator.join(digest=digest))

    # -- decisions --------------------------------------------------------------------------

    def lead(self, decide: Callable[[], None]) -> None:
        """Decide something; the other ranks hear of it, also if it fails."""
        try:
            self._work.begin_round()
            decide()
        except BaseException as error:
            self._tell(Abandon(why=str(error)))
            raise
        self._work.next_decision = self.coordinator.next_decision()
        self._tell(Continue(step=self._work.steps, next_decision=self._work.next_decision))
        self._work.end_round()  # as the other ranks do now: it exchanges weights with them

    def _tell(self, order: SiteOrder) -> None:
        if self._group.size > 1:
            self._group.bytes_from_first(to_bytes(order))

    def _order(self, order: SiteOrder) -> None:
        """Have every rank do something."""
        self._tell(order)
        self._work.do(order)

    def after_step(self) -> None:
        """A step is done: start a round if it is time, and wait for what training needs before its next step."""
        coordinator, connection = self.coordinator, self._connection
        coordinator.rate = self._optimizer.rate if self._plan.shares_gradients else None
        coordinator.options = self._optimizer.changed()
        coordinator.step_timer.trip = connection.trip_s
        found = coordinator.after_step(connection.now, self._measure)
        if found is None or found[1] is None:
            if self._plan.shares_gradients:
                self._order(Keep())
            if found is not None:
                self._push(found[0], None)
        else:
            self._push(*found)
        self.wait_until_unblocked()
        self._work.steps = coordinator.progress.step

    def finish(self, *, flush: bool) -> None:
        """Training is over: push what is left, and wait until the global model has it.

        Args:
            flush: Whether it is pushed, or stays with the site.
        """
        coordinator, before = self.coordinator, self._connection.up_bytes
        if not coordinator.finished:  # it is, if a site that had left is started again
            coordinator.rate = self._optimizer.rate if self._plan.shares_gradients else None
            coordinator.options = self._optimizer.changed()
            self._push(*coordinator.finish(self._connection.now, flush=flush))
        self._progress = FlushProgress(coordinator.name, self._connection.up_bytes - before)
        self.wait_until_unblocked()
        self._progress = None

    def _push(self, push: Push, order: PushOrder | None) -> None:
        if self._buffers_ride(push):
            self._order(GatherBuffers(round=push.round))
            push = self.coordinator.with_buffers(push, self._work.gathered)
            self._sent_before = self._connection.up_bytes
        self._connection.send_control(push)
        self._order(PushNothing(round=push.round) if order is None else order)

    def _buffers_ride(self, push: Push) -> bool:
        """Whether buffers ride on a push: on the first and the last, and else if they are little of what is sent.

        Those before must have come back: a result is the mean of what sites had at one moment.
        """
        buffers, sent = self._work.buffers, self._connection.up_bytes - self._sent_before
        if not buffers.nbytes or push.final or self._sent_before < 0:
            return bool(buffers.nbytes)
        under_way = any(one.push.round == buffers.sent_round for one in self.coordinator.in_flight)
        little = buffers.nbytes <= _FEW_BYTES or sent * self._group.size >= _BUFFER_SHARE * buffers.nbytes
        return little and not under_way

    def _measure(self) -> tuple[float, float]:
        self._order(Measure())
        return self._work.squares

    # -- messages ---------------------------------------------------------------------------

    def wait_until_unblocked(self) -> None:
        """Apply the results that have come, and wait for those that training needs before its next step.

        Raises:
            RefusedError: The server has ended the session.
        """
        coordinator, connection = self.coordinator, self._connection
        downloads = coordinator.full_downloads
        self.pump(0.0)
        began, why = time.monotonic(), coordinator.blocked(connection.now)
        first, told, paused = why, began, False
        if first == "stall":
            log.warning(
                "%s stalls after step %d: the global server has been silent for more than t = %g s; the workers get "
                "no new weights until it is heard",
                *(coordinator.name, coordinator.progress.step, self._plan.t),
            )
        if why is not None and self._work.pushing:
            self._order(Wait())  # which ends the push on every rank: what is waited for may need it
        while why is not None:
            if why == "paused" and not paused:
                paused = True
                log.warning("%s is paused by the operator, after step %d", coordinator.name, coordinator.progress.step)
            self.pump(_POLL_S)
            connection.telemetry.says_waiting(time.monotonic() - began)
            if self._progress is not None:
                self._progress.look(connection.unacknowledged_bytes)
            if time.monotonic() - told > _WAIT_TOLD_S:
                self._tell(Wait())
                told = time.monotonic()
            why = None if coordinator.finished else coordinator.blocked(connection.now)
        if first is not None:
            seconds = time.monotonic() - began
            self.waited += seconds
            connection.telemetry.waited_for_server(coordinator.progress.step, seconds, "paused" if paused else first)
        connection.telemetry.metrics.update(coordinator)
        if coordinator.full_downloads != downloads:
            connection.telemetry.downloaded(coordinator.version, exact=coordinator.exact)

    def pump(self, timeout: float) -> None:
        """Handle what has come, and apply the results that are due.

        Args:
            timeout: Seconds to wait for the first message.
        """
        coordinator, connection = self.coordinator, self._connection
        connection.poll(timeout)
        while (message := connection.control()) is not None:
            if isinstance(message, JoinReply) and message.downloads and coordinator.joined and not coordinator.exact:
                self._exact_follows = message  # training goes on until all of it is here
            else:
                self._receive(message)
        if (reply := self._exact_follows) is not None and connection.has_download():
            self._exact_follows = None
            version, step = coordinator.version, coordinator.global_step
            self._receive(replace(reply, version=version, step=step) if version > reply.version else reply)
        while (found := coordinator.next_result(self._all_have)) is not None:
            order, result = found
            self._order(Apply(order=order, rate=result.rate, options=result.options))
            if result.buffers and self._work.buffers.nbytes:
                self._order(TakeBuffers.of(order.through, result.buffers))

    def _all_have(self, version: int) -> bool:
        """Whether every rank has all values of a result."""
        if not self._connection.has_result(version):
            return False
        self._order(Look(version=version))
        return self._work.all_there

    def _receive(self, message: Message) -> None:
        messages, order = self.coordinator.receive(message, self._connection.now)
        if order is not None and isinstance(message, JoinReply):
            self._order(Load.of(order, message))
            if not self._work.all_there:  # a server process was restarted: all ranks need the download once more
                messages = [self.coordinator.join(same_start=False)]
        elif isinstance(message, RoundResult):
            self._release(message)
        for one in messages:
            assert not isinstance(one, ModelPart)
            self._connection.send_control(one)  # type: ignore[arg-type]

    def _release(self, result: RoundResult) -> None:
        """Free the site's own push, where its result is waited for and does without it."""
        through = result.included.get(self.coordinator.name)
        waits = not self.coordinator.overlap and not self._plan.shares_gradients
        if through is not None and waits and not result.relayed:
            self._order(Release(through=through))

    def write_threshold(self) -> None:
        """Write the significance threshold G into the event log, where the trigger has one."""
        coordinator = self.coordinator
        if self._events is not None and coordinator.threshold is not None:
            value, now = coordinator.threshold.value, self._connection.now
            self._events.write("threshold", now, site=coordinator.name, step=self._work.steps, value=value)
