"""Where a plan comes from: a recipe, or a function that makes a model and a few words on the command line."""

from __future__ import annotations

import importlib
import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightgrad.core import optimizers
from weightgrad.core import strategies as presets
from weightgrad.core.random_streams import TrainingStream
from weightgrad.core.strategies import Strategy
from weightgrad.errors import PlanError, WeightGradError
from weightgrad.kernels.noise import derive
from weightgrad.lab import models
from weightgrad.lab.data import augment, datasets, folder
from weightgrad.lab.plan import scenario as scenarios
from weightgrad.lab.plan import step_times
from weightgrad.lab.plan.devices import Device
from weightgrad.lab.plan.made_model import Built
from weightgrad.lab.plan.model_cost import ModelCost, cost_of
from weightgrad.lab.plan.scenario import Scenario, SiteGiven
from weightgrad.lab.plan.step_times import StepTimes
from weightgrad.lab.plan.trained_module import phase_seconds
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.choices import Choice, parse_choices
from weightgrad.lab.run.simulation import chosen_strategy, optimizer_options
from weightgrad.lab.run.task import Training
from weightgrad.lab.sim.compute import Compute
from weightgrad.lab.sim.local_network import LocalNetwork
from weightgrad.lab.sim.plan import SiteSpec
from weightgrad.lab.sim.task import Task

USUAL = ("baseline", "qsgd", "diloco", "streaming", "sparseloco", "weightgrad", "auto")
_IMAGES = {"cifar10": (10, 3, 32), "mnist": (10, 1, 28), "fashion-mnist": (10, 1, 28), "digits": (10, 1, 8)}
_CHARACTERS = 96  # of a text in ASCII, about
_CLASSES = 1000  # of a folder that is not here
_TIMED = 3
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_INPUT = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")


@dataclass(frozen=True)
class Source:
    """What is to be planned.

    Attributes:
        scenario: sites, links, training.
        cost: of one worker's step.
        times: of a worker's step, by the name of a site.
        devices: by the name of a site, where they are known.
        task: a real task to play through, or None for a stand-in.
        recipe: where it came from, or None.
        tokens: of a sample that is a text; None: it is not known to be one.
    """

    scenario: Scenario
    cost: ModelCost
    times: Mapping[str, StepTimes]
    devices: Mapping[str, Device] = field(default_factory=dict)
    task: Task | None = None
    recipe: Recipe | None = None
    tokens: int | None = None

    def samples(self, samples: int | None, tokens: int | None) -> int | None:
        """How many samples the time is asked for, given as samples or as tokens; None: those of the run.

        Raises:
            PlanError: both are given, or samples are not known to have tokens.
        """
        if tokens is None:
            return samples
        if samples is not None:
            raise PlanError("wanted --samples or --tokens, and not both")
        if self.tokens is None:
            raise PlanError(
                "--tokens: it is not known how many tokens a sample has; wanted --input LENGTH:int64, or a recipe with "
                "a text, or --samples instead"
            )
        return math.ceil(tokens / self.tokens)


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """What the command line says about a model without a recipe; `weightgrad plan --help` explains each."""

    model: str
    sites: str | None
    links: tuple[str, ...]
    input: str | None
    batch: int | None
    steps: int
    optimizer: str
    sharding: str
    dtype: str | None
    checkpointing: bool


def strategies_of(text: str | None, source: Source) -> list[tuple[str, Strategy]]:
    """The strategies to plan: those named, all, or the usual ones and the recipe's own.

    Raises:
        PlanError: none is named.
        StrategyError: a strategy does not exist.
    """
    if source.recipe is not None:
        return [(label, chosen_strategy(own)) for label, own in recipes_of(text, source.recipe)]
    return [(choice.label, presets.find(choice.name, dict(choice.settings))) for choice in _choices(text)]


def recipes_of(text: str | None, recipe: Recipe) -> list[tuple[str, Recipe]]:
    """The recipe with each of the strategies to plan.

    Raises:
        PlanError: no strategy is named.
        RecipeError: a strategy does not exist.
    """
    found = {choice.label: recipe.with_settings([choice.setting]) for choice in _choices(text)}
    if text is None:
        found[chosen_strategy(recipe).name] = recipe
    return list(found.items())


