"""Certificates loaded: which are refused, and what is said; and the list of the revoked."""

from __future__ import annotations

import os
import shutil
import stat
from concurrent import futures
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from weightgrad.errors import CredentialsError
from weightgrad.runtime.security import certificates, credentials
from weightgrad.runtime.security.credentials import Credentials, Revoked

from ..certificates import DAY, expire_ca, now, parsed, reissue
from ..certificates import fixture_made as fixture_made
from ..certificates import fixture_own as fixture_own


def test_load_from_either_place(made: Path) -> None:
    for path in (made, made / "sites" / "virginia"):
        site = Credentials.load(path, site="virginia")
        assert (site.subject, site.directory) == ("virginia", made / "sites" / "virginia")
        assert site.serial == parsed(made / "sites/virginia/cert.pem").serial_number
        assert site.expires == parsed(made / "sites/virginia/cert.pem").not_valid_after_utc
        assert site.expires.utcoffset() == timedelta(0)
    assert Credentials.load(made / "sites" / "virginia").subject == "virginia"
    for path in (made, made / "server"):
        assert Credentials.load(path, server=True).subject == certificates.SERVER_SUBJECT


def test_a_key_is_never_shown(made: Path) -> None:
    assert "PRIVATE" not in repr(Credentials.load(made, server=True))
    assert "PRIVATE" not in repr(certificates._Authority.load(made))


def test_load_says_where_to_look(made: Path, tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"no directory .*weightgrad certs init"):
        Credentials.load(tmp_path / "nowhere", server=True)
    with pytest.raises(CredentialsError, match="say which site; there are: site_2-b, virginia"):
        Credentials.load(made)
    with pytest.raises(
        CredentialsError, match=r"no certificate of site oregon.*there are: site_2-b, virginia.*add-site"
    ):
        Credentials.load(made, site="oregon")


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
def test_load_names_the_file_that_is_missing_or_damaged(own: Path, name: str) -> None:
    path = own / "sites" / "virginia" / name
    path.write_bytes(b"-----BEGIN NOTHING-----\n")
    with pytest.raises(CredentialsError, match=f"virginia/{name} is not a .* in PEM"):
        Credentials.load(own / "sites" / "virginia", site="virginia")
    path.unlink()
    with pytest.raises(CredentialsError, match=f"no file .*virginia/{name}; .*weightgrad certs init"):
        Credentials.load(own / "sites" / "virginia", site="virginia")
    path.mkdir()
    with pytest.raises(CredentialsError, match=f"cannot read .*virginia/{name}: Is a directory"):
        Credentials.load(own / "sites" / "virginia", site="virginia")


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_can_read(own: Path, bits: int) -> None:
    path = own / "sites" / "virginia" / "key.pem"
    path.chmod(bits)
    with pytest.raises(CredentialsError, match=rf"mode {bits:04o}.*chmod 600 {path}"):
        Credentials.load(own, site="virginia")


def test_a_key_behind_links_is_judged_by_its_file(own: Path) -> None:
    place = own / "sites" / "virginia"
    # as Kubernetes lays out a secret
    (place / "..2026").mkdir()
    (place / "..data").symlink_to("..2026")
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (place / name).rename(place / "..2026" / name)
        (place / name).symlink_to(f"..data/{name}")
    assert Credentials.load(place, site="virginia").subject == "virginia"
    (place / "..2026" / "key.pem").chmod(0o644)
    with pytest.raises(CredentialsError, match=r"virginia/key\.pem has mode 0644.*defaultMode 0400"):
        Credentials.load(place, site="virginia")


