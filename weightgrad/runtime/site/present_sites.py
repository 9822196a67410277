"""The sites that train in this process.

A cell of a notebook that joins is run again, by accident or after Ctrl-C. A second site of the same name would have no
model, and the first one, which has it, nobody could reach any more: its variable is the second one's.
"""

from __future__ import annotations

import weakref
from typing import Any

_SITES: weakref.WeakValueDictionary[tuple[str, str], Any] = weakref.WeakValueDictionary()


def add(address: str, name: str, site: Any) -> None:
    """A site has entered a run.

    Args:
        address: HOST:PORT of the global server.
        name: The name of the site.
        site: The `Site`.
    """
    _SITES[address, name] = site


def find(address: str, name: str) -> Any | None:
    """The site of that name which has entered a run of that server, and has not left."""
    return _SITES.get((address, name))


def remove(address: str, name: str, site: Any) -> None:
    """A site has left."""
    if find(address, name) is site:
        del _SITES[address, name]
