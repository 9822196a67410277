"""What `auto` would decide in a scenario, by asking its own controller."""

from __future__ import annotations

import torch

from weightgrad import codecs, wire
from weightgrad.codecs import cost
from weightgrad.core import strategies
from weightgrad.core.controller.decision import Decision
from weightgrad.core.controller.update_controller import Auto
from weightgrad.lab.plan.scenario import Scenario
from weightgrad.wire.sync_schedule import Report

_ROUNDS = 24  # more than the controller needs to settle, once a run is no longer young
_SAMPLE = 1 << 18


def auto_decision(scenario: Scenario, step_seconds: float | None = None) -> Decision:
    """Let the controller of `auto` see rounds as the links of the scenario would carry them, until it settles.

    Args:
        scenario: sites and links.
        step_seconds: of a step with what the workers of a site exchange; None: of computing alone.
    """
    strategy = scenario.fitted(strategies.find("auto"))
    auto = strategy.auto
    assert auto is not None
    controller = auto.controller(scenario.layout.numel)
    controller.codec_bytes_s = cost.round_trip_bytes_s(strategy.wan_codec("up"), scenario.codec_speed)
    names = [site.name for site in scenario.sites]
    relays = len(names) <= strategy.relay
    for _ in range(_ROUNDS + (auto.young_rounds if isinstance(auto, Auto) else 0)):
        up = encoded_bytes(controller.now.schedule.up, scenario.layout.numel)
        down = (len(names) - 1) * up if relays else encoded_bytes(controller.now.down, scenario.layout.numel)
        for site in scenario.sites:
            trip = 2 * scenario.link_of(site.name).delay_seconds
            rate_up, rate_down = scenario.rates(site.name)
            seconds = trip + up / rate_up + down / rate_down
            step = step_seconds or site.compute.seconds_per_step
            report = Report(step_seconds=step, round=1, round_seconds=seconds, trip_seconds=trip)
            controller.observe(site.name, report, seconds, round(up + down))
        controller.decide(names, relayed=relays)
    return controller.now


def encoded_bytes(spec: str, numel: int) -> float:
    """The bytes of a vector that a codec encodes, from a sample of random values."""
    codec, count = codecs.parse(spec), min(numel, _SAMPLE)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    payload, _ = codec.encode(values, codec.init(values), 0)
    return wire.frame_bytes(payload) * numel / max(1, count)
