"""Every script in examples/, as its README runs it: a server and two sites of two workers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.lab.data import datasets
from weightgrad.runtime.security import certificates

from .test_api import LocalDeployment, deployed

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
STEPS = 6
# Momentum is linear: the mean of the sites' SGD updates is an update by the mean of their gradients.
MEAN = ("--set", "strategy.name=baseline", "--set", "strategy.shares=updates")


def run(
    out: Path,
    script: str,
    *more: str,
    settings: tuple[str, ...] = (),
    secure: bool = False,
    cold: bool = False,
) -> LocalDeployment:
    """Both sites must print the server's digest of the global model."""
    with deployed(out, cold=cold) as made:
        if secure:
            certificates.create(out / "certs", ["localhost"], ["east", "west"])

        def trust(part: str) -> tuple[str, ...]:
            return ("--credentials", str(out / "certs" / part)) if secure else ("--insecure",)

        made.serve(EXAMPLES / "recipe.yaml", *trust("server"), *settings, "--set", "strategy.t_global=600")
        for site in ("east", "west"):
            made.site(site, 2, EXAMPLES / script, "--steps", str(STEPS), *trust(f"sites/{site}"), *more)
        made.finish()
    for site in ("east", "west"):
        assert re.findall(r"^global model (\w+)$", made.log(site), re.MULTILINE) == [made.digest], made.log(site)
    return made


def load(script: str) -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), EXAMPLES / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches(place: str, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What the examples draw from digits."""
    data = datasets.load("digits")
    draw = torch.Generator().manual_seed(zlib.crc32(place.encode()))
    while True:
        yield data.train(torch.randint(data.train_count, (size,), generator=draw))


def assert_on_the_mean(
    global_model: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, *places: str
) -> None:
    """One process that sees all the batches gets the same global model, but for rounding."""
    drawn = [batches(place, 8) for place in places]
    for _ in range(STEPS):
        for one in drawn:
            images, labels = next(one)
            (functional.cross_entropy(model(images), labels) / len(drawn)).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = list(model.named_parameters())
    assert len(global_model) == len(wanted)
    for name, tensor in wanted:
        torch.testing.assert_close(global_model[name], tensor.detach(), rtol=1e-4, atol=1e-5)


def test_cifar10(tmp_path: Path) -> None:
    ended = run(tmp_path, "cifar10.py", "--data", "digits", "--batch", "4", secure=True, cold=True)
    assert "of the test images" in ended.log("west")


def test_gpt(tmp_path: Path) -> None:
    run(tmp_path, "gpt.py", "--data", "synthetic", "--batch", "2")


def test_fsdp2_with_quantized_updates(tmp_path: Path) -> None:
    ended = run(tmp_path, "fsdp2.py", "--batch", "8", cold=True)
    assert "the model is partitioned inside the site" in ended.log("east")


def test_fsdp2_is_one_optimizer_on_the_mean_gradient(tmp_path: Path) -> None:
    ended = run(tmp_path, "fsdp2.py", "--batch", "8", settings=("--set", "strategy.name=baseline"))
    model = load("fsdp2.py").build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    assert_on_the_mean(ended.global_model, model, optimizer, "east 0", "east 1", "west 0", "west 1")


def test_tensor_parallel_is_one_optimizer_on_the_mean_gradient(tmp_path: Path) -> None:
    ended = run(tmp_path, "tensor_parallel.py", "--batch", "8", settings=MEAN)
    torch.manual_seed(0)
    model = load("tensor_parallel.py").Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    assert_on_the_mean(ended.global_model, model, optimizer, "east", "west")


def test_pipeline_is_one_optimizer_on_the_mean_gradient(tmp_path: Path) -> None:
    ended = run(tmp_path, "pipeline.py", "--batch", "8", settings=MEAN)
    first, second = load("pipeline.py").stages()
    model = nn.Sequential(OrderedDict({"stage 0": first, "stage 1": second}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    assert_on_the_mean(ended.global_model, model, optimizer, "east", "west")


def test_pipeline_every_four_steps(tmp_path: Path) -> None:
    run(
        tmp_path, "pipeline.py", "--batch", "8", settings=("--set", "strategy.name=diloco", "--set", "strategy.every=4")
    )


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in ("cifar10.py", "fsdp2.py")])
def test_it_imports_what_it_needs(script: str) -> None:
    """Those two are run cold above; the others have much imported when they begin, and here nothing."""
    command = [sys.executable, str(EXAMPLES / script), "--help"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "--steps" in told


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_is_short_and_the_readme_says_how_to_run_it(script: str) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) <= 100
    written = (EXAMPLES / "README.md").read_text()
    for site in ("east", "west"):
        assert re.search(
            rf"^torchrun --standalone --nproc-per-node 2 examples/{script} .*--site {site} ", written, re.MULTILINE
        )
