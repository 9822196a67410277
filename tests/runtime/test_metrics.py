"""What is counted, the HTTP server that shows it, and the document that explains it."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram

import weightgrad
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.core.strategies import find
from weightgrad.errors import LinkError
from weightgrad.runtime import health
from weightgrad.runtime.health import HealthServer
from weightgrad.runtime.metrics import MetricSet, ServerMetrics, SiteMetrics
from weightgrad.runtime.transport.transport import Peer, Traffic
from weightgrad.wire.sync_schedule import SyncSchedule

DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
SECTIONS = dict(zip(("introduction", "server", "site"), DOCUMENT.split("\n## "), strict=True))


def help_texts(metrics: MetricSet) -> dict[str, str]:
    """The help text of every metric, by exposed name."""
    return dict(re.findall(r"^# HELP (\S+) ?(.*)$", metrics.text().decode(), re.M))


HELP = help_texts(ServerMetrics())
SITE_HELP = help_texts(SiteMetrics("virginia"))
ROW = re.compile(r"^\| `(weightgrad_\w+)(?:\{([\w,]+)\})?` \| .+ \| .+ \|$", re.M)
WANTED = [
    *(
        "rounds_total",
        "round_seconds",
        "global_model_version",
        "global_model_step",
        "updates_total",
        "sites_set_aside_total",
        "refused_updates_total",
        "limited_updates_total",
    ),
    *("up_bytes_total", "down_bytes_total", "socket_bytes", "refused_connections_total"),
    *("site_up", "site_step", "site_staleness_versions", "waiting_for"),
    *("checkpoint_seconds", "checkpoint_age_seconds", "certificate_expiry_seconds", "build_info"),
]


def value(metrics: MetricSet, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"weightgrad_{name}", labels)


def touch(metrics: MetricSet) -> None:
    """Give every metric a value for every label it has."""
    for one in vars(metrics).values():
        if not isinstance(one, Counter | Gauge | Histogram):
            continue
        child = one.labels(*["x"] * len(one._labelnames)) if one._labelnames else one
        if isinstance(child, Histogram):
            child.observe(1.0)
        else:
            child.inc()


# -- the metrics ----------------------------------------------------------------------------


def test_there_are_these() -> None:
    assert sorted(HELP) == sorted(f"weightgrad_{name}" for name in WANTED)


@pytest.mark.parametrize("name", HELP | SITE_HELP)
def test_help_is_one_clear_sentence(name: str) -> None:
    assert re.fullmatch(r"[A-Z1][^.]{15,}\.", (HELP | SITE_HELP)[name])


def test_server_and_site_share_no_metric_but_the_build() -> None:
    assert HELP.keys() & SITE_HELP.keys() == {"weightgrad_build_info"}


@pytest.mark.parametrize("name", [name for name in WANTED if name != "build_info"])
def test_an_attribute_is_named_as_it_is_exposed(name: str) -> None:
    assert isinstance(getattr(ServerMetrics(), name), Counter | Gauge | Histogram)


def test_two_do_not_mix() -> None:
    first, second = ServerMetrics(), ServerMetrics()
    first.rounds_total.inc()
    assert (value(first, "rounds_total"), value(second, "rounds_total")) == (1, 0)


def test_a_round_waits_for_some_sites_and_then_for_others() -> None:
    metrics = ServerMetrics()
    metrics.wait_for(["virginia", "tokyo"])
    metrics.wait_for({"tokyo", "dublin"})
    waited = {site: value(metrics, "waiting_for", site=site) for site in ("virginia", "tokyo", "dublin")}
    assert waited == {"virginia": 0, "tokyo": 1, "dublin": 1}
    metrics.wait_for([])
    assert value(metrics, "waiting_for", site="tokyo") == 0


def test_the_age_of_the_checkpoint_grows_until_the_next_one() -> None:
    now = 100.0
    metrics = ServerMetrics(clock=lambda: now)
    now = 130.0
    assert value(metrics, "checkpoint_age_seconds") == 30, "since the start: that none was ever written shows too"
    metrics.checkpointed(0.3)
    assert value(metrics, "checkpoint_age_seconds") == 0
    now = 137.0
    assert value(metrics, "checkpoint_age_seconds") == 7
    assert value(metrics, "checkpoint_seconds_sum") == 0.3
    assert value(metrics, "checkpoint_seconds_bucket", le="0.25") == 0
    assert value(metrics, "checkpoint_seconds_bucket", le="0.5") == 1


def test_the_certificate_runs_out() -> None:
    metrics = ServerMetrics()
    assert math.isnan(value(metrics, "certificate_expiry_seconds") or 0.0)
    metrics.certificate(datetime.now(timezone.utc) + timedelta(days=1))
    assert value(metrics, "certificate_expiry_seconds") == pytest.approx(86400, abs=60)
    metrics.certificate(datetime.now(timezone.utc) - timedelta(days=1))
    assert value(metrics, "certificate_expiry_seconds") == pytest.approx(-86400, abs=60)


def test_the_build_is_named() -> None:
    assert f'version="{weightgrad.__version__}"' in ServerMetrics().text().decode()


def test_the_bytes_on_sockets_have_a_site_and_a_direction() -> None:
    metrics = ServerMetrics()
    virginia = Peer("virginia", 0)
    metrics.sockets({virginia: Traffic(sent=10, received=200)})
    more = {Peer("virginia", 1): Traffic(sent=30, received=4), Peer("tokyo", 0): Traffic(1, 2)}
    metrics.sockets({virginia: Traffic(sent=11, received=300), **more})
    assert value(metrics, "socket_bytes", site="virginia", direction="up") == 304
    assert value(metrics, "socket_bytes", site="virginia", direction="down") == 41
    assert value(metrics, "socket_bytes", site="tokyo", direction="up") == 2


def site_coordinator() -> SiteCoordinator:
    return SiteCoordinator("virginia", find("diloco", {}).for_site(), samples=1)


def test_a_site_counts_its_steps_its_bytes_and_its_waiting() -> None:
    now, state = 0.0, site_coordinator()
    metrics = SiteMetrics("virginia", clock=lambda: now)
    for step in range(1, 201):
        now, state.progress.step = now + 0.5, step
        metrics.update(state)
    state.progress.version = 7
    metrics.update(state)
    metrics.traffic(sent=10)
    metrics.traffic(sent=1, received=5)
    metrics.waited(2.5)
    metrics.set_connected(True)
    found = {name: value(metrics, name, site="virginia") for name in ("step", "local_model_version", "connected")}
    assert found == {"step": 200, "local_model_version": 7, "connected": 1}
    assert value(metrics, "steps_per_second", site="virginia") == pytest.approx(2.0)
    assert value(metrics, "sent_bytes_total", site="virginia") == 11
    assert value(metrics, "received_bytes_total", site="virginia") == 5
    assert value(metrics, "waiting_seconds_total", site="virginia") == 2.5
    assert value(metrics, "schedule_every_steps", site="virginia") is None, "no controller sets a schedule"
    metrics.set_connected(False)
    assert value(metrics, "connected", site="virginia") == 0


def test_a_site_shows_the_schedule_that_auto_has_set() -> None:
    metrics, state = SiteMetrics("virginia"), site_coordinator()
    state.schedule.current = SyncSchedule(every=8, overlap=3, up="qsgd(bits=4)")
    metrics.update(state)
    state.schedule.current = SyncSchedule(every=16, overlap=5, up="bf16")
    metrics.update(state)
    assert value(metrics, "schedule_every_steps", site="virginia") == 16
    assert value(metrics, "schedule_overlap_steps", site="virginia") == 5
    assert value(metrics, "schedule_codec", site="virginia", codec="qsgd(bits=4)") == 0
    assert value(metrics, "schedule_codec", site="virginia", codec="bf16") == 1


# -- the server ------------------------------------------------------------------------------

Serve = Callable[..., HealthServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[HealthServer] = []

    def start(listen: str = "127.0.0.1:0", status: health.Status = lambda: {"healthy": True}) -> HealthServer:
        started.append(health.serve(listen, METRICS, status))
        return started[-1]

    yield start
    for one in started:
        one.stop()


METRICS = ServerMetrics()
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(server: HealthServer, path: str, host: str = "127.0.0.1") -> tuple[int, str, str]:
    try:
        with OPENER.open(f"http://{host}:{server.port}{path}", timeout=10) as result:
            return result.status, result.headers["Content-Type"], result.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_every_metric_shows_up_with_its_help_and_a_value(serve: Serve) -> None:
    touch(METRICS)
    code, kind, text = get(serve(), "/metrics?name=all")
    assert code == 200
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    for name, about in HELP.items():
        assert f"# HELP {name} {about}\n" in text
        assert re.search(rf"^{name}(_count)?(\{{.*\}})? \S+$", text, re.M), name
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"^(\w+)[{ ]", text, re.M)}
    assert names == set(HELP), "and nothing else does"


def test_a_healthy_server_says_so(serve: Serve) -> None:
    server = serve(status=lambda: {"healthy": True, "version": 7, "since": Path("x")})
    code, kind, text = get(server, "/healthz")
    assert (code, kind) == (200, "application/json")
    assert json.loads(text) == {"healthy": True, "version": 7, "since": "x"}


def test_one_that_is_not_says_why(serve: Serve) -> None:
    code, _, text = get(serve(status=lambda: {"healthy": False, "disk": "full"}), "/healthz")
    assert code == 503
    assert json.loads(text) == {"healthy": False, "disk": "full"}
    assert get(serve(status=dict), "/healthz")[0] == 503


def test_one_that_cannot_say_is_not_healthy(serve: Serve) -> None:
    def status() -> dict[str, object]:
        raise ValueError("lost my mind")

    code, _, text = get(serve(status=status), "/healthz")
    assert code == 503
    assert json.loads(text) == {"healthy": False, "error": "ValueError: lost my mind"}


@pytest.mark.parametrize("path", ["/", "/metrics/", "/etc/passwd", "/healthz/../metrics"])
def test_there_is_nothing_else(serve: Serve, path: str) -> None:
    code, _, text = get(serve(), path)
    assert code == 404
    assert "/metrics and /healthz" in text


def test_a_reader_that_says_nothing_holds_up_nobody(serve: Serve) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(server, "/healthz")[0] == 200
        before = time.monotonic()
        server.stop()
        assert time.monotonic() - before < 5


def test_any_number_of_readers_that_say_nothing_has_few_threads(serve: Serve) -> None:
    """The oldest one has to go when another one comes."""
    server, before = serve(), threading.active_count()
    readers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3 * health.MOST_READERS)]
    try:
        assert get(server, "/healthz")[0] == 200
        readers[0].settimeout(30)
        assert readers[0].recv(1) == b"", "it was ended"
        assert threading.active_count() - before <= 2 * health.MOST_READERS
    finally:
        for reader in readers:
            reader.close()


def test_a_reader_that_says_a_little_now_and_then_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "READER_S", 0.3)
    with socket.create_connection(("127.0.0.1", serve().port)) as reader:
        reader.settimeout(0.05)
        for _ in range(600):
            try:
                reader.send(b"G")
                if reader.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            raise AssertionError("it may go on for ever")


def test_an_address_that_is_taken_is_named(serve: Serve) -> None:
    listen = f"127.0.0.1:{serve().port}"
    with pytest.raises(LinkError, match=rf"cannot listen on {listen}: .*in use; stop what listens there"):
        serve(listen)


def test_a_stopped_server_frees_its_address(serve: Serve) -> None:
    first = serve()
    get(first, "/healthz")
    first.stop()
    first.stop()
    again = serve(f"127.0.0.1:{first.port}")
    assert again.port == first.port
    assert get(again, "/healthz")[0] == 200


def test_ipv6(serve: Serve) -> None:
    try:
        server = serve("[::1]:0")
    except LinkError:
        pytest.skip("no IPv6 here")
    assert get(server, "/healthz", host="[::1]")[0] == 200


@pytest.mark.parametrize("listen", ["", "7444", ":7444", "127.0.0.1", "127.0.0.1:", "h:http", "h:-1", "h:65536", "::1"])
def test_an_address_that_is_none(serve: Serve, listen: str) -> None:
    with pytest.raises(LinkError, match=r"write HOST:PORT, such as 127\.0\.0\.1:7444") as caught:
        serve(listen)
    assert repr(listen) in str(caught.value)


def test_an_address_of_another_machine(serve: Serve) -> None:
    with pytest.raises(LinkError, match=r"cannot listen on 192\.0\.2\.1:7444"):
        serve("192.0.2.1:7444")


# -- the document ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "metrics"), [("server", ServerMetrics()), ("site", SiteMetrics("virginia"))], ids=["server", "site"]
)
def test_the_document_names_exactly_the_metrics_there_are_and_their_labels(section: str, metrics: MetricSet) -> None:
    rows = dict(ROW.findall(SECTIONS[section]))
    assert sorted(rows) == sorted(help_texts(metrics))
    touch(metrics)
    for name, labels in rows.items():
        found = re.search(rf"^{name}(?:_count)?(?:\{{(.*)\}})? ", metrics.text().decode(), re.M)
        assert found is not None
        assert sorted(re.findall(r'(\w+)="', found[1] or "")) == sorted(filter(None, labels.split(",")))


def test_the_document_speaks_of_no_other_metrics() -> None:
    assert set(re.findall(r"weightgrad_\w+", DOCUMENT)) == HELP.keys() | SITE_HELP.keys()
