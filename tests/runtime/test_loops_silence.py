"""Nothing diverges or is dropped in silence: it is made right, or refused with a sentence that says what to do."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from weightgrad.errors import RefusedError, StrategyError
from weightgrad.runtime.join import join
from weightgrad.runtime.model.named_parameter import trainable
from weightgrad.runtime.optimizer.optimizer_checks import check_averaged
from weightgrad.runtime.session import Site

from .user_sites import STEPS, Meet, backward, flat, network, run_sites, served

UPDATES = "diloco, every: 2"


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def steps(site: Site, model: nn.Module, optimizer: Optimizer, count: int = STEPS) -> None:
    for step in range(count):
        optimizer.zero_grad()
        backward(model, site.name, step)
        optimizer.step()


# -- lives of a process -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["baseline", UPDATES])
def test_a_second_life_without_a_state_goes_on_from_the_global_model(strategy: str) -> None:
    """The same seed, so the same first weights: all that it did was once discarded as a repetition."""
    with served(strategy, "east") as hub:
        site = join(hub.address, site="east", insecure=True)
        model = network()
        optimizer = sgd(model)
        site.prepare(model, optimizer)
        steps(site, model, optimizer)
        site._abandon()
        hub.until(lambda: not hub.core.members.by_name["east"].live)
        before, vector = hub.version, hub.global_model.vector.clone()
        assert before > 0
        again = join(hub.address, site="east", insecure=True)
        model = network()
        again.prepare(model, optimizer := sgd(model))
        assert torch.equal(flat(model), vector), "it begins where the run is"
        steps(again, model, optimizer)
        again.leave()
        assert hub.version > before, "what it has done counts"
        assert torch.equal(flat(model), hub.global_model.vector)


def test_a_cell_that_is_run_again_is_refused_and_may_come_back_when_it_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with served(UPDATES, "east") as hub, caplog.at_level(logging.WARNING, "weightgrad"):
        model = network()
        optimizer = sgd(model)
        first = join(hub.address, site="east", insecure=True)
        first.prepare(model, optimizer)
        with pytest.raises(StrategyError, match="the site is prepared already"):
            first.prepare(model, optimizer)
        with pytest.raises(StrategyError, match=r"that of site east, which has not left.*leave\(\) first"):
            join(hub.address, site="west", insecure=True).prepare(model, optimizer)
        with pytest.raises(StrategyError, match=r"east trains in this process already.*Call leave\(\) on the site"):
            join(hub.address, site="east", insecure=True)  # so that a notebook's `site` still is the one that trains
        steps(first, model, optimizer)
        assert first.steps == STEPS
        first.leave()
        with pytest.raises(StrategyError, match=r"an optimizer.step\(\) after leave\(\) would train alone"):
            optimizer.step()
        again = join(hub.address, site="east", insecure=True)
        again.prepare(model, optimizer)
        began = again.steps
        steps(again, model, optimizer)
        assert again.steps == began + STEPS, "each step counts once"
        again.leave()
        assert torch.equal(flat(model), hub.global_model.vector)
        assert not hasattr(optimizer, "_step_supports_amp_scaling")
        assert "not those that it had before prepare()" not in caplog.text, "it has those with which it left"


# -- weights and states that are loaded ---------------------------------------------------------------------------


def test_weights_that_prepare_replaces_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with served(UPDATES) as hub, caplog.at_level(logging.WARNING, "weightgrad"):
        site, loaded = join(hub.address, site="east", insecure=True), network(1)
        site.prepare(loaded, sgd(loaded))
        assert "not those that it had before" not in caplog.text, "its weights have become the global model"
        late, model = join(hub.address, site="west", insecure=True), network(2)
        late.prepare(model, sgd(model))
        assert torch.equal(flat(model), flat(loaded))
        assert "west: the model has the weights of the global model" in caplog.text
        assert "load them at the site that starts first" in caplog.text
        site._abandon()
        late._abandon()


@pytest.mark.parametrize("strategy", ["baseline", UPDATES])
@pytest.mark.parametrize("part", ["model", "layer"])
def test_weights_that_are_loaded_after_prepare_are_noticed(strategy: str, part: str) -> None:
    other = network(5)

    def script(site: Site, meet: Meet) -> None:
        model = network()
        optimizer = sgd(model)
        site.prepare(model, optimizer)
        steps(site, model, optimizer, 3)
        model.load_state_dict(model.state_dict())  # its own
        steps(site, model, optimizer, 1)
        if part == "model":
            model.load_state_dict(other.state_dict())
        else:
            model[2].load_state_dict(other[2].state_dict())
        backward(model, site.name, 4)
        optimizer.step()

    with pytest.raises(StrategyError, match=r"load_state_dict\(\) after prepare\(\).*Load weights before prepare"):
        run_sites(strategy, script, "east")


def test_weights_that_are_loaded_before_leaving_are_not_sent() -> None:
    def script(site: Site, meet: Meet) -> None:
        model = network()
        site.prepare(model, optimizer := sgd(model))
        steps(site, model, optimizer, 3)
        model.load_state_dict(network(5).state_dict())
        site.leave()

    with pytest.raises(StrategyError, match="put the own ones back before the next step"):
        run_sites(UPDATES, script, "east")


def test_the_state_of_an_optimizer_that_trained_before(caplog: pytest.LogCaptureFixture) -> None:
    """Where gradients are shared it begins anew, as at the server, and says so; loading it later is refused."""

    def script(site: Site, meet: Meet) -> nn.Module:
        model = network()
        optimizer = AdamW(model.parameters(), lr=0.01)
        backward(model, site.name, 99)
        optimizer.step()
        kept = optimizer.state_dict()
        model.load_state_dict(network().state_dict())
        site.prepare(model, optimizer)
        meet()
        steps(site, model, optimizer, 4)
        assert len(optimizer.state_dict()["state"]) == 4
        with pytest.raises(StrategyError, match=r"optimizer.load_state_dict\(\) after prepare\(\)"):
            optimizer.load_state_dict(kept)
        site.leave()
        optimizer.load_state_dict(kept)
        return model

    with caplog.at_level(logging.WARNING, "weightgrad"):
        results, global_model = run_sites("baseline", script)
    assert "AdamW begins without the state that it had before prepare()" in caplog.text
    assert all(torch.equal(flat(model), global_model) for model in results.values())


# -- what is not shared -------------------------------------------------------------------------------------------


def frozen_first(seed: int) -> nn.Sequential:
    model = network()
    model[0] = network(seed)[0].requires_grad_(False)
    return model


def first_layer(model: nn.Module) -> torch.Tensor:
    return next(model.parameters()).detach()


@pytest.mark.parametrize("allowed", [False, True], ids=["same", "local"])
def test_frozen_weights_that_differ_between_sites(allowed: bool) -> None:
    with served(UPDATES) as hub:
        options: dict[str, Any] = {"frozen": "local"} if allowed else {}
        models = [frozen_first(7), frozen_first(8)]
        sites = [join(hub.address, site=name, insecure=True) for name in ("east", "west")]
        sites[0].prepare(models[0], sgd(models[0]), **options)
        if allowed:
            sites[1].prepare(models[1], sgd(models[1]), **options)
        else:
            with pytest.raises(RefusedError, match=r"0\.weight is frozen, and west has other values in it than east"):
                sites[1].prepare(models[1], sgd(models[1]))
            same = frozen_first(7)
            same[0].double()  # the same values
            back = join(hub.address, site="west", insecure=True)
            back.prepare(same, sgd(same))
            back._abandon()
        for site in sites:
            site._abandon()


def test_a_layer_that_is_unfrozen_midway_is_refused_with_the_remedy() -> None:
    def script(site: Site, meet: Meet) -> None:
        model = frozen_first(7)
        site.prepare(model, optimizer := sgd(model))
        steps(site, model, optimizer, 2)
        model[0].requires_grad_(True)
        steps(site, model, optimizer, 1)

    with pytest.raises(StrategyError, match=r'0.weight was frozen.*prepare\(frozen="shared"\)'):
        run_sites(UPDATES, script, "east")


def test_layers_that_are_frozen_and_unfrozen_while_training_goes_on() -> None:
    def script(site: Site, meet: Meet) -> tuple[nn.Module, bool]:
        model = frozen_first(7)
        site.prepare(model, optimizer := sgd(model), frozen="shared")
        meet()
        steps(site, model, optimizer, 4)
        still = torch.equal(first_layer(model), first_layer(frozen_first(7)))
        model[0].requires_grad_(True)
        model[2].requires_grad_(False)
        steps(site, model, optimizer, 4)
        site.leave()
        return model.requires_grad_(True), still

    results, global_model = run_sites(UPDATES, script)
    for model, still in results.values():
        assert still
        assert not torch.equal(first_layer(model), first_layer(frozen_first(7)))
        assert torch.equal(flat(model), global_model)


def test_freezing_and_second_optimizers_where_gradients_are_shared() -> None:
    def freezes(site: Site, meet: Meet) -> None:
        model = network()
        site.prepare(model, optimizer := sgd(model))
        steps(site, model, optimizer, 2)
        model[0].requires_grad_(False)
        steps(site, model, optimizer, 1)

    def two(site: Site, meet: Meet) -> None:
        model = network()
        site.prepare(model, sgd(model[0]))

    def shared(site: Site, meet: Meet) -> None:
        model = frozen_first(7)
        site.prepare(model, sgd(model), frozen="shared")

    for script, why in (
        (freezes, "0.weight was trained when the site was prepared and is frozen now"),
        (two, "2.weight is trained by another optimizer"),
        (shared, 'frozen="shared" would let weight decay'),
    ):
        with pytest.raises(StrategyError, match=why):
            run_sites("baseline", script, "east")
    with pytest.raises(StrategyError, match='it is "same", "local" or "shared"'):
        join("127.0.0.1:1", site="east", insecure=True).prepare(network(), sgd(network()), frozen="some")


def test_a_switch_of_the_optimizer_where_gradients_are_shared() -> None:
    def script(site: Site, meet: Meet) -> None:
        model = network()
        site.prepare(model, optimizer := AdamW(model.parameters(), lr=0.01))
        for step in range(3):
            backward(model, site.name, step)
            optimizer.param_groups[0]["amsgrad"] = step > 0
            optimizer.step()

    with pytest.raises(StrategyError, match=r"groups or switches of the optimizer are not those"):
        run_sites("baseline", script, "east")


@pytest.mark.parametrize("strategy", ["baseline", UPDATES])
def test_a_site_that_leaves_before_its_first_step(strategy: str) -> None:
    def script(site: Site, meet: Meet) -> nn.Module:
        model = network()
        site.prepare(model, sgd(model))
        site.leave()
        return model

    results, global_model = run_sites(strategy, script, "east")
    assert torch.equal(flat(results["east"]), global_model)
    assert torch.equal(global_model, flat(network()))


def test_two_optimizers_of_one_model_where_updates_are_shared() -> None:
    def script(site: Site, meet: Meet) -> nn.Module:
        model = network()
        first, last = sgd(model[0]), AdamW(model[2].parameters(), lr=0.01)
        site.prepare(model, last)
        meet()
        for step in range(STEPS):
            model.zero_grad()
            backward(model, site.name, step)
            first.step()
            last.step()
        site.leave()
        return model

    results, global_model = run_sites(UPDATES, script)
    assert all(torch.equal(flat(model), global_model) for model in results.values())
    began = flat(network())
    assert (global_model != began)[:100].all(), "the parameters of the first optimizer have moved, too"
    model = network()
    with pytest.raises(StrategyError, match=r"2\.weight is trained by another optimizer, which may step before"):
        check_averaged(trainable(model), [sgd(model[0])])
