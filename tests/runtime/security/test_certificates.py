"""Certificates: what is made, renewed and revoked, and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from weightgrad.errors import CredentialsError
from weightgrad.runtime.security import certificates, tls_check
from weightgrad.runtime.security.credentials import CLIENT, SERVER, Credentials, Revoked

from ..certificates import DAY, mode, now, parsed
from ..certificates import fixture_made as fixture_made
from ..certificates import fixture_own as fixture_own


def test_layout_and_modes(made: Path) -> None:
    files = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    machines = ("server", "sites/virginia", "sites/site_2-b")
    assert files == {
        *("ca.pem", "ca-key.pem", "server/revoked.txt"),
        *(f"{place}/{name}" for place in machines for name in ("ca.pem", "cert.pem", "key.pem")),
    }
    for path in [made, *made.rglob("*")]:
        if path.is_dir():
            assert mode(path) == 0o700, path
        elif path.name in ("key.pem", "ca-key.pem"):
            assert mode(path) == 0o600, path
    for place in machines:
        assert (made / place / "ca.pem").read_bytes() == (made / "ca.pem").read_bytes()
    assert certificates.sites(made) == ["site_2-b", "virginia"]


def test_a_key_is_private_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, int] = {}
    real = os.open

    def spy(path: str | Path, flags: int, mode: int = 0o777) -> int:
        opened[Path(path).name] = mode
        assert flags & os.O_EXCL
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", spy)
    before = os.umask(0)
    try:
        certificates.create(tmp_path / "certs", [], ["a"])
    finally:
        os.umask(before)
    keys = {name: mode for name, mode in opened.items() if "key.pem" in name}
    assert len(keys) == 3
    assert set(keys.values()) == {0o600}
    assert mode(tmp_path / "certs" / "sites" / "a") == 0o700


def test_a_write_that_fails_leaves_what_was_there(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CredentialsError, match=r"cannot write .*: No space left"):
        certificates.renew_server(own, ["b.example.org"])
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before


def test_contents(made: Path) -> None:
    ca, server, site = (parsed(made / name) for name in ("ca.pem", "server/cert.pem", "sites/virginia/cert.pem"))
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value.ca
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.key_cert_sign
    assert not usage.digital_signature
    assert isinstance(ca.public_key(), ec.EllipticCurvePublicKey)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["global.example.org", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "fd00::7", "127.0.0.1", "::1"]
    for leaf, purpose in ((server, SERVER), (site, CLIENT)):
        leaf.verify_directly_issued_by(ca)
        assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [purpose]
        assert 824 * DAY < leaf.not_valid_after_utc - now() < 826 * DAY
    assert 3649 * DAY < ca.not_valid_after_utc - now() < 3651 * DAY


def test_nothing_outlives_its_ca(tmp_path: Path) -> None:
    certificates.create(tmp_path, [], ["a"], ca_days=10)
    assert parsed(tmp_path / "sites/a/cert.pem").not_valid_after_utc == parsed(tmp_path / "ca.pem").not_valid_after_utc


@pytest.mark.parametrize("name", ["ca.pem", "ca-key.pem", "server", "sites"])
def test_a_ca_is_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(CredentialsError, match=f"{name} exists; wanted a directory without a CA.*add-site"):
        certificates.create(tmp_path, [], ["a"])


@pytest.mark.parametrize("name", ["", "a b", "../a", "a/b", "a.b", "é", "a\n", "a" * 65])
def test_bad_site_names(made: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(CredentialsError, match="wanted 1 to 64 letters"):
        certificates.create(tmp_path / "new", [], ["a", name])
    assert not (tmp_path / "new").exists()
    with pytest.raises(CredentialsError, match="wanted 1 to 64 letters"):
        certificates.add_site(made, name)
    with pytest.raises(CredentialsError, match="wanted 1 to 64 letters"):
        Credentials.load(made, site=name)


@pytest.mark.parametrize("name", ["", "a b", "host:50051", "10.0.0.300", "-a.org", "a..b", "é.org", "a\n", "[::1]"])
def test_bad_server_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(CredentialsError, match="wanted a DNS name or an IP address"):
        certificates.create(tmp_path / "new", [name], [])
    assert not (tmp_path / "new").exists()


def test_other_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match="a name comes twice"):
        certificates.create(tmp_path / "new", [], ["a", "a"])
    for days in (0, -1, 10**9):
        with pytest.raises(CredentialsError, match="wanted 1 to 36500"):
            certificates.create(tmp_path / "new", [], ["a"], days=days)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(CredentialsError, match="cannot write"):
        certificates.create(tmp_path / "file", [], ["a"])


def test_rotation_of_a_site(own: Path) -> None:
    before = Credentials.load(own, site="virginia")
    with pytest.raises(CredentialsError, match=r"site virginia exists in .*--renew"):
        certificates.add_site(own, "virginia")
    assert Credentials.load(own, site="virginia") == before
    certificates.add_site(own, "virginia", renew=True, days=10)
    after = Credentials.load(own, site="virginia")
    assert before.serial != after.serial
    assert before.key != after.key
    assert after.expires - now() < 11 * DAY
    assert mode(own / "sites/virginia/key.pem") == 0o600
    assert not Revoked(own / "server" / "revoked.txt").has(before.serial)
    certificates.add_site(own, "oregon")
    assert certificates.sites(own) == ["oregon", "site_2-b", "virginia"]
    with pytest.raises(CredentialsError, match=r"no site virgina to renew .*there are: oregon, site_2-b, virginia"):
        certificates.add_site(own, "virgina", renew=True)


def test_rotation_of_the_server(own: Path) -> None:
    before, listed = Credentials.load(own, server=True), (own / "server" / "revoked.txt")
    certificates.revoke(own, "virginia")
    revoked = listed.read_bytes()
    certificates.renew_server(own, ["b.example.org"])
    after = Credentials.load(own, server=True)
    assert before.serial != after.serial
    assert "b.example.org, localhost" in tls_check._names(parsed(own / "server" / "cert.pem"))
    assert listed.read_bytes() == revoked


def test_nothing_is_signed_without_the_key_of_the_ca(own: Path) -> None:
    key = own / "ca-key.pem"
    shutil.copy2(own / "server" / "key.pem", key)
    with pytest.raises(CredentialsError, match=r"ca-key\.pem is not the key of .*ca\.pem"):
        certificates.add_site(own, "oregon")
    key.chmod(0o644)
    with pytest.raises(CredentialsError, match="chmod 600"):
        certificates.add_site(own, "oregon")
    key.unlink()
    with pytest.raises(CredentialsError, match=r"no .*ca-key\.pem, which signs; bring it back"):
        certificates.renew_server(own, [])
    assert certificates.sites(own) == ["site_2-b", "virginia"]


def test_revocation(own: Path) -> None:
    path = own / "server" / "revoked.txt"
    revoked, site = Revoked(path), Credentials.load(own, site="virginia")
    assert not revoked.has(site.serial)
    path.write_text(path.read_text() + "ab:CD  # by hand, no newline")
    assert certificates.revoke(own, "virginia") == site.serial
    assert revoked.has(site.serial)
    assert revoked.has(0xABCD)
    line = path.read_text().splitlines()[-1]
    assert line.startswith(f"{site.serial:x}  # virginia, revoked {now():%Y-%m-%d}")
    size = path.stat().st_size
    assert certificates.revoke(own, "virginia") == site.serial
    assert path.stat().st_size == size
    certificates.add_site(own, "virginia", renew=True)
    assert not revoked.has(Credentials.load(own, site="virginia").serial)
    assert revoked.has(site.serial)
    with pytest.raises(CredentialsError, match=r"no site 'oregon' in .*there are: site_2-b, virginia"):
        certificates.revoke(own, "oregon")
