"""What a strategy consists of, and what a site and the server need of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightgrad import codecs
from weightgrad.codecs import Codec
from weightgrad.core import parts
from weightgrad.core.controller.gradient_controller import Gradients
from weightgrad.core.controller.update_controller import Auto
from weightgrad.core.optimizers import is_linear
from weightgrad.core.optimizers.substep import MATCHED
from weightgrad.core.server.strategy import ServerStrategy
from weightgrad.core.site.strategy import SiteStrategy
from weightgrad.core.strategies import checks
from weightgrad.errors import SpecError, StrategyError

_AUTO_SECONDS = 60.0  # t_global = "auto" until rounds have been measured
_AUTO_STALL_SECONDS = 30.0  # t = "auto" likewise: a site stalls before the server gives it up


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One strategy. Parts and codecs are text, so that a strategy reads like a line of a recipe.

    It is checked when it is made: a StrategyError names the field that is wrong.

    Attributes:
        name: The name that a recipe uses.
        about: What it is, in one line.
        shares: What a site shares: "gradients" before its optimizer, or "updates" after it.
        combine: How the gradients of a site's workers are combined: "mean", or "serial", each applied in turn.
        exchange: How they meet: "allreduce"; "server", at one local server; "sharded", at a local server whose work
            is divided among the workers.
        gradients: Codec of a worker's gradient inside the site.
        weights: Codec of the weights that the local server gives to the workers, such as lossaware(...).
        exempt: Tensors that are sent as fp32 whatever the codec: names with * and ?, separated by commas; or
            "default".
        correction: Momentum of a worker before its codec (the momentum correction of DGC). The optimizer's own
            momentum is then off.
        serial_scale: Learning rate of a serial step, as a share of the optimizer's; None is 1/n with n workers;
            "matched" also changes the momentum, so that n serial steps are one mean step.
        trigger: When a round starts.
        selector: Which entries leave the residual in a round.
        up: Codec of a push, from site to server.
        down: Codec of a result, from server to sites.
        down_selector: Which entries of a result are sent.
        per: What a codec sees at a time: "flat", the whole vector, or "tensor", one parameter.
        keep_loss: Whether what a codec loses goes back to the residual.
        aggregator: What the server makes of the pushes of a round.
        consistency: How far sites may run apart.
        overlap: Steps that a site goes on while a round is under way.
        hide: Overlap is as many steps as the slowest link needs for a round, at most this many; 0 takes `overlap`.
        resume: Where the local model goes on after a result.
        relay: With at most this many sites a result is the pushes as they came, less the receiver's own.
        controller: "fixed"; or "auto(...)", and "gradients(...)" where those are shared, with which the server sets
            trigger, overlap and both codecs from what it measures.
        flush: Codec of the residual at the end of a run; "none" leaves it at the site.
        flush_residual: How much of the residual is sent then: "all"; or "local", as much as the local model contains
            (`resume`), so that the global model ends as the mean of the local models.
        evaluate: Which weights the accuracy is of: "global_model" or "quantized".
        t: Seconds without news after which a site stalls; None never. "auto" is 30, or five rounds where those take
            longer.
        t_local: Seconds after which a missing site holds the others back; None never.
        t_global: Seconds after which a missing site is lost; None never. "auto" is 60, or ten rounds where those
            take longer.
        optimizer: Changes to the recipe's optimizer.
        nonlinear: Changes to the strategy where the steps of the optimizer are not linear in the gradient, as Adam's
            are not: then the mean of the sites' updates is not the update of their mean gradient.
        near: Further changes where, besides, the links are so fast that waiting for shared gradients costs little.
    """

    name: str
    about: str
    shares: str = "gradients"
    combine: str = "mean"
    exchange: str = "allreduce"
    gradients: str = "fp32"
    weights: str = "fp32"
    exempt: str = "default"
    correction: float = 0.0
    serial_scale: float | str | None = None
    trigger: str = "every(1)"
    selector: str = "all"
    up: str = "fp32"
    down: str = "fp32"
    down_selector: str = "all"
    per: str = "flat"
    keep_loss: bool = True
    aggregator: str = "mean"
    consistency: str = "sync"
    overlap: int = 0
    hide: int = 0
    resume: str = "global_model"
    relay: int = 0
    controller: str = "fixed"
    flush: str = "fp32"
    flush_residual: str = "all"
    evaluate: str = "global_model"
    t: float | str | None = None
    t_local: float | None = None
    t_global: float | str | None = "auto"
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    nonlinear: Mapping[str, Any] = field(default_factory=dict)
    near: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.check(self)

    def codec(self, name: str) -> Codec | None:
        """Make the codec of a field.

        Args:
            name: "gradients", "weights", "up", "down" or "flush".

        Returns:
            The codec, or None where the field is "none".

        Raises:
            StrategyError: The field is not a codec spec.
        """
        text = getattr(self, name)
        if text == "none":
            return None
        try:
            return codecs.parse(text)
        except SpecError as error:
            raise StrategyError(f"{name} = {text!r}: {error}") from None

    def wan_codec(self, name: str) -> Codec:
        """Make the codec of a field that may not be "none".

        Args:
            name: "gradients", "weights", "up" or "down".

        Returns:
            The codec.

        Raises:
            StrategyError: The field is not a codec spec, or "none".
        """
        found = self.codec(name)
        if found is None:
            raise StrategyError(f'{name} = "none"; only flush may be none')
        return found

    @property
    def auto(self) -> Auto | Gradients | None:
        """The controller that sets the sync schedule, or None where the schedule is fixed."""
        found = parts.parse("controller", self.controller)
        return found if isinstance(found, Auto | Gradients) else None

    def with_optimizer(self, kind: str, *, near: bool = False) -> Strategy:
        """Adapt the strategy to an optimizer.

        Args:
            kind: The name of the optimizer, as in a recipe or as a class of torch.
            near: Whether the links are so fast that waiting for shared gradients costs little.

        Returns:
            The strategy, whose `nonlinear` and `near` parts have taken effect or are gone.
        """
        changes = {} if is_linear(kind) else {**self.nonlinear, **(self.near if near else {})}
        return dataclasses.replace(self, **{**changes, "nonlinear": {}, "near": {}})

    def inside(self, workers: int) -> Strategy:
        """Adapt the strategy to a site of so many workers: one worker alone has nobody to encode anything for."""
        if workers > 1:
            return self
        scaled = self.serial_scale not in (None, MATCHED)  # the others make one serial step one mean step
        return dataclasses.replace(
            self,
            gradients="fp32",
            weights="fp32",
            combine=self.combine if scaled else "mean",
            serial_scale=self.serial_scale if scaled else None,
            evaluate="global_model",
        )

    def averaged(self) -> Strategy:
        """Adapt the strategy to a site whose gradients FSDP2 or DDP averages: its parts inside a site do not apply."""
        return dataclasses.replace(
            self.inside(1), combine="mean", correction=0.0, exchange="allreduce", serial_scale=None
        )

    @property
    def whole_tensors(self) -> bool:
        """Whether no tensor may be cut between two server processes: a codec or an optimizer needs all of it."""
        return self.per == "tensor" or self.shares == "gradients"

    @property
    def needs_weights_at_server(self) -> bool:
        """Whether the server looks at the weights themselves, so that it must step where gradients are shared."""
        compensates = parts.parse("consistency", self.consistency).compensation
        return self.shares == "gradients" and bool(compensates or self.down_selector.startswith("gaia"))

    def for_site(self) -> SiteStrategy:
        """Make the parts that a site's state machine needs."""
        return SiteStrategy(
            shares_gradients=self.shares == "gradients",
            trigger=parts.parse("trigger", self.trigger),
            selector=parts.parse("selector", self.selector),
            up=self.wan_codec("up"),
            per_tensor=self.per == "tensor",
            keep_loss=self.keep_loss,
            consistency=parts.parse("consistency", self.consistency),
            overlap=self.overlap,
            resume=parts.parse("resume", self.resume),
            flush=self.codec("flush"),
            flush_local=self.flush_residual == "local",
            t=_AUTO_STALL_SECONDS if isinstance(self.t, str) else self.t,
            t_adapts=self.t == "auto",
            schedule=auto.first().schedule if (auto := self.auto) is not None else None,
        )

    def for_server(self) -> ServerStrategy:
        """Make the parts that the global server's state machine needs."""
        down, auto = self.wan_codec("down"), self.auto
        consistency, trigger = parts.parse("consistency", self.consistency), parts.parse("trigger", self.trigger)
        overlap = self.overlap if auto is None else auto.reach
        return ServerStrategy(
            aggregator=parts.parse("aggregator", self.aggregator),
            consistency=consistency,
            down=down,
            down_selector=parts.parse("selector", self.down_selector),
            per_tensor=self.per == "tensor",
            keep_loss=self.keep_loss or down.carries_error,
            flush=self.codec("flush"),
            calls=trigger.calls,
            t_local=self.t_local,
            t_global=_AUTO_SECONDS if isinstance(self.t_global, str) else self.t_global,
            adapts=self.t_global == "auto",
            auto=auto,
            relay=self.relay,
            rounds_ahead=1 + int(max(overlap, 0 if consistency.alone else consistency.ahead)),
            steps_a_round=trigger.most_steps if auto is None else auto.at_most,
        )

    def optimizer_with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Change the options of the recipe's optimizer as this strategy wants; options it does not have stay out."""
        changes = {"momentum": 0.0, **self.optimizer} if self.correction else self.optimizer
        return {**options, **{k: v for k, v in changes.items() if k in options}}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for an event log."""
        return dataclasses.asdict(self)
