"""The five lines in a user's script: real servers, real workers, the loops that people write."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import weightgrad as wg
from tests import fork_server
from weightgrad import event_log
from weightgrad.errors import SpecError, StrategyError
from weightgrad.lab.run.launch import Popen, Processes, free_port
from weightgrad.lab.run.model_file import read_global_model

from . import loops
from .deployment import digest_text
from .loops import LIMIT, LOOPS, MIDDLE, STEPS, Loop, batch

SCRIPT = Path(loops.__file__)

RECIPE = """
name: api
seed: 5
data: {{name: digits}}
model: {{name: lenet-digits}}
training: {{steps: 1, batch: 8, optimizer: {{name: sgd, lr: 0.1}}}}
server: {{name: hub}}
sites: [{sites}]
links: [{links}]
compute: {{seconds_per_step: 0.05}}
strategy: {{name: {strategy}, t_global: 600}}
"""


# -- processes -----------------------------------------------------------------------------------


class LocalDeployment:
    """A server, and sites that run a script; all on this machine. `cold`: each is an interpreter of its own."""

    def __init__(self, out: Path, *, cold: bool = False) -> None:
        self.out, self.address = out, f"127.0.0.1:{free_port()}"
        self.popen: Popen = subprocess.Popen if cold else fork_server.popen()
        (out / "logs").mkdir(parents=True)
        self.processes = Processes(out / "logs")

    def serve(self, recipe: Path, *more: str) -> None:
        """Start `weightgrad serve`."""
        command = [sys.executable, "-m", "weightgrad", "serve", str(recipe), "--listen", self.address]
        command += ["--metrics", "127.0.0.1:0", "--out", str(self.out), "--until-finished", *more]
        self.processes.start("server", command, self.popen)

    def site(self, name: str, ranks: int, script: Path, *more: str, log: str | None = None) -> None:
        """Start a site: one process as it is, several under torchrun."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *(torchrun if ranks > 1 else []), str(script), *more]
        self.processes.start(log or name, [*command, "--server", self.address, "--site", name], self.popen)

    def log(self, name: str) -> str:
        """What it has said."""
        return (self.out / "logs" / f"{name}.log").read_text(errors="replace")

    def until(self, happened: Callable[[], bool]) -> None:
        """Until it has happened; AssertionError with the logs when one fails or it takes too long."""
        limit = time.monotonic() + LIMIT
        while not happened():
            if (name := self.processes.failed()) is not None:
                raise AssertionError(f"{name}: {self.processes.tail(name, 60)}")
            assert time.monotonic() < limit, {n: self.processes.tail(n) for n in self.processes.running}
            time.sleep(0.05)

    def finish(self) -> None:
        """Until all have ended, and well."""
        self.until(self.processes.all_done)
        self.until(lambda: True)

    def fails(self, name: str) -> str:
        """The log of one that must end badly."""
        process = self.processes.running.pop(name)
        assert process.wait(LIMIT) != 0, self.log(name)
        return self.log(name)

    @property
    def digests(self) -> list[str]:
        """Of the global models that the server has had, by version from 1 on."""
        rounds = [entry for entry in event_log.read(self.out / "events.jsonl") if entry["kind"] == "round"]
        return [str(entry["digest"]) for entry in rounds]

    @property
    def digest(self) -> str:
        """Of the server's last global model."""
        return self.digests[-1]

    @property
    def global_model(self) -> dict[str, Tensor]:
        """The global model that the server has left, in full precision and without buffers."""
        return read_global_model(self.out)

    @property
    def final_model(self) -> dict[str, Tensor]:
        """The final model that the server has left."""
        return load_file(str(self.out / "model.safetensors"))

    def left(self, site: str, rank: int = 0) -> dict[str, Tensor]:
        """What a worker of this file has left."""
        return load_file(str(self.out / f"{site}-{rank}.safetensors"))


@contextmanager
def deployed(out: Path, *, cold: bool = False) -> Iterator[LocalDeployment]:
    """A deployment whose processes are ended with it."""
    made = LocalDeployment(out, cold=cold)
    try:
        yield made
    finally:
        made.processes.end()


