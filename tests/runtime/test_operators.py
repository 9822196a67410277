"""What an operator does to a run that is going on: sites come and go, certificates are revoked, the run is paused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from weightgrad.errors import CheckpointError, CredentialsError, ProtocolError, RefusedError, WeightGradError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.runtime.doctor.server_questions import ServerQuestions
from weightgrad.runtime.join import join
from weightgrad.runtime.security import certificates
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.server.roster import Roster

from .deployment import SGD, TINY, Hub, Runner, finish

STRATEGY = "{name: diloco, every: 4, t_global: null}"  # rounds wait for everybody, however long
NORTH = "  - {name: north, workers: 1}\n"
NORTH_LINK = "  - {between: [hub, north], bandwidth: 20 Mbit/s, delay: 10 ms}\n"


def recipe_of(strategy: str = STRATEGY, *, steps: int = 24, north: bool = False) -> Recipe:
    """Two sites; or three, which is the recipe that the third site has."""
    text = TINY.format(strategy=strategy, steps=steps, optimizer=SGD, workers=1)
    if north:
        text = text.replace("lan:", NORTH + "lan:").replace("compute:", NORTH_LINK + "compute:")
        text = text.replace("batch: 32", "batch: 48")
    return Recipe.parse(text, "sites.yaml")


@pytest.fixture(name="certs")
def fixture_certs(tmp_path: Path) -> Path:
    directory = tmp_path / "certs"
    certificates.create(directory, ["127.0.0.1"], ["east", "west", "north"])
    certificates.add_operator(directory, "ann")
    return directory


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def ask(hub: Hub, certs: Path, what: str, **more: Any) -> dict[str, Any]:
    with ServerQuestions(hub.address, Credentials.load_operator(certs), streams=1) as questions:
        return questions.ask(what, **more)


def row(found: dict[str, Any], site: str) -> dict[str, Any]:
    (one,) = [row for row in found["sites"] if row["site"] == site]
    assert isinstance(one, dict)
    return one


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without NaN, which is not equal to itself."""
    return tensor.nan_to_num(-1.0) if tensor.is_floating_point() else tensor


def failure(site: Runner) -> BaseException | None:
    """How a site has ended."""
    site.limit = 10**9
    site._thread.join(120)
    assert not site._thread.is_alive()
    return site.error


def test_a_site_that_the_recipe_does_not_name_is_added_and_trains(certs: Path) -> None:
    recipe, theirs = recipe_of(), recipe_of(north=True)
    with Hub(recipe, certs=certs) as hub:
        east = Runner(recipe, "east", hub.address, to=10, certs=certs)
        west = Runner(recipe, "west", hub.address, to=10, certs=certs)
        hub.until(lambda: hub.version == 2)
        stranger = Runner(theirs, "north", hub.address, certs=certs)
        assert "no site 'north'" in str(failure(stranger))
        assert row(ask(hub, certs, "add", site="north", bit_s=2e7), "north")["state"] == "not joined"
        assert hub.server.admission.roster.bit_s("north") == 2e7
        north = Runner(theirs, "north", hub.address, to=8, certs=certs)
        hub.until(lambda: "north" in hub.core.members.by_name and north.site.steps >= 8)
        assert row(ask(hub, certs, "sites"), "north")["added"]
        finish(east, west, north)
        assert hub.core.members.by_name["north"].included_round > 2, "it takes part"
        assert len({site.digest() for site in (east, west, north) if site.version == hub.version}) == 1
        with pytest.raises(RefusedError, match=r"north may take part already.*add-site DIR north --renew"):
            ask(hub, certs, "add", site="north")
        with pytest.raises(RefusedError, match="site name "):
            ask(hub, certs, "add", site="../x")


def test_a_site_that_is_removed_ends_and_the_others_go_on(certs: Path) -> None:
    recipe = recipe_of()
    with Hub(recipe, certs=certs, until_finished=True) as hub:
        east = Runner(recipe, "east", hub.address, certs=certs)
        west = Runner(recipe, "west", hub.address, to=6, certs=certs)
        hub.until(lambda: hub.version == 1 and hub.core.waits_for() == ["west"])
        found = ask(hub, certs, "remove", site="west")
        assert row(found, "west")["state"] == "removed"
        finish(east)  # which waited for it
        assert "the operator has removed this site" in str(failure(west))
        hub.join()  # the run is over: nobody waits for the return of a site that was removed
        assert hub.version == 7  # the last one is of its goodbye
    with Hub(recipe, certs=certs) as again:
        ask(again, certs, "remove", site="west")
        with pytest.raises(RefusedError, match="no site 'west' in the recipe of this server"):
            raise failure(Runner(recipe, "west", again.address, certs=certs)) or AssertionError("it was let in")
        with pytest.raises(RefusedError, match="east is the only site"):
            ask(again, certs, "remove", site="east")


