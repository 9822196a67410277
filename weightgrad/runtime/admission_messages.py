"""What a site and the global server tell each other first, as JSON.

Rank 0 of a site sends an AdmissionRequest: who the site is, which model it has, which strategy it wants. The server
replies with an AdmissionReply: the strategy, the seed, the order of the parameters, who serves which elements. The
other ranks of an admitted site then enter with a RankRequest.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from weightgrad.errors import ProtocolError
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.versions import HANDSHAKE_VERSION

MOST_RANKS = 4096
"""How many ranks a site can have."""

_MOST_SIDES = 64  # of a tensor; torch has as many

APART = "apart"
"""In the description of an optimizer: why its site cannot share gradients."""


@dataclass(frozen=True)
class AdmissionRequest:
    """What a site says about itself.

    Attributes:
        site: the name of the site.
        layout: name and shape of every parameter, in the site's own order.
        version: version of the site's global model; -1 if it has never been admitted.
        epoch: identifies the processes of the site that were started together.
        samples: how many samples the site looks at in a step, which weighs its updates.
        workers: how many ranks the site has.
        strategy: the strategy that the training script asks for; None takes the server's.
        optimizer: the optimizer's `kind`, and all of its description where gradients may be shared; with `APART`, why
            this site cannot share them.
        kernels: which kernels the site runs, for logs.
        frozen: by name, the digests of parameters that take no part and must be the same at all sites.
        protocol: version of this exchange.
    """

    site: str
    layout: list[tuple[str, list[int]]]
    version: int
    epoch: int = 0
    samples: int = 1
    workers: int = 1
    strategy: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    kernels: str = ""
    frozen: dict[str, str] = field(default_factory=dict)
    protocol: int = HANDSHAKE_VERSION

    def pack(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class ServedBy:
    """A process of the global server.

    Attributes:
        address: HOST:PORT; ":PORT" is a port of the host that the site knows, and "" the address that it knows.
        spans: the intervals of the index space that it serves; empty before there is a model.
    """

    address: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class AdmissionReply:
    """What the server tells a site that it admits.

    Attributes:
        strategy: the strategy of the run.
        seed: the seed of the run.
        number: the number of the site, from which its random keys are derived.
        sites: the names of all sites.
        layout: the names of the parameters in the order of the index space.
        servers: who serves what: the address of each server process and its intervals.
        init_model: whether the site must send its weights, which become the first global model.
        clip_norm: the norm to which gradients are clipped, if they are.
        facts: what the recipe says about the site's link.
        protocol: version of this exchange.
    """

    strategy: dict[str, Any]
    seed: int
    number: int
    sites: list[str]
    layout: list[str]
    servers: list[tuple[str, list[tuple[int, int]]]]
    init_model: bool
    clip_norm: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    protocol: int = HANDSHAKE_VERSION

    def pack(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(asdict(self)).encode()

    @property
    def served(self) -> tuple[Intervals, ...]:
        """What each server process serves."""
        return tuple(Intervals.of((start, stop) for start, stop in spans) for _, spans in self.servers)


@dataclass(frozen=True)
class RankRequest:
    """What a rank other than 0 says to a server process, or rank 0 to one other than the first."""

    site: str
    rank: int
    protocol: int = HANDSHAKE_VERSION

    def pack(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(asdict(self)).encode()


def parse_request(data: bytes) -> AdmissionRequest:
    """Decode the request of a site.

    Raises:
        ProtocolError: the bytes are not a request.
    """
    found = _parse_fields(data, AdmissionRequest, "an admission request")
    try:
        layout = [(str(name), [int(side) for side in shape]) for name, shape in found.pop("layout")]
        request = AdmissionRequest(**{**found, "layout": layout})
        sides = [side for _, shape in layout for side in shape]
        counts = (request.version, request.epoch, request.samples, request.workers)
        valid = all(0 <= side < 2**63 for side in sides) and all(len(shape) <= _MOST_SIDES for _, shape in layout)
        valid = valid and all(isinstance(count, int) and -(2**63) <= count < 2**63 for count in counts)
        valid = valid and 1 <= request.workers <= MOST_RANKS and _is_words(request.frozen)
        valid = valid and not any(isinstance(count, bool) for count in counts)
        valid = valid and (request.optimizer is None or isinstance(request.optimizer, dict))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"an admission request that cannot be read ({error!r})") from error
    if not valid or not (request.strategy is None or isinstance(request.strategy, dict)):
        raise ProtocolError("an admission request with an invalid field: a shape, strategy, version, digest or count")
    return request


def _is_words(found: object) -> bool:
    """Whether it is a mapping to texts, which can be compared with those of other sites whatever they are."""
    return isinstance(found, dict) and all(isinstance(value, str) for value in found.values())


def parse_rank_request(data: bytes) -> RankRequest:
    """Decode the request of a rank.

    Raises:
        ProtocolError: the bytes are not a request.
    """
    try:
        return RankRequest(**_parse_fields(data, RankRequest, "the request of a rank"))
    except TypeError as error:
        raise ProtocolError(f"the request of a rank that cannot be read ({error!r})") from error


def parse_reply(data: bytes) -> AdmissionReply:
    """Decode the reply of the server.

    Raises:
        ProtocolError: the bytes are not a reply.
    """
    return AdmissionReply(**_parse_fields(data, AdmissionReply, "an admission reply"))


def _parse_fields(
    data: bytes, kind: type[AdmissionRequest | AdmissionReply | RankRequest], what: str
) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} that is not JSON ({error})") from error
    if not isinstance(found, dict) or found.get("protocol") != HANDSHAKE_VERSION:
        spoken = found.get("protocol") if isinstance(found, dict) else None
        raise ProtocolError(
            f"{what} in protocol {spoken}; this end speaks {HANDSHAKE_VERSION}; run the same release everywhere"
        )
    if unknown := sorted(found.keys() - {known.name for known in fields(kind)}):
        raise ProtocolError(f"{what} with unknown fields {unknown[:5]}; run the same release everywhere")
    return found


def rank_reply(*, init_model: bool) -> bytes:
    """The reply to a rank: whether it must send its weights for the first global model."""
    return json.dumps({"init_model": init_model}).encode()


def rank_sends_model(reply: bytes) -> bool:
    """What a `rank_reply` says."""
    return bool(json.loads(reply).get("init_model"))
