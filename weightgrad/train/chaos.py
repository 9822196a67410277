"""Chaos in the simulator: a recipe, disturbed on schedule, with books kept of every update.

Half of the seeds give up on sites that are away for long (`t_global` of a few rounds), unless the recipe says
for how long to wait; the others wait for everybody, and must end with the bits of a run to which nothing happened.
"""

from __future__ import annotations

import dataclasses
import math
import random
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weightgrad.errors import RunError
from weightgrad.kernels.noise import derive
from weightgrad.ledger import Ledger, read
from weightgrad.sim.accounts import Accounts, Balance
from weightgrad.sim.plan import Fault, WorldPlan
from weightgrad.sim.task import Task
from weightgrad.sim.world import World
from weightgrad.train import recipe_plan
from weightgrad.train.chaos_schedule import conditions, schedule, show
from weightgrad.train.chaos_verdict import Verdict, timeless, worst_resume, worst_stall
from weightgrad.train.recipe import Recipe
from weightgrad.train.run import chosen_strategy, world_plan
from weightgrad.train.task import Training
from weightgrad.units import show_seconds

_ALWAYS = ("faults=[]", "strategy.t_global=null", "training.evaluate_every=1000000000")
_TRIES, _SOONER = 8, 0.7  # to fit the faults into a run that they make shorter
_PATIENCE = 20  # horizons after which a run that has not finished never will


@dataclass(frozen=True)
class Calm:
    """A run to which nothing happens."""

    seconds: float
    round_s: float
    version: int
    base: str


@dataclass
class SimulatedChaos:
    """Runs of one recipe with any seed. The task is made once; undisturbed runs are remembered by their weather."""

    recipe: Recipe
    task: Task
    _calm: dict[tuple[str, ...], Calm] = field(default_factory=dict)

    @staticmethod
    def of(recipe: Recipe) -> SimulatedChaos:
        """With the recipe's own task; how good the model becomes is not what is asked here."""
        torch.set_num_threads(1)  # the same sums as in a worker of its own process, and faster with small batches
        chosen_strategy(recipe)  # its mistakes first: loading data may take a while
        return SimulatedChaos(recipe, Training(recipe.with_settings(["training.evaluate_on=1"])))

    def run(
        self, seed: int, events: int, *, out: Path | None = None, say: Callable[[str], None] | None = None
    ) -> Verdict:
        """One schedule; its ledger is left in `out`, if that is given."""
        with tempfile.TemporaryDirectory() as place:
            directory = out or Path(place)
            directory.mkdir(parents=True, exist_ok=True)
            return self._run(seed, events, directory, say)

    def _run(self, seed: int, events: int, out: Path, say: Callable[[str], None] | None) -> Verdict:
        weather = conditions(self.recipe, seed)
        settings = tuple(setting for one in weather for setting in one.settings)
        plan = world_plan(self.recipe.with_settings([*settings, *_ALWAYS]), self.task)
        if settings not in self._calm:
            self._calm[settings] = self._undisturbed(plan, out)
        calm = self._calm[settings]
        t_global = self._t_global(seed, calm)
        about = [one.about for one in weather]
        if t_global is not None:
            shown = t_global if isinstance(t_global, str) else show_seconds(round(t_global, 3))
            about.append(f"who is away for {shown} is given up")
        horizon = calm.seconds
        for _ in range(_TRIES):
            lines: list[str] = []
            faults = schedule(self.recipe, seed, events, horizon)
            found = self._judge(_with(plan, t_global, faults), faults, calm, out, lines)
            horizon *= _SOONER
            if found.events == events or not found.good:
                break  # else it was over before all had struck: a slow site was given up, say, and the others went on
        if say is not None:
            for line in lines:
                say(line)
        return dataclasses.replace(found, seed=seed, strategy=plan.strategy.name, conditions=about)

    def _t_global(self, seed: int, calm: Calm) -> float | str | None:
        if "t_global" in self.recipe.strategy.overrides:
            found: float | str | None = self.recipe.strategy.overrides["t_global"]
            return found
        draw = random.Random(derive(seed, 42))
        return draw.uniform(1.2, 6.0) * calm.round_s if draw.random() < 0.5 else None

    def _undisturbed(self, plan: WorldPlan, out: Path) -> Calm:
        with Ledger(out / "undisturbed.jsonl", replace=True) as book:
            world = World(plan, self.task, book)
            world.run()
        if world.status != "finished":
            raise RunError(
                f"{self.recipe.name}: undisturbed it ends as {world.status}; chaos needs a recipe that works"
            )
        base = world.server.base
        return Calm(world.clock.now, world.clock.now / max(1, world.rounds), base.version, base.digest())

    def _judge(
        self, plan: WorldPlan, faults: Sequence[recipe_plan.Fault], calm: Calm, out: Path, lines: list[str]
    ) -> Verdict:
        """Run it; `lines` are told what strikes."""
        samples = {place.name: self.task.samples(number) for number, place in enumerate(plan.sites)}
        accounts = Accounts(plan.strategy, samples, self.task.initial())
        struck: list[recipe_plan.Fault] = []
        why = ""
        with Ledger(out / "ledger.jsonl", replace=True) as book:
            world = World(plan, self.task, book, accounts=accounts)

            def strikes(fault: recipe_plan.Fault) -> None:
                struck.append(fault)
                lines.append(f"{show_seconds(round(fault.at_seconds, 3))}: {show(fault)}")

            def give_up() -> None:
                raise RunError(f"it has not finished after {show_seconds(round(world.clock.now, 1))}")

            for fault in faults:
                after = math.nextafter(fault.at_seconds, math.inf)  # the world is told first
                world.clock.at(after, lambda fault=fault: strikes(fault))  # type: ignore[misc]
            lasting = sum(fault.for_seconds or 0.0 for fault in faults)
            world.clock.at(_PATIENCE * calm.seconds + lasting, give_up)
            try:
                world.run()
            except RunError as error:
                why = str(error)
        if not why and world.status != "finished":
            why = f"the run ended as {world.status}"
        rounds = [entry["t"] for entry in read(out / "ledger.jsonl") if entry["kind"] == "round"]
        return judge(world, accounts.balance(world.sites, world.server), calm, struck, rounds, why)


