"""A recipe in the field: what one worker of one site does, and what the global server is told."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch

from weightgrad.errors import RecipeError
from weightgrad.runtime.door import House
from weightgrad.runtime.site import Site, join
from weightgrad.site import optimizers
from weightgrad.train.recipe import Recipe
from weightgrad.train.run import fitted_strategy, optimizer_options, rate_of
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
) -> Site:
    """Train the recipe's model as a worker of that site, from where it stands to the last step."""
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
    while site.steps < recipe.training.steps:
        step = site.steps
        if step and step % task.epoch_steps == 0:  # here: the state of this step was written before it
            optimizers.set_rate(optimizer, rate(step - 1))
            site.new_epoch()
        loss = task.backward(number, site.lan.rank, step)
        optimizers.set_rate(optimizer, rate(step))
        optimizer.step()
        if site.ledger is not None:
            site.note(loss)
    site.leave()
    return site