def recipe(out: Path, strategy: str, *sites: str) -> Path:
    """A recipe of these sites, written down."""
    path = out / "recipe.yaml"
    links = ", ".join(f"{{between: [hub, {name}], bandwidth: 100 Mbit/s, delay: 1 ms}}" for name in sites)
    path.write_text(
        RECIPE.format(strategy=strategy, sites=", ".join(f"{{name: {n}, workers: 1}}" for n in sites), links=links)
    )
    return path


def run(out: Path, case: str, strategy: str = "baseline", *, cold: bool = False, **sites: int) -> LocalDeployment:
    """One case of the loops on these sites, each of so many ranks, from beginning to end."""
    with deployed(out, cold=cold) as made:
        made.serve(recipe(out, strategy, *sites), "--insecure")
        for name, ranks in sites.items():
            made.site(name, ranks, SCRIPT, case, "--out", str(out))
        made.finish()
        return made


def reference(loop: Loop, *places: str) -> dict[str, Tensor]:
    """Plain PyTorch: one process, one optimizer, the mean of the workers' gradients."""
    for step in range(STEPS):
        found = []
        for place in places:
            loop.model.zero_grad()
            loop.backward(place, step)
            found.append([parameter.grad for parameter in loop.model.parameters() if parameter.grad is not None])
        for parameter, *gradients in zip(loop.model.parameters(), *found, strict=True):
            parameter.grad = gradients[0] if len(places) == 1 else torch.stack(gradients).mean(0)
        loop.step()
    return {name: tensor.detach() for name, tensor in loop.model.named_parameters()}


# -- the tests -----------------------------------------------------------------------------------


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)), name


@pytest.mark.parametrize("ranks", [2, 1], ids=["torchrun", "alone"])
def test_every_worker_ends_with_the_global_model_whatever_it_began_with(ranks: int, tmp_path: Path) -> None:
    """One of them may have left before the last round: nobody waits for a site that downloads its first model."""
    ended = run(tmp_path, "stranger", "weightgrad", cold=ranks == 1, east=ranks, west=ranks)
    last = []
    for name in ("east", "west"):
        for rank in range(ranks):
            assert_same_bits(ended.left(name, rank), ended.left(name))
        own = digest_text(torch.cat([ended.left(name)[key].flatten() for key in Loop().model.state_dict()]))
        assert own in ended.digests
        last += [own == ended.digest]
        assert ended.log(name).count("after leave: the site has left") == ranks
        assert ended.log(name).count("nothing moved") == ranks
    assert any(last)


@pytest.mark.parametrize("case", ["loop", "habits"])
def test_baseline_over_two_sites_is_one_optimizer_on_the_mean_gradient(case: str, tmp_path: Path) -> None:
    ended = run(tmp_path, case, east=1, west=1)
    assert_same_bits(ended.left("east"), ended.left("west"))
    expected = reference(LOOPS[case](), "east 0", "west 0")
    for name, tensor in ended.global_model.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["loop", "habits", "autocast"])
def test_baseline_of_one_site_is_plain_pytorch_bit_for_bit(case: str, tmp_path: Path) -> None:
    ended = run(tmp_path, case, east=1)
    assert_same_bits(ended.left("east"), ended.global_model)
    assert_same_bits(ended.global_model, reference(LOOPS[case](), "east 0"))


def test_the_server_steps_with_the_optimizer_as_the_strategy_changes_it(tmp_path: Path) -> None:
    ended = run(tmp_path, "habits", "dgc", east=1, west=1)  # DGC takes the momentum out of the optimizer
    for site in ("east", "west"):
        assert_same_bits(ended.left(site), ended.global_model)


