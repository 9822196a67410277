"""Every check of `doctor`: one test in which it is content, and one that makes it complain."""

from __future__ import annotations

import errno
import json
import re
import socket
import ssl
import threading
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import distributed
from typer.testing import CliRunner

from weightgrad.cli import app
from weightgrad.runtime.doctor import site_checks
from weightgrad.runtime.doctor.site_checks import Finding, Level
from weightgrad.runtime.security import certificates
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.transport.grpc_server import GrpcServer


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    certificates.create(directory, ["localhost", "127.0.0.1"], ["east"], days=400)
    return directory


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_name() -> None:
    assert site_checks.check_name("localhost:7443").level is Level.OK
    assert site_checks.check_name("no-such-host.invalid:7443").level is Level.FAILURE
    assert "HOST:PORT" in site_checks.check_name("localhost").text


def test_port(closed_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert site_checks.check_port(address).level is Level.OK
        assert site_checks.check_port(address, far_seconds=0.0).level is Level.WARNING
    assert "nothing listens" in site_checks.check_port(f"127.0.0.1:{closed_port}").text
    assert site_checks.check_port("nonsense").level is Level.FAILURE


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (TimeoutError(), "does not answer in 5 s; look for a firewall"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "cannot be reached: Network is unreachable; look at"),
    ],
)
def test_a_port_behind_a_network_that_is_broken(error: OSError, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    found = site_checks.check_port("gs.example.net:7443")
    assert found.level is Level.FAILURE
    assert wanted in found.text


def test_tls(certs: Path, tmp_path: Path) -> None:
    server = GrpcServer("127.0.0.1:0", credentials=Credentials.load(certs, server=True).for_server())
    server.start(cast("Any", None))
    try:
        address = f"127.0.0.1:{server.port}"
        assert site_checks.check_tls(address, Credentials.load(certs, site="east")).level is Level.OK
        certificates.create(tmp_path, ["localhost"], ["east"])
        stranger = site_checks.check_tls(address, Credentials.load(tmp_path, site="east"))
        assert stranger.level is Level.FAILURE
        assert "signed" in stranger.text
        nobody = site_checks.check_tls(address, None)
        assert nobody.level is Level.FAILURE
        assert "demands a certificate" in nobody.text
    finally:
        server.stop(0.0)


def test_tls_that_asks_nobody_for_a_certificate(certs: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs / "server" / "cert.pem", certs / "server" / "key.pem")
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as line:
                line.sendall(b"settings")
                line.recv(1)

        answering = threading.Thread(target=answer)
        answering.start()
        found = site_checks.check_tls(f"127.0.0.1:{listener.getsockname()[1]}", None)
        answering.join()
    assert found.level is Level.WARNING, found.text
    assert "--credentials" in found.text


def test_tls_of_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert site_checks.check_tls(address, None, timeout=0.2).level is Level.FAILURE


def test_certificate(certs: Path) -> None:
    own, now = Credentials.load(certs, site="east"), datetime.now(timezone.utc)
    assert site_checks.check_certificate(own).level is Level.OK
    assert site_checks.check_certificate(own, now + timedelta(days=390)).level is Level.WARNING
    expired = site_checks.check_certificate(own, now + timedelta(days=401))
    assert expired.level is Level.FAILURE
    assert "--renew" in expired.text


def test_missing_certificates(tmp_path: Path) -> None:
    found = site_checks.load_credentials(tmp_path)
    assert isinstance(found, Finding)
    assert found.level is Level.FAILURE
    told = CliRunner().invoke(app, ["doctor", "--no-ranks", "--json", "--credentials", str(tmp_path)])
    assert told.exit_code == 1
    assert [one["level"] for one in json.loads(told.stdout)["checks"] if one["check"] == "certificate"] == ["failure"]


def test_proxy() -> None:
    assert site_checks.check_proxy({}).level is Level.OK
    assert site_checks.check_proxy({"HTTPS_PROXY": "http://proxy:3128"}).level is Level.WARNING


def test_disk(tmp_path: Path) -> None:
    assert site_checks.check_disk(tmp_path / "state", slow_bytes_s=0.0).level is Level.OK
    assert site_checks.check_disk(tmp_path, slow_bytes_s=1e18).level is Level.WARNING
    assert site_checks.check_disk(tmp_path, needed_bytes=1e21).level is Level.FAILURE
    (tmp_path / "file").write_text("")
    assert site_checks.check_disk(tmp_path / "file" / "state").level is Level.FAILURE


def test_memory() -> None:
    assert site_checks.check_memory(0).level is Level.OK
    assert site_checks.check_memory(1e9, lambda: 2e9).level is Level.OK
    assert site_checks.check_memory(3e9, lambda: 2e9).level is Level.FAILURE
    assert site_checks.check_memory(1e9, lambda: None).level is Level.WARNING


def test_kernels() -> None:
    assert site_checks.check_kernels("native").level is Level.OK
    assert site_checks.check_kernels("reference").level is Level.WARNING


def test_backend() -> None:
    assert site_checks.check_backend().level is Level.OK
    assert site_checks.check_backend(lambda: False).level is Level.FAILURE


def test_a_torch_without_nccl_or_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    assert "no Gloo" in site_checks.check_backend().text
    assert site_checks.check_backend().level is Level.FAILURE
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    assert site_checks.check_backend().level is Level.WARNING
    assert "no NCCL" in site_checks.check_backend().text


def test_a_system_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *given: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", fail)
    assert site_checks.check_memory(0).level is Level.WARNING


def test_the_document_names_every_check() -> None:
    """The rows of the table in docs/doctor.md are what the code can complain of."""
    root = Path(__file__).parents[2]
    code = "".join(path.read_text() for path in (root / "weightgrad/runtime/doctor").glob("*.py"))
    complaints = r"(?:_failure|_warning)\(\s*\"([\w ]+)\"|Finding\(\s*\"([\w ]+)\",\s*Level\.(?:WARNING|FAILURE)"
    named = {first or second for first, second in re.findall(complaints, code)} | {"up", "down"}
    table = (root / "docs/doctor.md").read_text().partition("| check |")[2].partition("\n\n")[0]
    rows = {name for row in table.splitlines()[2:] for name in row.split("|")[1].strip().split(", ")}
    assert named == rows


def test_the_command_ends_with_1_if_something_fails(closed_port: int, certs: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{closed_port}"
    options = ["--server", address, "--credentials", str(certs), "--site", "east", "--state", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, ["doctor", "--no-ranks", *options])
    assert done.exit_code == 1, done.output
    found = {one["check"]: one["level"] for one in json.loads(done.stdout)["checks"]}
    assert found["port"] == "failure"
    assert found["certificate"] == found["name"] == "ok"
    assert "TLS" not in found


def test_the_command_alone_looks_at_this_machine() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "kernels" in done.output
    assert "memory" in done.output
    assert done.output.splitlines()[-1] == "3 checks: all ok"


def test_the_last_line_counts_what_was_found(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    done = CliRunner().invoke(app, ["doctor", "--no-ranks", "--server", f"127.0.0.1:{closed_port}"])
    assert done.exit_code == 1, done.output
    assert done.output.splitlines()[-1] == "6 checks: 1 failure, 1 warning"
