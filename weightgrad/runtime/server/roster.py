"""Which sites may take part in a run, and which certificates are revoked, as the operator has changed it.

It begins with the sites of the recipe. A site that is added gets the next number, from which its random keys are
derived; one that is removed keeps its number, in case it is added again. With a state directory every change is on the
disk before anybody is told of it, so that a server which is started again refuses whom it refused before. What rounds
have to do with it is in the log of the server (`core/server/operation.py`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weightgrad.errors import CheckpointError, CredentialsError, RefusedError
from weightgrad.runtime.checkpoints.durable_files import sync_directory
from weightgrad.runtime.security import pem

_NAME = "roster.json"
_MOST_SITES = 4096
_SERIALS_KEPT = 8  # of the certificates that a site has shown


@dataclass(frozen=True, kw_only=True)
class RosterFacts:
    """A roster at one moment.

    Attributes:
        names: all sites, by their numbers; those of the recipe first.
        removed: those of them that may not take part.
        revoked: the serial numbers of revoked certificates.
        bit_s: what the operator has said of the bandwidth of a site's link.
        serials: the certificates with which a site has come, the newest last.
    """

    names: tuple[str, ...]
    removed: frozenset[str] = frozenset()
    revoked: frozenset[int] = frozenset()
    bit_s: Mapping[str, float] = field(default_factory=dict)
    serials: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        """As JSON; a serial number has up to 160 bits, so they are in hex."""
        return {
            "names": list(self.names),
            "removed": sorted(self.removed),
            "revoked": sorted(f"{serial:x}" for serial in self.revoked),
            "bit_s": dict(self.bit_s),
            "serials": {name: [f"{serial:x}" for serial in found] for name, found in self.serials.items()},
        }

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> RosterFacts:
        """Read what `dump` returned.

        Raises:
            KeyError, TypeError, ValueError: It is something else.
        """
        return cls(
            names=tuple(str(name) for name in found["names"]),
            removed=frozenset(str(name) for name in found["removed"]),
            revoked=frozenset(int(serial, 16) for serial in found["revoked"]),
            bit_s={str(name): float(value) for name, value in found["bit_s"].items()},
            serials={str(name): tuple(int(one, 16) for one in serials) for name, serials in found["serials"].items()},
        )


class Roster:
    """The sites of a run. Any thread may read and change it.

    Args:
        sites: the sites of the recipe.
        directory: where it is kept; None keeps it in memory only.
        bit_s: what the recipe says of the bandwidth of each site's link.

    Raises:
        CheckpointError: the file in `directory` is damaged, or of another recipe.
    """

    def __init__(
        self, sites: Sequence[str], directory: Path | None = None, bit_s: Mapping[str, float] | None = None
    ) -> None:
        self._path = None if directory is None else directory / _NAME
        self._recipe, self._recipe_bit_s = tuple(sites), dict(bit_s or {})
        self._changing = threading.RLock()
        self.facts = RosterFacts(names=self._recipe)
        if self._path is not None and self._path.exists():
            self.facts = self._read(self._path)

    def _read(self, path: Path) -> RosterFacts:
        try:
            found = RosterFacts.parse(json.loads(path.read_text()))
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error!r}); it says which sites were added, removed and revoked: bring it "
                "back, or remove it to begin with the sites of the recipe"
            ) from error
        if found.names[: len(self._recipe)] != self._recipe:
            raise CheckpointError(
                f"{path} is of another run: its sites begin with {', '.join(found.names[: len(self._recipe)])}, those "
                f"of the recipe are {', '.join(self._recipe)}; give --state another directory, or that run's recipe"
            )
        return found

    # -- what others ask -----------------------------------------------------------------------

    @property
    def durable(self) -> bool:
        """Whether it survives the end of this process."""
        return self._path is not None

    @property
    def names(self) -> tuple[str, ...]:
        """All sites by their numbers, those that were removed too."""
        return self.facts.names

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that may take part, by their numbers."""
        facts = self.facts
        return tuple(name for name in facts.names if name not in facts.removed)

    @property
    def first(self) -> tuple[str, ...]:
        """The sites of the recipe that may take part: the first round waits for them."""
        return tuple(name for name in self._recipe if name not in self.facts.removed)

    def is_out(self, name: str) -> bool:
        """Whether a site was removed, or came last with a certificate that is revoked now: nobody waits for it."""
        serials = self.facts.serials.get(name, ())
        return name not in self.sites or (bool(serials) and self.is_revoked(serials[-1]))

    def is_added(self, name: str) -> bool:
        """Whether a site is not in the recipe."""
        return name not in self._recipe

    def number(self, name: str) -> int:
        """The number of a site."""
        return self.facts.names.index(name)

    def bit_s(self, name: str) -> float | None:
        """What is said of the bandwidth of a site's link."""
        return self.facts.bit_s.get(name, self._recipe_bit_s.get(name))

    def is_revoked(self, serial: int) -> bool:
        """Whether the operator has revoked a certificate on this server."""
        return serial in self.facts.revoked

    # -- changes -------------------------------------------------------------------------------

    def add(self, name: str, bit_s: float | None = None) -> None:
        """Let a site take part.

        Raises:
            RefusedError: it may already, its name is not one, or there are too many.
            CheckpointError: the change could not be written; nothing has changed.
        """
        try:
            pem.check_site(name)
        except CredentialsError as error:
            raise RefusedError(str(error)) from None
        with self._changing:
            facts = self.facts
            if name in self.sites:
                raise RefusedError(
                    f"{name} may take part already; the sites are {', '.join(self.sites)}. Where a certificate was "
                    f"revoked, make a new one: weightgrad certs add-site DIR {name} --renew"
                )
            names = facts.names if name in facts.names else (*facts.names, name)
            if len(names) > _MOST_SITES:
                raise RefusedError(f"{name} would be site {len(names)}; a run has at most {_MOST_SITES}")
            known = {**facts.bit_s, name: bit_s} if bit_s is not None else facts.bit_s
            self._change(replace(facts, names=names, removed=facts.removed - {name}, bit_s=known))

    def remove(self, name: str) -> None:
        """Let a site take no part any more.

        Raises:
            RefusedError: it takes no part, or is the last one.
            CheckpointError: the change could not be written; nothing has changed.
        """
        with self._changing:
            self.check_known(name)
            if self.sites == (name,):
                raise RefusedError(f"{name} is the only site; stop the server instead, or add another site first")
            self._change(replace(self.facts, removed=self.facts.removed | {name}))

    def revoke(self, name: str, serials: Sequence[int]) -> None:
        """Refuse certificates from now on.

        Raises:
            RefusedError: no serial number is given and none is known.
            CheckpointError: the change could not be written; nothing has changed.
        """
        if not serials:
            raise RefusedError(
                f"no certificate of {name} has come to this server; say which with --serial, as `weightgrad certs "
                "show` prints it"
            )
        with self._changing:
            self._change(replace(self.facts, revoked=self.facts.revoked | set(serials)))

    def check_known(self, name: str) -> None:
        """Raise RefusedError unless a site may take part."""
        if name not in self.sites:
            raise RefusedError(f"no site {name!r} in this run; it has {', '.join(self.sites)}")

    def seen(self, name: str, serial: int | None) -> None:
        """Note the certificate with which a site has come, so that it can be revoked by the site's name."""
        with self._changing:
            known = self.facts.serials.get(name, ())
            if serial is not None and (not known or known[-1] != serial):
                newest = (*(one for one in known if one != serial), serial)[-_SERIALS_KEPT:]
                self._change(replace(self.facts, serials={**self.facts.serials, name: newest}))

    def _change(self, facts: RosterFacts) -> None:
        if self._path is not None:
            try:
                pem.write(self._path, json.dumps(facts.dump(), indent=1).encode(), private=True)
                sync_directory(self._path.parent)
            except (CredentialsError, OSError) as error:
                raise CheckpointError(f"the change cannot be kept: {error}") from error
        self.facts = facts
