"""The syntax that codec specs, strategy parts and choices on the command line share.

    list     := item {"," item}                                   baseline,diloco(every=50)
    chain    := call {">" call}                                   topk(0.01) > qsgd(bits=4)
    call     := name | name "(" [argument {"," argument}] ")"     outer('nesterov', lr=0.7)
    argument := value | name "=" value
    value    := number | 'text' | True | False | None | list, tuple, set or dict of such | chain

A chain is a small part of Python's grammar. It is read with `ast` and never evaluated, and its length and depth
are limited, because a spec may come from another machine. The three users interpret the result: `codecs.spec`
makes codecs of it, `core.parts` parts of a strategy, `lab.report.choices` strategies to compare.
"""

from __future__ import annotations

import ast
import re
import threading
from dataclasses import dataclass
from typing import Any

MAX_LENGTH = 1000  # characters of a chain
MAX_LIST_LENGTH = 10_000  # characters of a list
MAX_DEPTH = 32  # calls and chains inside each other

_PARSING = threading.Lock()  # CPython 3.11 counts the depth of all threads' syntax trees in one place, and fails
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


class CallSyntaxError(ValueError):
    """A text does not follow the syntax. Users of this module raise an error of their own in its place."""


@dataclass(frozen=True)
class Call:
    """A name with arguments, not yet interpreted.

    Attributes:
        name: What is called.
        arguments: Values without a name, in order: literals, or a Call or Chain.
        keywords: Values with a name, in order; a name may occur twice.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Chain:
    """Two or more calls joined by ">", from left to right. A chain in parentheses is a link of its own."""

    links: tuple[Call | Chain, ...]


def parse(text: str) -> Call | Chain:
    """Read one call, or one chain of calls.

    Args:
        text: For example `ef(topk(0.01) > qsgd(bits=4))`.

    Returns:
        The call or chain. A name without parentheses is a Call without arguments.

    Raises:
        CallSyntaxError: The text is too long, nested too deeply, or something else than calls and literals.
    """
    if len(text) > MAX_LENGTH:
        raise CallSyntaxError(f"it has {len(text)} characters, at most {MAX_LENGTH} are allowed")
    try:
        with _PARSING:
            body = ast.parse(text.strip(), mode="eval").body
        return _chain(body, 0)
    except (RecursionError, MemoryError):
        raise CallSyntaxError("it is nested too deeply") from None
    except SyntaxError as error:
        raise CallSyntaxError(error.msg) from None
    except ValueError as error:  # a null byte, or one of our own
        raise CallSyntaxError(str(error)) from None


def _chain(node: ast.expr, depth: int) -> Call | Chain:
    if depth > MAX_DEPTH:
        raise CallSyntaxError(f"it is nested too deeply; {MAX_DEPTH} levels are allowed")
    if isinstance(node, ast.Compare):
        if not all(isinstance(operator, ast.Gt) for operator in node.ops):
            raise CallSyntaxError("calls are chained with '>' only")
        return Chain(tuple(_chain(link, depth + 1) for link in (node.left, *node.comparators)))
    if isinstance(node, ast.Name):
        return Call(node.id)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise CallSyntaxError(f"expected a name, or name(1, key=2), found {ast.unparse(node)!r}")
    keywords = []
    for keyword in node.keywords:
        if keyword.arg is None:
            raise CallSyntaxError(f"'**' is not allowed, found {ast.unparse(node)!r}")
        keywords.append((keyword.arg, _value(keyword.value, depth)))
    return Call(node.func.id, tuple(_value(argument, depth) for argument in node.args), tuple(keywords))


def _value(node: ast.expr, depth: int) -> Any:
    if isinstance(node, (ast.Call, ast.Compare, ast.Name)):
        return _chain(node, depth + 1)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise CallSyntaxError(f"{ast.unparse(node)!r} is not a number, a quoted text or a name") from None


def split(text: str) -> list[str]:
    """Cut a list at the commas outside of brackets and quotes.

    Args:
        text: For example `baseline,diloco(every=50, up=fp16)`: two items.

    Returns:
        The items as text, without the spaces around them.

    Raises:
        CallSyntaxError: The text is too long, or a bracket or quote in it has no partner.
    """
    if len(text) > MAX_LIST_LENGTH:
        raise CallSyntaxError(f"it has {len(text)} characters, at most {MAX_LIST_LENGTH} are allowed")
    items, closing, quote, start = [], "", "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _BRACKETS:
            closing += _BRACKETS[letter]
        elif letter in _BRACKETS.values():
            if not closing.endswith(letter):
                raise CallSyntaxError(f"the bracket {letter!r} has no partner")
            closing = closing[:-1]
        elif letter == "," and not closing:
            items.append(text[start:place].strip())
            start = place + 1
    if closing or quote:
        raise CallSyntaxError(f"{closing[-1:] or quote!r} is missing at the end")
    return [*items, text[start:].strip()]


def parse_settings(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Read `name` or `name(key=value, …)` and leave every value as text.

    The names may have hyphens and dots, and a value may be anything that a recipe takes, such as `{lr: 0.1}` or
    `*.bias`; only its brackets and quotes must match.

    Args:
        text: For example `diloco(every=50, up=ef(qsgd(bits=4)))`.

    Returns:
        The name, and each key with its value.

    Raises:
        CallSyntaxError: There is no name, or an argument is not key=value.
    """
    match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None:
        raise CallSyntaxError("expected a name, or name(key=value, …)")
    name, inside = match.groups()
    settings = []
    for item in split(inside) if inside and inside.strip() else []:
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not value or not key.isidentifier():
            raise CallSyntaxError(f"{item!r} is not key=value")
        settings.append((key, value))
    return name, tuple(settings)
