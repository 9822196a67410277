"""A server or a site that crashes at the end of a run: the others still finish."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightgrad.core.server.membership import Member, Members
from weightgrad.errors import CheckpointError, LinkError, RefusedError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.deployment import run_config
from weightgrad.runtime.server.global_server import GlobalServer, ServeOptions
from weightgrad.runtime.site.server_watch import ServerWatch
from weightgrad.runtime.transport.in_memory import InMemoryNetwork
from weightgrad.runtime.transport.in_memory_server import InMemoryServer
from weightgrad.runtime.transport.transport import Peer, SessionStatus
from weightgrad.wire.message_bytes import unpack
from weightgrad.wire.messages import Leave

from .deployment import PATIENCE_S, Hub, Runner, finish, tiny


def _finished(server: GlobalServer) -> bool:
    """Every site's last push is in the global model."""
    core = server.coordinator
    return core is not None and all(m.done for m in core.members.by_name.values())


@pytest.mark.parametrize("strategy", ["baseline", "{name: diloco, every: 4}"])
def test_a_server_that_dies_before_the_last_result_has_left(strategy: str, tmp_path: Path) -> None:
    recipe = tiny(strategy, workers=1, steps=8)
    first = Hub(recipe, state=tmp_path, until_finished=True)
    send = first.server.transport.send

    def dies(peer: Peer, data: Any, *, control: bool = False) -> bool:
        if _finished(first.server):
            raise CheckpointError("killed: the checkpoint is written, and nobody was told")
        return send(peer, data, control=control)

    first.server.transport.send = dies  # type: ignore[method-assign]
    sites = [Runner(recipe, name, first.address) for name in ("east", "west")]
    first.join()
    assert isinstance(first.error, CheckpointError)
    with Hub(recipe, state=tmp_path, until_finished=True, listen=first.address) as second:
        finish(*sites)
        second.join()
        assert [site.version for site in sites] == [second.version] * 2
        assert {site.digest() for site in sites} == {second.global_model.digest()}