def as_process(monkeypatch: pytest.MonkeyPatch, *, user: int, group: int, groups: list[int]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getegid", lambda: group)
    monkeypatch.setattr(os, "getgroups", lambda: groups)


def as_file(monkeypatch: pytest.MonkeyPatch, *, user: int, group: int) -> None:
    """Every file belongs to these; its mode is its own."""
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        found = list(real(fd))
        found[stat.ST_UID], found[stat.ST_GID] = user, group
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", fstat)


@pytest.mark.parametrize("bits", [0o440, 0o640])
@pytest.mark.parametrize(("group", "groups"), [(1000, [1000, 2000]), (2000, [])])
def test_a_key_that_kubernetes_mounts_for_a_group(
    own: Path, monkeypatch: pytest.MonkeyPatch, bits: int, group: int, groups: list[int]
) -> None:
    (own / "sites" / "virginia" / "key.pem").chmod(bits)
    as_process(monkeypatch, user=1000, group=group, groups=groups)
    as_file(monkeypatch, user=0, group=2000)
    assert Credentials.load(own, site="virginia").subject == "virginia"


@pytest.mark.parametrize(
    ("bits", "owner", "user", "groups"),
    [
        (0o444, 0, 1000, [2000]),
        (0o644, 0, 1000, [2000]),
        (0o660, 0, 1000, [2000]),
        (0o450, 0, 1000, [2000]),
        (0o440, 0, 1000, [3000]),
        (0o440, 0, 0, [2000]),
        (0o640, 1000, 1000, [2000]),
        (0o640, 1001, 1000, [2000]),
    ],
)
def test_a_key_for_a_group_in_any_other_way(
    own: Path, monkeypatch: pytest.MonkeyPatch, bits: int, owner: int, user: int, groups: list[int]
) -> None:
    (own / "sites" / "virginia" / "key.pem").chmod(bits)
    as_process(monkeypatch, user=user, group=1000, groups=groups)
    as_file(monkeypatch, user=owner, group=2000)
    with pytest.raises(CredentialsError, match=f"mode {bits:04o}.*chmod 600"):
        Credentials.load(own, site="virginia")


def test_the_key_of_the_ca_is_never_for_a_group(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "ca-key.pem").chmod(0o440)
    as_process(monkeypatch, user=1000, group=1000, groups=[2000])
    as_file(monkeypatch, user=0, group=2000)
    with pytest.raises(CredentialsError, match=r"ca-key\.pem has mode 0440.*chmod 600 [^ ]*`$"):
        certificates.add_site(own, "oregon")


def test_a_certificate_out_of_its_dates(own: Path) -> None:
    reissue(own, "sites/virginia", "virginia", now() - 9 * DAY, now() - 2 * DAY)
    gone = f"{now() - 2 * DAY:%Y-%m-%d}"
    with pytest.raises(CredentialsError, match=f"expired on {gone}.*, now is .*add-site DIR virginia --renew"):
        Credentials.load(own, site="virginia")
    reissue(own, "sites/virginia", "virginia", now() + 2 * DAY, now() + 9 * DAY)
    with pytest.raises(CredentialsError, match=f"not valid before {now() + 2 * DAY:%Y-%m-%d}.*clock"):
        Credentials.load(own, site="virginia")
    reissue(own, "server", certificates.SERVER_SUBJECT, now() - 9 * DAY, now() - DAY, ["a.org"])
    with pytest.raises(CredentialsError, match="renew-server DIR"):
        Credentials.load(own, server=True)


def test_a_certificate_of_somebody_else(made: Path) -> None:
    with pytest.raises(CredentialsError, match="is of 'virginia'; wanted that of site oregon"):
        Credentials.load(made / "sites" / "virginia", site="oregon")
    with pytest.raises(CredentialsError, match="is of 'virginia'; wanted that of the global server"):
        Credentials.load(made / "sites" / "virginia", server=True)
    with pytest.raises(CredentialsError, match="is of 'weightgrad global server'; wanted that of a site"):
        Credentials.load(made / "server")


def test_a_key_of_another_certificate(own: Path) -> None:
    shutil.copy2(own / "sites/site_2-b/key.pem", own / "sites/virginia/key.pem")
    with pytest.raises(CredentialsError, match=r"key\.pem is not the key of .*cert\.pem"):
        Credentials.load(own, site="virginia")


def test_a_certificate_of_another_ca(own: Path, tmp_path: Path) -> None:
    certificates.create(tmp_path / "other", [], ["virginia"])
    ours, other = own / "sites/virginia/ca.pem", tmp_path / "other" / "ca.pem"
    both = other.read_bytes() + ours.read_bytes()
    ours.write_bytes(other.read_bytes())
    with pytest.raises(CredentialsError, match=r"not signed by .*ca\.pem; wanted both from one CA"):
        Credentials.load(own, site="virginia")
    ours.write_bytes(both)
    assert Credentials.load(own, site="virginia").ca == both


def test_a_ca_that_has_expired(own: Path) -> None:
    expire_ca(own)
    with pytest.raises(CredentialsError, match=r"virginia/ca\.pem expired on .*certs init"):
        Credentials.load(own, site="virginia")
    with pytest.raises(CredentialsError, match=r"ca\.pem expired on .*certs init"):
        certificates.add_site(own, "oregon")


def test_a_list_is_read_only_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "revoked.txt"
    path.write_text("0a\n")
    os.utime(path, ns=(1, 1))
    revoked = Revoked(path)
    with path.open("r+") as file:
        file.write("0b")
    os.utime(path, ns=(1, 1))
    assert revoked.has(10)
    os.utime(path, ns=(2, 2))
    assert not revoked.has(10)
    assert revoked.has(11)


def test_a_list_that_cannot_be_trusted_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "revoked.txt"
    with pytest.raises(CredentialsError, match=r"cannot read .*empty, if nobody was revoked"):
        Revoked(path)
    path.write_text("# all well\n\n  \n0a # x\n")
    revoked = Revoked(path)
    assert revoked.has(10)
    path.write_text("0a\nvirginia\n")
    for _ in range(2):
        with pytest.raises(CredentialsError, match=r"revoked\.txt:2: 'virginia'; wanted a serial in hex"):
            revoked.has(10)
    path.unlink()
    with pytest.raises(CredentialsError, match="cannot read"):
        revoked.has(10)


def test_serial_and_name_of_what_a_peer_shows(made: Path) -> None:
    pem = (made / "sites/virginia/cert.pem").read_bytes()
    assert credentials.name_of(pem) == "virginia"
    assert credentials.serial_of(pem) == parsed(made / "sites/virginia/cert.pem").serial_number
    for read in (credentials.name_of, credentials.serial_of, credentials.expires_of):
        with pytest.raises(CredentialsError, match="not a certificate in PEM"):
            read(b"nothing")


def test_a_server_and_a_client_know_each_other(made: Path, tmp_path: Path) -> None:
    certificates.create(tmp_path / "other", [], ["virginia"])
    ours, other = Credentials.load(made, site="virginia"), Credentials.load(tmp_path / "other", site="virginia")
    # trusts our server, but shows a certificate of another CA
    stranger = Credentials(ours.ca, other.certificate, other.key, other.directory)
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_secure_port("127.0.0.1:0", Credentials.load(made, server=True).for_server())
        server.start()
        try:
            assert not fails(port, ours.for_client())
            assert fails(port, other.for_client())
            assert fails(port, stranger.for_client())
            assert fails(port, grpc.ssl_channel_credentials(ours.ca))
        finally:
            server.stop(None).wait()


def fails(port: int, shown: grpc.ChannelCredentials) -> bool:
    """Whether a call does not even reach the server, which has no methods."""
    with grpc.secure_channel(f"127.0.0.1:{port}", shown) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/none/none")(b"", timeout=10)
        return bool(caught.value.code() != grpc.StatusCode.UNIMPLEMENTED)
