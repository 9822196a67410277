"""Bytes, bit rates and seconds: written with a unit, kept as plain numbers.

    bit_s("900 Mbit/s")  ->  900e6          show_bit_s(900e6)      ->  "900 Mbit/s"
    seconds("11 ms")     ->  0.011          show_seconds(0.011)    ->  "11 ms"
    size("4 MB")         ->  4_000_000      show_bytes(1_234_567)  ->  "1.23 MB"
    bytes_s("5 GB/day")  ->  57870.37

A number without a unit is in bit/s, seconds or bytes. Units are decimal, sizes may also be in KiB,
MiB, GiB. Upper and lower case matter: a bit is not a byte, and a mistake of a factor of eight in a
link would spoil every result without a word. What is shown can be read again.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from weightgrad.errors import UnitError

_BIT_S = {"bit/s": "1", "kbit/s": "1e3", "Mbit/s": "1e6", "Gbit/s": "1e9", "Tbit/s": "1e12"}
_SECONDS = {"ns": "1e-9", "µs": "1e-6", "us": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600", "d": "86400"}
_DECIMAL_BYTES = {"B": "1", "kB": "1e3", "MB": "1e6", "GB": "1e9", "TB": "1e12", "PB": "1e15"}
_BYTES = {**_DECIMAL_BYTES, "KiB": str(2**10), "MiB": str(2**20), "GiB": str(2**30), "TiB": str(2**40)}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,3})?)\s*(.*?)\s*", re.DOTALL)


def bit_s(value: object) -> float:
    """A bit rate in bit/s."""
    return float(_read(value, _BIT_S, "a bit rate", "900 Mbit/s"))


def seconds(value: object) -> float:
    """A time in seconds."""
    return float(_read(value, _SECONDS, "a time", "11 ms"))


def size(value: object) -> int:
    """A size in bytes, a whole number."""
    found = _read(value, _BYTES, "a size", "4 MB")
    if found != int(found):
        raise UnitError(f"{_quote(value)} is not a whole number of bytes")
    return int(found)


def bytes_s(value: object) -> float:
    """Bytes in a time, such as "5 GB/day", in bytes a second."""
    amount, slash, time = str(value).rpartition("/")
    times = {**_SECONDS, "day": _SECONDS["d"], "hour": _SECONDS["h"], "month": str(30 * 86400)}
    if not slash or time.strip() not in times:
        raise UnitError(f"{_quote(value)} is not an amount in a time; write a size, / and one of {', '.join(times)}")
    return size(amount) / float(times[time.strip()])


def show_bit_s(value: float) -> str:
    """Three digits and a unit."""
    return _show(value, _BIT_S)


def show_bytes(value: float) -> str:
    """Three digits and a decimal unit."""
    return _show(value, _DECIMAL_BYTES)


def show_seconds(value: float) -> str:
    """Three digits and a unit; minutes from two minutes on, hours from two hours, days from two days."""
    if abs(value) < 120:
        return _show(value, {unit: _SECONDS[unit] for unit in ("ns", "µs", "ms", "s")}, zero="s")
    unit = "min" if abs(value) < 7200 else "h" if abs(value) < 172_800 else "d"
    return _show(value, {unit: _SECONDS[unit]})


def _read(value: object, units: dict[str, str], what: str, example: str) -> Decimal:
    """The value in the global model unit; decimal arithmetic, so that "31 ms" is the float nearest to 0.031."""
    allowed = f"write a number and one of {', '.join(units)}, e.g. {example}"
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None:
            raise UnitError(f"{_quote(value)} is not {what}; {allowed}")
        if match[2] and match[2] not in units:
            raise UnitError(f"{_quote(value)} is not {what}: {_unit(match[2], units)}; {allowed}")
        found = Decimal(match[1]) * Decimal(units[match[2]] if match[2] else 1)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        found = Decimal(value)
    else:
        raise UnitError(f"{_quote(value)} is not {what}; {allowed}")
    if not (found.is_finite() and math.isfinite(float(found))) or found < 0:
        raise UnitError(f"{_quote(value)} is not {what}: it must be finite and not negative")
    return found


def _unit(unit: str, units: dict[str, str]) -> str:
    """What is wrong with a unit, as far as one can guess."""
    for known in units:
        if known.lower() == unit.lower():
            return f"{unit!r} is unknown, upper and lower case matter: {known}"
    if units is _BIT_S and unit.endswith("B/s"):
        return f"{unit!r} counts bytes, and a bit rate counts bits (1 byte = 8 bit)"
    if units is _BYTES and unit.endswith("bit"):
        return f"{unit!r} counts bits, and a size counts bytes (1 byte = 8 bit)"
    if units is _SECONDS and unit == "m":
        return "'m' is unknown, a minute is 'min' and a millisecond 'ms'"
    return f"{_quote(unit)} is unknown"


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _show(value: float, units: dict[str, str], *, zero: str | None = None) -> str:
    names = list(units)
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {zero or names[0]}"
    # The first unit in which the rounded number has at most three digits before the point.
    for name in names:
        scaled = float(Decimal(value) / Decimal(units[name]))
        rounded = float(f"{scaled:.3g}")
        if abs(rounded) < 1000 or name == names[-1]:
            break
    return f"{rounded:.3g} {name}" if abs(rounded) < 1000 else f"{scaled:.0f} {name}"
