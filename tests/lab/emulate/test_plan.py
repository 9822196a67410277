"""The lines for `ip` and `tc`, as far as one can see from reading them."""

from __future__ import annotations

import pytest

from weightgrad.lab.emulate import Wan, WanLink, plan
from weightgrad.lab.emulate import delay as delays
from weightgrad.lab.emulate import wan as wan_module
from weightgrad.lab.emulate.topology import Topology

from .networks import PYTHON, end, need, printed, started

ECHO = "import socket; print(socket.create_connection(('10.77.1.2', 5000)).recv(9).decode())"
SAY = "import socket; s=socket.create_server(('', 5000)); print(1, flush=True); s.accept()[0].send(b'hello')"

TOPOLOGY = Topology(["hub", "east", "lone"], [WanLink(("hub", "east"), 100e6, 0.04, back_bit_s=5e6, loss=0.01)])


def _of(net: str) -> plan.Step:
    (found,) = [step for step in plan.build(TOPOLOGY, "cubic") if step.get("net") == net and "ip" in step]
    return found


def test_each_direction_has_its_own_rate_and_queue() -> None:
    hub, east = _of("g0")["tc"], _of("g1")["tc"]
    assert any("rate 100000000bit" in line and "burst 15140" in line for line in hub)
    assert "qdisc add dev wan0 parent 1:2 handle 101: bfifo limit 1000000" in hub
    assert any("rate 5000000bit" in line for line in east)
    assert "qdisc add dev wan0 parent 1:1 handle 100: bfifo limit 65536" in east


def test_no_link_no_route() -> None:
    assert not [line for line in _of("g2")["ip"] if line.startswith("route")]
    assert not [line for line in _of("g0")["ip"] if "10.77.3." in line]


def test_congestion_control_is_pinned() -> None:
    assert "route add default via 10.77.1.1 congctl cubic" in _of("h0")["ip"]


def test_where_there_is_loss_packets_are_of_the_size_of_packets() -> None:
    assert "link set wan0 gso_max_segs 1" in _of("g0")["ip"]
    assert "link set wan0 gso_max_segs 65535" in _of("g2")["ip"]


def test_netem_lines() -> None:
    link = WanLink(("hub", "east"), 100e6, 0.04)
    assert delays.netem_settings(link, "hub", cut=False) == "netem limit 8575 delay 40000us"
    assert delays.netem_settings(link, "hub", cut=True).endswith("delay 40000us loss 100.000000%")
    shaky = WanLink(("hub", "east"), 100e6, 0.04, 0.005, 0.001)
    assert delays.netem_settings(shaky, "hub", cut=False).endswith("delay 40000us 5000us rate 10gbit loss 0.100000%")


def test_the_way_through_netem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bridge, classes and filters are real; the queue stands in for netem where the kernel has none."""
    need("root")
    with Wan(["lone"], [], delay="switch") as lone:
        if not delays.netem_available(lone._namespaces):
            monkeypatch.setattr(wan_module, "netem_available", lambda namespaces: True)
            monkeypatch.setattr(delays, "netem_settings", lambda link, sender, cut: "bfifo limit 100000")
    with Wan(TOPOLOGY.hosts, TOPOLOGY.links, delay="netem") as wan:
        server, _ = started(wan.host("hub"), [*PYTHON, SAY])
        assert printed(wan.host("east"), ECHO) == "hello"
        end(server)
        wan.set_link("hub", "east", delay_seconds=0.01)
        shown = wan._namespaces.apply([plan.Step(options=["-s"], tc=["qdisc show dev w0", "qdisc show dev w1"])])[0]
        assert " direct_packets_stat 0 " in shown  # every packet went through the class of its source
        stats = wan.stats()
        assert stats.pairs["hub", "east"].packets >= 2
        assert stats.lateness is None
        assert wan.verdict().trusted
        assert wan.describe()["delay"] == "netem"
