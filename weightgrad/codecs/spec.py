"""Codecs by name: `ef(topk(0.01) > qsgd(bits=4, bucket=512))`.

The grammar is a small part of Python's, read with `ast` and never evaluated:

    chain := codec [">" chain]
    codec := name | name "(" [argument {"," argument}] ")"
    argument := value | name "=" value          value := number | "text" | True | False | None | chain
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from weightgrad.codecs.codec import Codec, Stage
from weightgrad.errors import SpecError

_MAX_SPEC = 1000
_codecs: dict[str, type[Codec]] = {}


_Class = TypeVar("_Class", bound=type[Codec])


def codec(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: enter a codec under its name in the spec language."""

    def enter(cls: _Class) -> _Class:
        cls.spec_name = name
        _codecs[name] = cls
        return cls

    return enter


def available() -> dict[str, type[Codec]]:
    """Every codec by name, sorted."""
    return dict(sorted(_codecs.items()))


def signature(cls: type[Codec]) -> str:
    """How a codec is written, e.g. `qsgd(bits=4, bucket=512)`."""
    parts = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in ("then", "inner"):
            if field.name == "inner":
                parts.append("CODEC")
        elif field.default is dataclasses.MISSING:
            parts.append(field.name)
        else:
            parts.append(f"{field.name}={field.default!r}")
    tail = " > CODEC" if issubclass(cls, Stage) else ""
    return f"{cls.spec_name}({', '.join(parts)}){tail}"


def summary(cls: type[Codec]) -> str:
    """The first line of a codec's docstring."""
    return (inspect.getdoc(cls) or "").splitlines()[0]


def explain(name: str) -> str:
    """Arguments and background of a codec: its signature and the docstring of its file."""
    cls = _codecs[name]
    background = inspect.getdoc(inspect.getmodule(cls)) or ""
    return f"{signature(cls)}\n\n{background}"


def parse(spec: str) -> Codec:
    """The codec a spec stands for; `str(codec)` is a spec again."""
    if len(spec) > _MAX_SPEC:
        raise SpecError(f"a codec spec has at most {_MAX_SPEC} characters, got {len(spec)}")
    try:
        return _read(spec)
    except (RecursionError, MemoryError):
        raise SpecError("the codec spec is nested too deeply") from None


@lru_cache(maxsize=64)  # codecs do not change; `auto` asks for the same two at every round
def _read(spec: str) -> Codec:
    try:
        tree = ast.parse(spec.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise SpecError(
            f"cannot read the codec spec {spec!r}: {error}; write e.g. 'ef(topk(0.01) > qsgd(bits=4))'"
        ) from None
    return _chain(tree.body, spec)


def _chain(node: ast.expr, spec: str) -> Codec:
    if not isinstance(node, ast.Compare):
        return _codec(node, spec)
    if not all(isinstance(op, ast.Gt) for op in node.ops):
        raise SpecError(f"in {spec!r}: codecs are chained with '>' only")
    parts = [_codec(part, spec) for part in (node.left, *node.comparators)]
    chain = parts[-1]
    for stage in reversed(parts[:-1]):
        if not isinstance(stage, Stage):
            stages = ", ".join(name for name, cls in available().items() if issubclass(cls, Stage))
            raise SpecError(f"in {spec!r}: nothing can follow {stage}; these can be followed by '>': {stages}")
        chain = stage > chain
    return chain


def _codec(node: ast.expr, spec: str) -> Codec:
    if isinstance(node, ast.Name):
        name, arguments, keywords = node.id, [], []
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name, arguments, keywords = node.func.id, node.args, node.keywords
    elif isinstance(node, ast.Compare):
        return _chain(node, spec)
    else:
        raise SpecError(f"in {spec!r}: expected a codec such as qsgd(bits=4), found {ast.unparse(node)!r}")
    if name not in _codecs:
        raise SpecError(f"no codec {name!r}; there are {', '.join(available())}")
    cls = _codecs[name]
    fields = [f.name for f in dataclasses.fields(cls) if f.name != "then"]  # type: ignore[arg-type]
    if len(arguments) > len(fields):
        raise SpecError(f"{name} takes at most {len(fields)} arguments, got {len(arguments)}: {signature(cls)}")
    values = {field: _value(a, spec) for field, a in zip(fields, arguments, strict=False)}
    for keyword in keywords:
        if keyword.arg not in fields:
            raise SpecError(f"{name} has no argument {keyword.arg!r}: {signature(cls)}")
        if keyword.arg in values:
            raise SpecError(f"{name} got {keyword.arg!r} twice: {signature(cls)}")
        values[keyword.arg] = _value(keyword.value, spec)
    missing = [
        f.name
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values
    ]
    if missing:
        raise SpecError(f"{name} needs {', '.join(missing)}: {signature(cls)}")
    return cls(**values)


def _value(node: ast.expr, spec: str) -> object:
    if isinstance(node, (ast.Call, ast.Compare, ast.Name)):
        return _chain(node, spec)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise SpecError(f"in {spec!r}: {ast.unparse(node)!r} is not a number, a quoted text or a codec") from None
