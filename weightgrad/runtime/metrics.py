"""What a global server and a site count and measure, for Prometheus; docs/metrics.md explains each metric.

Every metric is an attribute named as it is exposed, without the prefix `weightgrad_`:
`metrics.updates_total.labels(site="virginia").inc()`. Each object has a registry of its own, so that two of them in
one process do not mix. The label `site` is the name in a site's certificate, and a reason is one of a few fixed
phrases: never text that a stranger chose, which would grow without bound.
"""

from __future__ import annotations

import math
import platform
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric, generate_latest

import weightgrad
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.runtime.transport.transport import Peer, Traffic

_ROUND_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_CHECKPOINT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_RATE_WINDOW_S = 60.0


class MetricSet:
    """A registry of metrics, and the versions of what is running."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        about = {"version": weightgrad.__version__, "python": platform.python_version(), "torch": torch.__version__}
        self.build = Info("weightgrad_build", "Versions of the software that is running.", registry=self.registry)
        self.build.info(about)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """All metrics, without the `_created` sample that the library adds to every counter."""
        for metric in self.registry.collect():
            metric.samples = [sample for sample in metric.samples if sample.name != f"{metric.name}_created"]
            yield metric

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"weightgrad_{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"weightgrad_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"weightgrad_{name}", about, registry=self.registry, buckets=buckets)


class ServerMetrics(MetricSet):
    """The metrics of a global server. `clock` counts seconds, from any start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._checkpointed_at = clock()
        self._certificate_expires = math.nan
        self._sites_waited_for: set[str] = set()
        self._add_round_metrics()
        self._add_traffic_metrics()
        self._add_site_metrics()
        self._add_durability_metrics()

    def _add_round_metrics(self) -> None:
        self.rounds_total = self._counter("rounds_total", "Rounds closed since the server was started.")
        self.round_seconds = self._histogram(
            "round_seconds", "Seconds from the first update of a round to its result.", _ROUND_SECONDS
        )
        self.global_model_version = self._gauge(
            "global_model_version", "Version of the global model: how many results it has applied."
        )
        self.global_model_step = self._gauge("global_model_step", "Training step that the global model has reached.")
        self.updates_total = self._counter("updates_total", "Updates received from a site, empty ones too.", "site")
        self.refused_updates_total = self._counter(
            "refused_updates_total", "Updates of a site that were refused and counted as empty.", "site"
        )
        self.limited_updates_total = self._counter(
            "limited_updates_total", "Updates of a site that weighed too much and counted only in part.", "site"
        )
        self.sites_set_aside_total = self._counter(
            "sites_set_aside_total", "How often a site was set aside, so that rounds do not wait for it.", "site"
        )

    def _add_traffic_metrics(self) -> None:
        self.up_bytes_total = self._counter("up_bytes_total", "Encoded bytes of all messages from a site.", "site")
        self.down_bytes_total = self._counter("down_bytes_total", "Encoded bytes of all messages to a site.", "site")
        self.socket_bytes = self._gauge(
            "socket_bytes", "Bytes on the TCP connections of a site, TLS and gRPC included.", "site", "direction"
        )
        self.refused_connections_total = self._counter(
            "refused_connections_total", "Connections that were refused, by reason.", "reason"
        )

    def _add_site_metrics(self) -> None:
        self.site_up = self._gauge("site_up", "1 while a site is connected, else 0.", "site")
        self.site_step = self._gauge("site_step", "Training step of the last update of a site.", "site")
        self.site_staleness_versions = self._gauge(
            "site_staleness_versions",
            "Versions by which the global model was ahead when the last update of a site came.",
            "site",
        )
        self.waiting_for = self._gauge("waiting_for", "1 while an open round waits for a site, else 0.", "site")

    def _add_durability_metrics(self) -> None:
        self.checkpoint_seconds = self._histogram(
            "checkpoint_seconds", "Seconds it took to write a checkpoint.", _CHECKPOINT_SECONDS
        )
        self.checkpoint_age_seconds = self._gauge(
            "checkpoint_age_seconds", "Seconds since the last checkpoint was written, or since the start."
        )
        self.checkpoint_age_seconds.set_function(lambda: self._clock() - self._checkpointed_at)
        self.certificate_expiry_seconds = self._gauge(
            "certificate_expiry_seconds", "Seconds until the certificate of the server expires; NaN without one."
        )
        # NaN and not 0, which would read as expired.
        self.certificate_expiry_seconds.set_function(lambda: self._certificate_expires - time.time())

    def checkpointed(self, seconds: float) -> None:
        """Note that a checkpoint was written just now, and how long that took."""
        self.checkpoint_seconds.observe(seconds)
        self._checkpointed_at = self._clock()

    def certificate(self, expires: datetime) -> None:
        """Note when the certificate in use expires; the time must have a time zone."""
        self._certificate_expires = expires.timestamp()

    def wait_for(self, sites: Collection[str]) -> None:
        """Note that the open round waits for these sites, and for no others."""
        self._sites_waited_for.update(sites)
        for site in self._sites_waited_for:
            self.waiting_for.labels(site=site).set(site in sites)

    def sockets(self, counts: Mapping[Peer, Traffic]) -> None:
        """Note the bytes on the sockets of each peer, as the server counts them, summed over the ranks of a site."""
        by_site: dict[str, Traffic] = {}
        for peer, count in counts.items():
            by_site[peer.site] = by_site.get(peer.site, Traffic()) + count
        for site, count in by_site.items():
            self.socket_bytes.labels(site=site, direction="up").set(count.received)
            self.socket_bytes.labels(site=site, direction="down").set(count.sent)


