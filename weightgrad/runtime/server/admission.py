"""Which sites the global server admits to a run.

Rank 0 of a site asks with an AdmissionRequest, the other ranks with a RankRequest (`runtime/admission_messages.py`).
The server checks certificate, name, model, strategy, version, optimizer and frozen parameters, before it reads any
other message; it replies with what is fixed for the run, or refuses and says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.spec import AT_SITES
from weightgrad.core.strategies import Strategy
from weightgrad.errors import CheckpointError, LinkError, ProtocolError, RefusedError
from weightgrad.runtime.admission_messages import (
    MOST_RANKS,
    AdmissionReply,
    AdmissionRequest,
    ServedBy,
    parse_rank_request,
    parse_request,
    rank_reply,
)
from weightgrad.runtime.layout_match import first_difference
from weightgrad.runtime.process_facts import about_this_process
from weightgrad.runtime.rate_limiter import RateLimiter
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server.entry_pauses import EntryPauses
from weightgrad.runtime.server.first_site import FirstSite
from weightgrad.runtime.server.optimizer_admission import OptimizerAdmission, is_for_another_optimizer
from weightgrad.runtime.server.peer_check import PeerCheck
from weightgrad.runtime.server.roster import Roster
from weightgrad.runtime.server.votes import FrozenVote
from weightgrad.runtime.strategy_difference import strategy_difference
from weightgrad.runtime.transport.transport import EntryRequest

log = logging.getLogger("weightgrad.serve")

_MAX_NUMEL = 1 << 40
_ENTRY_BYTES = 1 << 18  # of a request count as one more: reading the names of many parameters takes long


class Admission:
    """Decides which sites may join, and remembers which model is being trained.

    Args:
        run_config: what sites must agree with.
        peers: who may connect at all.
        on_refused: called with a fixed phrase for every refusal.
        max_parameters: the largest model that the first site may bring; None: any that fits an index.
        first_site: the site that sends the first global model; None: the first that enters with the agreed model.
        agree_s: seconds to wait until a majority of three sites or more has entered with the same model.
        max_ranks: how many ranks a site may have, each of which has connections and memory of its own.

    Attributes:
        peers: who may connect at all.
        pauses: how long sites that misbehaved must wait before they enter again.
        first_site: which site brings the first global model.
        layout: the parameters in the order of the index space, once a site has brought them.
        strategy: the strategy of the run, then.
        optimizer: the optimizer that replicas step with, then; only its name where updates are shared.
        initializer: the site whose weights become the first global model.
        initialized: whether there is a global model.
        servers: the processes of the server.
        version: returns the version of the global model; None before there is one.
        on_first: called when a site was admitted that will send the first weights.
    """

    def __init__(
        self,
        run_config: RunConfig,
        peers: PeerCheck,
        *,
        on_refused: Callable[[str], None],
        max_parameters: int | None = None,
        first_site: str | None = None,
        agree_s: float = 0.0,
        max_ranks: int = MOST_RANKS,
    ) -> None:
        self.peers, self._run_config, self._on_refused = peers, run_config, on_refused
        self._max_parameters, self._max_ranks = min(max_parameters or _MAX_NUMEL, _MAX_NUMEL), max_ranks
        self.pauses = EntryPauses()
        self.first_site = FirstSite(run_config, peers.roster, named=first_site, agree_s=agree_s, on_refused=on_refused)
        self._optimizers = OptimizerAdmission(on_refused)
        self._frozen = FrozenVote(len(run_config.sites), on_refused)
        self._entries = RateLimiter(per_s=2.0, burst=60)
        self._workers: dict[str, int] = {}  # ranks of the sites that were admitted
        self.layout: Layout | None = None
        self.strategy: Strategy | None = None
        self.optimizer: dict[str, Any] | None = None
        self.initializer: str | None = None
        self.initialized = False
        self.servers: list[ServedBy] = [ServedBy("", [])]
        self.version: Callable[[], int | None] = lambda: None
        self.on_first: Callable[[], None] = lambda: None

    @property
    def roster(self) -> Roster:
        """The sites that may take part, as the operator has changed them."""
        return self.peers.roster

    def enter(self, entry: EntryRequest) -> bytes:
        """Admit a site, or a further rank of one, and return the encoded reply.

        Raises:
            RefusedError: model, strategy, optimizer or version do not fit the run.
            CredentialsError: the certificate is another site's, or revoked.
            ProtocolError: the request cannot be read.
            LinkError: rank 0 of the site has not entered yet; the rank is to try again.
        """
        self.peers.check(entry)
        self.pauses.check(entry.site, time.monotonic())
        try:
            if entry.rank:
                return self._enter_rank(entry)
            if not self._entries.try_take(entry.site, 1 + len(entry.request) / _ENTRY_BYTES):
                raise LinkError(f"{entry.site} enters more often than twice a second; try again")
            request = parse_request(entry.request)
        except ProtocolError:
            self._on_refused("another protocol")
            raise
        if request.site != entry.site:
            self._on_refused("another site's name")
            raise RefusedError(f"the request is of {request.site!r}, the connection of {entry.site!r}")
        reply = self._enter_or_withdraw(request).pack()
        try:
            self.roster.seen(entry.site, entry.peer_serial)
        except CheckpointError as error:
            log.error("%s", error)  # it may train all the same; to revoke it, its serial number must be given
        return reply

    def _enter_or_withdraw(self, request: AdmissionRequest) -> AdmissionReply:
        try:
            return self._enter_site(request)
        except (ProtocolError, RefusedError):
            self.first_site.vote.withdraw(request.site)  # LinkError: it waits for the others, and its vote counts
            raise

    def _enter_rank(self, entry: EntryRequest) -> bytes:
        if not self._entries.try_take(entry.peer):
            raise LinkError(f"{entry.peer} enters more often than twice a second; try again")
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
        if is_for_another_optimizer(request, strategy):
            log.warning(
                "%s trains with %s, and the recipe of this server has an optimizer of another kind, which %s goes by: "
                "write the optimizer into the recipe",
                *(request.site, (request.optimizer or {}).get("kind"), strategy.name),
            )
        self._check_version(request)
        agreed = None if self._may_initialize(request) else self.optimizer
        optimizer = self._optimizers.check(request, layout, known, strategy, agreed)
        self._frozen.check(request)
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

    def give_up_first(self) -> str | None:
        """The site that was to send the first global model does not: the next one may. Returns which it was."""
        late = self.initializer
        if self.initialized or late is None:
            return None
        self.first_site.pass_over(late)
        self.lost(late)
        return late

    def lost(self, site: str) -> None:
        """Note that a site is gone: if it was to send the first global model, the next site to enter does so."""
        if not self.initialized and self.initializer == site:
            self.layout = self.strategy = self.initializer = self.optimizer = None
            self._frozen.forget(site)

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
            self.first_site.check(request, layout)
        if self.layout is not None and (found := first_difference(layout, self.layout)) is not None:
            self._on_refused("another model")
            raise RefusedError(f"the model of {request.site} is not the one that is being trained: {found}")

    def _check_version(self, request: AdmissionRequest) -> None:
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

    def _may_initialize(self, request: AdmissionRequest) -> bool:
        return not self.initialized and self.initializer == request.site
