"""What the processes of the global server find out about the values of a push when it comes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PushFacts:
    """What a process has found out about its part of a push.

    Attributes:
        squares: the sum of the squares of its values; not finite if a value is not.
        numel: the elements that its segments cover.
        problem: why it cannot be used, in words; None if it can.
        by_process: of all processes together, the squares that each of them has found.
    """

    squares: float
    numel: int
    problem: str | None = None
    by_process: tuple[float, ...] = ()


def facts_of_all(parts: Iterable[PushFacts]) -> PushFacts:
    """What all shards together have found about one push."""
    facts = list(parts)
    problem = next((one.problem for one in facts if one.problem is not None), None)
    return PushFacts(
        squares=sum(one.squares for one in facts),
        numel=sum(one.numel for one in facts),
        problem=problem,
        by_process=tuple(one.squares for one in facts),
    )


def are_of_the_same_values(judged: float, found: float) -> bool:
    """Whether two sums of squares can be of the same values; those of two kinds of processors differ a little."""
    return math.isclose(judged, found, rel_tol=1e-6) or (math.isnan(judged) and math.isnan(found))
