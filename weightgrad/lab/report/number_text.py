"""Numbers as text, and a dash where there is none: 63.2 s, 1.24 GB, 71.06, 5.4 times."""

from __future__ import annotations

from weightgrad.units import show_bytes, show_seconds

NONE = "–"  # noqa: RUF001 - a dash in a table


def bytes_text(count: float | None) -> str:
    """A number of bytes with a decimal unit."""
    return NONE if count is None else show_bytes(count)


def seconds_text(seconds: float | None) -> str:
    """A duration with a unit."""
    return NONE if seconds is None else show_seconds(seconds)


def ratio_text(ratio: float | None) -> str:
    """A factor with three significant digits."""
    if ratio is None:
        return NONE
    digits = 2 if ratio < 9.995 else 1 if ratio < 99.95 else 0
    return f"{ratio:,.{digits}f}×"  # noqa: RUF001 - a multiplication sign


def percent_text(fraction: float | None, digits: int = 2) -> str:
    """A fraction in percent, without the percent sign."""
    return NONE if fraction is None else f"{100 * fraction:.{digits}f}"
