"""Certificates to test with: made once a module, spoiled in a copy.

from .certificates import fixture_made as fixture_made  # `made`; and fixture_own, `own`
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from weightgrad.runtime.security import certificates, credentials
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.security.pem import certificate_pem, key_pem

DAY = timedelta(days=1)


def now() -> datetime:
    return datetime.now(timezone.utc)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def parsed(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def reissue(
    directory: Path, place: str, name: str, begins: datetime, ends: datetime, hosts: Sequence[str] = ()
) -> None:
    """Replace a certificate by one with these dates, signed by the same CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = certificates.alternative_names(hosts) if hosts else ()
    authority = certificates._Authority.load(directory)
    made = certificates._certificate(name, key, authority, begins=begins, ends=ends, alternatives=names)
    (directory / place / "cert.pem").write_bytes(certificate_pem(made))
    (directory / place / "key.pem").write_bytes(key_pem(key))


def unchecked(directory: Path) -> Credentials:
    """What a machine holds, as it is."""
    ca, certificate, key = ((directory / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem"))
    return Credentials(ca, certificate, key, directory)


def expire_ca(directory: Path) -> None:
    authority = certificates._Authority.load(directory)
    old = certificates._certificate(
        credentials.name_of((directory / "ca.pem").read_bytes()),
        authority.key,
        None,
        begins=now() - 9 * DAY,
        ends=now() - DAY,
    )
    for path in directory.rglob("ca.pem"):
        path.write_bytes(certificate_pem(old))


@pytest.fixture(name="made", scope="module")
def fixture_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "a"
    certificates.create(directory, ["global.example.org", "10.1.2.3", "fd00::7"], ["virginia", "site_2-b"])
    return directory


@pytest.fixture(name="own")
def fixture_own(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "certs"))
