"""What only a talk with the global server can tell: versions, clocks, the line's speed, and who sits in between.

Each check is a function of what was measured, so that it can be tried without a bad network; `server_findings.py`
measures. Nothing here loads gRPC, so a process that trains may use it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightgrad.runtime.doctor.site_checks import Finding, Level
from weightgrad.runtime.process_facts import about_this_process
from weightgrad.units import show_bit_s, show_bytes, show_seconds

_PROTOCOLS = ("transport", "messages", "admission")
_CLOCK_WARNING_S = 5.0
_CLOCK_FAILURE_S = 3600.0  # certificates begin an hour before they are made
_SLOW = 0.7  # of what the recipe says
_LEAST_MTU = 1280  # that every network of IPv6 carries


@dataclass(frozen=True)
class Speed:
    """What a line has carried.

    Attributes:
        received: bytes that have arrived.
        seconds: from the first of them to the last.
    """

    received: int
    seconds: float

    @property
    def bit_s(self) -> float:
        """Bits a second."""
        return 8 * self.received / self.seconds if self.seconds > 0 else 0.0


def check_versions(theirs: Mapping[str, Any], ours: Mapping[str, Any] | None = None) -> Finding:
    """Whether both ends speak the same protocol, and run the same software."""
    own = about_this_process() if ours is None else ours
    spoken = [name for name in _PROTOCOLS if str(theirs.get(name)) != str(own[name])]
    if spoken:
        told = ", ".join(f"{name} {theirs.get(name)} there and {own[name]} here" for name in spoken)
        return Finding("versions", Level.FAILURE, f"another protocol: {told}; run the same release everywhere")
    differ = [
        f"{name} {theirs[name]} there and {own[name]} here" for name in ("weightgrad",) if theirs[name] != own[name]
    ]
    minor = [".".join(str(side["torch"]).split("+")[0].split(".")[:2]) for side in (theirs, own)]
    if minor[0] != minor[1]:
        differ.append(f"torch {theirs['torch']} there and {own['torch']} here")
    if differ:
        why = "they work together, but sites may not compute the same bits"
        return Finding("versions", Level.WARNING, f"{', '.join(differ)}: {why}; install the same")
    return Finding("versions", Level.OK, f"weightgrad {own['weightgrad']} and torch {own['torch']} on both sides")


def check_clock(server_time: float, asked_at: float, answered_at: float) -> Finding:
    """Whether the clocks agree; half of the round trip is not known."""
    ahead, unknown = server_time - (asked_at + answered_at) / 2, (answered_at - asked_at) / 2
    where = "ahead of" if ahead > 0 else "behind"
    told = f"the server's clock is {abs(ahead):.1f} s {where} this one's (± {unknown:.1f} s)"
    off = abs(ahead) - unknown
    if off > _CLOCK_FAILURE_S:
        return Finding("clock", Level.FAILURE, f"{told}: certificates will seem expired, or not valid yet; use NTP")
    if off > _CLOCK_WARNING_S:
        return Finding("clock", Level.WARNING, f"{told}; logs of the two will not fit together; set both by NTP")
    return Finding("clock", Level.OK, told)


def check_middle(handshake_s: float, question_s: float, own: str, seen: str) -> Finding:
    """Whether something in between ends our connections: its handshake is near, and the server's answer far.

    Args:
        handshake_s: seconds of a TCP handshake.
        question_s: seconds of a question on a connection that is open.
        own: this machine's address on the way to the server.
        seen: the address from which the server sees us, in gRPC's notation.
    """
    host = seen.partition(":")[2].rpartition(":")[0].strip("[]")
    moved = f"; the server sees {host} where this machine is {own}" if host and host != own else ""
    told = f"a TCP handshake takes {show_seconds(handshake_s)}, a question {show_seconds(question_s)}{moved}"
    if question_s > 3 * handshake_s + 0.05:
        return Finding(
            "between",
            Level.WARNING,
            f"{told}: a proxy or load balancer ends connections on the way, and may cut quiet ones; let it pass TCP "
            "through, or use another way",
        )
    return Finding("between", Level.OK, told + (", so there is address translation on the way" if moved else ""))


def check_mtu(mtu: int | None) -> Finding:
    """Whether packets of the usual size pass."""
    if mtu is None:
        return Finding("MTU", Level.OK, "this system does not say how large packets to the server may be")
    if mtu < _LEAST_MTU:
        return Finding(
            "MTU",
            Level.WARNING,
            f"packets to the server may have {mtu} bytes, fewer than the {_LEAST_MTU} of any IPv6 network; look for a "
            "tunnel or VPN with a wrong MTU on the way",
        )
    return Finding("MTU", Level.OK, f"packets to the server may have {mtu} bytes")


def check_speed(way: str, speed: Speed, assumed_bit_s: float | None) -> Finding:
    """Whether the line is as fast as the recipe says."""
    told = f"{show_bit_s(speed.bit_s)} ({show_bytes(speed.received)} in {speed.seconds:.1f} s)"
    if not speed.received:
        return check_no_bytes(way, "nothing has arrived")
    if assumed_bit_s is None:
        return Finding(way, Level.OK, f"{told}; the recipe says nothing of this link")
    if speed.bit_s < _SLOW * assumed_bit_s:
        return Finding(
            way,
            Level.WARNING,
            f"{told}, and the recipe says {show_bit_s(assumed_bit_s)}: write the measured bandwidth into it (or give "
            "it to `weightgrad sites add --bandwidth`), or find out what else uses the line",
        )
    return Finding(way, Level.OK, f"{told}; the recipe says {show_bit_s(assumed_bit_s)}")


def check_no_bytes(way: str, why: str) -> Finding:
    """A short question was answered, and bulk does not pass."""
    return Finding(
        way,
        Level.FAILURE,
        f'{why}: short messages pass and long ones do not; look for a firewall that drops ICMP "too big" (set the MTU '
        "of this machine to 1280 and try again), or for a proxy with a limit",
    )
