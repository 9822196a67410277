"""What is said about a TLS connection that fails, by servers that make it fail."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from weightgrad.runtime.security import certificates, tls_check
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.security.pem import certificate_pem, key_pem
from weightgrad.runtime.security.tls_check import diagnose

from ..certificates import DAY, expire_ca, now, reissue, unchecked
from ..certificates import fixture_made as fixture_made
from ..certificates import fixture_own as fixture_own


@contextmanager
def grpc_server(directory: Path, *, demand: bool = True) -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    pair = (directory / "key.pem").read_bytes(), (directory / "cert.pem").read_bytes()
    ca = (directory / "ca.pem").read_bytes() if demand else None
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], ca, require_client_auth=demand))
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@contextmanager
def tcp_server(result: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server of our own, for what gRPC does not do; answers one connection after another."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.settimeout(5)
                    result(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def tls(directory: Path, *, alpn: str = "h2", crl: bytes = b"") -> Callable[[socket.socket], None]:
    """A TLS server that, unlike gRPC, says in an alert why it refuses a client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    context.load_verify_locations(directory / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([alpn])
    if crl:
        (directory / "crl.pem").write_bytes(crl)
        context.load_verify_locations(directory / "crl.pem")
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF

    def result(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(1024)
            secure.sendall(b"settings")

    return result


@pytest.fixture(scope="module")
def port(made: Path) -> Iterator[int]:
    with grpc_server(made / "server") as number:
        yield number


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_diagnose_good(made: Path, port: int, host: str) -> None:
    site = Credentials.load(made, site="virginia")
    assert diagnose(f"{host}:{port}", site) is None
    with grpc.secure_channel(f"{host}:{port}", site.for_client()) as channel:
        grpc.channel_ready_future(channel).result(10)


def test_diagnose_after_a_rotation_old_and_new_are_good(own: Path) -> None:
    old = Credentials.load(own, site="virginia")
    certificates.add_site(own, "virginia", renew=True)
    with grpc_server(own / "server") as port:
        assert diagnose(f"127.0.0.1:{port}", old) is None
        assert diagnose(f"127.0.0.1:{port}", Credentials.load(own, site="virginia")) is None


def test_diagnose_without_a_certificate(made: Path, port: int) -> None:
    assert "demands a certificate and we have none" in str(diagnose(f"127.0.0.1:{port}", None))
    with grpc_server(made / "server", demand=False) as open_port:
        assert diagnose(f"127.0.0.1:{open_port}", None) is None


def test_diagnose_a_server_of_another_ca(port: int, tmp_path: Path) -> None:
    certificates.create(tmp_path / "other", [], ["virginia"])
    said = diagnose(f"127.0.0.1:{port}", Credentials.load(tmp_path / "other", site="virginia"))
    assert "is signed by CN=weightgrad CA" in str(said)
    assert "not by our CA (CN=weightgrad CA" in str(said)


def test_diagnose_a_client_of_another_ca(made: Path, port: int, tmp_path: Path) -> None:
    certificates.create(tmp_path / "other", [], ["virginia"])
    shutil.copy(made / "ca.pem", tmp_path / "other/sites/virginia/ca.pem")
    stranger = unchecked(tmp_path / "other/sites/virginia")
    said = str(diagnose(f"127.0.0.1:{port}", stranger))
    assert f"does not accept our certificate of 'virginia' (serial {stranger.serial:x})" in said
    assert "most likely the server trusts another CA" in said
    with tcp_server(tls(made / "server")) as honest:
        said = str(diagnose(f"127.0.0.1:{honest}", stranger))
    assert "most likely" not in said
    assert "UNKNOWN_CA" in said


@pytest.mark.parametrize(("begins", "ends", "why"), [(-9, -2, "it expired on"), (2, 9, "it is not valid before")])
def test_diagnose_a_client_out_of_its_dates(own: Path, port: int, begins: int, ends: int, why: str) -> None:
    reissue(own, "sites/virginia", "virginia", now() + begins * DAY, now() + ends * DAY)
    late = unchecked(own / "sites/virginia")
    date = now() + (ends if ends < 0 else begins) * DAY
    assert f"{why} {date:%Y-%m-%d}" in str(diagnose(f"127.0.0.1:{port}", late))
    with tcp_server(tls(own / "server")) as honest:
        assert f"{why} {date:%Y-%m-%d}" in str(diagnose(f"127.0.0.1:{honest}", late))


def test_diagnose_a_server_used_as_a_client(made: Path, port: int) -> None:
    assert "does not accept our certificate of 'weightgrad global" in str(
        diagnose(f"127.0.0.1:{port}", unchecked(made / "server"))
    )


def test_diagnose_a_site_used_as_a_server(made: Path) -> None:
    with grpc_server(made / "sites" / "virginia") as port:
        said = diagnose(f"127.0.0.1:{port}", Credentials.load(made, site="virginia"))
    assert "cannot be trusted" in str(said)


def test_diagnose_a_client_on_a_revocation_list(own: Path) -> None:
    authority, site = certificates._Authority.load(own), Credentials.load(own, site="virginia")
    entry = x509.RevokedCertificateBuilder().serial_number(site.serial).revocation_date(now()).build()
    builder = x509.CertificateRevocationListBuilder(authority.certificate.subject, now() - DAY, now() + DAY)
    signed = builder.add_revoked_certificate(entry).sign(authority.key, hashes.SHA256())
    crl = signed.public_bytes(serialization.Encoding.PEM)
    with tcp_server(tls(own / "server", crl=crl)) as port:
        assert "it is revoked; run `weightgrad certs add-site DIR virginia --renew`" in str(
            diagnose(f"127.0.0.1:{port}", site)
        )
        assert diagnose(f"127.0.0.1:{port}", Credentials.load(own, site="site_2-b")) is None
        assert "demands a certificate" in str(diagnose(f"127.0.0.1:{port}", None))


def test_diagnose_a_server_out_of_its_dates(own: Path) -> None:
    site = Credentials.load(own, site="virginia")
    with ExitStack() as stack:
        ports = []
        for begins, ends in ((-9, -2), (2, 9)):
            reissue(own, "server", "server", now() + begins * DAY, now() + ends * DAY, ["localhost"])
            ports.append(stack.enter_context(grpc_server(own / "server")))
        late, early = (str(diagnose(f"127.0.0.1:{port}", site)) for port in ports)
    assert f"expired on {now() - 2 * DAY:%Y-%m-%d}" in late
    assert "renew-server" in late
    assert f"is not valid before {now() + 2 * DAY:%Y-%m-%d}" in early


def test_diagnose_a_ca_out_of_its_dates(own: Path) -> None:
    expire_ca(own)
    with grpc_server(own / "server") as port:
        said = diagnose(f"127.0.0.1:{port}", unchecked(own / "sites/virginia"))
    assert "the CA of 127.0.0.1" in str(said)


def test_diagnose_a_name_that_the_server_has_not(own: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    authority, names = certificates._Authority.load(own), [x509.DNSName("global.example.org")]
    ends = now() + DAY
    elsewhere = certificates._certificate("s", key, authority, begins=now() - DAY, ends=ends, alternatives=names)
    (own / "server/cert.pem").write_bytes(certificate_pem(elsewhere))
    (own / "server/key.pem").write_bytes(key_pem(key))
    site = Credentials.load(own, site="virginia")
    with grpc_server(own / "server") as port:
        for host in ("127.0.0.1", "localhost"):
            said = str(diagnose(f"{host}:{port}", site))
            assert f"certificate of {host}:{port} is not for this name but for global.example.org" in said


def test_diagnose_where_nothing_listens(made: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        said = diagnose(f"127.0.0.1:{closed.getsockname()[1]}", Credentials.load(made, site="virginia"))
    assert "nothing listens there" in str(said)


def test_diagnose_what_cannot_be_connected(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, said in (
        (socket.gaierror(-2, "Name or service not known"), "the name global.example.org cannot be resolved (Name or"),
        (TimeoutError("timed out"), "did not answer within 5 s; look for a firewall"),
        (OSError(113, "No route to host"), "cannot be reached: No route to host"),
    ):

        def fail(*_: object, error: OSError = error) -> socket.socket:
            raise error

        monkeypatch.setattr(socket, "create_connection", fail)
        assert said in str(diagnose("global.example.org:50051", None))


@pytest.mark.parametrize(
    "address", ["", "a", "a:", ":1", "a:b", "a:0", "a:65536", "::1:5", "a b:5", "a..b:5", "x://a:5"]
)
def test_diagnose_what_is_no_address(address: str) -> None:
    assert "is not an address; write host:port" in str(diagnose(address, None))


def test_addresses() -> None:
    assert tls_check.split("[::1]:50051") == ("::1", 50051)
    assert tls_check.split("global.example.org:50051") == ("global.example.org", 50051)
    assert tls_check.split("10.0.0.1:1") == ("10.0.0.1", 1)


def test_diagnose_a_server_that_is_not_ours(made: Path) -> None:
    site = Credentials.load(made, site="virginia")
    with tcp_server(tls(made / "server", alpn="http/1.1")) as port:
        assert "not a gRPC server" in str(diagnose(f"127.0.0.1:{port}", site))
    with tcp_server(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as port:
        assert "does not answer as a TLS server" in str(diagnose(f"127.0.0.1:{port}", site))
    with tcp_server(lambda connection: None) as port:
        assert "does not answer as a TLS server" in str(diagnose(f"127.0.0.1:{port}", site))
    with tcp_server(lambda connection: [connection.recv(9999), connection.recv(1)]) as port:
        assert "sent nothing for 0.2 s" in str(diagnose(f"127.0.0.1:{port}", site, timeout=0.2))


def test_diagnose_a_plain_grpc_server(made: Path) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        said = diagnose(f"127.0.0.1:{port}", Credentials.load(made, site="virginia"))
    finally:
        server.stop(None).wait()
    assert "does not answer as a TLS server" in str(said)


def test_diagnose_with_a_certificate_that_openssl_refuses(made: Path) -> None:
    site = Credentials.load(made, site="virginia")
    other = (made / "server" / "key.pem").read_bytes()
    mixed = Credentials(site.ca, site.certificate, other, site.directory)
    assert "our own certificate cannot be used" in str(diagnose("127.0.0.1:1", mixed))
