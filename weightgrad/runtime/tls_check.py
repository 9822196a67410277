"""Why a TLS connection to the global server fails, in a sentence."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import ssl
import tempfile

from cryptography import x509

from weightgrad.errors import CredentialsError
from weightgrad.runtime.credentials import Credentials
from weightgrad.runtime.issue import alternative_names
from weightgrad.runtime.pem import parse, utc, utc_now

# The connection preface of RFC 9113, section 3.4, and an empty SETTINGS frame.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def diagnose(address: str, credentials: Credentials | None, timeout: float = 5.0) -> str | None:
    """Why TLS to the gRPC server at `address` ("host:port") would fail, in a sentence; None if it would not.

    gRPC itself says only "failed to connect", and a gRPC server hangs up on a certificate it does not accept
    without the alert of RFC 8446, so the reason is then read from our own certificate. Without credentials the
    server is not verified. A site that the server turns away by name or serial passes here: that is not TLS.
    """
    if (place := split(address)) is None:
        return f"{address!r} is not an address; write host:port, such as global.example.org:50051"
    host, port = place
    try:
        context = _context(credentials)
    except ssl.SSLError as error:
        return f"our own certificate cannot be used for TLS ({error.reason or error}); make a new one"
    try:
        raw = socket.create_connection((host, port), timeout)
    except socket.gaierror as error:
        return f"the name {host} cannot be resolved ({error.strerror}); correct it, or look at the DNS of this machine"
    except ConnectionRefusedError:
        return f"{address} refuses connections: nothing listens there; start the global server, or correct the port"
    except TimeoutError:
        return f"{address} did not answer within {timeout:g} s; look for a firewall between here and there"
    except OSError as error:
        return f"{address} cannot be reached: {error.strerror or error}"
    agreed = False
    try:
        with raw, context.wrap_socket(raw, server_hostname=host) as secure:
            if secure.selected_alpn_protocol() != "h2":
                return f"{address} speaks TLS but not HTTP/2: it is not a gRPC server; correct the address"
            agreed = True
            # In TLS 1.3 the server judges our certificate after our side of the handshake is done, so its verdict
            # comes with the first read. It may have hung up already; what it said before can still be read.
            with contextlib.suppress(OSError):
                secure.sendall(HTTP2_PREFACE)
            return None if secure.recv(1) else _turned_away(address, "", credentials)
    except ssl.SSLCertVerificationError as error:
        return _mistrusted(address, error, credentials, _peer(host, port, timeout))
    except TimeoutError:
        return (
            f"{address} accepted the connection but said nothing for {timeout:g} s; it is stuck, or does not speak TLS"
        )
    except OSError as error:
        reason = getattr(error, "reason", None) or ""
        if agreed or "ALERT" in reason:
            return _turned_away(address, reason, credentials)
        return (
            f"{address} does not answer as a TLS server ({reason or error}): it may run without TLS, or be another "
            "service; correct the address, or start the global server with certificates"
        )


def refuses(why: str) -> bool:
    """Whether what `diagnose` said is about certificates, so that trying again is of no use."""
    marks = ("our certificate", "our own certificate", "demands a certificate", "the certificate of", "the CA of")
    return any(mark in why for mark in marks)


def _turned_away(address: str, reason: str, credentials: Credentials | None) -> str:
    """Why the server hung up: by its TLS alert, else by what is wrong with our certificate, else by likelihood."""
    if "PROTOCOL" in reason:
        return f"{address} does not speak TLS as gRPC does ({reason}); correct the address"
    if credentials is None:
        return f"{address} demands a certificate and we have none; give those of this site"
    certificate, now = parse(credentials.certificate), utc_now()
    ours = f"{address} does not accept our certificate of {credentials.subject!r} (serial {credentials.serial:x})"
    renew = f"run `weightgrad certs add-site DIR {credentials.subject} --renew` and copy the result here"
    if "REVOKED" in reason:
        return f"{ours}: it is revoked; {renew}"
    if credentials.expires < now:
        return f"{ours}: it expired on {utc(credentials.expires)}; {renew}"
    if "EXPIRED" in reason:
        return f"{ours}: it says expired, yet it is good until {utc(credentials.expires)}; look at the server's clock"
    if certificate.not_valid_before_utc > now:
        return f"{ours}: it is not valid before {utc(certificate.not_valid_before_utc)}; look at this machine's clock"
    likely = "" if "UNKNOWN_CA" in reason else "most likely "
    issuer = certificate.issuer.rfc4514_string()
    return (
        f"{ours}: {likely}the server trusts another CA than {issuer}, which signed it; make the certificates of the "
        f"server and of all sites in one directory{f' ({reason})' if reason else ''}"
    )


def _mistrusted(
    address: str, error: ssl.SSLCertVerificationError, credentials: Credentials | None, peer: x509.Certificate | None
) -> str:
    """Why we do not accept the server's certificate, by OpenSSL's verdict (X509_V_ERR_*)."""
    its, renew = f"the certificate of {address}", "run `weightgrad certs renew-server` and copy the result there"
    code = error.verify_code
    if code == 10 and peer and peer.not_valid_after_utc > utc_now():
        return f"the CA of {address} expired; run `weightgrad certs init` in a new directory and copy from there to all"
    if code == 10:
        return f"{its} expired{f' on {utc(peer.not_valid_after_utc)}' if peer else ''}; {renew}"
    if code == 9:
        begins = f" before {utc(peer.not_valid_before_utc)}" if peer else ""
        return f"{its} is not valid{begins or ' yet'}; look at the clocks of both machines"
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
    """Whether HOST:PORT is on this machine: what may be used without certificates."""
    host = address.rpartition(":")[0]
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split(address: str) -> tuple[str, int] | None:
    """Host and port; None unless they are both there and well formed."""
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
    # `ssl` takes a key only from a file; this one is readable by its owner alone and gone in an instant.
    with tempfile.NamedTemporaryFile() as file:
        file.write(credentials.certificate + b"\n" + credentials.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _peer(host: str, port: int, timeout: float) -> x509.Certificate | None:
    """The server's certificate, whoever signed it; only to be told about."""
    try:
        with (
            socket.create_connection((host, port), timeout) as raw,
            _context(None).wrap_socket(raw, server_hostname=host) as secure,
        ):
            return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError):
        return None


def _names(certificate: x509.Certificate | None) -> str:
    """The names a server's certificate is for."""
    if certificate is None:
        return "others"
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return "none"
    return ", ".join(str(name.value) for name in found)
