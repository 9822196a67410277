"""A server or a site that dies in the last moment of a run: nobody meets a closed door."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightgrad.errors import SavedStateError
from weightgrad.runtime.lane_sessions import SessionView
from weightgrad.runtime.server import FieldServer, ServeOptions
from weightgrad.train.field import house
from weightgrad.wan.membership import Member, Members
from weightgrad.wan.messages import Leave, Message

from .field import Hub, Runner, finish, tiny


def _over(server: FieldServer) -> bool:
    """Every site's last push is in the base."""
    return server.core is not None and all(m.done for m in server.core.members.by_name.values())


@pytest.mark.parametrize("strategy", ["baseline", "{name: diloco, every: 4}"])
def test_a_server_that_dies_before_the_last_answer_has_left(strategy: str, tmp_path: Path) -> None:
    recipe = tiny(strategy, workers=1, steps=8)
    first = Hub(recipe, state=tmp_path, until_finished=True)
    send = first.server.lanes.send

    def dies(name: str, data: Any) -> bool:
        if _over(first.server):
            raise SavedStateError("killed: the checkpoint is written, and nobody was told")
        return send(name, data)

    first.server.lanes.send = dies  # type: ignore[method-assign,assignment]
    sites = [Runner(recipe, name, first.address) for name in ("east", "west")]
    first.join()
    assert isinstance(first.error, SavedStateError)
    with Hub(recipe, state=tmp_path, until_finished=True, listen=first.address) as second:
        finish(*sites)
        second.join()
        assert [site.version for site in sites] == [second.version] * 2
        assert {site.base.digest() for site in sites} == {second.core.base.digest()}


def test_a_server_goes_on_while_a_base_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a site that came late, has finished, and waits for the exact base over a slow line."""
    options = ServeOptions(listen="127.0.0.1:0", until_finished=True)
    server = FieldServer(house(tiny("baseline", workers=1)), options, None)
    left = [10**9]
    monkeypatch.setattr(server, "core", SimpleNamespace(members=Members({"west": Member("west", done=True)})))
    monkeypatch.setattr(server.lanes, "sessions", lambda: {"west": SessionView("1", 4, left[0])})
    server._over = time.monotonic() - 1e6
    assert server._goes_on()
    left[0] = 0
    assert server._goes_on(), "and the last word of the site may take a minute"
    server._over = time.monotonic() - 1e6
    assert not server._goes_on()
    server.lanes.stop(0.0)


def test_a_server_waits_for_a_site_that_died_before_it_had_its_last_answer(tmp_path: Path) -> None:
    recipe = tiny("{name: diloco, every: 4}", workers=1, steps=8)
    with Hub(recipe, until_finished=True) as hub:
        send, handle = hub.server.lanes.send, hub.server._handle
        left: list[str] = []

        def forgets(name: str, data: Any) -> bool:
            return (name == "west" and _over(hub.server)) or send(name, data)

        def hears(site: str, message: Message) -> None:
            left.extend([site] if isinstance(message, Leave) else [])
            handle(site, message)

        hub.server.lanes.send = forgets  # type: ignore[method-assign,assignment]
        hub.server._handle = hears  # type: ignore[method-assign]
        east = Runner(recipe, "east", hub.address)
        west = Runner(recipe, "west", hub.address, state=tmp_path, checkpoint_every=1)
        hub.until(lambda: "east" in left)
        west.vanish()
        hub.server.lanes.send = send  # type: ignore[method-assign]
        again = Runner(recipe, "west", hub.address, state=tmp_path)
        finish(east, again)
        hub.join()
        assert again.base.digest() == hub.core.base.digest()


def test_a_server_does_not_wait_for_ever_for_a_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightgrad.runtime.server._GOODBYE_S", 0.5)
    recipe = tiny("{name: diloco, every: 4}", workers=1, steps=8)
    with Hub(recipe, until_finished=True) as hub:
        handle = hub.server._handle
        hub.server._handle = lambda site, message: (  # type: ignore[method-assign]
            None if isinstance(message, Leave) else handle(site, message)
        )
        finish(*(Runner(recipe, name, hub.address) for name in ("east", "west")))
        hub.join()
