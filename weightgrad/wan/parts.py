"""The parts a strategy is made of, written as words: `every(8)`, `gaia(0.01)`, `outer('nesterov', lr=0.7)`.

Each kind of part (trigger, selector, aggregator, consistency, resume) has its own table of names. A
part is a frozen dataclass that checks itself; its text parses back to it. What a part remembers
between rounds is never in it: the two state machines hold that.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from weightgrad.errors import StrategyError

Kind = TypeVar("Kind", bound=type)

_tables: dict[str, dict[str, type]] = {}


def part(kind: str, name: str) -> Callable[[Kind], Kind]:
    """Enter a dataclass under its name in the table of its kind."""

    def enter(cls: Kind) -> Kind:
        table = _tables.setdefault(kind, {})
        if name in table:
            raise ValueError(f"{kind} {name!r} is taken")
        table[name] = cls
        cls.word = name  # type: ignore[attr-defined]
        return cls

    return enter


def available(kind: str) -> dict[str, str]:
    """Every part of a kind: how it is written, and what it is."""
    return {_signature(name, cls): (cls.__doc__ or "").splitlines()[0] for name, cls in sorted(_tables[kind].items())}


def parse(kind: str, text: str) -> Any:
    """The part a text stands for, or a StrategyError that lists what exists."""
    table = _tables[kind]
    name, positional, named = call(kind, text)
    if name not in table:
        known = ", ".join(_signature(n, c) for n, c in sorted(table.items()))
        raise StrategyError(f"no {kind} {name!r}; there are {known}")
    try:
        return table[name](*positional, **named)
    except TypeError as error:
        raise StrategyError(f"{kind} {text!r}: {error}; it is written {_signature(name, table[name])}") from None


def call(kind: str, text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, arguments and named arguments of `name` or `name(1, key=2)`; arguments are plain values."""
    try:
        node = ast.parse(str(text).strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, [], {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and all(k.arg for k in node.keywords):
            named = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
            return node.func.id, [ast.literal_eval(a) for a in node.args], named
    except (SyntaxError, ValueError):
        pass
    raise StrategyError(f"{kind} {text!r} cannot be read; write name or name(1, key=2)")


def words(value: Any) -> str:
    """A part as text that parses back to it."""
    shown = []
    for place, field in enumerate(dataclasses.fields(value)):
        own = getattr(value, field.name)
        if field.default is dataclasses.MISSING or place == 0 or own != field.default:
            shown.append(repr(own) if field.default is dataclasses.MISSING else f"{field.name}={own!r}")
    return f"{value.word}({', '.join(shown)})" if shown else value.word


def check(kind: str, name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    """A number within bounds, or a StrategyError that says them."""
    numeric = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not numeric or not low <= value <= high:
        sort = "a whole number" if whole else "a number"
        raise StrategyError(f"{kind}: {name} = {value!r}; it must be {sort} from {low:g} to {high:g}")


def _signature(name: str, cls: type) -> str:
    fields = []
    for field in dataclasses.fields(cls):
        fields.append(field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default!r}")
    return f"{name}({', '.join(fields)})" if fields else name
