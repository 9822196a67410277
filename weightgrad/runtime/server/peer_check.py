"""Whether a peer may connect: the site belongs to the run, and its certificate is its own and not revoked."""

from __future__ import annotations

from collections.abc import Callable

from weightgrad.errors import CredentialsError, RefusedError
from weightgrad.runtime.security.credentials import Revoked
from weightgrad.runtime.server.roster import Roster
from weightgrad.runtime.transport.transport import EntryRequest


class PeerCheck:
    """Looks at who connects, before anything of the request is read.

    Args:
        roster: the sites that may take part.
        secure: whether sites show certificates.
        revoked: the list of revoked certificates beside the server's own.
        on_refused: called with a fixed phrase for every refusal.

    Attributes:
        roster: the sites that may take part, as the operator has changed them.
        secure: whether sites show certificates.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        secure: bool,
        revoked: Revoked | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.roster, self.secure, self._revoked, self._on_refused = roster, secure, revoked, on_refused

    def check(self, entry: EntryRequest) -> None:
        """Check that the site belongs to the run and that its certificate is its own and not revoked.

        Raises:
            RefusedError: the site does not belong to the run.
            CredentialsError: the certificate is another site's, or revoked.
        """
        if entry.site not in self.roster.sites:
            self._on_refused("unknown site")
            raise RefusedError(
                f"no site {entry.site!r} in the recipe of this server; it has {', '.join(self.roster.sites)}; its "
                f"operator can add one with `weightgrad sites add`"
            )
        if not self.secure:
            return
        if entry.peer_name != entry.site:
            self._on_refused("another site's certificate")
            raise CredentialsError(
                f"the certificate is of {entry.peer_name!r}, not of {entry.site!r}; use the directory of that site"
            )
        if entry.peer_serial is not None and self.is_revoked(entry.peer_serial):
            self._on_refused("revoked certificate")
            raise CredentialsError(
                f"the certificate of {entry.site} (serial {entry.peer_serial:x}) is revoked; "
                "ask the operator for a new one"
            )

    def is_revoked(self, serial: int) -> bool:
        """Whether a certificate is revoked, in the file beside the server's own or by the operator."""
        return self.roster.is_revoked(serial) or (self._revoked is not None and self._revoked.has(serial))
