"""The certificate with which a call came.

gRPC has its common name, too, but cuts it at a zero byte and takes the first of several, so that a certificate for
another name could pass for that of a site. The certificate is read here instead.
"""

from __future__ import annotations

from typing import Any

from cryptography import x509

from weightgrad.errors import CredentialsError


def certificate_of(context: Any) -> x509.Certificate | None:
    """The certificate of the caller, which TLS has checked; None without TLS.

    Raises:
        CredentialsError: it cannot be read.
    """
    found = context.auth_context().get("x509_pem_cert", [])
    try:
        return x509.load_pem_x509_certificate(found[0]) if found else None
    except ValueError as error:
        raise CredentialsError(f"the certificate of {context.peer()} cannot be read ({error})") from None
