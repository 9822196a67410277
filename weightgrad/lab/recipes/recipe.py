"""A recipe: everything a run depends on, in one YAML file.

    recipe = Recipe.load("recipes/paper.yaml").with_settings(["training.steps=200", "strategy=gaia"])

`docs/recipes.md` describes every key. A RecipeError lists all mistakes with the file, the line, what was found and what
is allowed. Names of data sets, models and strategies are checked where they are used; `recipe.error` makes an error
that also names the line.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from weightgrad.lab.recipes import expansion
from weightgrad.lab.recipes.checks import check
from weightgrad.lab.recipes.document import MistakesError
from weightgrad.lab.recipes.recipe_file import RecipeFile
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
from weightgrad.lab.recipes.values import Integer, Text


class Recipe(RecipeFile):
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.dump() == other.dump()

    def __hash__(self) -> int:
        return hash(self.to_yaml())
