"""Makes, renews and revokes the certificates for mutual TLS.

One directory holds everything; each machine needs one subdirectory of it:

    DIR/ca.pem, ca-key.pem                         the certificate authority (CA); its key stays here, offline
    DIR/server/{ca,cert,key}.pem, revoked.txt      for the global server
    DIR/sites/NAME/{ca,cert,key}.pem               for the site NAME, which is also its certificate's common name
    DIR/operators/NAME/{ca,cert,key}.pem           for a person who may change a run (`weightgrad sites`, `run`)

Keys are EC P-256. A certificate is valid for one direction only (extended key usage, RFC 5280), so a site
cannot pose as the global server. Revocation is a list of serial numbers that the server reads, not a CRL: gRPC
for Python cannot check a CRL.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from weightgrad.errors import CredentialsError
from weightgrad.runtime.security.credentials import CLIENT, SERVER, Revoked, check_dates, expires_of, serial_of
from weightgrad.runtime.security.pem import (
    certificate_pem,
    check_site,
    folder,
    key_pem,
    parse,
    parse_key,
    read,
    utc_now,
    write,
)
from weightgrad.runtime.security.pem import (
    operators as operators,
)
from weightgrad.runtime.security.pem import (
    sites as sites,
)

# No site can have this name, because it has spaces.
SERVER_SUBJECT = "weightgrad global server"
OPERATOR_SUBJECT = "weightgrad operator "
"""The common name of an operator begins so. It has spaces, too."""
LOCAL = ("localhost", "127.0.0.1", "::1")
# The clocks of two data centers may differ.
CLOCK_SKEW = timedelta(hours=1)
# digital_signature, content_commitment, key_encipherment, data_encipherment, key_agreement, key_cert_sign, crl_sign,
# encipher_only, decipher_only
_CA_USAGE = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
_END_USAGE = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"


def create(
    directory: Path, server_names: Sequence[str], sites: Sequence[str], *, days: int = 825, ca_days: int = 3650
) -> None:
    """Make a CA, a certificate for the global server, and one for every site.

    Args:
        directory: where; must not have a CA yet.
        server_names: DNS names and IP addresses of the global server.
        sites: the names of the sites.
        days: how long the certificates are valid.
        ca_days: how long the CA is valid.

    Raises:
        CredentialsError: the directory has a CA, or a name is invalid.
    """
    for name in ("ca.pem", "ca-key.pem", "server", "sites"):
        if (directory / name).exists():
            raise CredentialsError(
                f"{directory / name} exists; wanted a directory without a CA, whose certificates a new one would make "
                "worthless; use `weightgrad certs add-site` or `renew-server`, or another directory"
            )
    alternatives = alternative_names(server_names)
    for name in sites:
        check_site(name)
    if len(set(sites)) < len(sites):
        raise CredentialsError(f"sites {', '.join(sites)}: a name comes twice; give every site its own")
    key = ec.generate_private_key(ec.SECP256R1())
    begins, ends = _validity(ca_days)
    _validity(days)
    certificate = _certificate(f"weightgrad CA {secrets.token_hex(4)}", key, None, begins=begins, ends=ends)
    write(directory / "ca-key.pem", key_pem(key), private=True)
    write(directory / "ca.pem", certificate_pem(certificate))
    authority = _Authority(certificate, key)
    write(directory / "server" / "revoked.txt", b"# serial of a revoked certificate, in hex  # whose\n")
    _issue(authority, directory / "server", SERVER_SUBJECT, days, alternatives)
    folder(directory / "sites")
    for name in sites:
        _issue(authority, directory / "sites" / name, name, days)


def add_site(directory: Path, name: str, *, renew: bool = False, days: int = 825) -> None:
    """Make a certificate for a new site or, with `renew`, a new key and certificate for an existing one.

    The old certificate stays valid until it expires; to end it sooner, `revoke` it before renewing.

    Raises:
        CredentialsError: the site exists and `renew` is not set, or the other way round.
    """
    check_site(name)
    there = sites(directory)
    if name in there and not renew:
        raise CredentialsError(f"site {name} exists in {directory}; wanted a new name; give --renew to replace it")
    if renew and name not in there:
        raise CredentialsError(f"no site {name} to renew in {directory}; there are: {', '.join(there) or 'none'}")
    _issue(_Authority.load(directory), directory / "sites" / name, name, days)


def add_operator(directory: Path, name: str, *, renew: bool = False, days: int = 825) -> None:
    """Make a certificate for an operator or, with `renew`, a new key and certificate for an existing one.

    Raises:
        CredentialsError: the operator exists and `renew` is not set, or the other way round.
    """
    check_site(name)
    there = operators(directory)
    if name in there and not renew:
        raise CredentialsError(f"operator {name} exists in {directory}; wanted a new name; give --renew to replace it")
    if renew and name not in there:
        raise CredentialsError(f"no operator {name} to renew in {directory}; there are: {', '.join(there) or 'none'}")
    _issue(_Authority.load(directory), directory / "operators" / name, OPERATOR_SUBJECT + name, days)


def is_operator(name: str | None) -> bool:
    """Whether the common name of a certificate is that of an operator."""
    return name is not None and name.startswith(OPERATOR_SUBJECT)


def renew_server(directory: Path, names: Sequence[str], *, days: int = 825) -> None:
    """Make a new key and certificate for the global server with these DNS names and IP addresses."""
    _issue(_Authority.load(directory), directory / "server", SERVER_SUBJECT, days, alternative_names(names))


def revoke(directory: Path, name: str, *, operator: bool = False) -> int:
    """Add the serial number of a site's or an operator's current certificate to the server's list, and return it."""
    kind, there = ("operator", operators(directory)) if operator else ("site", sites(directory))
    if name not in there:
        raise CredentialsError(f"no {kind} {name!r} in {directory}; there are: {', '.join(there) or 'none'}")
    pem = read(directory / f"{kind}s" / name / "cert.pem")
    serial, path = serial_of(pem), directory / "server" / "revoked.txt"
    if not Revoked(path).has(serial):
        lines = path.read_bytes()
        ended = b"" if not lines or lines.endswith(b"\n") else b"\n"
        comment = f"{name}, revoked {utc_now():%Y-%m-%d}, expires {expires_of(pem):%Y-%m-%d}"
        write(path, lines + ended + f"{serial:x}  # {comment}\n".encode())
    return serial


