"""The inputs that fuzzing has found worth keeping: every path that they reached is taken again, and nothing escapes."""

from __future__ import annotations

import pytest

from .fuzz_targets import TARGETS, kept, samples


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_escapes_from_what_was_kept(target: str) -> None:
    found = kept(target)
    assert len(found) >= 10
    for data in (*samples(target), *found):
        TARGETS[target](data)
