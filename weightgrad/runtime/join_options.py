"""The arguments of `weightgrad.join`, checked before any other process is asked."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from weightgrad.errors import LinkError, StrategyError
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.security.tls_check import is_loopback, split
from weightgrad.wire import messages

log = logging.getLogger("weightgrad")


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """How a site reaches the global server, and where it keeps its state."""

    address: str
    site: str
    credentials: Credentials | None = None  # None: neither certificates nor encryption
    state: Path | None = None
    checkpoint_every: int = 50
    streams: int = 4
    timeout: float = 60.0
    reconnect: float = 3600.0
    download_codec: str | None = None
    metrics: str | None = None


def find_credentials(address: str, site: str, credentials: str | Path | None, insecure: bool) -> Credentials | None:
    """The credentials of a site; None where it speaks with a server on the same machine without any.

    Raises:
        StrategyError: There are none, and nobody said `insecure`, or the server is on another machine.
        LinkError: `address` is not HOST:PORT.
        CredentialsError: They cannot be read, have expired, or are not this site's.
    """
    if credentials is None and not insecure:
        raise StrategyError(
            "join needs credentials=DIRECTORY (make them with `weightgrad certs init`), or insecure=True on one machine"
        )
    if split(address) is None:
        raise LinkError(f"{address!r} is not an address; write HOST:PORT, such as 127.0.0.1:7443")
    if insecure and not is_loopback(address):
        raise StrategyError(f"insecure is for a server on this machine, such as 127.0.0.1:7443, and not for {address}")
    if credentials is not None:
        return Credentials.load(Path(credentials), site=site)
    log.warning("INSECURE: no certificates, no encryption; for trying things out on one machine only")
    return None


def check_download_codec(spec: str | None) -> None:
    """Refuse a codec in which a global model cannot be sent, here and not only at the server.

    Raises:
        SpecError: It is no codec, or one that keeps a memory from one tensor to the next.
    """
    if spec is not None:
        messages.check_download_codec(spec)
