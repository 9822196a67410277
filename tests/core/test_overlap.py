"""Answers whose turn has not come, and sites that may go on until it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weightgrad.codecs import Fp32
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.site.state import SiteState
from weightgrad.core.strategies import find
from weightgrad.kernels import fixed
from weightgrad.wire.messages import JoinReply, Push, RoundResult, Segment
from weightgrad.wire.sync_schedule import SyncSchedule

from .harness import LAYOUT, noise


def site(overlap: int, t: float | None = None) -> SiteState:
    plan = find("diloco", {"every": 1, "overlap": overlap, "t": t}).for_site()
    made = SiteState("a", GlobalModel(LAYOUT, noise(99), optimizer=None, rate=lambda step: 0.1), plan, samples=4, key=1)
    made.receive(JoinReply(version=0, round=1, step=0, included=0), 0.0)
    return made


def step(one: SiteState) -> Push:
    one.model += noise(one.step)
    (push,) = one.after_step(0.0)
    assert isinstance(push, Push)
    return push


def result(version: int, taken: int) -> RoundResult:
    return RoundResult(
        version=version,
        round=version,
        step=version,
        segments=(Segment(0, Fp32().encode(noise(7, version), {}, 0)[0]),),
        included={"a": taken},
    )


def test_an_result_is_applied_so_many_steps_after_its_push() -> None:
    one = site(overlap=2)
    step(one)
    one.receive(result(1, 1), 0.0)
    assert one.apply_results() == []
    step(one)
    assert one.apply_results() == []
    step(one)
    assert one.blocked(0.0) == "result"
    assert [found.version for found in one.apply_results()] == [1]
    assert one.blocked(0.0) is None


def test_a_server_that_owes_no_result_may_be_silent() -> None:
    """A site that stalled because of a result that is not due would wait for a server that waits for its next push."""
    one = site(overlap=2, t=1.0)
    step(one)
    assert one.blocked(1.1) == "stall"
    one.receive(result(1, 1), 1.2)
    assert one.apply_results() == []
    assert one.blocked(9.0) is None
    step(one)
    assert one.blocked(9.0) == "stall", "the second push has no result"
    assert one.coordinator.next_decision() == one.step + 1


def test_an_result_to_two_pushes_comes_when_the_first_of_them_is_due() -> None:
    """A site that was away: both went into one round. It waited for ever, as the second was not due yet."""
    one = site(overlap=2)
    for _ in range(3):
        step(one)
    assert one.blocked(0.0) == "result"
    one.receive(result(1, 2), 0.0)
    assert [found.version for found in one.apply_results()] == [1]
    assert one.in_flight == 1
    assert one.blocked(0.0) is None
    assert torch.isfinite(one.model).all()


def test_what_a_push_holds_back_leaves_the_model_with_it() -> None:
    """It stays in the residual; a site that resumes from model and residual keeps it, and so does one that waits."""
    for overlap, resume, kept in (
        (2, "global_model", 0.0),
        (2, "global_model_and_residual(0.25)", 0.25),
        (2, "global_model_and_residual", 1.0),
        (0, "global_model", 1.0),
        (0, "global_model_and_residual(0.25)", 1.0),
    ):
        plan = find("diloco", {"every": 1, "up": "ef(topk(0.2))", "overlap": overlap, "resume": resume}).for_site()
        one = SiteState(
            "a", GlobalModel(LAYOUT, noise(99), optimizer=None, rate=lambda step: 0.1), plan, samples=4, key=1
        )
        one.receive(JoinReply(version=0, round=1, step=0, included=0), 0.0)
        before = one.model.clone()
        push = step(one)
        sent = torch.zeros_like(before)
        for segment in push.segments:
            segment.into(sent, fixed.ADD)
        assert one.moved_by_push is (kept < 1)
        assert torch.allclose(sent + one.residual(), noise(0), atol=1e-6)
        assert torch.allclose(one.model, before + sent + kept * one.residual(), atol=1e-6)
        assert bool(one.residual().any())


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize(("resume", "share"), [("global_model", 0.0), ("global_model_and_residual(0.25)", 0.25)])
def test_the_model_is_the_global_model_and_what_is_in_flight_and_a_share_of_the_residual(
    overlap: int, resume: str, share: float
) -> None:
    """After every push and every result, over several rounds."""
    plan = find("diloco", {"every": 1, "up": "ef(topk(0.2))", "overlap": overlap, "resume": resume}).for_site()
    one = SiteState("a", GlobalModel(LAYOUT, noise(99), optimizer=None, rate=lambda step: 0.1), plan, samples=4, key=1)
    one.receive(JoinReply(version=0, round=1, step=0, included=0), 0.0)
    pushes: list[Push] = []
    for number in range(1, 9):
        pushes.append(step(one))
        one.receive(result(number, number), 0.0)
        applied = one.apply_results()
        assert bool(applied) is (number > overlap)
        del pushes[: len(applied)]
        wanted = one.global_model() + share * one.residual()
        for push in pushes:
            for segment in push.segments:
                segment.into(wanted, fixed.ADD)
        assert torch.allclose(one.model, wanted, atol=1e-5)


@pytest.mark.parametrize(("overlap", "every", "weight"), [(3, 4, 1.0), (4, 4, 1.0), (2, 1, 2**-0.5), (7, 2, 0.5)])
def test_several_pushes_in_flight_are_damped(overlap: int, every: int, weight: float) -> None:
    """By the sync schedule, from one push to the next: not by how many happen to be in flight."""
    plan = replace(
        find("auto", {"resume": "global_model_and_residual(0.25, damped=True)"}).for_site(),
        schedule=SyncSchedule(every, overlap, "ef(topk(0.2))"),
    )
    one = SiteState("a", GlobalModel(LAYOUT, noise(99), optimizer=None, rate=lambda step: 0.1), plan, samples=4, key=1)
    one.receive(JoinReply(version=0, round=1, step=0, included=0), 0.0)
    pushes: list[Push] = []
    for _ in range(3 * every):
        one.model += noise(one.step)
        made = one.after_step(0.0)
        if not made:
            continue
        pushes += [push for push in made if isinstance(push, Push)]
        assert one.moved_by_push
        own = torch.zeros_like(one.model)
        for push in pushes:
            for segment in push.segments:
                segment.into(own, fixed.ADD)
        everything = torch.stack([noise(i) for i in range(one.step)]).sum(0)
        assert torch.allclose(own + one.residual(), everything, atol=1e-5), "nothing is lost"
        wanted = one.global_model() + weight * own + 0.25 * one.residual()
        assert torch.allclose(one.model, wanted, atol=1e-5)
    assert len(pushes) == 3
