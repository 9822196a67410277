"""A recipe in the simulator: what `weightgrad simulate` does."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightgrad import wire
from weightgrad.codecs import Codec
from weightgrad.core import strategies
from weightgrad.core.strategies import Strategy
from weightgrad.errors import StrategyError, WeightGradError
from weightgrad.event_log import EventLog
from weightgrad.lab.recipes.expansion import Site
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.recipes.recipe_file import RecipeFile
from weightgrad.lab.recipes.schema import Decay
from weightgrad.lab.run import checkpoint
from weightgrad.lab.run.task import Training
from weightgrad.lab.sim.compute import Compute, Straggler
from weightgrad.lab.sim.links import Link
from weightgrad.lab.sim.local_network import LocalNetwork
from weightgrad.lab.sim.plan import Fault, SimulationPlan, SiteSpec
from weightgrad.lab.sim.progress import Progress
from weightgrad.lab.sim.simulator import Simulator
from weightgrad.lab.sim.task import Task
from weightgrad.runtime.checkpoints.final_state import FinalState
from weightgrad.runtime.server.final_model import write_whole_model

__all__ = ["Progress", "chosen_strategy", "fitted_strategy", "simulate", "simulation_plan"]


NEAR = 0.3  # of a step: links are near if a gradient and its mean take no longer
NEAR_BITS = 9.0  # of an element, both ways


def chosen_strategy(recipe: RecipeFile) -> Strategy:
    """The recipe's strategy with its overrides.

    Raises:
        RecipeError: The strategy is wrong; the error names the line of the recipe.
    """
    choice = recipe.strategy
    try:
        return strategies.find(choice.name, choice.overrides)
    except StrategyError as error:
        wrong = next((key for key, value in choice.overrides.items() if _is_wrong_alone(choice.name, key, value)), None)
        raise recipe.error(("strategy",) if wrong is None else ("strategy", wrong), str(error)) from None


def _is_wrong_alone(name: str, key: str, value: object) -> bool:
    """Whether this override is wrong by itself, not only together with the others."""
    try:
        strategies.find(name)
        strategies.find(name, {key: value})
    except StrategyError:
        return name in strategies.PRESETS
    return False


def rate_of(recipe: Recipe) -> Callable[[int], float]:
    """The learning rate as a function of the step, counted from 0."""
    training = recipe.training
    peak, warmup, schedule = training.optimizer.lr, training.warmup, training.schedule

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        if schedule == "cosine":
            share = (step - warmup) / max(1, training.steps - warmup)
            return peak * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
        if isinstance(schedule, Decay):
            return float(peak * schedule.decay ** sum(step >= at for at in schedule.at))
        return peak

    return rate


def fitted_strategy(recipe: Recipe, numel: int) -> Strategy:
    """The recipe's strategy, with the parts for its optimizer and the overlap that hides a round behind compute.

    Args:
        recipe: Its optimizer, links and compute times decide.
        numel: Number of parameters of the model.
    """
    strategy = chosen_strategy(recipe)
    steps = [site.compute.seconds_per_step for site in recipe.site_list]
    shortest = min((float(seconds) for seconds in steps if seconds != "calibrate"), default=math.inf)
    near = math.isfinite(shortest) and _round_seconds(recipe, numel * NEAR_BITS) <= NEAR * shortest
    strategy = strategy.with_optimizer(recipe.training.optimizer.name, near=near)
    if not strategy.hide:
        return strategy
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    longest = _round_seconds(recipe, 8.0 * sum(_frame_bytes(strategy.wan_codec(way), noise) for way in ("up", "down")))
    needed = math.ceil(longest / shortest) if shortest > 0 else strategy.hide
    return dataclasses.replace(strategy, overlap=max(1, min(needed, strategy.hide)))


def _round_seconds(recipe: Recipe, bits: float) -> float:
    """Seconds from a push to its result on the slowest link, with so many bits both ways together."""
    links = [x for x in recipe.link_list if recipe.server.name in x.between]
    return max((2 * x.delay_seconds + bits / x.least_bit_s for x in links), default=0.0)


def _frame_bytes(codec: Codec, like: Tensor) -> int:
    payload, _ = codec.encode(like, codec.init(like), 0)
    return wire.frame_bytes(payload)


def simulation_plan(recipe: Recipe, task: Task) -> SimulationPlan:
    """The recipe as a plan for the simulator."""
    strategy = fitted_strategy(recipe, task.layout.numel)
    sites = []
    for site in recipe.site_list:
        lan = LocalNetwork(site.lan.bandwidth_bit_s, site.lan.delay_seconds)
        sharded = site.sharding == "fsdp2"
        sites.append(SiteSpec(site.name, site.workers, lan, compute_of(site, task), sharded))
    links = tuple(
        Link(x.between, x.bandwidth_bit_s, x.delay_seconds, x.loss, x.trace, x.back_bit_s) for x in recipe.link_list
    )
    faults = tuple(
        Fault(f.at_seconds, f.what, f.where, f.for_seconds, f.factor or 0.0, f.period_seconds or 1.0)
        for f in recipe.fault_list
    )
    training = recipe.training
    return SimulationPlan(
        server=recipe.server.name,
        server_bit_s=recipe.server.bandwidth_bit_s,
        sites=tuple(sites),
        links=links,
        strategy=strategy,
        steps=training.steps,
        optimizer=(training.optimizer.name, optimizer_options(training.optimizer)),
        rate=rate_of(recipe),
        seed=recipe.seed,
        evaluate_every=training.evaluate_every,
        ema=training.ema,
        clip_norm=training.clip_norm,
        codec_speed=recipe.compute.codec_speed,
        step_overhead=recipe.compute.step_overhead_seconds,
        message_overhead=recipe.compute.message_overhead_seconds,
        faults=faults,
        absent=recipe.absent_at_start,
        server_processes=recipe.server.processes,
    )


def compute_of(site: Site, task: Task) -> Compute:
    """The compute times of a site's workers."""
    seconds = site.compute.seconds_per_step
    if seconds == "calibrate":
        seconds = _calibrated(task)
    slow = tuple(Straggler(s.factor, s.site, s.worker, s.probability) for s in site.compute.stragglers)
    return Compute(float(seconds), site.compute.jitter, slow)


