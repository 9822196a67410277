"""The parts that a strategy is made of, written as text: `every(8)`, `gaia(0.01)`, `outer('nesterov', lr=0.7)`.

Each kind of part (trigger, selector, aggregator, consistency, resume, controller) has its own table of names. A
part is a frozen dataclass that checks itself; its text parses back to it. A part remembers nothing between
rounds: the two state machines do. `weightgrad.call_syntax` has the grammar of the texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from weightgrad.call_syntax import Call, CallSyntaxError, Chain
from weightgrad.call_syntax import parse as parse_chain
from weightgrad.errors import StrategyError

Kind = TypeVar("Kind", bound=type)

_tables: dict[str, dict[str, type]] = {}


def part(kind: str, name: str) -> Callable[[Kind], Kind]:
    """Enter a dataclass under its name in the table of its kind.

    Args:
        kind: "trigger", "selector", "aggregator", "consistency", "resume" or "controller".
        name: How a strategy calls it.

    Returns:
        A decorator for the dataclass.

    Raises:
        ValueError: The name is taken.
    """

    def enter(cls: Kind) -> Kind:
        table = _tables.setdefault(kind, {})
        if name in table:
            raise ValueError(f"{kind} {name!r} is taken")
        table[name] = cls
        cls.word = name  # type: ignore[attr-defined]
        return cls

    return enter


def available(kind: str) -> dict[str, str]:
    """Every part of a kind: how it is written, and the first line of its docstring."""
    return {_signature(name, cls): (cls.__doc__ or "").splitlines()[0] for name, cls in sorted(_tables[kind].items())}


def parse(kind: str, text: str) -> Any:
    """Make the part that a text stands for.

    Args:
        kind: What it is a part for: "trigger", "selector", "aggregator", "consistency", "resume" or "controller".
        text: For example "every(8)".

    Returns:
        The part, which has checked its arguments.

    Raises:
        StrategyError: The text cannot be read, or no such part exists; the message lists those that do.
    """
    table, call = _tables[kind], _call(kind, text)
    if call.name not in table:
        known = ", ".join(_signature(n, c) for n, c in sorted(table.items()))
        raise StrategyError(f"no {kind} {call.name!r}; there are {known}")
    cls = table[call.name]
    named = dict(call.keywords)
    try:
        if len(named) < len(call.keywords):
            raise TypeError("an argument is given twice")
        return cls(*call.arguments, **named)
    except TypeError as error:
        raise StrategyError(f"{kind} {text!r}: {error}; it is written {_signature(call.name, cls)}") from None


def name_of(kind: str, text: str) -> str:
    """The name of a part, without its arguments: `outer` of `outer('nesterov', lr=0.7)`."""
    return _call(kind, text).name


def _call(kind: str, text: str) -> Call:
    """A text as one call whose arguments are plain values."""
    try:
        call = parse_chain(str(text))
        if isinstance(call, Chain):
            raise CallSyntaxError("a part is one name, not a chain")
        for value in (*call.arguments, *(value for _, value in call.keywords)):
            if isinstance(value, (Call, Chain)):
                raise CallSyntaxError("its arguments are numbers, quoted texts, True, False or None")
    except CallSyntaxError as error:
        raise StrategyError(f"{kind} {text!r} cannot be read: {error}; write name or name(1, key=2)") from None
    return call


def to_text(value: Any) -> str:
    """Write a part as text that parses back to it."""
    shown = []
    for place, field in enumerate(dataclasses.fields(value)):
        own = getattr(value, field.name)
        if field.default is dataclasses.MISSING or place == 0 or own != field.default:
            shown.append(repr(own) if field.default is dataclasses.MISSING else f"{field.name}={own!r}")
    return f"{value.word}({', '.join(shown)})" if shown else value.word


def check(kind: str, name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    """Check that a number is within bounds.

    Args:
        kind: What the message names first, such as "every".
        name: The argument that is checked.
        value: What was given for it.
        low: The least that is allowed.
        high: The most that is allowed.
        whole: Whether it must be an integer.

    Raises:
        StrategyError: It is no number, or out of bounds; the message says the bounds.
    """
    numeric = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not numeric or not low <= value <= high:
        sort = "a whole number" if whole else "a number"
        raise StrategyError(f"{kind}: {name} = {value!r}; it must be {sort} from {low:g} to {high:g}")


def _signature(name: str, cls: type) -> str:
    fields = []
    for field in dataclasses.fields(cls):
        fields.append(field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default!r}")
    return f"{name}({', '.join(fields)})" if fields else name
