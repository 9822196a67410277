"""A recipe's model and data as a task for the simulator: gradients of a flat vector of weights, and its test score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import repeat, zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.core.layout import Layout
from weightgrad.core.random_streams import TrainingStream
from weightgrad.errors import DataError, ModelFileError, WeightGradError
from weightgrad.kernels.noise import derive
from weightgrad.lab import models
from weightgrad.lab.data import augment, datasets, folder, shards
from weightgrad.lab.data.datasets import AnyDataset, TextDataset
from weightgrad.lab.data.shards import Batches
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.recipes.schema import Dirichlet
from weightgrad.lab.sim import step_memory
from weightgrad.lab.sim.task import Gradient, Score

_TEST_BATCH = 500
_TEST_PIXELS = _TEST_BATCH * 32 * 32  # of larger images fewer at a time: the first layers need many times their memory


class Training:
    """One module, used for every site in turn: its parameters become views of the weights that it is given.

    Buffers (the running statistics of batch norm) belong to the module: they see every worker's batches, as if the
    sites averaged them at every step, and no bytes are counted for that.

    Memory, in vectors of the model's size: a gradient while gradients are asked for, which stays if it is small; and
    before that the module's own weights.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._dataset = _load(recipe)
        self._pipeline = augment.pipeline(
            recipe.data.name, recipe.model.name, recipe.data.augment, crop=_size(recipe) if _is_folder(recipe) else None
        )
        self._make = partial(_build, recipe, self._dataset, self._pipeline)
        self.module = self._make()
        self.layout = Layout.of(self.module)
        self._gradient: Tensor | None = None
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
        """The initial weights as a flat vector; made anew from the seed, because a copy would be kept for nothing."""
        return self.layout.gather(self._make())

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the module's persistent buffers by name."""
        kept = self.module.state_dict(keep_vars=True).keys()
        return {name: buffer.detach().clone() for name, buffer in self.module.named_buffers() if name in kept}

    def load_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the module's persistent buffers from a state dict; those that it has not stay as they are."""
        for name, buffer in self.module.named_buffers():
            if name in tensors:
                buffer.copy_(tensors[name])

    def samples(self, site: int) -> int:
        """The number of samples that a site uses in a step."""
        return self._share * len(self._batches[site])

    def gradients(self, site: int, weights: Tensor, step: int) -> Iterator[Gradient]:
        """The gradients of a site's workers in order; each overwrites the vector of the one before."""
        if self._gradient is None:
            self._gradient = torch.empty_like(weights)
        for worker in range(len(self._batches[site])):
            self._point_at(weights)
            self._gradient.zero_()
            yield Gradient(self._gradient, self.backward(site, worker, step))
        if self._gradient.nbytes >= step_memory.LARGE_BYTES:
            self._gradient = None
            self.module.zero_grad()

    def backward(self, site: int, worker: int, step: int, *, share: float = 1.0) -> float:
        """One worker's forward and backward pass; the gradients are added to those in the module's parameters.

        Args:
            site: The number of the site.
            worker: The number of the worker in it.
            step: The step.
            share: What loss and gradients are multiplied by.

        Returns:
            The loss.
        """
        batches = self._batches[site][worker]
        images, labels = self._dataset.train(batches.at(step))
        self._dataset.prefetch_train(batches.at(step + 1))
        inputs = self._pipeline.train(images, derive(self._key, site, worker, step))
        self.module.train()
        loss = functional.cross_entropy(self.module(inputs), labels)
        loss = loss if share == 1 else loss * share
        loss.backward()
        return float(loss.detach())

    def _point_at(self, weights: Tensor) -> None:
        """Make the parameters views of these weights, and their gradients views of one vector, without a copy."""
        gradients = repeat(None) if self._gradient is None else iter(self.layout.views(self._gradient))
        for parameter, view in zip(self.module.parameters(), self.layout.views(weights), strict=True):
            parameter.data = view
            parameter.grad = next(gradients)

    @torch.no_grad()
    def evaluate(self, weights: Tensor) -> Score:
        """Accuracy and mean loss on the test data."""
        self._point_at(weights)
        self.module.eval()
        right, right5, loss, count = 0, 0, 0.0, 0
        batches = self._test.split(_test_batch(self._dataset))
        for indices, following in zip_longest(batches, batches[1:]):
            images, labels = self._dataset.test(indices)
            if following is not None:
                self._dataset.prefetch_test(following)
            scores = self.module(self._pipeline.test(images))
            loss += float(functional.cross_entropy(scores, labels)) * labels.numel()
            right += int((scores.argmax(1) == labels).sum())
            if self._dataset.has_top5:
                right5 += int((scores.topk(5, 1).indices == labels[:, None]).sum())
            count += labels.numel()
        return Score(right / count, loss / count, right5 / count if self._dataset.has_top5 else None)


