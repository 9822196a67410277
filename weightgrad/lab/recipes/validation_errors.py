"""Errors of pydantic as mistakes of a recipe: what was found, what is allowed, and what was perhaps meant."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from weightgrad.errors import UnitError
from weightgrad.lab.recipes.checks import nearest
from weightgrad.lab.recipes.document import Loc, Mistake, MistakesError, show_value
from weightgrad.lab.recipes.schema import FAULTS, TAGS
from weightgrad.lab.recipes.values import Section

Owners = dict[int, type[Section]]


def translate(error: ValidationError, value: object, owners: Owners) -> list[Mistake]:
    """Every error of pydantic as a mistake; `owners` gives the section of each mapping in `value`."""
    found: list[Mistake] = []
    for finding in error.errors(include_url=False):
        loc = _loc(finding["loc"], finding["type"])
        raised = finding.get("ctx", {}).get("error")
        if isinstance(raised, MistakesError):
            found += [Mistake(loc + mistake.loc, mistake.message) for mistake in raised.found]
        else:
            found.append(Mistake(loc, _message(finding["type"], loc, finding["input"], raised, value, owners)))
    return found


def repair(error: ValidationError, value: object, owners: Owners) -> object:
    """The value without its mistakes, as far as they can be left out, in order to find further ones."""
    repaired = copy.deepcopy(value)
    for finding in error.errors(include_url=False):
        loc = _loc(finding["loc"], finding["type"])
        if finding["type"] == "extra_forbidden":
            _walk(repaired, loc[:-1])[-1].pop(loc[-1])
        elif isinstance(finding.get("ctx", {}).get("error"), UnitError):
            _walk(repaired, loc[:-1])[-1][loc[-1]] = 1
        elif (at := _field(loc, value, owners)) and not at[1].is_required():
            _walk(repaired, at[0][:-1])[-1].pop(at[0][-1], None)
    return repaired


def _message(kind: str, loc: Loc, given: object, raised: object, value: object, owners: Owners) -> str:
    if isinstance(raised, ValueError):
        return str(raised)
    if kind == "extra_forbidden":
        *_, holder = _walk(value, loc[:-1])
        owner = owners.get(id(holder))
        allowed = list(_fields(owner)) if owner else []
        return f"unknown key {str(loc[-1])!r}; {nearest(str(loc[-1]), allowed)}Allowed: {', '.join(allowed)}"
    if kind == "union_tag_not_found":
        return f"found {show_value(given)}; wanted a time `at` and exactly one of {', '.join(FAULTS)}"
    at = _field(loc, value, owners)
    wanted = (at and at[1].description) or "another kind of value"
    return f"missing; wanted: {wanted}" if kind == "missing" else f"found {show_value(given)}; wanted: {wanted}"


def _field(loc: Loc, value: object, owners: Owners) -> tuple[Loc, FieldInfo] | None:
    """The innermost field that `loc` lies in, and where it is."""
    holders = _walk(value, loc[:-1])
    for end in range(min(len(holders), len(loc)), 0, -1):
        owner = owners.get(id(holders[end - 1]))
        if owner is not None and (field := _fields(owner).get(str(loc[end - 1]))):
            return loc[:end], field
    return None


def _fields(part: type[Section]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in part.model_fields.items()}


def _loc(loc: Loc, kind: str) -> Loc:
    """Without the tags that pydantic puts in for the branches of a choice."""
    end = len(loc) - 1 if kind == "extra_forbidden" else len(loc)
    return (*(part for part in loc[:end] if part not in TAGS), *loc[end:])


def _walk(value: Any, loc: Loc) -> list[Any]:
    """The values on the way to `loc`, from the root on, as far as they exist."""
    on_the_way = [value]
    for part in loc:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            break
        on_the_way.append(value)
    return on_the_way
