"""Any optimizer with any strategy, parameters of any type, and sites that come when the others have begun."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from weightgrad.core.optimizers import spec as optimizer_spec
from weightgrad.core.optimizers.spec import OptimizerSpec, allow_optimizer
from weightgrad.errors import RefusedError, StrategyError
from weightgrad.lab.run.deployment import run_config
from weightgrad.runtime.join import join
from weightgrad.runtime.optimizer.user_optimizer import unwrap_optimizer
from weightgrad.runtime.session import Site

from .deployment import PATIENCE_S, Hub, tiny
from .user_sites import NAMES, STEPS, Meet, UserScript, backward, flat, network, reference, run_sites, served

UPDATES = "diloco, every: 2"


class Lion(Optimizer):
    """Hand-written, and it takes for granted that every parameter has a gradient."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                kept = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(torch.sign(kept * fast + p.grad * (1 - fast)) * group["lr"])
                kept.mul_(slow).add_(p.grad * (1 - slow))
        return loss


class WithoutRate(Optimizer):
    """Has no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
            p.sub_(p.grad.sign() * 0.01)


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the server does for --optimizer."""
    monkeypatch.setattr(optimizer_spec, "_allowed", {"Lion": Lion, "WithoutRate": WithoutRate})


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def no_biases() -> nn.Module:
    """Muon takes matrices only."""
    model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 2, bias=False))
    for parameter in model.parameters():
        torch.nn.init.eye_(parameter)
    return model


def train(
    make: Callable[[nn.Module], Optimizer], build: Callable[[], nn.Module] = network
) -> Callable[[Site, Meet], nn.Module]:
    """The usual script."""

    def script(site: Site, meet: Meet) -> nn.Module:
        model = build()
        optimizer = make(model)
        site.prepare(model, optimizer)
        meet()
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, site.name, step)
            optimizer.step()
        site.leave()
        return model

    return script


OWN: dict[str, Callable[[nn.Module], Optimizer]] = {
    "lion": lambda model: Lion(model.parameters(), 0.01),
    "without a rate": lambda model: WithoutRate(model.parameters()),
    "a tensor as rate": lambda model: AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
}


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("name", OWN)
def test_shared_gradients_with_any_optimizer_are_one_step_of_it(name: str) -> None:
    results, global_model = run_sites("baseline", train(OWN[name]))
    model = network()
    expected = reference(model, OWN[name](model))
    for trained in results.values():
        assert torch.equal(flat(trained), global_model)
    torch.testing.assert_close(global_model, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("allowed")
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_sees_the_shapes_at_the_server_too() -> None:
    def make(model: nn.Module) -> Optimizer:
        return torch.optim.Muon(model.parameters(), lr=0.02, adjust_lr_fn="match_rms_adamw")

    results, global_model = run_sites("baseline", train(make, no_biases))
    for trained in results.values():
        assert torch.equal(flat(trained), global_model)
    model = no_biases()
    torch.testing.assert_close(global_model, reference(model, make(model)), rtol=1e-2, atol=1e-3)  # in bfloat16


@pytest.mark.parametrize("strategy", ["baseline", "qsgd", "dgc", UPDATES])
def test_an_optimizer_that_the_server_cannot_make(strategy: str, tmp_path: Path) -> None:
    """Where gradients are shared the sites step with it, and the server writes the model that they send."""
    meeting = threading.Barrier(2, timeout=PATIENCE_S)
    config = run_config(tiny(f"{{name: {strategy}, t_global: 600}}", workers=1))
    with Hub(replace(config, sites=NAMES), out=tmp_path) as hub:
        sites = [UserScript(hub.address, name, train(OWN["lion"]), meeting.wait) for name in NAMES]
        east, west = (flat(site.end()) for site in sites)
        hub.until(lambda: all(not member.live for member in hub.core.members.by_name.values()))
    assert torch.equal(east, west)
    written = network()
    written.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(flat(written), east)
    if strategy == "baseline":
        model = network()
        torch.testing.assert_close(east, reference(model, OWN["lion"](model)), rtol=1e-4, atol=1e-5)


def test_what_the_server_may_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_spec, "_allowed", {})
    assert allow_optimizer("torch.optim.sgd:SGD") is SGD
    for path, why in (("nowhere:Lion", "cannot be imported"), ("math:pi", "is no torch.optim.Optimizer")):
        with pytest.raises(StrategyError, match=why):
            allow_optimizer(path)
    assert set(optimizer_spec._allowed) == {"SGD"}


