"""Whether a site and the server mean the same strategy, also where it depends on the optimizer and the links."""

from __future__ import annotations

import json

import pytest

from weightgrad.core.strategies import find
from weightgrad.runtime.strategy_difference import strategy_difference


@pytest.mark.parametrize(("kind", "near"), [("sgd", False), ("adamw", False), ("adamw", True)])
def test_auto_at_a_site_is_any_row_of_auto_at_the_server(kind: str, near: bool) -> None:
    mine = json.loads(json.dumps(find("auto").to_dict()))
    assert strategy_difference(mine, find("auto").with_optimizer(kind, near=near).to_dict()) is None


def test_another_strategy_is_none_of_them() -> None:
    mine = find("auto").to_dict()
    assert "name is 'auto' here and 'diloco' there" in str(strategy_difference(mine, find("diloco").to_dict()))
    changed = find("auto", {"controller": "auto(every=9)"})
    assert "controller" in str(strategy_difference(mine, changed.to_dict()))
    assert strategy_difference(changed.to_dict(), find("auto").with_optimizer("adamw").to_dict()) is not None
