"""A YAML file as plain values that remember their lines.

YAML 1.2's idea of a scalar: `1e-4` is a number, `no` and `2026-11-16` are texts, a key stands once.
Nothing but text, numbers, true, false, null, lists and mappings is made of a file, whatever it says.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from weightgrad.errors import RecipeError

Loc: TypeAlias = tuple[str | int, ...]
_TAG = "tag:yaml.org,2002:"
_MAX_VALUES = 100_000
_MAX_CHARACTERS = 10_000_000  # of all texts together: an alias makes a long one again in two characters
_NAMED: tuple[Loc, ...] = (("strategy",),)  # where a name alone is short for {name: it}
_MAX_DEPTH = 30
_MAX_WHOLE = 2**63 - 1


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (its global model class keeps them in a class attribute)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # In other styles PyYAML reads some of the line breaks that it wrote as spaces.
        style = '"' if re.search("[\n\r\x85\u2028\u2029]", data) else None
        return self.represent_scalar(_TAG + "str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass(frozen=True)
class Mistake:
    """What is wrong, and where in the document."""

    loc: Loc
    message: str


class MistakesError(ValueError):
    """Several mistakes at once; their places are relative to the part that raises them."""

    def __init__(self, found: Iterable[Mistake]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(mistake.message for mistake in self.found))


@dataclass(frozen=True)
class Document:
    """The values of a file or of a setting, and where each of them was written."""

    name: str
    value: Any
    places: dict[Loc, int | str] = field(default_factory=dict)  # a line, or the setting it came from
    mistakes: tuple[Mistake, ...] = ()

    @staticmethod
    def parse(text: str, name: str) -> Document:
        """Read YAML. What cannot be read at all is a RecipeError; what can be skipped becomes a mistake."""
        try:
            root = yaml.compose(text, _Loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = ", ".join(part for part in (error.context, error.problem) if part)
            raise RecipeError(f"{name}{_line(mark)}: not YAML: {what}") from None
        except yaml.reader.ReaderError as error:
            line = 1 + text.count("\n", 0, error.position)
            raise RecipeError(f"{name}, line {line}: not YAML: a character that no text file has") from None
        except RecursionError:
            raise RecipeError(f"{name}: nested too deeply") from None
        except (ValueError, OverflowError) as error:  # escapes and directives that PyYAML does not check
            raise RecipeError(f"{name}: not YAML: {error}") from None
        builder = _Builder(name)
        value = None if root is None else builder.build(root, (), ())
        return Document(name, value, builder.places, tuple(builder.mistakes))

    def place(self, loc: Loc) -> int | str | None:
        """Where the value at `loc` was written, or if there is none, what should have held it."""
        return next((self.places[loc[:end]] for end in range(len(loc), -1, -1) if loc[:end] in self.places), None)

    def error(self, mistakes: Iterable[Mistake]) -> RecipeError:
        """One error for all mistakes, in the order of the lines."""
        found = sorted(dict.fromkeys(mistakes), key=lambda mistake: _order(self.place(mistake.loc)))
        lines = [f"{self._where(mistake.loc)}{show_loc(mistake.loc)}{mistake.message}" for mistake in found]
        if len(lines) == 1:
            return RecipeError(f"{self.name}, {lines[0]}" if self.places else f"{self.name}: {lines[0]}")
        return RecipeError("\n  ".join([f"{self.name} has {len(lines)} mistakes:", *lines]))

    def _where(self, loc: Loc) -> str:
        place = self.place(loc)
        return "" if place is None else f"line {place}: " if isinstance(place, int) else f"--set {place}: "

    def with_setting(self, setting: str) -> Document:
        """The document with one value replaced: `training.steps=200`, `sites.0.workers=2`."""
        name = f"--set {setting}"
        key, equals, text = setting.partition("=")
        loc: Loc = tuple(
            int(part) if re.fullmatch("[0-9]{1,9}", part) else part for part in re.findall(r"[^.\[\]\s]+", key)
        )
        if not equals or not 0 < len(loc) < _MAX_DEPTH:
            raise RecipeError(f"{name}: wanted key=value, e.g. training.steps=200 or sites.0.workers=2")
        given = Document.parse(text, name)
        if given.mistakes:
            raise given.error(given.mistakes)
        value = copy.deepcopy(self.value)
        places = dict(self.places)
        holder = value
        for depth, step in enumerate(loc):
            slot = _slot(holder, step, loc[:depth], name)
            here = (*loc[:depth], slot)
            if depth == len(loc) - 1:
                places = {known: place for known, place in places.items() if known[: len(here)] != here}
                places[here] = setting
                holder[slot] = given.value
            else:
                if isinstance(holder, dict) and holder.get(str(slot)) is None:
                    holder[slot] = {}
                    places[here] = setting
                elif here in _NAMED and isinstance(holder[slot], str):
                    holder[slot] = {"name": holder[slot]}
                holder = holder[slot]
        return Document(self.name, value, places, self.mistakes)


def to_yaml(value: object) -> str:
    """YAML that `Document.parse` reads back as the same value."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=110
    )
    return text


