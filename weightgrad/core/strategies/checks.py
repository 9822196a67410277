"""Which values and which combinations of parts a strategy may have: one function a rule.

`check` runs them in order. Each raises a StrategyError that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

# The modules of parts are imported for their tables: parts.parse finds what they have entered.
from weightgrad.codecs import ErrorFeedback
from weightgrad.codecs.sparse import check_values_codec
from weightgrad.core import parts
from weightgrad.core.controller import gradient_controller, update_controller  # noqa: F401
from weightgrad.core.optimizers.substep import MATCHED
from weightgrad.core.parts import aggregators, consistency, resume, selectors, triggers  # noqa: F401
from weightgrad.errors import SpecError, StrategyError

if TYPE_CHECKING:
    from weightgrad.core.strategies.schema import Strategy

CHOICES = {
    "shares": ("gradients", "updates"),
    "combine": ("mean", "serial"),
    "exchange": ("allreduce", "server", "sharded"),
    "per": ("flat", "tensor"),
    "evaluate": ("global_model", "quantized"),
}
PARTS = {
    "trigger": "trigger",
    "selector": "selector",
    "down_selector": "selector",
    "aggregator": "aggregator",
    "consistency": "consistency",
    "resume": "resume",
    "controller": "controller",
}
_NEEDS_UPDATES = {"combine": "mean", "weights": "fp32", "relay": 0, "flush_residual": "all"}
_OF_MANY = ("sender_mean", "median", "trimmed_mean")


def check(strategy: Strategy) -> None:
    """Check the values of a strategy and how they fit together.

    Args:
        strategy: What is checked.

    Raises:
        StrategyError: A field is wrong; the message names it.
    """
    for rule in (
        choices_are_known,
        parts_are_known,
        codecs_are_known,
        numbers_are_in_range,
        gradients_are_shared_plainly,
        a_plain_codec_where_losses_are_dropped,
        a_local_server_where_one_is_needed,
        serial_scale_is_for_serial_workers,
        correction_is_before_the_codec,
        quantized_weights_to_evaluate,
        relayed_pushes_are_a_plain_mean,
        selected_values_have_a_codec_without_state,
        every_fragment_has_its_turn,
        auto_sets_the_schedule,
        the_other_rows_are_strategies,
        damped_goes_by_the_schedule,
        a_round_of_many_where_pushes_are_compared,
    ):
        rule(strategy)


def choices_are_known(strategy: Strategy) -> None:
    """A field with a short list of values has one of them."""
    for name, allowed in CHOICES.items():
        value = getattr(strategy, name)
        if value not in allowed:
            raise StrategyError(f"{name} = {value!r}; it is one of {', '.join(allowed)}")
    if not isinstance(strategy.keep_loss, bool):
        raise StrategyError(f"keep_loss = {strategy.keep_loss!r}; it is true or false")
    if not isinstance(strategy.optimizer, Mapping):
        raise StrategyError(f"optimizer = {strategy.optimizer!r}; it is a table of options, such as {{momentum: 0.0}}")


def parts_are_known(strategy: Strategy) -> None:
    """A part exists and takes its arguments."""
    for name, kind in PARTS.items():
        try:
            parts.parse(kind, getattr(strategy, name))
        except StrategyError as error:
            raise StrategyError(f"{name} = {getattr(strategy, name)!r}: {error}") from None


def codecs_are_known(strategy: Strategy) -> None:
    """A codec exists and takes its arguments; only flush may be none."""
    for name in ("gradients", "weights", "up", "down"):
        strategy.wan_codec(name)
    strategy.codec("flush")
    if strategy.flush_residual not in ("all", "local"):
        raise StrategyError(f'flush_residual = {strategy.flush_residual!r}; it is "all" or "local"')


def numbers_are_in_range(strategy: Strategy) -> None:
    """A number is one, and within its bounds."""
    parts.check("strategy", "overlap", strategy.overlap, 0, 10**6, whole=True)
    parts.check("strategy", "hide", strategy.hide, 0, 10**6, whole=True)
    parts.check("strategy", "relay", strategy.relay, 0, 10**3, whole=True)
    parts.check("strategy", "correction", strategy.correction, 0, 0.9999)
    if strategy.serial_scale is not None and strategy.serial_scale != MATCHED:
        parts.check("strategy", "serial_scale", strategy.serial_scale, 1e-9, 1e6)
    for name in ("t", "t_local", "t_global"):
        value = getattr(strategy, name)
        if value is not None and not (name != "t_local" and value == "auto"):
            parts.check("strategy", name, value, 0, 1e9)


def gradients_are_shared_plainly(strategy: Strategy) -> None:
    """A site that shares gradients has no update of its own, so nothing may depend on one."""
    ahead = parts.parse("resume", strategy.resume).ahead
    if strategy.shares != "gradients":
        if ahead:
            raise StrategyError(f"resume = {strategy.resume!r} needs shares = 'gradients', not {strategy.shares!r}")
        return
    if not ahead and parts.name_of("resume", strategy.resume) != "global_model":
        raise StrategyError(f"resume = {strategy.resume!r} needs shares = 'updates', not 'gradients'")
    for name in ("overlap", "hide"):
        if getattr(strategy, name) and not ahead:
            raise StrategyError(
                f"{name} = {getattr(strategy, name)!r} with shares = 'gradients' needs resume = 'ahead', or shares = "
                "'updates': late gradients alone train badly"
            )
    for name, plain in _NEEDS_UPDATES.items():
        if getattr(strategy, name) != plain:
            raise StrategyError(f"{name} = {getattr(strategy, name)!r} needs shares = 'updates', not 'gradients'")
    if strategy.aggregator.startswith("outer"):
        raise StrategyError(f"aggregator {strategy.aggregator!r} moves updates; set shares = 'updates'")


def a_plain_codec_where_losses_are_dropped(strategy: Strategy) -> None:
    """Error feedback keeps what a codec loses, which keep_loss = false forbids."""
    up = strategy.codec("up")
    if not strategy.keep_loss and up is not None and up.carries_error:
        raise StrategyError(f"keep_loss = false, but up = {up} is error feedback; take a plain codec or keep it")


def a_local_server_where_one_is_needed(strategy: Strategy) -> None:
    """Quantized weights and serial steps are made by a local server."""
    if strategy.exchange == "allreduce" and (strategy.weights != "fp32" or strategy.combine == "serial"):
        raise StrategyError("quantized weights and serial workers need exchange = 'server' or 'sharded'")


def serial_scale_is_for_serial_workers(strategy: Strategy) -> None:
    """A mean has no steps to scale."""
    if strategy.serial_scale is not None and strategy.combine != "serial":
        raise StrategyError("serial_scale is for combine = 'serial'")


def correction_is_before_the_codec(strategy: Strategy) -> None:
    """The quantized allreduce takes gradients as they are."""
    if strategy.correction and strategy.exchange == "allreduce" and strategy.gradients != "fp32":
        raise StrategyError(
            "correction needs exchange = 'server' or 'sharded' when gradients are quantized in the site"
        )


def quantized_weights_to_evaluate(strategy: Strategy) -> None:
    """The accuracy of quantized weights needs a codec for them."""
    if strategy.evaluate == "quantized" and strategy.weights == "fp32":
        raise StrategyError("evaluate = 'quantized', but the weights are fp32")


def relayed_pushes_are_a_plain_mean(strategy: Strategy) -> None:
    """Sites take the mean of relayed pushes themselves, so the server can make nothing else of them."""
    alone = parts.parse("consistency", strategy.consistency).alone
    mixed = strategy.resume.startswith("mix")
    plain = parts.name_of("aggregator", strategy.aggregator) == "mean" and strategy.down_selector == "all" and not mixed
    if strategy.relay and (alone or not plain):
        raise StrategyError(
            f"relay = {strategy.relay} needs aggregator = 'mean', down_selector = 'all', rounds of all sites and a "
            f"resume other than mix; here they are {strategy.aggregator!r}, {strategy.down_selector!r}, "
            f"{strategy.consistency!r} and {strategy.resume!r}"
        )


def selected_values_have_a_codec_without_state(strategy: Strategy) -> None:
    """A selector of single entries takes other entries every time, so their codec can carry nothing over."""
    for name, column in (("selector", "up"), ("down_selector", "down")):
        codec = strategy.wan_codec(column)
        plain = codec.inner if isinstance(codec, ErrorFeedback) else codec
        if parts.parse("selector", getattr(strategy, name)).single:
            try:
                check_values_codec(name, plain)
            except SpecError as error:
                raise StrategyError(f"{name} = {getattr(strategy, name)!r} with {column} = {codec}: {error}") from None


def every_fragment_has_its_turn(strategy: Strategy) -> None:
    """Fragments take turns by a staggered trigger with as many turns."""
    selector, trigger = parts.parse("selector", strategy.selector), parts.parse("trigger", strategy.trigger)
    if isinstance(selector, selectors.Fragment) and selector.count > 1:
        turns = trigger.fragments if isinstance(trigger, triggers.Staggered) else 1
        if turns % selector.count:
            raise StrategyError(
                f"selector {strategy.selector!r} with trigger {strategy.trigger!r}: some fragments would never have "
                f"their turn; write trigger: staggered(steps, {selector.count})"
            )


def auto_sets_the_schedule(strategy: Strategy) -> None:
    """A controller sets the schedule of synchronous rounds of what it is for, and the trigger follows it."""
    word, auto = parts.name_of("controller", strategy.controller), strategy.auto is not None
    wanted = "gradients" if word == "gradients" else "updates"
    if auto and (strategy.shares != wanted or strategy.consistency != "sync"):
        raise StrategyError(f"controller {strategy.controller!r} needs shares = {wanted!r} and consistency = 'sync'")
    if auto and wanted == "gradients" and not parts.parse("resume", strategy.resume).ahead:
        raise StrategyError(f"controller {strategy.controller!r} needs resume = 'ahead', not {strategy.resume!r}")
    if auto != (parts.name_of("trigger", strategy.trigger) == "scheduled"):
        raise StrategyError(
            f"controller {strategy.controller!r} with trigger {strategy.trigger!r}: a controller and scheduled go "
            "together"
        )


def the_other_rows_are_strategies(strategy: Strategy) -> None:
    """What the strategy becomes with another optimizer, and with other links, is a strategy, too."""
    for field in ("nonlinear", "near"):
        changes = getattr(strategy, field)
        if not isinstance(changes, Mapping):
            raise StrategyError(f"{field} = {changes!r}; it is a table of parts, as {{shares: gradients}} is")
        fixed = ("name", "about", "nonlinear", "near")
        unknown = [name for name in changes if name not in strategy.to_dict() or name in fixed]
        if unknown:
            raise StrategyError(f"{field}: a strategy has no part {unknown[0]!r} that can change")
    if strategy.nonlinear or strategy.near:
        for near in (False, True):
            strategy.with_optimizer("adam", near=near)


def damped_goes_by_the_schedule(strategy: Strategy) -> None:
    """A damped resume divides by the rounds under way, which only the controller's schedule says."""
    if strategy.auto is None and parts.parse("resume", strategy.resume).in_flight_share(2) < 1:
        raise StrategyError(
            f"resume {strategy.resume!r}: damped goes by the sync schedule, so it needs controller = 'auto'"
        )


def a_round_of_many_where_pushes_are_compared(strategy: Strategy) -> None:
    """An aggregator that compares pushes needs rounds that have several."""
    alone, aggregator = parts.parse("consistency", strategy.consistency).alone, strategy.aggregator
    made = parts.parse("aggregator", aggregator)
    compares = (
        parts.name_of("aggregator", aggregator) in _OF_MANY or made.limit or getattr(made, "of", "mean") != "mean"
    )
    if alone and compares:
        raise StrategyError(
            f"aggregator {strategy.aggregator!r} compares the pushes of a round, but with {strategy.consistency!r} "
            "each is a round of its own; take mean, sum or outer"
        )
