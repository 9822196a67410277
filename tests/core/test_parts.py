"""Parts as words: every part of every kind reads back from its own text; mistakes are named."""

from __future__ import annotations

from typing import Any

import pytest

from weightgrad.core import parts
from weightgrad.core.parts import aggregators, consistency, resume, selectors, triggers
from weightgrad.errors import StrategyError

EXAMPLES: dict[str, list[Any]] = {
    "trigger": [
        triggers.Every(),
        triggers.Every(8),
        triggers.Staggered(24, 4),
        triggers.Significance(),
        triggers.Scheduled(),
        triggers.Significance(threshold=2.5, at_most=3, low=0.5, high=7.0),
    ],
    "selector": [
        selectors.All(),
        selectors.Fragment(4),
        selectors.Largest(0.03),
        selectors.Gaia(),
        selectors.Gaia(0.2, decay=False),
        selectors.Significant(),
        selectors.Significant("element"),
        selectors.Nonzero(),
    ],
    "aggregator": [
        aggregators.Mean(),
        aggregators.SenderMean(),
        aggregators.Sum(),
        aggregators.Median(),
        aggregators.TrimmedMean(),
        aggregators.TrimmedMean(2),
        aggregators.Outer(),
        aggregators.Outer("adam", lr=1e-3, beta2=0.999),
    ],
    "consistency": [
        consistency.Sync(),
        consistency.Bounded(),
        consistency.Bounded(3),
        consistency.Backup(2),
        consistency.Async(),
        consistency.Async("inverse", compensate=0.04),
        consistency.Async("inverse_share"),
    ],
    "resume": [
        resume.FromGlobalModel(),
        resume.FromGlobalModelAndResidual(),
        resume.FromGlobalModelAndResidual(0.25),
        resume.Mix(),
        resume.Mix(0.25),
        resume.Ahead(),
    ],
}
ALL = [(kind, one) for kind, found in EXAMPLES.items() for one in found]


def test_there_is_an_example_of_every_part_of_every_kind() -> None:
    for kind, found in EXAMPLES.items():
        named = {text.split("(")[0] for text in parts.available(kind)}
        assert {one.word for one in found} == named


@pytest.mark.parametrize(("kind", "one"), ALL, ids=[parts.to_text(one) for _, one in ALL])
def test_a_part_reads_back_from_its_words(kind: str, one: Any) -> None:
    again = parts.parse(kind, parts.to_text(one))
    assert again == one
    assert type(again) is type(one)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_unknown_name_lists_every_part_that_exists(kind: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parts.parse(kind, "nonsense(1)")
    assert "nonsense" in str(caught.value)
    for signature, about in parts.available(kind).items():
        assert signature in str(caught.value)
        assert about


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("trigger", "every(0)", "from 1"),
        ("trigger", "every(1.5)", "whole number"),
        ("trigger", "every(True)", "whole number"),
        ("trigger", "every('3')", "whole number"),
        ("trigger", "every(pi=3)", "every(steps=1)"),
        ("trigger", "staggered(3)", "staggered(steps, fragments)"),
        ("trigger", "staggered(3, 4)", "at most one a step"),
        ("trigger", "significance(low=4.0, high=2.0)", "high"),
        ("selector", "largest(0)", "fraction"),
        ("selector", "significant('layer')", "element"),
        ("aggregator", "outer('rmsprop')", "nesterov"),
        ("aggregator", "trimmed_mean(-1)", "trim"),
        ("consistency", "async_('late')", "none, inverse, inverse_share"),
        ("consistency", "bounded(-1)", "rounds"),
        ("resume", "mix(2)", "alpha"),
        ("resume", "global_model_and_residual(-1)", "share"),
        ("resume", "global_model_and_residual(0.5, damped=2)", "True or False"),
    ],
)
def test_a_wrong_argument_says_what_is_wanted(kind: str, text: str, says: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parts.parse(kind, text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "every(", "every(x)", "a.b(1)", "every(*[1])", "every(**{})", "1 + 1", "every(1)(2)"]
)
def test_what_is_no_call_cannot_be_read(text: str) -> None:
    with pytest.raises(StrategyError, match="cannot be read"):
        parts.parse("trigger", text)


@pytest.mark.parametrize("text", ["outer('adam', momentum=1)", "outer('adam', beta2=1)", "outer('adam', eps=0)"])
def test_an_adam_that_would_divide_by_zero_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match="adam"):
        parts.parse("aggregator", text)
