"""The sections of a recipe: their keys, the values allowed, and the defaults.

The description of a field is what an error message offers as allowed. Quantities are kept in bit/s and seconds,
whatever unit they were written in. A section is checked when it is made and never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, PlainSerializer, Tag, model_validator

from weightgrad import units
from weightgrad.lab.recipes.document import Mistake, MistakesError, show_value
from weightgrad.lab.recipes.values import (
    BitRate,
    Boolean,
    Duration,
    Integer,
    Number,
    Pair,
    Seconds,
    Section,
    SiteName,
    StepTime,
    Text,
)

SITE_LIMIT = 10_000


def _word_or_mapping(value: object) -> str:
    return "<mapping>" if isinstance(value, (dict, BaseModel)) else "<word>"


class Dirichlet(Section):
    """Label skew between sites: the smaller alpha, the fewer labels a site has."""

    dirichlet: Number = Field(gt=0, description="alpha, a number above 0; 0.1 is very skewed, 100 hardly")


class Data(Section):
    """The data set, and how it is divided among the workers."""

    name: Text = Field(description="the name of a data set, e.g. digits")
    shards: Annotated[
        Annotated[Literal["iid", "folders"], Tag("<word>")] | Annotated[Dirichlet, Tag("<mapping>")],
        Discriminator(_word_or_mapping),
    ] = Field(default="iid", description="iid, folders or {dirichlet: 0.5}")
    augment: Boolean = Field(default=False, description="true or false")
    directory: Text | None = Field(default=None, description="a path, or null for where `data fetch` puts it")
    limit: Integer | None = Field(default=None, ge=1, description="a whole number from 1, or null for all")
    size: Integer | None = Field(
        default=None, ge=1, le=4096, description="pixels on a side, e.g. 224; folder only; null for 32"
    )
    threads: Integer = Field(default=2, ge=0, le=256, description="threads that decode images, from 0; folder only")

    @model_validator(mode="after")
    def _size_is_for_folders(self) -> Data:
        if self.size is not None and self.name != "folder":
            message = f"found {self.size}; only images of folder are resized, not those of {self.name}: remove it"
            raise MistakesError([Mistake(("size",), message)])
        return self


class Model(Section):
    """The model."""

    name: Text = Field(description="the name of a model, e.g. lenet-digits")
    options: dict[str, Any] = Field(default={}, description="a mapping of the model's own options")


class Optimizer(Section):
    """A torch.optim optimizer, lars or muon."""

    name: Literal["sgd", "adam", "adamw", "adagrad", "adadelta", "lars", "muon"] = Field(
        default="sgd", description="sgd, adam, adamw, adagrad, adadelta, lars or muon"
    )
    lr: Number = Field(gt=0, description="a number above 0")
    momentum: Number = Field(default=0.0, ge=0, lt=1, description="a number from 0 to below 1; sgd, lars and muon only")
    weight_decay: Number = Field(default=0.0, ge=0, description="a number from 0")
    nesterov: Boolean = Field(default=False, description="true or false; sgd with momentum only")
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] | None = Field(
        default=None, description="[beta1, beta2], each from 0 to below 1; adam and adamw only; null for torch's"
    )
    eps: Number | None = Field(
        default=None, gt=0, description="a number above 0; not for sgd and muon; null for torch's"
    )

    @model_validator(mode="after")
    def _options_fit(self) -> Optimizer:
        unfit = {
            "momentum": self.momentum != 0 and self.name not in ("sgd", "lars", "muon"),
            "nesterov": self.nesterov and (self.name != "sgd" or self.momentum == 0),
            "betas": self.betas is not None and self.name not in ("adam", "adamw"),
            "eps": self.eps is not None and self.name in ("sgd", "muon"),
        }
        _refuse(self, [key for key, wrong in unfit.items() if wrong], f"does not go with {self.name}")
        return self


class Decay(Section):
    """The learning rate is multiplied by `decay` at each of the steps in `at`."""

    decay: Number = Field(gt=0, lt=1, description="a number between 0 and 1")
    at: tuple[Annotated[Integer, Field(ge=1)], ...] = Field(
        min_length=1, description="a list of ascending steps from 1"
    )

    @model_validator(mode="after")
    def _ascending(self) -> Decay:
        if list(self.at) != sorted(set(self.at)):
            raise MistakesError([Mistake(("at",), f"found {list(self.at)}; wanted ascending steps")])
        return self


class Training(Section):
    """Steps, batch, optimizer, learning rate schedule and evaluation."""

    steps: Integer = Field(ge=1, description="a whole number from 1")
    batch: Integer = Field(ge=1, description="samples a step over all workers of all sites, a multiple of their number")
    optimizer: Optimizer = Field(description="a mapping, e.g. {name: sgd, lr: 0.05, momentum: 0.9}")
    schedule: Annotated[
        Annotated[Literal["constant", "cosine"], Tag("<word>")] | Annotated[Decay, Tag("<mapping>")],
        Discriminator(_word_or_mapping),
    ] = Field(default="constant", description="constant, cosine or {decay: 0.1, at: [500, 1000]}")
    warmup: Integer = Field(
        default=0, ge=0, description="steps in which the learning rate rises, a whole number from 0"
    )
    evaluate_every: Integer = Field(default=100, ge=1, description="a whole number of steps from 1")
    evaluate_on: Integer | None = Field(
        default=None, ge=1, description="a number of test samples from 1, or null for all"
    )
    ema: Number | None = Field(default=None, ge=0, lt=1, description="a decay from 0 to below 1, e.g. 0.999, or null")
    clip_norm: Number | None = Field(default=None, gt=0, description="a norm per layer above 0, or null")
    target: Number | None = Field(default=None, gt=0, le=1, description="an accuracy above 0, at most 1, or null")


class Server(Section):
    """The global server."""

    name: SiteName = Field(description="a name that no site has, e.g. ohio")
    bandwidth_bit_s: BitRate | None = Field(
        default=None, alias="bandwidth", description="a bit rate, e.g. 1 Gbit/s, or null for unlimited"
    )
    processes: Integer = Field(
        default=1, ge=1, le=1024, description="server processes that divide the model, a whole number from 1 to 1024"
    )


class Lan(Section):
    """The network inside a site."""

    bandwidth_bit_s: BitRate = Field(default=1e9, alias="bandwidth", description="a bit rate, e.g. 900 Mbit/s")
    delay_seconds: Seconds = Field(default=1e-4, alias="delay", description="a time one way, e.g. 0.1 ms")


class SiteLan(Section):
    """Values of one site's network that differ from the recipe's `lan`."""

    bandwidth_bit_s: BitRate | None = Field(default=None, alias="bandwidth", description="a bit rate, e.g. 900 Mbit/s")
    delay_seconds: Seconds | None = Field(default=None, alias="delay", description="a time one way, e.g. 0.1 ms")


class SiteCompute(Section):
    """Values of one site's speed that differ from the recipe's `compute`."""

    seconds_per_step: StepTime | None = Field(default=None, description="a time above 0, e.g. 30 ms, or calibrate")
    jitter: Number | None = Field(default=None, ge=0, lt=1, description="a number from 0 to below 1")


class SiteEntry(Section):
    """A site, or with `count` several sites whose names differ in a number."""

    name: SiteName = Field(description="a name, e.g. virginia, or with count a template, e.g. edge-{}")
    count: Integer | None = Field(
        default=None, ge=1, le=SITE_LIMIT, description=f"with a template: how many, 1 to {SITE_LIMIT}"
    )
    workers: Integer = Field(ge=1, le=SITE_LIMIT, description=f"a whole number from 1 to {SITE_LIMIT}")
    sharding: Literal["none", "fsdp2"] = Field(
        default="none", description="none (every worker has the whole model) or fsdp2 (each has its rows)"
    )
    lan: SiteLan | None = Field(default=None, description="a mapping with what differs from the recipe's lan")
    compute: SiteCompute | None = Field(default=None, description="a mapping with what differs from compute")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all sites of this entry: edge-1, edge-2, and so on."""
        if self.count is None:
            return (self.name,)
        return tuple(self.name.replace("{}", str(number)) for number in range(1, self.count + 1))

    @model_validator(mode="after")
    def _template_has_a_count(self) -> SiteEntry:
        if (self.count is None) == ("{}" in self.name):
            raise MistakesError([Mistake(("name",), f"found {self.name!r}; count and '{{}}' in the name go together")])
        return self


