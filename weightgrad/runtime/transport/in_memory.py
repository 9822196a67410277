"""The in-memory transport: queues between threads of one process, for tests and for trying things out.

    network = InMemoryNetwork()
    server = InMemoryServer(network, "hub")
    client = InMemoryClient(network, "hub", site="virginia", incarnation=1)

It keeps the contract of `transport.py`. There are no certificates, no lost connections, and no limits but that on the
length of control messages. A message is copied once, when it is sent, so that its memory behaves as if it had crossed
a network. The parts are in `in_memory_server.py`, `in_memory_client.py` and `in_memory_session.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightgrad.runtime.transport.in_memory_client import InMemoryClient
    from weightgrad.runtime.transport.in_memory_server import InMemoryServer


class InMemoryNetwork:
    """The servers that can be reached by name. One lock guards everything on it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.servers: dict[str, InMemoryServer] = {}
        self.clients: list[InMemoryClient] = []

    def wait_for(self, condition: Callable[[], object], timeout: float | None) -> bool:
        """Wait until the condition holds; False if that takes longer than `timeout` seconds."""
        with self.changed:
            return bool(self.changed.wait_for(condition, timeout))
