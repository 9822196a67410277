"""A site with a valid certificate that abuses the order in which a push comes: twice, in other parts, half, too often."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from weightgrad.codecs import Fp32
from weightgrad.runtime.security import certificates
from weightgrad.wire.messages import Push, Segment

from .deployment import Hub
from .test_refusals import NUMEL, Hand, hand, part_of, rules, weights

SITES = ("east", "west")
UPDATE = torch.ones(NUMEL)


@pytest.fixture(name="made", scope="module")
def fixture_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "all"
    certificates.create(directory, [], SITES)
    return directory


def with_update(push: Push, update: torch.Tensor) -> Push:
    """The same push with other values, also with some that no encoder takes."""
    payload, _ = Fp32().encode(torch.zeros(NUMEL), {}, 0)
    payload = dataclasses.replace(payload, body=update.view(torch.uint8))
    return dataclasses.replace(push, segments=(Segment(0, payload),))


def pushed_twice(hub: Hub, west: Hand, update: torch.Tensor) -> None:
    """A push that the guard lets through, and other values for the same round before it closes."""
    west.send_push(push := west.push(UPDATE))
    hub.until(lambda: hub.core.is_open("west", 1))
    west.send(part_of(with_update(push, update)))
    west.send_push(west.push(UPDATE))  # handled after it
    hub.until(lambda: hub.core.is_open("west", 2) or not hub.core.is_open("west", 1))


@pytest.mark.parametrize("value", [1e6, -100.0, float("nan")], ids=str)
def test_values_that_are_sent_again_move_the_model_no_further_than_those_that_were_judged(
    made: Path, value: float
) -> None:
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made) as east, hand(hub, "west", made) as west:
        pushed_twice(hub, west, UPDATE * value)
        east.send_push(east.push(UPDATE))
        hub.until(lambda: hub.version >= 1)
        moved = hub.shard.global_model.vector - weights()
        assert moved.abs().max() <= 1.0
