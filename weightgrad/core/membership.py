"""The sites as the global server knows them, and its replies to those that join."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightgrad.core.global_model import GlobalModel
from weightgrad.core.random_streams import ServerStream
from weightgrad.core.result_log import ResultLog
from weightgrad.kernels.noise import derive
from weightgrad.wire import encoded_snapshot
from weightgrad.wire.messages import JoinReply
from weightgrad.wire.sync_schedule import SyncSchedule


@dataclass
class Member:
    """A site as the server knows it."""

    name: str
    live: bool = True  # rounds wait for it
    done: bool = False  # has finished training: rounds do not wait for it, results still go to it
    pushed_round: int = 0  # the last round it has pushed for
    included_round: int = 0  # the round of its last push that is in a closed round


@dataclass
class Members:
    """All sites that have ever joined. A lost site stays known: what it pushes later is included."""

    by_name: dict[str, Member] = field(default_factory=dict)

    def join(self, name: str) -> Member:
        """A site joins, for the first time or again."""
        member = self.by_name.setdefault(name, Member(name))
        member.live = True
        return member

    def lose(self, name: str) -> None:
        """A site is lost: until it joins again, rounds do not wait for it and results do not go to it."""
        self.by_name[name].live = False

    def leave(self, name: str) -> None:
        """A site leaves for good, unless it joins again; a site that never joined changes nothing."""
        if name in self.by_name:
            self.by_name[name].live = False
            self.by_name[name].done = True

    @property
    def awaited(self) -> list[str]:
        """The names of the sites that rounds wait for."""
        return [member.name for member in self.by_name.values() if member.live and not member.done]

    @property
    def listening(self) -> list[str]:
        """The names of the sites that results go to."""
        return [member.name for member in self.by_name.values() if member.live]

    def state(self) -> dict[str, Tensor]:
        """One tensor for each site, for a checkpoint taken between rounds."""
        found = {}
        for name, member in self.by_name.items():
            # A last push that is not in a closed round yet comes again after a restart, and is awaited.
            over = member.done and member.included_round >= member.pushed_round
            found[name] = torch.tensor([int(member.live), int(over), member.included_round])
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.by_name = {}
        for name, tensor in state.items():
            live, done, included = (int(number) for number in tensor)
            self.by_name[name] = Member(name, bool(live), bool(done), included, included)


class JoinReplies:
    """Tells a site the way to the present global model. Memory: a snapshot while it is being sent.

    Args:
        global_model: the server's global model.
        log: the last round results.
        key: the server's key, for downloads through a lossy codec.
    """

    def __init__(self, global_model: GlobalModel, log: ResultLog, key: int) -> None:
        self._global_model = global_model
        self._log = log
        self._key = derive(key, ServerStream.DOWNLOADS)

    def reply(
        self,
        member: Member,
        *,
        version: int,
        next_round: int,
        schedule: SyncSchedule | None,
        download_codec: str | None = None,
    ) -> JoinReply:
        """The reply to a site that has this version of the global model.

        Args:
            member: the site.
            version: the version of the global model that the site has; -1 if it has none.
            next_round: the round after the last one that has closed.
            schedule: the sync schedule in force, which goes with a download.
            download_codec: the codec that the site wants a download in; None for the exact model.

        Returns:
            The results the site missed, if the log has them all, or a download of the whole model.
        """
        model = self._global_model
        missed = self._log.since(version, model.version) if version >= 0 else None
        snapshot = model.snapshot() if missed is None else None
        encoded: encoded_snapshot.Encoded = {}
        if snapshot is not None and download_codec is not None:
            codec = encoded_snapshot.codec_of(download_codec)
            snapshot, encoded = encoded_snapshot.encode(snapshot, codec, derive(self._key, model.version))
        return JoinReply(
            version=model.version,
            round=next_round,
            step=model.step,
            included=member.included_round,
            results=missed or (),
            snapshot=snapshot,
            pushed=member.pushed_round,
            schedule=schedule if snapshot is not None else None,
            encoded=encoded,
        )