class LinkEntry(Section):
    """A WAN link; both directions are equal unless `back` is given. With a template, one link for each site."""

    between: Pair = Field(description="two names of sites or the server, e.g. [ohio, virginia]")
    bandwidth_bit_s: BitRate | None = Field(default=None, alias="bandwidth", description="a bit rate, e.g. 90 Mbit/s")
    back_bit_s: BitRate | None = Field(
        default=None, alias="back", description="a bit rate from the second to the first, or null for the same"
    )
    delay_seconds: Seconds = Field(alias="delay", description="a time one way, e.g. 31 ms")
    loss: Number = Field(default=0.0, ge=0, lt=1, description="a fraction of packets from 0 to below 1")
    trace: tuple[tuple[Seconds, BitRate], ...] | None = Field(
        default=None,
        min_length=1,
        description="a list of [time, bit rate] from 0 s on, e.g. [[0 s, 100 Mbit/s], [60 s, 20 Mbit/s]], or null",
    )

    @model_validator(mode="after")
    def _one_bandwidth(self) -> LinkEntry:
        found = []
        if self.bandwidth_bit_s is None and self.trace is None:
            found.append(Mistake(("bandwidth",), "missing; wanted a bit rate, e.g. 90 Mbit/s, or a trace"))
        if self.bandwidth_bit_s is not None and self.trace is not None:
            found.append(Mistake(("trace",), "a link has a bandwidth or a trace, not both"))
        if self.back_bit_s is not None and self.trace is not None:
            found.append(Mistake(("back",), "a trace is for both directions; write bandwidth and back instead"))
        times = [time for time, _ in self.trace or ((0.0, 1.0),)]
        if times[0] != 0 or any(later <= sooner for sooner, later in pairwise(times)):
            shown = ", ".join(map(units.show_seconds, times[:6]))
            found.append(Mistake(("trace",), f"times must ascend from 0 s, found {shown}"))
        if found:
            raise MistakesError(found)
        return self


