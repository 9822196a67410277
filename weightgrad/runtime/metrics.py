"""What a global server counts and measures, for Prometheus; docs/metrics.md says what to make of it.

Every metric is an attribute named as it is exposed, without the prefix `weightgrad_`:
`metrics.updates_total.labels(site="virginia").inc()`. The registry is this object's own, so that two
servers in one process do not mix. A site's label is the name in its certificate, and a reason is one of
a few fixed words: never text that a stranger chose, which would grow without bound.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Collection, Iterable
from datetime import datetime

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric, generate_latest

import weightgrad

_ROUND_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_CHECKPOINT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class Metrics:
    """All of them. `clock` counts seconds, from anywhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._saved = clock()
        self._expires = math.nan
        self._waited: set[str] = set()
        self._rounds()
        self._traffic()
        self._sites()
        self._durability()
        about = {"version": weightgrad.__version__, "python": platform.python_version(), "torch": torch.__version__}
        self.build = Info("weightgrad_build", "Versions of what is running.", registry=self.registry)
        self.build.info(about)

    def _rounds(self) -> None:
        self.rounds_total = self._counter("rounds_total", "Rounds closed since the server was started.")
        self.round_seconds = self._histogram(
            "round_seconds", "Seconds from a round's first update to its answer.", _ROUND_SECONDS
        )
        self.base_version = self._gauge("base_version", "Version of the base: how often it has moved.")
        self.base_step = self._gauge("base_step", "Training step that the base has reached.")
        self.updates_total = self._counter("updates_total", "Updates received from a site, empty ones too.", "site")
        self.refused_updates_total = self._counter(
            "refused_updates_total", "Updates of a site that the guard refused and that were taken as empty.", "site"
        )

    def _traffic(self) -> None:
        self.up_bytes_total = self._counter("up_bytes_total", "Encoded bytes of the messages from a site.", "site")
        self.down_bytes_total = self._counter("down_bytes_total", "Encoded bytes of the messages to a site.", "site")
        self.socket_bytes = self._gauge(
            "socket_bytes", "Bytes on a site's present connection, with TLS and gRPC around them.", "site", "direction"
        )
        self.refused_connections_total = self._counter(
            "refused_connections_total", "Connections that were not let in, by reason.", "reason"
        )

    def _sites(self) -> None:
        self.site_up = self._gauge("site_up", "1 while a site is connected, else 0.", "site")
        self.site_step = self._gauge("site_step", "Training step of a site's last update.", "site")
        self.site_staleness_versions = self._gauge(
            "site_staleness_versions", "Versions by which the base had moved on when a site's last update came.", "site"
        )
        self.waiting_for = self._gauge("waiting_for", "1 while an open round waits for a site, else 0.", "site")

    def _durability(self) -> None:
        self.checkpoint_seconds = self._histogram(
            "checkpoint_seconds", "Seconds it took to write a checkpoint.", _CHECKPOINT_SECONDS
        )
        self.checkpoint_age_seconds = self._gauge(
            "checkpoint_age_seconds", "Seconds since the last checkpoint was written, or since the start."
        )
        self.checkpoint_age_seconds.set_function(lambda: self._clock() - self._saved)
        self.certificate_expiry_seconds = self._gauge(
            "certificate_expiry_seconds", "Seconds until the server's own certificate expires; NaN without one."
        )
        # NaN and not 0, which would read as expired.
        self.certificate_expiry_seconds.set_function(lambda: self._expires - time.time())

    # -- what is more than one number --------------------------------------------------------

    def checkpointed(self, seconds: float) -> None:
        """A checkpoint was written just now, in so many seconds."""
        self.checkpoint_seconds.observe(seconds)
        self._saved = self._clock()

    def certificate(self, expires: datetime) -> None:
        """The certificate in use expires then; a time with its zone."""
        self._expires = expires.timestamp()

    def wait_for(self, sites: Collection[str]) -> None:
        """The open round waits for these sites, and for no others."""
        self._waited.update(sites)
        for site in self._waited:
            self.waiting_for.labels(site=site).set(site in sites)

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """What the registry holds, without the `_created` twin that the library gives every counter."""
        for metric in self.registry.collect():
            metric.samples = [sample for sample in metric.samples if sample.name != f"{metric.name}_created"]
            yield metric

    # -- making them -------------------------------------------------------------------------

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"weightgrad_{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"weightgrad_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"weightgrad_{name}", about, registry=self.registry, buckets=buckets)
