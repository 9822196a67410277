"""The syntax of specs, parts and choices: what it reads, and that it evaluates nothing."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad.call_syntax import (
    MAX_DEPTH,
    MAX_LENGTH,
    MAX_LIST_LENGTH,
    Call,
    CallSyntaxError,
    Chain,
    parse,
    parse_settings,
    split,
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("every", Call("every")),
        (" every() ", Call("every")),
        ("every(8)", Call("every", (8,))),
        ("f(-1, 2.5, 'a', True, None)", Call("f", (-1, 2.5, "a", True, None))),
        ("f(a=1, b='c', a=2)", Call("f", (), (("a", 1), ("b", "c"), ("a", 2)))),
        ("f([1, 2], {'a': (3,)})", Call("f", ([1, 2], {"a": (3,)}))),
        ("f(g, h(1))", Call("f", (Call("g"), Call("h", (1,))))),
        ("a > b(1) > c", Chain((Call("a"), Call("b", (1,)), Call("c")))),
        ("a > (b > c)", Chain((Call("a"), Chain((Call("b"), Call("c")))))),
        ("f(a > b)", Call("f", (Chain((Call("a"), Call("b"))),))),
    ],
)
def test_what_a_text_is_read_as(text: str, wanted: Call | Chain) -> None:
    assert parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "syntax"),
        ("f(", "never closed"),
        ("1 + 1", "expected a name"),
        ("a.b(1)", "found 'a.b(1)'"),
        ("f(1)(2)", "expected a name"),
        ("f(*[1])", "is not a number"),
        ("f(**{})", "'**' is not allowed"),
        ("f(1 / 2)", "is not a number"),
        ("a < b", "'>' only"),
        ("a\0b", "null"),
        ("a" * (MAX_LENGTH + 1), f"at most {MAX_LENGTH}"),
        ("f(" * (MAX_DEPTH + 2) + ")" * (MAX_DEPTH + 2), "nested too deeply"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(CallSyntaxError, match=re.escape(says)):
        parse(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", [""]),
        ("a, b ,c", ["a", "b", "c"]),
        ("a(x=1, y=[2, 3]),b", ["a(x=1, y=[2, 3])", "b"]),
        ("a(x='(,'),b", ["a(x='(,')", "b"]),
    ],
)
def test_a_list_is_cut_at_its_own_commas(text: str, wanted: list[str]) -> None:
    assert split(text) == wanted


@pytest.mark.parametrize("text", ["a(", "a)", "a(]", "a('", "," * (MAX_LIST_LENGTH + 1)])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(CallSyntaxError):
        split(text)


def test_settings_stay_text() -> None:
    text = "weightgrad-serial(exempt=*.bias, optimizer={lr: 0.1, momentum: 0}, up=ef(topk(0.1) > sign()))"
    assert parse_settings(text) == (
        "weightgrad-serial",
        (("exempt", "*.bias"), ("optimizer", "{lr: 0.1, momentum: 0}"), ("up", "ef(topk(0.1) > sign())")),
    )
    assert parse_settings("baseline") == parse_settings(" baseline( ) ") == ("baseline", ())


@pytest.mark.parametrize("text", ["", "a b", "a(b)", "a(=1)", "a(b=)", "a(1=2)", "../up"])
def test_what_are_no_settings(text: str) -> None:
    with pytest.raises(CallSyntaxError):
        parse_settings(text)


@settings(max_examples=300, derandomize=True)
@given(st.text(max_size=40) | st.text(alphabet="ab(),>='1.[]{} \n", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for reader in (parse, split, parse_settings):
        try:
            reader(text)
        except CallSyntaxError:
            continue
