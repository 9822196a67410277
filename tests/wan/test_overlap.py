"""Answers whose turn has not come, and sites that may go on until it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weightgrad.codecs import Fp32
from weightgrad.kernels import fixed
from weightgrad.wan.base import Base
from weightgrad.wan.messages import Answer, Part, Push, Welcome
from weightgrad.wan.pace import Pace
from weightgrad.wan.site_end import SiteEnd
from weightgrad.wan.strategies import find

from .harness import LAYOUT, noise


def site(overlap: int) -> SiteEnd:
    plan = find("diloco", {"every": 1, "overlap": overlap}).for_site()
    made = SiteEnd("a", Base(LAYOUT, noise(99), optimizer=None, rate=lambda step: 0.1), plan, samples=4, key=1)
    made.receive(Welcome(0, 1, 0, 0), 0.0)
    return made


def step(one: SiteEnd) -> Push:
    one.model += noise(one.step)
    (push,) = one.stepped(0.0)
    assert isinstance(push, Push)
    return push


def answer(version: int, taken: int) -> Answer:
    return Answer(version, version, version, (Part(0, Fp32().encode(noise(7, version), {}, 0)[0]),), {"a": taken})


def test_an_answer_is_applied_so_many_steps_after_its_push() -> None:
    one = site(overlap=2)
    step(one)
    one.receive(answer(1, 1), 0.0)
    assert one.settle() == []
    step(one)
    assert one.settle() == []
    step(one)
    assert one.blocked(0.0) == "answer"
    assert [found.version for found in one.settle()] == [1]
    assert one.blocked(0.0) is None


def test_an_answer_to_two_pushes_comes_when_the_first_of_them_is_due() -> None:
    """A site that was away: both went into one round. It waited for ever, as the second was not due yet."""
    one = site(overlap=2)
    for _ in range(3):
        step(one)
    assert one.blocked(0.0) == "answer"
    one.receive(answer(1, 2), 0.0)
    assert [found.version for found in one.settle()] == [1]
    assert one.in_flight == 1
    assert one.blocked(0.0) is None
    assert torch.isfinite(one.model).all()


def test_what_a_push_holds_back_leaves_the_model_with_it() -> None:
    """And stays pending; a site that goes on from base and pending keeps it, and so does one that waits."""
    for overlap, resume, kept in (
        (2, "base", 0.0),
        (2, "base_and_pending(0.25)", 0.25),
        (2, "base_and_pending", 1.0),
        (0, "base", 1.0),
        (0, "base_and_pending(0.25)", 1.0),
    ):
        plan = find("diloco", {"every": 1, "up": "ef(topk(0.2))", "overlap": overlap, "resume": resume}).for_site()
        one = SiteEnd("a", Base(LAYOUT, noise(99), optimizer=None, rate=lambda step: 0.1), plan, samples=4, key=1)
        one.receive(Welcome(0, 1, 0, 0), 0.0)
        before = one.model.clone()
        push = step(one)
        sent = torch.zeros_like(before)
        for part in push.parts:
            part.into(sent, fixed.ADD)
        assert one.let_go is (kept < 1)
        assert torch.allclose(sent + one.pending.held, noise(0), atol=1e-6)
        assert torch.allclose(one.model, before + sent + kept * one.pending.held, atol=1e-6)
        assert bool(one.pending.held.any())


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize(("resume", "share"), [("base", 0.0), ("base_and_pending(0.25)", 0.25)])
def test_the_model_is_the_base_and_what_is_in_flight_and_a_share_of_what_is_held(
    overlap: int, resume: str, share: float
) -> None:
    """After every push and every answer, over several rounds."""
    plan = find("diloco", {"every": 1, "up": "ef(topk(0.2))", "overlap": overlap, "resume": resume}).for_site()
    one = SiteEnd("a", Base(LAYOUT, noise(99), optimizer=None, rate=lambda step: 0.1), plan, samples=4, key=1)
    one.receive(Welcome(0, 1, 0, 0), 0.0)
    pushes: list[Push] = []
    for number in range(1, 9):
        pushes.append(step(one))
        one.receive(answer(number, number), 0.0)
        applied = one.settle()
        assert bool(applied) is (number > overlap)
        del pushes[: len(applied)]
        wanted = one.base.vector + share * one.pending.held
        for push in pushes:
            for part in push.parts:
                part.into(wanted, fixed.ADD)
        assert torch.allclose(one.model, wanted, atol=1e-5)


@pytest.mark.parametrize(("overlap", "every", "weight"), [(3, 4, 1.0), (4, 4, 1.0), (2, 1, 2**-0.5), (7, 2, 0.5)])
def test_several_pushes_in_flight_are_damped(overlap: int, every: int, weight: float) -> None:
    """By the pace, from one push to the next: not by how many happen to be in flight."""
    plan = replace(
        find("auto", {"resume": "base_and_pending(0.25, damped=True)"}).for_site(),
        pace=Pace(every, overlap, "ef(topk(0.2))"),
    )
    one = SiteEnd("a", Base(LAYOUT, noise(99), optimizer=None, rate=lambda step: 0.1), plan, samples=4, key=1)
    one.receive(Welcome(0, 1, 0, 0), 0.0)
    pushes: list[Push] = []
    for _ in range(3 * every):
        one.model += noise(one.step)
        made = one.stepped(0.0)
        if not made:
            continue
        pushes += [push for push in made if isinstance(push, Push)]
        assert one.let_go
        own = torch.zeros_like(one.model)
        for push in pushes:
            for part in push.parts:
                part.into(own, fixed.ADD)
        everything = torch.stack([noise(i) for i in range(one.step)]).sum(0)
        assert torch.allclose(own + one.pending.held, everything, atol=1e-5), "nothing is lost"
        wanted = one.base.vector + weight * own + 0.25 * one.pending.held
        assert torch.allclose(one.model, wanted, atol=1e-5)
    assert len(pushes) == 3
