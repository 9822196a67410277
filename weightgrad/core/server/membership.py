"""The sites as the global server knows them.

A site that lets the others wait until it is lost, or whose push is refused, has a fault; many good pushes take one
away. With the third fault the site is set aside: what it sends still counts, but rounds do not wait for it before it
has pushed for eight of them, the next time sixteen, and so on. So a site that joins and vanishes in every round, or
pushes nonsense, costs the others three waits and not one in every round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightgrad.errors import ProtocolError

FAULTS = 3
"""With so many, a site is set aside."""
GOOD = 20
"""So many pushes take one fault away."""
FIRST_ASIDE = 8
"""Pushes of a site that was set aside for the first time, before rounds wait for it again; then twice as many."""
MOST_ASIDE = 1024
_NOTHING = -2
BY_OPERATOR = 1 << 40
"""Pushes of a site that the operator has set aside, before rounds wait for it again: until it is taken back."""


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
    faults: int = 0
    good: int = 0  # pushes included since the last fault was taken away
    aside: int = 0  # set aside: pushes that are still to be included before rounds wait for it again
    times_aside: int = 0


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

    def lose(self, name: str) -> bool:
        """A site is lost: until it joins again, rounds do not wait for it and results do not go to it.

        Returns:
            Whether it is set aside from now on.
        """
        self.by_name[name].live = False
        return self.fault(name)

    def fault(self, name: str) -> bool:
        """A site has done what no site should do; whether it is set aside from now on."""
        member = self.by_name[name]
        member.faults, member.good = member.faults + 1, 0
        if member.faults < FAULTS or member.aside:
            return False
        member.faults, member.aside = 0, min(FIRST_ASIDE << member.times_aside, MOST_ASIDE)
        member.times_aside += 1
        return True

    def check_known(self, name: str) -> None:
        """Raise ProtocolError for a site that has never joined."""
        if name not in self.by_name:
            raise ProtocolError(f"{name!r} has not joined; those that have are {', '.join(self.by_name) or 'none'}")

    def set_aside(self, name: str) -> None:
        """The operator sets a site aside: rounds do not wait for it until it is taken back."""
        self.by_name[name].aside = BY_OPERATOR

    def take_back(self, name: str) -> None:
        """The operator takes a site back, whoever set it aside: rounds wait for it, and its faults are forgotten."""
        member = self.by_name[name]
        member.aside = member.faults = member.good = member.times_aside = 0

    def included(self, name: str) -> None:
        """A push of a site is in a closed round, and was not refused."""
        member = self.by_name[name]
        member.aside = max(0, member.aside - 1)
        member.good += 1
        if member.good >= GOOD:
            member.faults, member.good = max(0, member.faults - 1), 0

    def leave(self, name: str) -> None:
        """A site leaves for good, unless it joins again; a site that never joined changes nothing."""
        if name in self.by_name:
            self.by_name[name].live = False
            self.by_name[name].done = True

    @property
    def awaited(self) -> list[str]:
        """The names of the sites that rounds wait for: not those that are set aside, unless all are."""
        found = self.training
        others = any(one.live and one.done and not one.aside for one in self.by_name.values())
        waited = [name for name in found if not self.by_name[name].aside]
        return waited if waited or others else found  # where the others have finished, nobody waits for it either

    @property
    def training(self) -> list[str]:
        """The names of the sites that are here and have not finished."""
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
            standing = [member.faults, member.good, member.aside, member.times_aside]
            loads = [int(member.loading), *(member.loads or (_NOTHING, _NOTHING))]
            found[name] = torch.tensor([int(member.live), int(over), member.included_round, *standing, *loads])
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.by_name = {}
        for name, tensor in state.items():
            live, done, included, faults, good, aside, times, *loads = (int(number) for number in tensor)
            loading, epoch, version = loads or (0, _NOTHING, _NOTHING)
            self.by_name[name] = Member(
                name,
                live=bool(live),
                done=bool(done),
                loading=bool(loading),
                loads=None if epoch == _NOTHING else (epoch, version),
                pushed_round=included,
                included_round=included,
                faults=faults,
                good=good,
                aside=aside,
                times_aside=times,
            )
