"""What the page says is what the event logs say."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from weightgrad.event_log import EventLog
from weightgrad.lab.page.run_reader import RunReader
from weightgrad.lab.page.run_state import RunState
from weightgrad.lab.page.run_view import run_view

RECIPE = {
    "server": {"name": "ohio"},
    "sites": [{"name": "virginia"}, {"name": "edge-{}", "count": 2}],
    "links": [{"between": ["ohio", "virginia"], "bandwidth": 5e7, "delay": 0.006, "loss": 0.01}],
    "training": {"steps": 100},
    "strategy": {"name": "auto"},
}


def state(*lines: tuple[str, dict[str, Any]]) -> RunState:
    found = RunState(RECIPE, "run")
    for source, line in lines:
        found.add(source, line)
    return found


def round_(t: float, version: int, pushes: list[list[Any]], **more: Any) -> tuple[str, dict[str, Any]]:
    facts = {"version": version, "step": version, "senders": [name for name, _ in pushes], "pushes": pushes}
    return "", {"kind": "round", "t": t, "up_bytes": 300, "down_bytes": 100, **facts, **more}


def test_sites_of_a_template_are_there_from_the_start() -> None:
    assert [site["name"] for site in run_view(state())["sites"]] == ["virginia", "edge-1", "edge-2"]
    assert run_view(state())["status"] == "waiting"


def test_clocks_of_sites_are_put_beside_the_servers() -> None:
    found = state(
        ("virginia", {"kind": "push", "t": 1.0, "round": 1, "step": 1}),
        ("edge-1", {"kind": "push", "t": 5.0, "round": 1, "step": 1}),
        round_(11.0, 1, [["virginia", 1], ["edge-1", 1]]),
        ("virginia", {"kind": "push", "t": 2.0, "round": 2, "step": 2}),
        ("edge-1", {"kind": "push", "t": 5.8, "round": 2, "step": 2}),
        round_(13.5, 2, [["virginia", 2], ["edge-1", 2]]),
    )
    assert found.sites["virginia"].offset == pytest.approx(10.0)
    assert found.sites["edge-1"].offset == pytest.approx(6.0)
    last = run_view(found)["last_round"]
    assert last["late"] == "virginia"  # it pushed at 12.0, edge-1 at 11.8
    assert last["margin"] == pytest.approx(0.2)
    virginia = run_view(found)["sites"][0]
    assert (virginia["up_bytes"], virginia["down_bytes"], virginia["rounds"]) == (300, 200, 2)  # half of each round's
    assert virginia["exchange_seconds"] == pytest.approx(1.5)


def test_a_lost_connection_is_a_fault_until_it_is_back() -> None:
    found = state(("", {"kind": "site_joined", "t": 0.0, "site": "virginia", "version": 0}))
    assert run_view(found)["sites"][0]["connected"] is True
    found.add("", {"kind": "connection", "t": 3.0, "site": "virginia", "up": False, "left": False})
    view = run_view(found)
    assert view["sites"][0]["connected"] is False
    assert view["sites"][0]["cuts"] == 1
    found.add("", {"kind": "connection", "t": 5.0, "site": "virginia", "up": True, "left": False})
    view = run_view(found)
    assert view["sites"][0]["connected"] is True
    assert [fault["kind"] for fault in view["faults"]] == ["recovery", "fault"]


def test_leaving_in_order_is_no_fault() -> None:
    found = state(("", {"kind": "connection", "t": 3.0, "site": "virginia", "up": False, "left": True}))
    assert run_view(found)["faults"] == []
    assert run_view(found)["sites"][0]["finished"] is True


def test_a_cut_lasts_until_it_heals() -> None:
    found = state(("", {"kind": "fault", "t": 1.0, "what": "cut", "where": ["ohio", "virginia"]}))
    assert run_view(found)["sites"][0]["cut"] is True
    found.add("", {"kind": "fault", "t": 2.0, "what": "heal", "where": ["ohio", "virginia"]})
    assert run_view(found)["sites"][0]["cut"] is False


def test_when_a_simulated_site_waited_is_not_known() -> None:
    found = state(("virginia", {"kind": "site", "t": 9.0, "site": "virginia", "waiting_seconds": 4.0}))
    assert run_view(found)["sites"][0]["waiting_seconds"] == 4.0
    assert run_view(found)["sites"][0]["waiting_share"] is None
    found = state(("virginia", {"kind": "site", "t": 9.0, "site": "virginia", "waiting_seconds": 0.0}))
    assert run_view(found)["sites"][0]["waiting_share"] == 0.0
    found = state(("", {"kind": "step", "t": 1.0, "site": "virginia", "step": 1, "loss": 1.0}))
    virginia = run_view(found)["sites"][0]
    assert (virginia["waiting_seconds"], virginia["waiting_share"], virginia["last_of"]) == (None, None, None)


def test_decisions_agreement_and_dollars() -> None:
    schedule = {"every": 4, "overlap": 2, "up": "a", "down": "b", "why": "because", "version": 1}
    found = state(
        ("", {"kind": "schedule", "t": 1.0, **schedule}),
        round_(3600.0, 1, [["virginia", 1]], common=10, same=7),
    )
    view = run_view(found, dollars_gb=1e9)
    assert view["decisions"][0]["why"] == "because"
    assert view["agreement"] == pytest.approx(0.7)
    assert view["dollars"] == pytest.approx(300 + 100), "the others have not come yet"
    assert view["dollars_hour"] == pytest.approx(400)


def test_encoding_is_in_the_timeline() -> None:
    """The bar of a push that was measured ends when it was encoded, by the server's clock."""
    found = state(
        ("virginia", {"kind": "push", "t": 1.0, "round": 1, "step": 1}),
        ("virginia", {"kind": "encoded", "t": 1.0, "round": 1, "seconds": 0.25, "residual": 4.0}),
        round_(11.0, 1, [["virginia", 1]]),
    )
    (own,) = run_view(found)["timeline"]["sites"]
    ((start, end),) = own["encodes"]
    assert end - start == pytest.approx(0.25)
    assert end == pytest.approx(own["pushes"][0][0])


