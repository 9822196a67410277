"""What can go wrong between a site and the global server, looked at before a run.

Each check is a function that returns one finding: ok, a warning or a failure, and what to do about it. Nothing is
changed on either side; a connection is opened and closed.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path

import torch
from torch import distributed

from weightgrad import kernels
from weightgrad.errors import CredentialsError
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.security.tls_check import diagnose, split
from weightgrad.units import show_bytes, show_seconds

_SOON = timedelta(days=14)
_FAR_SECONDS = 0.5  # a round trip that is worth a word
_SLOW_BYTES_S = 50e6  # of a disk
_WRITTEN = 32 << 20
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


class Level(Enum):
    """How a check went."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """The result of one check: for code (`level`) and for people (`text`)."""

    check: str
    level: Level
    text: str


def _ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def _warning(check: str, text: str) -> Finding:
    return Finding(check, Level.WARNING, text)


def _failure(check: str, text: str) -> Finding:
    return Finding(check, Level.FAILURE, text)


def check_name(server: str) -> Finding:
    """Whether the server's name can be resolved."""
    place = split(server)
    if place is None:
        return _failure("name", f"{server!r} is not an address; write HOST:PORT, such as gs.example.net:7443")
    try:
        found = socket.getaddrinfo(place[0], place[1], type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return _failure("name", f"{place[0]} cannot be resolved ({error.strerror}); correct it, or check the DNS here")
    addresses = sorted({str(entry[4][0]) for entry in found})
    return _ok("name", f"{place[0]} is {', '.join(addresses)}")


def check_port(server: str, timeout: float = 5.0, *, far_seconds: float = _FAR_SECONDS) -> Finding:
    """Whether something listens there, and how long a round trip takes: that of the TCP handshake."""
    place = split(server)
    if place is None:
        return _failure("port", f"{server!r} is not an address")
    try:
        began = time.perf_counter()
        with socket.create_connection(place, timeout):
            trip = time.perf_counter() - began
    except ConnectionRefusedError:
        return _failure("port", f"nothing listens at {server}; start the global server, or correct the port")
    except TimeoutError:
        return _failure("port", f"{server} does not answer in {timeout:g} s; look for a firewall in between")
    except OSError as error:
        return _failure(
            "port", f"{server} cannot be reached: {error.strerror or error}; look at the network of this machine"
        )
    told = f"{server} answers; a round trip takes {show_seconds(trip)}"
    if trip > far_seconds:
        return _warning("port", f"{told}, which is long; `auto` copes, strategies that wait do not")
    return _ok("port", told)


def check_tls(server: str, credentials: Credentials | None, timeout: float = 5.0) -> Finding:
    """Whether both sides accept each other's certificates."""
    problem = diagnose(server, credentials, timeout)
    if problem is not None:
        return _failure("TLS", str(problem))
    if credentials is None:
        return _warning("TLS", f"{server} speaks TLS; without --credentials neither side was verified")
    return _ok("TLS", f"{server} and {credentials.subject!r} accept each other's certificates")


def check_certificate(credentials: Credentials, now: datetime | None = None) -> Finding:
    """How long the site's own certificate is valid."""
    left = credentials.expires - (now or datetime.now(timezone.utc))
    who = f"the certificate of {credentials.subject!r}"
    renew = f"run `weightgrad certs add-site DIR {credentials.subject} --renew` and copy the result here"
    if left <= timedelta(0):
        return _failure("certificate", f"{who} expired on {credentials.expires:%Y-%m-%d}; {renew}")
    if left < _SOON:
        return _warning("certificate", f"{who} expires in {left.days} days; {renew}")
    return _ok("certificate", f"{who} is valid until {credentials.expires:%Y-%m-%d}, {left.days} days")


def load_credentials(directory: Path, site: str | None = None) -> Credentials | Finding:
    """The certificates of a site, or what is wrong with them."""
    try:
        return Credentials.load(directory, site=site)
    except CredentialsError as error:
        return _failure("certificate", str(error))


def check_proxy(environment: Mapping[str, str] = os.environ) -> Finding:
    """Whether a proxy is set that gRPC would go through."""
    lower = {name.lower(): value for name, value in environment.items()}
    given = [name for name in _PROXIES if lower.get(name)]
    if given:
        names = ", ".join(given)
        return _warning("proxy", f"{names} is set: gRPC goes through it unless no_proxy names the global server")
    return _ok("proxy", "none is set")


def check_disk(state: Path, needed_bytes: float = 0.0, *, slow_bytes_s: float = _SLOW_BYTES_S) -> Finding:
    """Whether the state directory can be written, how fast, and whether there is room."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=state) as file:
            block = os.urandom(1 << 20)
            began = time.perf_counter()
            for _ in range(_WRITTEN >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            speed = _WRITTEN / max(time.perf_counter() - began, 1e-9)
        room = shutil.disk_usage(state).free
    except OSError as error:
        return _failure("disk", f"{state} cannot be written: {error.strerror or error}; choose another --state")
    told = f"{state}: {show_bytes(speed)}/s with fsync, {show_bytes(room)} free"
    if room < needed_bytes:
        return _failure("disk", f"{told}; wanted {show_bytes(needed_bytes)}: free some, or choose another --state")
    if speed < slow_bytes_s:
        return _warning("disk", f"{told}; slow: checkpoints will take long, put --state on a local disk")
    return _ok("disk", told)


def check_memory(needed_bytes: float, available: Callable[[], float | None] | None = None) -> Finding:
    """Whether this machine has as much memory as the plan says."""
    found = (available or available_memory)()
    if found is None:
        return _warning("memory", "this system does not say how much memory is available")
    told = f"{show_bytes(found)} available"
    if not needed_bytes:
        return _ok("memory", f"{told}; `weightgrad plan` says how much a run needs: give it as --memory")
    if found < needed_bytes:
        return _failure(
            "memory", f"{told}, {show_bytes(needed_bytes)} needed: use fewer ranks here, or shard the model"
        )
    return _ok("memory", f"{told}, {show_bytes(needed_bytes)} needed")


def available_memory() -> float | None:
    """Bytes that programs may still take; None where Linux does not say it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def check_kernels(backend: str | None = None) -> Finding:
    """Whether the native kernels are in use; `backend` is for tests."""
    status = kernels.status()
    if (backend or status.backend) == "native":
        return _ok("kernels", f"{status}")
    return _warning("kernels", f"{status}; encoding is many times slower: install a C compiler, then weightgrad again")


def check_backend(is_available: Callable[[], bool] = distributed.is_available) -> Finding:
    """Whether the ranks of a site can talk: NCCL where there are GPUs, Gloo otherwise."""
    if not is_available():
        return _failure("backend", "this torch was built without torch.distributed; install another build")
    if torch.cuda.is_available() and not distributed.is_nccl_available():
        return _warning("backend", "there are GPUs and no NCCL: ranks of one site will use Gloo, over the host")
    if not distributed.is_gloo_available():
        return _failure("backend", "this torch has no Gloo; install another build")
    return _ok("backend", "NCCL and Gloo" if torch.cuda.is_available() else "Gloo; no GPU is visible")


def site_findings(
    server: str | None,
    credentials: Path | None,
    state: Path | None,
    *,
    site: str | None = None,
    memory_bytes: float = 0.0,
    room_bytes: float = 0.0,
    more: Callable[[str, Credentials], Iterator[Finding]] | None = None,
) -> Iterator[Finding]:
    """Every check that applies, one after the other; what cannot work after a failure is left out.

    Args:
        server: HOST:PORT of the global server; None: only this machine is looked at.
        credentials: the directory of the site's certificates.
        state: the state directory.
        site: the site, where `credentials` has those of all.
        memory_bytes: what the plan says a rank needs; 0: not known.
        room_bytes: what checkpoints need; 0: not known.
        more: asks the server, where TLS to it works.
    """
    own: Credentials | None = None
    if credentials is not None:
        loaded = load_credentials(credentials, site)
        if isinstance(loaded, Finding):
            yield loaded
        else:
            own = loaded
            yield check_certificate(own)
    if server is not None:
        name = check_name(server)
        yield name
        if name.level is Level.OK:
            port = check_port(server)
            yield port
            if port.level is not Level.FAILURE and (credentials is None or own is not None):
                tls = check_tls(server, own)
                yield tls
                if tls.level is Level.OK and own is not None and more is not None:
                    yield from more(server, own)
        yield check_proxy()
    if state is not None:
        yield check_disk(state, room_bytes)
    yield check_memory(memory_bytes)
    yield check_kernels()
    yield check_backend()