class Straggler(Section):
    """Workers that are slower: always, or at each step with a probability."""

    site: SiteName | None = Field(default=None, description="the name or template of a site, or null for all")
    worker: Integer | None = Field(default=None, ge=0, description="a worker, counted from 0, or null for all")
    probability: Number = Field(default=1.0, gt=0, le=1, description="a number above 0, at most 1")
    factor: Number = Field(ge=1, description="how many times slower, a number from 1")

    @model_validator(mode="after")
    def _is_limited(self) -> Straggler:
        if self.site is None and self.worker is not None:
            raise MistakesError([Mistake(("worker",), "a worker is one of a site; add site: NAME")])
        if self.site is None and self.probability == 1:
            raise MistakesError([Mistake((), "wanted a site, or a probability below 1")])
        return self


class Compute(Section):
    """How long a step takes in virtual time."""

    seconds_per_step: StepTime = Field(description="a time above 0, e.g. 0.03 or 30 ms, or calibrate")
    jitter: Number = Field(default=0.0, ge=0, lt=1, description="a relative spread, a number from 0 to below 1")
    codec_speed: Number = Field(default=1.0, gt=0, description="a number above 0; 0.5 is half as fast as measured")
    step_overhead_seconds: Seconds = Field(
        default=0.0, alias="step_overhead", description="a time that a step takes besides computing, e.g. 2 ms"
    )
    message_overhead_seconds: Seconds = Field(
        default=0.0, alias="message_overhead", description="a time to send or receive a message, e.g. 1 ms"
    )
    stragglers: tuple[Straggler, ...] = Field(
        default=(), description="a list, e.g. [{site: virginia, worker: 2, factor: 3}, {probability: 0.01, factor: 5}]"
    )


