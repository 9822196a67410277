"""What the user gives to `prepare`: a model and its optimizer, or several of each, as the site trains them.

Before the site is admitted, `UserModel` says what the global server is told about them. When the server has replied,
it makes the `TrainedModel` of this rank.
"""

from __future__ import annotations

from typing import Any, cast

from torch.optim import Optimizer

from weightgrad.core.optimizers.spec import AT_SITES
from weightgrad.core.strategies import Strategy
from weightgrad.errors import StrategyError
from weightgrad.local.serving import serving
from weightgrad.runtime.admission_messages import APART, AdmissionReply
from weightgrad.runtime.layout_match import in_order
from weightgrad.runtime.model import frozen_parameters
from weightgrad.runtime.model.device_state import check_place, memory_for
from weightgrad.runtime.model.frozen_parameters import FrozenParameters
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.runtime.model.named_parameter import all_stages, layout_of, trainable
from weightgrad.runtime.model.replicas import Sharding
from weightgrad.runtime.model.trained_model import TrainedModel
from weightgrad.runtime.optimizer.announced import AnnouncedOptimizer
from weightgrad.runtime.optimizer.optimizer_checks import (
    check_averaged,
    check_parameters,
    check_several,
    check_whole,
    why_apart,
)
from weightgrad.runtime.optimizer.optimizer_set import OptimizerSet
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.site.named_models import one_module, own_modules, stepping_optimizers
from weightgrad.runtime.site.rank_step import averages_gradients
from weightgrad.runtime.site.step_hooks import StepHooks


class UserModel:
    """A user's model and optimizer; made on every rank.

    Args:
        model: A module, or several by name.
        optimizer: An optimizer with parameters of the model, or several; each may be wrapped.
        group: The ranks of the site.
        buffers: Which buffers are averaged: "shared", "site" or "local".
        frozen: What becomes of frozen parameters: "same", "local" or "shared".
        stages: Whether the model is cut by layers, so that every rank has parameters of its own.
        state_on: Where the site keeps its state: "host" or "device".

    Attributes:
        module: The model, as one module.
        optimizers: The optimizers of torch that step.
        parameters: What this rank has of the parameters that take part.
        unshared: The parameters that take no part.
        layout: The parameters of all ranks, in this site's order.

    Raises:
        StrategyError: An argument does not fit, or another site has the optimizer.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        group: SiteGroup,
        *,
        buffers: str = "shared",
        frozen: str = "same",
        stages: bool = False,
        state_on: str = "host",
    ) -> None:
        if buffers not in ("shared", "site", "local"):
            raise StrategyError(f'buffers = {buffers!r}; it is "shared", "site" or "local"')
        if frozen not in frozen_parameters.KINDS:
            raise StrategyError(f'frozen = {frozen!r}; it is "same", "local" or "shared"')
        check_place(state_on)
        self._group, self._buffers, self._frozen, self._stages, self._state_on = (
            group,
            buffers,
            frozen,
            stages,
            state_on,
        )
        self.optimizers = stepping_optimizers(optimizer)
        for one in self.optimizers:
            StepHooks.release(one)
        alone = len(self.optimizers) == 1
        self._optimizer = self.optimizers[0] if alone else cast(Optimizer, OptimizerSet(self.optimizers))
        self.module = one_module(model)
        self._modules = own_modules(model)
        self.parameters = trainable(self.module, frozen=frozen == "shared")
        check_parameters(self.parameters, self._optimizer)
        self.unshared = FrozenParameters(self.module, self.parameters)
        own_layout = layout_of(self.parameters)
        self.layout = all_stages(own_layout, group) if stages else own_layout
        self._announced = AnnouncedOptimizer(self._optimizer, [one.parameter for one in self.parameters])
        self._apart = why_apart(self.parameters, self._optimizer, frozen)

    # -- before the site is admitted ------------------------------------------------------------

    def check_strategy(self, strategy: Strategy) -> None:
        """See whether the strategy that the user asks for can train with these optimizers.

        Raises:
            StrategyError: There are several optimizers, and a part of it does not fit them.
        """
        check_several(strategy, self.optimizers)

    def optimizer_told(self) -> dict[str, Any]:
        """What the global server is told about the optimizer; with `APART`, why this site cannot share gradients."""
        told = {"kind": type(self.optimizers[0]).__name__} if self._stages else self._announced.told()
        if self._apart is not None or self._announced.has_state:
            told[APART] = self._apart or "its optimizer goes on from a state, which is its own"
        return told

    def frozen_digests(self) -> dict[str, str]:
        """The digests of the parameters that must be the same at all sites, on rank 0, which tells them."""
        return self.unshared.digests() if self._group.first and self._frozen == "same" and not self._stages else {}

    # -- when the server has replied ------------------------------------------------------------

    def trained(self, strategy: Strategy, reply: AdmissionReply) -> TrainedModel:
        """What this rank trains in the run; called on every rank.

        Args:
            strategy: The strategy of the run, to whose options the optimizer is changed.
            reply: The server's reply.

        Raises:
            StrategyError: Model or optimizer cannot be trained with the strategy, or not with this server.
        """
        if strategy.shares == "gradients":
            check_several(strategy, self.optimizers)
            if self._apart is not None:
                raise StrategyError(f"{strategy.name} shares gradients, and {self._apart}")
            self.unshared.gradients_shared = True
        self._announced.adapt(strategy, say=self._group.first)
        layout = in_order(self.layout, reply.layout)
        inside = all(averages_gradients(one) for one in self._modules)
        local = None if inside else serving(layout, strategy.inside(self._group.size), self._group.size)
        sharding = Sharding.of(
            ModuleWeights(self.parameters, layout).available,
            layout,
            self._group,
            reply.served,
            per_tensor=strategy.per == "tensor",
            serving=local,
        )
        averaged = inside or not sharding.replicated
        if self._group.size > 1 and not averaged:
            check_averaged(self.parameters, self.optimizers)
        weights = ModuleWeights(self.parameters, layout, sharding.held[self._group.rank])
        trained = TrainedModel(
            module=self.module,
            weights=weights,
            layout=layout,
            sharding=sharding,
            optimizer=self._optimizer,
            announced=self._announced,
            buffers=[buffer for buffer in self.module.buffers() if buffer.is_floating_point()],
            averages_buffers=self._buffers != "local" and not self._stages,
            averages_gradients=averaged,
            shares_buffers=self._buffers == "shared",
            at_sites=bool(reply.facts.get(AT_SITES)),
            memory=memory_for(self._state_on, weights, strategy),
        )
        if trained.at_sites:
            check_whole(trained)
        return trained
