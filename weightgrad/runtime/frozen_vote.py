"""Which values frozen parameters have, where they must be the same at all sites: those that most sites have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from weightgrad.errors import LinkError, RefusedError
from weightgrad.runtime.admission_messages import AdmissionRequest


class FrozenVote:
    """The digests of the parameters that take no part, by site.

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
