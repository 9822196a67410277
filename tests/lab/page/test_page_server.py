"""The page over HTTP: who may read it, that nobody may write, and what Chromium shows of a real run with a cut."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.report.browser import browser
from weightgrad import event_log
from weightgrad.errors import LinkError
from weightgrad.event_log import EventLog
from weightgrad.lab.page import page_server
from weightgrad.lab.page.page_server import PageServer
from weightgrad.lab.page.process_sampler import ProcessSampler, processes
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import emulation
from weightgrad.runtime.security import certificates

RECIPE = """
name: two
data: {name: digits}
model: {name: lenet-digits}
training: {steps: 24, batch: 16, optimizer: {name: sgd, lr: 0.05}, evaluate_every: 1000}
server: {name: hub}
sites: [{name: east, workers: 1}, {name: west, workers: 1}]
links:
  - {between: [hub, east], bandwidth: 100 Mbit/s, delay: 5 ms}
  - {between: [hub, west], bandwidth: 50 Mbit/s, delay: 20 ms}
compute: {seconds_per_step: 0.05}
strategy: {name: diloco, every: 3, t_global: null}
faults: [{at: 0.2 s, cut: [hub, west], for: 1 s}]
"""


def get(url: str, *, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[PageServer]:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("site_joined", 0.5, site="east<script>", version=0)
    found = page_server.serve("127.0.0.1:0", tmp_path)
    yield found
    found.stop()


def test_everything_comes_from_here(served: PageServer) -> None:
    for name in ("", "page.css", "page.js"):
        code, body, headers = get(served.url + name)
        assert code == 200
        assert "default-src 'none'" in headers["content-security-policy"]
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", body)
    code, body, _ = get(served.url + "data.json")
    assert [site["name"] for site in json.loads(body)["sites"]] == ["east<script>"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_written(served: PageServer, method: str) -> None:
    assert get(served.url + "data.json", method=method)[0] == 405


def test_another_name_for_loopback_is_refused(served: PageServer) -> None:
    assert get(served.url + "data.json", Host="evil.example")[0] == 403
    assert get(served.url + "data.json", Host="localhost")[0] == 200


def test_a_token_is_asked_for_where_others_can_read(tmp_path: Path) -> None:
    found = page_server.serve("0.0.0.0:0", tmp_path)
    try:
        place = f"http://127.0.0.1:{found.port}/"
        token = found.url.partition("?token=")[2]
        assert len(token) >= 16
        assert get(place)[0] == get(place + "events")[0] == get(place + "data.json?token=wrong")[0] == 401
        code, _, headers = get(f"{place}?token={token}")
        assert code == 200
        assert "HttpOnly" in headers["set-cookie"]
        assert get(place + "data.json", Authorization=f"Bearer {token}")[0] == 200
        assert get(place + "data.json", Cookie=headers["set-cookie"].partition(";")[0])[0] == 200
    finally:
        found.stop()


def test_changes_come_as_events(served: PageServer, tmp_path: Path) -> None:
    with urllib.request.urlopen(served.url + "events", timeout=30) as answer:
        first = json.loads(answer.readline().decode().removeprefix("data: "))
        with EventLog(tmp_path / "events.jsonl", append=True) as log:
            log.write("end", 9.0, status="finished")
        assert first["status"] == "running"
        while not (line := answer.readline().decode()).startswith("data: "):
            pass
        assert json.loads(line.removeprefix("data: "))["status"] == "finished"


@pytest.mark.parametrize("listen", ["7445", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000"])
def test_a_wrong_address_is_told(listen: str, tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=re.escape("127.0.0.1:7445")):
        page_server.serve(listen, tmp_path)


def test_an_address_in_use_is_told(served: PageServer, tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="cannot listen"):
        page_server.serve(f"127.0.0.1:{served.port}", tmp_path)


def test_days_left_of_certificates(tmp_path: Path) -> None:
    certificates.create(tmp_path / "certs", ["localhost"], ["east"], days=40)
    found = {one["who"]: one["days"] for one in page_server.certificate_days(tmp_path / "certs")}
    assert found["east"] == found["global server"] == 39
    assert page_server.certificate_days(tmp_path / "none") == []


def test_memory_and_cpu_of_this_process(tmp_path: Path) -> None:
    sampler = ProcessSampler(tmp_path, "me")
    sampler.stop()
    lines = event_log.read(tmp_path / "processes.jsonl")
    assert lines[0]["name"] == "me"
    assert lines[0]["memory_bytes"] > 1e6
    assert processes("me")[0][1] == "me"


def test_chromium_shows_what_the_log_of_a_real_run_with_a_cut_says(tmp_path: Path) -> None:
    chromium = browser()
    recipe = Recipe.parse(RECIPE)
    run, profile = tmp_path / "run", tmp_path / "profile"
    found = page_server.serve("127.0.0.1:0", run)
    try:
        with emulation.network(recipe, kind="modelled") as wan:
            emulation.emulate(recipe, run, wan)
        quiet = ("background-networking", "component-update", "sync", "gpu", "quic")
        options = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
        command = [chromium, *options, f"--user-data-dir={profile}", "--virtual-time-budget=3000", "--dump-dom"]
        done = subprocess.run([*command, found.url], capture_output=True, text=True, timeout=240, check=False)
        page = done.stdout
    finally:
        found.stop()
    log = event_log.read(run / "events.jsonl")
    rounds = [line for line in log if line["kind"] == "round"]
    ends = {line["site"]: line for line in log if line["kind"] == "site"}
    assert re.search(r'<span class="pill finished" id="status">finished</span>', page), page[:2000]
    assert f'data-version="{rounds[-1]["version"]}"' in page
    assert f"<b>{len(rounds)}</b><span>rounds</span>" in page
    assert "<b>24</b><span>of 24 steps</span>" in page
    assert "cut hub - west" in page
    assert "heal hub - west" in page
    moved = sum(line["up_bytes"] + line["down_bytes"] for line in ends.values())
    shown = re.search(r"<b>([\d.]+) MB</b><span>WAN bytes so far</span>", page)
    assert shown is not None, page[:2000]
    assert float(shown[1]) == pytest.approx(moved / 1e6, rel=0.01)
    accuracy = next(line["accuracy"] for line in log if line["kind"] == "evaluate")
    assert json.loads(json.dumps(accuracy)) > 0
    for name, line in ends.items():
        row = re.search(rf"<tr><td[^>]*>{name}</td>(.*?)</tr>", page)
        assert row is not None, page[:2000]
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row[1])
        assert cells[:2] == ["finished", str(line["steps"])]
        assert [_bytes(cell) for cell in cells[7:9]] == pytest.approx([line["up_bytes"], line["down_bytes"]], rel=0.01)
    assert re.search(r">west</text>.*?>recipe: 50 Mbit/s, 40 ms</text>.*?1 cut</text>", page), (
        "one cut, whatever else was told"
    )
    sizes = [sum(entry["sizes"].values()) for entry in rounds]
    assert sizes == [entry["up_bytes"] for entry in rounds], "the line of a round says what each site sent"


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]


def test_serve_says_what_it_serves(tmp_path: Path) -> None:
    """The sites' logs are elsewhere: the recipe, and the rounds of the server's own log."""
    (tmp_path / "recipe.yaml").write_text("name: served\nsites: [east, west]\nstrategy: {name: diloco, every: 3}\n")
    with EventLog(tmp_path / "events.jsonl") as log:
        facts = {"version": 1, "step": 3, "senders": ["east"], "pushes": [["east", 1]], "sizes": {"east": 50}}
        log.write("round", 1.0, up_bytes=50, down_bytes=20, **facts)
    view = page_server.RunWatcher(tmp_path).view()
    assert (view["strategy"], view["server"]) == ("diloco", "")
    east, west = view["sites"]
    assert (east["step"], east["up_bytes"], west["up_bytes"]) == (3, 50, 0)
    assert (east["waiting_seconds"], east["waiting_share"], east["last_of"]) == (None, None, None)


def test_strange_tokens_are_wrong_tokens(tmp_path: Path) -> None:
    found = page_server.serve("0.0.0.0:0", tmp_path, token="right")
    try:
        assert "0.0.0.0" not in found.url, "an address that another machine can open"
        place = f"http://127.0.0.1:{found.port}/data.json"
        for query in ("?token=", "?token=%ff%fe", "?token=right%00", "?token=righ", "?other=right"):
            assert get(place + query)[0] == 401
        assert get(place, Authorization="Bearer \u00fc")[0] == 401
        assert get(place, Authorization="Basic right")[0] == 401
        assert get(place, Cookie="weightgrad-page=;;==")[0] == 401
        assert get(place + "?token=right")[0] == 200
    finally:
        found.stop()
