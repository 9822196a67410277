"""What scripts do beside their steps: torch's defaults, weights that they write to, other optimizers, Ctrl-C."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from weightgrad.errors import RefusedError, StrategyError
from weightgrad.runtime.join import join
from weightgrad.runtime.model.named_parameter import trainable
from weightgrad.runtime.model.weight_watch import FIRST_STEPS
from weightgrad.runtime.session import Site
from weightgrad.runtime.site.named_models import stepping_optimizers

from .user_sites import NAMES, STEPS, Meet, Script, backward, batch, flat, network, reference, run_sites, seeded, served

UPDATES = "diloco, every: 2"
EVERY_STEP = "diloco, every: 1"

# -- torch's defaults ---------------------------------------------------------------------------------------


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trains(device: str | None = None) -> Script:
    """Eight steps on a model and data that were made before."""
    models = {name: network() for name in NAMES}
    batches = {name: [batch(name, step) for step in range(STEPS)] for name in NAMES}

    def script(site: Site, meet: Meet) -> Tensor:
        torch.set_default_device(device)
        model = models[site.name]
        optimizer = Adam(model.parameters(), lr=0.02)
        site.prepare(model, optimizer)
        meet()
        for x, y in batches[site.name]:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        site.leave()
        torch.set_default_device(None)
        return flat(model)

    return script


@pytest.mark.parametrize(
    "strategy", ["baseline", "qsgd", "onebit", "dgc", "weightgrad", "sparseloco", "ahead", UPDATES]
)
def test_defaults_of_torch_change_no_bit(strategy: str) -> None:
    """`set_default_dtype` is of the process, `set_default_device` of a thread: "meta" has no values at all."""
    sites, server = run_sites(strategy, trains())
    assert torch.equal(sites["east"], sites["west"])
    script = trains()
    with default_type(torch.float64):
        others, other_server = run_sites(strategy, script)
    assert torch.equal(others["west"], sites["west"])
    assert torch.equal(other_server, server)
    elsewhere, _ = run_sites(strategy, trains("meta"))
    assert torch.equal(elsewhere["west"], sites["west"])


# -- weights that a script writes to ------------------------------------------------------------------------


class Rows(nn.Module):
    """Rows of an embedding, which torch shortens in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.rows = nn.Embedding(16, 6, max_norm=0.5)
            self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.rows((x[:, 0].abs() * 8).long() % 16))
        return scores


def clips(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


def nothing(model: nn.Module) -> None:
    del model


def writing(rule: Any, made: Any) -> Script:
    def script(site: Site, meet: Meet) -> Tensor:
        model = made()
        optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
        site.prepare(model, optimizer)
        meet()
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, site.name, step)
            optimizer.step()
            rule(model)
        site.leave()
        return flat(model)

    return script


@pytest.mark.parametrize(("rule", "made", "name"), [(clips, network, "0.weight"), (nothing, Rows, "rows.weight")])
def test_weights_that_are_written_between_steps(rule: Any, made: Any, name: str) -> None:
    """Shared gradients: refused, since no other replica has them. Shared updates: they are a part of the update."""
    with pytest.raises(StrategyError, match=rf"{name} is not what the last optimizer\.step\(\) has left"):
        run_sites("baseline", writing(rule, made))
    sites, server = run_sites(EVERY_STEP, writing(rule, made))
    assert torch.equal(sites["east"], sites["west"])
    assert torch.equal(sites["east"], server)


def test_weights_that_are_written_after_the_last_step_are_noticed_by_leave() -> None:
    def script(site: Site, meet: Meet) -> None:
        model = network()
        optimizer = SGD(model.parameters(), lr=0.1)
        site.prepare(model, optimizer)
        meet()
        for step in range(FIRST_STEPS + 2):
            optimizer.zero_grad()
            backward(model, site.name, step)
            optimizer.step()
        clips(model)
        with pytest.raises(StrategyError, match=r"something has written to it since.*parametrize"):
            site.leave()

    run_sites("baseline", script)


