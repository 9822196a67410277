"""A recipe with sites alone, for people whose script has its own data and model.

    sites: [virginia, tokyo]
    strategy: auto

It is enough for `weightgrad serve`. What the simulator, the emulator and `weightgrad train` need besides is in a whole
recipe.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from weightgrad.lab.recipes.document import Document, Mistake, MistakesError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.recipes.recipe_file import RecipeFile, read_text
from weightgrad.lab.recipes.schema import Strategy, StrategyChoice
from weightgrad.lab.recipes.values import Integer, SiteName, Text

_OF_A_WHOLE_RECIPE = ("data", "model", "training", "server", "lan", "links", "compute", "faults")


def _no_template(name: str) -> str:
    if "{}" in name:
        raise ValueError(f"found {name!r}; wanted the name of one site; a template with a count is for a whole recipe")
    return name


class SiteList(RecipeFile):
    """The names of the sites that may join, and the strategy of the run."""

    name: Text = Field(description="a text; without it, the file's name")
    seed: Integer = Field(default=0, ge=0, description="a whole number from 0")
    sites: tuple[Annotated[SiteName, AfterValidator(_no_template)], ...] = Field(
        description="names, e.g. [virginia, tokyo]; what else is known of a site belongs into a whole recipe, with "
        "data, model, training, server, links and compute",
    )
    strategy: Strategy = Field(
        default=StrategyChoice("auto"), description="a name, e.g. diloco, or {name: diloco, every: 50}"
    )

    @model_validator(mode="after")
    def _names_differ(self) -> SiteList:
        if not self.sites:
            raise MistakesError([Mistake(("sites",), "found none; wanted the name of at least one site")])
        twice = [name for name, count in Counter(self.sites).items() if count > 1]
        if twice:
            raise MistakesError([Mistake(("sites",), f"found {', '.join(twice)} more than once; names must differ")])
        return self


def load_served(path: Path | str) -> Recipe | SiteList:
    """Read what a server needs: a whole recipe, or one with sites alone.

    Raises:
        RecipeError: The file cannot be read, or has mistakes.
    """
    document = Document.parse(read_text(path), str(path))
    keys = document.value if isinstance(document.value, dict) else {}
    whole = not keys or any(key in keys for key in _OF_A_WHOLE_RECIPE)
    return Recipe.of_document(document) if whole else SiteList.of_document(document)
