"""Who may connect, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightgrad.errors import CredentialsError, RefusedError, WeightGradError
from weightgrad.runtime.security.credentials import Revoked
from weightgrad.runtime.server.peer_check import PeerCheck
from weightgrad.runtime.server.roster import Roster
from weightgrad.runtime.transport.transport import EntryRequest


def entry(site: str, name: str | None = None, serial: int | None = None) -> EntryRequest:
    return EntryRequest(site, 0, incarnation="1", request=b"", peer_name=name, peer_serial=serial, peer_address="")


def test_who_is_refused_and_why(tmp_path: Path) -> None:
    (tmp_path / "revoked.txt").write_text(f"{7:x}\n")
    roster, reasons = Roster(["east", "west"]), list[str]()
    peers = PeerCheck(roster, secure=True, revoked=Revoked(tmp_path / "revoked.txt"), on_refused=reasons.append)
    peers.check(entry("east", "east", 1))
    roster.revoke("east", [8])
    refused: list[tuple[EntryRequest, type[WeightGradError], str]] = [
        (entry("north", "north", 1), RefusedError, "no site 'north'"),
        (entry("east", "west", 1), CredentialsError, "the certificate is of 'west'"),
        (entry("east", "east", 7), CredentialsError, "serial 7"),
        (entry("east", "east", 8), CredentialsError, "serial 8"),
    ]
    for one, kind, text in refused:
        with pytest.raises(kind, match=text):
            peers.check(one)
    revoked = "revoked certificate"
    assert reasons == ["unknown site", "another site's certificate", revoked, revoked]


def test_without_tls_a_name_is_enough() -> None:
    peers = PeerCheck(Roster(["east"]), secure=False)
    peers.check(entry("east"))
    with pytest.raises(RefusedError, match="no site 'west'"):
        peers.check(entry("west"))
