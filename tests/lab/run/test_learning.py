"""The parts together: batches, pipeline and network learn the tasks that need no download."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from weightgrad.lab import models
from weightgrad.lab.data import augment, datasets
from weightgrad.lab.data.shards import Batches


@pytest.mark.parametrize(("name", "model_name", "options"), [
    ("digits", "lenet-digits", {}),
    ("synthetic", "mlp", {"width": 128, "depth": 2}),
])  # fmt: skip
def test_learns(name: str, model_name: str, options: dict[str, int]) -> None:
    data, pipe = datasets.load(name), augment.pipeline(name, model_name)
    size = pipe.size(data.size)
    model = models.build(model_name, classes=data.classes, channels=data.channels, size=size, seed=0, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    batches = Batches(torch.arange(data.train_count), 64, key=1)
    for step in range(150):
        images, labels = data.train(batches.at(step))
        loss = functional.cross_entropy(model(pipe.train(images, step)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    images, labels = data.test(torch.arange(data.test_count))
    with torch.no_grad():
        right = (model(pipe.test(images)).argmax(1) == labels).double().mean()
    assert right > 0.9
