"""Several optimizers where sites share gradients: two real sites over gRPC against plain PyTorch."""

from __future__ import annotations

import threading
from copy import deepcopy as copy_of
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.errors import RefusedError, StrategyError
from weightgrad.lab.run.deployment import run_config
from weightgrad.runtime.join import join
from weightgrad.runtime.session import Site

from .deployment import Hub, tiny
from .user_sites import NAMES, Meet, UserScript, flat, run_sites, seeded, served

STEPS = 6


class Gan:
    """A generator with Adam, a discriminator with SGD and momentum, whose learning rate a schedule changes."""

    def __init__(self) -> None:
        with seeded(5):
            self.g = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
            self.d = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        self.og: torch.optim.Optimizer = torch.optim.Adam(self.g.parameters(), lr=0.01, betas=(0.5, 0.99))
        self.od = torch.optim.SGD(self.d.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.od, 2, gamma=0.5)

    def noise(self, name: str, step: int) -> Tensor:
        return torch.randn(16, 4, generator=torch.Generator().manual_seed(100 * NAMES.index(name) + step))

    def d_backward(self, name: str, step: int) -> None:
        noise = self.noise(name, step)
        real = noise[:, :2] * 0.1 + torch.tensor([2.0, -1.0])
        (functional.softplus(-self.d(real)) + functional.softplus(self.d(self.g(noise).detach()))).mean().backward()

    def g_backward(self, name: str, step: int) -> None:
        """Leaves gradients in the discriminator, too, as in everybody's script."""
        functional.softplus(-self.d(self.g(self.noise(name, step)))).mean().backward()

    @property
    def vector(self) -> Tensor:
        return flat(nn.ModuleList((self.g, self.d)))


def reference(order: str = "dg") -> Tensor:
    """Each optimizer on the mean of the sites' gradients, one after the other."""
    gan = Gan()
    for step in range(STEPS):
        for which in order:
            model, optimizer, backward = (
                (gan.d, gan.od, gan.d_backward) if which == "d" else (gan.g, gan.og, gan.g_backward)
            )
            found = []
            for name in NAMES:
                optimizer.zero_grad()
                backward(name, step)
                found.append([parameter.grad for parameter in model.parameters()])
            for parameter, *gradients in zip(model.parameters(), *found, strict=True):
                parameter.grad = torch.stack([one for one in gradients if one is not None]).mean(0)
            optimizer.step()
        gan.schedule.step()
    return gan.vector


def train(gan: Gan, name: str, order: str = "dg", steps: int = STEPS) -> None:
    for step in range(steps):
        for which in order:
            optimizer, other = (gan.od, gan.g) if which == "d" else (gan.og, gan.d)
            other.requires_grad_(False)  # as Lightning's toggle_optimizer does
            optimizer.zero_grad()
            gan.d_backward(name, step) if which == "d" else gan.g_backward(name, step)
            optimizer.step()
            other.requires_grad_(True)
        gan.schedule.step()


@pytest.mark.parametrize("order", ["dg", "ddg"])
def test_alternating_steps_are_those_of_plain_pytorch(order: str) -> None:
    def script(site: Site, meet: Meet) -> tuple[int, int, Tensor]:
        gan = Gan()
        site.prepare({"g": gan.g, "d": gan.d}, {"g": gan.og, "d": gan.od})
        meet()
        train(gan, site.name, order)
        site.leave()
        return site.steps, int(site.stats()["up_bytes"]), gan.vector

    results, _ = run_sites("baseline", script)
    (steps, up_bytes, east), (_, _, west) = results.values()
    assert torch.equal(east, west)
    assert torch.allclose(east, reference(order), atol=1e-5)
    assert steps == STEPS * len(order), "a step of each optimizer is a step of the site"
    # Float32 values of what stepped, and of nothing else; the rest are headers.
    gan = Gan()
    stepped = STEPS * sum(p.numel() for which in order for p in (gan.d if which == "d" else gan.g).parameters())
    whole = STEPS * len(order) * gan.vector.numel()
    assert 4 * stepped < up_bytes < 4 * whole


def test_both_losses_before_both_steps() -> None:
    """A step of one optimizer leaves the gradients that are there for the other."""

    def once(gan: Gan, name: str, step: int) -> None:
        gan.g_backward(name, step)
        gan.od.zero_grad()
        gan.d_backward(name, step)

    def script(site: Site, meet: Meet) -> Tensor:
        gan = Gan()
        site.prepare([gan.g, gan.d], [gan.og, gan.od])
        meet()
        for step in range(STEPS):
            gan.og.zero_grad()
            once(gan, site.name, step)
            gan.od.step()
            gan.og.step()
        site.leave()
        return gan.vector

    gan = Gan()
    for step in range(STEPS):
        found = []
        for name in NAMES:
            gan.og.zero_grad()
            gan.od.zero_grad()
            once(gan, name, step)
            found.append([p.grad for p in (*gan.g.parameters(), *gan.d.parameters())])
        for parameter, *gradients in zip((*gan.g.parameters(), *gan.d.parameters()), *found, strict=True):
            parameter.grad = torch.stack([one for one in gradients if one is not None]).mean(0)
        gan.od.step()
        gan.og.step()
    results, _ = run_sites("baseline", script)
    for vector in results.values():
        assert torch.allclose(vector, gan.vector, atol=1e-5)


