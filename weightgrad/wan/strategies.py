"""The table: every published system is a row of parts.

A row says what a site shares, how its workers work together, when a round starts, what leaves
pending, with which codecs, what the global server makes of it, how far sites may run apart, and where
the local model goes on. A recipe takes a row by name and may change any part of it:

    strategy: {name: diloco, every: 50, codec: "ef(qsgd(bits=4))"}

A new system is a new part or a new row, never an `if` in an old one.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightgrad import codecs
from weightgrad.codecs import Codec, ErrorFeedback
from weightgrad.codecs.sparse import check_values_codec
from weightgrad.errors import SpecError, StrategyError
from weightgrad.site.weights import WeightsOut
from weightgrad.wan import aggregators, consistency, parts, resume, selectors, triggers
from weightgrad.wan.global_server import ServerPlan
from weightgrad.wan.planner import Auto
from weightgrad.wan.site_end import SitePlan

_PARTS = {
    "trigger": "trigger",
    "selector": "selector",
    "down_selector": "selector",
    "aggregator": "aggregator",
    "consistency": "consistency",
    "resume": "resume",
    "planner": "planner",
}
_CODECS = ("gradients", "weights", "up", "down", "flush")
_SHORT = {"codec": "up", "every": "trigger"}
_AUTO_SECONDS = 60.0
_OF_MANY = ("sender_mean", "median", "trimmed_mean")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One row. Text throughout, so that a row reads like the table in the design."""

    name: str
    about: str
    shares: str = "gradients"  # or "updates"
    combine: str = "mean"  # or "serial": each worker's gradient applied in turn
    exchange: str = (
        "allreduce"  # or "server": through the local server's card; "sharded": it is dealt among the workers
    )
    gradients: str = "fp32"  # codec of a worker's gradient inside the site
    weights: str = "fp32"  # codec of the weights given to the workers (lossaware(...) for WeightGrad)
    exempt: str = "default"  # tensors that go as fp32 all the same: names with * and ?, separated by commas
    correction: float = 0.0  # a worker's momentum before its codec (DGC's correction); the optimizer's is then off
    serial_scale: float | None = None  # rate of a serial step, as a share; None: 1/n
    trigger: str = "every(1)"
    selector: str = "all"
    up: str = "fp32"
    down: str = "fp32"
    down_selector: str = "all"
    per: str = "flat"  # or "tensor": what a codec sees at a time
    keep_loss: bool = True
    aggregator: str = "mean"
    consistency: str = "sync"
    overlap: int = 0  # steps a site goes on while a round is on its way
    hide: int = 0  # overlap is as many steps as the slowest link needs for a round, at most this; 0: as said
    resume: str = "base"
    relay: int = 0  # with so many sites or fewer an answer is the pushes as they came, less the receiver's own
    planner: str = "fixed"  # or "auto(...)": the server sets trigger, overlap and both codecs from what is measured
    flush: str = "fp32"  # codec of what is pending at the end; "none" leaves it
    judge: str = "base"  # or "quantized": which weights the accuracy is of
    t: float | None = None  # stall rule: seconds without news after which no weights are released
    t_local: float | None = None  # seconds after which a missing site holds the others back
    t_global: float | str | None = "auto"  # seconds after which it is lost; auto: 60, or ten rounds if those are longer
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # changes to the recipe's optimizer

    def __post_init__(self) -> None:
        one_of = {
            "shares": ("gradients", "updates"),
            "combine": ("mean", "serial"),
            "exchange": ("allreduce", "server", "sharded"),
            "per": ("flat", "tensor"),
            "judge": ("base", "quantized"),
        }
        for name, allowed in one_of.items():
            if getattr(self, name) not in allowed:
                raise StrategyError(f"{name} = {getattr(self, name)!r}; it is one of {', '.join(allowed)}")
        for name, kind in _PARTS.items():
            try:
                parts.parse(kind, getattr(self, name))
            except StrategyError as error:
                raise StrategyError(f"{name} = {getattr(self, name)!r}: {error}") from None
        for name in _CODECS:
            self.codec(name) if name == "flush" else self.wan_codec(name)
        if not isinstance(self.keep_loss, bool):
            raise StrategyError(f"keep_loss = {self.keep_loss!r}; it is true or false")
        if not isinstance(self.optimizer, Mapping):
            raise StrategyError(f"optimizer = {self.optimizer!r}; it is a table of options, such as {{momentum: 0.0}}")
        parts.check("strategy", "overlap", self.overlap, 0, 10**6, whole=True)
        parts.check("strategy", "hide", self.hide, 0, 10**6, whole=True)
        parts.check("strategy", "relay", self.relay, 0, 10**3, whole=True)
        parts.check("strategy", "correction", self.correction, 0, 0.9999)
        if self.serial_scale is not None:
            parts.check("strategy", "serial_scale", self.serial_scale, 1e-9, 1e6)
        for name in ("t", "t_local", "t_global"):
            if getattr(self, name) not in (None, "auto" if name == "t_global" else None):
                parts.check("strategy", name, getattr(self, name), 0, 1e9)
        self._fit()

    def _fit(self) -> None:
        if self.shares == "gradients":
            for name, plain in (
                ("combine", "mean"),
                ("weights", "fp32"),
                ("resume", "base"),
                ("overlap", 0),
                ("hide", 0),
                ("relay", 0),
            ):
                if getattr(self, name) != plain:
                    raise StrategyError(f"{name} = {getattr(self, name)!r} needs shares = 'updates', not 'gradients'")
            if self.aggregator.startswith("outer"):
                raise StrategyError(f"aggregator {self.aggregator!r} moves updates; set shares = 'updates'")
        carries = self._error_carrier()
        if not self.keep_loss and carries is not None:
            raise StrategyError(f"keep_loss = false, but {carries} is error feedback; take a plain codec or keep it")
        if self.exchange == "allreduce" and (self.weights != "fp32" or self.combine == "serial"):
            raise StrategyError("quantized weights and serial workers need exchange = 'server' or 'sharded'")
        if self.serial_scale is not None and self.combine != "serial":
            raise StrategyError("serial_scale is for combine = 'serial'")
        if self.correction and self.exchange == "allreduce" and self.gradients != "fp32":
            raise StrategyError(
                "correction needs exchange = 'server' or 'sharded' when gradients are quantized in the site"
            )
        if self.judge == "quantized" and self.weights == "fp32":
            raise StrategyError("judge = 'quantized', but the weights are fp32")
        self._fit_relay()
        self._fit_selectors()
        if self.auto is not None and (self.shares != "updates" or self.consistency != "sync"):
            raise StrategyError(f"planner {self.planner!r} needs shares = 'updates' and consistency = 'sync'")
        if (self.auto is not None) != (self.trigger.partition("(")[0] == "paced"):
            raise StrategyError(f"planner {self.planner!r} with trigger {self.trigger!r}: auto and paced go together")
        if self.auto is None and parts.parse("resume", self.resume).flight_share(2) < 1:
            raise StrategyError(f"resume {self.resume!r}: damped goes by the pace, so it needs planner = 'auto'")
        if parts.parse("consistency", self.consistency).alone and parts.call("", self.aggregator)[0] in _OF_MANY:
            raise StrategyError(
                f"aggregator {self.aggregator!r} compares the pushes of a round, but with {self.consistency!r} each "
                "is a round of its own; take mean, sum or outer"
            )

    def _fit_relay(self) -> None:
        """Sites take the mean of whole pushes themselves, each entry once: nothing else is made of them on the way."""
        alone = parts.parse("consistency", self.consistency).alone
        plain = self.aggregator == "mean" and self.down_selector == "all" and not self.resume.startswith("mix")
        if self.relay and (alone or not plain):
            raise StrategyError(
                f"relay = {self.relay} needs aggregator = 'mean', down_selector = 'all', rounds of all sites and a "
                f"resume other than mix; here they are {self.aggregator!r}, {self.down_selector!r}, "
                f"{self.consistency!r} and {self.resume!r}"
            )

    def _fit_selectors(self) -> None:
        for name, column in (("selector", "up"), ("down_selector", "down")):
            codec = self.wan_codec(column)
            plain = codec.inner if isinstance(codec, ErrorFeedback) else codec
            if parts.parse("selector", getattr(self, name)).single:
                try:
                    check_values_codec(name, plain)
                except SpecError as error:
                    raise StrategyError(f"{name} = {getattr(self, name)!r} with {column} = {codec}: {error}") from None
        chosen, trigger = parts.parse("selector", self.selector), parts.parse("trigger", self.trigger)
        if isinstance(chosen, selectors.Fragment) and chosen.count > 1:
            turns = trigger.fragments if isinstance(trigger, triggers.Staggered) else 1
            if turns % chosen.count:
                raise StrategyError(
                    f"selector {self.selector!r} with trigger {self.trigger!r}: some fragments would never have their "
                    f"turn; write trigger: staggered(steps, {chosen.count})"
                )

    def _error_carrier(self) -> Codec | None:
        up = self.codec("up")
        return up if up is not None and up.carries_error else None

    def codec(self, name: str) -> Codec | None:
        """The codec of that column, None for "none"."""
        text = getattr(self, name)
        if text == "none":
            return None
        try:
            return codecs.parse(text)
        except SpecError as error:
            raise StrategyError(f"{name} = {text!r}: {error}") from None

    def wan_codec(self, name: str) -> Codec:
        """The same, which must be one."""
        found = self.codec(name)
        if found is None:
            raise StrategyError(f'{name} = "none"; only flush may be none')
        return found

    @property
    def weights_out(self) -> WeightsOut | None:
        """How weights go to the workers; None: as they are."""
        found = self.codec("weights")
        if self.weights == "fp32" or found is None:
            return None
        patterns = [pattern.strip() for pattern in self.exempt.split(",")]
        return WeightsOut(codec=found, exempt="default" if self.exempt == "default" else patterns)

    def inside(self, workers: int) -> Strategy:
        """The row within a site of so many workers: one alone has nobody to encode anything for."""
        if workers > 1:
            return self
        combine = "mean" if self.serial_scale is None else self.combine
        return dataclasses.replace(self, gradients="fp32", weights="fp32", combine=combine, judge="base")

    def for_site(self) -> SitePlan:
        """The parts a site's state machine needs."""
        return SitePlan(
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
            t=self.t,
            pace=auto.first().pace if (auto := self.auto) is not None else None,
        )

    @property
    def auto(self) -> Auto | None:
        """The planner, where the server sets the pace."""
        found = parts.parse("planner", self.planner)
        return found if isinstance(found, Auto) else None

    def for_server(self) -> ServerPlan:
        """The parts the global server's needs."""
        down = self.wan_codec("down")
        return ServerPlan(
            aggregator=parts.parse("aggregator", self.aggregator),
            consistency=parts.parse("consistency", self.consistency),
            down=down,
            down_selector=parts.parse("selector", self.down_selector),
            per_tensor=self.per == "tensor",
            keep_loss=self.keep_loss or down.carries_error,
            flush=self.codec("flush"),
            calls=parts.parse("trigger", self.trigger).calls,
            t_local=self.t_local,
            t_global=_AUTO_SECONDS if isinstance(self.t_global, str) else self.t_global,
            adapts=self.t_global == "auto",
            auto=self.auto,
            relay=self.relay,
        )

    def optimizer_with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's optimizer options, as this row changes them."""
        changes = {"momentum": 0.0, **self.optimizer} if self.correction else self.optimizer
        return {**options, **{k: v for k, v in changes.items() if k in options}}

    def row(self) -> dict[str, Any]:
        """As plain values, for a ledger."""
        return dataclasses.asdict(self)


