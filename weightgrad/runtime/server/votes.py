"""What the sites of a run vote on before they train: the model, and the values of its frozen parameters."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from weightgrad.core.layout import Layout
from weightgrad.errors import LinkError, RefusedError
from weightgrad.runtime.admission_messages import AdmissionRequest


class LayoutVote:
    """Which model is trained, before there is one: the one that most sites have, and not that of the first to enter.

    Each site has one vote, the digest of what it wants to train, which it casts by asking to enter. A model is agreed
    when more than half of the sites of the run want it. If they do not come, then after a deadline it is the model that
    most of those want who have come, and of two with as many the one that came first. With one or two sites there is no
    majority, and the first one brings the model.

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

    def withdraw(self, site: str) -> None:
        """A site may not enter, whatever most sites want: its vote does not count, or nobody could."""
        self._votes.pop(site, None)

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


class FrozenVote:
    """Which values frozen parameters have, where they must be the same at all sites: those that most sites have.

    Args:
        sites: how many sites the run has.
        on_refused: called with a fixed phrase for every refusal.
    """

    def __init__(self, sites: int, on_refused: Callable[[str], None]) -> None:
        self._sites, self._on_refused = sites, on_refused
        self._digests: dict[str, dict[str, str]] = {}

    def check(self, request: AdmissionRequest) -> None:
        """Compare parameters that take no part with what most other sites have in them.

        Each site has one word, also one that is refused: so a site that comes first with wrong values shuts nobody out.

        Raises:
            RefusedError: most others have other values.
            LinkError: they have, and no majority has said yet which are right; the site is to try again.
        """
        others = {site: own for site, own in self._digests.items() if site != request.site}
        self._digests[request.site] = dict(request.frozen)
        for name, digest in request.frozen.items():
            named = {site: own[name] for site, own in others.items() if name in own}
            counts = Counter(named.values())
            rivals = [(count, one) for one, count in counts.items() if one != digest and count > counts[digest]]
            if not rivals:
                continue
            count, theirs = max(rivals)
            first = next(site for site, own in named.items() if own == theirs)
            why = (
                f"{name} is frozen, and {request.site} has other values in it than {first}: it does not travel, so "
                'load the same weights at every site. To allow it, say prepare(frozen="local")'
            )
            if self._sites > 2 and 2 * count <= self._sites:
                raise LinkError(f"{why}. No majority has said yet which is right; try again")
            self._on_refused("other frozen parameters")
            raise RefusedError(why)

    def forget(self, site: str) -> None:
        """The word of a site counts no more."""
        self._digests.pop(site, None)