class FaultEntry(Section):
    """A fault or a change of membership at a time."""

    at_seconds: Seconds = Field(alias="at", description="a time, e.g. 10 s")


class Cut(FaultEntry):
    """A link carries nothing."""

    cut: Pair = Field(description="the two ends of a link, e.g. [ohio, virginia]")
    for_seconds: Duration | None = Field(default=None, alias="for", description="a time above 0, or null for ever")


class Slow(FaultEntry):
    """A link has a fraction of its bandwidth."""

    slow: Pair = Field(description="the two ends of a link, e.g. [ohio, virginia]")
    factor: Number = Field(gt=0, lt=1, description="what is left of the bandwidth, between 0 and 1")
    for_seconds: Duration | None = Field(default=None, alias="for", description="a time above 0, or null for ever")


class Flap(FaultEntry):
    """A link is cut in the first half of every period."""

    flap: Pair = Field(description="the two ends of a link, e.g. [ohio, virginia]")
    period_seconds: Duration = Field(alias="period", description="a time above 0, e.g. 2 s")
    for_seconds: Duration = Field(alias="for", description="a time above 0, e.g. 20 s")


class Kill(FaultEntry):
    """A site or the server is killed, and perhaps restarted."""

    kill: SiteName = Field(description="the name of a site or of the server")
    for_seconds: Duration | None = Field(default=None, alias="for", description="a time above 0, or null for ever")


class Join(FaultEntry):
    """A site joins that was not there before."""

    join: SiteName = Field(description="the name of a site")


class Leave(FaultEntry):
    """A site leaves in good order."""

    leave: SiteName = Field(description="the name of a site")


FAULTS = ("cut", "slow", "flap", "kill", "join", "leave")


def _fault_kind(value: object) -> str | None:
    if isinstance(value, FaultEntry):
        return f"<{type(value).__name__.lower()}>"
    kinds = [kind for kind in FAULTS if kind in value] if isinstance(value, dict) else []
    return f"<{kinds[0]}>" if len(kinds) == 1 else None


AnyFault: TypeAlias = Annotated[
    Annotated[Cut, Tag("<cut>")]
    | Annotated[Slow, Tag("<slow>")]
    | Annotated[Flap, Tag("<flap>")]
    | Annotated[Kill, Tag("<kill>")]
    | Annotated[Join, Tag("<join>")]
    | Annotated[Leave, Tag("<leave>")],
    Discriminator(_fault_kind),
]
TAGS = frozenset({"<word>", "<mapping>", *(f"<{kind}>" for kind in FAULTS)})


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy by name, and the parts that the recipe overrides; `weightgrad.core.strategies` checks them."""

    name: str
    overrides: dict[str, Any] = field(default_factory=dict)


def _strategy(value: object) -> object:
    if isinstance(value, StrategyChoice):
        return value
    if isinstance(value, str) and value:
        return StrategyChoice(value)
    if isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"]:
        return StrategyChoice(value["name"], {key: inside for key, inside in value.items() if key != "name"})
    if isinstance(value, dict):
        found = show_value(value.get("name"))
        raise MistakesError([Mistake(("name",), f"found {found}; wanted the name of a strategy, e.g. diloco")])
    raise ValueError(f"found {show_value(value)}; wanted a name, e.g. diloco, or {{name: diloco, every: 50}}")


Strategy: TypeAlias = Annotated[
    StrategyChoice,
    BeforeValidator(_strategy),
    PlainSerializer(lambda choice: {"name": choice.name, **choice.overrides}),
]


def _refuse(part: Section, keys: list[str], why: str) -> None:
    if keys:
        fields = type(part).model_fields
        raise MistakesError(Mistake((key,), f"{key} {why}; wanted: {fields[key].description}") for key in keys)
