"""What traffic costs: a table of prices by place, which `--price` and `--prices FILE` change.

A cloud charges for what leaves it, and mostly nothing for what comes in. So a push is paid where the site is, and a
result where the global server is. Prices are in dollars for 10^9 bytes; the default is a usual list price for traffic
to the internet. Between regions of one cloud it is often 0.01 to 0.05, and on an own line nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weightgrad.errors import PlanError
from weightgrad.lab.plan.devices import read_mapping

DOLLARS_GB = 0.09


@dataclass(frozen=True)
class Prices:
    """Dollars for 10^9 bytes that leave a place.

    Attributes:
        default: of places without a price of their own.
        by_place: by the name of a site or of the global server.
    """

    default: float = DOLLARS_GB
    by_place: Mapping[str, float] = field(default_factory=dict)

    def dollars(self, place: str, nbytes: float) -> float:
        """What so many bytes out of a place cost."""
        return nbytes / 1e9 * self.by_place.get(place, self.default)


def read(path: Path | None, settings: Iterable[str] = (), *, places: Iterable[str] = ()) -> Prices:
    """The prices of a YAML file, and of settings such as `0.02` (for all) and `tokyo=0.114`.

    Args:
        path: a mapping from places to dollars for 10^9 bytes; `default` is for all others.
        settings: what was written after `--price`.
        places: the places that there are; others are refused.

    Raises:
        PlanError: a price is not a number from 0, or there is no such place.
    """
    given = {name: (str(value), str(path)) for name, value in read_mapping(path, "prices").items()}
    for setting in settings:
        name, _, value = setting.rpartition("=")
        given[name or "default"] = (value, f"--price {setting}")
    known = {"default", *places}
    prices: dict[str, float] = {}
    for name, (text, source) in given.items():
        if name not in known:
            raise PlanError(f"{source}: no place {name!r}; there are {', '.join(sorted(known))}")
        try:
            prices[name] = float(text)
        except ValueError:
            raise PlanError(f"{source}: {text!r} is not a price; wanted dollars for 10^9 bytes, e.g. 0.09") from None
        if not math.isfinite(prices[name]) or prices[name] < 0:
            raise PlanError(f"{source}: {text} is not a price; wanted a number from 0")
    return Prices(prices.pop("default", DOLLARS_GB), prices)


def show_dollars(value: float) -> str:
    """Dollars and cents; what is less than a cent and not nothing says so."""
    return "<0.01" if 0 < value < 0.005 else f"{value:,.2f}"