def show_loc(loc: Loc) -> str:
    """A place as one writes it, with a colon: `links[1].between: `."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    return f"{text}: " if text else ""


def show_value(value: object) -> str:
    """A value for a message: short, on one line."""
    if value is None:
        return "nothing"
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _slot(holder: object, step: str | int, above: Loc, name: str) -> str | int:
    """The key or index under which a setting puts its value."""
    where = show_loc(above).removesuffix(": ")
    if isinstance(holder, dict):
        return str(step)
    if isinstance(holder, list):
        if isinstance(step, int) and step < len(holder):
            return step
        raise RecipeError(f"{name}: {where} has {len(holder)} entries, counted from 0; there is no {step!r}")
    found = show_value(holder)
    raise RecipeError(f"{name}: {where or 'the recipe'} is {found}, which has no {step!r}; set {where} as a whole")


def _order(place: int | str | None) -> tuple[int, int, str]:
    if place is None:
        return 2, 0, ""
    return (0, place, "") if isinstance(place, int) else (1, 0, place)


def _line(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f", line {mark.line + 1}"


class _Builder:
    """Values from YAML's nodes. Aliases are copied, so every value has one place."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.places: dict[Loc, int | str] = {}
        self.mistakes: list[Mistake] = []
        self._characters = 0

    def build(self, node: yaml.Node, loc: Loc, above: tuple[int, ...], line: int | None = None) -> Any:
        self.places[loc] = node.start_mark.line + 1 if line is None else line
        if id(node) in above:
            raise RecipeError(f"{self.name}{_line(node.start_mark)}: a value that contains itself")
        if len(loc) > _MAX_DEPTH:
            raise RecipeError(f"{self.name}{_line(node.start_mark)}: nested too deeply")
        if len(self.places) > _MAX_VALUES:
            raise RecipeError(f"{self.name}: more than {_MAX_VALUES:,} values")
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return {key: self.build(inside, (*loc, key), above, at) for key, inside, at in self._entries(node, loc)}
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.build(inside, (*loc, place), above) for place, inside in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, loc)
        self._mistake(loc, f"the tag {node.tag!r} has no meaning here; leave it out")
        return None

    def _entries(self, node: yaml.MappingNode, loc: Loc) -> Iterator[tuple[str, yaml.Node, int]]:
        seen: dict[str, int] = {}
        for key_node, inside in node.value:
            line = key_node.start_mark.line + 1
            key = self._scalar(key_node, loc) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                self._mistake(loc, f"a key must be a text, found {show_value(key)} on line {line}")
            elif key in seen:
                lines = f"lines {seen[key]} and {line}" if line != seen[key] else f"line {line}"
                self._mistake((*loc, key), f"the key {key!r} stands twice, on {lines}; keep one of them")
            else:
                seen[key] = line
                yield key, inside, line

    def _scalar(self, node: yaml.ScalarNode, loc: Loc) -> object:
        kind, text = node.tag.removeprefix(_TAG), node.value
        self._characters += len(text)
        if self._characters > _MAX_CHARACTERS:
            raise RecipeError(f"{self.name}{_line(node.start_mark)}: more than {_MAX_CHARACTERS:,} characters of text")
        try:
            if kind == "str":
                # JSON writes some characters as two halves; a half by itself is no text.
                return text.encode("utf-16", "surrogatepass").decode("utf-16")
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                whole = int(text, 0 if text[:2] in ("0x", "0o") else 10)
                if abs(whole) <= _MAX_WHOLE:
                    return whole
            if kind == "float":
                number = float(text)
                if math.isfinite(number):
                    return number
        except (ValueError, KeyError):
            pass
        if kind in ("int", "float"):
            self._mistake(loc, f"{text[:40]} is not a finite number of ordinary size")
        else:
            self._mistake(loc, f"{show_value(text)} with the tag {node.tag!r} has no meaning here")
        return None

    def _mistake(self, loc: Loc, message: str) -> None:
        self.mistakes.append(Mistake(loc, message))
