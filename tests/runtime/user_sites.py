"""Two sites of one rank each that run a user's script in threads of this process, over gRPC on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.lab.run.deployment import run_config
from weightgrad.runtime.join import join
from weightgrad.runtime.session import Site

from .deployment import PATIENCE_S, Hub, tiny

_SEEDING = threading.Lock()
STEPS = 8
NAMES = ("east", "west")

Meet = Callable[[], object]
Script = Callable[[Site, Meet], Any]


class UserScript(threading.Thread):
    """A user's script with the five lines in it. What it returns, or raises, is kept.

    It is called with the site and with `meet`, which waits until all sites have come so far: after `prepare`, so that
    none takes steps before the others have joined.
    """

    def __init__(self, address: str, name: str, script: Script, meet: Meet = lambda: None, **options: Any) -> None:
        super().__init__(daemon=True, name=name)
        self.site = join(address, site=name, insecure=True, **options)
        self._script, self._meet = script, meet
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with self.site as site:
                self.result = self._script(site, self._meet)
        except BaseException as error:  # whatever a user's script may raise is for the test to look at
            self.error = error

    def end(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def served(strategy: str, *names: str) -> Hub:
    """A server with a strategy, such as "diloco, every: 2", for these sites: the first round waits for all of them."""
    config = run_config(tiny(f"{{name: {strategy}, t_global: 600}}", workers=1))
    return Hub(replace(config, sites=names or NAMES))


def run_sites(strategy: str, script: Script, *names: str) -> tuple[dict[str, Any], Tensor]:
    """Run a script at each site, to the end; what they return, and the global model that the server ends with."""
    names = names or NAMES
    meeting = threading.Barrier(len(names), timeout=PATIENCE_S)
    with served(strategy, *names) as hub:
        threads = [UserScript(hub.address, name, script, meeting.wait) for name in names]
        while any(thread.is_alive() for thread in threads):
            for error in (thread.error for thread in threads):
                if error is not None:
                    meeting.abort()  # nobody is to wait for a site that has failed
                    raise error
            hub.tick()
        results = {thread.name: thread.end() for thread in threads}
        hub.until(lambda: all(not member.live for member in hub.core.members.by_name.values()))
        return results, hub.global_model.vector.clone()


def flat(model: nn.Module) -> Tensor:
    """All trained parameters in one vector."""
    return torch.cat([p.detach().float().flatten() for p in model.parameters() if p.requires_grad])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A seed for torch's own generator, which all threads share."""
    with _SEEDING, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def network(seed: int = 1) -> nn.Sequential:
    """A small classifier."""
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def batch(name: str, step: int) -> tuple[Tensor, Tensor]:
    """What a site sees in a step."""
    draw = torch.Generator().manual_seed(1000 * NAMES.index(name) + step)
    x = torch.randn(8, 6, generator=draw)
    return x, (x.sum(1) > 0).long()


def backward(model: nn.Module, name: str, step: int) -> Tensor:
    """Leave the gradients of a site's step."""
    x, y = batch(name, step)
    loss = functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)
    loss.backward()
    return loss.detach()


def reference(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = STEPS, names: tuple[str, ...] = NAMES
) -> Tensor:
    """Plain PyTorch: one optimizer on the mean of the sites' gradients."""
    for step in range(steps):
        found = []
        for name in names:
            model.zero_grad()
            backward(model, name, step)
            found.append([p.grad for p in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *found, strict=True):
            parameter.grad = torch.stack([one for one in gradients if one is not None]).mean(0)
        optimizer.step()
    return flat(model)
