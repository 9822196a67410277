"""What a user's model becomes: what the server is told of it, and what this rank trains, without a server."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from weightgrad.core import strategies
from weightgrad.core.optimizers.spec import AT_SITES
from weightgrad.core.strategies import Strategy
from weightgrad.errors import ProtocolError, StrategyError
from weightgrad.runtime.admission_messages import APART, AdmissionReply
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.site.user_model import UserModel
from weightgrad.wire.intervals import Intervals

NUMEL = 3 * 2 + 2 + 2


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1, bias=False))


def prepared(**options: Any) -> UserModel:
    model = network()
    return UserModel(model, SGD(model.parameters(), lr=0.1, momentum=0.9), SiteGroup(), **options)


def reply_to(user: UserModel, strategy: Strategy, **facts: Any) -> AdmissionReply:
    return AdmissionReply(
        strategy=strategy.to_dict(),
        seed=1,
        number=0,
        sites=["east"],
        layout=[slot.name for slot in reversed(user.layout.slots)],
        servers=[("", [(0, user.layout.numel)])],
        init_model=True,
        facts=facts,
    )


def test_what_is_trained_lies_in_the_order_of_the_server() -> None:
    user, strategy = prepared(), strategies.find("diloco")
    trained = user.trained(strategy, reply_to(user, strategy))
    assert [slot.name for slot in trained.layout.slots] == ["2.weight", "0.bias", "0.weight"]
    assert trained.weights.held == Intervals.whole(NUMEL)
    trained.weights.begin()
    values = trained.weights.read(Intervals.whole(NUMEL), torch.empty(NUMEL))
    trained.weights.end(changed=False)
    parameters = dict(user.module.named_parameters())
    wanted = [parameters[slot.name].detach().flatten() for slot in trained.layout.slots]
    assert torch.equal(values, torch.cat(wanted))


@pytest.mark.parametrize(("buffers", "averaged", "shared"), [("shared", True, True), ("site", True, False)])
def test_buffers_are_averaged_as_far_as_the_user_says(buffers: str, averaged: bool, shared: bool) -> None:
    user, strategy = prepared(buffers=buffers), strategies.find("diloco")
    trained = user.trained(strategy, reply_to(user, strategy))
    assert (trained.averages_buffers, trained.shares_buffers) == (averaged, shared)
    assert len(trained.buffers) == 2, "the counter of batches is no number to average"


def test_a_server_with_parameters_of_other_names_is_noticed() -> None:
    user, strategy = prepared(), strategies.find("diloco")
    reply = reply_to(user, strategy)
    reply.layout[0] = "another"
    with pytest.raises(ProtocolError, match="parameters of other names"):
        user.trained(strategy, reply)


def test_an_optimizer_that_can_share_gradients_is_described_in_full() -> None:
    told = prepared().optimizer_told()
    assert told["kind"].lower() == "sgd"
    assert told["groups"]
    assert APART not in told


def test_a_site_that_cannot_share_gradients_says_why_and_refuses_such_a_strategy() -> None:
    user = prepared(frozen="shared")
    assert "weight decay and momentum" in user.optimizer_told()[APART]
    strategy = strategies.find("baseline")
    with pytest.raises(StrategyError, match="baseline shares gradients, and frozen"):
        user.trained(strategy, reply_to(user, strategy))


def test_several_optimizers_are_told_as_one_that_only_sites_can_make() -> None:
    model = network()
    user = UserModel(model, [Adam(model[0].parameters()), SGD(model[2].parameters(), lr=0.1)], SiteGroup())
    told = user.optimizer_told()
    assert (told["kind"], told[AT_SITES]) == ("Adam+SGD", True)
    assert [indices for indices, _ in told["groups"]] == [[0, 1], [2]]
    assert APART not in told
    for name in ("diloco", "baseline"):
        user.check_strategy(strategies.find(name))
    with pytest.raises(StrategyError, match="2 optimizers"):
        user.check_strategy(strategies.find("onebit"))


def test_an_optimizer_with_a_state_is_the_sites_own() -> None:
    model = network()
    optimizer = Adam(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert "goes on from a state" in UserModel(model, optimizer, SiteGroup()).optimizer_told()[APART]


def test_where_the_server_cannot_step_a_whole_model_is_enough() -> None:
    user, strategy = prepared(), strategies.find("baseline")
    assert user.trained(strategy, reply_to(user, strategy, **{AT_SITES: True})).at_sites


@pytest.mark.parametrize("frozen", ["same", "local"])
def test_frozen_parameters_are_told_where_they_must_be_the_same(frozen: str) -> None:
    model = network()
    model[0].requires_grad_(False)
    user = UserModel(model, SGD(model[2].parameters(), lr=0.1), SiteGroup(), frozen=frozen)
    assert sorted(user.frozen_digests()) == (["0.bias", "0.weight"] if frozen == "same" else [])


@pytest.mark.parametrize(
    ("options", "text"),
    [({"buffers": "all"}, "buffers = 'all'"), ({"frozen": "no"}, "frozen = 'no'"), ({"state_on": "disk"}, "state_on")],
)
def test_an_argument_that_is_none_of_the_choices_is_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        prepared(**options)
