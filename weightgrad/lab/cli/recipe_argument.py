"""The command line argument RECIPE: a file, or the name of one in `recipes/`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weightgrad.errors import RecipeError
from weightgrad.lab.recipes.recipe import Recipe


def find(text: str) -> Path:
    """The path of a recipe: `recipes/laptop.yaml` for `laptop`, any other path as it is.

    Raises:
        RecipeError: There is no such file.
    """
    given = Path(text)
    shipped = Path("recipes") / f"{text}.yaml"
    bare = given.name == text and not given.suffix
    tried = [given, shipped] if bare else [given]
    for path in tried:
        if path.is_file():
            return path
    known = sorted(path.stem for path in Path("recipes").glob("*.yaml"))
    there = f"; the recipes in recipes/ are {', '.join(known)}" if known else "; there is no directory recipes here"
    raise RecipeError(f"no recipe {text!r}: looked for {' and '.join(map(str, tried))} in {Path.cwd()}{there}")


def load(text: str, settings: Sequence[str] | None) -> Recipe:
    """Read a recipe and apply the overrides of `--set`."""
    recipe = Recipe.load(find(text))
    return recipe.with_settings(list(settings)) if settings else recipe
