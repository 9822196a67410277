"""A site as a Ray Train job: the script of the documentation on a local Ray, where Ray Train is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.user_sites import Meet, UserScript, flat, served
from weightgrad.errors import StrategyError
from weightgrad.runtime.session import Site

PAGE = Path(__file__).parents[2] / "docs" / "engines" / "ray.md"
STEPS = 40
START_S = 1800.0  # a local Ray starts a dozen processes; on a busy machine of two cores that has taken ten minutes


@pytest.fixture
def ray_train() -> Any:
    return pytest.importorskip(
        "ray.train.torch", reason="Ray Train is not installed (the extra `ray`)", exc_type=ImportError
    )


def test_a_process_group_that_carries_no_cpu_tensors_is_refused(ray_train: Any) -> None:
    from weightgrad.integrations.ray import site_trainer

    scaling: Any = SimpleNamespace(use_gpu=True)
    with pytest.raises(StrategyError, match=r"'nccl', which cannot carry CPU tensors.*wanted 'cpu:gloo,cuda:nccl'"):
        site_trainer(
            lambda site, config: None,
            "127.0.0.1:1",
            site="east",
            scaling_config=scaling,
            torch_config=ray_train.TorchConfig(backend="nccl"),
        )


@pytest.mark.parametrize("workers", [1, 2])
def test_the_documented_script_trains_beside_a_plain_site(ray_train: Any, workers: int, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    documented: dict[str, Any] = {"__name__": "documented_ray"}
    exec(compile(code, "ray.md", "exec"), documented)

    def plain(site: Site, meet: Meet) -> torch.Tensor:
        kept: list[Any] = []
        prepare = site.prepare

        def keep(model: Any, optimizer: Any) -> Any:
            kept.append(model)
            return prepare(model, optimizer)

        site.prepare = keep  # type: ignore[method-assign,assignment]
        documented["train"](site, {"lr": 1e-2, "steps": STEPS})
        site.leave()
        return flat(kept[0])

    environment = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}  # Ray writes a token and results there
    environment.pop("RAY_ADDRESS", None)
    environment["RAY_memory_monitor_refresh_ms"] = "0"  # what else runs on the machine must not have workers killed
    with served("diloco, every: 4") as hub:
        hub.wait_for(START_S)
        command = [sys.executable, "train.py", hub.address, "east", str(workers)]
        with (tmp_path / "log").open("wb") as log:
            job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            other = UserScript(hub.address, "west", plain)
            while job.poll() is None:
                hub.tick()
            assert job.returncode == 0, (tmp_path / "log").read_text()
            vector = other.end()
        finally:
            job.kill()
            job.wait()
        assert hub.version >= STEPS // 4
        assert torch.equal(vector, hub.global_model.vector)
