"""Which model is trained, before there is one: the one that most sites have, and not simply that of the first to enter.

Each site has one vote, the digest of what it wants to train, which it casts by asking to enter. A model is agreed when
more than half of the sites of the run want it. If they do not come, then after a deadline it is the model that most of
those want who have come, and of two with as many the one that came first. With one or two sites there is no majority,
and the first one brings the model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from weightgrad.core.layout import Layout


class LayoutVote:
    """The votes of the sites.

    Args:
        sites: how many sites the run has.
        deadline_s: seconds after the first vote when those that have come decide.
        clock: seconds; for tests.
    """

    def __init__(self, sites: int, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._sites, self._deadline_s, self._clock = sites, deadline_s, clock
        self._votes: dict[str, str] = {}
        self._layouts: dict[str, Layout] = {}  # of each digest that has a vote
        self._began: float | None = None

    def cast(self, site: str, digest: str, layout: Layout) -> None:
        """A site asks to enter with this model; its last vote counts."""
        self._began = self._clock() if self._began is None else self._began
        if self._votes.get(site) != digest:
            self._votes.pop(site, None)
            self._votes[site] = digest
        self._layouts[digest] = layout
        self._layouts = {one: self._layouts[one] for one in dict.fromkeys(self._votes.values())}

    def agreed(self) -> str | None:
        """The digest of the model that is trained; None if that is not decided yet."""
        if not self._votes or self._began is None:
            return None
        (digest, count), *_ = Counter(self._votes.values()).most_common(1)  # of equals, the first
        late = self._clock() >= self._began + self._deadline_s
        return digest if self._sites < 3 or 2 * count > self._sites or late else None

    def layout(self, digest: str) -> Layout:
        """The layout of a digest that has a vote."""
        return self._layouts[digest]

    def standing(self) -> str:
        """How far the vote is, in words."""
        count = max(Counter(self._votes.values()).values(), default=0)
        return f"{count} of the {self._sites} sites, and {self._sites // 2 + 1} are needed"
