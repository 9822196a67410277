"""Which optimizers may share gradients, without a server."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.spec import AT_SITES, OptimizerSpec
from weightgrad.core.strategies import find
from weightgrad.errors import RefusedError
from weightgrad.runtime.admission_messages import APART, AdmissionRequest
from weightgrad.runtime.server.optimizer_admission import OptimizerAdmission, is_for_another_optimizer

SHAPES = [("weight", [3, 2]), ("bias", [3])]
OWN = Layout.of_shapes((name, tuple(shape)) for name, shape in SHAPES)
KNOWN = Layout.of_shapes((name, tuple(shape)) for name, shape in reversed(SHAPES))


def described(**options: Any) -> dict[str, Any]:
    """An optimizer as a site tells it, with the bias in a group of its own."""
    weight, bias = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3))
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, **options)
    return OptimizerSpec.of(optimizer, [weight, bias]).dump()


def request(optimizer: dict[str, Any] | None, **more: Any) -> AdmissionRequest:
    return AdmissionRequest("east", SHAPES, -1, optimizer=optimizer, **more)


def check(told: dict[str, Any] | None, agreed: dict[str, Any] | None = None, strategy: str = "baseline") -> Any:
    reasons: list[str] = []
    try:
        return OptimizerAdmission(reasons.append).check(request(told), OWN, KNOWN, find(strategy), agreed)
    except RefusedError:
        assert reasons == ["another optimizer"]
        raise


def test_where_updates_are_shared_only_the_name_is_kept() -> None:
    assert check(described(), strategy="diloco") == {"kind": described()["kind"]}
    assert check(None, strategy="diloco") == {"kind": ""}


def test_the_first_is_kept_in_the_order_of_the_index_space() -> None:
    found = OptimizerSpec.parse(check(described()))
    told = OptimizerSpec.parse(described())
    assert found.difference(told.reordered([1, 0])) is None
    assert not check(described()).get(AT_SITES)


def test_the_next_must_step_alike() -> None:
    agreed = check(described())
    assert check(described(), agreed) is agreed
    with pytest.raises(RefusedError, match="east has another optimizer"):
        check(described(momentum=0.9), agreed)


@pytest.mark.parametrize(
    ("told", "why"), [(None, "it has described no optimizer"), ({"kind": "SGD", APART: "it has two"}, "it has two")]
)
def test_a_site_that_cannot_share_gradients_is_refused_with_its_own_reason(
    told: dict[str, Any] | None, why: str
) -> None:
    with pytest.raises(RefusedError, match=f"with which east cannot step: {why}"):
        check(told)


def test_an_optimizer_that_the_server_cannot_make_steps_at_the_sites_only() -> None:
    assert check({**described(), AT_SITES: True})[AT_SITES] is True


def test_a_strategy_with_other_parts_for_other_optimizers_is_compared_with_the_servers() -> None:
    asked = find("auto")
    assert asked.nonlinear, "or there is nothing to choose"
    for kind, differs in (("AdamW", True), ("SGD", False)):
        told = request({"kind": kind}, strategy=asked.to_dict())
        assert is_for_another_optimizer(told, asked) is differs
        assert not is_for_another_optimizer(told, asked.with_optimizer("AdamW"))