def judge(
    world: World, balance: Balance, calm: Calm, struck: Sequence[recipe_plan.Fault], rounds: Sequence[float], why: str
) -> Verdict:
    """The verdict on a simulated run that has ended."""
    base, complaints = world.server.base, [why] if why else []
    complaints += [f"the sums of {name} do not add up" for name in balance.unbalanced]
    complaints += [f"the push of {site} for round {number} is lost" for site, number in balance.lost[:3]]
    complaints += [f"the push of {site} for round {number} was taken twice" for site, number in balance.twice[:3]]
    other = [
        s.place.name for s in world.sites if (s.end.base.version, s.end.base.digest()) != (base.version, base.digest())
    ]
    complaints += [f"{name} has another base than the server" for name in other]
    identical = None
    if timeless(world.plan.strategy) and not world.plan.absent:
        identical = (base.version, base.digest()) == (calm.version, calm.base)
        complaints += [] if identical else ["the base is not that of an undisturbed run"]
    return Verdict(
        events=len(struck),
        updates_lost=len(balance.lost) + len(balance.unbalanced),
        bases_equal=not other and identical is not False,
        worst_resume_s=worst_resume([f.at_seconds + (f.for_seconds or 0.0) for f in struck], rounds),
        worst_stall_s=worst_stall(rounds),
        updates=balance.pushes,
        updates_twice=len(balance.twice),
        rounds=len(rounds),
        world="simulated",
        identical=identical,
        why="; ".join(complaints),
    )


def _with(plan: WorldPlan, t_global: float | str | None, faults: Sequence[recipe_plan.Fault]) -> WorldPlan:
    return dataclasses.replace(
        plan,
        strategy=dataclasses.replace(plan.strategy, t_global=t_global),
        faults=tuple(_simulated(fault) for fault in faults),
        absent=frozenset(fault.where[0] for fault in faults if fault.what == "join"),
    )


def _simulated(fault: recipe_plan.Fault) -> Fault:
    """In the simulator's words; there a site dies as a whole."""
    what, where = (fault.what, fault.where) if fault.what != "kill-worker" else ("kill", fault.where[:1])
    return Fault(fault.at_seconds, what, where, fault.for_seconds, fault.factor or 0.0, fault.period_seconds or 1.0)


def replay(recipe: str, seed: int, events: int, *options: str) -> str:
    """The command that does it again."""
    return shlex.join(["weightgrad", "chaos", recipe, "--seed", str(seed), "--events", str(events), *options])
