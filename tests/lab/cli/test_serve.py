"""`weightgrad serve` without a recipe, for a script that has its own data: two sites with the README's lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests import fork_server
from tests.runtime.deployment import PATIENCE_S, Hub
from tests.runtime.user_sites import Meet, UserScript, backward, flat, network
from weightgrad import event_log
from weightgrad.errors import RecipeError, RunError, StrategyError, WeightGradError
from weightgrad.lab.cli.serve import serve
from weightgrad.lab.recipes.site_list import SiteList, load_served
from weightgrad.lab.run import deployment
from weightgrad.lab.run.launch import Processes
from weightgrad.runtime.security import certificates
from weightgrad.runtime.session import Site

ROOT = Path(__file__).parents[3]
NAMES = ("virginia", "tokyo")
WRITTEN = {"sgd": "SGD(model.parameters(), lr=0.1)", "adamw": "AdamW(model.parameters(), lr=0.01)"}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}
EXTRAS = ("PIL", "plotly", "sklearn", "matplotlib", "ray", "transformers", "accelerate", "lightning")
AROUND = """
import sys, time
from pathlib import Path
import torch
from torch import nn

name, place = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.OPTIMIZER
loss_fn = nn.functional.cross_entropy


def batches():
    (place / f"{name}.ready").touch()
    while len(list(place.glob("*.ready"))) < 2:  # neither trains alone
        time.sleep(0.01)
    draw = torch.Generator().manual_seed(sum(name.encode()))
    for _ in range(60):
        x = torch.randn(32, 8, generator=draw)
        yield x, (x.sum(1) > 0).long()


loader = batches()
"""


def trained_on_all(kind: str) -> nn.Module:
    """The model after 60 steps of plain PyTorch, each on the batches of both sites."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = OPTIMIZERS[kind](model)
    draws = [torch.Generator().manual_seed(sum(name.encode())) for name in NAMES]
    for _ in range(60):
        x = torch.cat([torch.randn(32, 8, generator=draw) for draw in draws])
        nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def accuracy(model: nn.Module) -> float:
    x = torch.randn(4000, 8, generator=torch.Generator().manual_seed(9))
    return float((model(x).argmax(1) == (x.sum(1) > 0)).float().mean())


