"""A recipe: everything a run depends on, in one YAML file.

    recipe = Recipe.load("recipes/paper.yaml").with_settings(["training.steps=200", "strategy=gaia"])

`docs/recipes.md` describes every key. A RecipeError lists all mistakes with the file, the line, what was found and what
is allowed. Names of data sets, models and strategies are checked where they are used; `recipe.error` makes an error
that also names the line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from weightgrad.errors import RecipeError
from weightgrad.lab.recipes import expansion
from weightgrad.lab.recipes.checks import check
from weightgrad.lab.recipes.document import Document, Loc, Mistake, MistakesError, show_value, to_yaml
from weightgrad.lab.recipes.schema import (
    AnyFault,
    Compute,
    Data,
    Lan,
    LinkEntry,
    Model,
    Server,
    SiteEntry,
    Strategy,
    StrategyChoice,
    Training,
)
from weightgrad.lab.recipes.validation_errors import Owners, repair, translate
from weightgrad.lab.recipes.values import Integer, Section, Text


class Recipe(Section):
    """A recipe as it was written, in base units. `site_list`, `link_list`, `fault_list` have templates written out."""

    name: Text = Field(description="a text; without it, the file's name")
    seed: Integer = Field(default=0, ge=0, description="a whole number from 0")
    data: Data = Field(description="a mapping, e.g. {name: digits}")
    model: Model = Field(description="a mapping, e.g. {name: lenet-digits}")
    training: Training = Field(description="a mapping with at least steps, batch and optimizer")
    server: Server = Field(description="a mapping, e.g. {name: ohio}")
    sites: tuple[SiteEntry, ...] = Field(min_length=1, description="a list of e.g. {name: virginia, workers: 4}")
    lan: Lan = Field(default=Lan(), description="a mapping, e.g. {bandwidth: 900 Mbit/s, delay: 0.1 ms}")
    links: tuple[LinkEntry, ...] = Field(
        description="a list of e.g. {between: [ohio, virginia], bandwidth: 300 Mbit/s, delay: 11 ms}"
    )
    compute: Compute = Field(description="a mapping, e.g. {seconds_per_step: 0.03}")
    strategy: Strategy = Field(
        default=StrategyChoice("auto"), description="a name, e.g. diloco, or {name: diloco, every: 50}"
    )
    faults: tuple[AnyFault, ...] = Field(
        default=(), description="a list of e.g. {at: 10 s, cut: [ohio, virginia], for: 5 s}"
    )

    _document: Document | None = PrivateAttr(default=None)

    @staticmethod
    def load(path: Path | str) -> Recipe:
        """Read a recipe from a file.

        Raises:
            RecipeError: The file cannot be read, or the recipe has mistakes.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise RecipeError(f"{path} is not a text in UTF-8; wanted a recipe in YAML") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RecipeError(f"cannot read the recipe {path}: {reason}") from None
        return Recipe.parse(text, str(path))

    @staticmethod
    def parse(text: str, name: str = "recipe") -> Recipe:
        """Read a recipe from text; `name` is its name in errors."""
        return _validated(Document.parse(text, name))

    def with_settings(self, settings: Iterable[str]) -> Recipe:
        """This recipe with values replaced, as `--set` does: `training.steps=200`, `sites.0.workers=2`."""
        document = self._source()
        if "strategy" not in document.value:  # strategy.every=50 is about the default one
            value = {**document.value, "strategy": self.strategy.name}
            document = Document(document.name, value, document.places, document.mistakes)
        for setting in settings:
            document = document.with_setting(setting)
        return _validated(document)

    def dump(self) -> dict[str, Any]:
        """Every value, defaults too, as JSON has them; quantities in bit/s and seconds. It is a recipe again."""
        return self.model_dump(mode="json", by_alias=True)

    def to_yaml(self) -> str:
        """Every value, defaults too, as YAML with units. It is a recipe again, the same one."""
        return to_yaml(self.model_dump(mode="json", by_alias=True, context="units"))

    def error(self, loc: Loc, message: str) -> RecipeError:
        """An error at a value, e.g. `recipe.error(("strategy", "codec"), "pi must be at least 1")`."""
        return self._source().error([Mistake(tuple(loc), message)])

    @property
    def workers(self) -> int:
        """Workers of all sites together."""
        return sum(entry.workers * len(entry.names) for entry in self.sites)

    @property
    def site_list(self) -> tuple[expansion.Site, ...]:
        """Every site by its own name, with the lan and compute that apply to it."""
        return tuple(expansion.sites(self))

    @property
    def link_list(self) -> tuple[expansion.Link, ...]:
        """Every link by the names of its ends."""
        return tuple(expansion.links(self))

    @property
    def fault_list(self) -> tuple[expansion.Fault, ...]:
        """Every fault in the order of time."""
        return tuple(expansion.faults(self))

    @property
    def absent_at_start(self) -> frozenset[str]:
        """Sites whose first coming or going is a `join`."""
        first: dict[str, str] = {}
        for fault in self.fault_list:
            if fault.what in ("join", "leave"):
                first.setdefault(fault.where[0], fault.what)
        return frozenset(name for name, what in first.items() if what == "join")

    @model_validator(mode="after")
    def _sections_fit(self) -> Recipe:
        mistakes = check(self)
        if mistakes:
            raise MistakesError(mistakes)
        return self

    def _source(self) -> Document:
        return self._document or Document(f"recipe {self.name!r}", self.dump())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.dump() == other.dump()

    def __hash__(self) -> int:
        return hash(self.to_yaml())


def _validated(document: Document) -> Recipe:
    value = document.value
    if not isinstance(value, dict):
        keys = ", ".join(Recipe.model_fields)
        found = Mistake((), f"found {show_value(value)}; wanted a mapping with the keys {keys}")
        raise document.error(document.mistakes or [found])
    value = {"name": Path(document.name).stem or "recipe", **value}
    owners: Owners = {}
    try:
        recipe = Recipe.model_validate(value, context=owners)
    except ValidationError as error:
        # A mistake that the YAML reader has reported is not reported again.
        known = {mistake.loc for mistake in document.mistakes}
        found_here = [*translate(error, value, owners), *_further(error, value, owners)]
        mistakes = [mistake for mistake in found_here if mistake.loc not in known]
        raise document.error([*document.mistakes, *mistakes]) from None
    if document.mistakes:
        raise document.error(document.mistakes)
    recipe._document = document
    return recipe


def _further(error: ValidationError, value: object, owners: Owners) -> list[Mistake]:
    """Mistakes in how the sections fit together, found after the single mistakes are left out."""
    try:
        Recipe.model_validate(repair(error, value, owners), context={})
    except ValidationError as further:
        whole = [finding.get("ctx", {}).get("error") for finding in further.errors() if finding["loc"] == ()]
        return [mistake for raised in whole if isinstance(raised, MistakesError) for mistake in raised.found]
    return []
