"""The named strategies, and how a recipe takes one and changes it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from weightgrad.core.strategies.schema import Strategy
from weightgrad.errors import StrategyError

_SHORT = {"codec": "up", "every": "trigger"}  # a recipe may write `codec: ...` and `every: 50`


def _by_name(*strategies: Strategy) -> dict[str, Strategy]:
    return {strategy.name: strategy for strategy in strategies}


_FOUR_BITS = "ef(qsgd(bits=4, bucket=64, rounding='nearest'))"

_WEIGHTGRAD = Strategy(
    name="weightgrad",
    about="the largest entries of the residual as signs and one size, overlapped; quantized inside the site",
    shares="updates",
    exchange="sharded",
    gradients="qsgd(bits=8)",
    weights="lossaware(bits=8)",
    trigger="significance(threshold=2.5, at_most=4, low=2.5, every=2)",
    up="ef(topk(0.1) > sign())",
    down="ef(topk(0.2) > sign())",
    hide=8,
    flush="none",
    t="auto",
)

PRESETS = _by_name(
    Strategy(name="baseline", about="full-precision synchronous SGD over all workers of all sites"),
    Strategy(
        name="qsgd",
        about="QSGD: buckets, 4 bits, stochastic rounding, both ways",
        exchange="sharded",
        gradients="qsgd(bits=4)",
        up="qsgd(bits=4)",
        down="qsgd(bits=4)",
        keep_loss=False,
    ),
    Strategy(
        name="terngrad",
        about="TernGrad: clipped ternary gradients up, 4 bits down",
        exchange="sharded",
        gradients="terngrad(clip=2.5)",
        up="terngrad(clip=2.5)",
        down="qsgd(bits=4)",
        per="tensor",
        keep_loss=False,
    ),
    Strategy(
        name="onebit",
        about="one-bit SGD: signs and column means after a warm start, momentum before the error feedback, both ways",
        correction=0.7,
        up="warmup(40, onebit())",
        down="warmup(40, onebit())",
        per="tensor",
    ),
    Strategy(
        name="adaptive",
        about="Dryden et al.: the largest 1/64 as column means after a warm start, momentum before the error feedback",
        correction=0.7,
        up="warmup(40, adaptive(pi=64))",
        down_selector="nonzero",
        per="tensor",
    ),
    Strategy(
        name="dgc",
        about="DGC: top 0.1 % with momentum correction and warm-up",
        up="dgc(0.001, momentum=0.9, warmup=200)",
        down_selector="nonzero",
        optimizer={"momentum": 0.0},
    ),
    Strategy(
        name="powersgd",
        about="PowerSGD: rank 4 with warm start and error feedback, both ways",
        up="powersgd(rank=4)",
        down="powersgd(rank=4)",
        per="tensor",
    ),
    Strategy(
        name="ahead",
        about="4-bit gradients; a site goes on with its own until the mean comes, then takes the step with the mean",
        up=_FOUR_BITS,
        down=_FOUR_BITS,
        hide=4,
        resume="ahead",
        flush="none",
    ),
    Strategy(
        name="gaia",
        about="Gaia: entries that change a weight by more than 1 %/sqrt(t), bounded lead",
        shares="updates",
        selector="gaia(0.01)",
        down_selector="nonzero",
        aggregator="mean",
        consistency="bounded(1)",
        resume="global_model_and_residual",
    ),
    _WEIGHTGRAD,
    dataclasses.replace(
        _WEIGHTGRAD,
        name="weightgrad-serial",
        about="weightgrad, with each worker's gradient applied in turn, as far and as fast as their mean",
        combine="serial",
        serial_scale="matched",
    ),
    Strategy(
        name="weightgrad-paper",
        about="WeightGrad as published: ternary gradients, loss-aware ternary weights, significant tensors",
        shares="updates",
        exchange="server",
        gradients="terngrad(clip=2.5)",
        weights="lossaware(bits='ternary', fisher=True)",
        trigger="significance(threshold=4.0, at_most=8, low=2.0)",
        selector="significant('tensor')",
        up="terngrad(clip=2.5)",
        down="qsgd(bits=4)",
        per="tensor",
        keep_loss=False,
        resume="global_model_and_residual",
        flush="fp32",
        evaluate="quantized",
        t="auto",
    ),
    Strategy(
        name="diloco",
        about="DiLoCo: everything every 10 steps, outer Nesterov",
        shares="updates",
        trigger="every(10)",
        aggregator="outer('nesterov', lr=0.7, momentum=0.5)",
    ),
    Strategy(
        name="streaming",
        about="Streaming DiLoCo: one of 4 fragments at a time, 4 bits, applied 2 steps later",
        shares="updates",
        trigger="staggered(12, 4)",
        selector="fragment(4)",
        up="ef(qsgd(bits=4))",
        down="ef(qsgd(bits=4))",
        aggregator="outer('nesterov', lr=0.7, momentum=0.5)",
        overlap=2,
        resume="mix(0.5)",
    ),
    Strategy(
        name="sparseloco",
        about="SparseLoCo: top 1.6 % at 2 bits every 15 steps, mean over senders",
        shares="updates",
        trigger="every(15)",
        up="ef(topk(0.015625) > codebook(bits=2))",
        down_selector="nonzero",
        aggregator="sender_mean",
        resume="global_model_and_residual",
    ),
    Strategy(
        name="auto",
        about="no tuning: rounds, density and overlap follow measured steps and links, so that communication is hidden",
        shares="updates",
        gradients="qsgd(bits=8)",
        trigger="scheduled(4)",
        controller="auto()",
        up="ef(topk(0.01) > sign())",
        down="ef(topk(0.02) > sign())",
        resume="global_model_and_residual(0.25, damped=True)",
        relay=3,
        flush="qsgd(bits=4)",
        flush_residual="local",
        nonlinear={
            "aggregator": "sender_mean",
            "controller": "auto(every=10, density=0.1, least=0.01, at_most=60, values='codebook(bits=2)')",
            "up": "ef(topk(0.1) > codebook(bits=2))",
            "down": "ef(topk(0.2) > codebook(bits=2))",
            "resume": "global_model_and_residual",
            "relay": 0,
        },
        near={
            "shares": "gradients",
            "gradients": "fp32",
            "trigger": "scheduled(1)",
            "aggregator": "mean",
            "controller": "gradients()",
            "up": _FOUR_BITS,
            "down": _FOUR_BITS,
            "resume": "ahead",
            "relay": 0,
            "flush_residual": "all",
        },
    ),
)


def available() -> dict[str, str]:
    """Return the name of every preset and what it is."""
    return {name: strategy.about for name, strategy in PRESETS.items()}


def find(name: str, changes: Mapping[str, Any] | None = None) -> Strategy:
    """Take a preset and change some of its fields.

    Args:
        name: One of PRESETS.
        changes: New values by field. `codec` is short for `up`, `every: n` for `trigger: every(n)`, and
            `budget: 5 GB/day` for that argument of the controller `auto`, whatever the optimizer is.

    Returns:
        The strategy, checked.

    Raises:
        StrategyError: There is no such preset or field, or the changes do not fit.
    """
    if name not in PRESETS:
        raise StrategyError(f"no strategy {name!r}{_near(name, PRESETS)} There are {', '.join(PRESETS)}")
    known = [f.name for f in dataclasses.fields(Strategy) if f.name not in ("name", "about")]
    changes, preset = dict(changes or {}), PRESETS[name]
    if "budget" in changes:
        preset = _with_budget(preset, changes.pop("budget"))
    wanted: dict[str, Any] = {}
    for key, value in changes.items():
        column = _SHORT.get(key, key)
        if column not in known:
            allowed = [*known, *_SHORT, "budget"]
            raise StrategyError(f"strategy has no part {key!r}{_near(key, allowed)} It has {', '.join(allowed)}")
        wanted[column] = f"every({value})" if key == "every" else value
    if wanted.keys() & {*preset.nonlinear, *preset.near}:  # who sets one of these parts has chosen between the rows
        wanted = {"nonlinear": {}, "near": {}, **wanted}
    try:
        return dataclasses.replace(preset, **wanted)
    except (TypeError, AttributeError) as error:
        raise StrategyError(f"strategy {name}: {error}; parts are written as text") from None


def _with_budget(preset: Strategy, budget: object) -> Strategy:
    """A preset that spends at most so many bytes; gradients, which are shared at every step, are not shared then."""
    nonlinear = dict(preset.nonlinear)
    if not preset.controller.startswith("auto("):
        raise StrategyError(f"strategy {preset.name} has no budget; it is for 'auto', such as auto(budget='5 GB/day')")
    if "controller" in nonlinear:
        nonlinear["controller"] = _budgeted(nonlinear["controller"], budget)
    return dataclasses.replace(preset, controller=_budgeted(preset.controller, budget), nonlinear=nonlinear, near={})


def _budgeted(controller: str, budget: object) -> str:
    arguments = controller.removeprefix("auto(").removesuffix(")")
    return f"auto({arguments}{', ' if arguments else ''}budget={budget!r})"


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else "."
