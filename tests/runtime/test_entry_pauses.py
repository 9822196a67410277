"""How long a site that misbehaves must stay away."""

from __future__ import annotations

import pytest

from weightgrad.errors import LinkError
from weightgrad.runtime.server.entry_pauses import EntryPauses


def test_the_third_fault_and_later_ones_cost_time() -> None:
    pauses = EntryPauses()
    for count in (1, 2):
        assert pauses.misbehaved("east", 10.0) == count
        pauses.check("east", 10.0)
    assert pauses.misbehaved("east", 10.0) == 3
    with pytest.raises(LinkError, match="ended 3 times for what it sent; try again in 1 s"):
        pauses.check("east", 10.0)
    pauses.check("east", 11.0)
    pauses.check("west", 10.0)


def test_a_pause_has_an_end_however_many_faults_there_were() -> None:
    pauses = EntryPauses()
    for _ in range(50):
        pauses.misbehaved("east", 0.0)
    with pytest.raises(LinkError, match="ended 50 times"):
        pauses.check("east", 59.0)
    pauses.check("east", 60.0)


def test_what_was_long_ago_is_forgotten() -> None:
    pauses = EntryPauses()
    for _ in range(5):
        pauses.misbehaved("east", 0.0)
    assert pauses.misbehaved("east", 601.0) == 1
