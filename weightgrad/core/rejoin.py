"""How a site joins, and how it joins again after its own absence or the server's.

The server replies to a Join with the way to the present global model: the round results that the site missed, or the
whole model. What the site has made and the server does not have stays with the site: its pushes in flight are sent
again, its residual and fresh update stay. A site that was restored from an old checkpoint replays its steps: the
server drops the pushes that it has, and their results arrive in the same places as before.

A site that comes late may ask for its first download through a lossy codec. It trains on the approximate model at
once and asks for the exact one meanwhile. Until that has come, its global model is not `exact`: the one exception to
"the same bits on every site".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weightgrad.core.site_parts import SiteParts
from weightgrad.errors import ProtocolError
from weightgrad.wire import encoded_snapshot
from weightgrad.wire.messages import Join, JoinReply, Message, RoundResult


class SiteMembership:
    """Whether a site is joined, and what a JoinReply changes in its parts. Memory: no full-size vector of its own.

    Attributes:
        joined: whether the server has replied to the last Join.
        exact: whether the global model has the bits of the server's model at that version.
        full_downloads: how often the whole global model has been downloaded.
        replay_until: after a restore from an old checkpoint, the last round whose push the server has already.
    """

    def __init__(self, name: str, parts: SiteParts, *, download_codec: str | None) -> None:
        self.joined = False
        self.exact = True
        self.full_downloads = 0
        self.replay_until = 0
        self._name = name
        self._parts = parts
        self._download_codec = download_codec
        self._discarded_through = 0  # pushes through this round are with the server; the residual of then was discarded
        self._catch_up_to: tuple[int, int] | None = None  # (step, round) of the others, for after the replay

    def join(self, *, same_start: bool = True) -> Join:
        """The message that asks to join, for the first time or again.

        Args:
            same_start: whether the site started from the same weights as the others; if not, it needs a download.

        Returns:
            A Join with the version that the site has.
        """
        self.joined = False
        self.exact = self.exact and same_start
        first_time = self._parts.global_model.version == 0
        return Join(
            site=self._name,
            version=self._parts.global_model.version if self.exact else -1,
            download_codec=self._download_codec if first_time else None,
        )

    def is_replayed(self, round_: int) -> bool:
        """Whether the push of this round is in the server's hands, and is about to be made again here."""
        return self._parts.progress.pushed_round < round_ <= self.replay_until

    def misses_own_push(self, result: RoundResult) -> bool:
        """Whether a relayed result leaves out a push that this site neither has in flight nor is about to replay."""
        left_out = {push.round for push in result.relayed if push.segments is None}
        replayed = range(self._parts.progress.pushed_round + 1, self.replay_until + 1)
        return not left_out <= self._parts.in_flight.rounds.union(replayed)

    def catch_up_after_replay(self) -> None:
        """Go on where the other sites are, if the replay is over."""
        if self._catch_up_to is not None and self._parts.progress.pushed_round >= self.replay_until:
            self._parts.progress.catch_up(*self._catch_up_to)
            self._catch_up_to = None

    def handle_reply(self, reply: JoinReply, now: float) -> list[Message]:
        """Go to the present global model.

        Args:
            reply: the server's reply to a Join.
            now: the time.

        Returns:
            The messages to send: pushes again, and a Join for the exact model after an approximate one.
        """
        was_joined, self.joined = self.joined, True
        # The site was training on an approximate model and had asked for the exact one meanwhile.
        exact_followed = was_joined and not self.exact and reply.snapshot is not None
        rounds_missed = reply.round - 1 > reply.pushed
        if reply.snapshot is not None:
            self._replace_global_model(reply, reply.snapshot)
        for result in reply.results:
            if result.version > self._parts.global_model.version:
                self._parts.inbox[result.version] = result
        others_at = (reply.step, reply.round - 1)
        if reply.snapshot is None and reply.pushed > self._parts.progress.pushed_round:
            # The checkpoint is older than the last push. The site replays what it has forgotten: the server drops
            # the pushes it has, and the results apply at the same steps. Then the site goes where the others are.
            self.replay_until = reply.pushed
            self._catch_up_to = others_at if rounds_missed else None
        elif rounds_missed or (reply.snapshot is not None and not exact_followed):
            self._parts.progress.catch_up(*others_at)
        if exact_followed:
            return []  # nothing was lost: what the server lacks is on its way behind the Join
        messages: list[Message] = [*self._parts.in_flight.resend_after(reply.included, now)]
        if not was_joined and not self.exact:
            messages.append(Join(site=self._name, version=-1))
        return messages

    def _replace_global_model(self, reply: JoinReply, snapshot: Mapping[str, Tensor]) -> None:
        """Take over the whole global model; everything of the site's own that it lacks stays with the site.

        A checkpoint older than the last push may hold a residual that was pushed since. Then the residual is
        discarded: better lost than sent twice.
        """
        model = self._parts.global_model
        if reply.version < model.version:
            raise ProtocolError(
                f"{self._name!r} has global model version {model.version}, the server only {reply.version}: "
                "the server was restored from an older checkpoint; restore the sites from the same one"
            )
        whole = encoded_snapshot.whole(snapshot, reply.encoded, self._parts.global_model.layout.numel)
        if reply.pushed > max(self._parts.progress.pushed_round, self._discarded_through):
            self._parts.residual.clear()
            self._parts.in_flight.clear()
            self._discarded_through = reply.pushed
            self._parts.placement.forget_fresh_update()
        fresh = None if self._parts.placement.is_global_model else self._parts.placement.fresh_update()
        for version in [version for version in self._parts.inbox if version <= reply.version]:
            del self._parts.inbox[version]
        self._parts.in_flight.remove_through(reply.included)
        self._parts.global_model.restore(whole, reply.version, reply.step)
        self.exact = not reply.encoded
        self.full_downloads += 1
        self._parts.schedule.adopt(reply.schedule)
        if fresh is not None:
            self._parts.placement.place(fresh, None, rounds_under_way=self._parts.schedule.rounds_under_way)
            self._parts.steps.model_was_moved()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint says about the membership: a site that comes back with an approximate model has none."""
        return {} if self.exact else {"approximate": torch.tensor(1)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. The site must join again."""
        self.joined, self.exact = False, "approximate" not in state