def test_steps_and_waits_share_the_timeline() -> None:
    lines = [
        ("", {"kind": "step", "t": 1.0, "site": "virginia", "step": 1, "loss": 2.0}),
        ("", {"kind": "wait", "t": 1.5, "site": "virginia", "step": 1, "seconds": 0.5, "why": "result"}),
        ("", {"kind": "step", "t": 2.0, "site": "virginia", "step": 2, "loss": None}),
    ]
    view = run_view(state(*lines))
    (own,) = view["timeline"]["sites"]
    assert own["steps"] == [[1.5, 2.0, 2]]
    assert own["waits"] == [(1.0, 1.5, "result")]
    assert view["loss"] == {"virginia": [(1, 2.0)]}
    json.dumps(view, allow_nan=False)


def test_a_log_is_read_as_it_grows_and_anew_when_it_is_replaced(tmp_path: Path) -> None:
    reader, path = RunReader(tmp_path), tmp_path / "events.jsonl"
    assert list(reader.new_events()) == []
    with EventLog(path) as log:
        log.write("step", 1.0, step=1)
        assert [event["step"] for _, event in reader.new_events()] == [1]
        log.write("step", 2.0, step=2)
    with path.open("ab") as file:
        file.write(b'{"kind":"step","t":3,"st')
        file.flush()
        assert [event["step"] for _, event in reader.new_events()] == [2]
        file.write(b'ep":3}\nnot json\n[]\n')
    assert [event["step"] for _, event in reader.new_events()] == [3]
    assert not reader.restarted()
    with EventLog(path, replace=True) as log:
        log.write("step", 1.0, step=7)
    assert reader.restarted()
    assert [event["step"] for _, event in reader.new_events()] == [7]


def test_logs_of_sites_are_named_by_their_directory(tmp_path: Path) -> None:
    for name in ("virginia", "server"):
        (tmp_path / "state" / name).mkdir(parents=True)
        with EventLog(tmp_path / "state" / name / "events.jsonl") as log:
            log.write("step", 1.0, step=1)
    assert [source for source, _ in RunReader(tmp_path).new_events()] == ["virginia"]


def test_what_is_sent_and_what_stays_behind() -> None:
    found = state(
        ("virginia", {"kind": "encoded", "t": 1.0, "round": 1, "seconds": 0.02, "residual": 4.0, "trip_seconds": 0.08}),
        round_(2.0, 1, [["virginia", 1], ["edge-1", 1]], norms={"virginia": 3.0}),
    )
    virginia, edge, _ = run_view(found)["sites"]
    assert (virginia["encode_seconds"], virginia["residual"], virginia["push_norm"]) == (0.02, 4.0, 3.0)
    assert virginia["left_behind"] == pytest.approx(0.8)
    assert virginia["trip_seconds"] == 0.08
    assert edge["left_behind"] is None


