"""Admission: what a site and the global server tell each other first, and which sites the server admits.

The site sends an AdmissionRequest: who it is, which model it has, which strategy it wants. The server replies with
an AdmissionReply: the strategy, the seed and what else the site needs; or it refuses and says why. Both are JSON.
The server checks certificates, names, model, strategy and optimizer here, before it reads any message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from weightgrad.core.layout import Layout
from weightgrad.core.optimizer_spec import OptimizerSpec
from weightgrad.core.strategies import Strategy
from weightgrad.errors import CredentialsError, ProtocolError, RefusedError, StrategyError
from weightgrad.runtime.flat_parameters import first_difference
from weightgrad.runtime.security.credentials import Revoked
from weightgrad.runtime.transport.transport import EntryRequest
from weightgrad.wire.versions import HANDSHAKE_VERSION


@dataclass(frozen=True)
class AdmissionRequest:
    """What a site says about itself.

    Attributes:
        site: the name of the site.
        layout: name and shape of every parameter, in order.
        digest: digest of the weights that the site has now.
        version: version of the site's global model; -1 if it has never been admitted.
        samples: how many samples the site looks at in a step, which weighs its updates.
        workers: how many ranks the site has.
        strategy: the strategy that the training script asks for; None takes the server's.
        optimizer: the optimizer, where sites share gradients.
        kernels: which kernels the site runs, for logs.
        protocol: version of this exchange.
    """

    site: str
    layout: list[tuple[str, list[int]]]
    digest: str
    version: int
    samples: int = 1
    workers: int = 1
    strategy: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    kernels: str = ""
    protocol: int = HANDSHAKE_VERSION

    def pack(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class AdmissionReply:
    """What the server tells a site that it admits.

    Attributes:
        strategy: the strategy of the run.
        seed: the seed of the run.
        number: the number of the site, from which its random keys are derived.
        sites: the names of all sites.
        init_model: whether the site must send its weights, which become the first global model.
        same_start: whether the site's weights equal the first global model.
        clip_norm: the norm to which gradients are clipped, if they are.
        facts: what the recipe says about the site's link.
        protocol: version of this exchange.
    """

    strategy: dict[str, Any]
    seed: int
    number: int
    sites: list[str]
    init_model: bool
    same_start: bool
    clip_norm: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
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
        valid = all(side >= 0 for _, shape in layout for side in shape) and isinstance(request.version, int)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"an admission request that cannot be read ({error!r})") from error
    if not valid or not (request.strategy is None or isinstance(request.strategy, dict)):
        raise ProtocolError("an admission request with an invalid shape, strategy or version")
    return request


def parse_reply(data: bytes) -> AdmissionReply:
    """Decode the reply of the server.

    Raises:
        ProtocolError: the bytes are not a reply.
    """
    return AdmissionReply(**_parse_fields(data, AdmissionReply, "an admission reply"))


def _parse_fields(data: bytes, kind: type[AdmissionRequest | AdmissionReply], what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ProtocolError(f"{what} that is not JSON ({error})") from error
    if not isinstance(found, dict) or found.get("protocol") != HANDSHAKE_VERSION:
        spoken = found.get("protocol") if isinstance(found, dict) else None
        raise ProtocolError(
            f"{what} in protocol {spoken}; this end speaks {HANDSHAKE_VERSION}; run the same release everywhere"
        )
    if unknown := sorted(found.keys() - {known.name for known in fields(kind)}):
        raise ProtocolError(f"{what} with unknown fields {unknown[:5]}; run the same release everywhere")
    return found


def strategy_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Describe the first part in which two strategies differ; None if they are the same.

    The text and, where the server fits it to the links, the overlap are not compared.
    """
    ignored = ("about", "overlap") if theirs.get("hide") else ("about",)
    for name in theirs:
        if name not in ignored and json.dumps(mine.get(name)) != json.dumps(theirs[name]):
            return f"{name} is {mine.get(name)!r} here and {theirs[name]!r} there"
    return None


@dataclass(frozen=True)
class RunConfig:
    """What is fixed for a run: every site is told it and must agree with it.

    Attributes:
        sites: the names of the sites that may join.
        fit: returns the strategy for a model of so many parameters.
        seed: the seed of the run.
        clip_norm: the norm to which gradients are clipped, if they are.
        bit_s: what the recipe says of the bandwidth of each site's link, in bit/s.
    """

    sites: tuple[str, ...]
    fit: Callable[[int], Strategy]
    seed: int
    clip_norm: float | None = None
    bit_s: Mapping[str, float] = field(default_factory=dict)


