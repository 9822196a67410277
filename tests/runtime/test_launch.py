"""The field gives the simulator's bits: server and sites as real processes, joined by mutual TLS."""

from __future__ import annotations

import json
from functools import partialmethod
from pathlib import Path

import pytest

from tests import fork_server
from weightgrad import event_log
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
    ends = [e for e in event_log.read(tmp_path / "launched" / "events.jsonl") if e["kind"] == "site"]
    quantized = strategy not in ("baseline", "diloco")  # all but the first step is ahead, with idle cores
    assert {e["encoded_ahead"] for e in ends} < {0.0, 23 / 24 if quantized else 0.5}
    rounds = [[e for e in event_log.read(tmp_path / d / "events.jsonl") if e["kind"] == "round"] for d in DIRECTORIES]
    assert [e["digest"] for e in rounds[0]] == [e["digest"] for e in rounds[1]], "every version, not only the last"


DIRECTORIES = ("simulated", "launched")
