"""A rank of a site whose memory is measured, beside that of the global server. It writes `SITE-RANK.json`.

    python -m deployment.memory_process '{"address": ...}'        alone or under torchrun

It trains a plain loop first, and then the same loop as a rank of a site. Memory is what the second has more than the
first: `kept` at the ends of steps, and the peak of each phase: join, train, leave.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from deployment.distance import pretend_distance
from deployment.held_memory import held_bytes
from deployment.server_process import forget_peak, memory, peak_memory
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weightgrad as wg
from weightgrad.errors import RunError
from weightgrad.lab.bench.allocations import Allocations
from weightgrad.runtime.model.sharded_tensor import flat_local
from weightgrad.wire.messages import Segment

LAYERS, BATCH, PLAIN_STEPS = 16, 8, 3
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


class Gauge:
    """Resident and counted memory of one process, and their peaks since the last phase began."""

    def __init__(self, pid: int | None, directory: Path) -> None:
        self._pid = pid if pid is not None else "self"
        self._counted: Allocations | None = None
        with suppress(RunError):
            self._counted = Allocations(directory, pid)

    def now(self) -> dict[str, int]:
        """Bytes at this moment."""
        return {"rss": memory(self._pid), "counted": self._counted.now if self._counted is not None else 0}

    def next_phase(self) -> dict[str, int]:
        """The peaks so far; they begin anew."""
        found = {
            "rss": peak_memory(self._pid),
            "counted": self._counted.peak if self._counted is not None else 0,
        }
        forget_peak(self._pid)
        if self._counted is not None:
            self._counted.forget_peak()
        return found


def make_model(numel: int, ranks: int, *, sharded: bool) -> nn.Module:
    """Linear layers with about so many weights; sharded over the ranks if that is wanted.

    The weights keep the size of what they are given. With PyTorch's own first weights it would shrink from layer to
    layer, gradients would round to no update at all, and there would be next to nothing to push.
    """
    width = math.isqrt(numel // LAYERS)
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=width**-0.5)
    model = nn.Sequential(*layers)
    if sharded:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _user_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What the user's own loop has: weights and the optimizer's state."""
    states = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    return [flat_local(tensor) for tensor in (*model.parameters(), *states)]


def _record_pushes(site: wg.Site) -> list[int]:
    """A list that gets the bytes of every push of this rank."""
    assert site._training is not None
    connection, found = site._training.connection, []
    send = connection.send_push

    def send_push(round_: int, segments: Iterable[Segment]) -> int:
        found.append(send(round_, segments))
        return found[-1]

    connection.send_push = send_push  # type: ignore[method-assign]
    return found


def main() -> None:
    """Train a plain loop and a joined one, and write what was measured."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    out = Path(settings["out"])
    pretend_distance()
    site = wg.join(settings["address"], site=settings["site"], insecure=True, **settings["join"])
    model = make_model(settings["numel"], site.group.size, sharded=settings["sharded"])
    optimizer = OPTIMIZERS[settings["optimizer"]](model.parameters())
    width = math.isqrt(settings["numel"] // LAYERS)
    x = torch.randn(BATCH, width)

    def step() -> None:
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    own, server = Gauge(None, out), Gauge(settings["server_pid"], out)
    leads = settings["leads"] and site.group.first
    step()
    own.next_phase()
    for _ in range(PLAIN_STEPS):
        step()
    plain, plain_peak = own.now(), own.next_phase()
    found: dict[str, Any] = {"plain": plain, "plain_peak": plain_peak, "kept": [], "server_kept": [], "peaks": {}}
    found["server_before"] = server.now()
    found["parameters"] = sum(p.numel() for p in model.parameters())
    found["server_peaks"] = {}
    if leads:
        server.next_phase()

    def end_phase(name: str) -> None:
        found["peaks"][name] = own.next_phase()
        if leads:
            found["server_peaks"][name] = server.next_phase()

    site.prepare(model, optimizer)
    end_phase("join")
    pushes = _record_pushes(site)
    for _ in range(settings["steps"]):
        step()
        found["kept"].append(own.now())
        if leads:
            found["server_kept"].append(server.now())
        time.sleep(settings["pause"])  # or strategies that do not wait would be ahead of the server
    end_phase("train")
    found["push_bytes"] = sum(pushes) / max(1, len(pushes))
    found["held"] = held_bytes(site, _user_tensors(model, optimizer), least=found["parameters"] // 20)
    site.leave()
    end_phase("leave")
    (out / f"{settings['site']}-{site.group.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
