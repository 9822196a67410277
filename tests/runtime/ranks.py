"""Cases that need several processes of one group. Run as a script, this file is one of them: `ranks.py CASE DIRECTORY`.

`run` starts the processes of a case. What a process finds out for a test it leaves with `leave`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weightgrad.codecs import Fp32
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.layout import Layout
from weightgrad.core.server.result_log import MemoryResultLog
from weightgrad.core.server.shard import ServerShard
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.core.site.shard_orders import PushOrder
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.core.strategies import Strategy, find
from weightgrad.kernels import fixed
from weightgrad.runtime import process_group
from weightgrad.runtime.checkpoints.named_state import NamedState
from weightgrad.runtime.checkpoints.portable_state import PortableState
from weightgrad.runtime.checkpoints.site_checkpoint import SiteCheckpoint
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.runtime.model.named_parameter import NamedParameter, layout_of, trainable
from weightgrad.runtime.model.replicas import Sharding
from weightgrad.runtime.model.trained_model import TrainedModel
from weightgrad.runtime.optimizer.announced import AnnouncedOptimizer
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.server import final_model
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.runtime.site.rank_step import RankStep
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import Segment

LAYOUT = Layout.of_shapes([("a", (5, 6)), ("b", (7,)), ("c", (2, 3, 4)), ("d", ()), ("e", (0, 3))])


def leave(out: Path, **found: Any) -> None:
    """Leave something for the test."""
    torch.save(found, out / f"{dist.get_rank()}-of-{dist.get_world_size()}.pt")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, however it is sharded."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def values_of(layout: Layout) -> Tensor:
    """A value for each element, all different."""
    return torch.arange(float(layout.numel)) + 1


# -- module weights -------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers of uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(x)))
        return found


def net() -> tuple[Net, Layout]:
    """And where its elements lie."""
    model = Net()
    return model, layout_of(trainable(model))


@torch.no_grad()
def fill(model: nn.Module, layout: Layout, values: Tensor) -> None:
    """Give every parameter its elements."""
    for slot, parameter in zip(layout.slots, model.parameters(), strict=True):
        parameter.copy_(slot.of(values))


def check_access(weights: ModuleWeights, layout: Layout) -> None:
    """Reading, writing and adding what this rank has is the same as on the whole vector."""
    held, everything = weights.held, values_of(layout)
    own = torch.cat([everything[start:stop] for start, stop in held.spans]) if held.numel else torch.empty(0)
    assert torch.equal(weights.read(held, torch.empty(held.numel)), own)
    weights.add(held, own)
    assert torch.equal(weights.read(held, torch.empty(held.numel)), 2 * own)
    dense = Segment(0, Fp32().encode(everything, {}, 0)[0])
    weights.add_segment(dense, fixed.SUBTRACT)
    assert torch.equal(weights.read(held, torch.empty(held.numel)), own)
    weights.write(held, 10 * own)


def fsdp2(out: Path) -> None:
    """Rows of each parameter, as `fully_shard` deals them."""
    model, layout = net()
    fill(model, layout, values_of(layout))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    weights = ModuleWeights(trainable(model), layout)
    assert not weights.redistributes
    weights.begin()
    check_access(weights, layout)
    weights.end(changed=True)
    after = torch.cat([whole(parameter).flatten() for parameter in model.parameters()])
    leave(out, held=weights.held.spans, after=after, numel=layout.numel)


def columns(out: Path) -> None:
    """A parameter that is cut by columns, one that is cut by rows, and one that every rank has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = Layout.of_shapes([("columns", (5, 6)), ("rows", (3, 2)), ("all", (4,))])
    everything = values_of(layout)
    placements = (Shard(1), Shard(0), Replicate())
    parameters = [
        NamedParameter(slot.name, nn.Parameter(distribute_tensor(slot.of(everything).clone(), mesh, [place])))
        for slot, place in zip(layout.slots, placements, strict=True)
    ]
    first = ModuleWeights(parameters, layout)
    held = first.held if dist.get_rank() == 0 else first.held - Intervals(((36, 40),))
    weights = ModuleWeights(parameters, layout, held)
    assert weights.redistributes
    in_rows = [weights.redistributed]
    weights.begin()
    in_rows += [weights.redistributed]
    check_access(weights, layout)
    weights.end(changed=False)
    assert torch.equal(whole(parameters[0].parameter), layout.slots[0].of(everything)), "nothing was changed"
    weights.begin()
    own = weights.held & Intervals(((0, 30),))
    weights.write(own, 10 * weights.read(own, torch.empty(30)))
    weights.end(changed=True)
    in_rows += [weights.redistributed]
    assert in_rows == [False, True, False]
    leave(out, held=held.spans, after=whole(parameters[0].parameter), numel=layout.numel)