@pytest.mark.parametrize("strategy", ["baseline", "diloco"])
def test_frozen_parameters_take_no_part(strategy: str, tmp_path: Path) -> None:
    ended = run(tmp_path, "frozen", strategy, east=1, west=1)
    assert sorted(ended.global_model) == ["2.bias", "2.weight"]
    first = Loop().model.state_dict()
    frozen = {name: first.pop(name) for name in ("0.weight", "0.bias")}
    for site in ("east", "west"):
        assert_same_bits(ended.left(site), {**frozen, **ended.global_model})
    assert not torch.equal(ended.global_model["2.weight"], first["2.weight"])


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    ended = run(tmp_path, "tied", "weightgrad", east=2, west=1)
    assert list(ended.global_model) == ["0.weight"], "they travel once"
    for left in (ended.left("east", 0), ended.left("east", 1), ended.left("west")):
        assert_same_bits(left, {"0.weight": ended.global_model["0.weight"], "2.weight": ended.global_model["0.weight"]})


def test_buffers_are_averaged_over_the_ranks_of_a_site_or_left_alone(tmp_path: Path) -> None:
    ended = run(tmp_path, "normed", f"diloco, every: {MIDDLE}", east=2, west=2)
    for name, steps in (("middle.0.running_mean", MIDDLE), ("0.running_mean", STEPS)):  # a round, and the last one
        east, west = ([ended.left(site, rank)[name] for rank in (0, 1)] for site in ("east", "west"))
        assert torch.equal(east[0], east[1])
        torch.testing.assert_close(east[0], _running_mean(steps, "east 0", "east 1"))
        for rank in (0, 1):
            torch.testing.assert_close(west[rank], _running_mean(steps, f"west {rank}"))
    final = ended.final_model
    ranks = [ended.left(site)["0.running_mean"] for site in ("east", "west")]
    torch.testing.assert_close(final["0.running_mean"], torch.stack(ranks).mean(0))
    assert final["0.num_batches_tracked"] == STEPS


def _running_mean(steps: int, *places: str) -> Tensor:
    found = torch.zeros(6)
    for step in range(steps):
        found = 0.9 * found + 0.1 * torch.stack([batch(place, step)[0].mean(0) for place in places]).mean(0)
    return found


def test_ranks_with_layers_of_their_own_keep_their_own_buffers(tmp_path: Path) -> None:
    ended = run(tmp_path, "staged", "diloco, every: 4", east=2)
    own = [ended.left("east", rank) for rank in (0, 1)]
    parts = {name: tensor for one in own for name, tensor in one.items() if name.endswith(("weight", "bias"))}
    assert_same_bits(parts, ended.global_model)
    torch.testing.assert_close(own[1]["1.running_mean"], _running_mean(STEPS, "east 1"))
    assert torch.equal(own[1]["1.running_mean"], ended.final_model["1.running_mean"])


def test_a_strategy_that_is_judged_by_quantized_weights_hands_those_over(tmp_path: Path) -> None:
    ended = run(tmp_path, "deep", "weightgrad-paper, trigger: every(2)", east=2, west=2)
    final, full = ended.final_model, ended.global_model
    assert len(final["3.weight"].unique()) == 3
    assert len(full["3.weight"].unique()) == 256
    left = {site: [ended.left(site, rank) for rank in (0, 1)] for site in ("east", "west")}
    for one in (*left["east"], *left["west"]):
        assert len(one["3.weight"].unique()) == 3
        for name in ("0.weight", "3.bias", "5.weight"):  # which stay exact
            assert torch.equal(one[name], full[name])
    for name in full:  # east is the first site of the run
        assert torch.equal(left["east"][0][name], final[name])
    means = [left[site][0]["1.running_var"] for site in ("east", "west")]
    torch.testing.assert_close(final["1.running_var"], torch.stack(means).mean(0))
    loops.deep().load_state_dict(final, strict=True)
    assert not list(tmp_path.glob("final-state*"))


