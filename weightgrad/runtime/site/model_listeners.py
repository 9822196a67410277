"""What a site hangs on the user's model and optimizers from `prepare` to `leave`: hooks on steps, loading, saving."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from weightgrad.runtime.model.load_guard import LoadGuard
from weightgrad.runtime.model.state_dict_copies import copy_views
from weightgrad.runtime.model.weight_watch import WeightWatch
from weightgrad.runtime.optimizer.evaluation_mode import EvaluationMode
from weightgrad.runtime.optimizer.stranger_steps import StrangerSteps
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.site.named_models import SiteSteps
from weightgrad.runtime.site.step_hooks import StepHooks
from weightgrad.runtime.site.training import SiteTraining
from weightgrad.runtime.site.user_model import UserModel

log = logging.getLogger("weightgrad")


class ModelListeners:
    """The hooks of one site on what it trains.

    Args:
        user: The user's model and optimizers.
        given: What the user has handed over as optimizer, which may wrap it.
        site: The name of the site, for errors.
        training: What is told of each step.
        group: The ranks of the site.
    """

    def __init__(self, user: UserModel, given: Any, site: str, training: SiteTraining, group: SiteGroup) -> None:
        self._copies = copy_views(user.module) if training.rank_step.one_buffer else []
        self._guard = LoadGuard(user.module, user.parameters)
        self._site, self._unshared = site, user.unshared
        self._steps = SiteSteps(training, len(user.optimizers))
        gradients = self._gradients = training.strategy.shares == "gradients"
        self._strangers = StrangerSteps(
            site,
            user.optimizers,
            [one.parameter for one in user.parameters]
            if gradients
            else [p for one in user.optimizers for group in one.param_groups for p in group["params"]],
            training.strategy,
        )
        self._weights = WeightWatch(user.parameters if gradients else [], training.strategy.name)
        self._modes = [EvaluationMode(one, self._guard.check) for one in user.optimizers if EvaluationMode.has_one(one)]
        alone = len(user.optimizers) == 1
        self._hooks = [
            StepHooks(
                optimizer,
                site,
                training if alone else self._steps.of(number),
                group,
                (partial(user.unshared.check, None if alone else optimizer), self._guard.check, self._weights.check),
                self._weights.stepped,
                given if alone else None,
            )
            for number, optimizer in enumerate(user.optimizers)
        ]

    @property
    def interrupted(self) -> bool:
        """Whether a step has ended in the middle."""
        return any(hooks.interrupted for hooks in self._hooks)

    def end_steps(self) -> None:
        """The loop has ended: end the step of the site that some of several optimizers have begun.

        Raises:
            StrategyError: The model has other weights than the last step has left.
        """
        if self._gradients:
            for mode in self._modes:
                mode.train()
        self._guard.check()
        self._weights.check()
        self._steps.end()
        if not self._gradients:
            self.show_evaluated()
        if changed := self._unshared.changed():
            log.warning(
                "%s: %s takes no part and has changed since prepare() (%d such parameters): it stays this site's own, "
                "and others have theirs. A moving average can be made a buffer (register_buffer), and travels then",
                self._site,
                changed[0],
                len(changed),
            )

    def show_evaluated(self) -> None:
        """Give the model the weights that optimizers with a mode for evaluation have for it."""
        for mode in self._modes:
            mode.eval()

    def release(self) -> None:
        """Let go of model and optimizers: from now on their steps are an error."""
        for mode in self._modes:
            mode.release()
        for hooks in self._hooks:
            hooks.leave()
        self._strangers.remove()
        self._guard.remove()

    def stop_copying(self) -> None:
        """The parameters lie in one buffer no more, so `state_dict()` needs no copies."""
        for handle in self._copies:
            handle.remove()
