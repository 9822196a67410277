"""The checks of `doctor` that ask the server: each content once, and each made to complain."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weightgrad.cli import app
from weightgrad.errors import LinkError, PlanError, RefusedError
from weightgrad.runtime.doctor import join_checks, rank_check, server_checks, server_findings
from weightgrad.runtime.doctor.planned_needs import PlannedNeeds, planned_needs
from weightgrad.runtime.doctor.server_checks import Speed
from weightgrad.runtime.doctor.server_questions import BusyError, ServerQuestions
from weightgrad.runtime.doctor.site_checks import Finding, Level
from weightgrad.runtime.process_facts import about_this_process
from weightgrad.runtime.rate_limiter import RateLimiter
from weightgrad.runtime.security import certificates
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.transport.grpc_questions import Questions

from .deployment import Hub, Runner, finish
from .test_operators import recipe_of
from .transport.grpc_harness import Proxy


@pytest.fixture(name="certs", scope="module")
def fixture_certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "all"
    certificates.create(directory, ["127.0.0.1"], ["east", "west", "north"])
    return directory


def changed(**changes: Any) -> dict[str, Any]:
    return {**about_this_process(), **changes}


def test_versions() -> None:
    assert server_checks.check_versions(about_this_process()).level is Level.OK
    for name in ("transport", "messages", "admission"):
        found = server_checks.check_versions(changed(**{name: "99"}))
        assert found.level is Level.FAILURE
        assert f"{name} 99 there" in found.text
    assert server_checks.check_versions({}).level is Level.FAILURE
    assert "weightgrad 9.9 there" in server_checks.check_versions(changed(weightgrad="9.9")).text
    other = server_checks.check_versions(changed(torch="1.0.1+cpu"))
    assert other.level is Level.WARNING
    assert "torch 1.0.1+cpu there" in other.text
    same = str(about_this_process()["torch"]).split("+")[0]
    assert server_checks.check_versions(changed(torch=f"{same}+cu999")).level is Level.OK


def test_clock() -> None:
    assert server_checks.check_clock(1000.2, 1000.0, 1001.0).level is Level.OK
    assert server_checks.check_clock(1050.0, 1000.0, 1100.0).level is Level.OK, "the round trip may be as long"
    ahead, behind = server_checks.check_clock(1010.0, 1000.0, 1000.2), server_checks.check_clock(990.0, 1000.0, 1000.2)
    assert (ahead.level, behind.level) == (Level.WARNING, Level.WARNING)
    assert "ahead of" in ahead.text
    assert "behind" in behind.text
    assert server_checks.check_clock(9000.0, 1000.0, 1000.2).level is Level.FAILURE


def test_middle() -> None:
    near = server_checks.check_middle(0.080, 0.085, "10.0.0.2", "ipv4:10.0.0.2:4711")
    assert near.level is Level.OK
    assert "address translation" not in near.text
    translated = server_checks.check_middle(0.080, 0.085, "10.0.0.2", "ipv4:8.8.8.8:4711")
    assert translated.level is Level.OK
    assert "the server sees 8.8.8.8" in translated.text
    proxied = server_checks.check_middle(0.001, 0.150, "10.0.0.2", "ipv6:[2001:db8::1]:4711")
    assert proxied.level is Level.WARNING
    assert "proxy" in proxied.text


def test_mtu() -> None:
    assert server_checks.check_mtu(1500).level is Level.OK
    assert server_checks.check_mtu(None).level is Level.OK
    assert server_checks.check_mtu(576).level is Level.WARNING


def test_speed() -> None:
    fast, slow = Speed(10_000_000, 1.0), Speed(1_000_000, 1.0)
    assert server_checks.check_speed("up", fast, 100e6).level is Level.OK
    assert server_checks.check_speed("up", fast, None).level is Level.OK
    found = server_checks.check_speed("down", slow, 100e6)
    assert found.level is Level.WARNING
    assert "the recipe says 100 Mbit/s" in found.text
    assert server_checks.check_speed("up", Speed(0, 0.0), 100e6).level is Level.FAILURE
    assert "MTU" in server_checks.check_no_bytes("up", "it was silent").text


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    good = rank_check.check_ranks()
    assert good.level is Level.OK, good.text
    assert "2 ranks with" in good.text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    bad = rank_check.check_ranks()
    assert bad.level is Level.FAILURE, bad.text
    assert "GLOO_SOCKET_IFNAME" in bad.text


def test_ranks_that_do_not_find_each_other_in_time() -> None:
    late = rank_check.check_ranks(timeout_s=0.2)  # python alone takes longer to start
    assert late.level is Level.FAILURE
    assert "have not found each other within 0.2 s" in late.text


def test_ranks_of_torchrun_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    assert rank_check.check_ranks(timeout_s=1.0).level is Level.FAILURE


def test_plan(tmp_path: Path) -> None:
    rows = [{"site": "a", "host_peak": 10.0, "device_peak": 5.0}, {"site": "b", "host_peak": 1.0, "device_peak": 1.0}]
    plan = {"parameters": 100, "chosen": {"strategy": "auto"}, "strategies": {"auto": {"workers": rows}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert planned_needs(tmp_path / "plan.json", "b") == PlannedNeeds(memory_bytes=2.0, room_bytes=1200.0)
    assert planned_needs(tmp_path / "plan.json", None).memory_bytes == 15.0
    with pytest.raises(PlanError, match="no site 'c'"):
        planned_needs(tmp_path / "plan.json", "c")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanError, match="is not a plan"):
        planned_needs(tmp_path / "plan.json", None)


def by_check(found: list[Finding]) -> dict[str, Finding]:
    return {one.check: one for one in found}


def test_a_real_server_is_asked_and_measured(certs: Path) -> None:
    own = Credentials.load(certs, site="east")
    with Hub(recipe_of(), certs=certs) as hub:
        found = by_check(list(server_findings.server_findings(hub.address, own, seconds=0.3)))
        assert list(found) == ["server", "versions", "clock", "between", "MTU", "up", "down"]
        assert not [one for one in found.values() if one.level is Level.FAILURE], found
        assert "'east' among east, west" in found["server"].text
        assert "the recipe says 100 Mbit/s" in found["up"].text
        thin = Proxy(hub.address, bit_s=20e6)
        try:
            slow = by_check(list(server_findings.server_findings(thin.address, own, seconds=0.5)))
        finally:
            thin.close()
        assert (slow["up"].level, slow["down"].level) == (Level.WARNING, Level.WARNING), slow
        stranger = list(server_findings.server_findings(hub.address, Credentials.load(certs, site="north"), seconds=0))
        assert [(one.check, one.level) for one in stranger] == [("server", Level.FAILURE)]
        assert "its operator can add one" in stranger[0].text


def test_a_measurement_is_bounded(certs: Path) -> None:
    with (
        Hub(recipe_of(), certs=certs) as hub,
        ServerQuestions(hub.address, Credentials.load(certs, site="east"), streams=1) as questions,
    ):
        with pytest.raises(Exception, match="at most 10 s"):
            questions.measure("down", 60.0)
        hub.server.admission.roster.revoke("east", [Credentials.load(certs, site="east").serial])
        with pytest.raises(Exception, match="is revoked"):
            questions.measure("down", 0.1)


def test_a_line_that_is_busy_or_breaks_is_told(certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, errors = (
        Credentials.load(certs, site="east"),
        {"up": BusyError("8 measure"), "down": LinkError("it was silent")},
    )

    def measure(questions: ServerQuestions, way: str, seconds: float) -> Speed:
        raise errors[way]

    monkeypatch.setattr(ServerQuestions, "measure", measure)
    with Hub(recipe_of(), certs=certs) as hub:
        found = by_check(list(server_findings.server_findings(hub.address, own, seconds=0.1)))
    assert (found["up"].level, found["up"].text) == (Level.WARNING, "8 measure")
    assert found["down"].level is Level.FAILURE
    assert "it was silent: short messages pass" in found["down"].text


def test_nobody_asks_without_end(certs: Path) -> None:
    own = Credentials.load(certs, site="east")
    with Hub(recipe_of(), certs=certs) as hub, ServerQuestions(hub.address, own, streams=1) as questions:
        hub.transport._questions._asked = RateLimiter(per_s=1e-9, burst=2)
        hub.transport._questions._measured = RateLimiter(per_s=1e-9, burst=1)
        for _ in range(2):
            questions.ask("about")
        with pytest.raises(RefusedError, match="asks more often"):
            questions.ask("about")
        questions.measure("down", 0.01)
        with pytest.raises(LinkError, match="has measured the line often"):
            questions.measure("down", 0.01)


def test_the_command_asks_the_server(certs: Path, tmp_path: Path) -> None:
    command = ["doctor", "--json", "--no-ranks", "--seconds", "0", "--credentials", str(certs), "--site", "east"]
    with Hub(recipe_of(), certs=certs) as hub:
        told = CliRunner().invoke(app, [*command, "--server", hub.address, "--state", str(tmp_path)])
        found = {one["check"]: one["level"] for one in json.loads(told.stdout)["checks"]}
        assert {"server", "versions", "clock", "between", "MTU", "disk", "memory"} <= found.keys()
        hub.server.admission.roster.remove("east")
        told = CliRunner().invoke(app, [*command, "--server", hub.address])
        assert told.exit_code == 1
        assert "no site 'east'" in told.stdout


def test_a_site_that_joins_looks_by_itself(certs: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)
    recipe = recipe_of("{name: diloco, every: 4, t_global: 2}", steps=4)
    with Hub(recipe, certs=certs) as hub:
        sites = [Runner(recipe, name, hub.address, certs=certs, state=tmp_path / name) for name in ("east", "west")]
        finish(*sites)
    (line,) = [text for text in caplog.messages if text.startswith("east:") and "checks" in text]
    assert "8 checks" in line
    assert all(word in line for word in ("certificate", "clock")) or "with a word to say" in line


def test_what_a_joining_site_says(tmp_path: Path, certs: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert join_checks.check_room(tmp_path, 1.0).level is Level.OK
    assert join_checks.check_room(tmp_path, 100.0, free=10.0).level is Level.WARNING
    assert join_checks.check_room(tmp_path / "no", 1.0).level is Level.WARNING
    assert join_checks.check_memory_left(1e6).level is Level.WARNING
    assert join_checks.check_memory_left(None).level is Level.OK
    own = Credentials.load(certs, site="east")
    join_checks.say("east", join_checks.join_findings(own, changed(time=5.0), 1e9, tmp_path, 10))
    assert "clock: the server's clock is" in caplog.messages[-1]
    assert caplog.records[-1].levelno == logging.WARNING
    join_checks.say("east", iter([Finding("clock", Level.OK, "right")]))
    assert caplog.messages[-1] == "east: 1 checks are ok: clock"


def test_a_process_that_trains_does_not_load_grpc() -> None:
    import subprocess
    import sys

    code = "import sys, weightgrad.runtime.session; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_refusals_keep_their_kind(certs: Path) -> None:
    with (
        Hub(recipe_of(), certs=certs) as hub,
        ServerQuestions(hub.address, Credentials.load(certs, site="north"), streams=1) as questions,
        pytest.raises(RefusedError, match="no site 'north'"),
    ):
        questions.ask("about")


def test_one_site_does_not_keep_others_from_measuring_the_line() -> None:
    questions = Questions(lambda caller: None, lambda error, context: None)
    for _ in range(5):
        questions._begin("mallory")
    with pytest.raises(LinkError, match="is being measured already"):
        questions._begin("mallory")
    for _ in range(3):
        questions._begin("east")
    with pytest.raises(LinkError, match="is being measured already"):
        questions._begin("east")
