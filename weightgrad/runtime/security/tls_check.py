"""Finds out why a TLS connection to the global server fails, and says it in a sentence."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import ssl
import tempfile
from dataclasses import dataclass
from enum import Enum, auto

from cryptography import x509

from weightgrad.errors import CredentialsError
from weightgrad.runtime.security.certificates import alternative_names
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.security.pem import parse, utc, utc_now

# The connection preface of RFC 9113, section 3.4, and an empty SETTINGS frame.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class ProblemKind(Enum):
    """What stands in the way of a connection."""

    UNREACHABLE = auto()
    """Nothing answers at the address."""
    NOT_TLS = auto()
    """What answers does not speak TLS."""
    NOT_OUR_SERVER = auto()
    """What answers speaks TLS but is not a gRPC server."""
    CERTIFICATE = auto()
    """A certificate is missing, expired, of another CA or otherwise not accepted."""


@dataclass(frozen=True)
class TlsProblem:
    """Why a connection fails: for code (`kind`) and for people (`reason`)."""

    kind: ProblemKind
    reason: str

    @property
    def is_final(self) -> bool:
        """Whether trying again is of no use until somebody changes the certificates."""
        return self.kind is ProblemKind.CERTIFICATE

    def __str__(self) -> str:
        return self.reason


def diagnose(address: str, credentials: Credentials | None, timeout: float = 5.0) -> TlsProblem | None:
    """Find out why TLS to a gRPC server would fail.

    gRPC itself says only "failed to connect". A gRPC server that does not accept a certificate disconnects without
    the alert of RFC 8446, so the reason is then derived from the certificate. A site that the server refuses by
    name or serial number passes here: that happens after TLS.

    Args:
        address: the server's HOST:PORT.
        credentials: the site's certificates; without them the server is not verified.
        timeout: seconds to wait for the server.

    Returns:
        What is wrong; None if TLS would work.
    """
    if (place := split(address)) is None:
        return _unreachable(f"{address!r} is not an address; write host:port, such as global.example.org:50051")
    host, port = place
    try:
        context = _context(credentials)
    except ssl.SSLError as error:
        reason = f"our own certificate cannot be used for TLS ({error.reason or error}); make a new one"
        return TlsProblem(ProblemKind.CERTIFICATE, reason)
    try:
        raw = socket.create_connection((host, port), timeout)
    except socket.gaierror as error:
        return _unreachable(
            f"the name {host} cannot be resolved ({error.strerror}); correct it, or check the DNS of this machine"
        )
    except ConnectionRefusedError:
        return _unreachable(
            f"{address} refuses connections: nothing listens there; start the global server, or correct the port"
        )
    except TimeoutError:
        return _unreachable(
            f"{address} did not answer within {timeout:g} s; look for a firewall between here and there"
        )
    except OSError as error:
        return _unreachable(f"{address} cannot be reached: {error.strerror or error}")
    agreed = False
    try:
        with raw, context.wrap_socket(raw, server_hostname=host) as secure:
            if secure.selected_alpn_protocol() != "h2":
                reason = f"{address} speaks TLS but not HTTP/2: it is not a gRPC server; correct the address"
                return TlsProblem(ProblemKind.NOT_OUR_SERVER, reason)
            agreed = True
            # In TLS 1.3 the server checks our certificate after our side of the handshake is done, so its decision
            # comes with the first read. It may have disconnected already; what it sent before can still be read.
            with contextlib.suppress(OSError):
                secure.sendall(HTTP2_PREFACE)
            return None if secure.recv(1) else _not_accepted(address, "", credentials)
    except ssl.SSLCertVerificationError as error:
        reason = _not_trusted(address, error, credentials, _peer(host, port, timeout))
        return TlsProblem(ProblemKind.CERTIFICATE, reason)
    except TimeoutError:
        return _unreachable(
            f"{address} accepted the connection but sent nothing for {timeout:g} s; it is stuck, or does not speak TLS"
        )
    except OSError as error:
        alert = getattr(error, "reason", None) or ""  # a symbol of OpenSSL, such as TLSV1_ALERT_UNKNOWN_CA
        if agreed or "ALERT" in alert:
            return _not_accepted(address, alert, credentials)
        return TlsProblem(
            ProblemKind.NOT_TLS,
            f"{address} does not answer as a TLS server ({alert or error}): it may run without TLS, or be another "
            "service; correct the address, or start the global server with certificates",
        )


def _unreachable(reason: str) -> TlsProblem:
    return TlsProblem(ProblemKind.UNREACHABLE, reason)


def _not_accepted(address: str, alert: str, credentials: Credentials | None) -> TlsProblem:
    """The server disconnected during or right after the handshake; `alert` is OpenSSL's symbol for its TLS alert."""
    if "PROTOCOL" in alert:
        reason = f"{address} does not speak TLS as gRPC does ({alert}); correct the address"
        return TlsProblem(ProblemKind.NOT_OUR_SERVER, reason)
    return TlsProblem(ProblemKind.CERTIFICATE, _why_not_accepted(address, alert, credentials))


