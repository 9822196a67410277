"""A site whose sessions are ended again and again for what it sends must wait before it may enter once more."""

from __future__ import annotations

from weightgrad.errors import LinkError

_PAUSES_S = (0.0, 0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # by how often it has happened lately
_FORGOTTEN_S = 600.0  # after so long, what a site has done is forgotten


class EntryPauses:
    """How often the sessions of each site were ended for what it did."""

    def __init__(self) -> None:
        self._faults: dict[str, tuple[int, float]] = {}  # how often, and when last

    def misbehaved(self, site: str, now: float) -> int:
        """Note that a session of a site was ended for what it did; how often that has happened lately."""
        count, last = self._faults.get(site, (0, now))
        self._faults[site] = (1 if now - last > _FORGOTTEN_S else count + 1), now
        return self._faults[site][0]

    def check(self, site: str, now: float) -> None:
        """See whether a site may enter now.

        Raises:
            LinkError: It is to wait; the error says how long.
        """
        count, last = self._faults.get(site, (0, now))
        pause = _PAUSES_S[min(count, len(_PAUSES_S) - 1)] - (now - last)
        if count and pause > 0:
            raise LinkError(
                f"the sessions of {site} were ended {count} times for what it sent; try again in {pause:.0f} s"
            )
