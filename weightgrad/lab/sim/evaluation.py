"""Test scores of the global model: as it is, quantized as workers receive it, and its running average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightgrad.core.global_model import GlobalModel
from weightgrad.core.random_streams import RunStream
from weightgrad.errors import NonFiniteError
from weightgrad.kernels.noise import derive
from weightgrad.lab.sim.plan import SimulationPlan
from weightgrad.lab.sim.task import Score, Task
from weightgrad.local.local_server import LocalServer
from weightgrad.local.parameter_average import ParameterAverage
from weightgrad.local.weight_encoder import decode_flat

_CHECKED = 2**22  # elements that are looked at together: torch makes two more vectors to look at one


@dataclass(frozen=True)
class Evaluation:
    """Test scores.

    Attributes:
        accuracy: Of the model that the strategy hands over, quantized or not.
        loss: Of the same model.
        global_model: Accuracy of the global model in full precision.
        quantized: Accuracy of the quantized global model; None if the strategy does not quantize weights.
        ema: Accuracy of the running average; None if there is none.
        top5: Top-5 accuracy of the model that the strategy hands over; None where the task has none.
    """

    accuracy: float
    loss: float
    global_model: float
    quantized: float | None
    ema: float | None
    top5: float | None = None


class Evaluator:
    """Evaluates the server's global model; `local` is the local server that quantizes it, the first that does."""

    def __init__(self, plan: SimulationPlan, task: Task, global_model: GlobalModel, local: LocalServer | None) -> None:
        self._plan, self._task, self._global_model, self._local = plan, task, global_model, local
        self._ema = ParameterAverage(global_model.vector, plan.ema) if plan.ema is not None else None

    def update_average(self) -> None:
        """Add the present global model to the running average."""
        if self._ema is not None:
            self._ema.update(self._global_model.vector)

    def evaluate(self) -> Evaluation:
        """Score the global model in every form that the run has."""
        score = self._score(self._global_model.vector)
        weights = self.quantized_model()
        quantized = None if weights is None else self._score(weights)
        ema = self._score(self._ema.value()) if self._ema is not None else None
        chosen = quantized if quantized is not None and self._plan.strategy.evaluate == "quantized" else score
        return Evaluation(
            chosen.accuracy,
            chosen.loss,
            score.accuracy,
            quantized.accuracy if quantized is not None else None,
            ema.accuracy if ema is not None else None,
            chosen.top5,
        )

    def quantized_model(self) -> Tensor | None:
        """The global model as workers would receive it; None if the strategy does not quantize weights."""
        if self._local is None or (out := self._local.weight_encoder) is None:
            return None
        layout = self._task.layout
        key = derive(self._plan.seed, RunStream.EVALUATION, self._global_model.version)
        payloads = out.encode(layout, self._global_model.vector, self._local.curvature(), out.init(layout), key)
        return decode_flat(layout, payloads)

    def _score(self, weights: Tensor) -> Score:
        if not all(bool(torch.isfinite(part).all()) for part in weights.split(_CHECKED)):
            raise NonFiniteError(f"the global model is not finite at version {self._global_model.version}")
        return self._task.evaluate(weights)