@pytest.mark.parametrize(
    ("case", "ranks", "why"),
    [
        (
            "staged",
            2,
            "RefusedError: baseline shares gradients, with which east cannot step: ",
        ),
        (
            "renamed",
            2,
            "StrategyError: two stages have a parameter 0.weight; let every stage keep the names of the whole",
        ),
    ],
)
def test_what_would_train_wrongly_is_refused(case: str, ranks: int, why: str, tmp_path: Path) -> None:
    with deployed(tmp_path) as made:
        made.serve(recipe(tmp_path, "baseline", "east"), "--insecure")
        made.site("east", ranks, SCRIPT, case, "--out", str(tmp_path))
        assert why in made.fails("east")


def test_a_closure_on_two_ranks(tmp_path: Path) -> None:
    ended = run(tmp_path, "closure", east=2)
    assert_same_bits(ended.left("east", 1), ended.left("east"))
    assert_same_bits(ended.left("east"), ended.global_model)
    expected = reference(Loop(), "east 0", "east 1")
    for name, tensor in ended.global_model.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_a_step_that_a_scaler_skips_on_one_rank_is_skipped_on_all(tmp_path: Path) -> None:
    ended = run(tmp_path, "scaled", "weightgrad", east=2)
    assert ended.log("east").count(f"skipped: True, steps: {STEPS - 1}") == 2
    assert_same_bits(ended.left("east", 1), ended.left("east"))
    assert_same_bits(ended.left("east"), ended.global_model)


@pytest.mark.parametrize("ranks", [2, 1], ids=["torchrun", "alone"])
def test_a_site_whose_script_fails_says_so_and_is_not_waited_for(ranks: int, tmp_path: Path) -> None:
    with deployed(tmp_path) as made:
        made.serve(recipe(tmp_path, "baseline", "east", "west"), "--insecure")
        made.site("east", ranks, SCRIPT, "failing", "--out", str(tmp_path))
        made.site("west", 1, SCRIPT, "loop", "--out", str(tmp_path))
        said = made.fails("east")
        assert "RuntimeError: the disk of the data is gone" in said
        assert "east leaves before its training is over" in said
        made.finish()
        assert "east leaves" in made.log("server")
        assert_same_bits(made.left("west"), made.global_model)


def test_what_cannot_be_trained_is_refused_before_anybody_is_asked() -> None:
    site, model = wg.join("127.0.0.1:1", site="east", insecure=True), Loop().model
    with pytest.raises(StrategyError, match="parameters that the model has not"):
        site.prepare(model, Loop().optimizer)
    with pytest.raises(StrategyError, match='it is "shared", "site" or "local"'):
        site.prepare(model, torch.optim.Adam(model.parameters()), buffers="global")
    with pytest.raises(StrategyError, match="no parameter that is trained"):
        site.prepare(model.requires_grad_(False), torch.optim.Adam(model.parameters()))


@pytest.mark.parametrize(("spec", "why"), [("zip", "no codec 'zip'"), ("ef(qsgd(bits=8))", "keeps a memory")])
def test_a_first_global_model_that_cannot_be_made_is_refused_before_anybody_is_asked(spec: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        wg.join("127.0.0.1:1", site="ohio", insecure=True, download_codec=spec)


def test_another_model_and_another_strategy_are_refused_with_the_difference(tmp_path: Path) -> None:
    with deployed(tmp_path) as made:
        made.serve(recipe(tmp_path, "baseline", "east", "west"), "--insecure")
        made.site("east", 1, SCRIPT, "loop", "--out", str(tmp_path))
        made.until(lambda: "sent the first global model" in made.log("server"))
        for case, ranks in (("larger", 2), ("other", 1)):
            made.site("west", ranks, SCRIPT, case, "--out", str(tmp_path), log=case)
        said = made.fails("larger")
        assert "RefusedError: the model of west is not the one that is being trained" in said
        assert "2.weight is [3, 16], the others have [2, 16]" in said
        assert "rank 0 of this site could not join: the model of west" in said, "the other ranks say it too"
        said = made.fails("other")
        assert "RefusedError: west asks for another strategy: name is 'diloco' here and 'baseline' there" in said
        made.site("west", 1, SCRIPT, "loop", "--out", str(tmp_path))
        made.finish()
        assert_same_bits(made.left("east"), made.left("west"))