class SiteMetrics(MetricSet):
    """The metrics of one site, kept by its local server. Every metric has the label `site`.

    Args:
        site: the name of the site.
        clock: counts seconds, from any start.
    """

    def __init__(self, site: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.site, self._clock = site, clock
        self._steps: deque[tuple[float, int]] = deque()  # (time, step) of the last minute
        self.step = self._gauge("step", "Training steps that the site has done.", "site")
        self.steps_per_second = self._gauge("steps_per_second", "Training steps a second over the last minute.", "site")
        self.sent_bytes_total = self._counter("sent_bytes_total", "Encoded bytes of all messages sent.", "site")
        self.received_bytes_total = self._counter(
            "received_bytes_total", "Encoded bytes of all messages received.", "site"
        )
        self.waiting_seconds_total = self._counter(
            "waiting_seconds_total", "Seconds that training has waited for the global server.", "site"
        )
        self.local_model_version = self._gauge(
            "local_model_version", "Version of the copy of the global model that the site has.", "site"
        )
        self.connected = self._gauge("connected", "1 while the site is connected to the global server, else 0.", "site")
        self.schedule_every_steps = self._gauge(
            "schedule_every_steps", "Steps between two rounds, as the controller of auto has set it.", "site"
        )
        self.schedule_overlap_steps = self._gauge(
            "schedule_overlap_steps", "Steps that a result may be late, as the controller of auto has set it.", "site"
        )
        self.schedule_codec = self._gauge(
            "schedule_codec", "1 for the codec of updates that the controller of auto has set, else 0.", "site", "codec"
        )
        self.encode_seconds_total = self._counter(
            "encode_seconds_total", "Seconds that selecting and encoding pushes has taken, on rank 0.", "site"
        )
        self.residual_norm = self._gauge("residual_norm", "Norm of what rank 0 has not shared yet.", "site")
        self.round_trip_seconds = self._gauge(
            "round_trip_seconds", "Shortest round trip to the global server lately; 0 where it is not known.", "site"
        )
        self._codecs: set[str] = set()
        for metric in (self.step, self.connected, self.sent_bytes_total, self.received_bytes_total):
            metric.labels(site=site)  # they are exposed from the beginning, as 0
        self.waiting_seconds_total.labels(site=site)

    def update(self, state: SiteCoordinator) -> None:
        """Note where training stands; called when something is decided."""
        now = self._clock()
        self._steps.append((now, state.progress.step))
        while len(self._steps) > 2 and self._steps[0][0] < now - _RATE_WINDOW_S:
            self._steps.popleft()
        (began, first), (ended, last) = self._steps[0], self._steps[-1]
        self.step.labels(site=self.site).set(state.progress.step)
        self.steps_per_second.labels(site=self.site).set((last - first) / (ended - began) if ended > began else 0.0)
        self.local_model_version.labels(site=self.site).set(state.version)
        schedule = state.schedule.current
        if schedule is not None:
            self.schedule_every_steps.labels(site=self.site).set(schedule.every)
            self.schedule_overlap_steps.labels(site=self.site).set(schedule.overlap)
            self._codecs.add(schedule.up)
            for codec in self._codecs:
                self.schedule_codec.labels(site=self.site, codec=codec).set(codec == schedule.up)

    def traffic(self, *, sent: int = 0, received: int = 0) -> None:
        """Count the bytes of messages."""
        self.sent_bytes_total.labels(site=self.site).inc(sent)
        self.received_bytes_total.labels(site=self.site).inc(received)

    def waited(self, seconds: float) -> None:
        """Count a wait for the global server."""
        self.waiting_seconds_total.labels(site=self.site).inc(seconds)

    def encoded(self, seconds: float) -> None:
        """Count the time of a push."""
        self.encode_seconds_total.labels(site=self.site).inc(seconds)

    def measured(self, residual: float, round_trip_s: float) -> None:
        """Note the norm of the residual and the round trip."""
        self.residual_norm.labels(site=self.site).set(residual)
        self.round_trip_seconds.labels(site=self.site).set(round_trip_s)

    def set_connected(self, connected: bool) -> None:
        """Note whether the site is connected."""
        self.connected.labels(site=self.site).set(connected)
