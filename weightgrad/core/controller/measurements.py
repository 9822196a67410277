"""What the server knows of its sites' steps and links, from the reports that come with their pushes.

With three sites or more, a site's step is believed up to `MOST_STEP` times what most others say: rounds go at the pace
of the slowest site, so what one site says of itself would otherwise decide for all.

A link is `seconds = delay + bytes / speed`, fitted for each site by medians over its last rounds, so that one disturbed
round changes nothing. The delay is at least the round trip time of the link, which the site reports if it knows it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightgrad.core.controller.link_fit import LinkFit
from weightgrad.wire.sync_schedule import Report

MOST_STEP = 10.0
"""A step takes at most so many times as long as that of the upper median of the other sites."""
_LEAST_STEP_S = 1e-9  # a shorter one was not measured


@dataclass
class Measurements:
    """Steps and links by site.

    Attributes:
        steps: seconds of a step.
        links: the fitted links.
        trips: seconds of a round trip, as last reported; 0 if it is not known.
        waited: seconds that all rounds so far were on the link.
    """

    steps: dict[str, float] = field(default_factory=dict)
    links: dict[str, LinkFit] = field(default_factory=dict)
    trips: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)

    def observe(self, site: str, report: Report, network_seconds: float | None, nbytes: int) -> None:
        """Take note of a site's report.

        Args:
            site: the site.
            report: what it measured.
            network_seconds: the time on the link of its last round, or None if that is not known.
            nbytes: the bytes of that round, both ways.
        """
        if report.step_seconds >= _LEAST_STEP_S:
            self.steps[site] = report.step_seconds
        self.trips[site] = report.trip_seconds
        if network_seconds is not None:
            self.links.setdefault(site, LinkFit()).add(nbytes, max(network_seconds, 0.0), report.trip_seconds)
            self.waited[site] = self.waited.get(site, 0.0) + max(network_seconds, 0.0)

    def has_all(self, sites: list[str], rounds: int = 1) -> bool:
        """Whether steps and link of each of these sites are known, the link from so many rounds."""
        links = self.links
        return bool(sites) and all(
            name in self.steps and name in links and len(links[name].rounds) >= rounds for name in sites
        )

    def step(self, sites: list[str]) -> float:
        """Seconds of a step at the slowest of these sites, as far as the others bear it out."""
        steps = sorted(self.steps[name] for name in sites)
        if len(steps) < 3:
            return steps[-1]
        return min(steps[-1], MOST_STEP * statistics.median_high(steps[:-1]))

    def lines(self, sites: list[str]) -> dict[str, tuple[float, float]]:
        """(delay, seconds per byte) of each of these sites."""
        return {name: self.links[name].line() for name in sites}

    def state(self) -> dict[str, Tensor]:
        """Everything as named tensors, for a checkpoint."""
        found = {}
        for name, seconds in self.steps.items():
            found[f"step.{name}"] = torch.tensor(seconds, dtype=torch.float64)
        for name, trip in self.trips.items():
            found[f"near.{name}"] = torch.tensor([trip, self.waited.get(name, 0.0)], dtype=torch.float64)
        for name, fit in self.links.items():
            found[f"link.{name}"] = torch.tensor([(fit.delay, fit.slope), *fit.rounds], dtype=torch.float64)
            found[f"trip.{name}"] = torch.tensor(fit.trip, dtype=torch.float64)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; other names are left alone."""
        own = {name: tensor for name, tensor in state.items() if name.startswith("step.")}
        self.steps = {name.removeprefix("step."): float(tensor) for name, tensor in own.items()}
        self.links, self.trips, self.waited = {}, {}, {}
        for name, tensor in state.items():
            if name.startswith("link."):
                (delay, slope), *rounds = [(float(x), float(y)) for x, y in tensor]
                site = name.removeprefix("link.")
                self.links[site] = LinkFit(rounds, delay, slope, float(state[f"trip.{site}"]))
            elif name.startswith("near."):
                site = name.removeprefix("near.")
                self.trips[site], self.waited[site] = (float(number) for number in tensor)
