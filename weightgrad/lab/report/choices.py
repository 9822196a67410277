"""Strategies as asked for on the command line: `baseline,diloco(every=50, codec=ef(qsgd(bits=4)))`."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from weightgrad import call_syntax
from weightgrad.call_syntax import CallSyntaxError
from weightgrad.errors import StrategyError


@dataclass(frozen=True)
class Choice:
    """A strategy as asked for on the command line: a name, and perhaps settings that differ from the preset."""

    name: str
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The choice as text: `diloco(every=50)`."""
        inside = ", ".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.name}({inside})" if inside else self.name

    @property
    def directory(self) -> str:
        """A name for a directory; it ends in a hash where letters had to be left out."""
        safe = safe_name(self.label)
        if len(safe) > 60 or not re.fullmatch(r"[\w.=,() -]+", self.label):
            safe = f"{safe[:60]}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"
        return safe

    @property
    def setting(self) -> str:
        """The `--set` option with which a recipe uses this strategy."""
        if not self.settings:
            return f"strategy={json.dumps(self.name)}"
        inside = ", ".join(f"{key}: {_yaml(value)}" for key, value in self.settings)
        return f"strategy={{name: {json.dumps(self.name)}, {inside}}}"


def safe_name(text: str) -> str:
    """Turn a text into a name for a directory."""
    return re.sub(r"[^\w.=]+", "-", text).strip("-.") or "run"


def _yaml(value: str) -> str:
    """A value as YAML: numbers, words, lists and quoted texts stay as they are, anything else is quoted."""
    return value if re.fullmatch(r"[\w.+-]+|\[.*\]|\{.*\}|'[^']*'|\"[^\"]*\"", value) else json.dumps(value)


def parse_choices(text: str) -> list[Choice]:
    """Read the strategies asked for on the command line.

    Args:
        text: For example `baseline,diloco(every=50, codec=ef(qsgd(bits=4)))`: two strategies.

    Returns:
        The strategies in order, each once.

    Raises:
        StrategyError: The text cannot be read.
    """
    found: dict[Choice, None] = {}
    part = text
    try:
        for part in call_syntax.split(text):
            found[Choice(*call_syntax.parse_settings(part))] = None
    except CallSyntaxError as error:
        raise StrategyError(f"{part!r} is not a strategy: {error}; write name, or name(key=value, …)") from None
    return list(found)
