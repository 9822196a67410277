"""One rank's part of its site's step, around the user's own `optimizer.step()`.

    before()                 gradients are exchanged with the other ranks, where nobody else does that
    optimizer.step()         the user's own, in its own place
    after()                  the optimizer has stepped; rounds work on the weights as they are now
    for_passes()             weights for the next pass, where the strategy quantizes them

Who averages gradients inside a site: FSDP2, HSDP and tensor parallelism (DTensors) and DistributedDataParallel do it by
themselves; then nothing happens here. Otherwise this rank and the others exchange them, plain or quantized, bucket by
bucket. In an allreduce every rank gets the mean, in `.grad`. With a local server, a rank gets the mean of the tensors
that it serves (`local/serving.py`), and of no other.

A site that shares updates and has a local server keeps its master weights there: a rank has those of the tensors that
it serves, and its optimizer steps with these alone. `before` puts them into the parameters, the optimizer moves them,
and `for_passes` sends them to all ranks, encoded where the strategy says so, and puts what came from all ranks into the
parameters. Parameters that a rank does not serve have no gradient when its optimizer steps, so optimizers pass over
them, and keep no state for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad.codecs import Payload
from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.substep import Substep
from weightgrad.core.random_streams import SiteStream
from weightgrad.core.strategies import Strategy
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.kernels import derive
from weightgrad.local.gradient_exchange import GradientExchange
from weightgrad.runtime.model.module_gradients import gradients_of, read_gradient, write_gradient
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.runtime.model.sharded_tensor import is_sharded
from weightgrad.runtime.payload_exchange import PayloadExchange
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.site.master_weights import MasterWeights


class RankStep:
    """What happens to gradients and weights on one rank around an optimizer step.

    Args:
        weights: The parameters of this rank.
        optimizer: The user's optimizer.
        layout: Where the parameters lie in the index space.
        strategy: The strategy of the run.
        group: The ranks of the site.
        key: Parent of the site's random keys (`RunStream.LOCAL_STEP`).
        clip_norm: Largest norm of each tensor of a rank's gradient; None does not clip.
        averaged: Whether something else averages gradients over the ranks.
    """

    def __init__(
        self,
        weights: ModuleWeights,
        optimizer: Optimizer,
        layout: Layout,
        strategy: Strategy,
        group: SiteGroup,
        key: int,
        *,
        clip_norm: float | None = None,
        averaged: bool = False,
    ) -> None:
        self._averaged = averaged and group.size > 1
        self.not_applied = _not_applied(strategy, clip_norm) if self._averaged else []
        """The parts of the strategy that do not apply inside this site, since something else averages gradients."""
        self._strategy = strategy = strategy.averaged() if self._averaged else strategy.inside(group.size)
        self._weights, self._optimizer, self._layout = weights, optimizer, layout
        self.gradients = gradients_of(weights, layout)
        self.busy = False
        """Whether the optimizer steps because this object asked it to."""
        self._number = 0
        self._options: list[dict[str, Any]] | None = None  # the optimizer's own, while it takes a substep
        nothing = clip_norm is None and not strategy.correction
        self._exchange: GradientExchange | None = None
        if not self._averaged and not (group.size == 1 and nothing and strategy.combine == "mean"):
            self._exchange = GradientExchange(layout, strategy, PayloadExchange(group), key=key, clip_norm=clip_norm)
        self._master: MasterWeights | None = None
        serves = self._exchange is not None and self._exchange.owners is not None
        if self._exchange is not None and strategy.shares == "updates" and (serves or strategy.combine == "serial"):
            self._master = MasterWeights(weights, layout, strategy, derive(key, SiteStream.WEIGHTS), self._exchange)

    @property
    def releases_weights(self) -> bool:
        """Whether ranks get their weights from the local server; otherwise every rank has a replica of its own."""
        return self._master is not None

    def keeps(self, name: str) -> bool:
        """Whether this rank has the weights and the optimizer's state of a tensor that rounds and checkpoints use."""
        return self._master is None or name in self._master.names

    @property
    def exchanges(self) -> bool:
        """Whether `before` reads and writes gradients."""
        return self._exchange is not None

    @property
    def one_buffer(self) -> bool:
        """Whether the parameters lie in one buffer, as master weights and those for passes do."""
        return self._master is not None

    def release(self) -> None:
        """Training is over: give the parameters memory of their own, as they had before."""
        for parameter in (one.parameter for one in self._weights.parameters if self._master is not None):
            parameter.data = parameter.data.clone()

    def before(self, number: int) -> None:
        """Exchange the gradients that backward left, before the optimizer steps with them.

        Args:
            number: The number of the step, from which keys are derived.
        """
        if self._master is not None:
            for left, substep in self._master.substeps(number, self.gradients):
                if left:
                    self._step_now(substep)
                else:
                    self._options = substep.change(self._optimizer)  # the user's own step is the last one
        elif self._exchange is not None:
            # A plain mean stays on the device (NCCL); codecs and the order of the sum on the CPU need the host.
            device = self._weights.device if self._exchange.plain_mean else torch.device("cpu")
            room = torch.empty(
                max(bucket.stop - bucket.start for bucket in self._exchange.buckets), device=device, dtype=torch.float32
            )
            for place, bucket in enumerate(self._exchange.buckets):
                own = read_gradient(self.gradients, bucket.intervals, room)
                write_gradient(self.gradients, *self._exchange.mean(place, own, number))

    def after(self) -> None:
        """The optimizer has stepped. The parameters are the weights that rounds work on, until `for_passes`."""
        if self._options is not None:
            Substep.restore(self._optimizer, self._options)
            self._options = None
        if self._master is not None:
            self._master.moved()

    def _step_now(self, substep: Substep) -> None:
        assert self._master is not None
        self.busy = True
        try:
            with substep.within(self._optimizer):
                self._optimizer.step()
        finally:
            self.busy = False
        self._master.moved()

    # -- weights ---------------------------------------------------------------------------------

    def for_rounds(self) -> None:
        """Put the weights that rounds work on into the parameters."""
        if self._master is not None:
            self._master.show_master()

    def for_passes(self, *, release: bool = True) -> None:
        """Put the weights that the module computes on into the parameters.

        Args:
            release: Whether the weights have changed and are encoded anew.
        """
        if self._master is not None:
            self._master.release() if release else self._master.show()

    def resume_passes(self) -> None:
        """After a restart: put the weights that the module computed on before back into the parameters."""
        if self._master is not None:
            self._master.send_again()

    def quantized(self, key: int) -> tuple[Payload, ...] | None:
        """The weights that rounds work on, as workers would receive them; None unless the strategy is judged by those.

        Args:
            key: Parent of the keys of the tensors.
        """
        if self._master is None or self._strategy.evaluate != "quantized":
            return None
        return self._master.quantized(key)

    def state(self) -> dict[str, Tensor]:
        """Copies of what this rank remembers beside the parameters and their optimizer."""
        found = with_prefix("gradients.", self._exchange.state()) if self._exchange is not None else {}
        return found | (with_prefix("master.", self._master.state()) if self._master is not None else {})

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        if self._exchange is not None:
            self._exchange.load(without_prefix("gradients.", saved))
        if self._master is not None:
            self._master.load(without_prefix("master.", saved))


def averages_gradients(module: nn.Module) -> bool:
    """Whether something else than this package averages the gradients of a module over the ranks of a site."""
    if any(is_sharded(parameter) for parameter in module.parameters()):
        return True
    return any(type(one).__name__ == "DistributedDataParallel" for one in module.modules())


def _not_applied(strategy: Strategy, clip_norm: float | None) -> list[str]:
    inside = {
        "quantized gradients": strategy.gradients != "fp32",
        "quantized weights": strategy.weights != "fp32",
        "serial workers": strategy.combine == "serial",
        "momentum correction": strategy.correction > 0,
        "clip_norm": clip_norm is not None,
    }
    return [what for what, wanted in inside.items() if wanted]
