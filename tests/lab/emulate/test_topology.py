"""Hosts and links check themselves, and say what is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest

from weightgrad.errors import TopologyError
from weightgrad.lab.emulate import ModelledWan, Wan, WanLink, open_wan
from weightgrad.lab.emulate.topology import MOST_HOSTS, Topology

ENDS = ("hub", "east")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bandwidth_bit_s": 0}, "bandwidth_bit_s is 0"),
        ({"bandwidth_bit_s": math.inf}, "bandwidth_bit_s is inf"),
        ({"bandwidth_bit_s": "100 Mbit/s"}, "bandwidth_bit_s is '100 Mbit/s'"),
        ({"bandwidth_bit_s": True}, "bandwidth_bit_s is True"),
        ({"back_bit_s": -1.0}, "back_bit_s is -1.0"),
        ({"delay_seconds": -0.01}, "delay_seconds is -0.01"),
        ({"delay_seconds": math.nan}, "delay_seconds is nan"),
        ({"delay_seconds": 80}, "delay_seconds is 80; wanted 0 to 60 s"),
        ({"jitter_seconds": 0.02}, "jitter_seconds is 0.02; wanted 0 to 0.01 s"),
        ({"loss": -0.1}, "loss is -0.1"),
        ({"loss": 1.0}, "`cut`"),
        ({"between": ("hub", "hub")}, "two different hosts"),
        ({"between": ("hub",)}, "two different hosts"),
    ],
)
def test_a_link_names_what_is_wrong(values: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {"between": ENDS, "bandwidth_bit_s": 1e6, "delay_seconds": 0.01}
    with pytest.raises(TopologyError) as caught:
        WanLink(**{**good, **values})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "links", "said"),
    [
        ([], [], "0 hosts"),
        (["a", "a"], [], "named twice"),
        (["a b"], [], "host 'a b'"),
        (["..."], [], "host '...'"),
        (["x" * 64], [], "wanted up to 63"),
        ([f"h{i}" for i in range(MOST_HOSTS + 1)], [], "201 hosts"),
        (["hub"], [WanLink(ENDS, 1e6, 0.01)], "no host is named 'east'; there are hub"),
        (list(ENDS), [WanLink(ENDS, 1e6, 0.01), WanLink(ENDS[::-1], 1e6, 0.01)], "two links"),
    ],
)
@pytest.mark.parametrize("make", [Wan, ModelledWan, open_wan])
def test_a_network_names_what_is_wrong(make: Any, hosts: list[str], links: list[WanLink], said: str) -> None:
    with pytest.raises(TopologyError) as caught:
        make(hosts, links)
    assert said in str(caught.value)


def test_options_name_what_is_wrong() -> None:
    with pytest.raises(TopologyError, match="delay is 'slow'; wanted auto, netem or switch"):
        Wan(["a"], [], delay="slow")
    with pytest.raises(TopologyError, match="kind is 'cloud'; wanted auto"):
        open_wan(["a"], [], kind="cloud")


def test_rates_queues_and_bursts_of_a_link() -> None:
    link = WanLink(ENDS, 100e6, 0.04, back_bit_s=2e6)
    assert (link.rate_bit_s("hub"), link.rate_bit_s("east")) == (100e6, 2e6)
    assert link.round_trip_seconds == 0.08
    assert (link.queue_bytes("hub"), link.queue_bytes("east")) == (1_000_000, 65_536)
    assert (link.burst_bytes("hub"), link.burst_bytes("east")) == (15_140, 15_140)
    assert WanLink(ENDS, 1e9, 0.001).queue_bytes("hub") == 6_250_000  # 50 ms at least
    assert WanLink(ENDS, 1e9, 0.001).burst_bytes("hub") == 125_000
    assert str(link) == "hub - east: 100 Mbit/s / 2 Mbit/s back, 40 ms one way"
    assert str(WanLink(ENDS, 1e6, 0.04, 0.001, 0.02)) == "hub - east: 1 Mbit/s, 40 ms ± 1 ms one way, 2 % loss"


def test_a_change_keeps_the_rest() -> None:
    topology = Topology(ENDS, [WanLink(ENDS, 10e6, 0.04, 0.001, 0.02, back_bit_s=1e6)])
    nothing: dict[str, Any] = dict.fromkeys(
        ("bandwidth_bit_s", "back_bit_s", "delay_seconds", "jitter_seconds", "loss")
    )

    def change(first: str, second: str, **values: float) -> WanLink:
        topology.change(first, second, **{**nothing, **values})
        (found,) = topology.links
        return found

    assert change(*ENDS, loss=0.0) == WanLink(ENDS, 10e6, 0.04, 0.001, 0.0, back_bit_s=1e6)
    assert change(*ENDS, bandwidth_bit_s=5e6) == WanLink(ENDS, 5e6, 0.04, 0.001)
    assert change(*ENDS[::-1], bandwidth_bit_s=2e6, back_bit_s=7e6) == WanLink(ENDS, 7e6, 0.04, 0.001, back_bit_s=2e6)
    assert change(*ENDS[::-1], back_bit_s=9e6) == WanLink(ENDS, 9e6, 0.04, 0.001, back_bit_s=2e6)
    with pytest.raises(TopologyError, match="jitter_seconds"):
        change(*ENDS, delay_seconds=0.0)
    assert topology.links[0].delay_seconds == 0.04
