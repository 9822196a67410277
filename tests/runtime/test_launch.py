"""The field gives the simulator's bits: server and sites as real processes, joined by mutual TLS."""

from __future__ import annotations

import json
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import fork_server
from weightgrad import event_log
from weightgrad.lab import models
from weightgrad.lab.run.launch import Processes, RunProgress, launch
from weightgrad.lab.run.simulation import simulate

from .deployment import assert_same_bits, model_of, tiny


@pytest.mark.parametrize("strategy", ["baseline", "qsgd", "weightgrad", "{name: weightgrad, relay: 2}", "diloco"])
def test_the_final_global_model_is_the_simulators_bit_for_bit(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if strategy != "weightgrad":  # which is started cold, as an operator does
        monkeypatch.setattr(Processes, "start", partialmethod(Processes.start, popen=fork_server.popen()))
    recipe = tiny(strategy)
    simulate(recipe, tmp_path / "simulated")
    seen: list[RunProgress] = []
    summary = launch(recipe, tmp_path / "launched", watch=seen.append)
    assert_same_bits(model_of(tmp_path / "launched"), model_of(tmp_path / "simulated"))
    foretold = json.loads((tmp_path / "simulated" / "summary.json").read_text())
    assert summary["accuracy"] == foretold["accuracy"]
    assert seen[-1].rounds > 0
    rounds = [[e for e in event_log.read(tmp_path / d / "events.jsonl") if e["kind"] == "round"] for d in DIRECTORIES]
    assert [e["digest"] for e in rounds[0]] == [e["digest"] for e in rounds[1]], "every version, not only the last"
    assert lan_bytes(tmp_path / "launched") == lan_bytes(tmp_path / "simulated")


PAPER = "{name: weightgrad-paper, trigger: 'significance(threshold=4.0, at_most=4, every=2)'}"
"""At fixed steps: otherwise a site that is asked for a push answers at the step where it is."""


SPARSE = "{name: sparseloco, trigger: every(3), overlap: 1}"
RELAYED = (
    "{name: sparseloco, trigger: every(3), overlap: 1, relay: 2, resume: global_model_and_residual(0.25), "
    "aggregator: mean, down_selector: all, down: ef(topk(0.1))}"
)
"""Results that change few entries: the workers of a site pass them on as they are, and pushes of RELAYED as weights."""


@pytest.mark.parametrize("strategy", [PAPER, "weightgrad-serial", "terngrad", SPARSE, RELAYED])
def test_sites_of_two_and_four_workers_send_the_simulators_bytes(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "start", partialmethod(Processes.start, popen=fork_server.popen()))
    recipe = tiny(strategy, steps=9).with_settings(["sites.1.workers=4", "training.batch=36"])
    simulate(recipe, tmp_path / "simulated")
    launch(recipe, tmp_path / "launched")
    assert_same_bits(model_of(tmp_path / "launched"), model_of(tmp_path / "simulated"))
    found = lan_bytes(tmp_path / "launched")
    assert found == lan_bytes(tmp_path / "simulated")
    assert found["west"] > 2 * found["east"] > 0


def lan_bytes(directory: Path) -> dict[str, int]:
    """What the workers of each site sent one another."""
    events = event_log.read(directory / "events.jsonl")
    return {event["site"]: event["lan_bytes"] for event in events if event["kind"] == "site"}


def test_the_final_file_is_the_simulators_and_fits_a_network_with_batch_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "start", partialmethod(Processes.start, popen=fork_server.popen()))
    recipe = tiny("{name: weightgrad-paper, trigger: every(2)}", steps=4).with_settings(["model.name=resnet20"])
    simulate(recipe, tmp_path / "simulated")
    launch(recipe, tmp_path / "launched")
    files = [load_file(str(tmp_path / directory / "model.safetensors")) for directory in DIRECTORIES]
    module = models.build("resnet20", classes=10, channels=1, size=8, seed=0)
    names = [name for name, _ in module.named_parameters()]
    assert_same_bits(*({name: file[name] for name in names} for file in files))
    assert {len(files[0][name].unique()) for name in names if files[0][name].dim() == 4} == {3, 144}
    for file in files:
        module.load_state_dict(file, strict=True)
        assert file["layers.1.num_batches_tracked"].dtype == torch.int64
        assert file["layers.1.running_var"].min() > 0
    assert_same_bits(model_of(tmp_path / "launched"), model_of(tmp_path / "simulated"))


DIRECTORIES = ("simulated", "launched")
