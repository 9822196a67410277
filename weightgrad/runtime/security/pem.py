"""Reads and writes PEM files: written whole or not at all, and keys readable by their owner only."""

from __future__ import annotations

import os
import re
import secrets
import stat
from datetime import datetime, timezone
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from weightgrad.errors import CredentialsError

MAKE = "make them with `weightgrad certs init` and copy DIR/server or DIR/sites/NAME here, whole"


def sites(directory: Path) -> list[str]:
    """The sites that have a certificate in `directory`, sorted."""
    return sorted(path.parent.name for path in (directory / "sites").glob("*/cert.pem"))


def operators(directory: Path) -> list[str]:
    """The operators that have a certificate in `directory`, sorted."""
    return sorted(path.parent.name for path in (directory / "operators").glob("*/cert.pem"))


def check_site(name: str) -> None:
    """Check that a site can have this name, which becomes a directory and a common name."""
    if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name):
        raise CredentialsError(f"site name {name!r}; wanted 1 to 64 letters, digits, - and _; choose another name")


def read(path: Path, *, private: bool = False, mounted: bool = False) -> bytes:
    """Read a file.

    Args:
        path: the file.
        private: refuse a file that others than its owner can read.
        mounted: accept a private file with the mode that Kubernetes gives a mounted secret.

    Raises:
        CredentialsError: the file is missing, unreadable, or readable by others.
    """
    try:
        with path.open("rb") as file:
            # The mode of the open file, because the mode of a link says nothing.
            found = os.fstat(file.fileno())
            mode = stat.S_IMODE(found.st_mode)
            if private and mode & 0o077 and not (mounted and _is_mounted(found)):
                raise CredentialsError(
                    f"{path} has mode {mode:04o}, so others can read this key; wanted 0600; run `chmod 600 {path}`"
                    + (", or give the secret in Kubernetes defaultMode 0400 and the pod an fsGroup" if mounted else "")
                )
            return file.read()
    except FileNotFoundError as error:
        raise CredentialsError(f"no file {path}; {MAKE}") from error
    except OSError as error:
        raise CredentialsError(f"cannot read {path}: {error.strerror}; make it readable to this user") from error


def _is_mounted(found: os.stat_result) -> bool:
    """Whether a key is a secret that Kubernetes mounted in a pod with an fsGroup: root owns it, our group reads it.

    Kubernetes adds 0440 to the mode that was asked for, 0400 or 0600.
    """
    ours = {os.getegid(), *os.getgroups()}
    is_roots = found.st_uid == 0 and os.geteuid() != 0
    return is_roots and found.st_gid in ours and stat.S_IMODE(found.st_mode) in (0o440, 0o640)


def write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file whole or not at all; others can never read a private one, not even while it is written."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        folder(path.parent)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(temporary, flags, 0o600 if private else 0o644), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CredentialsError(f"cannot write {path}: {error.strerror}; choose a directory of your own") from error


def folder(path: Path) -> None:
    """Make a directory, and its parents, that only its owner can enter; existing ones stay as they are."""
    if not path.is_dir():
        folder(path.parent)
        path.mkdir(mode=0o700)


def parse(pem: bytes, path: Path | None = None) -> x509.Certificate:
    """Parse a certificate; `path` is only for the error."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise CredentialsError(f"{path or 'this'} is not a certificate in PEM; {MAKE}") from error


def parse_key(pem: bytes, path: Path) -> PrivateKeyTypes:
    """Parse a private key; `path` is only for the error."""
    try:
        return serialization.load_pem_private_key(pem, password=None)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise CredentialsError(f"{path} is not a private key in PEM without a password; {MAKE}") from error


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """Encode a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode a private key as PEM, without a password."""
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def utc(moment: datetime) -> str:
    """Format a time in UTC, to the minute."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def utc_now() -> datetime:
    """The present time in whole seconds, as in certificates."""
    return datetime.now(timezone.utc).replace(microsecond=0)
