"""Whether an optimizer fits the model that it is prepared with, and the strategy of the run.

Where gradients are shared, every replica takes the same step with them. So all parameters that are trained belong to
an optimizer that the site knows, and nothing may make it step differently at one site.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from weightgrad.core.strategies import Strategy
from weightgrad.errors import StrategyError
from weightgrad.runtime.model.named_parameter import NamedParameter
from weightgrad.runtime.model.trained_model import TrainedModel
from weightgrad.runtime.optimizer.optimizer_set import set_of
from weightgrad.wire.intervals import Intervals

_EVERY_STEP = ("every", "every()", "every(1)", "every(steps=1)")


def check_parameters(parameters: Sequence[NamedParameter], optimizer: Optimizer) -> None:
    """Refuse an optimizer with parameters that the model has not.

    Raises:
        StrategyError: It has some.
    """
    ours = {id(one.parameter) for one in parameters}
    if any(p.requires_grad and id(p) not in ours for group in optimizer.param_groups for p in group["params"]):
        raise StrategyError(
            "the optimizer has parameters that the model has not, and every worker would train them alone; put "
            'them into the model, or prepare both, as {"net": model, "loss": loss}, if a module has them; and make the '
            "optimizer after fully_shard or parallelize_module"
        )


def check_whole(trained: TrainedModel) -> None:
    """Refuse a site no rank of which has the whole model, where the server has none.

    Raises:
        StrategyError: The server would have to give weights to others.
    """
    if not trained.weights.available.contains(Intervals.whole(trained.layout.numel)):
        raise StrategyError(
            f"the server cannot make {type(trained.optimizer).__name__}, so it has no weights to give to others, and "
            "no rank of this site has all of them: start the server with --optimizer MODULE:CLASS, or take a strategy "
            "that shares updates, such as weightgrad"
        )


def _of_another_optimizer(parameters: Sequence[NamedParameter], optimizer: Optimizer) -> str | None:
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return next((one.name for one in parameters if id(one.parameter) not in theirs), None)


def check_several(strategy: Strategy, optimizers: Sequence[Optimizer]) -> None:
    """Refuse several optimizers where a round cannot be about the gradients of one of them.

    Raises:
        StrategyError: There are several, and a part of the strategy does not fit them.
    """
    if len(optimizers) == 1 or strategy.shares != "gradients":
        return
    found = {
        f"consistency is {strategy.consistency}, so that sites may be at steps of different ones": (
            strategy.consistency != "sync"
        ),
        f"trigger is {strategy.trigger}, so that not every step has a round": strategy.trigger not in _EVERY_STEP,
        "resume is ahead, so that a site steps with its own gradients first": strategy.resume == "ahead",
        "correction is a momentum of all gradients in one": bool(strategy.correction),
    }
    if why := [reason for reason, applies in found.items() if applies]:
        raise StrategyError(
            f"prepare() was given {len(optimizers)} optimizers, and {strategy.name} shares gradients; with several its "
            f"{why[0]}. Put all parameters into one optimizer, in several groups, or take baseline or qsgd, or a "
            "strategy that shares updates, such as auto"
        )


def check_averaged(parameters: Sequence[NamedParameter], optimizers: Sequence[Optimizer]) -> None:
    """Refuse parameters that another optimizer would step with the gradients of one rank.

    Raises:
        StrategyError: There is such a parameter.
    """
    if (alone := _of_another_optimizer(parameters, optimizers[-1])) is not None:
        raise StrategyError(
            f"{alone} is trained by another optimizer, which may step before the ranks of this site have averaged "
            "their gradients: wrap the model in DistributedDataParallel, which averages them in backward(), or put all "
            "parameters into one optimizer"
        )


def why_apart(parameters: Sequence[NamedParameter], optimizer: Optimizer, frozen: str) -> str | None:
    """Why a site cannot share gradients: what replicas that step with them would do differently; None if it can."""
    several = set_of(optimizer)
    if any(isinstance(one, torch.optim.SparseAdam) for one in ([optimizer] if several is None else several.optimizers)):
        return (
            "they are dense when they come back, and SparseAdam takes only sparse ones; take a strategy that shares "
            "updates, such as weightgrad, or Adagrad, which takes both"
        )
    if frozen == "shared":
        return (
            'frozen="shared" would let weight decay and momentum move frozen parameters; take a strategy that shares '
            "updates, such as weightgrad"
        )
    if (wide := next((one for one in parameters if one.parameter.dtype == torch.float64), None)) is not None:
        return (
            f"{wide.name} is float64, and gradients travel as float32: replicas would drift apart. Train in float32, "
            "or take a strategy that shares updates, such as weightgrad"
        )
    if (alone := _of_another_optimizer(parameters, optimizer)) is not None:
        return (
            f"{alone} is trained by another optimizer, or by none, and with shared gradients every site takes the "
            'same steps: give prepare() all optimizers, as {"g": og, "d": od}, freeze what is not trained, or take a '
            "strategy that shares updates, such as weightgrad"
        )
    return None
