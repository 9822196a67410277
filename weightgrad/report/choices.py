"""Strategies as asked for on the command line: `baseline,diloco(every=50, codec=ef(qsgd(bits=4)))`."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from weightgrad.errors import StrategyError


@dataclass(frozen=True)
class Choice:
    """A strategy as asked for on the command line: a name, and perhaps settings."""

    name: str
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """As one writes it: `diloco(every=50)`."""
        inside = ", ".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.name}({inside})" if inside else self.name

    @property
    def directory(self) -> str:
        """A name for a directory, told apart by a hash when letters had to be left out."""
        safe = safe_name(self.label)
        if len(safe) > 60 or not re.fullmatch(r"[\w.=,() -]+", self.label):
            safe = f"{safe[:60]}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"
        return safe

    @property
    def setting(self) -> str:
        """What makes a recipe use it."""
        if not self.settings:
            return f"strategy={json.dumps(self.name)}"
        inside = ", ".join(f"{key}: {_yaml(value)}" for key, value in self.settings)
        return f"strategy={{name: {json.dumps(self.name)}, {inside}}}"


def safe_name(text: str) -> str:
    """A text as a name for a directory."""
    return re.sub(r"[^\w.=]+", "-", text).strip("-.") or "run"


def _yaml(value: str) -> str:
    """Numbers, words, lists and quoted texts stay; anything else is a text."""
    return value if re.fullmatch(r"[\w.+-]+|\[.*\]|\{.*\}|'[^']*'|\"[^\"]*\"", value) else json.dumps(value)


def _split(text: str) -> list[str]:
    """At the commas outside of brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
        if depth < 0:
            break
    if depth or quote:
        raise StrategyError(f"{text!r}: a bracket or a quote has no partner")
    return [*parts, text[start:]]


def parse_choices(text: str) -> list[Choice]:
    """`baseline,diloco(every=50, codec=ef(qsgd(bits=4)))`: two strategies, each once."""
    found: dict[Choice, None] = {}
    for part in _split(text):
        match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\((.*)\))?\s*", part, re.DOTALL)
        if match is None:
            raise StrategyError(f"{part.strip()!r} is not a strategy; wanted a name, or name(key=value, …)")
        settings = []
        for setting in _split(match[2]) if match[2] and match[2].strip() else []:
            key, equals, value = (piece.strip() for piece in setting.partition("="))
            if not equals or not value or not key.isidentifier():
                raise StrategyError(f"{part.strip()!r}: {setting.strip()!r} is not key=value")
            settings.append((key, value))
        found[Choice(match[1], tuple(settings))] = None
    return list(found)
