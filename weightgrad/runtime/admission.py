"""What a site and the global server tell each other before the first message: who, which model, which row.

JSON both ways. The site asks; the server lets it in, with the row and the seed, or refuses in words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from weightgrad.errors import ProtocolError

PROTOCOL = 1


@dataclass(frozen=True)
class Ask:
    """A site at the door."""

    site: str
    layout: list[tuple[str, list[int]]]
    digest: str  # of the weights it has now
    version: int  # of its base; -1: it has never been in
    samples: int = 1
    workers: int = 1
    row: dict[str, Any] | None = None  # the strategy its script asks for; None: whatever the server has
    optimizer: dict[str, Any] | None = None
    kernels: str = ""
    protocol: int = PROTOCOL

    def pack(self) -> bytes:
        """As bytes."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Admission:
    """What the server says to a site it lets in."""

    row: dict[str, Any]
    seed: int
    number: int  # of the site, for its keys
    sites: list[str]
    plant: bool  # send your weights: they are the first base
    same_start: bool  # your weights are the first base
    clip_norm: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    protocol: int = PROTOCOL

    def pack(self) -> bytes:
        """As bytes."""
        return json.dumps(asdict(self)).encode()


def read_ask(data: bytes) -> Ask:
    """What a site asked; ProtocolError if it is not that."""
    found = _fields(data, "a request to be let in")
    try:
        layout = [(str(name), [int(side) for side in shape]) for name, shape in found.pop("layout")]
        ask = Ask(**{**found, "layout": layout})
        right = all(side >= 0 for _, shape in layout for side in shape) and isinstance(ask.version, int)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a request to be let in that cannot be read ({error!r})") from error
    if not right or not (ask.row is None or isinstance(ask.row, dict)):
        raise ProtocolError("a request to be let in with a negative shape, or a row or version that is none")
    return ask


def read_admission(data: bytes) -> Admission:
    """What the server said."""
    return Admission(**_fields(data, "an admission"))


def _fields(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ProtocolError(f"{what} that is not JSON ({error})") from error
    if not isinstance(found, dict) or found.get("protocol") != PROTOCOL:
        spoken = found.get("protocol") if isinstance(found, dict) else None
        raise ProtocolError(f"{what} in protocol {spoken}, this end speaks {PROTOCOL}; run the same version everywhere")
    known = set((Ask if what.startswith("a request") else Admission).__dataclass_fields__)
    if strange := sorted(found.keys() - known):
        raise ProtocolError(f"{what} with unknown fields {strange[:5]}; run the same version everywhere")
    return found


def row_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first column in which two rows differ, in words."""
    fitted = ("about", "overlap") if theirs.get("hide") else ("about",)  # the server fits the overlap to the links
    for name in theirs:
        if name not in fitted and json.dumps(mine.get(name)) != json.dumps(theirs[name]):
            return f"{name} is {mine.get(name)!r} here and {theirs[name]!r} there"
    return None
