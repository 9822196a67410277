"""Who may come in: certificates, names, the same model and the same row, before any message is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weightgrad.errors import CredentialsError, ProtocolError, RefusedError, StrategyError
from weightgrad.runtime.admission import Admission, Ask, read_ask, row_difference
from weightgrad.runtime.bridge import first_difference
from weightgrad.runtime.credentials import Revoked
from weightgrad.runtime.lanes_server import Entry
from weightgrad.site.described import Described
from weightgrad.site.layout import Layout
from weightgrad.wan.strategies import Strategy


@dataclass(frozen=True)
class House:
    """What every site of a run is told, and must fit."""

    sites: tuple[str, ...]
    fit: Callable[[int], Strategy]  # the row for a model of so many parameters
    seed: int
    clip_norm: float | None = None
    bit_s: Mapping[str, float] = field(default_factory=dict)  # what the recipe says of the sites' lines


class Door:
    """Lets sites in. `planted` says which model is being trained: its layout, the digest of its first weights."""

    def __init__(self, house: House, *, secure: bool, revoked: Revoked | None, refused: Callable[[str], None]) -> None:
        self._house, self._secure, self._revoked, self._refused = house, secure, revoked, refused
        self.layout: Layout | None = None
        self.strategy: Strategy | None = None
        self.digest: str | None = None
        self.planter: str | None = None  # the site whose weights are to be the first base
        self.optimizer: dict[str, Any] | None = None
        self.planted = False
        self.version: Callable[[], int | None] = lambda: None  # of the base, once there is one

    def check(self, entry: Entry) -> None:
        """The certificate is good, is not revoked, and is of the site that is named."""
        if entry.site not in self._house.sites:
            self._refused("unknown site")
            raise RefusedError(
                f"no site {entry.site!r} in the recipe of this server; it has {', '.join(self._house.sites)}"
            )
        if not self._secure:
            return
        if entry.peer_name != entry.site:
            self._refused("another site's certificate")
            raise CredentialsError(
                f"the certificate is of {entry.peer_name!r}, not of {entry.site!r}; use the directory of that site"
            )
        if self._revoked is not None and entry.peer_serial is not None and self._revoked.has(entry.peer_serial):
            self._refused("revoked certificate")
            raise CredentialsError(
                f"the certificate of {entry.site} (serial {entry.peer_serial:x}) is revoked; "
                "ask the operator for a new one"
            )

    def enter(self, entry: Entry) -> bytes:
        """Let a site in, or raise with the reason."""
        self.check(entry)
        try:
            ask = read_ask(entry.request)
        except ProtocolError:
            self._refused("another protocol")
            raise
        if ask.site != entry.site:
            self._refused("another site's name")
            raise RefusedError(f"the request is of {ask.site!r}, the connection of {entry.site!r}")
        layout = Layout.of_shapes((name, tuple(shape)) for name, shape in ask.layout)
        self._check_model(ask, layout)
        strategy = self._house.fit(layout.numel)
        row = strategy.row()
        if ask.row is not None and (found := row_difference(ask.row, row)):
            self._refused("another strategy")
            raise RefusedError(f"{ask.site} asks for another strategy: {found} on the server; make them the same")
        if (version := self.version()) is not None and ask.version > version:
            self._refused("a later base")
            raise RefusedError(
                f"{ask.site} has base version {ask.version}, the server only {version}: it was restored from an older "
                "state, or started without its own. Restore the site's state of that time as well, or remove it to "
                "begin from the server's base"
            )
        optimizer = self._check_optimizer(ask, layout, strategy)
        if self.layout is None:
            self.layout, self.strategy = layout, strategy
            self.digest, self.planter, self.optimizer = ask.digest, ask.site, optimizer
        elif not self.planted and ask.site == self.planter:
            self.digest, self.optimizer = ask.digest, optimizer  # it has come again before it had planted
        return Admission(
            row=row,
            seed=self._house.seed,
            number=self._house.sites.index(ask.site),
            sites=list(self._house.sites),
            plant=self._may_plant(ask),
            same_start=ask.digest == self.digest,
            clip_norm=self._house.clip_norm,
            facts={"bit_s": self._house.bit_s.get(ask.site)},
        ).pack()

    def _check_model(self, ask: Ask, layout: Layout) -> None:
        if self.layout is None:
            return
        theirs = [(slot.name, slot.shape) for slot in self.layout.slots]
        if (found := first_difference(layout, theirs)) is not None:
            self._refused("another model")
            raise RefusedError(f"the model of {ask.site} is not the one that is being trained: {found}")

    def _check_optimizer(self, ask: Ask, layout: Layout, strategy: Strategy) -> dict[str, Any] | None:
        """The optimizer that replicas are to step with, as the row changes it; None where updates are shared."""
        if strategy.shares != "gradients":
            return None
        if ask.optimizer is None:
            self._refused("another optimizer")
            raise RefusedError(f"{strategy.name} shares gradients: the site must describe its optimizer")
        try:
            told = Described.parse(ask.optimizer).changed(strategy.optimizer_with)
            told.build([nn.Parameter(torch.empty(0)) for _ in layout.slots])
        except StrategyError as error:
            self._refused("another optimizer")
            raise RefusedError(f"the optimizer of {ask.site} cannot be made on the server: {error}") from error
        known = None if self.optimizer is None else Described.parse(self.optimizer)
        if known is not None and (found := told.difference(known)) and not self._may_plant(ask):
            self._refused("another optimizer")
            raise RefusedError(
                f"{ask.site} has another optimizer: {found}; {strategy.name} shares gradients, so all must step alike"
            )
        return told.dump()

    def _may_plant(self, ask: Ask) -> bool:
        return not self.planted and self.planter == ask.site

    def gone(self, site: str) -> None:
        """A site has left before it planted: the next to come may."""
        if not self.planted and self.planter == site:
            self.layout = self.strategy = self.planter = self.digest = self.optimizer = None
