"""Every script in examples/, as its README runs it: a server and two sites; also sharded differently."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zlib
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
    *scripts: str,
    more: tuple[str, ...] = (),
    ranks: tuple[int, ...] = (2, 2),
    settings: tuple[str, ...] = (),
    secure: bool = False,
    cold: bool = False,
) -> LocalDeployment:
    """Both sites must print the server's digest of the global model. One script is run by both."""
    with deployed(out, cold=cold) as made:
        if secure:
            certificates.create(out / "certs", ["localhost"], ["east", "west"])

        def trust(part: str) -> tuple[str, ...]:
            return ("--credentials", str(out / "certs" / part)) if secure else ("--insecure",)

        made.serve(EXAMPLES / "recipe.yaml", *trust("server"), *settings, "--set", "strategy.t_global=600")
        for site, script, count in zip(("east", "west"), (*scripts, scripts[0]), ranks, strict=False):
            made.site(site, count, EXAMPLES / script, "--steps", str(STEPS), *trust(f"sites/{site}"), *more)
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
) -> dict[str, list[float]]:
    """One process that sees all the batches gets the same global model, but for rounding.

    Returns:
        The loss of every step by place.
    """
    drawn = {place: batches(place, 8) for place in places}
    losses: dict[str, list[float]] = {place: [] for place in places}
    for _ in range(STEPS):
        for place, one in drawn.items():
            images, labels = next(one)
            loss = functional.cross_entropy(model(images), labels)
            (loss / len(drawn)).backward()
            losses[place].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    wanted = list(model.named_parameters())
    assert len(global_model) == len(wanted)
    for name, tensor in wanted:
        torch.testing.assert_close(global_model[name], tensor.detach(), rtol=1e-4, atol=1e-5)
    return losses


def test_cifar10(tmp_path: Path) -> None:
    ended = run(tmp_path, "cifar10.py", more=("--data", "digits", "--batch", "4"), secure=True, cold=True)
    assert "of the test images" in ended.log("west")


def test_gpt(tmp_path: Path) -> None:
    run(tmp_path, "gpt.py", more=("--data", "synthetic", "--batch", "2"))


def test_fsdp2_with_quantized_updates(tmp_path: Path) -> None:
    run(tmp_path, "fsdp2.py", more=("--batch", "8"), cold=True)


def whole_network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """What the examples of sharding train, on one process."""
    torch.manual_seed(0)
    model = load("fsdp2.py").Net()
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def test_fsdp2_is_one_optimizer_on_the_mean_gradient(tmp_path: Path) -> None:
    ended = run(tmp_path, "fsdp2.py", more=("--batch", "16"), settings=("--set", "strategy.name=baseline"))
    assert_on_the_mean(ended.global_model, *whole_network(), "east 0", "east 1", "west 0", "west 1")


def test_tensor_parallel_is_one_optimizer_on_the_mean_gradient(tmp_path: Path) -> None:
    ended = run(tmp_path, "tensor_parallel.py", more=("--batch", "8"), settings=("--set", "strategy.name=baseline"))
    assert_on_the_mean(ended.global_model, *whole_network(), "east", "west")


def test_sites_that_are_sharded_differently_train_together(tmp_path: Path) -> None:
    """A shard of each parameter on three workers here, columns and rows of layers on two there."""
    scripts = ("fsdp2.py", "tensor_parallel.py")
    settings = ("--set", "strategy.name=diloco", "--set", "strategy.every=2")
    run(tmp_path, *scripts, ranks=(3, 2), more=("--batch", "12"), settings=settings)


def test_replicas_of_shards_and_a_pipeline_train_together(tmp_path: Path) -> None:
    run(tmp_path, "hsdp.py", "pipeline.py", ranks=(4, 2), more=("--batch", "8"))


def test_pipeline_every_four_steps(tmp_path: Path) -> None:
    settings = ("--set", "strategy.name=diloco", "--set", "strategy.every=4")
    run(tmp_path, "pipeline.py", more=("--batch", "8"), settings=settings)


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("model_parallel_filters.py", (2, 2)),
        ("model_parallel_filters.py", (1, 2)),
        ("model_parallel_branches.py", (2, 2)),
    ],
)
def test_a_network_cut_within_its_layers_is_the_same_network_on_one_rank(
    script: str, ranks: tuple[int, int], tmp_path: Path
) -> None:
    """Columns of filters or branches on different ranks; two sites. The same losses and weights as in one process."""
    ended = run(tmp_path, script, script, ranks=ranks, more=("--batch", "8"), settings=MEAN)
    torch.manual_seed(0)
    model = load(script).Net(rank=0, ranks=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = assert_on_the_mean(ended.global_model, model, optimizer, "east", "west")
    for place, wanted in losses.items():
        (said,) = re.findall(rf"^{place}: step 5, loss (\S+)$", ended.log(place), re.MULTILINE)
        assert float(said) == pytest.approx(wanted[4], abs=1e-4)


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
            rf"^torchrun --standalone --nproc-per-node [24] examples/{script} .*--site {site} ", written, re.MULTILINE
        )
