"""Whether two strategies are the same: that of a script and the server's, or that of a checkpoint and the run's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def strategy_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Describe the first part in which two strategies differ; None if they are the same.

    The text and, where the server fits it to the links, the overlap are not compared. A strategy that has other parts
    for some optimizers may be either row.
    """
    nonlinear, near = mine.get("nonlinear") or {}, mine.get("near") or {}
    if not (isinstance(nonlinear, Mapping) and isinstance(near, Mapping)):
        return f"nonlinear and near are {nonlinear!r} and {near!r} here, which are no parts"
    if (nonlinear or near) and not (theirs.get("nonlinear") or theirs.get("near")):
        plain = {**mine, "nonlinear": {}, "near": {}}
        far = {**plain, **nonlinear}
        found = [strategy_difference(row, theirs) for row in (plain, far, {**far, **near})]
        return None if None in found else found[0]
    ignored = ("about", "overlap") if theirs.get("hide") else ("about",)
    for name in theirs:
        if name not in ignored and json.dumps(mine.get(name)) != json.dumps(theirs[name]):
            return f"{name} is {mine.get(name)!r} here and {theirs[name]!r} there"
    return None
