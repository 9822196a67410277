"""The certificates of one machine, loaded and checked; and the list of revoked ones.

`certificates.py` makes the directory and describes its layout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from weightgrad.errors import CredentialsError
from weightgrad.runtime.security.pem import MAKE, check_site, operators, parse, parse_key, read, sites, utc, utc_now

if TYPE_CHECKING:
    import grpc

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


def serial_of(pem: bytes) -> int:
    """The serial number of a certificate."""
    return parse(pem).serial_number


def name_of(pem: bytes) -> str:
    """The common name in a certificate, which is the name of the site."""
    return common_name(parse(pem))


def common_name(certificate: x509.Certificate) -> str:
    """The one common name of a certificate.

    Raises:
        CredentialsError: it has none, or several, or cannot be read.
    """
    try:
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError as error:
        raise CredentialsError(f"a certificate whose subject cannot be read ({error})") from None
    if len(names) != 1:
        raise CredentialsError(f"a certificate with {len(names)} common names; wanted one, the name of the site")
    return str(names[0].value)


def expires_of(pem: bytes) -> datetime:
    """When a certificate expires, in UTC."""
    return parse(pem).not_valid_after_utc


@dataclass(frozen=True)
class Credentials:
    """What one machine presents and trusts in mutual TLS, as PEM. `load` checks it."""

    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    directory: Path

    @classmethod
    def load(cls, path: Path, *, site: str | None = None, server: bool = False) -> Credentials:
        """Load and check certificates.

        Args:
            path: the machine's own directory, or the directory of all machines.
            site: the site whose certificates are wanted; needed with the directory of all machines.
            server: whether the certificates of the global server are wanted.

        Raises:
            CredentialsError: something is missing, expired, of somebody else, or does not fit together.
        """
        return cls._load(_place(path, site, server), site, server)

    @classmethod
    def load_operator(cls, path: Path, name: str | None = None) -> Credentials:
        """Load and check the certificates of an operator.

        Args:
            path: the operator's own directory, or the directory of all machines.
            name: the operator; needed where the directory of all machines has several.

        Raises:
            CredentialsError: something is missing, expired, of somebody else, or does not fit together.
        """
        there = operators(path)
        if not (path / "cert.pem").exists() and there:
            if name is None and len(there) > 1:
                raise CredentialsError(f"{path} has several operators; say which: {', '.join(there)}")
            path = path / "operators" / (name or there[0])
        return cls._load(_place(path, None, False), None, False)

    @classmethod
    def _load(cls, directory: Path, site: str | None, server: bool) -> Credentials:
        ca, pem = read(directory / "ca.pem"), read(directory / "cert.pem")
        key = read(directory / "key.pem", private=True, mounted=True)
        certificate, where = parse(pem, directory / "cert.pem"), directory / "cert.pem"
        purpose, wanted = (SERVER, "the global server") if server else (CLIENT, f"site {site}" if site else "a site")
        name = name_of(pem)
        if not _serves(certificate, purpose) or (not server and site not in (None, name)):
            raise CredentialsError(f"{where} is of {name!r}; wanted that of {wanted}; copy the right directory here")
        renew = "renew-server DIR --global-server NAMES" if server else f"add-site DIR {name} --renew"
        check_dates(certificate, where, f"run `weightgrad certs {renew}` and copy the result here")
        if parse_key(key, directory / "key.pem").public_key() != certificate.public_key():
            raise CredentialsError(f"{directory / 'key.pem'} is not the key of {where}; copy both again, together")
        _check_signed(certificate, where, ca, directory / "ca.pem")
        return cls(ca, pem, key, directory)

    @property
    def subject(self) -> str:
        """The common name, which is the name of the site."""
        return name_of(self.certificate)

    @property
    def serial(self) -> int:
        """The serial number of the certificate."""
        return serial_of(self.certificate)

    @property
    def expires(self) -> datetime:
        """When the certificate expires, in UTC."""
        return expires_of(self.certificate)

    def for_server(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC server that demands a certificate of our CA from every client."""
        import grpc  # here, because a process that trains must not need it

        pairs = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(pairs, root_certificates=self.ca, require_client_auth=True)

    def for_client(self) -> grpc.ChannelCredentials:
        """Credentials for a gRPC channel that presents our certificate and trusts only servers of our CA."""
        import grpc

        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


