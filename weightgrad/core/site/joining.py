"""How a site joins, for the first time or again, and how it comes to the present global model.

The server replies to a Join with the way to the present global model: the round results that the site missed, or the
whole model. What the site has made and the server does not have stays with the site: its pushes in flight are sent
again, its residual and fresh update stay. A site that was restored from an old checkpoint replays its steps: the server
drops the pushes that it has, and their results arrive in the same places as before.

A site that comes late may ask for its first download through a lossy codec. It trains on the approximate model at once
and asks for the exact one meanwhile. Until that has come, its global model is not `exact`: the one exception to "the
same bits on every site".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weightgrad.core.parts.resume import Resume
from weightgrad.core.site.progress import SiteProgress
from weightgrad.core.site.pushes_in_flight import PushesInFlight
from weightgrad.core.site.replay import Replay
from weightgrad.core.site.result_inbox import ResultInbox
from weightgrad.core.site.schedule import SiteSchedule
from weightgrad.core.site.shard_orders import LoadOrder
from weightgrad.errors import ProtocolError
from weightgrad.wire.messages import Join, JoinReply, Message


class SiteJoining:
    """Whether a site has joined, and with which global model.

    Args:
        site: the name of the site.
        progress: how far the site has come.
        schedule: the sync schedule in force.
        in_flight: the site's pushes without a result.
        inbox: the results that are not applied yet.
        replay: the pushes that the site is about to make again.
        resume: how the site goes on from a new global model.
        download_codec: the codec of the first download if the site comes late; None asks for the exact model.

    Attributes:
        joined: whether the server has replied to the last Join.
        exact: whether the global model has the bits of the server's model at that version.
        full_downloads: how often the whole global model has been downloaded.
        epoch: of the site's processes; the driver sets it.
        replays: whether a site that has forgotten pushes computes them again, step by step, as one that goes on from a
            checkpoint does. Otherwise it begins from the present global model, so that nothing it does is dropped as a
            repetition. The driver sets it.
    """

    def __init__(
        self,
        site: str,
        *,
        progress: SiteProgress,
        schedule: SiteSchedule,
        in_flight: PushesInFlight,
        inbox: ResultInbox,
        replay: Replay,
        resume: Resume,
        download_codec: str | None,
    ) -> None:
        self.joined = False
        self.exact = True
        self.full_downloads = 0
        self.epoch = 0
        self.replays = True
        self._site = site
        self._progress = progress
        self._schedule = schedule
        self._in_flight = in_flight
        self._inbox = inbox
        self._replay = replay
        self._resume = resume
        self._download_codec = download_codec
        self._discarded_through = 0  # the server has pushes through this round of which nothing is known here any more
        self._joined_at = 0  # the version of the global model when the server last replied to a Join

    def join(self, *, same_start: bool = True, digest: int | None = None) -> Join:
        """The message that asks to join, for the first time or again.

        Args:
            same_start: whether the site started from the same weights as the others; if not, it needs a download.
            digest: of the site's weights, from which the server tells whether it needs a download; None if they were
                trained already, or `same_start` says it.

        Returns:
            A Join with the version that the site has.
        """
        self.joined = False
        self.exact = self.exact and same_start
        return Join(
            site=self._site,
            version=self._progress.version if self.exact else -1,
            epoch=self.epoch,
            digest=digest,
            download_codec=self._download_codec if self._progress.version == 0 else None,
        )

    def catches_up(self) -> bool:
        """Whether results that the site missed are still to be applied before it may go on."""
        if self._progress.version >= self._joined_at:
            return False
        result = self._inbox.following
        return result is None or self._inbox.is_due(result)  # one that is not due waits for steps that are replayed

    def receive(self, reply: JoinReply, now: float) -> tuple[list[Message], LoadOrder | None]:
        """Handle the server's reply to a Join.

        Args:
            reply: what has come.
            now: the time.

        Returns:
            The messages to send, in which pushes have no segments; and what to load before, if a model comes with it.

        Raises:
            ProtocolError: the server has an older model than the site.
        """
        if not self.replays and not reply.downloads and reply.pushed > self._known_through:
            return [self.join(same_start=False)], None
        was_joined, self.joined = self.joined, True
        self._joined_at = reply.version
        # The site was training on an approximate model and had asked for the exact one meanwhile.
        exact_followed = was_joined and not self.exact and reply.downloads
        rounds_missed = reply.round - 1 > reply.pushed
        order = self._take_over(reply) if reply.downloads else None
        for result in reply.results:
            self._inbox.add(result)
        others_at = (reply.step, reply.round - 1)
        if not reply.downloads and reply.pushed > self._known_through:
            # The checkpoint is older than the last push.
            self._replay.begin(reply.pushed, others_at if rounds_missed else None)
        elif rounds_missed or (reply.downloads and not exact_followed):
            self._progress.catch_up(*others_at)
        if exact_followed:
            return [], order  # nothing was lost: what the server lacks is on its way behind the Join
        if reply.downloads and self.exact:
            return [self.join()], order  # when the model is here, the site says so and is awaited again
        messages: list[Message] = []
        for sent in self._in_flight.after(reply.included):
            sent.sent_at = now
            messages.append(sent.push)
        if not was_joined and not self.exact:
            messages.append(Join(site=self._site, version=-1, epoch=self.epoch, training=True))
        return messages, order

    def _take_over(self, reply: JoinReply) -> LoadOrder:
        """Take over the whole global model; everything of the site's own that it lacks stays with the site.

        A checkpoint older than the last push may hold a residual that was pushed since. Then the residual is
        discarded: better lost than sent twice.
        """
        progress = self._progress
        if reply.version < progress.version:
            raise ProtocolError(
                f"{self._site!r} has global model version {progress.version}, the server only {reply.version}: "
                "the server was restored from an older checkpoint; restore the sites from the same one"
            )
        discards = reply.pushed > self._known_through
        if discards:
            self._in_flight.clear()
            self._discarded_through = reply.pushed
            progress.round = max(progress.round, reply.pushed)  # a second push for a round would be dropped
        self._inbox.remove_through(reply.version)
        self._in_flight.remove_through(reply.included)
        progress.version, progress.global_step = reply.version, reply.step
        self.exact = not reply.approximate
        self.full_downloads += 1
        self._schedule.adopt(reply.schedule)
        return LoadOrder(
            version=reply.version,
            step=reply.step,
            included=reply.included,
            discards=discards,
            in_flight_share=self._resume.in_flight_share(self._schedule.rounds_under_way),
        )

    @property
    def _known_through(self) -> int:
        """The last round of which the site knows whether the server has its push."""
        return max(self._progress.pushed_round, self._discarded_through)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the progress, as named tensors."""
        found = {} if self.exact else {"approximate": torch.tensor(1)}
        if self._discarded_through:
            found["discarded_through"] = torch.tensor(self._discarded_through)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; other names in `state` are ignored."""
        self.joined, self.exact = False, "approximate" not in state
        self._discarded_through = int(state["discarded_through"]) if "discarded_through" in state else 0