def _table(*rows: Strategy) -> dict[str, Strategy]:
    return {row.name: row for row in rows}


_WEIGHTGRAD = Strategy(
    name="weightgrad",
    about="the few largest pending entries by sign and one size, overlapped; quantized inside the site",
    shares="updates",
    exchange="sharded",
    gradients="qsgd(bits=8)",
    weights="lossaware(bits=8)",
    trigger="significance(threshold=2.5, at_most=4, low=2.5, every=2)",
    up="ef(topk(0.1) > sign())",
    down="ef(topk(0.2) > sign())",
    hide=8,
    flush="none",
)

TABLE = _table(
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
        about="TernGrad: clipped ternary gradients up; 4 bits down, as its sum of scalers takes",
        exchange="sharded",
        gradients="terngrad(clip=2.5)",
        up="terngrad(clip=2.5)",
        down="qsgd(bits=4)",
        per="tensor",
        keep_loss=False,
    ),
    Strategy(
        name="onebit",
        about="one-bit SGD: column means of both signs, momentum inside the error feedback, both ways",
        correction=0.9,
        up="onebit()",
        down="onebit()",
        per="tensor",
    ),
    Strategy(
        name="adaptive",
        about="Dryden: the largest 1/64 by column means, momentum inside the error feedback, both ways",
        correction=0.9,
        up="adaptive(pi=64)",
        down="adaptive(pi=32)",
        per="tensor",
    ),
    Strategy(
        name="dgc",
        about="deep gradient compression: top 0.1 % with momentum correction and warm-up",
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
        name="gaia",
        about="Gaia: entries that change a weight by more than 1 %/sqrt(t), bounded lead",
        shares="updates",
        selector="gaia(0.01)",
        down_selector="nonzero",
        aggregator="mean",
        consistency="bounded(1)",
        resume="base_and_pending",
    ),
    _WEIGHTGRAD,
    dataclasses.replace(
        _WEIGHTGRAD,
        name="weightgrad-serial",
        about="the same, each worker's gradient applied in turn",
        combine="serial",
    ),
    Strategy(
        name="weightgrad-paper",
        about="the paper to the letter: ternary gradients, loss-aware ternary weights, significant tensors",
        shares="updates",
        exchange="server",
        gradients="terngrad(clip=2.5)",
        weights="lossaware(bits='ternary')",
        trigger="significance(threshold=4.0, at_most=8)",
        selector="significant('tensor')",
        up="terngrad(clip=2.5)",
        down="qsgd(bits=4)",
        per="tensor",
        keep_loss=False,
        resume="base_and_pending",
        flush="fp32",
        judge="quantized",
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
        resume="base_and_pending",
    ),
    Strategy(
        name="auto",
        about="no tuning: rounds, density and overlap from measured steps and links, so that the WAN hides",
        shares="updates",
        gradients="qsgd(bits=8)",
        trigger="paced(4)",
        planner="auto()",
        up="ef(topk(0.01) > sign())",
        down="ef(topk(0.02) > sign())",
        resume="base_and_pending(0.25, damped=True)",
        relay=3,
        flush="none",
    ),
)


def available() -> dict[str, str]:
    """Every row and what it is."""
    return {name: row.about for name, row in TABLE.items()}


def find(name: str, changes: Mapping[str, Any] | None = None) -> Strategy:
    """The row of that name, with some of its parts changed."""
    if name not in TABLE:
        near = difflib.get_close_matches(name, TABLE, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise StrategyError(f"no strategy {name!r}{hint} There are {', '.join(TABLE)}")
    known = {f.name: f for f in dataclasses.fields(Strategy) if f.name not in ("name", "about")}
    wanted: dict[str, Any] = {}
    for key, value in (changes or {}).items():
        column = _SHORT.get(key, key)
        if column not in known:
            near = difflib.get_close_matches(key, [*known, *_SHORT], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise StrategyError(f"strategy has no part {key!r}{hint} It has {', '.join([*known, *_SHORT])}")
        if key == "every":
            value = f"every({value})"
        wanted[column] = value
    try:
        return dataclasses.replace(TABLE[name], **wanted)
    except (TypeError, AttributeError) as error:
        raise StrategyError(f"strategy {name}: {error}; parts are written as text") from None


__all__ = ["TABLE", "Strategy", "aggregators", "available", "consistency", "find", "resume", "selectors", "triggers"]
