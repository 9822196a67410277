"""Quantities: read exactly, refused clearly, shown so that they can be read again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightgrad import units
from weightgrad.errors import UnitError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("900 Mbit/s", 900e6),
        ("1.12 Gbit/s", 1.12e9),
        ("16.76Mbit/s", 16.76e6),
        (" 5 kbit/s ", 5000.0),
        ("1e-3 Gbit/s", 1e6),
        ("7 bit/s", 7.0),
        ("12", 12.0),
        (12, 12.0),
        (0.5, 0.5),
    ],
)
def test_bit_rates(text: object, value: float) -> None:
    assert units.bit_s(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("11 ms", 0.011),
        ("31 ms", 0.031),
        ("0.1 ms", 0.0001),
        ("5 us", 5e-6),
        ("5 µs", 5e-6),
        ("3 ns", 3e-9),
        ("2 min", 120.0),
        ("1.5 h", 5400.0),
        ("1 d", 86400.0),
        (3, 3.0),
    ],
)
def test_times(text: object, value: float) -> None:
    assert units.seconds(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("4 MB", 4_000_000), ("4 MiB", 4 * 2**20), ("1 KiB", 1024), ("1.5 kB", 1500), ("0 B", 0), (7, 7), (7.0, 7)],
)
def test_sizes(text: object, value: int) -> None:
    found = units.size(text)
    assert found == value
    assert type(found) is int


@pytest.mark.parametrize(
    ("read", "value", "says"),
    [
        (units.bit_s, "900 MB/s", "'MB/s' counts bytes.*Mbit/s"),
        (units.bit_s, "900 mbit/s", "upper and lower case matter: Mbit/s"),
        (units.bit_s, "900 Mbps", "'Mbps' is unknown.*kbit/s, Mbit/s"),
        (units.bit_s, "-1 Mbit/s", "not negative"),
        (units.bit_s, "fast", "'fast' is not a bit rate"),
        (units.bit_s, "", "'' is not a bit rate"),
        (units.bit_s, None, "None is not a bit rate"),
        (units.bit_s, True, "True is not a bit rate"),
        (units.bit_s, float("nan"), "finite"),
        (units.bit_s, float("inf"), "finite"),
        (units.bit_s, 10**400, "finite"),
        (units.seconds, "11 m", "a minute is 'min'.*ns, µs, us, ms, s, min, h, d"),
        (units.seconds, "11 Mbit/s", "'11 Mbit/s' is not a time"),
        (units.seconds, "1e999 s", "finite"),
        (units.size, "8 Mbit", "counts bits"),
        (units.size, "1.5 B", "whole number of bytes"),
        (units.size, 4.5, "whole number of bytes"),
        (units.size, ["4 MB"], "is not a size"),
    ],
)
def test_refusals_say_what_came_and_what_is_allowed(read: object, value: object, says: str) -> None:
    assert callable(read)
    with pytest.raises(UnitError, match=says):
        read(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_234_567, "1.23 MB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (-1_234_567, "-1.23 MB"),
        (5e18, "5000 PB"),
    ],
)
def test_bytes_are_shown(value: float, text: str) -> None:
    assert units.show_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (3e-9, "3 ns"),
        (0.0001, "100 µs"),
        (0.011, "11 ms"),
        (0.9999, "1 s"),
        (61.25, "61.2 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (3725.0, "62.1 min"),
        (7200.0, "2 h"),
        (200_000.0, "2.31 d"),
        (864e5, "1000 d"),
        (float("inf"), "inf d"),
        (float("nan"), "nan d"),
    ],
)
def test_times_are_shown(value: float, text: str) -> None:
    assert units.show_seconds(value) == text


def test_bit_rates_are_shown() -> None:
    assert units.show_bit_s(900e6) == "900 Mbit/s"
    assert units.show_bit_s(1.12e9) == "1.12 Gbit/s"


@given(st.floats(min_value=1e-9, max_value=1e15))
def test_what_is_shown_reads_back_to_three_digits(value: float) -> None:
    assert units.seconds(units.show_seconds(value)) == pytest.approx(value, rel=6e-3)
    assert units.bit_s(units.show_bit_s(value + 1)) == pytest.approx(value + 1, rel=6e-3)


@given(st.one_of(st.text(), st.from_regex(r"[0-9.]{1,5}[eE]?[0-9]{0,4} ?[A-Za-z/]{0,5}"), st.integers(), st.floats()))
def test_nothing_but_a_unit_error(value: object) -> None:
    for read in (units.bit_s, units.seconds, units.size):
        try:
            found = read(value)
        except UnitError:
            continue
        assert found >= 0