def test_a_teacher_inside_the_model_stays_the_sites_own_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A moving average of the student, in parameters that are frozen: each site would have another without a word."""

    def script(site: Site, meet: Meet) -> Tensor:
        model = nn.ModuleDict({"student": network(), "teacher": network().requires_grad_(False)})
        optimizer = SGD(model["student"].parameters(), lr=0.1)
        site.prepare(model, optimizer)
        meet()
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model["student"], site.name, step)
            optimizer.step()
            for average, value in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                average.lerp_(value.detach(), 0.5)
        site.leave()
        return torch.cat([p.detach().flatten() for p in model["teacher"].parameters()])

    with caplog.at_level(logging.WARNING, "weightgrad"):
        teachers, _ = run_sites(UPDATES, script)
    assert not torch.equal(teachers["east"], teachers["west"])
    for name in NAMES:
        assert f"{name}: teacher.0.weight takes no part and has changed since prepare() (4 such" in caplog.text


# -- another optimizer later ---------------------------------------------------------------------------------


def test_a_site_comes_back_with_another_optimizer() -> None:
    """SGD after Adam: `leave`, `join` and `prepare` where updates are shared, as the refusal says."""

    def script(site: Site, meet: Meet) -> Tensor:
        model = network()
        site.prepare(model, first := Adam(model.parameters(), lr=0.02))
        meet()
        for step in range(4):
            first.zero_grad()
            backward(model, site.name, step)
            first.step()
        second = SGD(model.parameters(), lr=0.05, momentum=0.9)
        backward(model, site.name, 4)
        with pytest.raises(StrategyError, match=r"SGD steps parameters.*another optimizer, leave\(\), join again"):
            second.step()
        site.leave()
        meet()
        again = join(site._options.address, site=site.name, insecure=True)
        before = flat(model).clone()
        again.prepare(model, second)
        meet()
        for step in range(4, STEPS):
            second.zero_grad()
            backward(model, site.name, step)
            second.step()
        again.leave()
        assert not torch.equal(flat(model), before)
        return flat(model)

    sites, server = run_sites(UPDATES, script)
    assert torch.equal(sites["east"], sites["west"])
    assert torch.equal(sites["east"], server)


def test_another_optimizer_where_gradients_are_shared_is_refused_with_what_to_do() -> None:
    with served("baseline", "east") as hub:
        model = network()
        site = join(hub.address, site="east", insecure=True)
        site.prepare(model, first := Adam(model.parameters(), lr=0.02))
        backward(model, "east", 0)
        first.step()
        with pytest.raises(StrategyError, match="take a strategy that shares updates, such as diloco: baseline shares"):
            SGD(model.parameters(), lr=0.05).step()
        site.leave()
        again = join(hub.address, site="east", insecure=True)
        with pytest.raises(RefusedError, match=r"it is SGD, the others have Adam.*begin a run of its own"):
            again.prepare(model, SGD(model.parameters(), lr=0.05))
        again._abandon()
    with pytest.raises(StrategyError, match="first with one and then with another, give prepare\\(\\) the first"):
        stepping_optimizers([first, SGD(model.parameters(), lr=0.05)])


# -- Ctrl-C in the middle of a step --------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["baseline", EVERY_STEP])
def test_a_step_that_is_interrupted_in_the_middle(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    """The script catches it and leaves: it used to wait for a round of which nobody knew, and all others with it."""

    def script(site: Site, meet: Meet) -> int:
        model = network()
        optimizer = SGD(model.parameters(), lr=0.1)
        site.prepare(model, optimizer)
        meet()
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, site.name, step)
            if (site.name, step) == ("west", 4):
                interrupt(site)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                with pytest.raises(StrategyError, match=r"has ended in the middle.*leave\(\), join again"):
                    optimizer.step()
                break
            optimizer.step()
        done = site.steps
        site.leave()
        return done

    with caplog.at_level(logging.INFO, "weightgrad"):
        done, _ = run_sites(strategy, script)
    assert done["east"] == STEPS
    assert "west leaves with the weights that it has: a step has ended in the middle" in caplog.text
    assert "has sent nothing for too long" not in caplog.text


def interrupt(site: Site) -> None:
    """Let the next round of a site be interrupted, when its push is made and before anything is sent."""
    assert site._training is not None
    leader = site._training.leader
    assert leader is not None

    def pushed(*_: Any) -> None:
        raise KeyboardInterrupt

    leader._push = pushed  # type: ignore[assignment]


# -- parameters without values -------------------------------------------------------------------------------


def test_parameters_without_values_are_refused_with_what_to_do() -> None:
    with pytest.raises(StrategyError, match=r"has no shape yet.*pass a batch through the model before prepare"):
        trainable(nn.Sequential(nn.LazyLinear(2)))
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(StrategyError, match=r"weight is on the meta device.*to_empty\(\)"):
        trainable(empty)
    waves = nn.ParameterDict({"waves": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    with pytest.raises(StrategyError, match=r"complex64.*torch.view_as_real"):
        trainable(waves)
    ready = copy.deepcopy(nn.Sequential(nn.LazyLinear(2)))
    ready(torch.zeros(1, 3))
    assert [one.shape for one in trainable(ready)] == [(2, 3), (2,)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_a_model_in_torchscript_takes_the_steps_of_the_model_it_was_made_of() -> None:
    def script(site: Site, meet: Meet) -> Tensor:
        model: Any = network()
        model = torch.jit.script(model) if site.name == "west" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        site.prepare(model, optimizer)
        meet()
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, site.name, step)
            optimizer.step()
        site.leave()
        return flat(model)

    results, global_model = run_sites("baseline", script)
    assert all(torch.equal(vector, global_model) for vector in results.values())
    model = network()
    assert torch.allclose(global_model, reference(model, torch.optim.SGD(model.parameters(), lr=0.1)), atol=1e-6)
