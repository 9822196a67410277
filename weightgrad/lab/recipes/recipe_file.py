"""What a whole recipe and a list of sites have in common: they are read from YAML and remember its lines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import PrivateAttr, ValidationError

from weightgrad.errors import RecipeError
from weightgrad.lab.recipes.document import Document, Loc, Mistake, MistakesError, show_value, to_yaml
from weightgrad.lab.recipes.validation_errors import Owners, repair, translate
from weightgrad.lab.recipes.values import Section

if TYPE_CHECKING:
    from weightgrad.lab.recipes.schema import StrategyChoice

File = TypeVar("File", bound="RecipeFile")


class RecipeFile(Section):
    """A section that is a file of its own."""

    if TYPE_CHECKING:  # each file has them, at its own place among its keys
        name: str
        strategy: StrategyChoice

    _document: Document | None = PrivateAttr(default=None)

    @classmethod
    def load(cls: type[File], path: Path | str) -> File:
        """Read a file.

        Raises:
            RecipeError: The file cannot be read, or has mistakes.
        """
        return cls.parse(read_text(path), str(path))

    @classmethod
    def parse(cls: type[File], text: str, name: str = "recipe") -> File:
        """Read text; `name` is its name in errors."""
        return cls.of_document(Document.parse(text, name))

    @classmethod
    def of_document(cls: type[File], document: Document) -> File:
        """Check what a document says.

        Raises:
            RecipeError: It has mistakes; all of them are listed.
        """
        value = document.value
        if not isinstance(value, dict):
            keys = ", ".join(cls.model_fields)
            found = Mistake((), f"found {show_value(value)}; wanted a mapping with the keys {keys}")
            raise document.error(document.mistakes or [found])
        value = {"name": Path(document.name).stem or "recipe", **value}
        owners: Owners = {}
        try:
            made = cls.model_validate(value, context=owners)
        except ValidationError as error:
            # A mistake that the YAML reader has reported is not reported again.
            known = {mistake.loc for mistake in document.mistakes}
            found_here = [*translate(error, value, owners), *cls._further(error, value, owners)]
            mistakes = [mistake for mistake in found_here if mistake.loc not in known]
            raise document.error([*document.mistakes, *mistakes]) from None
        if document.mistakes:
            raise document.error(document.mistakes)
        made._document = document
        return made

    @classmethod
    def _further(cls, error: ValidationError, value: object, owners: Owners) -> list[Mistake]:
        """Mistakes in how the sections fit together, found after the single mistakes are left out."""
        try:
            cls.model_validate(repair(error, value, owners), context={})
        except ValidationError as further:
            whole = [finding.get("ctx", {}).get("error") for finding in further.errors() if finding["loc"] == ()]
            return [mistake for raised in whole if isinstance(raised, MistakesError) for mistake in raised.found]
        return []

    def with_settings(self: File, settings: Iterable[str]) -> File:
        """The same with values replaced, as `--set` does: `training.steps=200`, `sites.0.workers=2`."""
        document = self._source()
        if "strategy" not in document.value:  # strategy.every=50 is about the default one
            value = {**document.value, "strategy": self.strategy.name}
            document = Document(document.name, value, document.places, document.mistakes)
        for setting in settings:
            document = document.with_setting(setting)
        return type(self).of_document(document)

    def dump(self) -> dict[str, Any]:
        """Every value, defaults too, as JSON has them; quantities in bit/s and seconds. It can be read again."""
        return self.model_dump(mode="json", by_alias=True)

    def to_yaml(self) -> str:
        """Every value, defaults too, as YAML with units. It can be read again, and is then the same."""
        return to_yaml(self.model_dump(mode="json", by_alias=True, context="units"))

    def error(self, loc: Loc, message: str) -> RecipeError:
        """An error at a value, e.g. `recipe.error(("strategy", "codec"), "pi must be at least 1")`."""
        return self._source().error([Mistake(tuple(loc), message)])

    def _source(self) -> Document:
        return self._document or Document(f"recipe {self.name!r}", self.dump())


def read_text(path: Path | str) -> str:
    """The text of a file.

    Raises:
        RecipeError: There is no such file, or it is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is not a text in UTF-8; wanted a recipe in YAML") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecipeError(f"cannot read the recipe {path}: {reason}") from None