class Revoked:
    """The revoked serial numbers in a file: one a line, in hex; `#` starts a comment.

    The file is read again when it changes. A file that is missing or damaged raises CredentialsError: it is better
    to admit nobody than somebody whose certificate was revoked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._load()

    def has(self, serial: int) -> bool:
        """Whether the file, as it is now, has this serial number."""
        stamp, serials = self._seen
        if stamp != self._stamp():
            self._seen = _, serials = self._load()
        return serial in serials

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            remedy = "copy it from DIR/server, or make it, empty, if nobody was revoked"
            raise CredentialsError(f"cannot read {self._path}: {error.strerror}; {remedy}") from error
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _load(self) -> tuple[tuple[int, int, int], frozenset[int]]:
        # The stamp is taken before the file is read, so that a change in between is seen at the next call.
        stamp, serials = self._stamp(), set()
        for number, line in enumerate(read(self._path).decode(errors="replace").splitlines(), 1):
            if text := line.split("#")[0].strip().replace(":", ""):
                if not re.fullmatch("[0-9a-fA-F]+", text):
                    raise CredentialsError(f"{self._path}:{number}: {text!r}; wanted a serial in hex; correct the line")
                serials.add(int(text, 16))
        return stamp, frozenset(serials)


def check_dates(certificate: x509.Certificate, path: Path, remedy: str) -> None:
    """That a certificate has begun and not ended; `remedy` says what to do when it has ended."""
    begins, ends, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, utc_now()
    if now > ends:
        raise CredentialsError(f"{path} expired on {utc(ends)}, now is {utc(now)}; {remedy}")
    if now < begins:
        raise CredentialsError(f"{path} is not valid before {utc(begins)}, now is {utc(now)}; set the clock right")


def _place(path: Path, site: str | None, server: bool) -> Path:
    """The directory of one machine: `path` itself, or a subdirectory of it."""
    if not path.is_dir():
        raise CredentialsError(f"no directory {path}; wanted certificates; {MAKE}")
    if (path / "cert.pem").exists() or not ((path / "server").exists() or (path / "sites").exists()):
        return path
    if server:
        return path / "server"
    there = ", ".join(sites(path)) or "none"
    if site is None:
        raise CredentialsError(f"{path} holds the certificates of all sites; say which site; there are: {there}")
    check_site(site)
    if site not in sites(path):
        run = f"run `weightgrad certs add-site {path} {site}`"
        raise CredentialsError(f"no certificate of site {site} in {path}; there are: {there}; {run}")
    return path / "sites" / site


def _check_signed(certificate: x509.Certificate, path: Path, ca: bytes, ca_path: Path) -> None:
    """Check that one of the CAs in `ca`, which is still valid, signed the certificate."""
    try:
        authorities = x509.load_pem_x509_certificates(ca)
    except ValueError as error:
        raise CredentialsError(f"{ca_path} is not a certificate in PEM; {MAKE}") from error
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (InvalidSignature, TypeError, ValueError, UnsupportedAlgorithm):
            continue
        check_dates(authority, ca_path, "run `weightgrad certs init` in a new directory")
        return
    raise CredentialsError(f"{path} is not signed by {ca_path}; wanted both from one CA; copy both again, together")


def _serves(certificate: x509.Certificate, purpose: x509.ObjectIdentifier) -> bool:
    """Whether a certificate may be used for this purpose; one that names no purpose may be used for any."""
    try:
        return purpose in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
