"""What the processes of a global server tell each other, as bytes.

The coordinator (process 0) gives orders; every process answers with notes. They are JSON: the processes are started
together and trust each other, and neither holds values of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from weightgrad import codecs
from weightgrad.core.controller.agreement import Signs
from weightgrad.core.server.close_order import ClosedPart, ClosedPush, CloseOrder
from weightgrad.core.server.push_facts import PushFacts
from weightgrad.errors import ProtocolError
from weightgrad.runtime.server.shard_server import CompletePush, Provision
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.message_parts import without_values
from weightgrad.wire.messages import RoundResult


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Order: serve these elements of this model. The first weights come from the ranks of a site."""

    layout: list[tuple[str, list[int]]]
    served: list[tuple[int, int]]
    optimizer: dict[str, Any] | None
    sender: str  # the site that sends the first weights


@dataclass(frozen=True, kw_only=True)
class Start:
    """Order: all processes have the first weights; write them to the disk and serve them."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Order: let ranks connect. The coordinator has the global model of this version; -1 without one."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Close:
    """Order: close a round."""

    order: CloseOrder


@dataclass(frozen=True, kw_only=True)
class Provide:
    """Order: send a site what it needs to join."""

    provision: Provision


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Order: forget a push."""

    site: str
    round: int


@dataclass(frozen=True, kw_only=True)
class Admit:
    """Order: these sites may take part, and these certificates are revoked (`runtime/server/roster.py`).

    Attributes:
        roster: the facts of the roster.
        drop: a site whose sessions are to be ended now; empty: none.
        why: what its ranks are told.
    """

    roster: dict[str, Any]
    drop: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Order: write what there is to write, and end."""

    write_model: bool


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Note: the process has come up, with the global model of this version; -1 without one."""

    process: int
    version: int
    port: int


@dataclass(frozen=True, kw_only=True)
class Initialized:
    """Note: the first weights are here."""

    process: int
    digest: int
    squares: float  # of its elements


@dataclass(frozen=True, kw_only=True)
class Started:
    """Note: the first weights are on the disk."""

    process: int


@dataclass(frozen=True, kw_only=True)
class Complete:
    """Note: a push is complete here."""

    process: int
    push: CompletePush


@dataclass(frozen=True, kw_only=True)
class Closed:
    """Note: a round is closed here. The values of its result stay in the process."""

    process: int
    part: ClosedPart


Order: TypeAlias = Begin | Start | Resume | Close | Provide | Drop | Admit | Finish
Note: TypeAlias = Ready | Initialized | Started | Complete | Closed

_ORDERS: tuple[type[Order], ...] = (Begin, Start, Resume, Close, Provide, Drop, Admit, Finish)
_NOTES: tuple[type[Note], ...] = (Ready, Initialized, Started, Complete, Closed)
_KINDS: dict[str, type[Order | Note]] = {kind.__name__: kind for kind in (*_ORDERS, *_NOTES)}


def to_bytes(message: Order | Note) -> bytes:
    """An order or a note as bytes."""
    return json.dumps({"kind": type(message).__name__, **_plain(message)}).encode()


def parse(data: bytes) -> Order | Note:
    """Read what `to_bytes` made.

    Raises:
        ProtocolError: it is something else; the processes are not of one release.
    """
    try:
        found = json.loads(data)
        kind = _KINDS[found.pop("kind")]
        given: dict[str, Any] = {}
        for name, value in found.items():
            reader = _READERS.get((kind.__name__, name))
            given[name] = value if reader is None else reader(value)
        return kind(**given)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(
            f"a message between server processes that cannot be read ({error!r}); run the same release everywhere"
        ) from error


def _plain(message: Order | Note) -> dict[str, Any]:
    writers: dict[str, Callable[[Any], Any]] = {
        "order": _from_order,
        "provision": _from_provision,
        "push": _from_complete,
        "part": _from_part,
    }
    found = {}
    for one in fields(message):
        value = getattr(message, one.name)
        found[one.name] = writers[one.name](value) if one.name in writers else value
    return found


def _from_order(order: CloseOrder) -> dict[str, Any]:
    return {
        "result": _from_result(order.result),
        "pushes": [asdict(push) for push in order.pushes],
        "weight": order.weight,
        "down": order.down,
        "relays": order.relays,
        "last": order.last,
        "compares": order.compares,
        "sites": order.sites,
        "receivers": dict(order.receivers),
    }


def _to_order(found: Mapping[str, Any]) -> CloseOrder:
    pushes = tuple(ClosedPush(**{**push, "squares": tuple(push.get("squares", ()))}) for push in found["pushes"])
    return CloseOrder(**{**found, "result": _to_result(found["result"]), "pushes": pushes})


def _from_result(result: RoundResult) -> str:
    return pack(without_values(result)).hex()


def _to_result(text: str) -> RoundResult:
    found = unpack(bytes.fromhex(text))
    assert isinstance(found, RoundResult)
    return found


def _from_provision(provision: Provision) -> dict[str, Any]:
    codec = None if provision.codec is None else str(provision.codec)
    return {
        "site": provision.site,
        "epoch": provision.epoch,
        "since": provision.since,
        "whole": provision.whole,
        "codec": codec,
    }


def _to_provision(found: Mapping[str, Any]) -> Provision:
    codec = None if found["codec"] is None else codecs.parse(found["codec"])
    return Provision(**{**found, "codec": codec})


def _from_complete(push: CompletePush) -> dict[str, Any]:
    squares = push.facts.squares if math.isfinite(push.facts.squares) else None
    facts = {"squares": squares, "numel": push.facts.numel, "problem": push.facts.problem}
    return {"site": push.site, "round": push.round, "facts": facts, "size": push.size}


def _to_complete(found: Mapping[str, Any]) -> CompletePush:
    facts = dict(found["facts"])
    facts["squares"] = math.nan if facts["squares"] is None else facts["squares"]
    return CompletePush(site=found["site"], round=found["round"], facts=PushFacts(**facts), size=found["size"])


def _from_part(part: ClosedPart) -> dict[str, Any]:
    return {
        "result": _from_result(part.result),
        "digest": part.digest,
        "sizes": dict(part.sizes),
        "signs": None if part.signs is None else list(part.signs),
        "first_result": part.first_result,
    }


def _to_part(found: Mapping[str, Any]) -> ClosedPart:
    signs = None if found["signs"] is None else Signs(*found["signs"])
    return ClosedPart(**{**found, "result": _to_result(found["result"]), "signs": signs})


_READERS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("Close", "order"): _to_order,
    ("Provide", "provision"): _to_provision,
    ("Complete", "push"): _to_complete,
    ("Closed", "part"): _to_part,
}
