"""`weightgrad certs`, as an operator types it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightgrad.cli import certs
from weightgrad.errors import CredentialsError
from weightgrad.runtime.security import certificates, credentials
from weightgrad.runtime.security.credentials import Credentials, Revoked


def said(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(certs.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return str(result.output)


def refused(*arguments: str | Path) -> str:
    with pytest.raises(CredentialsError) as caught:
        CliRunner().invoke(certs.app, [str(argument) for argument in arguments], catch_exceptions=False)
    return str(caught.value)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    certificates.create(tmp_path / "certs", ["global.example.org"], ["virginia", "oregon"])
    return tmp_path / "certs"


def test_init_says_what_to_copy_where(tmp_path: Path) -> None:
    place = tmp_path / "certs"
    output = said("init", place, "--global-server", "global.example.org, 10.0.0.1", "--sites", "a,b", "--days", "20")
    assert f"copy {place}/server to the global server" in output
    assert f"copy {place}/sites/a to a\n" in output
    assert f"copy {place}/sites/b to b\n" in output
    assert f"keep {place}/ca-key.pem offline" in output
    assert certificates.sites(place) == ["a", "b"]
    assert Credentials.load(place, site="a").expires < datetime.now(timezone.utc) + timedelta(days=21)
    assert "exists" in refused("init", place, "--global-server", "x", "--sites", "a")


def test_init_needs_names() -> None:
    said("init", "certs", "--global-server", "a", code=2)
    said("init", "certs", "--sites", "a", code=2)


def test_add_site(made: Path) -> None:
    assert f"copy {made}/sites/tokyo to tokyo" in said("add-site", made, "tokyo")
    assert Credentials.load(made, site="tokyo").subject == "tokyo"
    assert "--renew" in refused("add-site", made, "tokyo")


def test_renewal_says_what_stays_valid(made: Path) -> None:
    old = Credentials.load(made, site="virginia")
    output = said("add-site", made, "virginia", "--renew")
    assert f"The old one, serial {old.serial:x}, stays valid until {old.expires:%Y-%m-%d}." in output
    assert f"add its serial as a line to {made}/server/revoked.txt" in output
    assert Credentials.load(made, site="virginia").serial != old.serial
    said("revoke", made, "virginia")
    assert "stays valid" not in said("add-site", made, "virginia", "--renew")
    assert "no site virgina to renew" in refused("add-site", made, "virgina", "--renew")


def test_renew_server(made: Path) -> None:
    old = Credentials.load(made, server=True)
    assert f"copy {made}/server to it" in said("renew-server", made, "--global-server", "b.example.org")
    assert Credentials.load(made, server=True).serial != old.serial


def test_revoke(made: Path) -> None:
    serial = Credentials.load(made, site="virginia").serial
    output = said("revoke", made, "virginia")
    assert f"Revoked serial {serial:x} of virginia." in output
    assert f"copy {made}/server/revoked.txt to the global server" in output
    assert f"weightgrad certs add-site {made} virginia --renew" in output
    assert Revoked(made / "server" / "revoked.txt").has(serial)
    assert "there are: oregon, virginia" in refused("revoke", made, "tokyo")


def test_show(made: Path) -> None:
    said("revoke", made, "virginia")
    said("add-site", made, "soon", "--days", "5")
    *rows, last = said("show", made).splitlines()
    assert rows[0].split() == ["who", "serial", "expires", "revoked"]
    assert [row.split("  ")[0].strip() for row in rows[1:]] == ["CA", "global server", "oregon", "soon", "virginia"]
    site = Credentials.load(made, site="virginia")
    assert rows[-1].split() == ["virginia", f"{site.serial:x}", f"{site.expires:%Y-%m-%d}", "yes"]
    assert [row.split()[-1] for row in rows[1:]] == ["no", "no", "no", "no", "yes"]
    assert last == "soon expires in 4 days"


def test_show_of_an_expired_certificate(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "expires_of", lambda pem: datetime(2020, 1, 2, tzinfo=timezone.utc))
    assert "oregon has expired\n" in said("show", made)


def test_show_of_what_is_no_ca(tmp_path: Path) -> None:
    assert "weightgrad certs init" in refused("show", tmp_path)
