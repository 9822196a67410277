"""The rivals: one rival and one strategy of WeightGrad as real processes, and everything that needs no network."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rivals import emulated_run
from rivals.outcome import Outcome, mean_step
from rivals.report import Found, document
from rivals.run import network, run_cell
from rivals.spec import RIVALS, SETTINGS, Spec
from rivals.tasks import TASKS, Link
from rivals.timed_pass import TimedPass
from tables import Options

from weightgrad.errors import NamespacesRefusedError
from weightgrad.lab.emulate.stats import Verdict
from weightgrad.lab.run.simulation import simulate
from weightgrad.lab.run.task import Training

LINK = Link(100, 10)
# Without scikit-learn, which would take five processes longer to import than they run.
TASK = dataclasses.replace(TASKS["digits"], data="synthetic", model="mlp", options={"width": 128, "depth": 1})
STEPS = 6


@pytest.fixture
def namespaces() -> None:
    try:
        network(LINK).close()
    except NamespacesRefusedError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("namespaces")
def test_ddp_and_weightgrad_over_the_same_link(tmp_path: Path) -> None:
    """DDP ends with the weights of the simulator's baseline: the same model, data, shards and schedule."""
    found = {
        name: run_cell(Spec.parse(name), TASK, STEPS, LINK, tmp_path / name, Verdict(True, ""))
        for name in ("ddp", "weightgrad")
    }
    for one in found.values():
        assert one.step_seconds >= TASK.seconds
        assert one.seconds >= STEPS * TASK.seconds
        assert one.curve[-1] == (STEPS, one.seconds, one.accuracy)
        assert all(0 < seconds <= one.seconds for _, seconds, _ in one.curve)
    recipe = TASK.recipe(LINK, STEPS)
    simulate(recipe, tmp_path / "simulated")
    tensors = load_file(str(tmp_path / "simulated" / "model.safetensors"))
    expected = torch.cat([tensors[slot.name].flatten() for slot in Training(recipe).layout.slots])
    ends = [load_file(str(tmp_path / "ddp" / f"worker-{rank}.safetensors"))["final"] for rank in (0, 1)]
    assert torch.equal(*ends)
    assert torch.allclose(ends[0], expected, atol=1e-5)
    both_ways = 2 * 4 * expected.numel()  # a ring of two: everything there and back
    assert both_ways < found["ddp"].step_bytes < 1.15 * both_ways
    assert found["weightgrad"].step_bytes < 0.2 * both_ways


def test_a_timed_pass_lasts_as_long_as_the_recipe_says_and_changes_no_gradient() -> None:
    module, inputs = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(3, 4)
    module(inputs).sum().backward()
    plain = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    ready: list[float] = []
    timed = TimedPass(module, 0.06)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append(time.monotonic()))
    began = time.monotonic()
    timed.begin()
    module(inputs).sum().backward()
    timed.end()
    for parameter, gradient in zip(module.parameters(), plain, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)
    assert time.monotonic() - began >= 0.06
    assert min(ready) - began >= 0.06 * 2 / 3 - 0.001  # the last layer: forward is a third, half of backward another
    assert timed.passes == 1


@pytest.mark.parametrize("text", ["gradients", "auto:every=3", "post-local:period"])
def test_a_rival_that_does_not_exist_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=text.partition(":")[0]):
        Spec.parse(text)


def test_settings_of_a_rival() -> None:
    assert Spec.parse("post-local:period=4+start=2").options == {"period": "4", "start": "2"}
    assert SETTINGS.keys() == set(RIVALS)


def test_a_step_is_the_mean_after_the_first_fifth() -> None:
    assert mean_step([5.0, 6.0, 6.1, 6.2, 6.3, 6.4, 6.5, 6.6, 6.7, 6.8]) == pytest.approx(0.1)


def outcome(rival: str, accuracies: list[float]) -> Outcome:
    curve = [(10 * n, float(n), found) for n, found in enumerate(accuracies, start=1)]
    return Outcome(rival, 100, 10, 10 * len(curve), 0.1, 1e6, 4.0, accuracies[-1], curve, 0.0, True, "on time")


def test_the_document_says_what_could_not_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated_run, "ENVIRONMENTS", tmp_path)
    (tmp_path / "hivemind.refused").write_text("ERROR: No matching distribution found for hivemind\n")
    why = emulated_run.refusal(Spec.parse("hivemind"))
    assert why == "not installable here: ERROR: No matching distribution found for hivemind"
    found = Found(TASK, 40, [LINK], ["ddp", "hivemind", "auto"], 105_226)
    found.outcomes += [outcome("ddp", [0.5, 0.8, 0.9, 0.9]), outcome("auto", [0.9, 0.9, 0.9, 0.9])]
    found.outcomes[1] = dataclasses.replace(found.outcomes[1], step_seconds=0.0402)
    found.missing["hivemind", LINK] = why
    text = document(found).markdown(Options(name="rivals", command="", quick=True, out=tmp_path, runs=tmp_path), "x")
    assert f"| hivemind | – | – | – | – | – | – | {why} |" in text  # noqa: RUF001
    assert (found.seconds_to("ddp", LINK), found.seconds_to("auto", LINK)) == (3.0, 1.0)
    assert "3.00 times as fast as `ddp`" in text
    assert "At worst 99.5%, at 100 Mbit/s, 10 ms: 40.2 ms, 40.0 without an exchange." in text


def test_a_free_wan_is_what_the_loop_alone_takes(tmp_path: Path) -> None:
    found = Found(TASK, 40, [LINK], ["alone", "ddp", "auto"], 105_226)
    found.outcomes += [outcome(name, [0.5, 0.8, 0.9, 0.9]) for name in found.rivals]
    for place, seconds in ((0, 0.042), (2, 0.0438)):
        found.outcomes[place] = dataclasses.replace(found.outcomes[place], step_seconds=seconds)
    text = document(found).markdown(Options(name="rivals", command="", quick=True, out=tmp_path, runs=tmp_path), "x")
    assert "**Holds**: `auto` steps at 95 %" in text
    assert "At worst 95.9%, at 100 Mbit/s, 10 ms: 43.8 ms, 42.0 without an exchange." in text
    assert "as fast as `alone`" not in text
    found.outcomes[0] = dataclasses.replace(found.outcomes[0], trusted=False)
    assert found.free(LINK) == TASK.seconds