class Admission:
    """Decides which sites may join, and remembers which model is being trained.

    Args:
        run_config: what sites must agree with.
        secure: whether sites show certificates.
        revoked: the list of revoked certificates.
        on_refused: called with a fixed phrase for every refusal.

    Attributes:
        initializer: the site whose weights become the first global model.
        initialized: whether there is a global model.
        version: returns the version of the global model; None before there is one.
    """

    def __init__(
        self, run_config: RunConfig, *, secure: bool, revoked: Revoked | None, on_refused: Callable[[str], None]
    ) -> None:
        self._run_config, self._secure, self._revoked, self._on_refused = run_config, secure, revoked, on_refused
        self.layout: Layout | None = None
        self.strategy: Strategy | None = None
        self.digest: str | None = None
        self.initializer: str | None = None
        self.optimizer: dict[str, Any] | None = None
        self.initialized = False
        self.version: Callable[[], int | None] = lambda: None

    def check_peer(self, entry: EntryRequest) -> None:
        """Check that the site belongs to the run and that its certificate is its own and not revoked.

        Raises:
            RefusedError: the site does not belong to the run.
            CredentialsError: the certificate is another site's, or revoked.
        """
        if entry.site not in self._run_config.sites:
            self._on_refused("unknown site")
            raise RefusedError(
                f"no site {entry.site!r} in the recipe of this server; it has {', '.join(self._run_config.sites)}"
            )
        if not self._secure:
            return
        if entry.peer_name != entry.site:
            self._on_refused("another site's certificate")
            raise CredentialsError(
                f"the certificate is of {entry.peer_name!r}, not of {entry.site!r}; use the directory of that site"
            )
        if self._revoked is not None and entry.peer_serial is not None and self._revoked.has(entry.peer_serial):
            self._on_refused("revoked certificate")
            raise CredentialsError(
                f"the certificate of {entry.site} (serial {entry.peer_serial:x}) is revoked; "
                "ask the operator for a new one"
            )

    def enter(self, entry: EntryRequest) -> bytes:
        """Admit a site and return the encoded reply.

        Raises:
            RefusedError: model, strategy, optimizer or version do not fit the run.
            CredentialsError: the certificate is another site's, or revoked.
            ProtocolError: the request cannot be read.
        """
        self.check_peer(entry)
        try:
            request = parse_request(entry.request)
        except ProtocolError:
            self._on_refused("another protocol")
            raise
        if request.site != entry.site:
            self._on_refused("another site's name")
            raise RefusedError(f"the request is of {request.site!r}, the connection of {entry.site!r}")
        layout = Layout.of_shapes((name, tuple(shape)) for name, shape in request.layout)
        self._check_model(request, layout)
        strategy = self._run_config.fit(layout.numel)
        if request.strategy is not None and (found := strategy_difference(request.strategy, strategy.to_dict())):
            self._on_refused("another strategy")
            raise RefusedError(f"{request.site} asks for another strategy: {found} on the server; make them the same")
        if (version := self.version()) is not None and request.version > version:
            self._on_refused("a later global model")
            raise RefusedError(
                f"{request.site} has global model version {request.version}, the server only {version}: the server was "
                "restored from an older checkpoint, or started without its own. Restore the site's checkpoint of that "
                "time as well, or remove it to begin from the server's global model"
            )
        optimizer = self._check_optimizer(request, layout, strategy)
        if self.layout is None:
            self.layout, self.strategy = layout, strategy
            self.digest, self.initializer, self.optimizer = request.digest, request.site, optimizer
        elif self._may_initialize(request):
            self.digest, self.optimizer = request.digest, optimizer  # it entered again before it sent its weights
        return AdmissionReply(
            strategy=strategy.to_dict(),
            seed=self._run_config.seed,
            number=self._run_config.sites.index(request.site),
            sites=list(self._run_config.sites),
            init_model=self._may_initialize(request),
            same_start=request.digest == self.digest,
            clip_norm=self._run_config.clip_norm,
            facts={"bit_s": self._run_config.bit_s.get(request.site)},
        ).pack()

    def lost(self, site: str) -> None:
        """Note that a site is gone: if it was to send the first global model, the next site to enter does so."""
        if not self.initialized and self.initializer == site:
            self.layout = self.strategy = self.initializer = self.digest = self.optimizer = None

    def _check_model(self, request: AdmissionRequest, layout: Layout) -> None:
        if self.layout is None:
            return
        theirs = [(slot.name, slot.shape) for slot in self.layout.slots]
        if (found := first_difference(layout, theirs)) is not None:
            self._on_refused("another model")
            raise RefusedError(f"the model of {request.site} is not the one that is being trained: {found}")

    def _check_optimizer(self, request: AdmissionRequest, layout: Layout, strategy: Strategy) -> dict[str, Any] | None:
        """Return the optimizer that replicas step with, as the strategy changes it; None where updates are shared."""
        if strategy.shares != "gradients":
            return None
        if request.optimizer is None:
            self._on_refused("another optimizer")
            raise RefusedError(f"{strategy.name} shares gradients: the site must describe its optimizer")
        try:
            spec = OptimizerSpec.parse(request.optimizer).changed(strategy.optimizer_with)
            spec.build([nn.Parameter(torch.empty(0)) for _ in layout.slots])
        except StrategyError as error:
            self._on_refused("another optimizer")
            raise RefusedError(f"the optimizer of {request.site} cannot be made on the server: {error}") from error
        known = None if self.optimizer is None else OptimizerSpec.parse(self.optimizer)
        if known is not None and (found := spec.difference(known)) and not self._may_initialize(request):
            self._on_refused("another optimizer")
            raise RefusedError(
                f"{request.site} has another optimizer: {found}; {strategy.name} shares gradients, so all sites must "
                "step alike"
            )
        return spec.dump()

    def _may_initialize(self, request: AdmissionRequest) -> bool:
        return not self.initialized and self.initializer == request.site