def test_a_server_goes_on_while_a_global_model_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a site that came late, has finished, and waits for the exact global model over a slow line."""
    options = ServeOptions(until_finished=True)
    transport = InMemoryServer(InMemoryNetwork(), "hub")
    server = GlobalServer(run_config(tiny("baseline", workers=1)), options, transport)
    left = [10**9]
    core = SimpleNamespace(members=Members({"west": Member("west", done=True)}))
    monkeypatch.setattr(server.inputs, "rounds", SimpleNamespace(coordinator=core))
    monkeypatch.setattr(transport, "sessions", lambda: {Peer("west", 0): SessionStatus("1", 4, left[0])})
    server.end.finished_since = time.monotonic() - 1e6
    assert server.end.should_continue()
    left[0] = 0
    assert server.end.should_continue(), "and the last word of the site may take a minute"
    server.end.finished_since = time.monotonic() - 1e6
    assert not server.end.should_continue()


def test_a_server_waits_for_a_site_that_died_before_it_had_its_last_result(tmp_path: Path) -> None:
    recipe = tiny("{name: diloco, every: 4}", workers=1, steps=8)
    with Hub(recipe, until_finished=True) as hub:
        send = hub.server.transport.send

        def forgets(peer: Peer, data: Any, *, control: bool = False) -> bool:
            return (peer.site == "west" and _finished(hub.server)) or send(peer, data, control=control)

        hub.server.transport.send = forgets  # type: ignore[method-assign]
        east = Runner(recipe, "east", hub.address)
        west = Runner(recipe, "west", hub.address, state=tmp_path, checkpoint_every=1)
        hub.until(lambda: _finished(hub.server) and not hub.core.members.by_name["east"].live)
        west.vanish()
        hub.server.transport.send = send  # type: ignore[method-assign]
        again = Runner(recipe, "west", hub.address, state=tmp_path)
        finish(east, again)
        hub.join()
        assert again.digest() == hub.global_model.digest()


def test_a_server_does_not_wait_for_ever_for_a_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightgrad.runtime.server.end_of_run._GOODBYE_S", 0.5)
    recipe = tiny("{name: diloco, every: 4}", workers=1, steps=8)
    with Hub(recipe, until_finished=True) as hub:
        take = hub.server.on_message

        def misses_goodbyes(peer: Peer, data: memoryview, control: bool) -> None:
            if not isinstance(unpack(data), Leave):
                take(peer, data, control)

        hub.server.on_message = misses_goodbyes  # type: ignore[method-assign]
        finish(*(Runner(recipe, name, hub.address) for name in ("east", "west")))
        hub.join()


# -- a site that is away when the others finish -----------------------------------------------------

QUICK = "{name: diloco, every: 4, t_global: 0.5}"


def _begin(hub: Hub, recipe: Recipe, **options: Any) -> tuple[Runner, Runner]:
    """Both sites have done a round, and stop; the second one is west, with these options."""
    sites = Runner(recipe, "east", hub.address, to=6), Runner(recipe, "west", hub.address, to=6, **options)
    hub.until(lambda: all(site.site.steps >= 6 for site in sites))
    return sites


def test_a_server_waits_for_the_return_of_a_site_that_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tiny(QUICK, workers=1, steps=24)
    with Hub(recipe, until_finished=True, return_s=PATIENCE_S) as hub:
        east, west = _begin(hub, recipe, state=tmp_path, checkpoint_every=1)
        west.vanish()
        finish(east)
        hub.until(lambda: "for the return of west" in caplog.text)
        again = Runner(recipe, "west", hub.address, state=tmp_path)
        finish(again)
        hub.join()
        assert again.digest() == hub.global_model.digest()
    assert "ends without" not in caplog.text


def test_a_site_that_comes_too_late_is_told_that_the_run_is_over(caplog: pytest.LogCaptureFixture) -> None:
    recipe = tiny(QUICK, workers=1, steps=24)
    with Hub(recipe, until_finished=True, return_s=0.1) as hub:
        east, west = _begin(hub, recipe)
        finish(east)
        hub.join()
        with pytest.raises(RefusedError, match="the run has finished without west, at version"):
            finish(west)
    assert "the run ends without west" in caplog.text


@pytest.mark.parametrize("keeps", [True, False])
def test_a_site_whose_server_has_ended_says_so_and_ends_with_what_it_has(keeps: bool, tmp_path: Path) -> None:
    recipe = tiny("{name: diloco, every: 4, t_global: 600}", workers=1, steps=24)
    with Hub(recipe) as hub:
        east, west = _begin(hub, recipe, reconnect=1.0, checkpoint_every=2, state=tmp_path if keeps else None)
        hub.stop()
    kept = r"its checkpoint of step \d+ in " if keeps else "what it has not shared is lost"
    with pytest.raises(LinkError, match=rf"the global server has ended: nothing has listened at .*{kept}"):
        finish(west)
    east.vanish()


@pytest.mark.parametrize("connected", [True, False])
def test_a_site_that_pushes_nothing_any_more_does_not_keep_the_server(
    connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has joined after the others had finished, so no round is open that would lose it. By default: 120 s."""
    server = GlobalServer(
        run_config(tiny("baseline", workers=1)),
        ServeOptions(until_finished=True),
        InMemoryServer(InMemoryNetwork(), "hub"),
    )
    now = [1000.0]
    monkeypatch.setattr("weightgrad.runtime.server.end_of_run.time", SimpleNamespace(monotonic=lambda: now[0]))
    members = Members({"east": Member("east", live=False, done=True), "west": Member("west")})
    core = SimpleNamespace(members=members, timeout=lambda: 30.0)
    monkeypatch.setattr(server.inputs, "rounds", SimpleNamespace(coordinator=core))
    peers = {Peer("west", 0): SessionStatus("1", 4, 0)} if connected else {}
    monkeypatch.setattr(server.transport, "sessions", lambda: peers)
    limit = 30 + (3600 if connected else 120)
    assert server.end.should_continue()
    now[0] += limit - 1
    members.by_name["west"].pushed_round = 7
    assert server.end.should_continue()
    now[0] += limit - 1
    assert server.end.should_continue()
    now[0] += 2
    assert not server.end.should_continue()


def test_a_line_that_is_cut_gets_more_time_than_an_address_where_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now, refused = [0.0], [False]
    watch = ServerWatch("127.0.0.1:1", 3600.0, lambda: "It has a checkpoint.", clock=lambda: now[0])
    monkeypatch.setattr(watch, "_nobody_listens", lambda: refused[0])

    def look(at: float) -> None:
        now[0] = at
        watch.look()

    look(9e9)  # it is there
    now[0] = 0.0
    watch.lost()
    for at in range(0, 3600, 5):
        look(at)
    with pytest.raises(LinkError, match=r"has been away for 3600 s\. It has a checkpoint"):
        look(3600)
    watch.found()
    look(5000)
    watch.lost()
    refused[0] = True
    look(5005)
    refused[0] = False  # a server that is being started again
    look(5200)
    refused[0] = True
    look(5210)
    look(5509)
    with pytest.raises(LinkError, match="has ended: nothing has listened at 127"):
        look(5511)
