"""A model and its data as the simulator's task: gradients of a flat vector, and a test of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from weightgrad.errors import DataError
from weightgrad.kernels.noise import derive
from weightgrad.sim.task import Gradient, Score
from weightgrad.site.layout import Layout
from weightgrad.train import augment, datasets, models, shards
from weightgrad.train.batches import Batches
from weightgrad.train.datasets import Dataset, TextDataset
from weightgrad.train.recipe import Recipe
from weightgrad.train.recipe_parts import Dirichlet

_TEST_BATCH = 500


class Training:
    """One module, used for every site in turn: its parameters are pointed at the weights it is given.

    Buffers (running statistics of batch norm) are the module's own: they see every worker's batches, as
    if sites averaged them at every step, and no bytes are counted for that.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._dataset = _load(recipe)
        self._pipeline = augment.pipeline(recipe.data.name, recipe.model.name, recipe.data.augment)
        self.module = models.build(
            recipe.model.name,
            classes=self._dataset.classes,
            channels=self._dataset.channels,
            size=self._pipeline.size(self._dataset.size),
            seed=derive(recipe.seed, 1) >> 1,
            **recipe.model.options,
        )
        self.layout = Layout.of(self.module)
        self._first = self.layout.gather(self.module)
        self._gradient = torch.zeros_like(self._first)
        workers = [site.workers for site in recipe.site_list]
        self._share = recipe.training.batch // sum(workers)
        self._batches = [
            [Batches(indices, self._share, derive(recipe.seed, 2, s, w)) for w, indices in enumerate(site)]
            for s, site in enumerate(_shards(recipe, self._dataset, workers))
        ]
        self.epoch_steps = max(1, self._dataset.train_count // recipe.training.batch)
        self._key = derive(recipe.seed, 3)
        self._test = torch.arange(
            min(recipe.training.evaluate_on or self._dataset.test_count, self._dataset.test_count)
        )

    def initial(self) -> Tensor:
        """The weights a fresh model has."""
        return self._first.clone()

    def samples(self, site: int) -> int:
        """Of a site's step."""
        return self._share * len(self._batches[site])

    def gradients(self, site: int, weights: Tensor, step: int) -> Iterator[Gradient]:
        """One worker after the other; the vector is overwritten by the next."""
        for worker in range(len(self._batches[site])):
            self._point_at(weights)
            self._gradient.zero_()
            yield Gradient(self._gradient, self.backward(site, worker, step))

    def backward(self, site: int, worker: int, step: int) -> float:
        """One worker's pass with the module as it is; its parameters have the gradients, this is the loss."""
        images, labels = self._dataset.train(self._batches[site][worker].at(step))
        inputs = self._pipeline.train(images, derive(self._key, site, worker, step))
        self.module.train()
        loss = functional.cross_entropy(self.module(inputs), labels)
        loss.backward()
        return float(loss.detach())

    def _point_at(self, weights: Tensor) -> None:
        """No copy: the parameters become views of these weights, their gradients of one vector."""
        views, gradients = self.layout.views(weights), self.layout.views(self._gradient)
        for parameter, view, gradient in zip(self.module.parameters(), views, gradients, strict=True):
            parameter.data = view
            parameter.grad = gradient

    @torch.no_grad()
    def evaluate(self, weights: Tensor) -> Score:
        """Share of right answers and mean loss on the test data."""
        self._point_at(weights)
        self.module.eval()
        right, loss, count = 0, 0.0, 0
        for indices in self._test.split(_TEST_BATCH):
            images, answers = self._dataset.test(indices)
            scores = self.module(self._pipeline.test(images))
            loss += float(functional.cross_entropy(scores, answers)) * answers.numel()
            right += int((scores.argmax(1) == answers).sum())
            count += answers.numel()
        return Score(right / count, loss / count)


def _load(recipe: Recipe) -> Dataset | TextDataset:
    """The split into training and test data is the same for every seed."""
    directory = Path(recipe.data.directory) if recipe.data.directory is not None else None
    context = int(recipe.model.options.get("context", datasets.CONTEXT))
    try:
        return datasets.load(recipe.data.name, directory, 0, recipe.data.limit, context=context)
    except DataError as error:
        raise recipe.error(("data", "name"), str(error)) from error


def _shards(recipe: Recipe, dataset: Dataset | TextDataset, workers: list[int]) -> list[list[Tensor]]:
    how = recipe.data.shards
    try:
        if how == "folders":
            return shards.by_site(_folder_ids(recipe, dataset), workers, recipe.seed)
        if isinstance(how, Dirichlet):
            return shards.shard(dataset.strata, workers, shards.Dirichlet(how.dirichlet), recipe.seed)
        return shards.shard(dataset.strata, workers, "iid", recipe.seed)
    except DataError as error:
        raise recipe.error(("data", "shards"), str(error)) from error


def _folder_ids(recipe: Recipe, dataset: Dataset | TextDataset) -> Tensor:
    """The recipe's number of the site that each sample lies in."""
    names = [site.name for site in recipe.site_list]
    if dataset.site_ids is None:
        raise DataError(f"{dataset.name} has no folders of sites; lay it out as DIRECTORY/SITE/train/CLASS, or use iid")
    if unknown := sorted(set(dataset.site_names) - set(names)):
        raise DataError(f"folders {', '.join(unknown)} are none of the sites {', '.join(names)}; name them alike")
    return torch.tensor([names.index(name) for name in dataset.site_names])[dataset.site_ids]
