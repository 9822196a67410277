"""The command line argument RECIPE: a file, or the name of one that comes with the package."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from weightgrad.errors import RecipeError
from weightgrad.lab.recipes.recipe import Recipe


def shipped() -> Path:
    """The directory of the recipes that come with the package: `recipes/` of a checkout, which a wheel has inside."""
    inside = Path(str(resources.files("weightgrad.lab.recipes"))) / "shipped"
    return inside if inside.is_dir() else Path(str(resources.files("weightgrad"))).parent / "recipes"


def find(text: str) -> Path:
    """The path of a recipe: for a name such as `laptop` the recipe of the package, any other path as it is.

    A file of that name, and one in a directory `recipes` here, come first.

    Raises:
        RecipeError: There is no such file.
    """
    given, own = Path(text), Path("recipes")
    bare = given.name == text and not given.suffix
    tried = [given, own / f"{text}.yaml", shipped() / f"{text}.yaml"] if bare else [given]
    for path in tried:
        if path.is_file():
            return path
    known = sorted({path.stem for place in (own, shipped()) for path in place.glob("*.yaml")})
    looked = " and ".join(map(str, tried[:2]))
    raise RecipeError(
        f"no recipe {text!r}: looked for {looked} in {Path.cwd()}; the recipes that have a name are {', '.join(known)}"
    )


def load(text: str, settings: Sequence[str] | None) -> Recipe:
    """Read a recipe and apply the overrides of `--set`."""
    recipe = Recipe.load(find(text))
    return recipe.with_settings(list(settings)) if settings else recipe
