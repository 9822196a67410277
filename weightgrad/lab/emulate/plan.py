"""The emulated network as lines for `ip` and `tc`; nothing here runs them.

    h0 eth0 ── lan0 g0 wan0 ── w0 ┐
    h1 eth0 ── lan0 g1 wan0 ── w1 ┤ wan         h: a host   g: its gateway   wan: the delay (delay.py)
    h2 eth0 ── lan0 g2 wan0 ── w2 ┘

A gateway's uplink is shaped by htb with a class for each host that a link leads to; what does not fit waits in a
bfifo, and is dropped there, as at any router. MAC addresses are fixed and entered everywhere, so there is no ARP. Hosts
that no link joins have no route: their packets are answered as unreachable.
"""

from __future__ import annotations

from typing import TypedDict

from weightgrad.lab.emulate.topology import Topology, WanLink

GSO_BYTES = 16 * 1024  # largest packet that TCP leaves uncut: small enough for smooth links and a frame of the switch
_ALL_SEGMENTS = 65535


class Step(TypedDict, total=False):
    """Sysctls and `ip` and `tc` lines for one network namespace (`wan` if none is named), for the supervisor."""

    net: str
    sysctl: dict[str, str]
    options: list[str]
    ip: list[str]
    tc: list[str]


def host_net(place: int) -> str:
    """Name of a host's namespace."""
    return f"h{place}"


def gateway_net(place: int) -> str:
    """Name of the namespace of a host's gateway."""
    return f"g{place}"


def address(place: int) -> str:
    """IP address of a host."""
    return f"10.77.{place + 1}.2"


def subnet(place: int) -> str:
    """Subnet behind a host's gateway."""
    return f"10.77.{place + 1}.0/24"


def mac(kind: int, place: int) -> str:
    """MAC address; kind 0: the gateway towards `wan`, 1: the gateway towards its host, 2: the host."""
    return f"02:77:00:00:{kind:02x}:{place + 1:02x}"


def build(topology: Topology, congestion: str) -> list[Step]:
    """The whole network except the delay."""
    places = range(len(topology.hosts))
    nets = [name for i in places for name in (host_net(i), gateway_net(i))]
    quiet = {"net.ipv6.conf.default.disable_ipv6": "1"}  # for interfaces made later; `lo` keeps ::1
    steps: list[Step] = [
        {"sysctl": quiet, "ip": [f"netns add {name}" for name in nets]},
        *(Step(net=gateway_net(i), sysctl={**quiet, "net.ipv4.ip_forward": "1"}) for i in places),
        # Connections must not inherit path metrics, or the self-check would influence the run.
        *(Step(net=host_net(i), sysctl={**quiet, "net.ipv4.tcp_no_metrics_save": "1"}) for i in places),
        {
            "ip": [
                line
                for i in places
                for line in (
                    f"link add w{i} type veth peer name wan0 address {mac(0, i)} netns {gateway_net(i)}",
                    f"link set w{i} up",
                )
            ]
        },
    ]
    for i in places:
        steps += [_gateway(topology, i), _host(i, congestion)]
    return steps


def _gateway(topology: Topology, i: int) -> Step:
    ip = [
        "link set lo up",
        "link set wan0 up",
        f"addr add 10.77.255.{i + 1}/24 dev wan0",
        f"link add lan0 address {mac(1, i)} type veth peer name eth0 address {mac(2, i)} netns {host_net(i)}",
        "link set lan0 up",
        f"addr add 10.77.{i + 1}.1/24 dev lan0",
        f"neigh replace {address(i)} lladdr {mac(2, i)} dev lan0 nud permanent",
    ]
    tc = ["qdisc add dev wan0 root handle 1: htb default 0"]
    for sender, receiver, link in topology.directions():
        if topology.place(sender) == i:
            j = topology.place(receiver)
            ip.append(f"neigh replace 10.77.255.{j + 1} lladdr {mac(0, j)} dev wan0 nud permanent")
            ip.append(f"route add {subnet(j)} via 10.77.255.{j + 1}")
            tc += shape("add", link, sender, j)
            tc.append(
                f"filter add dev wan0 parent 1: protocol ip prio 1 u32 match ip dst {subnet(j)} flowid {_minor(j)}"
            )
    return {"net": gateway_net(i), "ip": [*ip, segments(topology, i)], "tc": tc}


def _host(i: int, congestion: str) -> Step:
    return {
        "net": host_net(i),
        "ip": [
            "link set lo up",
            f"link set eth0 gso_max_size {GSO_BYTES}",
            "link set eth0 up",
            f"addr add {address(i)}/24 dev eth0",
            f"neigh replace 10.77.{i + 1}.1 lladdr {mac(1, i)} dev eth0 nud permanent",
            f"route add default via 10.77.{i + 1}.1 congctl {congestion}",
        ],
    }


def _minor(j: int) -> str:
    return f"1:{j + 1:x}"


def leaf(j: int) -> str:
    """The handle of the queue towards a host."""
    return f"{j + 0x100:x}:"


def shape(verb: str, link: WanLink, sender: str, receiver: int) -> list[str]:
    """Rate and queue of one direction; `verb` is add or change."""
    rate, burst = round(link.rate_bit_s(sender)), link.burst_bytes(sender)
    tokens = f"htb rate {rate}bit ceil {rate}bit burst {burst} cburst {burst} quantum 60000"
    minor, handle = _minor(receiver), leaf(receiver)
    return [
        f"class {verb} dev wan0 parent 1: classid {minor} {tokens}",
        f"qdisc {verb} dev wan0 parent {minor} handle {handle} bfifo limit {link.queue_bytes(sender)}",
    ]


def segments(topology: Topology, i: int) -> str:
    """Segmentation at a gateway: with loss, packets leave it in single segments, because loss is drawn per packet."""
    name = topology.hosts[i]
    lossy = any(link.loss for link in topology.links if name in link.between)
    return f"link set wan0 gso_max_segs {1 if lossy else _ALL_SEGMENTS}"


def reshape(topology: Topology, link: WanLink) -> list[Step]:
    """The steps that give both gateways of a link its new values."""
    steps: list[Step] = []
    for sender, receiver in (link.between, link.between[::-1]):
        i, j = topology.place(sender), topology.place(receiver)
        lines = shape("change", link, sender, j)
        steps.append({"net": gateway_net(i), "ip": [segments(topology, i)], "tc": lines})
    return steps