def test_a_certificate_is_revoked_at_once_and_for_good(certs: Path, tmp_path: Path) -> None:
    recipe, state = recipe_of(), tmp_path / "state"
    with Hub(recipe, certs=certs, state=state) as hub:
        east = Runner(recipe, "east", hub.address, to=14, certs=certs)
        west = Runner(recipe, "west", hub.address, to=6, certs=certs)
        hub.until(lambda: hub.version == 1 and hub.core.waits_for() == ["west"])
        ask(hub, certs, "add", site="north")
        with pytest.raises(RefusedError, match="no certificate of north has come"):
            ask(hub, certs, "revoke", site="north")
        found = ask(hub, certs, "revoke", site="west")
        assert found["durable"]
        assert found["serials"] == [f"{Credentials.load(certs, site='west').serial:x}"]
        assert row(found, "west")["state"] == "revoked"
        assert not [peer for peer in hub.transport.sessions() if peer.site == "west"], "its session is over"
        assert "is revoked" in str(failure(west))
        hub.until(lambda: hub.version == 3)  # east goes on alone
        refused = failure(Runner(recipe, "west", hub.address, certs=certs))
        assert "(serial" in str(refused)
        assert "is revoked" in str(refused)
    with Hub(recipe, certs=certs, state=state, listen=hub.address) as again:
        assert "is revoked" in str(failure(Runner(recipe, "west", again.address, certs=certs)))
        assert again.server.admission.roster.sites == ("east", "west", "north")
        certificates.add_site(certs, "west", renew=True)
        west = Runner(recipe, "west", again.address, certs=certs)
        finish(east, west)
        assert again.core.members.by_name["west"].included_round > 3
        # An old certificate is revoked by its number; the session of the new one goes on.
        assert row(ask(again, certs, "revoke", site="west", serial="1:2f"), "west")["state"] == "finished"


