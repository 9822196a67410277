"""The local server's line, with messages made by hand instead of lanes."""

from __future__ import annotations

from collections import deque
from typing import cast

import pytest
import torch

from weightgrad.runtime.admission import Ask
from weightgrad.runtime.lanes_client import LanesClient
from weightgrad.runtime.wan_end import WanEnd
from weightgrad.site.layout import Layout
from weightgrad.wan.base import Base
from weightgrad.wan.message_bytes import pack, unpack
from weightgrad.wan.messages import Join, Message, Welcome
from weightgrad.wan.site_end import SiteEnd
from weightgrad.wan.strategies import find


class Line:
    """What `WanEnd` asks of a client."""

    address = "127.0.0.1:1"
    unacknowledged_bytes = 0

    def __init__(self) -> None:
        self.coming: deque[Message] = deque()
        self.sent: list[Message] = []

    def events(self) -> list[str]:
        return []

    def send(self, data: bytes) -> None:
        self.sent.append(unpack(data))

    def receive(self, timeout: float) -> bytes | None:
        del timeout
        return pack(self.coming.popleft()) if self.coming else None


def test_a_whole_base_in_the_middle_of_training_moves_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """Or the other ranks of the site would not be told, and train on with the old one."""
    caplog.set_level("INFO")
    layout, line = Layout.of_shapes([("weight", (8,))]), Line()
    base = Base(layout, torch.zeros(8), optimizer=None, rate=lambda step: 0.1)
    end = SiteEnd("west", base, find("diloco", {}).for_site(), samples=1, key=1)
    wan = WanEnd(cast(LanesClient, line), Ask("west", [], "", -1), None, lambda: None)
    wan.attach(end)
    wan.send(end.join())
    line.coming.append(Welcome(0, 1, 0, 0))
    assert not wan.until_free(), "nothing to be told"
    line.coming.append(Welcome(3, 4, 12, 0, (), {"base": torch.ones(8)}))
    assert wan.until_free()
    assert torch.equal(end.model, torch.ones(8))
    assert "west: the whole base of version 3 has come, exact" in caplog.text
    assert not wan.until_free()
    assert [type(message) for message in line.sent] == [Join]
