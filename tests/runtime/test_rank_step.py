"""The local server of a real site: the simulator's bits on every rank, and the simulator's bytes between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weightgrad import wire
from weightgrad.core.layout import Layout
from weightgrad.lab.sim.lan_traffic import CountingExchange
from weightgrad.local.step import LocalStep

from .rank_processes import run
from .ranks import SERVER_STEPS, SERVER_STRATEGIES, net, server_gradient, server_strategy


def simulated(label: str, ranks: int) -> tuple[list[Tensor], int, tuple[int, ...] | None]:
    """The weights that workers compute on after every step, the bytes that cross, and who serves what."""
    torch.manual_seed(0)
    model, layout = net()
    weights = layout.gather(model)
    exchange, strategy = CountingExchange(ranks), server_strategy(label)
    sgd = ("sgd", {"lr": 0.1, "momentum": 0.5})
    step = LocalStep(layout, weights, strategy, exchange, optimizer=sgd, key=7, clip_norm=3.0)
    gradient_step = torch.optim.SGD([weights], lr=0.1, momentum=0.5)
    sent, seen = 0, []
    for number in range(SERVER_STEPS + 1):
        if step.releases_weights:
            payloads = step.release()
            size = 4 * layout.numel if payloads is None else sum(wire.frame_bytes(one) for one in payloads)
            sent += (ranks - 1) * size
        seen.append(step.working_weights().detach().clone())
        if number == SERVER_STEPS:
            break
        exchange.begin_step()
        with torch.no_grad():
            mean = step.step((server_gradient(layout, worker, number) for worker in range(ranks)), number, 0.1)
        sent += exchange.traffic.total
        if mean is not None:
            weights.grad = mean
            gradient_step.step()
    return seen, sent, step.gradients.owners


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_bits_of_the_simulator_and_send_its_bytes(ranks: int, tmp_path: Path) -> None:
    left = run("local_server", ranks, tmp_path)
    assert len(left) == ranks
    names = [slot.name for slot in net()[1].slots]
    for label in SERVER_STRATEGIES:
        seen, sent, owners = simulated(label, ranks)
        found: list[dict[str, Any]] = [one[label] for one in left]
        assert sum(one["sent"] for one in found) == sent > 0, label
        for rank, one in enumerate(found):
            if server_strategy(label).shares == "updates":
                assert _same(one["seen"], seen), (label, rank)
                served = [name for name, owner in zip(names, owners or (), strict=False) if owner == rank]
                assert one["kept"] == one["states"] == served, "the optimizer's state is where the weights are"
            elif owners is None:  # every rank steps with the mean; otherwise with the result of a round
                assert _same(one["seen"], seen), (label, rank)


def _same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_that_are_passed_on_reach_every_rank_once(ranks: int, tmp_path: Path) -> None:
    left = run("passed_on", ranks, tmp_path)
    sizes = left[0]["sizes"]
    wanted = [torch.arange(size).add(rank).to(torch.uint8) for rank, size in enumerate(sizes)]
    for one in left:
        assert all(torch.equal(a, b) for a, b in zip(one["found"], wanted, strict=True))
        assert one["sent"] <= sum(sizes)
    assert sum(one["sent"] for one in left) == (ranks - 1) * sum(sizes)


def test_a_layout_of_some_tensors() -> None:
    layout = Layout.of_shapes([("a", (2, 3)), ("b", ()), ("c", (4,))])
    some = layout.of_slots([2, 0])
    assert [(slot.name, slot.start, slot.stop) for slot in some.slots] == [("c", 0, 4), ("a", 4, 10)]


def test_a_group_that_carries_no_cpu_tensors_gets_one_beside_it(tmp_path: Path) -> None:
    """Most scripts for GPUs begin with `init_process_group("nccl")`."""
    for rank, one in enumerate(run("group_of_devices", 2, tmp_path)):
        assert torch.equal(one["mean"], torch.arange(5.0) * 1.5)
        assert one["told"].tolist() == [0, 1]
        assert one["rank"] == rank
        assert one["kept"] == "cuda:devices", "the user's group stays the default one"
