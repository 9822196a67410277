"""What encoding beside backward takes out of the step, and what it costs: processor time, with and without, in turn.

One process is rank 0 of a site of two whose other rank sends the same. Processor time, because on a machine
without an idle core, or a busy one, seconds say who else was running.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from field_overhead import Subject
from field_overhead_child import SIZES
from field_sheet import Row, Sheet, parameters
from torch import Tensor
from torch.nn import functional

from weightgrad.runtime.bridge import Bridge
from weightgrad.runtime.crew import Crew
from weightgrad.runtime.lan import Lan
from weightgrad.train import models
from weightgrad.wan import strategies

COLUMNS = [
    ("model", "model", "{}"),
    ("parameters", "shown", "{}"),
    ("strategy", "strategy", "{}"),
    ("codec", "codec", "{}"),
    ("pieces", "pieces", "{:d}"),
    ("ahead %", "ahead", "{:.0f}"),
    ("encode in the step ms", "plain_encode", "{:.2f}"),
    ("ahead: check ms", "ahead_encode", "{:.2f}"),
    ("in its thread ms", "beside", "{:.2f}"),
    ("backward ms", "plain_backward", "{:.1f}"),
    ("with hooks ms", "ahead_backward", "{:.1f}"),
    ("all ms", "plain_all", "{:.1f}"),
    ("all, ahead ms", "ahead_all", "{:.1f}"),
]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    subjects: tuple[Subject, ...] = (Subject("cifarnet", 64), Subject("mlp", 128, {"width": 1024}))
    strategies: tuple[str, ...] = ("auto", "weightgrad", "weightgrad-paper")
    steps: int = 60


QUICK = Plan((Subject("mlp", 32, {"width": 256}),), steps=10)


class Echo(Lan):
    """Rank 0 of two; the other has always the same to say."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    @property
    def idle_core(self) -> bool:
        """Measured also where there is none."""
        return True

    def deal(self, blobs: list[Tensor]) -> list[Tensor]:
        """What was given."""
        return blobs


class Worker:
    """A model and its crew, which meets backward and encoding with a stopwatch."""

    def __init__(self, subject: Subject, strategy: str, ahead: bool) -> None:
        channels, side = SIZES[subject.model]
        self._model = models.build(subject.model, classes=10, channels=channels, size=side, seed=1, **subject.options)
        self.bridge = Bridge(self._model)
        weights = torch.zeros(self.bridge.layout.numel)
        self.bridge.read_weights(weights)
        self.bridge.write_weights(weights)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self.crew = Crew(self.bridge, optimizer, weights, strategies.find(strategy), Echo(), 5)
        if not ahead:
            self.crew.close()
        self._batch = torch.randn(subject.batch, channels, side, side), torch.randint(10, (subject.batch,))
        self._number = 0

    def step(self) -> tuple[float, float, float]:
        """Seconds of this thread in backward, in what gives the payloads, and of the whole process in both."""
        loss = functional.cross_entropy(self._model(self._batch[0]), self._batch[1])
        whole, began = time.process_time(), time.thread_time()
        loss.backward()
        middle = time.thread_time()
        pieces = self.crew._ring.encode_chunks if self.crew._ring is not None else self.crew._encoder.encode  # type: ignore[union-attr]
        self.crew._encoded(pieces, self._number)
        ended = time.thread_time()
        self._number += 1
        self.bridge.drop_gradients()
        return middle - began, ended - middle, time.process_time() - whole


def measure(plan: Plan, say: Callable[[str], None]) -> list[Sheet]:
    """One sheet."""
    sheet = Sheet(
        "ahead",
        "Encoded beside backward",
        "One process that is rank 0 of a site of two, one thread for torch; a step of a copy that encodes ahead and of "
        "one that does not, in turn. Medians of processor milliseconds, not of a clock's: of the thread that trains, "
        "of the thread that encodes, and of all together in backward and encoding. An idle core takes what is in the "
        "second thread; without one, all together is what a step takes. Not in it: how long a step waits for the "
        "pieces of the layers that backward comes to last.",
        COLUMNS,
    )
    for subject in plan.subjects:
        for strategy in plan.strategies:
            say(f"ahead: {subject.model}, {strategy}")
            sheet.rows.append(_row(plan, subject, strategy))
    return [sheet]


def _row(plan: Plan, subject: Subject, strategy: str) -> Row:
    plain, ahead = (Worker(subject, strategy, which) for which in (False, True))
    for worker in (plain, ahead) * 3:
        worker.step()
    assert ahead.crew.ahead is not None
    before = ahead.crew.ahead.used, ahead.crew.ahead.asked
    times = [(*plain.step(), *ahead.step()) for _ in range(plan.steps)]
    used, asked = ahead.crew.ahead.used - before[0], ahead.crew.ahead.asked - before[1]
    ahead.crew.close()
    middle = [1000 * statistics.median(column) for column in zip(*times, strict=True)]
    return {
        "model": subject.model,
        "shown": parameters(round(ahead.bridge.layout.numel, -4)),
        "strategy": strategy,
        "codec": strategies.find(strategy).gradients,
        "pieces": asked // plan.steps,
        "ahead": 100 * used / asked,
        "plain_backward": middle[0],
        "plain_encode": middle[1],
        "plain_all": middle[2],
        "ahead_backward": middle[3],
        "ahead_encode": middle[4],
        "ahead_all": middle[5],
        "beside": 1000 * statistics.median(row[5] - row[4] - row[3] for row in times),
    }
