"""Recipes in the emulator: real processes over real links end with the simulator's bits, whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightgrad import event_log
from weightgrad.errors import ModelFileError, RecipeError, RunError
from weightgrad.lab.plan.prediction import predict
from weightgrad.lab.plan.scenario import of_recipe
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import emulation, host_commands
from weightgrad.lab.run.fault_schedule import FaultAction, fault_actions
from weightgrad.lab.run.simulation import chosen_strategy
from weightgrad.lab.run.task import Training
from weightgrad.lab.run.validation import check_prediction, measure_timing, same_model, with_links, with_workers

RECIPE = """
name: two
seed: 3
data: {name: digits}
model: {name: lenet-digits}
training: {steps: 30, batch: 30, optimizer: {name: sgd, lr: 0.05, momentum: 0.9}, evaluate_every: 1000}
server: {name: hub}
sites:
  - {name: east, workers: 2}
  - {name: west, workers: 1}
links:
  - {between: [hub, east], bandwidth: 100 Mbit/s, back: 30 Mbit/s, delay: 5 ms}
  - {between: [hub, west], bandwidth: 50 Mbit/s, delay: 20 ms, loss: 0.01}
compute: {seconds_per_step: 0.05}
strategy: {name: diloco, every: 3, t_global: null}
"""


def recipe(*settings: str) -> Recipe:
    return Recipe.parse(RECIPE).with_settings(settings)


def test_a_kill_and_a_cut_on_the_way(tmp_path: Path) -> None:
    """East has an asymmetric link, west loses one packet in a hundred; east dies, west is cut off."""
    faults = "faults=[{at: 0.2 s, cut: [hub, west], for: 1 s}, {at: 0.5 s, kill: east, for: 0.5 s}]"
    disturbed = recipe(faults)
    told: list[str] = []
    with emulation.network(disturbed) as wan:
        summary = emulation.emulate(disturbed, tmp_path, wan, happened=told.append)
    assert [line.split(": ")[1] for line in told] == ["cut hub - west", "kill east", "start east", "heal hub - west"]
    assert summary["status"] == "finished"
    found = check_prediction(recipe(), tmp_path)
    assert found.models_equal
    assert found.simulated.bytes == found.emulated.bytes
    assert found.emulated.step_s > 0
    planned = predict(of_recipe(recipe(), Training(recipe()).layout, {}), chosen_strategy(recipe()))
    sent = sum(up + 2 * down for up, down in found.emulated.bytes)
    assert planned.wan_bytes == pytest.approx(sent, rel=0.02), "weightgrad plan knew it"
    lines = {entry["kind"]: entry for entry in event_log.read(tmp_path / "events.jsonl")}
    assert {"round", "evaluate", "network"} <= lines.keys()
    passed = {(pair["from"], pair["to"]): pair["bytes"] for pair in lines["network"]["pairs"]}
    assert passed["east", "hub"] > 100_000


def test_modelled_links_say_so(tmp_path: Path) -> None:
    plain = recipe("strategy={name: weightgrad, t_global: null}", "links.1.loss=0")
    with emulation.network(plain, kind="modelled") as wan:
        summary = emulation.emulate(plain, tmp_path, wan)
    assert summary["emulated"]["kind"] == "modelled"
    assert check_prediction(plain, tmp_path).models_equal


def test_a_site_that_never_comes_back(tmp_path: Path) -> None:
    alone = recipe("faults=[{at: 0.1 s, kill: east}]", "strategy={name: diloco, every: 3, t_global: 1}")
    with (
        emulation.network(alone, kind="modelled") as wan,
        pytest.raises(RunError, match="east was killed and never restarted"),
    ):
        emulation.emulate(alone, tmp_path, wan)


def test_a_leave_is_refused_before_anything_starts() -> None:
    with pytest.raises(RecipeError, match="the emulator cannot make a site leave"):
        emulation.check(recipe("faults=[{at: 1 s, leave: east}]"))


def test_scenes_are_in_order_and_a_flap_is_many_cuts() -> None:
    slow, flap = (
        "{at: 4 s, slow: [hub, east], factor: 0.5, for: 1 s}",
        "{at: 1 s, flap: [hub, west], period: 2 s, for: 3 s}",
    )
    found = fault_actions(recipe(f"faults=[{slow}, {flap}]"))
    assert [(action.at, action.what) for action in found] == [
        (1, "cut"), (2, "heal"), (3, "cut"), (4, "heal"), (4, "slow"), (5, "unslow"),
    ]  # fmt: skip
    assert str(found[4]) == "4 s: slow hub - east to 50%"


def test_a_trace_and_a_late_site_are_scenes() -> None:
    late = recipe("links.1={between: [hub, west], trace: [[0 s, 50 Mbit/s], [3 s, 5 Mbit/s]], delay: 20 ms}",
                  "faults=[{at: 2 s, join: west}]")  # fmt: skip
    assert fault_actions(late) == [FaultAction(2, "start", ("west",)), FaultAction(3, "rate", ("hub", "west"), 5e6)]


def test_a_command_in_every_site() -> None:
    said: list[str] = []
    with emulation.network(recipe()) as wan:
        code = host_commands.run_in_every_site(
            wan, recipe(), ["sh", "-c", "echo $WG_SITE to $WG_SERVER; exit 4"], said.append
        )
    assert code == 4
    assert sorted(line.split(":")[0] for line in said) == ["east", "west"]
    assert all(":7443" in line or "modelled" in wan.reason for line in said)


def test_timing_and_links(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is not there"):
        same_model(tmp_path, tmp_path)
    moved = with_links(recipe(), 20, 80)
    assert {(link.bandwidth_bit_s, link.delay_seconds) for link in moved.link_list} == {(20e6, 0.04)}
    with event_log.EventLog(tmp_path / "events.jsonl") as log:
        for step in range(1, 11):
            log.write("step", 0.5 * step, site="east", step=step, loss=1.0)
            log.write("round", 0.5 * step, version=step, up_bytes=10, down_bytes=4)
        log.write("site", 5.0, site="east", waiting_seconds=2.0, lan_bytes=77)
    found = measure_timing(tmp_path, ["east"])
    assert (found.step_s, found.round_s, found.waiting_s) == (0.5, 0.5, 0.2)
    assert found.bytes == ((10, 4),) * 10
    assert found.lan_bytes == (77,)
    assert [site.workers for site in with_workers(recipe(), 3).site_list] == [3, 3]