def alternative_names(names: Sequence[str]) -> list[x509.GeneralName]:
    """The names of a server and of the loopback interface, each as an IP address or a DNS name."""
    found: list[x509.GeneralName] = []
    for name in dict.fromkeys([*names, *LOCAL]):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            # A last label of digits only is a mistyped address.
            if len(name) > 253 or not re.fullmatch(rf"(?:{_LABEL}\.)*(?!\d+$){_LABEL}", name):
                wanted = "wanted a DNS name or an IP address, without a port"
                raise CredentialsError(f"server name {name!r}; {wanted}; correct it") from None
            found.append(x509.DNSName(name))
    return found


@dataclass(frozen=True)
class _Authority:
    """The certificate and the key of the CA."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @classmethod
    def load(cls, directory: Path) -> _Authority:
        path = directory / "ca-key.pem"
        certificate = parse(read(directory / "ca.pem"), directory / "ca.pem")
        if not path.exists():
            raise CredentialsError(f"no {path}, which signs; bring it back from where it is kept, then run this again")
        key = parse_key(read(path, private=True), path)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise CredentialsError(f"{path} is not the key of {directory / 'ca.pem'}; bring back the one made with it")
        check_dates(certificate, directory / "ca.pem", "run `weightgrad certs init` in a new directory")
        return cls(certificate, key)


def _issue(
    authority: _Authority, directory: Path, name: str, days: int, alternatives: Sequence[x509.GeneralName] = ()
) -> None:
    """Write a new key and certificate into `directory`; the certificate comes last and completes it."""
    begins, ends = _validity(days)
    # A certificate that outlives its CA is useless.
    begins = max(begins, authority.certificate.not_valid_before_utc)
    ends = min(ends, authority.certificate.not_valid_after_utc)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(name, key, authority, begins=begins, ends=ends, alternatives=alternatives)
    write(directory / "ca.pem", certificate_pem(authority.certificate))
    write(directory / "key.pem", key_pem(key), private=True)
    write(directory / "cert.pem", certificate_pem(certificate))


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    authority: _Authority | None,
    *,
    begins: datetime,
    ends: datetime,
    alternatives: Sequence[x509.GeneralName] = (),
) -> x509.Certificate:
    """Sign a CA (no authority), a server (with alternative names) or a site."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer = authority.key if authority else key
    is_ca = authority is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.certificate.subject if authority else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(_CA_USAGE if is_ca else _END_USAGE, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if not is_ca:
        builder = builder.add_extension(x509.ExtendedKeyUsage([SERVER if alternatives else CLIENT]), critical=False)
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _validity(days: int) -> tuple[datetime, datetime]:
    if not 1 <= days <= 36500:
        raise CredentialsError(f"a certificate valid for {days} days; wanted 1 to 36500; 825 is usual")
    return utc_now() - CLOCK_SKEW, utc_now() + timedelta(days=days)