def optimizer_options(optimizer: Any) -> dict[str, Any]:
    """The options of an optimizer as keyword arguments; only those that it has."""
    found = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.name in ("sgd", "lars", "muon"):
        found["momentum"] = optimizer.momentum
    if optimizer.name == "sgd":
        found["nesterov"] = optimizer.nesterov
    if optimizer.betas is not None:
        found["betas"] = optimizer.betas
    if optimizer.eps is not None:
        found["eps"] = optimizer.eps
    return found


def _calibrated(task: Task) -> float:
    """Seconds of one worker's pass on this machine: the best of five. With it, a run depends on the machine."""
    weights = task.initial()
    best = math.inf
    for step in range(5):
        began = time.perf_counter()
        next(task.gradients(0, weights, step))
        best = min(best, time.perf_counter() - began)
    return best


def simulate(
    recipe: Recipe,
    out: Path,
    *,
    watch: Callable[[Progress], None] | None = None,
    checkpoint_seconds: float | None = None,
) -> dict[str, Any]:
    """Simulate a recipe.

    Args:
        recipe: What is trained, and where.
        out: The directory to write: event log, global model and summary, also if the run is interrupted.
        watch: Called with the progress.
        checkpoint_seconds: Wall time between two checkpoints in `out`. A run of the same recipe and the same sources
            goes on from the last one, to the same bits. None: no checkpoints, and none is read.

    Returns:
        The summary.

    Raises:
        WeightGradError: The loss is not finite before the first evaluation.
    """
    torch.set_num_threads(1)  # the same sums as in a worker process, and faster with small batches
    chosen_strategy(recipe)  # report its mistakes first: loading data may take a while
    task = Training(recipe)
    plan = simulation_plan(recipe, task)
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").unlink(missing_ok=True)
    (out / "recipe.yaml").write_text(recipe.to_yaml())
    saved = out / checkpoint.FILE
    mark = checkpoint.mark(recipe) if checkpoint_seconds is not None else ""
    begun = checkpoint.begun(saved, mark=mark) if checkpoint_seconds is not None else None
    began = time.monotonic() - (begun.wall_seconds if begun else 0.0)
    if begun is not None:
        (out / "events.jsonl").write_bytes(begun.log)
    with EventLog(out / "events.jsonl", replace=begun is None, append=begun is not None) as events:
        if begun is None:
            _write_header(events, recipe, plan, task)
            simulator = Simulator(plan, task, events, watch)
        else:
            simulator = checkpoint.read(saved, plan, task, events)
            simulator.watch = watch
        written = time.monotonic()

        def between() -> None:
            nonlocal written
            if checkpoint_seconds is not None and time.monotonic() - written >= checkpoint_seconds:
                checkpoint.write(saved, simulator, task, mark=mark, wall_seconds=time.monotonic() - began)
                written = time.monotonic()

        try:
            if begun is None:
                simulator.run(between)
            else:
                simulator.go_on(between)
            saved.unlink(missing_ok=True)
        finally:
            summary = _summary(simulator, recipe)
            simulator.forget_sites()
            _save(simulator, task.buffers(), out)
            _write(out / "summary.json", summary)
            _write(out / "wall.json", _wall(time.monotonic() - began))
    if summary["status"] == "diverged" and simulator.last is None:
        raise WeightGradError(
            f"{recipe.name}: the loss is not finite before the first evaluation; lower training.optimizer.lr"
        )
    return summary


