"""A recipe's model and data as a task for the simulator: gradients of a flat vector of weights, and its test score."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from weightgrad.core.layout import Layout
from weightgrad.core.random_streams import TrainingStream
from weightgrad.errors import DataError
from weightgrad.kernels.noise import derive
from weightgrad.lab import models
from weightgrad.lab.data import augment, datasets, shards
from weightgrad.lab.data.datasets import Dataset, TextDataset
from weightgrad.lab.data.shards import Batches
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.recipes.schema import Dirichlet
from weightgrad.lab.sim.task import Gradient, Score

_TEST_BATCH = 500


class Training:
    """One module, used for every site in turn: its parameters become views of the weights that it is given.

    Buffers (the running statistics of batch norm) belong to the module: they see every worker's batches, as if the
    sites averaged them at every step, and no bytes are counted for that.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._dataset = _load(recipe)
        self._pipeline = augment.pipeline(recipe.data.name, recipe.model.name, recipe.data.augment)
        self.module = models.build(
            recipe.model.name,
            classes=self._dataset.classes,
            channels=self._dataset.channels,
            size=self._pipeline.size(self._dataset.size),
            seed=derive(recipe.seed, TrainingStream.MODEL) >> 1,
            **recipe.model.options,
        )
        self.layout = Layout.of(self.module)
        self._first = self.layout.gather(self.module)
        self._gradient = torch.zeros_like(self._first)
        workers = [site.workers for site in recipe.site_list]
        self._share = recipe.training.batch // sum(workers)
        self._batches = [
            [
                Batches(indices, self._share, derive(recipe.seed, TrainingStream.BATCHES, s, w))
                for w, indices in enumerate(site)
            ]
            for s, site in enumerate(_shards(recipe, self._dataset, workers))
        ]
        self.epoch_steps = max(1, self._dataset.train_count // recipe.training.batch)
        self._key = derive(recipe.seed, TrainingStream.AUGMENTATION)
        self._test = torch.arange(
            min(recipe.training.evaluate_on or self._dataset.test_count, self._dataset.test_count)
        )

    def initial(self) -> Tensor:
        """The initial weights as a flat vector."""
        return self._first.clone()

    def samples(self, site: int) -> int:
        """The number of samples that a site uses in a step."""
        return self._share * len(self._batches[site])

    def gradients(self, site: int, weights: Tensor, step: int) -> Iterator[Gradient]:
        """The gradients of a site's workers in order; each overwrites the vector of the one before."""
        for worker in range(len(self._batches[site])):
            self._point_at(weights)
            self._gradient.zero_()
            yield Gradient(self._gradient, self.backward(site, worker, step))

    def backward(self, site: int, worker: int, step: int) -> float:
        """One worker's forward and backward pass; the gradients are in the module's parameters.

        Returns:
            The loss.
        """
        images, labels = self._dataset.train(self._batches[site][worker].at(step))
        inputs = self._pipeline.train(images, derive(self._key, site, worker, step))
        self.module.train()
        loss = functional.cross_entropy(self.module(inputs), labels)
        loss.backward()
        return float(loss.detach())

    def _point_at(self, weights: Tensor) -> None:
        """Make the parameters views of these weights, and their gradients views of one vector, without a copy."""
        views, gradients = self.layout.views(weights), self.layout.views(self._gradient)
        for parameter, view, gradient in zip(self.module.parameters(), views, gradients, strict=True):
            parameter.data = view
            parameter.grad = gradient

    @torch.no_grad()
    def evaluate(self, weights: Tensor) -> Score:
        """Accuracy and mean loss on the test data."""
        self._point_at(weights)
        self.module.eval()
        right, loss, count = 0, 0.0, 0
        for indices in self._test.split(_TEST_BATCH):
            images, labels = self._dataset.test(indices)
            scores = self.module(self._pipeline.test(images))
            loss += float(functional.cross_entropy(scores, labels)) * labels.numel()
            right += int((scores.argmax(1) == labels).sum())
            count += labels.numel()
        return Score(right / count, loss / count)


def _load(recipe: Recipe) -> Dataset | TextDataset:
    """The data set; its split into training and test data is the same for every seed."""
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
    """For each sample, the number of its site in the recipe."""
    names = [site.name for site in recipe.site_list]
    if dataset.site_ids is None:
        raise DataError(f"{dataset.name} has no folders of sites; lay it out as DIRECTORY/SITE/train/CLASS, or use iid")
    if unknown := sorted(set(dataset.site_names) - set(names)):
        raise DataError(f"folders {', '.join(unknown)} are none of the sites {', '.join(names)}; name them alike")
    return torch.tensor([names.index(name) for name in dataset.site_names])[dataset.site_ids]
