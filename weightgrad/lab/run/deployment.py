"""A recipe in a deployment: the training loop of one worker, and the server's configuration."""

from __future__ import annotations

import dataclasses
import os
import time
from functools import lru_cache
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weightgrad.core import optimizers
from weightgrad.core.optimizers.learning_rates import set_rate
from weightgrad.errors import RecipeError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.recipes.site_list import SiteList
from weightgrad.lab.run.simulation import chosen_strategy, compute_of, fitted_strategy, optimizer_options, rate_of
from weightgrad.lab.run.task import Training
from weightgrad.runtime.join import join
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.session import Site

_MOST_RATE = 100.0  # times the recipe's learning rate, at most, is what a site may state


def run_config(recipe: Recipe) -> RunConfig:
    """The configuration that the server announces to the sites of a recipe."""
    return RunConfig(
        sites=tuple(site.name for site in recipe.site_list),
        fit=lru_cache(maxsize=4)(lambda numel: fitted_strategy(recipe, numel)),  # it encodes a whole model
        seed=recipe.seed,
        clip_norm=recipe.training.clip_norm,
        most_rate=_MOST_RATE * recipe.training.optimizer.lr,
        bit_s={end: link.bandwidth_bit_s for link in recipe.link_list for end in link.between},
    )


def listed_config(sites: SiteList, *, near: bool = False) -> RunConfig:
    """The configuration that the server announces to sites of which it knows no more than their names.

    A strategy that hides a round behind as many steps as it takes (`hide`) hides it behind the most that it may: what
    the links are is not known.

    Args:
        sites: Their names, and the strategy.
        near: Whether all of them are on this machine: the server listens to nobody else.
    """
    chosen = chosen_strategy(sites)
    strategy = dataclasses.replace(chosen, overlap=chosen.hide) if chosen.hide else chosen
    return RunConfig(sites=sites.sites, fit=lambda numel: strategy, seed=sites.seed, near=near)


def train(
    recipe: Recipe,
    name: str,
    address: str,
    *,
    credentials: Path | None,
    insecure: bool = False,
    state: Path | None = None,
    checkpoint_every: int = 50,
    timeout: float = 60.0,
    reconnect: float = 3600.0,
    emulate_compute: bool = False,
    download_codec: str | None = None,
    metrics: str | None = None,
) -> Site:
    """Train the recipe's model as one worker of a site, from the last checkpoint to the last step.

    Args:
        recipe: What is trained.
        name: The site.
        address: HOST:PORT of the global server.
        credentials: Directory of the site's certificates.
        insecure: Use no certificates; for a server on the same machine only.
        state: Directory of the site's checkpoints.
        checkpoint_every: Steps between two checkpoints.
        timeout: Seconds to wait for a server that is not there yet.
        reconnect: Seconds to wait for a server that has gone away.
        emulate_compute: Make every forward and backward pass last as long as the recipe's `compute` says, as in the
            simulator. The site's event log counts the passes that really took longer.
        download_codec: The codec in which a site that joins late receives the global model.
        metrics: HOST:PORT at which rank 0 serves the site's metrics; None serves none.

    Returns:
        The site after its last step.

    Raises:
        RecipeError: The recipe has no such site, or another number of workers.
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
        timeout=timeout,
        reconnect=reconnect,
        download_codec=download_codec,
        metrics=metrics,
    )
    wanted, sharded = recipe.site_list[number].workers, recipe.site_list[number].sharding == "fsdp2"
    if wanted % site.group.size or (not sharded and wanted != site.group.size):
        raise RecipeError(
            f"{recipe.name} has {wanted} workers in {name}, and {site.group.size} were started; "
            f"use torchrun --nproc-per-node {wanted}" + (", or a divisor of it" if sharded else "")
        )
    workers = range(site.group.rank, wanted, site.group.size)
    task = Training(recipe)
    if sharded and site.group.size > 1:
        fully_shard(task.module, mesh=init_device_mesh("cpu", (site.group.size,)))
    chosen = recipe.training.optimizer
    optimizer = optimizers.build(chosen.name, list(task.module.parameters()), optimizer_options(chosen))
    site.prepare(task.module, optimizer, samples=task.samples(number))
    rate = rate_of(recipe)
    pacer = ComputePacer(recipe, task, number, site.group.rank) if emulate_compute else None
    while site.steps < recipe.training.steps:
        step = site.steps
        if step and step % task.epoch_steps == 0:  # here, because the checkpoint of this step was written before
            set_rate(optimizer, rate(step - 1))
            site.new_epoch()
        began = time.monotonic()
        loss = sum(task.backward(number, worker, step, share=1 / len(workers)) for worker in workers)
        if pacer is not None:
            pacer.wait(began, step)
        set_rate(optimizer, rate(step))
        optimizer.step()
        optimizer.zero_grad()
        site.note(loss)
    if pacer is not None and site.events is not None:
        site.events.write(
            "compute", 0.0, site=name, steps=pacer.steps, late=pacer.late, late_seconds=pacer.late_seconds
        )
    site.leave()
    return site


class ComputePacer:
    """Makes a forward and backward pass last as long as the recipe's `compute` says.

    Attributes:
        steps: Passes so far.
        late: Passes that really took longer.
        late_seconds: By how much, all of them together.
    """

    def __init__(self, recipe: Recipe, task: Training, number: int, worker: int) -> None:
        self._site, self._number, self._worker, self._seed = recipe.site_list[number], number, worker, recipe.seed
        self._compute = compute_of(self._site, task)
        self.steps = self.late = 0
        self.late_seconds = 0.0

    def wait(self, began: float, step: int) -> None:
        """Sleep until the pass of a step that began at that time is over."""
        wanted = self._compute.seconds(self._seed, self._site.name, self._number, self._worker, step)
        left = began + wanted - time.monotonic()
        self.steps += 1
        if left > 0:
            time.sleep(left)
        else:
            self.late += 1
            self.late_seconds -= left
