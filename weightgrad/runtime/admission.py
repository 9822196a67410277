"""Admission: what a site and the global server tell each other first, and which sites the server admits.

Rank 0 of a site sends an AdmissionRequest: who the site is, which model it has, which strategy it wants. The server
replies with an AdmissionReply: the strategy, the seed, the order of the parameters, who serves which elements; or it
refuses and says why. The other ranks of an admitted site then enter with a RankRequest. All of these are JSON. The
server checks certificates, names, model, strategy and optimizer here, before it reads any message.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

import weightgrad
from weightgrad import kernels
from weightgrad.core.layout import Layout
from weightgrad.core.optimizer_spec import AT_SITES, OptimizerSpec
from weightgrad.core.optimizers import is_linear
from weightgrad.core.strategies import Strategy
from weightgrad.errors import CheckpointError, CredentialsError, LinkError, ProtocolError, RefusedError, StrategyError
from weightgrad.runtime.layout_vote import LayoutVote
from weightgrad.runtime.roster import Roster
from weightgrad.runtime.security.credentials import Revoked
from weightgrad.runtime.seldom_actions import SeldomActions
from weightgrad.runtime.transport.transport import EntryRequest
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.versions import HANDSHAKE_VERSION, MESSAGE_VERSION, TRANSPORT_VERSION

log = logging.getLogger("weightgrad.serve")

_MAX_NUMEL = 1 << 40
_MOST_RANKS = 4096  # of a site
_PAUSES_S = (0.0, 0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # before a site that misbehaved may enter again
_FORGOTTEN_S = 600.0  # after so long, what a site has done is forgotten


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
        valid = all(side >= 0 for side in sides) and all(isinstance(count, int) for count in counts)
        valid = valid and 1 <= request.workers <= _MOST_RANKS and isinstance(request.frozen, dict)
        valid = valid and not any(isinstance(count, bool) for count in counts)
        valid = valid and (request.optimizer is None or isinstance(request.optimizer, dict))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"an admission request that cannot be read ({error!r})") from error
    if not valid or not (request.strategy is None or isinstance(request.strategy, dict)):
        raise ProtocolError("an admission request with an invalid shape, strategy, version or number of workers")
    return request


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


def strategy_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Describe the first part in which two strategies differ; None if they are the same.

    The text and, where the server fits it to the links, the overlap are not compared. A strategy that has other parts
    for some optimizers may be either row.
    """
    if (mine.get("nonlinear") or mine.get("near")) and not (theirs.get("nonlinear") or theirs.get("near")):
        plain = {**mine, "nonlinear": {}, "near": {}}
        far = {**plain, **mine["nonlinear"]}
        found = [strategy_difference(row, theirs) for row in (plain, far, {**far, **mine["near"]})]
        return None if None in found else found[0]
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
        most_rate: the largest learning rate that a site may state, where gradients are shared; None: a million.
        near: whether all sites are on this machine, so that nothing has to be saved on their lines.
    """

    sites: tuple[str, ...]
    fit: Callable[[int], Strategy]
    seed: int
    clip_norm: float | None = None
    bit_s: Mapping[str, float] = field(default_factory=dict)
    most_rate: float | None = None
    near: bool = False

    def strategy_for(self, numel: int, optimizer: Mapping[str, Any] | None) -> Strategy:
        """The strategy of a model of so many parameters, after its choice between rows if there is one to make.

        Args:
            numel: the parameters of the model.
            optimizer: what the first site has told about its optimizer; a recipe's own goes before it.
        """
        strategy = self.fit(numel)
        if not strategy.nonlinear and not strategy.near:
            return strategy
        told = dict(optimizer or {})
        return strategy.with_optimizer(str(told.get("kind") or "SGD"), near=self.near and _can_share_gradients(told))


def _can_share_gradients(optimizer: Mapping[str, Any]) -> bool:
    """Whether replicas of this optimizer can step with shared gradients, at the site and here."""
    try:
        return not optimizer.get(APART) and bool(OptimizerSpec.parse(optimizer).groups)
    except StrategyError:
        return False


class Admission:
    """Decides which sites may join, and remembers which model is being trained.

    Args:
        run_config: what sites must agree with.
        secure: whether sites show certificates.
        revoked: the list of revoked certificates.
        on_refused: called with a fixed phrase for every refusal.
        max_parameters: the largest model that the first site may bring; None: any that fits an index.
        first_site: the site that sends the first global model; None: the first that enters with the agreed model.
        agree_s: seconds to wait until a majority of three sites or more has entered with the same model.
        max_ranks: how many ranks a site may have, each of which has connections and memory of its own.
        roster: the sites that may join; by default those of `run_config`.

    Attributes:
        secure: whether sites show certificates.
        roster: the sites that may join, as the operator has changed them.
        initializer: the site whose weights become the first global model.
        initialized: whether there is a global model.
        servers: the processes of the server.
        version: returns the version of the global model; None before there is one.
        on_first: called when a site was admitted that will send the first weights.
    """

    def __init__(
        self,
        run_config: RunConfig,
        *,
        secure: bool,
        revoked: Revoked | None,
        on_refused: Callable[[str], None],
        max_parameters: int | None = None,
        first_site: str | None = None,
        agree_s: float = 0.0,
        max_ranks: int = _MOST_RANKS,
        roster: Roster | None = None,
    ) -> None:
        self.roster = Roster(run_config.sites, bit_s=run_config.bit_s) if roster is None else roster
        self._run_config, self.secure, self._revoked, self._on_refused = run_config, secure, revoked, on_refused
        self._max_parameters, self._first_site = min(max_parameters or _MAX_NUMEL, _MAX_NUMEL), first_site
        self._max_ranks = max_ranks
        self._vote = LayoutVote(len(run_config.sites), agree_s)
        self._passed_over: set[str] = set()  # sites that did not send the first global model in time
        self._faults: dict[str, tuple[int, float]] = {}  # how often a session was ended for what it did, and when last
        self.layout: Layout | None = None
        self.strategy: Strategy | None = None
        self.initializer: str | None = None
        self.optimizer: dict[str, Any] | None = None
        self.initialized = False
        self.servers: list[ServedBy] = [ServedBy("", [])]
        self.version: Callable[[], int | None] = lambda: None
        self.on_first: Callable[[], None] = lambda: None
        self._frozen: dict[str, dict[str, str]] = {}  # by site: the digests of its frozen parameters
        self._entries = SeldomActions(per_s=2.0, burst=60)
        self._workers: dict[str, int] = {}  # ranks of the sites that were admitted

    def check_peer(self, entry: EntryRequest) -> None:
        """Check that the site belongs to the run and that its certificate is its own and not revoked.

        Raises:
            RefusedError: the site does not belong to the run.
            CredentialsError: the certificate is another site's, or revoked.
        """
        if entry.site not in self.roster.sites:
            self._on_refused("unknown site")
            raise RefusedError(
                f"no site {entry.site!r} in the recipe of this server; it has {', '.join(self.roster.sites)}; its "
                f"operator can add one with `weightgrad sites add`"
            )
        if not self.secure:
            return
        if entry.peer_name != entry.site:
            self._on_refused("another site's certificate")
            raise CredentialsError(
                f"the certificate is of {entry.peer_name!r}, not of {entry.site!r}; use the directory of that site"
            )
        if entry.peer_serial is not None and self.is_revoked(entry.peer_serial):
            self._on_refused("revoked certificate")
            raise CredentialsError(
                f"the certificate of {entry.site} (serial {entry.peer_serial:x}) is revoked; "
                "ask the operator for a new one"
            )

    def is_revoked(self, serial: int) -> bool:
        """Whether a certificate is revoked, in the file beside the server's own or by the operator."""
        return self.roster.is_revoked(serial) or (self._revoked is not None and self._revoked.has(serial))

    def enter(self, entry: EntryRequest) -> bytes:
        """Admit a site, or a further rank of one, and return the encoded reply.

        Raises:
            RefusedError: model, strategy, optimizer or version do not fit the run.
            CredentialsError: the certificate is another site's, or revoked.
            ProtocolError: the request cannot be read.
            LinkError: rank 0 of the site has not entered yet; the rank is to try again.
        """
        self.check_peer(entry)
        self._check_pause(entry.site, time.monotonic())
        try:
            if entry.rank:
                return self._enter_rank(entry)
            if not self._entries.try_take(entry.site):
                raise LinkError(f"{entry.site} enters more often than twice a second; try again")
            request = parse_request(entry.request)
        except ProtocolError:
            self._on_refused("another protocol")
            raise
        if request.site != entry.site:
            self._on_refused("another site's name")
            raise RefusedError(f"the request is of {request.site!r}, the connection of {entry.site!r}")
        reply = self._enter_site(request).pack()
        try:
            self.roster.seen(entry.site, entry.peer_serial)
        except CheckpointError as error:
            log.error("%s", error)  # it may train all the same; to revoke it, its serial number must be given
        return reply

    def _enter_rank(self, entry: EntryRequest) -> bytes:
        parse_rank_request(entry.request)
        if entry.site not in self._workers:
            raise LinkError(f"rank 0 of {entry.site} has not entered; {entry.peer} is to try again")
        if entry.rank >= self._workers[entry.site]:
            self._on_refused("a rank too many")
            raise RefusedError(f"{entry.site} has {self._workers[entry.site]} ranks, and {entry.peer} wants to enter")
        return rank_reply(init_model=not self.initialized and self.initializer == entry.site)

    def _enter_site(self, request: AdmissionRequest) -> AdmissionReply:
        layout = Layout.of_shapes((name, tuple(shape)) for name, shape in request.layout)
        self._check_model(request, layout)
        known = self.layout if self.layout is not None else layout
        told = self.optimizer if self.layout is not None else request.optimizer
        strategy = self._run_config.strategy_for(known.numel, told)
        if request.strategy is not None and (found := strategy_difference(request.strategy, strategy.to_dict())):
            self._on_refused("another strategy")
            raise RefusedError(f"{request.site} asks for another strategy: {found} on the server; make them the same")
        if self._is_for_another_optimizer(request, strategy):
            log.warning(
                "%s trains with %s, and the recipe of this server has an optimizer of another kind, which %s goes by: "
                "write the optimizer into the recipe",
                *(request.site, (request.optimizer or {}).get("kind"), strategy.name),
            )
        version = self.version()
        if version is None and request.version > 0:
            self._on_refused("a later global model")
            raise RefusedError(
                f"{request.site} has global model version {request.version} and the server none: it was started "
                "without its state. Start it with that, or begin the run anew with empty states"
            )
        if version is not None and request.version > version:
            self._on_refused("a later global model")
            raise RefusedError(
                f"{request.site} has global model version {request.version}, the server only {version}: the server was "
                "restored from an older checkpoint, or started without its own. Restore the site's checkpoint of that "
                "time as well, or remove it to begin from the server's global model"
            )
        optimizer = self._check_optimizer(request, layout, known, strategy)
        self._check_frozen(request)
        self._workers[request.site] = request.workers
        if self.layout is None or self._may_initialize(request):  # also if it enters again before it sent its weights
            self.layout, self.strategy = known, strategy
            self.initializer, self.optimizer = request.site, optimizer
            self.on_first()
        return AdmissionReply(
            strategy=strategy.to_dict(),
            seed=self._run_config.seed,
            number=self.roster.number(request.site),
            sites=list(self.roster.sites),
            layout=[slot.name for slot in known.slots],
            servers=[(one.address, one.spans) for one in self.servers],
            init_model=self._may_initialize(request),
            clip_norm=self._run_config.clip_norm,
            facts={
                "bit_s": self.roster.bit_s(request.site),
                "server": about_this_process(),
                AT_SITES: bool((self.optimizer or {}).get(AT_SITES)),
            },
        )

    @staticmethod
    def _is_for_another_optimizer(request: AdmissionRequest, strategy: Strategy) -> bool:
        """Whether the strategy has other parts for the optimizer of this site, and the server's does not have them."""
        kind = str((request.optimizer or {}).get("kind", "sgd"))
        asked = request.strategy or {}
        return bool(asked.get("nonlinear")) and not is_linear(kind) and strategy.controller == asked.get("controller")

    def misbehaved(self, site: str, now: float) -> int:
        """Note that a session of a site was ended for what it did; how often that has happened lately."""
        count, last = self._faults.get(site, (0, now))
        self._faults[site] = (1 if now - last > _FORGOTTEN_S else count + 1), now
        return self._faults[site][0]

    def _check_pause(self, site: str, now: float) -> None:
        count, last = self._faults.get(site, (0, now))
        pause = _PAUSES_S[min(count, len(_PAUSES_S) - 1)] - (now - last)
        if count and pause > 0:
            raise LinkError(
                f"the sessions of {site} were ended {count} times for what it sent; try again in {pause:.0f} s"
            )

    def give_up_first(self) -> str | None:
        """The site that was to send the first global model does not: the next one may. Returns which it was."""
        late = self.initializer
        if self.initialized or late is None:
            return None
        self._passed_over.add(late)
        self.lost(late)
        return late

    def _check_first(self, site: str) -> None:
        """Whether a site may bring the first global model."""
        if self._first_site is not None and site != self._first_site:
            raise LinkError(f"{self._first_site} sends the first global model, and has not entered yet; try again")
        if self._passed_over >= set(self.roster.sites):
            self._passed_over.clear()
        if site in self._passed_over:
            raise LinkError(f"{site} did not send the first global model in time; another site may now; try again")

    def _check_agreed(self, request: AdmissionRequest, layout: Layout) -> None:
        """Whether most sites want the model of this one."""
        if self._first_site is not None:
            return
        optimizer = request.optimizer if self._run_config.fit(layout.numel).shares == "gradients" else None
        wanted = [sorted((slot.name, list(slot.shape)) for slot in layout.slots), optimizer]
        digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
        self._vote.cast(request.site, digest, layout)
        agreed = self._vote.agreed()
        if agreed is None:
            raise LinkError(
                f"the sites have not agreed on a model yet: so far it is that of {self._vote.standing()}; try again"
            )
        if agreed != digest:
            self._on_refused("another model")
            found = first_difference(layout, self._vote.layout(agreed)) or "it has another optimizer"
            raise RefusedError(f"the model of {request.site} is not the one that most sites have: {found}")

    def lost(self, site: str) -> None:
        """Note that a site is gone: if it was to send the first global model, the next site to enter does so."""
        if not self.initialized and self.initializer == site:
            self.layout = self.strategy = self.initializer = self.optimizer = None
            self._frozen.pop(site, None)

    def _check_model(self, request: AdmissionRequest, layout: Layout) -> None:
        if request.workers > self._max_ranks:
            self._on_refused("too many ranks")
            raise RefusedError(
                f"{request.site} has {request.workers} ranks, and this server takes at most {self._max_ranks} of a "
                "site; its operator can raise --max-ranks"
            )
        if len({slot.name for slot in layout.slots}) < len(layout.slots) or not layout.numel:
            self._on_refused("another model")
            raise RefusedError(
                f"the model of {request.site} has {layout.numel} elements, or two parameters of one name"
            )
        if self.layout is None and layout.numel > self._max_parameters:
            self._on_refused("a model too large")
            raise RefusedError(
                f"the model of {request.site} has {layout.numel:,} parameters, and this server takes at most "
                f"{self._max_parameters:,}; its operator can raise --max-parameters"
            )
        if self.layout is None:
            self._check_first(request.site)
            self._check_agreed(request, layout)
        if self.layout is not None and (found := first_difference(layout, self.layout)) is not None:
            self._on_refused("another model")
            raise RefusedError(f"the model of {request.site} is not the one that is being trained: {found}")

    def _check_frozen(self, request: AdmissionRequest) -> None:
        """Compare parameters that take no part with what most other sites have in them.

        Each site has one word, also one that is refused: so a site that comes first with wrong values shuts nobody out.
        """
        others = {site: own for site, own in self._frozen.items() if site != request.site}
        self._frozen[request.site] = dict(request.frozen)
        for name, digest in request.frozen.items():
            named = {site: own[name] for site, own in others.items() if name in own}
            counts = Counter(named.values())
            rivals = [(count, one) for one, count in counts.items() if one != digest and count > counts[digest]]
            if not rivals:
                continue
            count, theirs = max(rivals)
            first = next(site for site, own in named.items() if own == theirs)
            why = (
                f"{name} is frozen, and {request.site} has other values in it than {first}: it does not travel, so "
                'load the same weights at every site. To allow it, say prepare(frozen="local")'
            )
            if len(self._run_config.sites) > 2 and 2 * count <= len(self._run_config.sites):
                raise LinkError(f"{why}. No majority has said yet which is right; try again")
            self._on_refused("other frozen parameters")
            raise RefusedError(why)

    def _check_optimizer(
        self, request: AdmissionRequest, layout: Layout, known: Layout, strategy: Strategy
    ) -> dict[str, Any] | None:
        """The optimizer that replicas step with, as the strategy changes it; only its name where updates are shared."""
        if strategy.shares != "gradients":
            return {"kind": str((request.optimizer or {}).get("kind", ""))}
        told = request.optimizer or {}
        try:
            if not told.get("groups"):
                raise StrategyError(str(told.get(APART) or "it has described no optimizer"))
            order = {slot.name: index for index, slot in enumerate(known.slots)}
            spec = OptimizerSpec.parse(told, build=False).reordered([order[slot.name] for slot in layout.slots])
            spec = spec.changed(strategy.optimizer_with)
        except StrategyError as error:
            self._on_refused("another optimizer")
            raise RefusedError(
                f"{strategy.name} shares gradients, with which {request.site} cannot step: {error}. "
                "Take a strategy that shares updates, such as weightgrad or diloco"
            ) from error
        theirs = None if self.optimizer is None else OptimizerSpec.parse(self.optimizer, build=False)
        if theirs is not None and (found := spec.difference(theirs)) and not self._may_initialize(request):
            self._on_refused("another optimizer")
            raise RefusedError(
                f"{request.site} has another optimizer: {found}; {strategy.name} shares gradients, so all sites must "
                "step alike"
            )
        if self.optimizer is not None and not self._may_initialize(request):
            return self.optimizer
        return spec.dump() | ({AT_SITES: True} if self._only_at_sites(request, known, spec, strategy) else {})

    def _only_at_sites(self, request: AdmissionRequest, known: Layout, spec: OptimizerSpec, strategy: Strategy) -> bool:
        """Whether the server cannot make the optimizer, so that the sites step with it and the server does not."""
        try:
            if (request.optimizer or {}).get(AT_SITES):
                raise StrategyError(f"{spec.kind} cannot be described")
            OptimizerSpec.parse(spec.dump()).build(_without_memory(known, spec))
        except StrategyError as error:
            if strategy.needs_weights_at_server:
                self._on_refused("another optimizer")
                raise RefusedError(
                    f"the optimizer of {request.site} cannot be made on the server: {error}; and {strategy.name} needs "
                    "the weights there. Or take a strategy that shares updates, such as weightgrad"
                ) from error
            log.warning(
                "%s: the sites step with the shared gradients, and this server does not. A site that joins late takes "
                "all steps again, as long as the server remembers them; the final model comes from a site",
                error,
            )
            return True
        return False

    def _may_initialize(self, request: AdmissionRequest) -> bool:
        return not self.initialized and self.initializer == request.site


