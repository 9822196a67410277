"""The base put to the test: as it is, as workers are given it, and its running average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.errors import NonFiniteError
from weightgrad.kernels.noise import derive
from weightgrad.sim.plan import WorldPlan
from weightgrad.sim.task import Score, Task
from weightgrad.site.average import ParameterAverage
from weightgrad.site.local_server import LocalServer
from weightgrad.site.weights import decode_flat
from weightgrad.wan.base import Base


@dataclass(frozen=True)
class Evaluation:
    """The base on the test data, and what is made from it."""

    accuracy: float
    loss: float
    base: float
    quantized: float | None
    ema: float | None


class Judge:
    """Evaluates the server's base; `local` is the site whose curvature quantizes it."""

    def __init__(self, plan: WorldPlan, task: Task, base: Base, local: LocalServer | None) -> None:
        self._plan, self._task, self._base, self._local = plan, task, base, local
        self._ema = ParameterAverage(base.vector, plan.ema) if plan.ema is not None else None

    def moved(self) -> None:
        """The base has moved: the average follows."""
        if self._ema is not None:
            self._ema.update(self._base.vector)

    def evaluate(self) -> Evaluation:
        """All that there is to test."""
        score = self._score(self._base.vector)
        weights = self.quantized_base()
        quantized = None if weights is None else self._score(weights)
        ema = self._score(self._ema.value()) if self._ema is not None else None
        judged = quantized if quantized is not None and self._plan.strategy.judge == "quantized" else score
        return Evaluation(
            judged.accuracy,
            judged.loss,
            score.accuracy,
            quantized.accuracy if quantized is not None else None,
            ema.accuracy if ema is not None else None,
        )

    def quantized_base(self) -> Tensor | None:
        """The base as a worker would be given it."""
        if self._local is None or (out := self._local.weights_out) is None:
            return None
        layout = self._task.layout
        key = derive(self._plan.seed, 30, self._base.version)
        payloads = out.encode(layout, self._base.vector, self._local.curvature(), out.init(layout), key)
        return decode_flat(layout, payloads)

    def _score(self, weights: Tensor) -> Score:
        if not bool(torch.isfinite(weights).all()):
            raise NonFiniteError(f"the base is not finite at version {self._base.version}")
        return self._task.evaluate(weights)
