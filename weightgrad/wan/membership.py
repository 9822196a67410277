"""Who is in: one record a site, kept by the global server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Member:
    """A site as the server knows it."""

    name: str
    live: bool = True  # rounds wait for it
    done: bool = False  # has finished training: rounds do not wait, answers still go to it
    round: int = 0  # the last round it pushed for
    taken: int = 0  # the last of its pushes that is in a closed round


@dataclass
class Members:
    """All of them. A site that is lost stays known: what it sends later is taken."""

    by_name: dict[str, Member] = field(default_factory=dict)

    def join(self, name: str) -> Member:
        """First time or again."""
        member = self.by_name.setdefault(name, Member(name))
        member.live = True
        return member

    def lose(self, name: str) -> None:
        """Rounds do not wait for it, answers do not go to it, until it joins again."""
        self.by_name[name].live = False

    def leave(self, name: str) -> None:
        """It is not coming back, or says so when it does."""
        self.by_name[name].live = False
        self.by_name[name].done = True

    @property
    def awaited(self) -> list[Member]:
        """Those a round waits for."""
        return [m for m in self.by_name.values() if m.live and not m.done]

    @property
    def listening(self) -> list[Member]:
        """Those answers go to."""
        return [m for m in self.by_name.values() if m.live]