def _why_not_accepted(address: str, alert: str, credentials: Credentials | None) -> str:
    """By the alert if there is one, else by what is wrong with our certificate, else by what is most likely."""
    if credentials is None:
        return f"{address} demands a certificate and we have none; give the certificates of this site"
    certificate, now = parse(credentials.certificate), utc_now()
    ours = f"{address} does not accept our certificate of {credentials.subject!r} (serial {credentials.serial:x})"
    renew = f"run `weightgrad certs add-site DIR {credentials.subject} --renew` and copy the result here"
    if "REVOKED" in alert:
        return f"{ours}: it is revoked; {renew}"
    if credentials.expires < now:
        return f"{ours}: it expired on {utc(credentials.expires)}; {renew}"
    if "EXPIRED" in alert:
        return f"{ours}: it says expired, yet valid until {utc(credentials.expires)}; check the server's clock"
    if certificate.not_valid_before_utc > now:
        return f"{ours}: it is not valid before {utc(certificate.not_valid_before_utc)}; check this machine's clock"
    likely = "" if "UNKNOWN_CA" in alert else "most likely "
    issuer = certificate.issuer.rfc4514_string()
    return (
        f"{ours}: {likely}the server trusts another CA than {issuer}, which signed it; make the certificates of the "
        f"server and of all sites in one directory{f' ({alert})' if alert else ''}"
    )


def _not_trusted(
    address: str, error: ssl.SSLCertVerificationError, credentials: Credentials | None, peer: x509.Certificate | None
) -> str:
    """Why we do not trust the server's certificate, by the verify code of OpenSSL (X509_V_ERR_*)."""
    its, renew = f"the certificate of {address}", "run `weightgrad certs renew-server` and copy the result there"
    code = error.verify_code
    if code == 10 and peer and peer.not_valid_after_utc > utc_now():
        return f"the CA of {address} expired; run `weightgrad certs init` in a new directory and copy from there to all"
    if code == 10:
        return f"{its} expired{f' on {utc(peer.not_valid_after_utc)}' if peer else ''}; {renew}"
    if code == 9:
        begins = f" before {utc(peer.not_valid_before_utc)}" if peer else ""
        return f"{its} is not valid{begins or ' yet'}; check the clocks of both machines"
    if code in (62, 64):
        return f"{its} is not for this name but for {_names(peer)}; connect to one of these, or {renew}"
    if code in (2, 7, 18, 19, 20, 21):
        ours = parse(credentials.ca).subject.rfc4514_string() if credentials else "none"
        issuer = peer.issuer.rfc4514_string() if peer else "another"
        return (
            f"{its} is signed by {issuer}, not by our CA ({ours}); it is another server, or its certificates and ours "
            "were made in two directories: copy both from one"
        )
    return f"{its} cannot be trusted: {error.verify_message}; {renew}"


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is a loopback address, the only kind that may be used without certificates."""
    host = address.rpartition(":")[0]
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split(address: str) -> tuple[str, int] | None:
    """Split HOST:PORT; None unless both are there and well formed."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+)):(\d{1,5})", address)
    if found is None or not 0 < int(found[3]) < 65536:
        return None
    try:
        alternative_names([host := found[1] or found[2]])
    except CredentialsError:
        return None
    return host, int(found[3])


def _context(credentials: Credentials | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if credentials is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    context.load_verify_locations(cadata=credentials.ca.decode("ascii", "ignore"))
    # `ssl` takes a key only from a file; only its owner can read this one, and it is removed at once.
    with tempfile.NamedTemporaryFile() as file:
        file.write(credentials.certificate + b"\n" + credentials.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _peer(host: str, port: int, timeout: float) -> x509.Certificate | None:
    """The server's certificate, whoever signed it; only for the text of a problem."""
    try:
        with (
            socket.create_connection((host, port), timeout) as raw,
            _context(None).wrap_socket(raw, server_hostname=host) as secure,
        ):
            return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError):
        return None


def _names(certificate: x509.Certificate | None) -> str:
    """The names for which a server's certificate is valid."""
    if certificate is None:
        return "others"
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return "none"
    return ", ".join(str(name.value) for name in found)
