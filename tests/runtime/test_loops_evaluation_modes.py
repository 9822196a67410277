"""Schedule-free optimizers, which put other weights into the model for evaluation: two real sites over gRPC."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from weightgrad.core.optimizers import spec as optimizer_spec
from weightgrad.errors import StrategyError
from weightgrad.runtime.session import Site
from weightgrad.runtime.site.departure import SiteDeparture

from .user_sites import NAMES, STEPS, Meet, backward, flat, network, reference, run_sites

BETA = 0.9


class ScheduleFree(Optimizer):
    """SGD of Defazio et al. (2024), with the interface of the package `schedulefree`."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    def _move(self, weight: float, *, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == training:
                continue
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.data.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = training

    def eval(self) -> None:
        self._move(1 - 1 / BETA, training=False)

    def train(self) -> None:
        self._move(1 - BETA, training=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "as the package says it"
            share = 1 / (group["k"] + 1)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, share).add_(parameter.grad, alpha=group["lr"] * (BETA * (1 - share) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])
            group["k"] += 1


def loop(*, looks: tuple[str, ...] = (), ends_in: str = "train") -> Any:
    """A loop in which some of the sites look at the weights for evaluation after each step."""

    def script(site: Site, meet: Meet) -> tuple[Tensor, Tensor]:
        model = network()
        optimizer = ScheduleFree(model.parameters())
        site.prepare(model, optimizer)
        meet()
        for step in range(STEPS):
            optimizer.train()
            backward(model, site.name, step)
            optimizer.step()
            optimizer.zero_grad()
            if site.name in looks:
                trained = flat(model)
                optimizer.eval()
                assert not torch.equal(flat(model), trained) or step == 0
                optimizer.eval()
                optimizer.train()
                assert torch.equal(flat(model), trained), "train() gives back every bit"
        getattr(optimizer, ends_in)()
        site.leave()
        left = flat(model)
        optimizer.eval()
        assert optimizer.eval.__func__ is ScheduleFree.eval, "its methods are its own again"  # type: ignore[attr-defined]
        return left, flat(model)

    return script


@pytest.mark.parametrize("ends_in", ["train", "eval"])
def test_where_gradients_are_shared_they_train_as_on_the_mean_gradient(
    ends_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One site looks after each step and the other never: rounding would drive them apart, and was refused."""
    handed: list[Tensor] = []
    lock, weights = threading.Lock(), SiteDeparture._weights

    def watched(departure: SiteDeparture) -> dict[str, Tensor]:
        found = weights(departure)
        with lock:
            handed.append(torch.cat([one.flatten() for one in found.values()]))
        return found

    monkeypatch.setattr(SiteDeparture, "_weights", watched)
    results, _ = run_sites("baseline", loop(looks=("east",), ends_in=ends_in))
    model = network()
    optimizer = ScheduleFree(model.parameters())
    optimizer.train()
    reference(model, optimizer)
    optimizer.eval()
    for left, evaluated in results.values():
        assert torch.equal(left, evaluated), "leave() has shown the weights for evaluation"
        assert torch.equal(left, results["east"][0])
        torch.testing.assert_close(left, flat(model))
    assert len(handed) == len(NAMES)
    assert all(torch.equal(one, results["east"][0]) for one in handed), "the server's final file has them, too"


def test_a_server_that_steps_with_one_steps_in_train_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites call `optimizer.train()` after `prepare`, and the server has the class by `serve --optimizer`."""
    monkeypatch.setattr(optimizer_spec, "_allowed", {"ScheduleFree": ScheduleFree})
    results, trained = run_sites("baseline", loop(looks=("east",)))
    model = network()
    optimizer = ScheduleFree(model.parameters())
    optimizer.train()
    torch.testing.assert_close(trained, reference(model, optimizer))
    optimizer.eval()
    for left, _ in results.values():
        torch.testing.assert_close(left, flat(model))


@pytest.mark.parametrize("ends_in", ["train", "eval"])
@pytest.mark.parametrize("strategy", ["diloco, every: 2", "auto"])
def test_where_updates_are_shared_sites_end_with_one_model_for_evaluation(strategy: str, ends_in: str) -> None:
    """Each has an average of its own, which eval() after leave() would have made of the same global model."""
    results, global_model = run_sites(strategy, loop(looks=NAMES, ends_in=ends_in))
    for left, evaluated in results.values():
        assert torch.equal(left, global_model)
        assert torch.equal(evaluated, global_model)


def test_what_is_written_to_weights_for_evaluation_is_not_lost_in_silence() -> None:
    def script(site: Site, meet: Meet) -> None:
        model = network()
        optimizer = ScheduleFree(model.parameters())
        site.prepare(model, optimizer)
        meet()
        optimizer.train()
        backward(model, site.name, 0)
        optimizer.step()
        optimizer.eval()
        own = {name: one.clone() for name, one in model.state_dict().items()}
        model.load_state_dict(network(2).state_dict())  # such as an EMA, to be looked at
        model.load_state_dict(own)
        optimizer.train()
        optimizer.eval()
        with torch.no_grad():
            first = next(model.parameters())
            first.clamp_(-0.01, 0.01)
        with pytest.raises(StrategyError, match=r"ScheduleFree\.train\(\) makes .* has written to the model"):
            optimizer.train()
        with torch.no_grad():
            first.copy_(own["0.weight"])
        optimizer.train()

    run_sites("baseline", script)
