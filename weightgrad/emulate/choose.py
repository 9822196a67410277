"""The best network that this machine allows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from weightgrad.emulate.modelled import ModelledWan
from weightgrad.emulate.network import Network
from weightgrad.emulate.topology import WanLink
from weightgrad.emulate.wan import Wan
from weightgrad.errors import NamespacesRefusedError, TopologyError


def open_wan(
    hosts: Sequence[str],
    links: Iterable[WanLink],
    *,
    kind: str = "auto",
    delay: str = "auto",
    congestion: str = "cubic",
    realtime: bool | None = None,
) -> Network:
    """An open network; close it, or use it in a `with` block. Its `reason` says why it is of this kind.

    "auto" tries namespaces as root (if we are), then as a normal user, then a modelled network. Any other kind is
    that kind or an error.
    """
    links = tuple(links)
    if kind == "auto":
        order = ["root", "rootless", "modelled"] if os.geteuid() == 0 else ["rootless", "modelled"]
    elif kind in ("root", "rootless", "modelled"):
        order = [kind]
    else:
        raise TopologyError(f"kind is {kind!r}; wanted auto, root, rootless or modelled")
    if kind == "root" and os.geteuid() != 0:
        raise NamespacesRefusedError(f"kind='root', but this is user {os.geteuid()}; use 'rootless', or 'auto'")
    refused: list[str] = []
    for one in order:
        network: Network = ModelledWan(hosts, links)
        if one != "modelled":
            rootless = one == "rootless"
            network = Wan(hosts, links, delay=delay, congestion=congestion, rootless=rootless, realtime=realtime)
        try:
            network.open()
        except NamespacesRefusedError as error:
            if kind != "auto":
                raise
            refused.append(str(error))
        else:
            network.reason = _reason(one, kind, refused)
            return network
    raise AssertionError("a modelled network is never refused")


def _reason(one: str, kind: str, refused: list[str]) -> str:
    if kind != "auto":
        return f"{one}: asked for"
    found = {
        "root": "namespaces as root: we are root, and it is allowed",
        "rootless": "namespaces as a normal user: it is allowed",
        "modelled": "modelled",
    }[one]
    return f"{found}; because {'; '.join(refused)}" if refused else found
