"""Codecs by name: `ef(topk(0.01) > qsgd(bits=4, bucket=512))`.

`weightgrad.call_syntax` has the grammar; this file knows the codecs and makes them from what was read.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from weightgrad.call_syntax import Call, CallSyntaxError, Chain
from weightgrad.call_syntax import parse as parse_chain
from weightgrad.codecs.codec import Codec, Stage
from weightgrad.errors import SpecError

_codecs: dict[str, type[Codec]] = {}

_Class = TypeVar("_Class", bound=type[Codec])


def codec(name: str) -> Callable[[_Class], _Class]:
    """Enter a codec under its name in the spec language.

    Args:
        name: How a spec calls it, such as "qsgd".

    Returns:
        A decorator for the codec's class.
    """

    def enter(cls: _Class) -> _Class:
        cls.spec_name = name
        _codecs[name] = cls
        return cls

    return enter


def available() -> dict[str, type[Codec]]:
    """Return every codec by name, sorted."""
    return dict(sorted(_codecs.items()))


def signature(cls: type[Codec]) -> str:
    """Write how a codec is called, e.g. `qsgd(bits=4, bucket=512)`."""
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
    """Return the first line of a codec's docstring."""
    return (inspect.getdoc(cls) or "").splitlines()[0]


def explain(name: str) -> str:
    """Explain a codec: its signature and the docstring of its file."""
    cls = _codecs[name]
    background = inspect.getdoc(inspect.getmodule(cls)) or ""
    return f"{signature(cls)}\n\n{background}"


def parse(spec: str) -> Codec:
    """Make the codec that a spec stands for; `str(codec)` is a spec again.

    Args:
        spec: For example "ef(topk(0.01) > qsgd(bits=4))".

    Returns:
        The codec, which has checked its arguments.

    Raises:
        SpecError: The spec cannot be read, or names a codec or argument that does not exist.
    """
    return _parse(spec)


@lru_cache(maxsize=64)  # codecs do not change; `auto` asks for the same two at every round
def _parse(spec: str) -> Codec:
    try:
        return _codec(parse_chain(spec), spec)
    except CallSyntaxError as error:
        shown = spec if len(spec) < 200 else f"{spec[:200]}…"
        raise SpecError(
            f"cannot read the codec spec {shown!r}: {error}; write e.g. 'ef(topk(0.01) > qsgd(bits=4))'"
        ) from None


def _codec(read: Call | Chain, spec: str) -> Codec:
    """Make the codec of a call or a chain, from its last link to its first."""
    if isinstance(read, Call):
        return _called(read, spec)
    *stages, chain = (_codec(link, spec) for link in read.links)
    for stage in reversed(stages):
        if not isinstance(stage, Stage):
            known = ", ".join(name for name, cls in available().items() if issubclass(cls, Stage))
            raise SpecError(f"in {spec!r}: nothing can follow {stage}; these can be followed by '>': {known}")
        chain = stage > chain
    return chain


def _called(call: Call, spec: str) -> Codec:
    """Make the codec of that name, with its arguments."""
    name = call.name
    if name not in _codecs:
        raise SpecError(f"no codec {name!r}; there are {', '.join(available())}")
    cls = _codecs[name]
    fields = [f.name for f in dataclasses.fields(cls) if f.name != "then"]  # type: ignore[arg-type]
    if len(call.arguments) > len(fields):
        raise SpecError(f"{name} takes at most {len(fields)} arguments, got {len(call.arguments)}: {signature(cls)}")
    values: dict[str, Any] = {}
    for key, value in (*zip(fields, call.arguments, strict=False), *call.keywords):
        if key not in fields:
            raise SpecError(f"{name} has no argument {key!r}: {signature(cls)}")
        if key in values:
            raise SpecError(f"{name} got {key!r} twice: {signature(cls)}")
        values[key] = _codec(value, spec) if isinstance(value, (Call, Chain)) else value
    missing = [
        f.name
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values
    ]
    if missing:
        raise SpecError(f"{name} needs {', '.join(missing)}: {signature(cls)}")
    return cls(**values)
