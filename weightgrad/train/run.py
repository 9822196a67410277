"""A recipe, run in the simulator: what `weightgrad simulate` does."""

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
from safetensors.torch import save_file
from torch import Tensor

from weightgrad import wire
from weightgrad.codecs import Codec
from weightgrad.errors import StrategyError, WeightGradError
from weightgrad.ledger import Ledger
from weightgrad.sim.compute import Compute, Straggler
from weightgrad.sim.lan import Lan
from weightgrad.sim.links import Link
from weightgrad.sim.plan import Fault, SitePlace, WorldPlan
from weightgrad.sim.task import Task
from weightgrad.sim.world import Progress, World
from weightgrad.train.recipe import Recipe
from weightgrad.train.recipe_parts import Decay
from weightgrad.train.recipe_plan import Site
from weightgrad.train.task import Training
from weightgrad.wan import strategies
from weightgrad.wan.strategies import Strategy

__all__ = ["Progress", "chosen_strategy", "fitted_strategy", "simulate", "world_plan"]


def chosen_strategy(recipe: Recipe) -> Strategy:
    """The recipe's row, with its changes; a mistake is the recipe's, at its line."""
    choice = recipe.strategy
    try:
        return strategies.find(choice.name, choice.overrides)
    except StrategyError as error:
        wrong = next((key for key, value in choice.overrides.items() if _alone_wrong(choice.name, key, value)), None)
        raise recipe.error(("strategy",) if wrong is None else ("strategy", wrong), str(error)) from None


def _alone_wrong(name: str, key: str, value: object) -> bool:
    """Whether this one change is a mistake by itself, not only together with the others."""
    try:
        strategies.find(name)
        strategies.find(name, {key: value})
    except StrategyError:
        return name in strategies.TABLE
    return False


def rate_of(recipe: Recipe) -> Callable[[int], float]:
    """The learning rate of a step, counted from 0."""
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
    """The same, with the overlap that hides a round behind compute: a function of the recipe alone."""
    strategy = chosen_strategy(recipe)
    if not strategy.hide:
        return strategy
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    bits = 8.0 * sum(_frame_bytes(strategy.wan_codec(way), noise) for way in ("up", "down"))
    links = [x for x in recipe.link_list if recipe.server.name in x.between]
    longest = max((2 * x.delay_seconds + bits / x.least_bit_s for x in links), default=0.0)
    steps = [site.compute.seconds_per_step for site in recipe.site_list]
    shortest = min((float(seconds) for seconds in steps if seconds != "calibrate"), default=math.inf)
    needed = math.ceil(longest / shortest) if shortest > 0 else strategy.hide
    return dataclasses.replace(strategy, overlap=max(1, min(needed, strategy.hide)))


def _frame_bytes(codec: Codec, like: Tensor) -> int:
    payload, _ = codec.encode(like, codec.init(like), 0)
    return wire.frame_bytes(payload)


def world_plan(recipe: Recipe, task: Task) -> WorldPlan:
    """The recipe in the simulator's words."""
    strategy = fitted_strategy(recipe, task.layout.numel)
    sites = []
    for site in recipe.site_list:
        lan = Lan(site.lan.bandwidth_bit_s, site.lan.delay_seconds)
        sites.append(SitePlace(site.name, site.workers, lan, compute_of(site, task)))
    links = tuple(
        Link(x.between, x.bandwidth_bit_s, x.delay_seconds, x.loss, x.trace, x.back_bit_s) for x in recipe.link_list
    )
    faults = tuple(
        Fault(f.at_seconds, f.what, f.where, f.for_seconds, f.factor or 0.0, f.period_seconds or 1.0)
        for f in recipe.fault_list
    )
    training = recipe.training
    return WorldPlan(
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
    )


def compute_of(site: Site, task: Task) -> Compute:
    """How long that site's workers compute."""
    seconds = site.compute.seconds_per_step
    if seconds == "calibrate":
        seconds = _calibrated(task)
    slow = tuple(Straggler(s.factor, s.site, s.worker, s.probability) for s in site.compute.stragglers)
    return Compute(float(seconds), site.compute.jitter, slow)


def optimizer_options(optimizer: Any) -> dict[str, Any]:
    """Options that this optimizer has, as the recipe gives them."""
    found = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.name in ("sgd", "lars"):
        found["momentum"] = optimizer.momentum
    if optimizer.name == "sgd":
        found["nesterov"] = optimizer.nesterov
    if optimizer.betas is not None:
        found["betas"] = optimizer.betas
    if optimizer.eps is not None:
        found["eps"] = optimizer.eps
    return found


def _calibrated(task: Task) -> float:
    """Seconds of one worker's pass on this machine: the best of five. The ledger then depends on the machine."""
    weights = task.initial()
    best = math.inf
    for step in range(5):
        began = time.perf_counter()
        next(task.gradients(0, weights, step))
        best = min(best, time.perf_counter() - began)
    return best


def simulate(recipe: Recipe, out: Path, *, watch: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Run it; leaves ledger, base and summary in `out`, also when interrupted. Returns the summary."""
    torch.set_num_threads(1)  # the same sums as in a worker of its own process, and faster with small batches
    chosen_strategy(recipe)  # its mistakes first: loading data may take a while
    task = Training(recipe)
    plan = world_plan(recipe, task)
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").unlink(missing_ok=True)
    (out / "recipe.yaml").write_text(recipe.to_yaml())
    began = time.monotonic()
    with Ledger(out / "ledger.jsonl", replace=True) as ledger:
        ledger.write(
            "run",
            0.0,
            name=recipe.name,
            strategy=plan.strategy.name,
            row=plan.strategy.row(),
            seed=recipe.seed,
            steps=plan.steps,
            parameters=task.layout.numel,
            sites=[site.name for site in plan.sites],
            workers=recipe.workers,
            recipe=recipe.dump(),
        )
        world = World(plan, task, ledger, watch)
        try:
            world.run()
        finally:
            summary = _summary(world, recipe)
            _save(world, out)
            _write(out / "summary.json", summary)
            _write(out / "wall.json", _wall(time.monotonic() - began))
    if summary["status"] == "diverged" and world.last is None:
        raise WeightGradError(
            f"{recipe.name}: the loss is not finite before the first evaluation; lower training.optimizer.lr"
        )
    return summary


def _summary(world: World, recipe: Recipe) -> dict[str, Any]:
    last, now = world.last, world.clock.now
    total = now * len(world.sites)
    return {
        "name": recipe.name,
        "strategy": world.plan.strategy.name,
        "seed": recipe.seed,
        "status": world.status,
        "steps": world.server.base.step,
        "accuracy": last.accuracy if last else None,
        "base_accuracy": last.base if last else None,
        "quantized_accuracy": last.quantized if last else None,
        "ema_accuracy": last.ema if last else None,
        "loss": last.loss if last else None,
        "virtual_seconds": now,
        "wan_bytes": world.wan_bytes,
        "lan_bytes": world.lan_bytes,
        "waiting_share": sum(s.times.waiting for s in world.sites) / total if total else 0.0,
        "rounds": world.rounds,
        "parameters": world.task.layout.numel,
    }


def _save(world: World, out: Path) -> None:
    layout = world.task.layout
    tensors = {slot.name: slot.of(world.server.base.vector).clone() for slot in layout.slots}
    quantized = world.judge.quantized_base() if world.status == "finished" else None
    if quantized is not None:
        tensors |= {f"quantized.{slot.name}": slot.of(quantized).clone() for slot in layout.slots}
    save_file(tensors, str(out / "base.safetensors"))


def _wall(seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "wall_seconds": round(seconds, 3),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")