def evaluate(task: Training, tensors: Mapping[str, Tensor]) -> Score:
    """The test score of a state dict of a task's model, whose buffers become the task's.

    Raises:
        ModelFileError: The state dict lacks a parameter of the model, or has one of another shape.
    """
    weights = task.initial()
    for slot in task.layout.slots:
        found = tensors.get(slot.name)
        if found is None or tuple(found.shape) != slot.shape:
            what = "none" if found is None else f"shape {list(found.shape)}"
            raise ModelFileError(
                f"the model of the recipe has {slot.name} of shape {list(slot.shape)}, the file has {what}; "
                "give the file of a run of this recipe"
            )
        slot.of(weights).copy_(found)
    task.load_buffers(tensors)
    return task.evaluate(weights)


def _test_batch(dataset: AnyDataset) -> int:
    """How many test samples are scored at a time."""
    if isinstance(dataset, TextDataset):
        return _TEST_BATCH
    return max(1, min(_TEST_BATCH, _TEST_PIXELS // dataset.size**2))


def _is_folder(recipe: Recipe) -> bool:
    return recipe.data.name == "folder"


def _size(recipe: Recipe) -> int:
    """The side of the images of a folder, as the network reads them (CifarNet: before it crops them)."""
    return folder.SIZE if recipe.data.size is None else recipe.data.size


def _load(recipe: Recipe) -> AnyDataset:
    """The data set; its split into training and test data is the same for every seed."""
    data, size = recipe.data, _size(recipe)
    directory = Path(data.directory) if data.directory is not None else None
    context = int(recipe.model.options.get("context", datasets.CONTEXT))
    side = size + augment.margin(recipe.model.name, size)
    try:
        return datasets.load(data.name, directory, 0, data.limit, size=side, threads=data.threads, context=context)
    except DataError as error:
        raise recipe.error(("data", "directory" if _is_folder(recipe) else "name"), str(error)) from error


def _build(recipe: Recipe, dataset: AnyDataset, pipeline: augment.Pipeline) -> nn.Module:
    """The model with its initial weights; errors name the key of the recipe."""
    name, options = recipe.model.name, recipe.model.options
    try:
        allowed = models.option_names(name)
    except WeightGradError as error:
        raise recipe.error(("model", "name"), str(error)) from error
    for key in options:
        if key == "size":
            message = "the size of the images is not a model's option; set data.size, with data.name=folder"
            raise recipe.error(("model", "options", key), message)
        if key not in allowed:
            known = f"its options are {', '.join(allowed)}" if allowed else "it has no options"
            raise recipe.error(("model", "options", key), f"model {name} has no option {key}; {known}")
    try:
        return models.build(
            name,
            classes=dataset.classes,
            channels=dataset.channels,
            size=pipeline.size(dataset.size),
            seed=derive(recipe.seed, TrainingStream.MODEL) >> 1,
            **options,
        )
    except WeightGradError as error:
        raise recipe.error(("data", "size") if _is_folder(recipe) else ("model", "name"), str(error)) from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise recipe.error(("model", "options"), f"{name} cannot be made with them: {error}") from error


def _shards(recipe: Recipe, dataset: AnyDataset, workers: list[int]) -> list[list[Tensor]]:
    how = recipe.data.shards
    try:
        if how == "folders":
            return shards.by_site(_folder_ids(recipe, dataset), workers, recipe.seed)
        if isinstance(how, Dirichlet):
            return shards.shard(dataset.strata, workers, shards.Dirichlet(how.dirichlet), recipe.seed)
        return shards.shard(dataset.strata, workers, "iid", recipe.seed)
    except DataError as error:
        raise recipe.error(("data", "shards"), str(error)) from error


def _folder_ids(recipe: Recipe, dataset: AnyDataset) -> Tensor:
    """For each sample, the number of its site in the recipe."""
    names = [site.name for site in recipe.site_list]
    if dataset.site_ids is None:
        raise DataError(f"{dataset.name} has no folders of sites; lay it out as DIRECTORY/SITE/train/CLASS, or use iid")
    if unknown := sorted(set(dataset.site_names) - set(names)):
        raise DataError(f"folders {', '.join(unknown)} are none of the sites {', '.join(names)}; name them alike")
    return torch.tensor([names.index(name) for name in dataset.site_names])[dataset.site_ids]
