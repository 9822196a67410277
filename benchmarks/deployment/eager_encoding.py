"""Eager encoding: how much processor time it takes out of a step, and how much it costs in its own thread.

One process is rank 0 of a site of two ranks, and the other rank always sends the same. Processor time is measured,
because wall time would depend on what else runs on the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from deployment.overhead import Subject
from deployment.overhead_process import SIZES
from result_table import ResultTable, Row, parameters
from torch import Tensor
from torch.nn import functional

from weightgrad.core import strategies
from weightgrad.lab import models
from weightgrad.runtime.flat_parameters import FlatParameters
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.rank_step import RankStep

COLUMNS = [
    ("model", "model", "{}"),
    ("parameters", "shown", "{}"),
    ("strategy", "strategy", "{}"),
    ("codec", "codec", "{}"),
    ("pieces", "pieces", "{:d}"),
    ("eager %", "eager", "{:.0f}"),
    ("encode in the step ms", "plain_encode", "{:.2f}"),
    ("eager: check ms", "eager_encode", "{:.2f}"),
    ("in its thread ms", "beside", "{:.2f}"),
    ("backward ms", "plain_backward", "{:.1f}"),
    ("with hooks ms", "eager_backward", "{:.1f}"),
    ("all ms", "plain_all", "{:.1f}"),
    ("all, eager ms", "eager_all", "{:.1f}"),
]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    subjects: tuple[Subject, ...] = (Subject("cifarnet", 64), Subject("mlp", 128, {"width": 1024}))
    strategies: tuple[str, ...] = ("auto", "weightgrad", "weightgrad-paper")
    steps: int = 60


QUICK = Plan((Subject("mlp", 32, {"width": 256}),), steps=10)


class EchoGroup(SiteGroup):
    """The process group of rank 0 of two. The other rank sends what this one sends."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    @property
    def idle_core(self) -> bool:
        """True, so that eager encoding is also measured on a machine without an idle core."""
        return True

    def deal(self, blobs: list[Tensor]) -> list[Tensor]:
        """The same payloads, as if the other rank had sent them."""
        return blobs


class Worker:
    """A model with its local step, whose backward pass and encoding are timed."""

    def __init__(self, subject: Subject, strategy: str, eager: bool) -> None:
        channels, side = SIZES[subject.model]
        self._model = models.build(subject.model, classes=10, channels=channels, size=side, seed=1, **subject.options)
        self.flat_parameters = FlatParameters(self._model)
        weights = torch.zeros(self.flat_parameters.layout.numel)
        self.flat_parameters.read_weights(weights)
        self.flat_parameters.write_weights(weights)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self.rank_step = RankStep(self.flat_parameters, optimizer, weights, strategies.find(strategy), EchoGroup(), 5)
        if not eager:
            self.rank_step.close()
        self._batch = torch.randn(subject.batch, channels, side, side), torch.randint(10, (subject.batch,))
        self._number = 0

    def step(self) -> tuple[float, float, float]:
        """Seconds of this thread in backward and in encoding, and of the whole process in both."""
        loss = functional.cross_entropy(self._model(self._batch[0]), self._batch[1])
        whole, began = time.process_time(), time.thread_time()
        loss.backward()
        middle = time.thread_time()
        local_step = self.rank_step.local_step
        assert local_step is not None
        local_step.encode(0, self.rank_step.own_gradient(self._number), self._number)
        ended = time.thread_time()
        self._number += 1
        self.flat_parameters.drop_gradients()
        return middle - began, ended - middle, time.process_time() - whole


def measure(plan: Plan, report: Callable[[str], None]) -> list[ResultTable]:
    """Measure every model with every strategy, with and without eager encoding."""
    table = ResultTable(
        "eager-encoding",
        "Eager encoding",
        "One process is rank 0 of a site of two, with one thread for torch. A copy of the model that encodes eagerly "
        "and one that does not take steps in turn. The numbers are medians of processor milliseconds: of the thread "
        "that trains, of the thread that encodes, and of all threads in backward and encoding. With an idle core the "
        "work of the second thread costs the step nothing; without one the step takes the sum. The time that a step "
        "waits for the layers that backward reaches last is not included.",
        COLUMNS,
    )
    for subject in plan.subjects:
        for strategy in plan.strategies:
            report(f"eager encoding: {subject.model}, {strategy}")
            table.rows.append(_row(plan, subject, strategy))
    return [table]


def _row(plan: Plan, subject: Subject, strategy: str) -> Row:
    plain, eager = (Worker(subject, strategy, which) for which in (False, True))
    for worker in (plain, eager) * 3:
        worker.step()
    assert eager.rank_step.eager is not None
    before = eager.rank_step.eager.used, eager.rank_step.eager.asked
    times = [(*plain.step(), *eager.step()) for _ in range(plan.steps)]
    used, asked = eager.rank_step.eager.used - before[0], eager.rank_step.eager.asked - before[1]
    eager.rank_step.close()
    middle = [1000 * statistics.median(column) for column in zip(*times, strict=True)]
    return {
        "model": subject.model,
        "shown": parameters(round(eager.flat_parameters.layout.numel, -4)),
        "strategy": strategy,
        "codec": strategies.find(strategy).gradients,
        "pieces": asked // plan.steps,
        "eager": 100 * used / asked,
        "plain_backward": middle[0],
        "plain_encode": middle[1],
        "plain_all": middle[2],
        "eager_backward": middle[3],
        "eager_encode": middle[4],
        "eager_all": middle[5],
        "beside": 1000 * statistics.median(row[5] - row[4] - row[3] for row in times),
    }
