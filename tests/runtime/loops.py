"""The loops that people write, with the five lines in them.

Run as a script, this file is one worker: `torchrun tests/runtime/loops.py CASE --server ... --site ... --out ...`.
"""

from __future__ import annotations

import argparse
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import weightgrad as wg
from weightgrad.errors import StrategyError

STEPS, MIDDLE = 6, 4
LIMIT = 600.0  # seconds for a whole run; a few are enough when the machine has nothing else to do


def batch(place: str, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """What a worker sees in a step."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{place} {step} {part}".encode()))
    x = torch.randn(8, 6, generator=draw)
    return x, (x.sum(1) > 0).long()


class Loop:
    """A model, an optimizer, and a backward pass. The reference uses the same."""

    def __init__(self, site: str = "east", rank: int = 0) -> None:
        torch.manual_seed(1)
        self.site, self.rank = site, rank
        self.prepare: dict[str, Any] = {}
        self.model = self.build()
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02, weight_decay=0.01)
        self.schedule: torch.optim.lr_scheduler.LRScheduler | None = None

    def build(self) -> nn.Sequential:
        """A small network."""
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def backward(self, place: str, step: int) -> None:
        """Leave the gradients of that worker's step."""
        x, y = batch(place, step)
        functional.cross_entropy(self.model(x), y).backward()

    def step(self) -> None:
        """What follows backward in everybody's script."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()


class Habits(Loop):
    """A scheduler, two rates, gradients of three passes, and clipping."""

    def __init__(self, site: str = "east", rank: int = 0) -> None:
        super().__init__(site, rank)
        first, _, last = self.model
        groups: list[dict[str, Any]] = [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.01}]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)

    def backward(self, place: str, step: int) -> None:
        for part in range(3):
            x, y = batch(place, step, part)
            (functional.cross_entropy(self.model(x), y) / 3).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        assert norm > 0.1, "nothing was clipped, nothing is tested"


class Autocast(Loop):
    """Forward in bfloat16, parameters in float32."""

    def backward(self, place: str, step: int) -> None:
        x, y = batch(place, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = self.model(x)
        assert scores.dtype == torch.bfloat16
        functional.cross_entropy(scores.float(), y).backward()


class Frozen(Loop):
    """The first layer is given to the optimizer, weight decay and all, but is not trained."""

    def build(self) -> nn.Sequential:
        model = super().build()
        model[0].requires_grad_(False)
        return model


class Tied(Loop):
    """The last layer has the first one's weights."""

    def build(self) -> nn.Sequential:
        first, last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        last.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), last)


class Normed(Loop):
    """Batch norm is the first to see the data, so that what it should remember is known. West's are its ranks' own."""

    def build(self) -> nn.Sequential:
        self.prepare = {"buffers": "site" if self.site == "east" else "local"}
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))


class Deep(Loop):
    """A matrix between the first and the last, which a strategy may quantize, and batch norm."""

    def build(self) -> nn.Sequential:
        return deep()


def deep() -> nn.Sequential:
    """The network of `Deep`."""
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )


class Staged(Loop):
    """Cut by layers: the second rank has more of them, and the only buffers. Layers keep their names."""

    def build(self) -> nn.Sequential:
        self.prepare = {"stages": True}
        if self.rank == 0:
            return nn.Sequential(OrderedDict({"0": nn.Linear(6, 2)}))
        return nn.Sequential(OrderedDict({"1": nn.BatchNorm1d(6), "2": nn.Linear(6, 4), "3": nn.Linear(4, 2)}))


class Renamed(Loop):
    """Cut by layers, and every rank counts its own from 0."""

    def build(self) -> nn.Sequential:
        self.prepare = {"stages": True}
        return nn.Sequential(nn.Linear(6, 2))


