"""What rank 0 of a site tells the other ranks, as bytes.

Rank 0 has the coordinator and decides; all ranks do the same, each for what it holds. Between two decisions no rank
tells another anything: `Continue` says when the next one is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from torch import Tensor

from weightgrad.core.site.shard_orders import ApplyOrder, LoadOrder, PushOrder
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import JoinReply, RoundResult


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Tell the norms of the fresh update and of the last step."""


@dataclass(frozen=True, kw_only=True)
class PushNothing:
    """Send an empty push for a round."""

    round: int


@dataclass(frozen=True, kw_only=True)
class Keep:
    """No push takes the gradient of this step: keep it."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Say whether all values of a round result are here: it is applied when every rank has them."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Release:
    """The pushes up to and including this round are in the global model: they need not be sent again."""

    through: int


@dataclass(frozen=True, kw_only=True)
class Apply:
    """Apply a round result.

    Attributes:
        order: how.
        rate: the learning rate to step with, where gradients are shared.
        options: likewise, the options of the optimizer; none: those that it announced.
    """

    order: ApplyOrder
    rate: float | None = None
    options: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Load:
    """Take over a downloaded model; `reply` has what its optimizer keeps beside vectors, as bytes."""

    order: LoadOrder
    reply: str

    @staticmethod
    def of(order: LoadOrder, reply: JoinReply) -> Load:
        """The order to load the download of a reply."""
        return Load(order=order, reply=pack(reply).hex())

    def join_reply(self) -> JoinReply:
        """The reply of the server."""
        found = unpack(bytes.fromhex(self.reply))
        assert isinstance(found, JoinReply)
        return found


@dataclass(frozen=True, kw_only=True)
class GatherBuffers:
    """Put together the buffers that ride on the push of a round."""

    round: int


@dataclass(frozen=True, kw_only=True)
class TakeBuffers:
    """Take the buffers of all sites, which came with a result; `data` has them as bytes.

    Attributes:
        through: the last round whose push of this site is in the result.
        data: a round result with nothing but the buffers.
    """

    through: int
    data: str

    @staticmethod
    def of(through: int, buffers: Mapping[str, Tensor]) -> TakeBuffers:
        """The order to take these buffers."""
        message = RoundResult(version=0, round=0, step=0, buffers=buffers)
        return TakeBuffers(through=through, data=pack(message).hex())

    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers."""
        found = unpack(bytes.fromhex(self.data))
        assert isinstance(found, RoundResult)
        return found.buffers


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing yet: rank 0 waits for the global server."""


@dataclass(frozen=True, kw_only=True)
class Continue:
    """Go on training.

    Attributes:
        step: the steps done; more than the ranks counted if the site has caught up with others.
        next_decision: the step after which the ranks listen to rank 0 again.
        finished: whether the site has left the run.
    """

    step: int
    next_decision: int
    finished: bool = False


@dataclass(frozen=True, kw_only=True)
class Abandon:
    """Rank 0 has failed, for this reason."""

    why: str


SiteOrder: TypeAlias = (
    PushOrder
    | PushNothing
    | Measure
    | Keep
    | Look
    | Release
    | Apply
    | Load
    | GatherBuffers
    | TakeBuffers
    | Wait
    | Continue
    | Abandon
)

_ALL: tuple[type[SiteOrder], ...] = (
    PushOrder,
    PushNothing,
    Measure,
    Keep,
    Look,
    Release,
    Apply,
    Load,
    GatherBuffers,
    TakeBuffers,
    Wait,
    Continue,
    Abandon,
)
_KINDS: dict[str, type[SiteOrder]] = {kind.__name__: kind for kind in _ALL}


def to_bytes(order: SiteOrder) -> bytes:
    """An order as bytes."""
    return json.dumps({"kind": type(order).__name__, **asdict(order)}).encode()


def parse(data: bytes) -> SiteOrder:
    """Read what `to_bytes` made."""
    found: dict[str, Any] = json.loads(data)
    kind = _KINDS[found.pop("kind")]
    if kind is Apply:
        found["order"] = ApplyOrder(**found["order"])
        found["options"] = tuple(found["options"])
    elif kind is Load:
        found["order"] = LoadOrder(**found["order"])
    return kind(**found)
