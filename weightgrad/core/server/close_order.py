"""The order to close a round, and what a process has made of it.

The `ServerCoordinator` gives the order, the `ServerShard` of each process carries it out for the elements that the
process serves, so that all elements close with the same pushes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weightgrad.core.controller.agreement import Signs
from weightgrad.wire.messages import RoundResult


@dataclass(frozen=True, kw_only=True)
class ClosedPush:
    """A push that a round closes with.

    Attributes:
        site: the site.
        round: the round that the push was made for.
        weight: its weight.
        seen: the version of the global model that it was computed on.
        counts: False if the push was refused: it counts as empty.
        scale: what limits have made of its weight, as a part of it.
        squares: of its values in each process, when they were judged. A process that has others by now, because the
            site has sent it again, takes it for empty. Empty: not compared.
    """

    site: str
    round: int
    weight: float
    seen: int
    counts: bool = True
    scale: float = 1.0
    squares: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CloseOrder:
    """Close a round.

    Attributes:
        result: the round result without its values.
        pushes: what it closes with, in the order in which pushes are added.
        weight: the weight of all pushes together.
        down: a codec that replaces the strategy's for this result; None keeps the strategy's.
        relays: whether pushes are relayed as they came.
        last: whether all sites have finished, and what results have lost goes out too.
        compares: whether the signs of the pushes are compared.
        sites: how many sites there are.
        receivers: the sites that get the result, each with whether its own pushes are left out.
    """

    result: RoundResult
    pushes: tuple[ClosedPush, ...]
    weight: float
    down: str | None = None
    relays: bool = False
    last: bool = False
    compares: bool = False
    sites: int = 1
    receivers: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClosedPart:
    """What a round has come to, for the elements of one process.

    Attributes:
        result: the round result with its values.
        digest: the digest of the elements after it.
        sizes: by site, the bytes of the values that it is sent.
        signs: how alike the pushes were, if they were compared.
        first_result: the oldest version whose result is still known.
    """

    result: RoundResult
    digest: int
    sizes: Mapping[str, int]
    signs: Signs | None
    first_result: int