@pytest.mark.parametrize("strategy", ["qsgd", "terngrad", "dgc", "powersgd"])
def test_sites_stay_the_same(strategy: str) -> None:
    def script(site: Site, meet: Meet) -> Tensor:
        gan = Gan()
        site.prepare({"g": gan.g, "d": gan.d}, {"g": gan.og, "d": gan.od})
        meet()
        train(gan, site.name)
        site.leave()
        return gan.vector

    results, last = run_sites(strategy, script)
    east, west = results.values()
    assert torch.equal(east, west)
    assert torch.isfinite(east).all()
    assert not torch.equal(east[: last.numel() // 2], Gan().vector[: last.numel() // 2])


def test_a_late_site_takes_all_steps_again() -> None:
    def script(steps: int) -> Any:
        def run(site: Site, meet: Meet) -> Tensor:
            gan = Gan()
            if site.name == "west":
                with torch.no_grad():
                    for parameter in gan.g.parameters():
                        parameter.zero_()  # so that it needs the first model, too
            site.prepare({"g": gan.g, "d": gan.d}, {"g": gan.og, "d": gan.od})
            meet()
            train(gan, site.name, steps=steps)
            site.leave()
            return gan.vector

        return run

    config = run_config(tiny("{name: baseline, t_global: 0.2}", workers=1))
    with Hub(replace(config, sites=NAMES)) as hub:  # the first round does not wait long for west
        east = UserScript(hub.address, "east", script(2))
        hub.until(lambda: not east.is_alive())
        west = UserScript(hub.address, "west", script(0))
        hub.until(lambda: not west.is_alive())
        assert torch.equal(east.end(), west.end())


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("onebit", "correction is a momentum of all gradients"),
        ("baseline, every: 2", "not every step has a round"),
        ("baseline, consistency: bounded(1)", "sites may be at steps of different ones"),
        ("ahead", "steps with its own gradients first"),
    ],
)
def test_strategies_that_do_not_fit_are_refused(strategy: str, why: str) -> None:
    def script(site: Site, meet: Meet) -> None:
        gan = Gan()
        site.prepare({"g": gan.g, "d": gan.d}, {"g": gan.og, "d": gan.od})

    with served(strategy, "east") as hub, pytest.raises(StrategyError, match=f"2 optimizers.*{why}"):
        UserScript(hub.address, "east", script).end()


def test_sites_with_other_optimizers_are_refused() -> None:
    told = threading.Event()

    def script(site: Site, meet: Meet) -> None:
        gan = Gan()
        if site.name == "west":
            gan.og = torch.optim.SGD(gan.g.parameters(), lr=0.1, momentum=0.9)
        site.prepare({"g": gan.g, "d": gan.d}, {"g": gan.og, "d": gan.od})
        told.wait()
        raise KeyboardInterrupt

    with served("baseline") as hub:
        east = UserScript(hub.address, "east", script)
        hub.until(lambda: east.site.strategy is not None)
        west = UserScript(hub.address, "west", script)
        hub.until(lambda: not west.is_alive())
        told.set()
        hub.until(lambda: not east.is_alive())
        with pytest.raises(RefusedError, match=r"it is SGD\+SGD, the others have Adam\+SGD"):
            west.end()


def test_two_calls_with_names() -> None:
    def script(site: Site, meet: Meet) -> tuple[int, Tensor]:
        gan = Gan()
        if site.name == "west":
            with torch.no_grad():
                next(gan.g.parameters()).zero_()  # replaced by the global model before anything is computed
        assert site.prepare(gan.g, gan.og, name="g") == (gan.g, gan.og)
        site.prepare(gan.d, gan.od, name="d")
        if site.name == "west":
            site.enter()
            with pytest.raises(StrategyError, match="prepared already"):
                site.prepare(nn.Linear(1, 1), gan.og, name="third")
        else:
            copy = copy_of(gan.g)
            copy(gan.noise("east", 0))  # is no model of the site
            assert site.strategy is None
            gan.g[0](gan.noise("east", 0))  # a part of one is enough
            assert site.strategy is not None
        meet()
        train(gan, site.name)
        meet()
        site.leave()
        return site.steps, gan.vector

    (steps, east), (_, west) = run_sites("baseline", script)[0].values()
    assert steps == 2 * STEPS
    assert torch.equal(east, west)
    results, last = run_sites("diloco, every: 2", script)
    for steps, vector in results.values():
        assert steps == STEPS, "where updates are shared, a pair of steps is one"
        assert torch.equal(vector, last)


def test_calls_with_names_that_do_not_fit() -> None:
    site = join("127.0.0.1:1", site="east", insecure=True)
    gan = Gan()
    site.prepare(gan.g, gan.og, name="g", samples=3)
    with pytest.raises(StrategyError, match="named 'g' twice"):
        site.prepare(gan.d, gan.od, name="g")
    with pytest.raises(StrategyError, match="samples=4, and that of 'g' has samples=3"):
        site.prepare(gan.d, gan.od, name="d", samples=4)
    with pytest.raises(StrategyError, match="give this one a name"):
        site.prepare(gan.d, gan.od)
    with pytest.raises(StrategyError, match=r"Call site\.enter\(\) after the last prepare"):
        gan.og.step()
    site.leave()
    gan.og.step()
    gan.g(torch.zeros(1, 4))


@pytest.mark.parametrize("strategy", ["baseline", "diloco, every: 2"])
def test_an_optimizer_that_was_not_prepared_is_refused(strategy: str) -> None:
    def script(site: Site, meet: Meet) -> None:
        gan = Gan()
        site.prepare(gan.g, gan.og)
        again = torch.optim.Adam(gan.g.parameters(), lr=0.1)
        gan.od.step()  # of another model, which is nobody's business
        with pytest.raises(StrategyError, match="Adam steps parameters, and is an optimizer that prepare"):
            again.step()
        site.leave()
        again.step()

    with served(strategy, "east") as hub:
        script_of = UserScript(hub.address, "east", script)
        hub.until(lambda: not script_of.is_alive())
        script_of.end()