def test_a_description_says_what_other_replicas_need() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]
    spec = OptimizerSpec.of(AdamW(parameters, lr=torch.tensor(0.5), foreach=False), parameters)
    assert spec.tensor_rate
    assert dict(spec.dtypes) == {1: "bfloat16"}
    assert not spec.needs_whole_tensors
    again = OptimizerSpec.parse(spec.dump())
    assert again.difference(spec) is None
    wider = [parameters[0], nn.Parameter(torch.zeros(3))]
    found = again.difference(OptimizerSpec.of(AdamW(wider, lr=torch.tensor(0.5), foreach=False), wider))
    assert found == "its parameters have other floating-point types"
    with pytest.raises(StrategyError, match="unknown types"):
        OptimizerSpec.parse({**spec.dump(), "dtypes": {"0": "Tensor"}})
    odd = Lion(parameters, 0.1)
    odd.defaults["hook"] = odd.param_groups[0]["hook"] = print
    with pytest.raises(StrategyError, match="hook of Lion is"):
        OptimizerSpec.of(odd, parameters)


class NotOne:
    """Steps, and is nobody's subclass."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]

    def step(self) -> None:
        """Nothing."""


def test_what_is_no_optimizer_of_torch_is_refused_and_what_wraps_one_is_not() -> None:
    model = network()
    with pytest.raises(StrategyError, match=r"NotOne is no torch\.optim\.Optimizer.*super\(\)\.__init__"):
        unwrap_optimizer(NotOne(model.parameters()))
    plain = SGD(model.parameters(), lr=0.1)

    class Wrapper:
        optimizer = plain
        param_groups = plain.param_groups

    class Container(Optimizer):
        def __init__(self, *optimizers: Optimizer) -> None:
            self.optimizers = list(optimizers)
            super().__init__(model.parameters(), {})

    assert unwrap_optimizer(Container(plain)) is plain
    with pytest.raises(StrategyError, match="Container has 2 optimizers"):
        unwrap_optimizer(Container(plain, plain))
    assert unwrap_optimizer(plain) is plain
    assert unwrap_optimizer(Wrapper()) is plain


# -- sparse gradients and other types -------------------------------------------------------------------


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.arange(40.0).view(10, 4).sin())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.embedding((x[:, 0].abs() * 3).long().clamp(max=9))[:, :2]
        return found


@pytest.mark.parametrize(
    ("strategy", "kind"), [("baseline", SGD), ("baseline", Adagrad), (UPDATES, SparseAdam), (UPDATES, SGD)]
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_embedding_gradients(strategy: str, kind: Any) -> None:
    results, global_model = run_sites(strategy, train(lambda model: kind(model.parameters(), lr=0.1), Words))
    assert all(torch.equal(flat(model), global_model) for model in results.values())
    assert not torch.equal(global_model, flat(Words()))


def test_sparse_adam_with_shared_gradients_is_refused() -> None:
    with pytest.raises(StrategyError, match="SparseAdam takes only sparse ones"):
        run_sites("baseline", train(lambda model: SparseAdam(model.parameters()), Words), "east")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_replica_steps_in_the_precision_of_the_sites(dtype: torch.dtype) -> None:
    def mixed() -> nn.Module:
        model = network()
        model[0].to(dtype)
        return nn.Sequential(model[0], nn.Tanh(), _Cast(), model[2])

    results, global_model = run_sites(
        "baseline", train(lambda model: Adam(model.parameters(), lr=0.01, eps=1e-4), mixed)
    )
    for model in results.values():
        assert next(model.parameters()).dtype == dtype
        assert torch.equal(flat(model), global_model)


class _Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


@pytest.mark.parametrize("strategy", ["baseline", UPDATES])
def test_float64(strategy: str) -> None:
    script = train(lambda model: SGD(model.parameters(), lr=0.1), lambda: network().double())
    if strategy == "baseline":
        with pytest.raises(StrategyError, match="is float64"):
            run_sites(strategy, script, "east")
        return
    results, global_model = run_sites(strategy, script)
    assert all(torch.equal(flat(model), global_model) for model in results.values())


# -- late sites ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("name", ["lion", "adafactor", "bfloat16"])
def test_a_late_site_gets_the_state_of_the_optimizer(name: str) -> None:
    """West comes back when east has taken five steps, and both end with the model of the server."""
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    make = OWN.get(name, adamw)

    def script(site: Site, meet: Meet) -> nn.Module:
        model = network(1 if site.name == "east" else 2).to(dtype)
        optimizer = make(model)
        site.prepare(model, optimizer)
        for step in itertools.count():
            if step == (5 if site.name == "east" else 0):
                meet()
            if site.steps >= 10:
                break
            optimizer.zero_grad()
            backward(model, site.name, step)
            optimizer.step()
        site.leave()
        return model

    with served("baseline") as hub:
        gone, model = join(hub.address, site="west", insecure=True), network().to(dtype)
        gone.prepare(model, make(model))
        gone._abandon()
        hub.until(lambda: not hub.core.members.by_name["west"].live)  # nobody waits for it
        meeting = threading.Barrier(2, timeout=300)
        east = UserScript(hub.address, "east", script, meeting.wait)
        hub.until(lambda: hub.version >= 5)
        west = UserScript(hub.address, "west", script, meeting.wait)
        models = [east.end(), west.end()]
        hub.until(lambda: all(not member.live for member in hub.core.members.by_name.values()))
        for model in models:
            assert torch.equal(flat(model), hub.global_model.vector)


def _gone(hub: Hub, kind: str) -> None:
    """West has been there, and nobody waits for it."""
    gone, model = join(hub.address, site="west", insecure=True), network()
    gone.prepare(model, OWN[kind](model))
    gone._abandon()
    hub.until(lambda: not hub.core.members.by_name["west"].live)


@pytest.mark.parametrize("seed", [1, 2], ids=["the same weights", "other weights"])
@pytest.mark.parametrize("kind", ["lion", "nadam"], ids=["at sites", "at the server"])
def test_a_late_site_takes_the_steps_that_it_has_missed(kind: str, seed: int) -> None:
    """Where only sites step, all of them, from the first weights on; else if it has those weights already."""

    def script(site: Site, meet: Meet) -> Tensor:
        model = network(1 if site.name == "east" else seed)
        site.prepare(model, optimizer := OWN[kind](model))
        assert site.steps == (0 if site.name == "east" else 5)
        for step in itertools.count():
            if step == (5 if site.name == "east" else 0):
                meet()
            if site.steps >= 10:
                break
            optimizer.zero_grad()
            backward(model, site.name, step)
            optimizer.step()
        site.leave()
        return flat(model)

    with served("baseline") as hub:
        _gone(hub, kind)
        meeting = threading.Barrier(2, timeout=300)
        east = UserScript(hub.address, "east", script, meeting.wait)
        hub.until(lambda: hub.version >= 5)
        west = UserScript(hub.address, "west", script, meeting.wait)
        assert torch.equal(east.end(), west.end())


def test_a_late_site_that_would_need_what_nobody_remembers() -> None:
    with served("baseline") as hub:

        def forget(site: Site, meet: Meet) -> None:
            model = network()
            site.prepare(model, optimizer := OWN["lion"](model))
            for step in range(3):
                backward(model, "east", step)
                optimizer.step()
            hub.core._results._first = 3
            with pytest.raises(RefusedError, match=r"remembers too few of their gradients.*--optimizer MODULE:CLASS"):
                join(hub.address, site="west", insecure=True).prepare(other := network(2), OWN["lion"](other))

        _gone(hub, "lion")
        UserScript(hub.address, "east", forget).end()