def _choices(text: str | None) -> list[Choice]:
    if text is None or text == "all":
        text = ",".join(USUAL if text is None else presets.available())
    if not text.strip():
        raise PlanError(f"--strategies {text!r}: no strategy; wanted names, e.g. baseline,diloco(every=50), or all")
    return parse_choices(text)


def of_recipe(recipe: Recipe, *, measure: bool, checkpointing: bool = False) -> Source:
    """A recipe's model and training. Its data need not be here, except with `measure`.

    Raises:
        PlanError: a site has no step time, and nothing is measured.
    """
    training = Training(recipe) if measure else None
    each = max(1, recipe.training.batch // recipe.workers)
    build, inputs = _of_recipe(recipe, each)
    options = (recipe.training.optimizer.name, optimizer_options(recipe.training.optimizer))
    cost = cost_of(build, options, inputs=inputs, batch=each, checkpointing=checkpointing)
    unknown = [site.name for site in recipe.site_list if site.compute.seconds_per_step == "calibrate"]
    seconds: dict[str, float] = {}
    if unknown and training is None:
        raise PlanError(
            f"compute.seconds_per_step of {', '.join(unknown)} is calibrate; give --measure, or a time with "
            "--set compute.seconds_per_step=0.03"
        )
    if training is not None:
        measured = _timed(training)
        seconds = dict.fromkeys(unknown, measured)
    layout = training.layout if training is not None else cost.layout
    tokens = _data_shape(recipe)[2] if recipe.data.name == "sotu" else None
    scenario = scenarios.of_recipe(recipe, layout, seconds)
    times = {
        site.name: step_times.of_recipe(
            cost, site.compute.seconds_per_step, step_times.MEASURED if site.name in seconds else "as the recipe says"
        )
        for site in scenario.sites
    }
    return Source(scenario, cost, times, {}, training, recipe, tokens)


def _timed(task: Training) -> float:
    """Seconds of one worker's pass on this machine: the best of a few."""
    weights, best = task.initial(), math.inf
    for step in range(_TIMED):
        began = time.perf_counter()
        next(task.gradients(0, weights, step))
        best = min(best, time.perf_counter() - began)
    return best


def _of_recipe(recipe: Recipe, batch: int) -> tuple[Callable[[], Built], Callable[[], Any]]:
    """What makes the recipe's model and a batch of it, without its data."""
    classes, channels, size = _data_shape(recipe)
    options = recipe.model.options

    def build() -> nn.Module:
        seed = derive(recipe.seed, TrainingStream.MODEL) >> 1
        try:
            return models.build(recipe.model.name, classes=classes, channels=channels, size=size, seed=seed, **options)
        except WeightGradError as error:
            raise PlanError(f"{recipe.name}: {error}") from error

    def inputs() -> torch.Tensor:
        if recipe.data.name == "sotu":
            return torch.zeros(batch, size, dtype=torch.int64)
        return torch.zeros(batch, channels, size, size)

    return build, inputs


def _data_shape(recipe: Recipe) -> tuple[int, int, int]:
    """Classes, channels and side of the data, or characters and length of a text."""
    name = recipe.data.name
    if name == "sotu":
        return _CHARACTERS, 1, int(recipe.model.options.get("context", datasets.CONTEXT))
    if name == "folder":
        side = folder.SIZE if recipe.data.size is None else recipe.data.size
        return _CLASSES, 3, side
    if name == "synthetic":
        made = datasets.load(name)
        classes, channels, side = made.classes, made.channels, made.size
    elif name in _IMAGES:
        classes, channels, side = _IMAGES[name]
    else:
        raise PlanError(f"{recipe.name}: no data set {name!r}; there are {', '.join(datasets.NAMES)}")
    return classes, channels, augment.pipeline(name, recipe.model.name, recipe.data.augment).size(side)


def of_model(given: ModelArguments, devices: Mapping[str, Device], *, measure: bool) -> Source:
    """A model that a user's function makes.

    Raises:
        PlanError: something is missing or cannot be read.
    """
    if given.sites is None or not given.links:
        raise PlanError("--model needs --sites, e.g. virginia=8xH100,tokyo=4xA100, and a --link for each of them")
    sites = scenarios.parse_sites(given.sites, devices)
    server, links = scenarios.parse_links(given.links, [site.name for site in sites])
    if given.sharding not in ("none", "fsdp2"):
        raise PlanError(f"--sharding {given.sharding}: wanted none or fsdp2")
    if given.optimizer not in optimizers.OPTIMIZERS:
        raise PlanError(f"--optimizer {given.optimizer}: wanted one of {', '.join(optimizers.OPTIMIZERS)}")
    options: tuple[str, dict[str, Any]] = (given.optimizer, {"lr": 1e-3})
    if given.optimizer in ("sgd", "lars"):
        options[1]["momentum"] = 0.9
    dtype = _dtype("--dtype", given.dtype)
    if dtype is not None and not dtype.is_floating_point:
        raise PlanError(f"--dtype {given.dtype}: a model is trained in a floating-point type; wanted e.g. bfloat16")
    build, inputs = import_build(given.model), _inputs(given.input, given.batch or 1)
    cost = cost_of(
        build, options, inputs=inputs, batch=given.batch, dtype=dtype, checkpointing=given.checkpointing, real=measure
    )
    by_name = {site.name: site.device for site in sites}
    sharded = given.sharding == "fsdp2"
    shards = {site.name: site.count if sharded else 1 for site in sites}
    if measure:
        phases = phase_seconds(build, options, inputs=inputs, dtype=dtype, checkpointing=given.checkpointing)
        times = dict.fromkeys(by_name, step_times.measured(cost, phases))
    else:
        times = {s.name: step_times.of_device(cost, s.device_name, s.device, shards[s.name]) for s in sites}
    specs = tuple(
        SiteSpec(s.name, s.count, _lan(s, cost, shards), Compute(times[s.name].seconds), shards[s.name] > 1)
        for s in sites
    )
    scenario = Scenario(
        name=given.model,
        layout=cost.layout,
        server=server,
        sites=specs,
        links=links,
        batch=cost.batch * sum(site.count for site in sites),
        steps=given.steps,
        optimizer=options,
        rate=lambda step: 1e-3,
    )
    return Source(scenario, cost, times, by_name, tokens=cost.tokens)


def _lan(site: SiteGiven, cost: ModelCost, shards: Mapping[str, int]) -> LocalNetwork:
    """The network inside a site, on which FSDP2 sends parameters and gradients in their own type, not as float32."""
    lan = site.lan
    if shards[site.name] == 1:
        return lan
    own = cost.gradient_bytes / max(1, 4 * cost.layout.numel)
    return LocalNetwork(lan.bandwidth_bit_s / own, lan.delay_seconds)


def import_build(text: str) -> Callable[[], Built]:
    """The function of `my_script:build`; a module of the present directory is found too.

    Raises:
        PlanError: there is no such module or function.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise PlanError(f"--model {text!r}: wanted MODULE:FUNCTION, e.g. my_script:build")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module.removesuffix(".py"))
    except (ImportError, SyntaxError) as error:
        raise PlanError(f"--model {text!r}: cannot import {module}: {error}") from None
    except (Exception, SystemExit) as error:
        raise PlanError(
            f"--model {text!r}: importing {module} failed: {type(error).__name__}: {error}; what a script "
            'does by itself, such as to read the command line or to train, belongs below if __name__ == "__main__"'
        ) from error
    if (found := getattr(imported, name, None)) is None:
        raise PlanError(f"--model {text!r}: module {module} has no {name}")
    if not callable(found):
        raise PlanError(f"--model {text!r}: {name} is {type(found).__name__}; wanted a function without arguments")
    made: Callable[[], Built] = found
    return made


def _inputs(text: str | None, batch: int) -> Callable[[], torch.Tensor] | None:
    if text is None:
        return None
    match = _INPUT.fullmatch(text)
    sides = tuple(map(int, match[1].split("x"))) if match is not None else ()
    if match is None or not all(sides):
        raise PlanError(
            f"--input {text!r}: wanted the shape of a sample, e.g. 3x224x224, and perhaps a type, e.g. 2048:int64"
        )
    dtype = _dtype("--input", match[2]) or torch.float32
    if dtype in _QUANTIZED:
        raise PlanError(f"--input {text!r}: a batch has numbers; wanted a type such as float32, bfloat16 or int64")
    return lambda: torch.zeros((batch, *sides), dtype=dtype)


def _dtype(option: str, text: str | None) -> torch.dtype | None:
    if text is None:
        return None
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise PlanError(f"{option}: {text!r} is not a type of torch; wanted e.g. bfloat16, float32 or int64")
    return found