# -- the checkpoint of a site -----------------------------------------------------------------------


def site_of_ranks(state: Path, seed: int) -> tuple[SiteCheckpoint, TrainedModel, UpdateShard, SiteCoordinator | None]:
    """A site that is sharded by FSDP2 over the ranks of this group, and has taken a step."""
    group = SiteGroup()
    model, layout = net()
    fill(model, layout, values_of(layout) / (seed + 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parameters = trainable(model)
    own = ModuleWeights(parameters, layout).available
    sharding = Sharding.of(own, layout, group, [Intervals.whole(layout.numel)], per_tensor=False)
    weights = ModuleWeights(parameters, layout, sharding.held[group.rank])
    trained = TrainedModel(
        module=model,
        weights=weights,
        layout=layout,
        sharding=sharding,
        optimizer=optimizer,
        announced=AnnouncedOptimizer(optimizer, [one.parameter for one in parameters]),
        buffers=[],
        averages_buffers=False,
        averages_gradients=True,
    )
    strategy = find("sparseloco", {"every": 1})
    plan = strategy.for_site()
    step = RankStep(weights, optimizer, layout, strategy, group, key=1, averaged=True)
    shard = UpdateShard("east", layout, weights, plan.for_shard, key=1)
    coordinator = SiteCoordinator("east", plan, samples=1) if group.first else None
    checkpoint = SiteCheckpoint(state, "east", group, NamedState(group, strategy, 3, trained, step, shard))
    return checkpoint, trained, shard, coordinator


def site_state(trained: TrainedModel, shard: UpdateShard, coordinator: SiteCoordinator | None) -> dict[str, Any]:
    """Everything that a checkpoint must bring back."""
    held = shard.held
    decoded = {}
    for round_, segments in shard.in_flight.items():
        decoded[round_] = torch.zeros(held.numel)
        for one in segments:
            one.into(decoded[round_], fixed.ADD, held)
    residual = shard.residual.vector
    return {
        "held": held.spans,
        "numel": trained.layout.numel,
        "vectors": {
            "global model": shard.global_model.clone(),
            "residual": torch.zeros(held.numel) if residual is None else residual.clone(),
            **{f"in flight {round_}": vector for round_, vector in decoded.items()},
        },
        "weights": {one.name: whole(one.parameter) for one in trained.weights.parameters},
        "optimizer": {
            f"{one.name} {key}": whole(torch.as_tensor(value))
            for one in trained.weights.parameters
            for key, value in trained.optimizer.state[one.parameter].items()
        },
        "progress": None if coordinator is None else (coordinator.version, coordinator.progress.step),
    }


def save(out: Path) -> None:
    """A step, a push that leaves a residual, and a checkpoint."""
    checkpoint, trained, shard, coordinator = site_of_ranks(out / "state", seed=0)
    trained.module(torch.ones(4, 6)).square().sum().backward()
    trained.optimizer.step()
    shard.stepped(None)
    shard.in_flight[2] = shard.push(PushOrder(round=2, step=1), None)
    if coordinator is not None:
        coordinator.progress.version, coordinator.progress.step = 1, 1
    checkpoint.write(1, coordinator)
    checkpoint.wait()
    portable = PortableState.of(checkpoint.state, SiteGroup(), 1, coordinator)
    if coordinator is not None:
        (out / "state" / "portable").write_bytes(portable)
    leave(out, **site_state(trained, shard, coordinator))


def restore(out: Path) -> None:
    """Come back from the checkpoint, with other weights to begin with."""
    checkpoint, trained, shard, coordinator = site_of_ranks(out / "state", seed=9)
    assert checkpoint.restore(coordinator) == 1
    leave(out, **site_state(trained, shard, coordinator))


def restore_portable(out: Path) -> None:
    """Come back from the bytes of `site.state_dict()`, with other weights to begin with."""
    checkpoint, trained, shard, coordinator = site_of_ranks(out / "state", seed=9)
    state = PortableState.read((out / "state" / "portable").read_bytes())
    assert state.version == 1
    assert state.restore(checkpoint.state, coordinator) == 1
    leave(out, **site_state(trained, shard, coordinator))


# -- the final model --------------------------------------------------------------------------------


def served_by(processes: int) -> list[Intervals]:
    """What each process serves: cut in the middle of tensors, and not in order."""
    cuts = [0, 9, 33, 40, LAYOUT.numel]
    spans: list[list[tuple[int, int]]] = [[] for _ in range(processes)]
    for number in range(4):
        spans[(number + 1) % processes].append((cuts[number], cuts[number + 1]))
    return [Intervals.of(own) for own in spans]


def server_shard(served: Intervals) -> ServerShard:
    """Elements of the model of `values_of`."""
    vector = torch.cat([values_of(LAYOUT)[start:stop] for start, stop in served.spans])
    model = GlobalModel(LAYOUT, vector, optimizer=None, rate=lambda step: 0.1, held=served)
    return ServerShard(model, find("diloco").for_server().for_shard, 1, MemoryResultLog(1))


def write_model(out: Path) -> None:
    """All processes write one model in several files."""
    group = ServerGroup()
    final_model.FILE_BYTES = 100
    final_model.write_final_model(out / "model", server_shard(served_by(group.size)[group.number]), group)


# -- the local server ------------------------------------------------------------------------------


SERVER_STEPS = 3
SERVER_STRATEGIES: dict[str, dict[str, Any]] = {
    "weightgrad": {},
    "weightgrad-serial": {},
    "weightgrad-paper": {},
    "weightgrad-serial, plain": {"gradients": "fp32", "weights": "fp32"},
    "weightgrad-paper, corrected": {"gradients": "fp32", "correction": 0.5},
    "qsgd": {},
    "terngrad": {"exchange": "server"},
    "baseline": {},
    "baseline, server": {"exchange": "server"},
    "onebit": {},
}
"""What `local_server` tries: the name of a strategy, and what is changed of it."""


def server_strategy(label: str) -> Strategy:
    """One of them, with an optimizer that has momentum."""
    return find(label.split(",", maxsplit=1)[0], SERVER_STRATEGIES[label])


def server_gradient(layout: Layout, worker: int, step: int) -> Tensor:
    """What a worker's backward pass leaves."""
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(100 * worker + step))


def local_server(out: Path) -> None:
    """Steps of a site whose ranks exchange gradients and weights; what each rank has after every step, and sent."""
    group, found = SiteGroup(), {}
    for label in SERVER_STRATEGIES:
        torch.manual_seed(0)
        model, layout = net()
        weights = ModuleWeights(trainable(model), layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        before = group.sent_bytes
        one = RankStep(weights, optimizer, layout, server_strategy(label), group, 7, clip_norm=3.0)
        one.for_passes()
        seen = [layout.gather(model)]
        for step in range(SERVER_STEPS):
            own = server_gradient(layout, group.rank, step)
            for slot, parameter in zip(layout.slots, model.parameters(), strict=True):
                parameter.grad = slot.of(own).clone()
            one.before(step)
            optimizer.step()
            one.after()
            one.for_passes()
            seen.append(layout.gather(model))
        kept = [slot.name for slot in layout.slots if one.keeps(slot.name)]
        states = [name for name, parameter in model.named_parameters() if optimizer.state.get(parameter)]
        found[label] = {"seen": seen, "sent": group.sent_bytes - before, "kept": kept, "states": states}
    leave(out, **found)


def passed_on(out: Path) -> None:
    """Bytes of all ranks for all ranks, in pieces; one rank has most of them, and one none."""
    process_group._PASSED_BYTES = 100
    group = SiteGroup()
    sizes = [0, 1234, 100, 7][: group.size]
    own = torch.arange(sizes[group.rank]).add(group.rank).to(torch.uint8)
    found = group.pass_on(own)
    leave(out, found=found, sent=group.sent_bytes, sizes=sizes)


def group_of_devices(out: Path) -> None:
    """The user's group carries no tensors of the CPU, as one of NCCL; here it is Gloo's, for another kind of device."""

    def made(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, ranks, timeout)

    dist.Backend.register_backend("devices", made, devices=["cuda"])
    dist.init_process_group("devices")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.broadcast(torch.ones(1), 0)
    group = SiteGroup()
    mean = group.mean(torch.arange(5.0) * (1 + group.rank))
    told = group.exchange(torch.tensor([group.rank], dtype=torch.uint8))
    kept = dist.get_backend_config()
    leave(out, mean=mean, told=torch.cat(told), rank=group.rank, kept=str(kept))


KINDS = (group_of_devices, fsdp2, columns, save, restore, restore_portable, write_model, local_server, passed_on)
CASES: dict[str, Callable[[Path], None]] = {one.__name__: one for one in KINDS}


def main(case: str, out: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) == 1:
        dist.init_process_group("gloo")  # `SiteGroup` makes none for one rank, and DTensors need one
    elif case != group_of_devices.__name__:
        SiteGroup()
    CASES[case](out)
    SiteGroup().barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
