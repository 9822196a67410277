"""Curves of the page. What the page shows of each event is in `test_run_state.py`."""

from __future__ import annotations

from weightgrad.lab.page.run_view import thin


def test_curves_are_thinned_and_keep_their_end() -> None:
    points = [(step, float(step)) for step in range(5000)]
    assert len(thin(points)) <= 402
    assert thin(points)[-1] == points[-1]
