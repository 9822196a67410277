"""Checks every push before it can move the global model, so that one broken or hostile site cannot spoil it.

A push is refused when it comes if it cannot be decoded, if its segments lie outside the global model or overlap, or if
it holds NaN or Inf or values that would soon overflow. When its round closes, its norm is compared, from the first push
on. A site's usual norm u is the median of its last `window` accepted pushes, or before there are any, the norm of its
push in this round. With U the upper median of the usual norms of the other sites,

    three or more sites:    norm <= factor * U
    two sites:              norm <= factor * max(U, u); before there is a u, norm <= max(factor * U, plausible)
    one site:               norm <= factor * (the largest of its last pushes), once there are five

A site is never part of its own U, so with three or more sites a liar cannot raise its own limit, however patient it is,
and one liar cannot lower the limit of an honest site: the upper median of two others is the larger one. With two sites
nobody can tell which of the two is wrong. Each is measured by its own past too, and what is remembered of a push is at
most `GROWTH` times what is usual. The first push is `plausible` if it would not move the model by more than its own
norm. The last push of a site may be `FINAL` times larger, once: it holds what many rounds kept in the residual.
Refused pushes are not remembered.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weightgrad.core.parts import check
from weightgrad.core.push_facts import PushFacts
from weightgrad.wire.messages import Push

FINAL = 10.0  # the last push may be so much larger: it holds what many rounds kept in the residual
GROWTH = 1.5  # times what is usual, at most, is remembered of a push
LARGEST = 1e12  # far below where sums, squares and momentum in float32 overflow
_WARM = 5  # pushes of a site that has nobody to be compared with, before its own past counts


class Guard:
    """Checks the pushes of all sites.

    Memory: the norms of each site's last pushes. The server processes have decoded the pushes and measured them
    (`ServerShard.receive`).

    Args:
        factor: how many times larger than usual a push may be.
        window: how many accepted pushes of a site are remembered.
    """

    def __init__(self, factor: float = 20.0, window: int = 20) -> None:
        check("guard", "factor", factor, 1, 1e9)
        check("guard", "window", window, 1, 10**6, whole=True)
        self._factor = factor
        self._window = window
        self._norms: dict[str, deque[float]] = {}
        self._finished: set[str] = set()  # the sites whose last push has been accepted

    def problem(self, push: Push, facts: PushFacts) -> str | None:
        """Check one push by itself, when it comes.

        Args:
            push: the push; its values are not looked at.
            facts: what the server processes found out about its values.

        Returns:
            Why the push is refused, or None.
        """
        if facts.problem is not None:
            return f"{_name(push)} {facts.problem}"
        if not math.isfinite(facts.squares):
            return f"{_name(push)} is not finite"
        norm = math.sqrt(facts.squares)
        if norm > LARGEST:
            return f"{_name(push)} has norm {norm:.3g}, more than any training makes ({LARGEST:g})"
        return None

    def out_of_line(self, pushes: Sequence[tuple[Push, float]], plausible: float = 0.0) -> dict[tuple[str, int], str]:
        """Compare the pushes of a round that closes, and remember the norms of the good ones.

        Args:
            pushes: those in which `problem` found nothing, with their norms.
            plausible: the norm that a first push may have in any case, where there are two sites.

        Returns:
            By site and round, why a push is refused.
        """
        now: dict[str, float] = {}
        for push, norm in pushes:
            now[push.site] = max(norm, now.get(push.site, 0.0))
        usual = {site: statistics.median(norms) for site, norms in self._norms.items()}
        seen = {**{site: norm for site, norm in now.items() if norm > 0}, **usual}
        refused: dict[tuple[str, int], str] = {}
        good: list[tuple[str, float]] = []
        for push, norm in pushes:
            others = [one for site, one in seen.items() if site != push.site]
            limit, why = self._limit(push, usual.get(push.site), others, plausible)
            if norm > limit:
                refused[push.site, push.round] = f"{_name(push)} has norm {norm:.3g}, {why}"
                continue
            if norm > 0:  # zeros say nothing of what is usual
                reference = max([usual.get(push.site, 0.0), statistics.median_high(others) if others else 0.0])
                good.append((push.site, min(norm, GROWTH * reference) if reference > 0 and others else norm))
            if push.final:
                self._finished.add(push.site)
        for site, norm in good:
            self._norms.setdefault(site, deque(maxlen=self._window)).append(norm)
        return refused

    def _limit(self, push: Push, own: float | None, others: Sequence[float], plausible: float) -> tuple[float, str]:
        """The largest norm that a push may have, and where it comes from in words."""
        factor = self._factor * (FINAL if push.final and push.site not in self._finished else 1.0)
        if not others:
            past = self._norms.get(push.site, ())
            if len(past) < _WARM:
                return math.inf, ""
            return factor * max(
                past
            ), f"more than {factor:g} times the largest of its last {len(past)} ({max(past):.3g})"
        usual = statistics.median_high(others)
        if len(others) == 1 and own is not None and own > usual:
            return factor * own, f"more than {factor:g} times what is usual for it ({own:.3g})"
        limit, why = factor * usual, f"more than {factor:g} times what is usual for the other sites ({usual:.3g})"
        if len(others) == 1 and own is None and plausible > limit:
            return plausible, f"more than that of the model itself, and {why}"
        return limit, why

    def state(self) -> dict[str, Tensor]:
        """For each site, whether it has finished and the norms of its last pushes, oldest first, for a checkpoint."""
        return {
            site: torch.tensor([float(site in self._finished), *self._norms.get(site, ())], dtype=torch.float64)
            for site in sorted(self._norms.keys() | self._finished)
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._norms, self._finished = {}, set()
        for site, numbers in state.items():
            finished, *norms = numbers.tolist()
            if norms:
                self._norms[site] = deque(norms, maxlen=self._window)
            if finished:
                self._finished.add(site)


def _name(push: Push) -> str:
    return f"update of {push.site} at round {push.round}"
