"""Chaos with real processes: a schedule played over the emulator, and judged by what the run left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from weightgrad.emulate.network import Network
from weightgrad.errors import RunError
from weightgrad.train import emulated
from weightgrad.train.chaos_schedule import conditions, schedule
from weightgrad.train.chaos_storm import Storm
from weightgrad.train.chaos_verdict import Verdict, first_difference, remains, timeless, worst_resume, worst_stall
from weightgrad.train.emulated import Emulation
from weightgrad.train.launch import Standing
from weightgrad.train.recipe import Recipe
from weightgrad.train.run import chosen_strategy, simulate
from weightgrad.train.validate import same_base

SECONDS_PER_EVENT = 8.0
LONGEST_S = 6.0
CHECKPOINT_EVERY = 5  # steps: what a killed site does again
_PATIENCE_S = 240.0
_RESTARTS = "1000000"  # torchrun gives up on workers that die often; here they do


def disturbed(recipe: Recipe, seed: int) -> tuple[Recipe, list[str]]:
    """The recipe in the weather of that seed, and what that is. Nobody is given up unless the recipe says so."""
    weather = conditions(recipe, seed)
    settings = [setting for one in weather for setting in one.settings]
    if "t_global" not in recipe.strategy.overrides:
        settings.append("strategy.t_global=null")
    settings += ["faults=[]", f"training.evaluate_every={recipe.training.steps}"]
    return recipe.with_settings(settings), [one.about for one in weather]


@dataclass
class EmulatedChaos:
    """One schedule. Everything is left in `out`: `run` is the emulation's, `undisturbed` the simulator's."""

    recipe: Recipe
    seed: int
    events: int
    out: Path
    kind: str = "auto"
    say: Callable[[str], None] = lambda line: None
    watch: Callable[[Standing], None] = lambda now: None
    seconds_per_event: float = SECONDS_PER_EVENT
    longest: float = LONGEST_S
    measures: bool = True  # the links, before the run
    _moved: tuple[float, object] = field(init=False, default=(0.0, None))

    def run(self) -> Verdict:
        """Play it to its end, and judge."""
        recipe, about = disturbed(self.recipe, self.seed)
        emulated.check(recipe)
        horizon = self.events * self.seconds_per_event
        faults = schedule(recipe, self.seed, self.events, horizon, longest=self.longest)
        strict = timeless(chosen_strategy(recipe))
        if strict:
            self.say("undisturbed, in the simulator:")
            simulate(recipe, self.out / "undisturbed")
        storm = Storm(faults, horizon, recipe.training.steps)
        with emulated.network(recipe, kind=self.kind) as wan:
            self.say(f"{wan.describe()['kind']}: {wan.reason}")
            for line in (*map(str, wan.links), *about):
                self.say(f"  {line}")
            why, trusted = self._play(recipe, wan, storm)
            world = f"emulated, {wan.describe()['kind']}"
        found = self._judge(recipe, storm, why, strict)
        return replace(
            found, seed=self.seed, strategy=recipe.strategy.name, world=world, trusted=trusted, conditions=about
        )

    def _play(self, recipe: Recipe, wan: Network, storm: Storm) -> tuple[str, bool]:
        checked = not self.measures or all(check.ok for check in wan.check())
        run = Emulation(recipe, self.out / "run", wan, True, self._look, self._happened, storm)
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

    def _look(self, now: Standing) -> None:
        self.watch(now)
        where = (tuple(now.steps.values()), now.rounds)
        if where != self._moved[1]:
            self._moved = (time.monotonic(), where)
        if time.monotonic() - self._moved[0] > _PATIENCE_S:
            raise RunError(f"nothing has moved for {_PATIENCE_S:.0f} s: steps {now.steps}, {now.rounds} rounds")

    def _judge(self, recipe: Recipe, storm: Storm, why: str, strict: bool) -> Verdict:
        left = remains(self.out / "run", [site.name for site in recipe.site_list])
        complaints = [why] if why else []
        complaints += [f"the push of {site} for round {number} is lost" for site, number in left.lost[:3]]
        complaints += [f"the push of {site} for round {number} was taken twice" for site, number in left.twice[:3]]
        complaints += [f"{left.refused} updates were refused"] if left.refused else []
        complaints += left.differences
        identical = None
        if strict:
            plain, real = self.out / "undisturbed", self.out / "run"
            other = first_difference(plain, real)
            identical = not why and other is None and same_base(plain, real)
            complaints += [] if identical or why else [other or "the base that was written is not the last one"]
        return Verdict(
            events=len(storm.struck),
            updates_lost=len(left.lost) + left.refused,
            bases_equal=not why and not left.differences and identical is not False,
            worst_resume_s=worst_resume(storm.ends, storm.rounds),
            worst_stall_s=worst_stall(storm.rounds),
            updates=len(left.pushed),
            updates_twice=len(left.twice),
            rounds=left.rounds,
            identical=identical,
            why="; ".join(complaints),
        )
