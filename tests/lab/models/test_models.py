"""Networks have the parameters the literature says, start from the seed alone, and learn."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from weightgrad.errors import WeightGradError
from weightgrad.lab import models

KNOWN = {  # name: classes, channels, size, parameters
    "alexnet": (1000, 3, 224, 61_100_840),
    "alexnet32": (10, 3, 32, 2_472_266),
    "cifarnet": (10, 3, 24, 1_068_298),
    "gpt": (86, 1, 128, 827_136),
    "lenet": (10, 1, 28, 61_706),
    "lenet-digits": (10, 1, 8, 105_226),
    "mlp": (10, 1, 28, 36_818_954),
    "resnet110": (10, 3, 32, 1_727_962),
    "resnet20": (10, 3, 32, 269_722),
    "resnet50": (1000, 3, 224, 25_557_032),
    "squeezenet": (1000, 3, 224, 1_248_424),
    "vgg-a": (1000, 3, 224, 132_863_336),
    "vgg-a-32": (10, 3, 32, 9_750_922),
}
SMALL = [name for name, (_, _, _, parameters) in KNOWN.items() if parameters < 3e6]


def inputs(name: str, n: int, channels: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "gpt":
        return torch.randint(86, (n, size), generator=generator)
    return torch.randn(n, channels, size, size, generator=generator)


def test_every_model_has_a_known_figure() -> None:
    assert set(KNOWN) == set(models.available())


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_and_shape_of_the_scores(name: str) -> None:
    classes, channels, size, parameters = KNOWN[name]
    with torch.device("meta"):
        model = models.build(name, classes=classes, channels=channels, size=size, seed=0)
        shape = (2, size) if name == "gpt" else (2, channels, size, size)
        scores = model(torch.zeros(shape, dtype=torch.long if name == "gpt" else torch.float32))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert scores.shape == ((2, classes, size) if name == "gpt" else (2, classes))


@pytest.mark.parametrize(("name", "channels", "size"), [
    ("lenet", 1, 16), ("lenet", 3, 32), ("lenet", 3, 64), ("cifarnet", 1, 28), ("cifarnet", 3, 32), ("cifarnet", 3, 27),
    ("alexnet32", 1, 29), ("alexnet32", 3, 64), ("alexnet", 3, 64), ("alexnet", 3, 63), ("vgg-a", 3, 32),
    ("vgg-a-32", 3, 64), ("resnet50", 3, 32), ("resnet20", 1, 28), ("squeezenet", 3, 32), ("squeezenet", 1, 28),
    ("squeezenet", 3, 64), ("mlp", 1, 8),
])  # fmt: skip
def test_other_sizes(name: str, channels: int, size: int) -> None:
    with torch.device("meta"):
        model = models.build(name, classes=7, channels=channels, size=size, seed=0)
        assert model(torch.zeros(2, channels, size, size)).shape == (2, 7)


@pytest.mark.parametrize("name", SMALL)
def test_initial_weights_follow_from_the_seed_alone(name: str) -> None:
    classes, channels, size, _ = KNOWN[name]

    def flat(seed: int) -> torch.Tensor:
        model = models.build(name, classes=classes, channels=channels, size=size, seed=seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = flat(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(flat(3), first)
    assert not torch.equal(flat(4), first)


@pytest.mark.parametrize("name", ["alexnet32", "cifarnet", "gpt", "lenet", "lenet-digits", "resnet20"])
def test_the_first_loss_is_a_guess_and_sgd_lowers_it(name: str) -> None:
    classes, channels, size, _ = KNOWN[name]
    size = 32 if name == "gpt" else size
    model = models.build(name, classes=classes, channels=channels, size=size, seed=0)
    images = inputs(name, 8, channels, size)
    labels = images.roll(-1, 1) if name == "gpt" else torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)  # eight samples: 0.05 overshoots
    losses = []
    for _ in range(12):
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    if name != "lenet-digits":  # its weights are those of the tour
        assert losses[0] == pytest.approx(math.log(classes), abs=0.3)
    assert min(losses) < 0.9 * losses[0]


def test_gpt_does_not_look_ahead() -> None:
    model = models.build("gpt", classes=20, channels=1, size=16, seed=0, width=32, layers=2, heads=2)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9:] = 19
    torch.testing.assert_close(model(tokens)[..., :9], model(changed)[..., :9])
    assert not torch.equal(model(tokens)[..., 9:], model(changed)[..., 9:])


@pytest.mark.parametrize(("name", "options", "message"), [
    ("lenet6", {}, "no model 'lenet6'; there are alexnet"),
    ("lenet", {"width": 3}, "no option width; it has no options"),
    ("mlp", {"wide": 3}, "its options are width, depth"),
    ("gpt", {"width": 30}, "not a multiple of heads"),
    ("lenet-digits", {}, "reads 1x8x8 images"),
    ("vgg-a", {}, "32x32 or larger, not 28x28"),
])  # fmt: skip
def test_mistakes_are_named(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(WeightGradError, match=message):
        models.build(name, classes=10, channels=1, size=28, seed=0, **options)


def test_gpt_refuses_more_than_its_context() -> None:
    model = models.build("gpt", classes=20, channels=1, size=16, seed=0, context=8, width=32, layers=1, heads=2)
    with pytest.raises(WeightGradError, match="8 characters at a time, not 16"):
        model(torch.zeros(1, 16, dtype=torch.long))