class Larger(Loop):
    """Another model than the others have."""

    def build(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


class Other(Loop):
    """The same model, another strategy."""

    def build(self) -> nn.Sequential:
        self.prepare = {"strategy": "diloco", "every": 3}
        return super().build()


class Failing(Loop):
    """Raises in the middle of training, on every rank."""

    def backward(self, place: str, step: int) -> None:
        if step == MIDDLE:
            raise RuntimeError("the disk of the data is gone")
        super().backward(place, step)


class Stranger(Loop):
    """Every worker begins with weights of its own."""

    def build(self) -> nn.Sequential:
        torch.manual_seed(zlib.crc32(f"{self.site} {self.rank}".encode()))
        return super().build()


class Cycled(Loop):
    """A schedule that changes more than the rate, which nobody tells the other replicas."""

    def __init__(self, site: str = "east", rank: int = 0) -> None:
        super().__init__(site, rank)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=STEPS)


class Closure(Loop):
    """The backward pass inside the step."""

    def __init__(self, site: str = "east", rank: int = 0) -> None:
        super().__init__(site, rank)
        self.waits: tuple[str, int] | None = None

    def backward(self, place: str, step: int) -> None:
        self.waits = (place, step)

    def step(self) -> None:
        assert self.waits is not None
        place, step = self.waits

        def closure() -> float:
            self.optimizer.zero_grad()
            super(Closure, self).backward(place, step)
            return 0.5

        assert self.optimizer.step(closure) == 0.5


class Scaled(Loop):
    """A scaler that finds an infinity on one rank of one site, in the middle of training. Layers are saved alone."""

    def __init__(self, site: str = "east", rank: int = 0) -> None:
        super().__init__(site, rank)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
        self.skipped = False

    def backward(self, place: str, step: int) -> None:
        x, y = batch(place, step)
        self.scaler.scale(functional.cross_entropy(self.model(x), y)).backward()
        if (self.site, self.rank, step) == ("east", 1, MIDDLE):
            spoiled = next(self.model.parameters()).grad
            assert spoiled is not None
            spoiled[0, 0] = float("inf")

    def step(self) -> None:
        first = next(self.model.parameters())
        before = first.detach().clone()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.skipped |= torch.equal(before, first)
        for tensor in self.model[2].state_dict().values():
            assert tensor.untyped_storage().nbytes() == 4 * tensor.numel(), "it would be saved with all other layers"


KINDS = (
    Loop, Habits, Autocast, Frozen, Tied, Normed, Deep, Staged, Renamed, Larger, Other, Failing, Stranger, Cycled,
    Closure, Scaled,
)  # fmt: skip
LOOPS = {kind.__name__.lower(): kind for kind in KINDS}


def worker() -> None:
    """One worker of one site."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=LOOPS)
    parser.add_argument("--server")
    parser.add_argument("--site")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensors: dict[str, Tensor] = {}
    with wg.join(args.server, site=args.site, insecure=True, timeout=LIMIT) as site:
        loop = LOOPS[args.case](args.site, site.group.rank)
        model, optimizer = site.prepare(loop.model, loop.optimizer, **loop.prepare)
        assert model is loop.model
        assert optimizer is loop.optimizer
        for step in range(STEPS):
            loop.backward(f"{args.site} {site.group.rank}", step)
            loop.step()
            if step + 1 == MIDDLE:
                tensors |= {f"middle.{name}": buffer.clone() for name, buffer in model.named_buffers()}
    if isinstance(loop, Scaled):
        print(f"skipped: {loop.skipped}, steps: {site.steps}")
    if isinstance(loop, Tied):
        assert model[0].weight is model[2].weight
    tensors |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, str(args.out / f"{args.site}-{site.group.rank}.safetensors"))
    loop.backward(args.site, STEPS)
    try:
        optimizer.step()
    except StrategyError as error:
        print(f"after leave: {error}")
    same = all(torch.equal(tensor, tensors[name]) for name, tensor in model.named_parameters())
    print("nothing moved" if same else "it trained alone")


if __name__ == "__main__":
    worker()
