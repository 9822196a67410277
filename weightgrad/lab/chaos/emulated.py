"""Chaos tests with real processes: random faults in the emulator, and an audit of what the run wrote."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from weightgrad.errors import RunError
from weightgrad.lab.chaos.progress_schedule import ProgressFaultSchedule
from weightgrad.lab.chaos.random_faults import random_conditions, random_faults
from weightgrad.lab.chaos.verdict import (
    Verdict,
    audit_deployment,
    first_difference,
    is_deterministic,
    worst_resume,
    worst_stall,
)
from weightgrad.lab.emulate.network import Network
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import emulation
from weightgrad.lab.run.emulation import Emulation
from weightgrad.lab.run.launch import RunProgress
from weightgrad.lab.run.simulation import chosen_strategy, simulate
from weightgrad.lab.run.validation import same_model

SECONDS_PER_EVENT = 8.0
LONGEST_S = 6.0
CHECKPOINT_EVERY = 5  # steps: what a killed site does again
_TIMEOUT_S = 240.0
_RESTARTS = "1000000"  # torchrun gives up on workers that die often; here they do


def with_conditions(recipe: Recipe, seed: int) -> tuple[Recipe, list[str]]:
    """The recipe under the conditions that a seed draws, and their descriptions.

    No site is given up (`t_global`) unless the recipe says so.
    """
    conditions = random_conditions(recipe, seed)
    settings = [setting for condition in conditions for setting in condition.settings]
    if "t_global" not in recipe.strategy.overrides:
        settings.append("strategy.t_global=null")
    settings += ["faults=[]", f"training.evaluate_every={recipe.training.steps}"]
    return recipe.with_settings(settings), [condition.about for condition in conditions]


@dataclass
class EmulatedChaos:
    """One chaos test in the emulator.

    Attributes:
        recipe: What is trained.
        seed: Decides conditions and faults.
        events: Number of faults.
        out: The directory to write: `run` is the emulated run, `undisturbed` a simulated run without faults.
        kind: The kind of emulated network, as for `open_wan`.
        say: Called with lines for the terminal.
        watch: Called with the progress of the run.
        seconds_per_event: Mean time between two faults.
        longest: Duration of the longest fault in seconds.
        measures: Whether the links are measured before the run.
    """

    recipe: Recipe
    seed: int
    events: int
    out: Path
    kind: str = "auto"
    say: Callable[[str], None] = lambda line: None
    watch: Callable[[RunProgress], None] = lambda now: None
    seconds_per_event: float = SECONDS_PER_EVENT
    longest: float = LONGEST_S
    measures: bool = True
    _moved: tuple[float, object] = field(init=False, default=(0.0, None))

    def run(self) -> Verdict:
        """Run until all processes have ended, then audit what the run wrote."""
        recipe, about = with_conditions(self.recipe, self.seed)
        emulation.check(recipe)
        horizon = self.events * self.seconds_per_event
        drawn = random_faults(recipe, self.seed, self.events, horizon, longest=self.longest)
        # What ranks push is cut where their shards end, so another number of ranks ends with other bits.
        strict = is_deterministic(chosen_strategy(recipe)) and all(fault.what != "resize" for fault in drawn)
        if strict:
            self.say("first a simulated run without faults, to compare with")
            simulate(recipe, self.out / "undisturbed")
        schedule = ProgressFaultSchedule(drawn, horizon, recipe.training.steps)
        with emulation.network(recipe, kind=self.kind) as wan:
            self.say(f"{wan.describe()['kind']}: {wan.reason}")
            for line in (*map(str, wan.links), *about):
                self.say(f"  {line}")
            why, trusted = self._play(recipe, wan, schedule)
            environment = f"emulated, {wan.describe()['kind']}"
        found = self._verdict(recipe, schedule, why, strict)
        return replace(
            found,
            seed=self.seed,
            strategy=recipe.strategy.name,
            environment=environment,
            trusted=trusted,
            conditions=about,
        )

    def _play(self, recipe: Recipe, wan: Network, schedule: ProgressFaultSchedule) -> tuple[str, bool]:
        checked = not self.measures or all(check.ok for check in wan.check())
        run = Emulation(recipe, self.out / "run", wan, True, self._look, self._happened, schedule)
        for site in recipe.site_list:
            command = run.commands[site.name]
            command += ["--checkpoint-every", str(CHECKPOINT_EVERY)]
            if "--max-restarts" in command:
                command[command.index("--max-restarts") + 1] = _RESTARTS
        self._moved = (time.monotonic(), None)
        try:
            summary = run.run()
        except RunError as error:
            return str(error), False
        return "", checked and bool(summary["emulated"]["trusted"])

    def _happened(self, line: str) -> None:
        self._moved = (time.monotonic(), self._moved[1])
        self.say(line)

    def _look(self, now: RunProgress) -> None:
        self.watch(now)
        where = (tuple(now.steps.values()), now.rounds)
        if where != self._moved[1]:
            self._moved = (time.monotonic(), where)
        if time.monotonic() - self._moved[0] > _TIMEOUT_S:
            raise RunError(f"nothing has moved for {_TIMEOUT_S:.0f} s: steps {now.steps}, {now.rounds} rounds")

    def _verdict(self, recipe: Recipe, schedule: ProgressFaultSchedule, why: str, strict: bool) -> Verdict:
        audit = audit_deployment(self.out / "run", [site.name for site in recipe.site_list])
        complaints = [why] if why else []
        complaints += [f"the push of {site} for round {number} is lost" for site, number in audit.lost[:3]]
        complaints += [f"the push of {site} for round {number} was applied twice" for site, number in audit.twice[:3]]
        complaints += [f"{audit.refused} updates were refused"] if audit.refused else []
        complaints += audit.differences
        identical = None
        if strict:
            plain, real = self.out / "undisturbed", self.out / "run"
            other = first_difference(plain, real)
            identical = not why and other is None and same_model(plain, real)
            complaints += [] if identical or why else [other or "the global model that was written is not the last one"]
        return Verdict(
            events=len(schedule.struck),
            updates_lost=len(audit.lost) + audit.refused,
            models_equal=not why and not audit.differences and identical is not False,
            worst_resume_s=worst_resume(schedule.ends, schedule.rounds),
            worst_stall_s=worst_stall(schedule.rounds),
            updates=len(audit.pushed),
            updates_twice=len(audit.twice),
            rounds=audit.rounds,
            identical=identical,
            why="; ".join(complaints),
        )