def test_a_paused_run_stands_still_and_goes_on(certs: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = recipe_of("{name: diloco, every: 2, t_global: 3}")
    with Hub(recipe, certs=certs) as hub:
        with pytest.raises(RefusedError, match="no site has brought a model yet"):
            ask(hub, certs, "pause")
        sites = [Runner(recipe, name, hub.address, to=6, certs=certs) for name in ("east", "west")]
        hub.until(lambda: hub.version == 3)
        assert ask(hub, certs, "pause")["paused"]
        for site in sites:
            site.limit = 10**9
        hub.until(lambda: all(f"{name} is paused by the operator" in caplog.text for name in ("east", "west")))
        assert hub.version == 3
        assert all(site.site.steps <= 8 for site in sites), "they wait at their next decision"
        assert hub.server.status()["healthy"]
        assert not ask(hub, certs, "resume")["paused"]
        finish(*sites)
        assert hub.version == 13
        assert "goes on after a pause" in caplog.text
        assert "rounds continue without it" not in caplog.text, "no deadline expires in a pause"


@pytest.mark.parametrize("consistency", ["async_()", "bounded(4)"])
def test_strategies_that_do_not_wait_pause_too(consistency: str, certs: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = recipe_of(f"{{name: diloco, every: 2, t_global: null, consistency: {consistency}}}", steps=60)
    with Hub(recipe, certs=certs) as hub:
        sites = [Runner(recipe, name, hub.address, to=6, certs=certs) for name in ("east", "west")]
        hub.until(lambda: all(site.site.steps >= 6 for site in sites))
        ask(hub, certs, "pause")
        for site in sites:
            site.limit = 10**9
        hub.until(lambda: all(f"{name} is paused by the operator" in caplog.text for name in ("east", "west")))
        assert max(site.site.steps for site in sites) < 60
        ask(hub, certs, "resume")
        finish(*sites)


def test_a_straggler_is_set_aside_and_taken_back(certs: Path) -> None:
    recipe = recipe_of()
    with Hub(recipe, certs=certs) as hub:
        east = Runner(recipe, "east", hub.address, to=14, certs=certs)
        west = Runner(recipe, "west", hub.address, to=6, certs=certs)
        hub.until(lambda: hub.version == 1 and hub.core.waits_for() == ["west"])
        assert row(ask(hub, certs, "set-aside", site="west"), "west")["state"] == "set aside"
        hub.until(lambda: hub.version == 3)
        assert row(ask(hub, certs, "take-back", site="west"), "west")["state"] == "training"
        finish(east, west)
        assert hub.core.members.by_name["west"].included_round >= 6
        with pytest.raises(RefusedError, match="no site 'south' in this run"):
            ask(hub, certs, "set-aside", site="south")


def test_a_server_that_is_started_again_has_the_same_bits(certs: Path, tmp_path: Path) -> None:
    """Whatever the operator has done: its log gives the same members, the same rounds and the same pause."""
    recipe, theirs, state = recipe_of(), recipe_of(north=True), tmp_path / "state"
    with Hub(recipe, certs=certs, state=state) as hub:
        east = Runner(recipe, "east", hub.address, to=10, certs=certs)
        west = Runner(recipe, "west", hub.address, to=6, certs=certs)
        hub.until(lambda: hub.version == 1 and hub.core.waits_for() == ["west"])
        ask(hub, certs, "add", site="north")
        ask(hub, certs, "set-aside", site="west")
        hub.until(lambda: hub.version == 2)
        north = Runner(theirs, "north", hub.address, to=10, certs=certs)
        hub.until(lambda: north.site.steps >= 8)
        ask(hub, certs, "remove", site="west")
        assert "removed this site" in str(failure(west))
        ask(hub, certs, "pause")
        before, digest, version = hub.core.state(), hub.global_model.digest(), hub.version
    with Hub(recipe, certs=certs, state=state, listen=hub.address) as again:
        assert (again.global_model.digest(), again.version) == (digest, version)
        after = again.core.state()
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(_plain(before[name]), _plain(after[name]))] == []
        found = ask(again, certs, "sites")
        assert found["paused"]
        assert [(one["site"], one["number"]) for one in found["sites"]] == [("east", 0), ("north", 2), ("west", 1)]
        assert row(found, "west")["state"] == "removed"
        ask(again, certs, "resume")
        finish(east, north)
        assert again.core.members.by_name["north"].included_round > 2


def test_a_server_that_ended_after_it_had_written_half_of_a_removal(certs: Path, tmp_path: Path) -> None:
    recipe, state = recipe_of(), tmp_path / "state"
    with Hub(recipe, certs=certs, state=state) as hub:
        east = Runner(recipe, "east", hub.address, certs=certs)
        west = Runner(recipe, "west", hub.address, to=6, certs=certs)
        hub.until(lambda: hub.version == 1 and hub.core.waits_for() == ["west"])
    west.vanish()
    Roster(["east", "west"], state).remove("west")  # and nothing in the log
    with Hub(recipe, certs=certs, state=state, listen=hub.address) as again:
        finish(east)
        assert again.version == 7


def test_only_operators_may_ask(certs: Path) -> None:
    recipe = recipe_of()
    with Hub(recipe, certs=certs) as hub:
        with ServerQuestions(hub.address, Credentials.load(certs, site="east")) as questions:
            for what in ("sites", "add", "remove", "revoke", "pause", "resume", "set-aside", "take-back"):
                with pytest.raises(CredentialsError, match="is for operators, and the certificate is of 'east'"):
                    questions.ask(what, site="west")
            assert questions.ask("about")["you"] == "east"
        with (
            ServerQuestions(hub.address, Credentials.load(certs, site="north")) as questions,
            pytest.raises(RefusedError, match="no site 'north' in this run"),
        ):
            questions.ask("about")
        with pytest.raises(ProtocolError, match="a question 'burn'"):
            ask(hub, certs, "burn")
        with pytest.raises(ProtocolError, match="the site is None"):
            ask(hub, certs, "add")
        assert hub.server.admission.roster.sites == ("east", "west")
        with pytest.raises(WeightGradError, match="weightgrad operator ann"):  # an operator is no site
            join(hub.address, site="east", credentials=certs / "operators" / "ann")
        certificates.revoke(certs, "ann", operator=True)
        with pytest.raises(CredentialsError, match="is revoked"):
            ask(hub, certs, "sites")
        certificates.add_operator(certs, "ann", renew=True)
        assert not ask(hub, certs, "sites")["durable"]


def test_without_tls_whoever_is_on_this_machine_may_ask() -> None:
    with Hub(recipe_of()) as hub, ServerQuestions(hub.address, None) as questions:
        assert [one["site"] for one in questions.ask("add", site="north")["sites"]] == ["east", "west", "north"]
        assert questions.ask("remove", site="north")["sites"][-1]["state"] == "removed"
    with pytest.raises(CredentialsError, match="certificates are needed"):
        ServerQuestions("10.1.2.3:7443", None)


def test_a_roster_on_the_disk(tmp_path: Path) -> None:
    roster = Roster(["a", "b"], tmp_path)
    roster.add("c", 1e6)
    roster.remove("b")
    for serial in (2**159 + 5, 7, 2**159 + 5):
        roster.seen("a", serial)
    roster.revoke("a", [7])
    again = Roster(["a", "b"], tmp_path)
    assert again.facts == roster.facts
    assert (again.sites, again.first, again.number("c"), again.bit_s("c")) == (("a", "c"), ("a",), 2, 1e6)
    assert again.facts.serials["a"] == (7, 2**159 + 5)
    assert not again.is_out("a"), "it has a newer certificate"
    again.add("b")
    assert again.number("b") == 1
    with pytest.raises(CheckpointError, match="of another run"):
        Roster(["b", "a"], tmp_path)
    (tmp_path / "roster.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Roster(["a", "b"], tmp_path)


def test_a_change_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    roster = Roster(["a", "b"], tmp_path / "file")
    with pytest.raises(CheckpointError):
        roster.remove("b")
    assert roster.sites == ("a", "b")