def _write_header(events: EventLog, recipe: Recipe, plan: SimulationPlan, task: Task) -> None:
    events.write(
        "run",
        0.0,
        name=recipe.name,
        strategy=plan.strategy.name,
        parts=plan.strategy.to_dict(),
        seed=recipe.seed,
        steps=plan.steps,
        parameters=task.layout.numel,
        sites=[site.name for site in plan.sites],
        workers=recipe.workers,
        recipe=recipe.dump(),
    )


def _summary(simulator: Simulator, recipe: Recipe) -> dict[str, Any]:
    last, now = simulator.last, simulator.clock.now
    total = now * len(simulator.sites)
    return {
        "name": recipe.name,
        "strategy": simulator.plan.strategy.name,
        "seed": recipe.seed,
        "status": simulator.status,
        "steps": simulator.server.global_model.step,
        "accuracy": last.accuracy if last else None,
        "global_model_accuracy": last.global_model if last else None,
        "quantized_accuracy": last.quantized if last else None,
        "ema_accuracy": last.ema if last else None,
        "top5_accuracy": last.top5 if last else None,
        "loss": last.loss if last else None,
        "virtual_seconds": now,
        "wan_bytes": simulator.wan_bytes,
        "lan_bytes": simulator.lan_bytes,
        "waiting_share": sum(s.times.waiting for s in simulator.sites) / total if total else 0.0,
        "rounds": simulator.rounds,
        "parameters": simulator.task.layout.numel,
    }


def _save(simulator: Simulator, buffers: dict[str, Tensor], out: Path) -> None:
    """Write what a deployment writes: the model that the strategy is judged by, and its buffers."""
    layout, judged = simulator.task.layout, simulator.plan.strategy.evaluate == "quantized"
    vector = simulator.evaluator.quantized_model() if judged and simulator.status == "finished" else None
    quantized = None if vector is None else {slot.name: slot.of(vector) for slot in layout.slots}
    (out / "master.safetensors").unlink(missing_ok=True)
    state = FinalState(buffers=buffers, quantized=quantized)
    write_whole_model(out, layout, simulator.server.global_model.vector, state)


def _wall(seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "wall_seconds": round(seconds, 3),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")
