"""A site's numbers in loggers. Two real sites; Weights & Biases and MLflow as modules of their interfaces."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.user_sites import Meet, backward, network, run_sites
from weightgrad.errors import StrategyError
from weightgrad.integrations.trackers import MlflowTracker, TensorBoardTracker, WandbTracker
from weightgrad.runtime.session import Site
from weightgrad.runtime.site import progress_log


class Writer:
    """A SummaryWriter that keeps what it is given."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, int]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.found[name] = value, step

    def flush(self) -> None:
        pass


def broken(stats: dict[str, Any], step: int) -> None:
    raise OSError("no space left")


def test_sites_tell_how_they_do(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress_log, "EVERY_S", 0.0)
    caplog.set_level("INFO", "weightgrad")
    writers = {"east": Writer(), "west": Writer()}
    said: list[tuple[int, dict[str, Any]]] = []

    def script(site: Site, meet: Meet) -> dict[str, Any]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert site.stats() == {"step": 0}
        with pytest.raises(StrategyError, match="after prepare"):
            site.track(broken)
        site.prepare(model, optimizer)
        site.track(TensorBoardTracker(writers[site.name]))
        if site.name == "east":
            site.track(lambda stats, step: said.append((step, stats)))
            site.track(broken)
        with pytest.raises(StrategyError, match=r"a tensor of the shape \(8,\); wanted the one loss"):
            site.note(torch.zeros(8))
        meet()
        for step in range(6):
            site.note(backward(model, site.name, step))
            optimizer.step()
            optimizer.zero_grad()
        return site.stats()

    results, _ = run_sites("auto", script)
    stats = results["east"]
    assert stats["step"] == 6
    assert stats["loss"] > 0
    assert stats["up_bytes"] > 0
    assert 0 <= stats["waiting_share"] <= 1
    assert stats["codec"].startswith(("ef(", "fp32"))  # everything, where the line has no distance
    assert said[-1][0] == 6, "also at the end"
    for writer in writers.values():
        assert writer.found["weightgrad/step"] == (6.0, 6)
        assert "weightgrad/codec" not in writer.found
    assert "east: step 6, loss " in caplog.text
    assert caplog.text.count("no space left") == 1


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorBoardTracker(tmp_path)
    tracker({"step": 3, "loss": 1.5, "codec": "fp32"}, 3)
    tracker.writer.close()
    (file,) = tmp_path.iterdir()
    assert b"weightgrad/loss" in file.read_bytes()


def test_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []
    axes: list[tuple[str, str]] = []
    run = SimpleNamespace(log=logged.append, define_metric=lambda name, step_metric: axes.append((name, step_metric)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    WandbTracker()({"loss": 1.5, "codec": "fp32"}, 4)
    assert logged == [{"weightgrad/loss": 1.5, "weightgrad/step": 4}]
    assert axes == [("weightgrad/*", "weightgrad/step")]
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    with pytest.raises(RuntimeError, match=r"wandb\.init"):
        WandbTracker()


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    def log_metrics(metrics: dict[str, float], step: int, **named: str) -> None:
        logged.append((metrics, step, named))

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(log_metrics=log_metrics))
    MlflowTracker()({"loss": 1.5}, 4)
    MlflowTracker("abc")({"loss": 1.25, "every": 4}, 5)
    assert logged == [
        ({"weightgrad/loss": 1.5}, 4, {}),
        ({"weightgrad/loss": 1.25, "weightgrad/every": 4.0}, 5, {"run_id": "abc"}),
    ]
