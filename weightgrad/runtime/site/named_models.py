"""Several models, or several optimizers, in one site: a GAN, an encoder and a decoder, two schedules for one network.

The parameters of all models are one index space; the names of each model's begin with its own. Every optimizer steps
when the user's loop says so, and the site listens to all of them:

    a step of the site ends when each optimizer has stepped once; one that steps again before the others have stepped
    ends it, too

So alternating steps (D, G, D, G, ...) are as many steps of the site as there are of D, and five steps of D for one of G
are five. A round exchanges all models, whoever has stepped.

Where gradients are shared, a step of each optimizer is a step of the site, and its round is about the parameters of
that optimizer alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from weightgrad.core.strategies import Strategy
from weightgrad.errors import StrategyError
from weightgrad.runtime.optimizer.user_optimizer import unwrap_optimizer
from weightgrad.runtime.site.training import SiteTraining


def one_module(model: Any) -> nn.Module:
    """The user's model, or several by name (or in a list, by number), as one module.

    Raises:
        StrategyError: There is something else than modules, a name that cannot be one, or one module twice.
    """
    if isinstance(model, nn.Module):
        return model
    found = _by_name(model)
    if not found or not all(isinstance(one, nn.Module) for one in found.values()):
        raise StrategyError(
            f"prepare() was given {type(model).__name__} as a model; wanted a torch.nn.Module, or several of them by "
            'name, such as {"g": generator, "d": discriminator}'
        )
    if len({id(one) for one in found.values()}) < len(found):
        raise StrategyError("one module is given under two names; give each once")
    for name in found:
        if not name or "." in name:
            raise StrategyError(f"a model named {name!r}; a name has a letter at least, and no dot")
    return nn.ModuleDict({name: _unwrapped(one) for name, one in found.items()})


def own_modules(model: Any) -> list[nn.Module]:
    """The user's modules as they are, wrapped or not."""
    return [model] if isinstance(model, nn.Module) else list(_by_name(model).values())


def stepping_optimizers(optimizer: Any) -> list[Optimizer]:
    """The optimizers that step, of one optimizer or of several by name or in a list.

    Raises:
        StrategyError: One is no optimizer, or two have a parameter in common.
    """
    several = isinstance(optimizer, Mapping) or (isinstance(optimizer, Sequence) and not isinstance(optimizer, str))
    found = [unwrap_optimizer(one) for one in (_by_name(optimizer).values() if several else (optimizer,))]
    if not found:
        raise StrategyError("prepare() was given no optimizer; a site that trains nothing needs none, nor prepare()")
    owned: set[int] = set()
    for one in found:
        ours = {id(parameter) for group in one.param_groups for parameter in group["params"]}
        if owned & ours:
            raise StrategyError(
                "two optimizers have a parameter in common; a parameter is trained by one of them. To train first with "
                "one and then with another, give prepare() the first; then leave(), join again and prepare() the other"
            )
        owned |= ours
    return found


def _by_name(several: Any) -> dict[str, Any]:
    if isinstance(several, Mapping):
        return {str(name): one for name, one in several.items()}
    if isinstance(several, Sequence) and not isinstance(several, str):
        return {str(number): one for number, one in enumerate(several)}
    return {}


def _unwrapped(module: nn.Module) -> nn.Module:
    """What DistributedDataParallel wraps, so that parameters have the same names at every site."""
    inner = getattr(module, "module", None)
    wrapped = type(module).__name__ == "DistributedDataParallel" and isinstance(inner, nn.Module)
    return inner if wrapped and inner is not None else module


class SiteSteps:
    """Counts the steps of a site with several optimizers.

    Args:
        training: What is told of each step of the site.
        count: How many optimizers there are.
    """

    def __init__(self, training: SiteTraining, count: int) -> None:
        self._training, self._count = training, count
        self._stepped: set[int] = set()

    def of(self, number: int) -> OptimizerSteps:
        """What listens to one of the optimizers."""
        return OptimizerSteps(self, self._training, number)

    def begins(self, number: int) -> None:
        """An optimizer is about to step."""
        if number in self._stepped:
            self.end()

    def ends(self, number: int) -> None:
        """An optimizer has stepped."""
        self._stepped.add(number)
        if len(self._stepped) == self._count:
            self.end()

    def end(self) -> None:
        """End the step of the site, if one has begun."""
        if self._stepped:
            self._stepped.clear()
            self._training.after_step()


class OptimizerSteps:
    """One optimizer of several, as `StepHooks` sees the training."""

    def __init__(self, steps: SiteSteps, training: SiteTraining, number: int) -> None:
        self._steps, self._training, self._number = steps, training, number

    @property
    def busy(self) -> bool:
        """Whether an optimizer steps because the training asked it to."""
        return self._training.busy

    @property
    def strategy(self) -> Strategy:
        """The strategy of the run."""
        return self._training.strategy

    def before_step(self) -> bool:
        """The optimizer is about to step; whether there is a gradient for it."""
        if self.strategy.shares == "gradients":
            return self._training.before_step(self._number)
        self._steps.begins(self._number)
        return self._training.before_step()

    def after_step(self) -> None:
        """The optimizer has stepped."""
        if self.strategy.shares == "gradients":
            self._training.after_step()
        else:
            self._steps.ends(self._number)
