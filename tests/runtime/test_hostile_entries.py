"""What a site says about itself when it enters, wrong at random: it is refused, and honest sites enter all the same."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from weightgrad.core.optimizers.spec import OptimizerSpec
from weightgrad.core.strategies import find
from weightgrad.errors import LinkError, ProtocolError, RefusedError, WeightGradError
from weightgrad.runtime.admission_messages import AdmissionRequest, RankRequest
from weightgrad.runtime.rate_limiter import RateLimiter
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server.admission import Admission
from weightgrad.runtime.server.peer_check import PeerCheck
from weightgrad.runtime.server.roster import Roster
from weightgrad.runtime.transport.transport import EntryRequest

MODULE = nn.Linear(4, 3)
LAYOUT = [(name, list(one.shape)) for name, one in MODULE.named_parameters()]
OPTIMIZER = OptimizerSpec.of(torch.optim.Adam(MODULE.parameters()), list(MODULE.parameters())).dump()
WORDS = ["", "lr", "SGD", "weight", "float32", "__class__", "\ud800", "a\nb", "kind", "groups", "nonlinear", "near"]
NUMBERS = [0, -1, 2**32, 10**30, -(10**40), 1e308, math.inf, math.nan, True, None]


def admission(strategy: str, *sites: str) -> Admission:
    run = RunConfig(sites=sites, fit=lambda numel: find(strategy), seed=3)
    peers = PeerCheck(Roster(sites), secure=False)
    made = Admission(run, peers, on_refused=lambda reason: None, max_parameters=10**6)
    made._entries = RateLimiter(per_s=1e9, burst=10**9)
    return made


def request(site: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        AdmissionRequest(site, LAYOUT, -1, optimizer=OPTIMIZER, frozen={"embedding": "ab"}).pack()
    )
    return found | changes


def enter(to: Admission, said: dict[str, Any], site: str) -> bytes:
    return to.enter(EntryRequest(site, 0, "1", json.dumps(said).encode(), site, None, ""))


def wrong(draw: random.Random, value: Any = None, depth: int = 0) -> Any:
    """Something like a value, wrong somewhere."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        return {**value, key: wrong(draw, value[key], depth + 1)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], wrong(draw, value[place], depth + 1), *value[place + 1 :]]
    kind = draw.randrange(6) if depth < 6 else 4
    if kind == 0:
        return [wrong(draw, depth=depth + 1) for _ in range(draw.randrange(3))]
    if kind == 1:
        return {draw.choice(WORDS): wrong(draw, depth=depth + 1) for _ in range(draw.randrange(3))}
    if kind == 2:
        found: Any = 0
        for _ in range(draw.choice([100, 500, 900])):
            found = [found] if draw.random() < 0.5 else {"a": found}
        return found
    return draw.choice(WORDS if kind == 3 else NUMBERS)


@pytest.mark.parametrize("strategy", ["baseline", "weightgrad", "auto"])
@pytest.mark.parametrize("sites", [("east", "west"), ("east", "mallory", "west")], ids=len)
def test_nothing_that_one_site_says_is_an_error_of_the_server(strategy: str, sites: tuple[str, ...]) -> None:
    draw = random.Random(7)
    for _ in range(8):
        asked = admission(strategy, *sites)
        for _ in range(25):
            said = request(sites[1])
            field = draw.choice([name for name in said if name not in ("protocol", "site")])
            said[field] = wrong(draw, said[field])
            with suppress(WeightGradError):
                enter(asked, said, sites[1])
            with suppress(LinkError, RefusedError):  # of two sites, the first one has the word
                enter(asked, request(sites[0]), sites[0])


@pytest.mark.parametrize("digest", [["ab"], {"a": 1}, None, math.nan, 3], ids=str)
def test_a_digest_that_is_no_text_shuts_nobody_out(digest: Any) -> None:
    """Honest sites compare theirs with it: that of a list raised when they entered."""
    asked = admission("weightgrad", "east", "west")
    with pytest.raises(WeightGradError, match="invalid field"):
        enter(asked, request("west", frozen={"embedding": digest}), "west")
    assert enter(asked, request("east"), "east")


@pytest.mark.parametrize("rate", ["fast", None, [], {}, math.inf], ids=str)
def test_a_learning_rate_that_is_no_number_shuts_nobody_out(rate: Any) -> None:
    asked = admission("baseline", "east", "west")
    groups = [[indices, {**options, "lr": rate}] for indices, options in OPTIMIZER["groups"]]
    with pytest.raises(RefusedError, match="cannot be read"):
        enter(asked, request("west", optimizer={**OPTIMIZER, "at_sites": True, "groups": groups}), "west")
    assert enter(asked, request("east"), "east")


def test_a_rank_that_enters_again_and_again_has_to_wait() -> None:
    """Each entry ends the session before and begins a thread."""
    asked = admission("weightgrad", "east", "west")
    asked._entries = RateLimiter(per_s=1e-9, burst=3)
    enter(asked, request("east", workers=2), "east")
    again = EntryRequest("east", 1, "1", RankRequest("east", 1).pack(), "east", None, "")
    for _ in range(3):
        asked.enter(again)
    with pytest.raises(LinkError, match="east rank 1 enters more often than twice a second"):
        asked.enter(again)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": [["weight", [10**4000] * 2]]},
        {"layout": [["weight", [2**62] * 200]]},
        {"layout": [["weight", [1] * 100_000]]},
        {"version": 10**4000},
        {"samples": 2**63},
        {"epoch": -(2**64)},
    ],
    ids=["product", "size", "sides", "version", "samples", "epoch"],
)
def test_a_number_too_long_to_print_is_a_refusal(changes: dict[str, Any]) -> None:
    """Their product has more digits than Python turns into text: the error of the refusal raised another one."""
    asked = admission("weightgrad", "east", "west")
    with pytest.raises(ProtocolError, match="invalid field"):
        enter(asked, request("west", **changes), "west")
    assert enter(asked, request("east"), "east")


def test_a_long_request_counts_as_several() -> None:
    """Reading tens of thousands of names takes a second or so, and other sites wait for it."""
    now = 0.0
    asked = admission("weightgrad", "east", "west")
    asked._entries = RateLimiter(per_s=2.0, burst=12, clock=lambda: now)
    said = request("east", layout=[[f"weight.{number}", [1]] for number in range(30_000)])
    at_once = enter_often(asked, said, 12)
    assert 1 < at_once <= 12 / (len(json.dumps(said)) / (1 << 18))
    with suppress(RefusedError):  # another model; but it is another site's share
        enter(asked, request("west"), "west")
    entered = 0
    for _ in range(8):  # it tries again and again: that must not take its share away
        now += 0.5
        entered += enter_often(asked, said, 1)
    assert 1 <= entered < 8


def enter_often(to: Admission, said: dict[str, Any], times: int) -> int:
    """How often a site may enter of so many times."""
    entered = 0
    for _ in range(times):
        try:
            enter(to, said, "east")
        except LinkError:
            continue
        entered += 1
    return entered
