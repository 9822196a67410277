"""The orders of a site's coordinator to its shards: encode a push, apply a result, take over a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PushOrder:
    """Encode a push.

    Attributes:
        round: its round.
        step: local steps done.
        fragment: which fragment of the model the round is about.
        threshold: the significance threshold.
        codec: a codec that replaces the strategy's this once; None keeps the strategy's.
        final: whether everything that is left is pushed.
        flush: with `final`, whether it is pushed, or stays with the site.
        places: whether the local model goes to the reference now. Otherwise it goes there with the round result, which
            the site waits for, or it is there already.
        waits: whether the site waits for the result before its next step.
        in_flight_share: how much of each push in flight the local model contains from now on, if `places`.
    """

    round: int
    step: int
    fragment: int = 0
    threshold: float = 0.0
    codec: str | None = None
    final: bool = False
    flush: bool = True
    places: bool = False
    waits: bool = False
    in_flight_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ApplyOrder:
    """Apply a round result.

    Attributes:
        version: the version of the global model that it leads to.
        through: the last round whose push of this site is in the result; -1 if none is.
        in_flight_share: how much of each push in flight the local model contains from now on.
    """

    version: int
    through: int
    in_flight_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LoadOrder:
    """Take over a global model that was downloaded.

    Attributes:
        version: its version.
        step: its step.
        included: the last round whose push of this site is in it.
        discards: whether the residual and the pushes in flight are discarded: they may be with the server already.
        in_flight_share: how much of each push in flight the local model contains from now on.
    """

    version: int
    step: int
    included: int
    discards: bool
    in_flight_share: float = 1.0
