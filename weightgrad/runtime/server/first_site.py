"""Which site brings the first global model: the one that the operator names, or the first with the agreed model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from weightgrad.core.layout import Layout
from weightgrad.errors import LinkError, RefusedError
from weightgrad.runtime.admission_messages import AdmissionRequest
from weightgrad.runtime.layout_match import first_difference
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server.roster import Roster
from weightgrad.runtime.server.votes import LayoutVote


class FirstSite:
    """The choice of the site whose weights everybody begins with.

    Args:
        run_config: what is trained.
        roster: the sites that may take part.
        named: the site that sends the first global model; None: the first that enters with the agreed model.
        agree_s: seconds to wait until a majority of three sites or more has entered with the same model.
        on_refused: called with a fixed phrase for every refusal.

    Attributes:
        vote: which model each site wants.
    """

    def __init__(
        self,
        run_config: RunConfig,
        roster: Roster,
        *,
        named: str | None,
        agree_s: float,
        on_refused: Callable[[str], None],
    ) -> None:
        self._run_config, self._roster, self._named, self._on_refused = run_config, roster, named, on_refused
        self.vote = LayoutVote(len(run_config.sites), agree_s)
        self._passed_over: set[str] = set()  # sites that did not send the first global model in time

    def check(self, request: AdmissionRequest, layout: Layout) -> None:
        """See whether a site may bring the first global model.

        Args:
            request: what the site says about itself.
            layout: its model.

        Raises:
            LinkError: another site is to bring it, or the sites have not agreed; the site is to try again.
            RefusedError: most sites have another model.
        """
        self._check_turn(request.site)
        self._check_agreed(request, layout)

    def pass_over(self, site: str) -> None:
        """A site was to send the first global model and did not: others may, before it."""
        self._passed_over.add(site)

    def _check_turn(self, site: str) -> None:
        """See whether it is this site that brings the first global model."""
        if self._named is not None and site != self._named:
            raise LinkError(f"{self._named} sends the first global model, and has not entered yet; try again")
        if self._passed_over >= set(self._roster.sites):
            self._passed_over.clear()
        if site in self._passed_over:
            raise LinkError(f"{site} did not send the first global model in time; another site may now; try again")

    def _check_agreed(self, request: AdmissionRequest, layout: Layout) -> None:
        """See whether most sites want the model of this one."""
        if self._named is not None:
            return
        optimizer = request.optimizer if self._run_config.fit(layout.numel).shares == "gradients" else None
        wanted = [sorted((slot.name, list(slot.shape)) for slot in layout.slots), optimizer]
        digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
        self.vote.cast(request.site, digest, layout)
        agreed = self.vote.agreed()
        if agreed is None:
            raise LinkError(
                f"the sites have not agreed on a model yet: so far it is that of {self.vote.standing()}; try again"
            )
        if agreed != digest:
            self._on_refused("another model")
            found = first_difference(layout, self.vote.layout(agreed)) or "it has another optimizer"
            raise RefusedError(f"the model of {request.site} is not the one that most sites have: {found}")