def test_what_the_operator_does_is_told() -> None:
    def did(t: float, what: str, *where: str) -> tuple[str, dict[str, Any]]:
        return "", {"kind": "operator", "t": t, "who": "weightgrad operator ann", "what": what, "where": list(where)}

    found = state(round_(1.0, 1, [["virginia", 1]]), did(2.0, "pause"), did(2.5, "set-aside", "edge-1"))
    assert run_view(found)["status"] == "paused"
    assert run_view(found)["faults"][0]["what"] == "weightgrad operator ann: set-aside edge-1"
    assert run_view(found)["sites"][1]["aside"]
    for line in (
        did(3.0, "resume"),
        did(3.0, "take-back", "edge-1"),
        did(4.0, "remove", "edge-2"),
        did(5.0, "add", "x"),
    ):
        found.add(*line)
    view = run_view(found)
    assert view["status"] == "running"
    sites = {site["name"]: site for site in view["sites"]}
    assert (sites["edge-1"]["aside"], sites["edge-2"]["removed"], sites["x"]["removed"]) == (False, "removed", "")


def test_who_is_waited_for_and_how_long() -> None:
    found = state(
        ("virginia", {"kind": "push", "t": 1.0, "round": 1, "step": 1}),
        ("edge-1", {"kind": "push", "t": 1.0, "round": 1, "step": 1}),
        round_(1.0, 1, [["virginia", 1], ["edge-1", 1]]),
        ("virginia", {"kind": "push", "t": 2.0, "round": 2, "step": 2}),
        ("edge-1", {"kind": "push", "t": 5.0, "round": 2, "step": 2}),
        round_(5.0, 2, [["virginia", 2], ["edge-1", 2]]),
    )
    assert found.sites["edge-1"].margin_seconds == pytest.approx(3.0)


def test_a_finished_run_says_what_a_live_one_said(tmp_path: Path) -> None:
    """Its logs are there at once: that of the server must not be read before those of the sites."""
    for name, at in (("virginia", 1.0), ("edge-1", 3.0)):
        (tmp_path / "state" / name).mkdir(parents=True)
        with EventLog(tmp_path / "state" / name / "events.jsonl") as log:
            for number in (1, 2):
                log.write("push", at + number, round=number, step=number)
                log.write("step", at + number, site=name, step=number, loss=1.0)
    with EventLog(tmp_path / "events.jsonl") as log:
        for number in (1, 2):
            facts = {"version": number, "step": number, "senders": ["edge-1", "virginia"], "up_bytes": 200}
            pushes = [["edge-1", number], ["virginia", number]]
            log.write("round", 10.0 + number, **facts, pushes=pushes, down_bytes=50)
    found = RunState(RECIPE, "run")
    for source, event in RunReader(tmp_path).new_events():
        found.add(source, event)
    view = run_view(found)
    assert [site["site"] for site in view["timeline"]["sites"]] == ["virginia", "edge-1"]
    assert view["up_bytes"] == 400, "each push is counted once"
    assert view["last_round"]["late"] is not None


def test_bytes_are_those_that_the_server_received_until_a_site_says_its_own() -> None:
    sizes = {"virginia": 290, "edge-1": 10}
    found = state(round_(1.0, 1, [["virginia", 1], ["edge-1", 1]], sizes=sizes))
    virginia, edge, _ = run_view(found)["sites"]
    assert (virginia["up_bytes"], edge["up_bytes"], edge["down_bytes"]) == (290, 10, 100)
    found.add("virginia", {"kind": "site", "t": 2.0, "site": "virginia", "up_bytes": 900, "down_bytes": 300})
    found.add(*round_(3.0, 2, [["virginia", 2], ["edge-1", 2]], sizes=sizes))  # its log was read first
    virginia, edge, _ = run_view(found)["sites"]
    assert (virginia["up_bytes"], virginia["down_bytes"]) == (900, 300), "nothing is counted twice"
    assert (edge["up_bytes"], edge["down_bytes"]) == (20, 200)


def test_only_cuts_are_counted_as_cuts() -> None:
    limited = {"kind": "limited", "site": "virginia", "why": "it weighs too much"}
    found = state(("", {**limited, "t": 1.0}), ("", {**limited, "t": 2.0}))
    view = run_view(found)
    assert view["sites"][0]["cuts"] == 0
    assert [(told["t"], told["kind"], told["times"]) for told in view["faults"]] == [(2.0, "warning", 2)]
    found.add("", {"kind": "fault", "t": 3.0, "what": "cut", "where": ["ohio", "virginia"]})
    found.add("", {"kind": "connection", "t": 4.0, "site": "virginia", "up": False, "left": False})
    found.add("", {**limited, "t": 2.5})  # another log, read later
    view = run_view(found)
    assert view["sites"][0]["cuts"] == 1, "a connection that a cut ends is no second one"
    assert [told["t"] for told in view["faults"]] == [4.0, 3.0, 2.5, 2.0]


