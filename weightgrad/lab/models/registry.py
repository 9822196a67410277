"""Models by name. The same name, sizes and seed give the same initial weights, bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weightgrad.errors import WeightGradError
from weightgrad.lab.models.alexnet import AlexNet, AlexNet32
from weightgrad.lab.models.cifarnet import CifarNet
from weightgrad.lab.models.gpt import Gpt
from weightgrad.lab.models.lenet import LeNet, LeNetDigits
from weightgrad.lab.models.mlp import Mlp
from weightgrad.lab.models.resnet import ResNet50, ThinResNet
from weightgrad.lab.models.squeezenet import SqueezeNet
from weightgrad.lab.models.vgg import Vgg, Vgg32


def _resnet20(*, classes: int, channels: int, size: int) -> nn.Module:
    return ThinResNet(classes=classes, channels=channels, size=size, depth=20)


def _resnet110(*, classes: int, channels: int, size: int) -> nn.Module:
    return ThinResNet(classes=classes, channels=channels, size=size, depth=110)


def _lenet_digits(*, classes: int, channels: int, size: int) -> nn.Module:
    if (classes, channels, size) != (10, 1, 8):
        raise WeightGradError(
            f"lenet-digits reads 1x8x8 images of 10 classes, not {channels}x{size}x{size} of {classes}; try mlp"
        )
    return LeNetDigits(torch.initial_seed())


_MODELS: dict[str, tuple[str, Callable[..., nn.Module]]] = {
    "alexnet": ("AlexNet for 224x224, one column (61.1 M parameters with 1000 classes)", AlexNet),
    "alexnet32": ("AlexNet's five convolutions for 32x32 (2.5 M)", AlexNet32),
    "cifarnet": ("the TensorFlow tutorial's network for 24x24 crops, as in the paper (1.07 M)", CifarNet),
    "gpt": ("a small GPT over characters; options context, width, layers, heads (0.8 M)", Gpt),
    "lenet": ("LeNet-5 with ReLU, for 28x28 and 32x32 (61,706)", LeNet),
    "lenet-digits": ("LeNet-5's shape for 8x8 digits (105,226)", _lenet_digits),
    "mlp": ("hidden dense layers with ReLU; options width 4096, depth 3 (36.8 M for 28x28)", Mlp),
    "resnet110": ("ResNet-110 for 32x32, shortcuts without parameters (1.73 M)", _resnet110),
    "resnet20": ("ResNet-20 for 32x32, shortcuts without parameters (0.27 M)", _resnet20),
    "resnet50": ("ResNet-50 (25.6 M with 1000 classes); a 3x3 stem below 64x64", ResNet50),
    "squeezenet": ("SqueezeNet 1.0 (1.25 M with 1000 classes); a 3x3 stem below 64x64", SqueezeNet),
    "vgg-a": ("VGG-A, 11 layers, for 224x224 (132.9 M with 1000 classes)", Vgg),
    "vgg-a-32": ("VGG-A's convolutions for 32x32 with a classifier of 512 (9.8 M)", Vgg32),
}


_FROM_DATA = ("classes", "channels", "size")  # what every model is made for; not options


def available() -> dict[str, str]:
    """A one-line description of each model, by name."""
    return {name: line for name, (line, _) in _MODELS.items()}


def option_names(name: str) -> tuple[str, ...]:
    """The names of the options of a model.

    Raises:
        WeightGradError: There is no such model.
    """
    if name not in _MODELS:
        raise WeightGradError(f"no model {name!r}; there are {', '.join(_MODELS)}")
    return tuple(p for p in inspect.signature(_MODELS[name][1]).parameters if p not in _FROM_DATA)


def build(name: str, *, classes: int, channels: int, size: int, seed: int, **options: Any) -> nn.Module:
    """Make a model.

    Args:
        name: One of `available()`.
        classes: Number of classes, or of different characters.
        channels: Channels of an image.
        size: Side of an image, or characters of a text window.
        seed: Decides the initial weights.
        **options: Options of the model.

    Raises:
        WeightGradError: There is no such model or option.
    """
    allowed = option_names(name)
    if wrong := sorted(set(options) - set(allowed)):
        known = f"its options are {', '.join(allowed)}" if allowed else "it has no options"
        raise WeightGradError(f"model {name} has no option {', '.join(wrong)}; {known}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _MODELS[name][1](classes=classes, channels=channels, size=size, **options)