def readme_lines(address: str, name: str) -> str:
    """The five lines of the README, at an address and for a site of this test."""
    (code,) = re.findall(r"## Five lines\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for old, new in (("gs.example.net:7443", address), ('"virginia"', f'"{name}"')):
        assert code.count(old) == 1
        code = code.replace(old, new)
    return str(code)


class Deployment:
    """A server that was started by a command, and two sites with the README's lines, in one directory."""

    def __init__(self, place: Path) -> None:
        self.place, self.logs = place, place / "logs"
        self.logs.mkdir()
        self.processes = Processes(self.logs)
        certificates.create(place / "certs", ["localhost"], list(NAMES))

    def run(self, *options: str, optimizer: str) -> dict[str, torch.Tensor]:
        """Until all have ended; the model that the server leaves."""
        blocked = self.place / "blocked"
        for module in EXTRAS:
            (blocked / module).mkdir(parents=True)
            (blocked / module / "__init__.py").write_text(f"raise ImportError('{module} is not installed')\n")
        command = [sys.executable, "-m", "weightgrad", "serve", *options, "--listen", "127.0.0.1:0"]
        command += ["--credentials", "certs/server", "--metrics", "127.0.0.1:0", "--out", "out", "--until-finished"]
        started = os.environ.copy()
        try:
            os.environ["PYTHONPATH"] = str(blocked)
            self.processes.start("server", command, subprocess.Popen)
        finally:
            os.environ.clear()
            os.environ.update(started)
        try:
            self.until(lambda: "listening on port" in self.log("server"))
            (port,) = re.findall(r"listening on port (\d+)", self.log("server"))
            for name in NAMES:
                script = self.place / f"{name}.py"
                around = AROUND.replace("OPTIMIZER", WRITTEN[optimizer])
                script.write_text(around + readme_lines(f"127.0.0.1:{port}", name))
                command = [sys.executable, str(script), name, str(self.place)]
                self.processes.start(name, command, fork_server.popen())
            self.until(self.processes.all_done)
        finally:
            self.processes.end()
        return load_file(self.place / "out" / "model.safetensors")

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def until(self, happened: object) -> None:
        limit = time.monotonic() + PATIENCE_S
        assert callable(happened)
        while not happened():
            assert time.monotonic() < limit, {name: self.log(name) for name in self.processes.running}
            assert (failed := self.processes.failed()) is None, self.log(str(failed))
            time.sleep(0.02)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_sites_with_the_lines_of_the_readme(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` in a run of 60 steps on one machine: as good as training alone on the data of both."""
    monkeypatch.chdir(tmp_path)
    run = Deployment(tmp_path)
    tensors = run.run("--sites", ",".join(NAMES), "--strategy", "auto", optimizer=optimizer)
    alone = trained_on_all(optimizer)
    assert tensors.keys() == alone.state_dict().keys()
    together = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    together.load_state_dict(tensors)
    assert accuracy(alone) > 0.85
    assert accuracy(together) > accuracy(alone) - 0.03
    rounds = [entry for entry in event_log.read(tmp_path / "out" / "events.jsonl") if entry["kind"] == "round"]
    assert rounds
    assert {sender for entry in rounds for sender in entry["senders"]} == set(NAMES)


def test_two_sites_of_a_recipe_with_sites_alone(tmp_path: Path) -> None:
    (tmp_path / "sites.yaml").write_text("sites: [east, west]\nstrategy: {name: diloco, every: 2, t_global: 600}\n")
    found = load_served(tmp_path / "sites.yaml")
    assert isinstance(found, SiteList)
    meeting = threading.Barrier(2, timeout=PATIENCE_S)

    def script(site: Site, meet: Meet) -> torch.Tensor:
        model = network()
        model, optimizer = site.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        meet()
        for step in range(6):
            optimizer.zero_grad()
            backward(model, site.name, step)
            optimizer.step()
        site.leave()
        return flat(model)

    with Hub(deployment.listed_config(found)) as hub:
        sites = [UserScript(hub.address, name, script, meeting.wait) for name in ("east", "west")]
        ends = [site.end() for site in sites]
        assert hub.version >= 3
        for vector in ends:
            assert torch.equal(vector, hub.global_model.vector)


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"serve needs the sites that may join: --sites virginia,tokyo .* or a RECIPE"),
        ({"strategy": "auto"}, r"serve needs the sites that may join"),
        ({"recipe": "laptop", "sites": "a,b"}, r"found the recipe 'laptop' and --sites; .* give one of the two"),
        ({"recipe": "laptop", "strategy": "auto"}, r"found the recipe 'laptop' and --strategy; .* --set strategy=NAME"),
        ({"sites": "a,b", "settings": ["strategy=gaia"]}, r"--set changes a recipe, and there is none"),
        ({"sites": "a,a"}, r"found a more than once"),
        ({"sites": "a,,b"}, r"sites\[1\]: found ''; wanted: names"),
        ({"sites": "a/b"}, r"wanted a name of letters"),
        ({"sites": "edge-{}"}, r"wanted the name of one site"),
        ({"sites": "a,b", "strategy": "dilocco"}, r"--sites and --strategy: strategy: no strategy 'dilocco'"),
        ({"sites": "a,b", "strategy": "diloco,auto"}, r"found 2 strategies in 'diloco,auto'; a run has one"),
        ({"sites": "a,b", "strategy": "diloco(evry=5)"}, r"did you mean every"),
        ({"sites": "a,b", "strategy": "diloco(every=5"}, r"is not a strategy"),
    ],
)
def test_what_serve_cannot_do_is_said(options: dict[str, object], says: str) -> None:
    with pytest.raises(WeightGradError, match=says):
        serve(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sites: []", r"line 1: sites: found none; wanted the name of at least one site"),
        ("strategy: auto", r"sites: missing; wanted: names"),
        ("sites: [a, b]\nstrategi: auto", r"line 2: strategi: unknown key 'strategi'; did you mean 'strategy'"),
        ("sites: [{name: a, workers: 2}]", r"belongs into a whole recipe, with data, model"),
        ("sites: [a]\nlinks: []", r"data: missing; wanted: a mapping"),
        ("", r"wanted a mapping"),
    ],
)
def test_mistakes_in_a_recipe_with_sites_alone(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "sites.yaml").write_text(text)
    with pytest.raises(RecipeError, match=says):
        load_served(tmp_path / "sites.yaml")


def test_the_strategy_of_a_list_of_sites_is_that_of_the_run() -> None:
    text = "sites: [a, b]\nseed: 3\nstrategy: {name: diloco, every: 7}"
    config = deployment.listed_config(SiteList.parse(text))
    assert (config.sites, config.seed) == (("a", "b"), 3)
    assert config.fit(10).trigger == "every(7)"
    assert SiteList.parse(SiteList.parse(text).to_yaml()).dump() == SiteList.parse(text).dump() | {"name": "recipe"}
    hiding = deployment.listed_config(SiteList.parse("sites: [a]\nstrategy: weightgrad")).fit(10)
    assert hiding.overlap == hiding.hide > 0, "links are not known, so a round is hidden as far as it may be"


def test_serving_without_certificates_is_still_refused() -> None:
    with pytest.raises(StrategyError, match="serve needs --credentials"):
        serve(sites="a,b")


def test_what_a_server_writes_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    """Also what others make in its name, such as the event log, which opens its file as every file is opened."""
    (tmp_path / "file").touch()
    before = os.umask(0)
    try:
        with pytest.raises(RunError, match="cannot make the directory"):
            serve(sites="a,b", insecure=True, listen="127.0.0.1:0", out=tmp_path / "file" / "out")
        (tmp_path / "made").touch()
        assert (tmp_path / "made").stat().st_mode & 0o077 == 0
    finally:
        os.umask(before)
