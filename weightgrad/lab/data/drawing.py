"""A small folder of pictures drawn by code, for trying what reads folders: `weightgrad data draw`.

A class is a shape in a colour of its own: class c is the shape c mod 8, in a hue that jitters around c's. Each picture
has another place, size and rotation of the shape, another background and other noise, and its own height and width. A
picture depends on the seed, its class, its part and its number alone, so more pictures never change those there are.
"""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weightgrad.errors import DataError
from weightgrad.kernels.noise import derive

if TYPE_CHECKING:
    from PIL import Image

SHAPES = ("disc", "square", "triangle", "cross", "ring", "star", "bars", "dots")
MAX_CLASSES = 1000
_GOLDEN = (math.sqrt(5) - 1) / 2  # successive multiples of it, mod 1, are far apart
_PARTS = ("train", "test")


@dataclass(frozen=True, kw_only=True)
class DrawPlan:
    """What to draw.

    Attributes:
        classes: Number of classes.
        train: Training pictures of each class, of each site.
        test: Test pictures of each class, of each site.
        size: The shorter side of the smallest pictures; sides are up to half as long again.
        sites: The names of the sites; without any, there is one folder for all.
        ending: jpg or png.
        seed: Another seed, other pictures of the same classes.
    """

    classes: int = 20
    train: int = 30
    test: int = 10
    size: int = 96
    sites: tuple[str, ...] = ()
    ending: str = "jpg"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.classes <= MAX_CLASSES:
            raise DataError(f"{self.classes} classes cannot be drawn; choose 2 to {MAX_CLASSES}")
        if self.train < 1 or self.test < 1:
            raise DataError(f"{self.train} training and {self.test} test pictures of a class; draw at least 1 of each")
        if self.size < 16:
            raise DataError(f"pictures of {self.size} pixels are too small to draw on; choose 16 or more")
        if self.ending not in ("jpg", "png"):
            raise DataError(f"pictures cannot be written as {self.ending!r}; choose jpg or png")
        if wrong := [name for name in self.sites if not name or name in _PARTS or Path(name).name != name]:
            raise DataError(f"{wrong[0]!r} cannot be the folder of a site; use a plain name other than train and test")


def class_name(number: int) -> str:
    """The folder of a class."""
    return f"{number:03}-{SHAPES[number % len(SHAPES)]}"


def draw(directory: Path, plan: DrawPlan) -> int:
    """Draw the pictures of a plan below a directory, as `folder` reads them.

    Args:
        directory: Where to; it is made, and must be empty if it is there.
        plan: What to draw.

    Returns:
        The number of pictures.

    Raises:
        DataError: Pillow is not installed, or the directory is not empty.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DataError(f"{directory} is not empty; name a new directory, or empty it")
    count = 0
    for site, name in enumerate(plan.sites or ("",)):
        for part, wanted in zip(_PARTS, (plan.train, plan.test), strict=True):
            for number in range(plan.classes):
                place = directory / name / part / class_name(number)
                place.mkdir(parents=True)
                for picture in range(wanted):
                    key = derive(plan.seed, site, _PARTS.index(part), number, picture)
                    _picture(number, plan.size, key).save(place / f"{picture:04}.{plan.ending}", quality=92)
                    count += 1
    return count


def _picture(number: int, size: int, key: int) -> Image.Image:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise DataError("drawing pictures needs pillow; pip install 'weightgrad[images]'") from None
    random = np.random.default_rng(key)
    width, height = (int(side) for side in random.integers(size, size + size // 2 + 1, 2))
    ramp = np.linspace(0, 1, height)[:, None, None] * random.uniform(-60, 60, 3)
    pixels = random.uniform(60, 180, 3) + ramp + random.normal(0, 12, (height, width, 3))
    picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    radius = random.uniform(0.22, 0.4) * min(width, height)
    middle = tuple(side / 2 + random.uniform(-0.12, 0.12) * side for side in (width, height))
    hue = (number * _GOLDEN + random.normal(0, 0.04)) % 1
    colour = colorsys.hsv_to_rgb(hue, random.uniform(0.7, 1), random.uniform(0.7, 1))
    fill = tuple(int(255 * one) for one in colour)
    turn = random.uniform(0, 2 * math.pi)
    for outline in _outlines(SHAPES[number % len(SHAPES)], turn):
        points = [(middle[0] + radius * x, middle[1] + radius * y) for x, y in outline]
        ImageDraw.Draw(picture).polygon(points, fill=fill)
    return picture


def _outlines(shape: str, turn: float) -> list[list[tuple[float, float]]]:
    """The polygons of a shape of radius 1."""
    if shape == "disc":
        return [_corners(40, turn)]
    if shape == "square":
        return [_corners(4, turn)]
    if shape == "triangle":
        return [_corners(3, turn)]
    if shape == "star":
        return [_corners(10, turn, inner=0.4)]
    if shape == "cross":
        return [_beam(turn, 0.0, 0.22), _beam(turn + math.pi / 2, 0.0, 0.22)]
    if shape == "bars":
        return [_beam(turn, away, 0.13) for away in (-0.6, 0.0, 0.6)]
    if shape == "ring":  # there and back
        return [[*_corners(40, turn), _corners(1, turn)[0], *_corners(40, turn, radius=0.6)[::-1]]]
    return [[(x + 0.24 * u, y + 0.24 * v) for u, v in _corners(16, 0.0)] for x, y in _corners(6, turn, radius=0.75)]


def _corners(count: int, turn: float, *, radius: float = 1.0, inner: float = 1.0) -> list[tuple[float, float]]:
    angles = [turn + 2 * math.pi * one / count for one in range(count)]
    lengths = [radius * (inner if place % 2 else 1.0) for place in range(count)]
    return [(length * math.cos(angle), length * math.sin(angle)) for length, angle in zip(lengths, angles, strict=True)]


def _beam(turn: float, away: float, half: float) -> list[tuple[float, float]]:
    across, along = math.cos(turn), math.sin(turn)
    corners = ((-1.0, away - half), (1.0, away - half), (1.0, away + half), (-1.0, away + half))
    return [(x * across - y * along, x * along + y * across) for x, y in corners]