def _without_memory(layout: Layout, spec: OptimizerSpec) -> dict[int, nn.Parameter]:
    """Parameters to try an optimizer on: of the right shapes where it looks at shapes, and without memory."""
    shapes = [slot.shape if spec.needs_whole_tensors else (0,) for slot in layout.slots]
    return {index: nn.Parameter(torch.empty(1).expand(shape or (1,))) for index, shape in enumerate(shapes)}


def about_this_process() -> dict[str, Any]:
    """The versions of what runs here and the time, for the other side to compare with its own."""
    return {
        "weightgrad": weightgrad.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": str(kernels.status()),
        "transport": TRANSPORT_VERSION,
        "messages": MESSAGE_VERSION,
        "admission": HANDSHAKE_VERSION,
        "time": time.time(),
    }


def rank_reply(*, init_model: bool) -> bytes:
    """The reply to a rank: whether it must send its weights for the first global model."""
    return json.dumps({"init_model": init_model}).encode()


def rank_sends_model(reply: bytes) -> bool:
    """What a `rank_reply` says."""
    return bool(json.loads(reply).get("init_model"))


def first_difference(mine: Layout, theirs: Layout) -> str | None:
    """The first parameter in which two models differ, whatever the order, in words; None if they are alike."""
    own = {slot.name: slot.shape for slot in mine.slots}
    other = {slot.name: slot.shape for slot in theirs.slots}
    for slot in mine.slots:
        if slot.name not in other:
            return f"it has a parameter {slot.name} {list(slot.shape)}, which the others lack"
        if other[slot.name] != slot.shape:
            return f"{slot.name} is {list(slot.shape)}, the others have {list(other[slot.name])}"
    for slot in theirs.slots:
        if slot.name not in own:
            return f"it lacks the parameter {slot.name} {list(slot.shape)}"
    return None


def in_order(layout: Layout, names: Sequence[str]) -> Layout:
    """The same parameters in another order.

    Raises:
        ProtocolError: the names are those of another model.
    """
    shapes = {slot.name: slot.shape for slot in layout.slots}
    if sorted(shapes) != sorted(names):
        raise ProtocolError("the server has parameters of other names than this site; run the same release everywhere")
    return Layout.of_shapes((name, shapes[name]) for name in names)
