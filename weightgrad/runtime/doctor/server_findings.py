"""Asks the global server, and looks at the way to it: the measurements behind `server_checks.py`."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator

from weightgrad.errors import LinkError, WeightGradError
from weightgrad.runtime.doctor.server_checks import (
    check_clock,
    check_middle,
    check_mtu,
    check_no_bytes,
    check_speed,
    check_versions,
)
from weightgrad.runtime.doctor.server_questions import BusyError, ServerQuestions
from weightgrad.runtime.doctor.site_checks import Finding, Level
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.security.tls_check import split

_PMTU_AT = 8 + 13 * 4  # tcpi_pmtu in Linux's struct tcp_info
_TRIES = 3


def path_mtu(server: str, timeout: float = 5.0) -> tuple[int | None, str, float]:
    """How large packets to the server may be, this machine's address on the way, and the seconds of a handshake."""
    place = split(server)
    assert place is not None
    handshakes, mtu, own = [], None, ""
    for _ in range(_TRIES):
        began = time.perf_counter()
        with socket.create_connection(place, timeout) as line:
            handshakes.append(time.perf_counter() - began)
            own = str(line.getsockname()[0])
            mtu = _mtu_of(line)
    return mtu, own, min(handshakes)


def _mtu_of(line: socket.socket) -> int | None:
    """Linux's own knowledge of the path."""
    try:
        facts = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int(struct.unpack_from("=I", facts, _PMTU_AT)[0]) or None
    except (AttributeError, OSError, struct.error):
        return None


def server_findings(server: str, credentials: Credentials, *, seconds: float) -> Iterator[Finding]:
    """Ask the server, and look at the way to it; after a question that is not answered nothing else is tried.

    Args:
        server: HOST:PORT, which answers with TLS.
        credentials: the site's certificates.
        seconds: how long the line is measured each way; 0 measures nothing.
    """
    with ServerQuestions(server, credentials) as questions:
        try:
            asked_at = time.time()
            about = questions.ask("about", timeout=15.0)
            answered_at = time.time()
            question_s = min(_timed_question(questions) for _ in range(_TRIES))
        except WeightGradError as error:
            yield Finding("server", Level.FAILURE, str(error))
            return
        trained = about["parameters"]
        what = "no site has brought a model yet" if trained is None else f"{trained:,} parameters, step {about['step']}"
        yield Finding("server", Level.OK, f"it knows {about['you']!r} among {', '.join(about['sites'])}; {what}")
        yield check_versions(about)
        yield check_clock(float(about["time"]), asked_at, answered_at)
        mtu, own, handshake_s = path_mtu(server)
        yield check_middle(handshake_s, question_s, own, str(about["address"]))
        yield check_mtu(mtu)
        for way in ("up", "down") if seconds else ():
            try:
                yield check_speed(way, questions.measure(way, seconds), about["bit_s"])
            except BusyError as error:
                yield Finding(way, Level.WARNING, str(error))
            except LinkError as error:
                yield check_no_bytes(way, str(error))


def _timed_question(questions: ServerQuestions) -> float:
    began = time.perf_counter()
    questions.ask("about", timeout=15.0)
    return time.perf_counter() - began
