"""The sites as the global server knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Member:
    """A site as the server knows it."""

    name: str
    live: bool = True  # rounds wait for it
    done: bool = False  # has finished training: rounds do not wait for it, results still go to it
    loading: bool = False  # receives the whole global model: rounds do not wait for it, results still go to it
    loads: tuple[int, int] | None = None  # epoch and version of that download: all later results have been sent to it
    pushed_round: int = 0  # the last round it has pushed for
    included_round: int = 0  # the round of its last push that is in a closed round


@dataclass
class Members:
    """All sites that have ever joined. A lost site stays known: what it pushes later is included."""

    by_name: dict[str, Member] = field(default_factory=dict)

    def join(self, name: str) -> Member:
        """A site joins, for the first time or again. One that had left has come back to train: rounds wait for it."""
        member = self.by_name.setdefault(name, Member(name))
        if not member.live:
            member.done = False
        member.live, member.loading = True, False
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
        return [one.name for one in self.by_name.values() if one.live and not one.done and not one.loading]

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
            self.by_name[name] = Member(
                name, live=bool(live), done=bool(done), pushed_round=included, included_round=included
            )
