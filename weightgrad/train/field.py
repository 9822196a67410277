"""A recipe in the field: what one worker of one site does, and what the global server is told."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path

import torch

from weightgrad.errors import RecipeError
from weightgrad.runtime.door import House
from weightgrad.runtime.site import Site, join
from weightgrad.site import optimizers
from weightgrad.train.recipe import Recipe
from weightgrad.train.run import compute_of, fitted_strategy, optimizer_options, rate_of
from weightgrad.train.task import Training


def house(recipe: Recipe) -> House:
    """What the recipe asks of its sites."""
    return House(
        sites=tuple(site.name for site in recipe.site_list),
        fit=lru_cache(maxsize=4)(lambda numel: fitted_strategy(recipe, numel)),  # it encodes a whole model
        seed=recipe.seed,
        clip_norm=recipe.training.clip_norm,
        bit_s={end: link.bandwidth_bit_s for link in recipe.link_list for end in link.between},
    )


def train(
    recipe: Recipe,
    name: str,
    address: str,
    *,
    credentials: Path | None,
    insecure: bool = False,
    state: Path | None = None,
    checkpoint_every: int = 50,
    patience: float = 60.0,
    paced: bool = False,
    first_base: str | None = None,
) -> Site:
    """Train the recipe's model as a worker of that site, from where it stands to the last step.

    `paced`: a worker's pass lasts as long as the recipe's `compute` says, as it does in the simulator; one that
    really took longer is counted in the site's ledger. The other options are those of `join`.
    """
    names = [site.name for site in recipe.site_list]
    if name not in names:
        raise RecipeError(f"no site {name!r} in {recipe.name}; there are {', '.join(names)}")
    number = names.index(name)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    site = join(
        address,
        site=name,
        credentials=credentials,
        insecure=insecure,
        state=state,
        checkpoint_every=checkpoint_every,
        patience=patience,
        first_base=first_base,
    )
    if site.lan.size != (wanted := recipe.site_list[number].workers):
        raise RecipeError(
            f"{recipe.name} has {wanted} workers in {name}, and {site.lan.size} were started; "
            f"use torchrun --nproc-per-node {wanted}"
        )
    task = Training(recipe)
    chosen = recipe.training.optimizer
    optimizer = optimizers.build(chosen.name, list(task.module.parameters()), optimizer_options(chosen))
    site.prepare(task.module, optimizer, samples=task.samples(number))
    rate = rate_of(recipe)
    pace = Pace(recipe, task, number, site.lan.rank) if paced else None
    while site.steps < recipe.training.steps:
        step = site.steps
        if step and step % task.epoch_steps == 0:  # here: the state of this step was written before it
            optimizers.set_rate(optimizer, rate(step - 1))
            site.new_epoch()
        began = time.monotonic()
        loss = task.backward(number, site.lan.rank, step)
        if pace is not None:
            pace.keep(began, step)
        optimizers.set_rate(optimizer, rate(step))
        optimizer.step()
        if site.ledger is not None:
            site.note(loss)
    if pace is not None and site.ledger is not None:
        site.ledger.write("compute", 0.0, site=name, steps=pace.steps, late=pace.late, late_seconds=pace.late_seconds)
    site.leave()
    return site


class Pace:
    """Waits until a pass has lasted as long as the recipe says."""

    def __init__(self, recipe: Recipe, task: Training, number: int, worker: int) -> None:
        self._site, self._number, self._worker, self._seed = recipe.site_list[number], number, worker, recipe.seed
        self._compute = compute_of(self._site, task)
        self.steps = self.late = 0
        self.late_seconds = 0.0

    def keep(self, began: float, step: int) -> None:
        """Of the step that began then."""
        wanted = self._compute.seconds(self._seed, self._site.name, self._number, self._worker, step)
        left = began + wanted - time.monotonic()
        self.steps += 1
        if left > 0:
            time.sleep(left)
        else:
            self.late += 1
            self.late_seconds -= left
