"""Checks every push before it can move the global model, so that one broken or hostile site cannot spoil it.

A push is refused when it comes if it cannot be decoded, if its segments lie outside the global model or overlap, or if
it holds NaN or Inf or values that would soon overflow. When its round closes, its norm is compared, from the first push
on. A site's usual norm u is the median of its last `window` accepted pushes. With U the upper median over the other
sites of what each pushes now or usually, what is more,

    three or more sites:    norm <= factor * U
    two sites:              norm <= factor * max(U, u); before there is a u, norm <= max(factor * U, plausible)
    one site:               norm <= factor * (the largest of its last pushes), once there are five

A site is never part of its own U, so with three or more sites a liar cannot raise its own limit, however patient it is,
and one liar cannot lower the limit of an honest site: the upper median of two others is the larger one. With two sites
nobody can tell which of the two is wrong. Each is measured by its own past too, and what is remembered of a push is at
most `GROWTH` times what is usual. The first push is `plausible` if it would not move the model by more than its own
norm. The last push of a site may be `FINAL` times larger, once: it holds what many rounds kept in the residual.
Refused pushes are not remembered.

That lets a push pass that is a few times too large, as an honest one is now and then. One that is so in every round
would turn the training round. So from three sites on each site has an account, too. With c a site's weight times its
norm (of another site: now or as usual, what is more), C the upper median of the c of the other sites, k how many of
them have pushed in this round, but at least two, and d the site's debt, `NEW` of CREDIT at first:

    d <- max(0, d + c / C - share * k),    and d <= CREDIT

Weights count by the size that the operator has declared for a site (`sizes`), so a site of eight workers beside two of
one is not held for a liar. A push that would make the debt larger than CREDIT counts only in part. Of a site whose debt
is at CREDIT, no push that adds more than its share counts for more than C, and one of more than 2 C is refused. So in
any R rounds one site adds at most (CREDIT + share * k * R) C, and while share < 1 the others together add more in the
long run, whatever the site claims to weigh. A site whose last push comes first may add FINAL C with it; the others are
then compared with that, too. When all others have finished, nobody can make good what a site does: one that is in debt
then stays in debt.

An account says nothing of a push that adds nothing. But a mean is divided by the weights of all pushes: so with n sites
none weighs more than 2 share (n - 1) times as much as the upper median of the others, whatever it pushes.

CREDIT is smaller for updates than for gradients: a gradient is that of one batch, whose norm varies much; an update is
of many steps, and goes into the model as it is. `benchmarks/bench_push_norms.py` shows how far honest sites stay below.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weightgrad.core.parts import check
from weightgrad.core.server.push_facts import PushFacts
from weightgrad.wire.messages import Push

FINAL = 10.0  # the last push may be so much larger: it holds what many rounds kept in the residual
GROWTH = 1.5  # times what is usual, at most, is remembered of a push
CREDIT = {"gradients": 10.0, "updates": 2.0}
"""A site may add so much more than its share before that is held against it, in units of what the others add."""
NEW = 0.75
"""The part of its credit that a site does not have before it has earned it."""
LARGEST = 1e12  # far below where sums, squares and momentum in float32 overflow
_WARM = 5  # pushes of a site that has nobody to be compared with, before its own past counts


@dataclass(frozen=True)
class Weighed:
    """A push of a round that closes: without its values, with their norm and the weight that it claims."""

    push: Push
    norm: float
    weight: float = 1.0


@dataclass
class Verdict:
    """What becomes of the pushes of a round, by site and round.

    Attributes:
        refused: why a push is refused.
        limited: why a push counts only in part.
        scales: which part that is.
    """

    refused: dict[tuple[str, int], str] = field(default_factory=dict)
    limited: dict[tuple[str, int], str] = field(default_factory=dict)
    scales: dict[tuple[str, int], float] = field(default_factory=dict)


class Guard:
    """Checks the pushes of all sites.

    Memory: the norms of each site's last pushes, and a few numbers. The server processes have decoded the pushes and
    measured them (`ServerShard.receive`).

    Args:
        factor: how many times larger than usual a push may be.
        window: how many accepted pushes of a site are remembered.
        share: how much a site may add in the long run, as a share of what the others add together.
        sizes: by site, how many times as large as others its operator declares it to be, such as its workers. A site
            that is declared twice as large may add twice as much. 1 where nothing is declared.
    """

    def __init__(
        self,
        factor: float = 20.0,
        window: int = 20,
        share: float = 0.75,
        *,
        sizes: Mapping[str, float] | None = None,
    ) -> None:
        check("guard", "factor", factor, 1, 1e9)
        check("guard", "window", window, 1, 10**6, whole=True)
        check("guard", "share", share, 0.5, 1e9)
        self._factor = factor
        self._window = window
        self._share = share
        self._sizes = dict(sizes or {})
        for site, size in self._sizes.items():
            check("guard", f"the size of {site}", size, 1e-6, 1e6)
        self._norms: dict[str, deque[float]] = {}
        self._weights: dict[str, float] = {}  # of each site's last push
        self._debts: dict[str, float] = {}
        self._finished: dict[str, float] = {}  # by site whose last push has been accepted, what that added

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

    def judge(self, pushes: Sequence[Weighed], plausible: float = 0.0, *, credit: float = CREDIT["updates"]) -> Verdict:
        """Compare the pushes of a round that closes, and remember the norms of the good ones.

        Args:
            pushes: those in which `problem` found nothing.
            plausible: the norm that a first push may have in any case, where there are two sites.
            credit: `CREDIT` of what is pushed.

        Returns:
            Which pushes are refused or limited.
        """
        pushes = [replace(one, weight=one.weight / self._sizes.get(one.push.site, 1.0)) for one in pushes]
        now: dict[str, float] = {}
        for one in pushes:
            now[one.push.site] = max(one.norm, now.get(one.push.site, 0.0))
        usual = {site: statistics.median(norms) for site, norms in self._norms.items()}
        # Norms may grow a hundredfold from one round to the next, at all sites at once: warm-up, another schedule.
        both = {site: max(now.get(site, 0.0), usual.get(site, 0.0)) for site in now.keys() | usual.keys()}
        seen = {site: norm for site, norm in both.items() if norm > 0}
        verdict = Verdict()
        added = self._added(pushes, usual)
        good: list[tuple[Weighed, float]] = []
        for one in pushes:
            push, norm = one.push, one.norm
            others = [norm for site, norm in seen.items() if site != push.site]
            limit, why = self._limit(push, usual.get(push.site), others, plausible)
            if norm > limit:
                verdict.refused[push.site, push.round] = f"{_name(push)} has norm {norm:.3g}, {why}"
                continue
            if not self._charge(one, pushes, added, credit, verdict):
                continue
            self._weigh(one, pushes, verdict)
            if norm > 0:  # zeros say nothing of what is usual
                reference = max([usual.get(push.site, 0.0), statistics.median_high(others) if others else 0.0])
                good.append((one, min(norm, GROWTH * reference) if reference > 0 and others else norm))
            if push.final:
                part = verdict.scales.get((push.site, push.round), 1.0)
                self._finished.setdefault(push.site, one.weight * norm * part)
        for one, norm in good:
            self._norms.setdefault(one.push.site, deque(maxlen=self._window)).append(norm)
            self._weights[one.push.site] = one.weight
        return verdict

    def _added(self, pushes: Sequence[Weighed], usual: Mapping[str, float]) -> dict[str, float]:
        """By site, what it adds: its weight times its norm, now or as usual or with its last push, what is more."""
        found = {site: max(norm * self._weights[site], self._finished.get(site, 0.0)) for site, norm in usual.items()}
        for one in pushes:
            if one.norm > 0:
                found[one.push.site] = max(one.weight * one.norm, found.get(one.push.site, 0.0))
        return {site: amount for site, amount in found.items() if amount > 0}

    def _charge(
        self, one: Weighed, pushes: Sequence[Weighed], added: Mapping[str, float], credit: float, verdict: Verdict
    ) -> bool:
        """Charge a push to its site's account; whether any of it counts.

        Args:
            one: the push.
            pushes: those of the round.
            added: what each site adds.
            credit: the largest debt.
            verdict: gets what is said about the push.
        """
        push = one.push
        others = [amount for site, amount in added.items() if site != push.site]
        if len(others) < 2 or not one.weight * one.norm > 0:
            return True
        ratio = one.weight * one.norm / statistics.median_high(others)
        debt = self._debts.get(push.site, NEW * credit)
        allowed = self._allowed(push, pushes, debt, added)
        key, much = (push.site, push.round), f"weighs {ratio:.3g} times as much as is usual for the other sites"
        most = min(1.0, allowed) if debt >= credit else allowed + credit - debt
        scale = most / ratio if ratio > max(allowed, most) else 1.0
        if scale < 0.5 and debt >= credit:
            verdict.refused[key] = f"{_name(push)} {much}, and those before it did so too"
            return False
        if scale < 1:
            verdict.scales[key] = scale
            verdict.limited[key] = f"{_name(push)} {much}, and counts for {scale:.2g} of that"
        self._debts[push.site] = min(credit, max(0.0, debt + ratio - allowed))
        return True

    def _weigh(self, one: Weighed, pushes: Sequence[Weighed], verdict: Verdict) -> None:
        """Weigh down a push that would leave little of the others' in the mean, also if it is zero."""
        weights = self._weights | {other.push.site: other.weight for other in pushes}
        others = [weight for site, weight in weights.items() if site != one.push.site and weight > 0]
        if len(others) < 2:
            return
        most, key = 2 * self._share * len(others) * statistics.median_high(others), (one.push.site, one.push.round)
        if one.weight > most and most / one.weight < verdict.scales.get(key, 1.0):
            verdict.scales[key] = most / one.weight
            verdict.limited.setdefault(
                key, f"{_name(one.push)} claims to weigh {one.weight:.3g}, and counts for {most:.3g}"
            )

    def _allowed(self, push: Push, pushes: Sequence[Weighed], debt: float, added: Mapping[str, float]) -> float:
        """How many times as much as the other sites a site may add with a push without getting into debt."""
        beside = {other.push.site for other in pushes if other.push.site != push.site and other.norm > 0}
        others = added.keys() - {push.site}
        if not beside and debt > 0 and push.site in self._debts and others <= self._finished.keys():
            return 0.0
        last = {one.push.site for one in pushes if one.push.final} | self._finished.keys()
        first = push.final and last == {push.site} and push.site not in self._finished
        return max(self._share * max(2, len(beside)), FINAL if first else 0.0)

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
        """For each site, what its last push added, its debt, weight and last norms, oldest first, for a checkpoint."""
        return {
            site: torch.tensor(
                [
                    self._finished.get(site, -1.0),
                    self._debts.get(site, -1.0),
                    self._weights.get(site, 1.0),
                    *self._norms.get(site, ()),
                ],
                dtype=torch.float64,
            )
            for site in sorted(self._norms.keys() | self._finished.keys() | self._debts.keys())
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._norms, self._weights, self._debts, self._finished = {}, {}, {}, {}
        for site, numbers in state.items():
            finished, debt, self._weights[site], *norms = numbers.tolist()
            if debt >= 0:
                self._debts[site] = debt
            if norms:
                self._norms[site] = deque(norms, maxlen=self._window)
            if finished >= 0:
                self._finished[site] = finished


def _name(push: Push) -> str:
    return f"update of {push.site} at round {push.round}"
