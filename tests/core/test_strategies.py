"""The table: every strategy builds, may be changed, and refuses what does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from weightgrad.core import parts
from weightgrad.core.controller.update_controller import Auto
from weightgrad.core.site.state import SiteStrategy
from weightgrad.core.strategies import PRESETS, available, find
from weightgrad.errors import StrategyError

from .harness import Harness

ISSUE = (
    "baseline qsgd terngrad onebit adaptive dgc powersgd gaia weightgrad weightgrad-serial diloco streaming sparseloco"
)


def test_the_table_has_every_strategy_that_was_asked_for() -> None:
    assert set(ISSUE.split()) <= set(PRESETS)
    assert available() == {name: strategy.about for name, strategy in PRESETS.items()}
    assert all(name == strategy.name and strategy.about for name, strategy in PRESETS.items())


@pytest.mark.parametrize("name", PRESETS)
def test_every_strategy_builds_and_is_plain_values(name: str) -> None:
    strategy = find(name)
    assert strategy == PRESETS[name]
    assert isinstance(strategy.for_site(), SiteStrategy)
    assert strategy.for_server().calls == strategy.for_site().trigger.calls
    assert strategy.to_dict()["name"] == name
    for column, kind in (("trigger", "trigger"), ("aggregator", "aggregator"), ("resume", "resume")):
        part = parts.parse(kind, getattr(strategy, column))
        assert parts.parse(kind, parts.to_text(part)) == part


def test_parts_are_changed_by_name_or_by_their_short_name() -> None:
    strategy = find("diloco", {"every": 50, "codec": "ef(qsgd(bits=4))", "t_global": None, "resume": "mix(0.25)"})
    assert (strategy.trigger, strategy.up, strategy.t_global, strategy.resume) == (
        "every(50)",
        "ef(qsgd(bits=4))",
        None,
        "mix(0.25)",
    )
    assert strategy.aggregator == PRESETS["diloco"].aggregator
    assert PRESETS["diloco"].trigger != "every(50)"


def test_an_unknown_strategy_is_named_with_what_there_is() -> None:
    with pytest.raises(StrategyError, match="did you mean diloco") as caught:
        find("dilocco")
    assert all(name in str(caught.value) for name in PRESETS)


def test_an_unknown_part_is_named_with_what_there_is() -> None:
    with pytest.raises(StrategyError, match=r"agregator.*did you mean aggregator") as caught:
        find("diloco", {"agregator": "mean"})
    assert "consistency" in str(caught.value)
    for key in ("name", "about"):
        with pytest.raises(StrategyError, match=f"no part '{key}'"):
            find("diloco", {key: "x"})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"every": 0}, ["trigger", "from 1"]),
        ({"every": "often"}, ["trigger", "every"]),
        ({"trigger": "sometimes"}, ["trigger", "staggered(steps, fragments)"]),
        ({"selector": "best"}, ["selector", "largest(fraction)"]),
        ({"down_selector": "best"}, ["down_selector", "largest(fraction)"]),
        ({"aggregator": "outer('lamb')"}, ["aggregator", "nesterov"]),
        ({"consistency": "eventual"}, ["consistency", "bounded(rounds=1)"]),
        ({"consistency": 3}, ["consistency", "3"]),
        ({"resume": "mix(7)"}, ["resume", "from 0 to 1"]),
        ({"codec": "qsgd(bits=5)"}, ["up", "bits"]),
        ({"down": "zip()"}, ["down", "zip"]),
        ({"up": "none"}, ["up", "flush"]),
        ({"gradients": "none"}, ["gradients", "flush"]),
        ({"shares": "secrets"}, ["shares", "gradients", "updates"]),
        ({"combine": "max"}, ["combine", "serial"]),
        ({"exchange": "gossip"}, ["exchange", "allreduce"]),
        ({"per": "row"}, ["per", "tensor"]),
        ({"evaluate": "test"}, ["evaluate", "quantized"]),
        ({"overlap": -1}, ["overlap", "whole number"]),
        ({"overlap": "two"}, ["overlap", "whole number"]),
        ({"relay": -1}, ["relay", "whole number"]),
        ({"t": "soon"}, ["t =", "number"]),
        ({"t_global": -1}, ["t_global", "number"]),
        ({"keep_loss": "no"}, ["keep_loss", "true or false"]),
        ({"optimizer": 3}, ["optimizer", "momentum"]),
    ],
)
def test_a_bad_change_names_the_key_and_what_is_allowed(changes: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(StrategyError) as caught:
        find("diloco", changes)
    for word in says:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("baseline", {"resume": "global_model_and_residual"}, "updates"),
        ("diloco", {"resume": "global_model_and_residual(0.5, damped=True)"}, "controller = 'auto'"),
        ("baseline", {"overlap": 2}, "updates"),
        ("baseline", {"combine": "serial"}, "updates"),
        ("baseline", {"weights": "lossaware(bits=8)"}, "updates"),
        ("baseline", {"aggregator": "outer('sgd')"}, "updates"),
        ("diloco", {"combine": "serial"}, "server"),
        ("diloco", {"weights": "lossaware(bits=8)"}, "server"),
        ("diloco", {"evaluate": "quantized"}, "fp32"),
        ("diloco", {"keep_loss": False, "up": "ef(qsgd(bits=4))"}, "error feedback"),
        ("diloco", {"keep_loss": False, "up": "onebit()"}, "error feedback"),
        ("gaia", {"up": "ef(topk(0.1))"}, "choose once"),
        ("gaia", {"up": "powersgd(rank=2)"}, "selector"),
        ("gaia", {"down": "dgc(0.1)"}, "down_selector"),
        ("streaming", {"every": 24}, "staggered(steps, 4)"),
        ("streaming", {"trigger": "staggered(24, 2)"}, "staggered(steps, 4)"),
        ("diloco", {"aggregator": "median", "consistency": "async_()"}, "mean, sum or outer"),
        ("sparseloco", {"consistency": "async_()"}, "mean, sum or outer"),
        ("baseline", {"relay": 2}, "updates"),
        ("diloco", {"relay": 2}, "aggregator = 'mean'"),
        ("auto", {"resume": "mix(0.5)"}, "a resume other than mix"),
        ("auto", {"down_selector": "largest(0.1)"}, "down_selector = 'all'"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(StrategyError) as caught:
        find(name, changes)
    assert says in str(caught.value)


def test_a_down_codec_with_its_own_error_feedback_keeps_its_loss() -> None:
    for down in ("ef(qsgd(bits=4))", "onebit()", "adaptive(pi=8)"):
        assert find("qsgd", {"down": down}).for_server().keep_loss
    assert not find("qsgd").for_server().keep_loss


def test_a_strategy_changes_only_options_the_optimizer_has() -> None:
    assert find("dgc").optimizer_with({"lr": 0.1, "momentum": 0.9}) == {"lr": 0.1, "momentum": 0.0}
    assert find("dgc").optimizer_with({"lr": 0.1}) == {"lr": 0.1}


def test_overlap_bounds_how_far_a_site_runs_ahead_of_the_result() -> None:
    world = Harness("diloco", every=2, overlap=5)
    (name, *_) = world.names
    while world.step(name):  # nothing is ever answered
        assert world.ends[name].step < 50
    assert world.ends[name].step == 2 + 5


def test_a_stall_without_news_stops_the_workers_until_there_is_some() -> None:
    world = Harness("diloco", every=2, consistency="async_()", t=1.0)
    (name, *_) = world.names
    end = world.ends[name]
    while not end.in_flight:
        assert world.step(name)
    assert end.blocked(world.now + 0.9) is None
    assert end.blocked(world.now + 1.1) == "stall"
    world.now += 1.1
    world.drain(name)
    assert end.blocked(world.now) is None


def test_an_automatic_stall_grows_with_what_rounds_take() -> None:
    world = Harness("diloco", every=2, consistency="async_()", t="auto")
    (name, *_) = world.names
    end = world.ends[name]

    def push() -> float:
        while not end.in_flight:
            assert world.step(name)
        return world.now

    pushed = push()
    assert end.blocked(pushed + 29) is None
    assert end.blocked(pushed + 31) == "stall"
    world.now += 10  # the result takes so long
    world.drain(name)
    end.apply_results()
    pushed = push()
    assert end.blocked(pushed + 49) is None, "five rounds of ten seconds"
    assert end.blocked(pushed + 51) == "stall"


@pytest.mark.parametrize("name", ["weightgrad", "weightgrad-paper"])
def test_weightgrad_stalls_without_news(name: str) -> None:
    assert find(name).t == "auto"
    assert find(name).for_site().t == 30.0
    with pytest.raises(StrategyError, match="t_local"):
        find(name, {"t_local": "auto"})


@pytest.mark.parametrize("name", available())
def test_one_worker_alone_encodes_nothing_inside_its_site(name: str) -> None:
    strategy = find(name)
    assert strategy.inside(2) is strategy
    alone = strategy.inside(1)
    assert (alone.gradients, alone.weights, alone.combine, alone.evaluate) == ("fp32", "fp32", "mean", "global_model")
    inside = ("gradients", "weights", "combine", "serial_scale", "evaluate")
    between = {k: v for k, v in strategy.to_dict().items() if k not in inside}
    assert between.items() <= alone.to_dict().items(), "what crosses the WAN is the strategy's"


def test_one_worker_alone_has_no_serial_steps_to_match() -> None:
    assert find("weightgrad-serial").serial_scale == "matched"
    strategy = find("weightgrad-serial").inside(1)
    assert (strategy.combine, strategy.serial_scale) == ("mean", None)
    with pytest.raises(StrategyError, match="serial_scale"):
        find("weightgrad-serial", {"serial_scale": "equal"})
    with pytest.raises(StrategyError, match="serial_scale"):
        find("weightgrad", {"serial_scale": "matched"})


def test_a_serial_scale_is_kept_for_one_worker() -> None:
    strategy = find("weightgrad-serial", {"serial_scale": 0.5}).inside(1)
    assert (strategy.combine, strategy.serial_scale) == ("serial", 0.5)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("near", [False, True])
def test_a_budget_holds_for_every_optimizer_and_every_line(optimizer: str, near: bool) -> None:
    free, thrifty = (find("auto", c).with_optimizer(optimizer, near=near) for c in ({}, {"budget": "5 GB/day"}))
    assert isinstance(thrifty.auto, Auto)
    assert thrifty.auto.budget == "5 GB/day"
    if not near:
        assert dataclasses.replace(thrifty, controller=free.controller, near=free.near) == dataclasses.replace(
            free, nonlinear=thrifty.nonlinear
        )


@pytest.mark.parametrize(
    ("name", "budget", "says"),
    [("diloco", "5 GB/day", "diloco has no budget"), ("auto", "5 GB", "budget"), ("auto", 5, "budget")],
)
def test_a_budget_that_cannot_be_is_refused(name: str, budget: object, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        find(name, {"budget": budget})