def test_lines_that_are_not_what_they_say_are_counted() -> None:
    found = state(
        ("", {"kind": "round", "t": 1.0}),
        ("", {"kind": "push", "t": 1.0, "round": "x"}),
        ("", {"kind": "fault", "t": 1.0, "where": 3}),
        round_(2.0, 1, [["virginia", 1]]),
    )
    view = run_view(found)
    assert (view["unread"], view["version"]) == (3, 1)


def test_many_steps_are_drawn_as_few_bars_without_a_gap() -> None:
    lines = [("", {"kind": "step", "t": 0.05 * n, "site": "virginia", "step": n, "loss": 1.0}) for n in range(1, 1101)]
    steps = run_view(state(*lines))["timeline"]["sites"][0]["steps"]
    assert len(steps) <= 400
    assert (steps[0][0], steps[-1][1:]) == (pytest.approx(0.05), [pytest.approx(55.0), 1100])
    assert all(one[1] == other[0] for one, other in pairwise(steps))


def test_a_log_without_its_beginning_or_its_end_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for number in range(1, 9):
            _, line = round_(float(number), number, [["virginia", number]])
            log.write(line.pop("kind"), line.pop("t"), **line)
        log.write("end", 9.0, status="finished")
    whole = path.read_bytes()
    for cut in (whole[150:], whole[: len(whole) // 2], whole[150:].replace(b":4", b":NaN"), b"\x00" * 100 + whole, b""):
        path.write_bytes(cut)
        found = RunState({}, "run")
        for source, event in RunReader(tmp_path).new_events():
            found.add(source, event)
        view = json.loads(json.dumps(run_view(found), allow_nan=False))
        assert view["rounds"] <= 8
        assert view["status"] in ("waiting", "running", "finished")


def test_links_of_a_template_are_those_of_its_sites() -> None:
    links = [
        {"between": ["ohio", "edge-{}"], "bandwidth": 1e7},
        {"between": ["edge-2", "ohio"], "bandwidth": 2e6},
        {"between": ["ohio", "virginia"], "bandwidth": 5e7},
    ]
    view = run_view(RunState({**RECIPE, "links": links}, "run"))
    assert [site["bandwidth_bit_s"] for site in view["sites"]] == [5e7, 1e7, 2e6]


def test_a_site_that_has_not_come_is_sent_nothing() -> None:
    come = ("", {"kind": "site_joined", "t": 0.5, "site": "edge-1", "version": 0})
    rounds = [round_(float(n), n, [["virginia", n]]) for n in (1, 2)]
    sites = {one["name"]: one for one in run_view(state(come, *rounds))["sites"]}
    assert [sites[name]["down_bytes"] for name in ("virginia", "edge-1", "edge-2")] == [200, 200, 0]
    assert run_view(state(come, *rounds))["down_bytes"] == 400


def test_a_site_that_comes_while_a_run_is_paused_does_not_end_the_pause() -> None:
    pause = ("", {"kind": "operator", "t": 1.0, "who": "ann", "what": "pause"})
    come = ("", {"kind": "site_joined", "t": 2.0, "site": "edge-1", "version": 0})
    assert run_view(state(round_(0.5, 1, [["virginia", 1]]), pause, come))["status"] == "paused"


@pytest.mark.parametrize(("what", "how"), [("remove", "removed"), ("revoke", "revoked")])
def test_a_site_that_an_operator_has_sent_away_stays_away(what: str, how: str) -> None:
    """As in a real log: its last push and its connection are told of afterwards."""
    both = [["virginia", 1], ["edge-1", 1]]
    removed = ("", {"kind": "operator", "t": 2.0, "who": "ann", "what": what, "where": ["edge-1"]})
    after = [
        ("", {"kind": "connection", "t": 2.1, "site": "edge-1", "up": False}),
        ("", {"kind": "connection", "t": 2.2, "site": "edge-1", "up": True}),
        round_(2.3, 2, [["virginia", 2], ["edge-1", 2]]),
        round_(3.0, 3, [["virginia", 3]]),
    ]
    view = run_view(state(round_(1.0, 1, both), removed, *after))
    site = next(one for one in view["sites"] if one["name"] == "edge-1")
    assert (site["removed"], site["connected"], site["cuts"], site["down_bytes"]) == (how, False, 0, 100)
    assert [fault["kind"] for fault in view["faults"]] == ["operator"]
    again = ("", {"kind": "site_joined", "t": 4.0, "site": "edge-1", "version": 3})
    view = run_view(state(round_(1.0, 1, both), removed, *after, again))
    site = next(one for one in view["sites"] if one["name"] == "edge-1")
    assert (site["removed"], site["connected"]) == ("", True)
