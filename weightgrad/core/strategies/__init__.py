"""Strategies: every published system is a combination of parts, under a name.

A strategy says what a site shares, how its workers work together, when a round starts, what leaves the residual,
with which codecs, what the global server makes of it, how far sites may run apart, and where the local model goes
on. A recipe takes a strategy by name and may change any part of it:

    strategy: {name: diloco, every: 50, codec: "ef(qsgd(bits=4))"}

`schema` has the fields of a strategy, `checks` the rules for combining them, `presets` the named strategies. A new
system is a new part or a new preset, never an `if` in an old one.
"""

from weightgrad.core.strategies.presets import PRESETS, available, find
from weightgrad.core.strategies.schema import Strategy

__all__ = ["PRESETS", "Strategy", "available", "find"]
