"""Opens the most realistic emulated network that this machine allows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from weightgrad.errors import NamespacesRefusedError, TopologyError
from weightgrad.lab.emulate.modelled import ModelledWan
from weightgrad.lab.emulate.network import Network
from weightgrad.lab.emulate.topology import WanLink
from weightgrad.lab.emulate.wan import Wan


def open_wan(
    hosts: Sequence[str],
    links: Iterable[WanLink],
    *,
    kind: str = "auto",
    delay: str = "auto",
    congestion: str = "cubic",
    realtime: bool | None = None,
) -> Network:
    """Open a network; close it, or use it in a `with` block.

    Args:
        hosts: Names of the hosts.
        links: The links between them.
        kind: "auto" tries namespaces as root (if this process is root), then namespaces as a normal user, then a
            modelled network. "root", "rootless" or "modelled" is that kind or an error.
        delay: How namespaces delay packets: "netem", "switch", or "auto" for netem where the kernel has it.
        congestion: The TCP congestion control.
        realtime: Whether the delay switch gets real-time priority; None means if it is allowed.

    Returns:
        The open network; its `reason` says why it is of this kind.

    Raises:
        NamespacesRefusedError: This machine does not allow the kind that was asked for.
        TopologyError: An argument is wrong.
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
    for candidate in order:
        network: Network = ModelledWan(hosts, links)
        if candidate != "modelled":
            rootless = candidate == "rootless"
            network = Wan(hosts, links, delay=delay, congestion=congestion, rootless=rootless, realtime=realtime)
        try:
            network.open()
        except NamespacesRefusedError as error:
            if kind != "auto":
                raise
            refused.append(str(error))
        else:
            network.reason = _reason(candidate, kind, refused)
            return network
    raise AssertionError("a modelled network is never refused")


def _reason(chosen: str, kind: str, refused: list[str]) -> str:
    if kind != "auto":
        return f"{chosen}: asked for"
    found = {
        "root": "namespaces as root, which this machine allows",
        "rootless": "namespaces as a normal user, which this machine allows",
        "modelled": "modelled",
    }[chosen]
    return f"{found}; because {'; '.join(refused)}" if refused else found
