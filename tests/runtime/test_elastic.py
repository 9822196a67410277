"""Sites that come late, leave early, vanish and return; lines that are cut; a server that is started again."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from weightgrad.core.server.membership import Member
from weightgrad.core.strategies import PRESETS
from weightgrad.errors import RefusedError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.deployment import train
from weightgrad.lab.run.launch import Processes
from weightgrad.lab.run.simulation import simulate
from weightgrad.lab.run.task import Training
from weightgrad.runtime.join import join
from weightgrad.runtime.security import certificates
from weightgrad.runtime.session import Site
from weightgrad.runtime.site import present_sites

from .deployment import PATIENCE_S, Hub, Runner, digest_text, finish, model_of, read_checkpoint, tiny
from .transport.grpc_harness import proxy

STEPS = 24
WAITS = "t_global: null"  # for everybody, however long
SOON = "t_global: 2"  # seconds until a missing site is lost


def recipe_of(strategy: str = "diloco, every: 4", timeout: str = WAITS, *, steps: int = STEPS) -> Recipe:
    return tiny(f"{{name: {strategy}, {timeout}}}", workers=1, steps=steps)


@cache
def foretold(strategy: str) -> dict[str, torch.Tensor]:
    """The global model that the simulator ends with; how patient the server is does not matter there."""
    with TemporaryDirectory() as directory:
        simulate(recipe_of(strategy), Path(directory))
        return model_of(Path(directory))


def assert_foretold(hub: Hub, strategy: str = "diloco, every: 4") -> None:
    """The server's global model has the simulator's bits."""
    global_model = hub.global_model
    for slot in global_model.layout.slots:
        wanted = foretold(strategy)[slot.name]
        assert torch.equal(slot.of(global_model.vector).view(torch.int32), wanted.view(torch.int32)), slot.name


def assert_agree(hub: Hub, *sites: Runner) -> None:
    """Each has the global model that the server had at that version; a site may have left before the last one."""
    for site in sites:
        assert site.version > 0
        assert site.digest() == hub.global_models[site.version]
    assert max(site.version for site in sites) == hub.version


def reached(site: Runner, step: int) -> Callable[[], bool]:
    return lambda: site.site.steps >= step


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("auto", "gaia", "weightgrad-paper")])
def test_every_strategy_gives_the_simulators_bits(name: str, tmp_path: Path) -> None:
    """Undisturbed, to begin with; the three left out depend on how fast messages are."""
    recipe = recipe_of(name, steps=12)
    simulate(recipe, tmp_path)
    with Hub(recipe) as hub:
        east, west = Runner(recipe, "east", hub.address), Runner(recipe, "west", hub.address)
        finish(east, west)
        assert_agree(hub, east, west)
        wanted = model_of(tmp_path)
        for slot in hub.shard.layout.slots:
            assert torch.equal(slot.of(hub.global_model.vector), wanted[slot.name]), slot.name


# -- coming late, leaving early -----------------------------------------------------------------


@pytest.mark.parametrize("weights", ["the same", "others"])
def test_a_late_site_gets_the_global_model(weights: str, caplog: pytest.LogCaptureFixture) -> None:
    recipe = recipe_of(timeout=SOON)
    with Hub(recipe) as hub:
        east = Runner(recipe, "east", hub.address, to=12)
        hub.until(lambda: east.version >= 3)
        assert "west has sent nothing for too long: rounds continue without it" in caplog.text
        own = None if weights == "the same" else Training(recipe.model_copy(update={"seed": 77})).module
        west = Runner(recipe, "west", hub.address, to=0, module=own)
        hub.until(reached(west, 12))  # the step is set after the model: waiting for the version alone is a race
        assert west.site.steps == hub.core.step == 12
        assert_agree(hub, west)
        pushed = hub.core.members.by_name["west"]
        finish(east, west)
        assert pushed.included_round > 3, "it takes part"
        assert_agree(hub, east, west)


def test_a_late_site_trains_on_an_approximate_first_global_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A real process, by the command; the exact global model follows, and the two end with the same bits."""
    recipe = recipe_of(timeout=SOON)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    command = [sys.executable, "-m", "weightgrad", "train", str(tmp_path / "recipe.yaml"), "--site", "west"]
    command += ["--insecure", "--state", str(tmp_path / "west"), "--download-codec", "qsgd(bits=8)"]
    processes = Processes(tmp_path)
    with Hub(recipe, result_bytes=0) as hub:
        east = Runner(recipe, "east", hub.address, to=12)
        hub.until(lambda: east.version >= 3)
        try:
            processes.start("west", [*command, "--server", hub.address])
            hub.until(lambda: caplog.text.count("west joins with global model version") == 2)
            assert "west joins with global model version 0, and downloads the global model in qsgd" in caplog.text
            assert caplog.text.count("west joins with global model version -1") == 1, "the exact one"
            finish(east)
            hub.until(processes.all_done)
            assert processes.failed() is None, processes.tail("west")
        finally:
            processes.end()
        # Its first push may close a round before the exact global model is made: then that is the one after.
        assert re.search(r"received the whole global model, version [34], exact", (tmp_path / "west.log").read_text())
        facts, left = read_checkpoint(tmp_path / "west")
        assert "coordinator.approximate" not in left
        assert digest_text(left["vector.global_model"]) == hub.global_models[int(facts["version"])]
        assert hub.core.members.by_name["west"].included_round > 3, "it takes part"
        assert_agree(hub, east)


def test_a_site_that_leaves_early_is_not_waited_for() -> None:
    recipe = recipe_of()
    with Hub(recipe) as hub:
        east, west = Runner(recipe, "east", hub.address), Runner(recipe, "west", hub.address, leaves_at=9)
        finish(east, west)
        member = hub.core.members.by_name["west"]
        assert (member.live, member.done, member.included_round) == (False, True, 3)
        assert hub.version > 6
        assert_agree(hub, east)


# -- vanishing and coming back ------------------------------------------------------------------


def test_a_site_that_vanishes_is_lost_and_returns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """kill -9 of a real process; the others go on, and it takes part again when it is started again."""
    recipe = recipe_of(timeout="t_global: 3", steps=48)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    command = [sys.executable, "-m", "weightgrad", "train", str(tmp_path / "recipe.yaml"), "--site", "west"]
    command += ["--insecure", "--state", str(tmp_path / "west"), "--checkpoint-every", "3", "--timeout", "300"]
    processes = Processes(tmp_path)
    with Hub(recipe, state=tmp_path / "server") as hub:

        def member() -> Member:
            return hub.core.members.by_name["west"]

        east = Runner(recipe, "east", hub.address, to=8)
        try:
            processes.start("west", [*command, "--server", hub.address])
            hub.until(lambda: "west joins" in caplog.text)
            hub.until(lambda: member().included_round > 0 or east.extend(4))
            process = processes.running.pop("west")
            process.kill()
            process.wait()
            before = member().included_round
            east.limit = east.site.steps + 8
            hub.until(lambda: not member().live and east.site.steps >= east.limit)
            assert "west has sent nothing for too long: rounds continue without it" in caplog.text
            assert member().included_round == before
            processes.start("west", [*command, "--server", hub.address])
            hub.until(lambda: member().live)
            finish(east)
            assert member().included_round > before, "it takes part again"
            hub.until(processes.all_done)
            assert processes.failed() is None, processes.tail("west")
            assert "west goes on from step" in (tmp_path / "west.log").read_text()
            assert east.digest() == hub.global_models[east.version]
        finally:
            processes.end()


def test_without_t_global_the_others_wait_until_it_returns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = recipe_of()
    with Hub(recipe) as hub:
        east = Runner(recipe, "east", hub.address)
        west = Runner(recipe, "west", hub.address, to=10, state=tmp_path, checkpoint_every=3)
        hub.until(lambda: west.site.steps == 10 and hub.server.status()["waiting_for"] == ["west"])
        west.vanish()
        version = hub.version
        time.sleep(3.0)
        assert hub.version == version
        assert east.site.steps == 12, "it has pushed, and waits"
        assert hub.server.status()["waiting_for"] == ["west"]
        assert hub.server.status()["healthy"]
        west = Runner(recipe, "west", hub.address, state=tmp_path, checkpoint_every=3)
        finish(east, west)
        assert "west goes on from step 9" in caplog.text
        assert "rounds continue without it" not in caplog.text
        assert_agree(hub, east, west)
        assert_foretold(hub)


def test_without_its_state_a_site_does_all_its_steps_again() -> None:
    recipe = recipe_of()
    with Hub(recipe) as hub:
        east, west = Runner(recipe, "east", hub.address), Runner(recipe, "west", hub.address, to=10)
        hub.until(lambda: west.site.steps == 10)
        west.vanish()
        west = Runner(recipe, "west", hub.address)
        finish(east, west)
        assert_agree(hub, east, west)


def test_a_site_that_is_killed_between_a_checkpoint_and_the_end_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threshold of the strategy moves with the epochs: once each, whatever happens."""
    strategy = 'name: weightgrad, trigger: "significance(threshold=4.0, at_most=6, low=0.5, every=2)"'
    recipe = tiny(f"{{{strategy}, t_global: null}}", workers=1, steps=16)
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"batch": 512})})
    assert Training(recipe).epoch_steps == 2
    simulate(recipe, tmp_path / "simulated")
    lives: list[Site] = []
    backward = Training.backward

    def joined(*arguments: Any, **options: Any) -> Site:
        lives.append(join(*arguments, **options))
        return lives[-1]

    def dies_at_step_8(task: Training, site: int, worker: int, step: int, **options: Any) -> float:
        if (site, step, len(lives)) == (1, 8, 1) and lives[0].events is not None:
            lives[0].events.close()
            raise KeyboardInterrupt
        return backward(task, site, worker, step, **options)

    monkeypatch.setattr("weightgrad.lab.run.deployment.join", joined)
    monkeypatch.setattr(Training, "backward", dies_at_step_8)
    with Hub(recipe) as hub:
        east = Runner(recipe, "east", hub.address)
        options: dict[str, Any] = {"credentials": None, "insecure": True, "state": tmp_path, "checkpoint_every": 4}
        with pytest.raises(KeyboardInterrupt):
            train(recipe, "west", hub.address, **options)
        present_sites.remove(hub.address, "west", lives[0])  # it was another process
        train(recipe, "west", hub.address, **options)
        finish(east)
        wanted = model_of(tmp_path / "simulated")
        for slot in hub.shard.layout.slots:
            assert torch.equal(slot.of(hub.global_model.vector), wanted[slot.name]), slot.name


# -- lines that are cut -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "silently", "seconds"),
    [("baseline", False, 0.5), ("weightgrad", True, 0.5), ("diloco, every: 4", True, 9.0)],
    ids=["closed", "silent", "silent for long"],
)
def test_a_cut_line_loses_nothing(strategy: str, silently: bool, seconds: float) -> None:
    recipe = recipe_of(strategy)
    with Hub(recipe) as hub, proxy(hub.address) as between:
        east, west = Runner(recipe, "east", hub.address), Runner(recipe, "west", between.address, to=5)
        for step in (5, 11, 17):
            hub.until(reached(west, step))
            west.limit = step + 6
            between.cut(silently=silently)
            time.sleep(seconds if step == 11 else 0.2)
            between.heal()
        finish(east, west)
        assert_agree(hub, east, west)
        assert_foretold(hub, strategy)


def test_a_line_that_is_cut_for_longer_than_t_global(caplog: pytest.LogCaptureFixture) -> None:
    """Rounds go on without the site, which knows nothing of it; when the line is back it takes part again."""
    recipe = recipe_of(timeout=SOON, steps=48)
    with Hub(recipe) as hub, proxy(hub.address) as between:
        east, west = Runner(recipe, "east", hub.address, to=8), Runner(recipe, "west", between.address, to=8)
        hub.until(lambda: east.version >= 2 and west.version >= 2)
        between.cut()
        east.limit, west.limit = 24, 48
        hub.until(lambda: east.site.steps == 24)
        assert "west has sent nothing for too long" in caplog.text
        member = hub.core.members.by_name["west"]
        assert not member.live
        between.heal()
        hub.until(lambda: member.live)
        finish(east, west)
        assert member.included_round > 6, "it takes part again"
        assert_agree(hub, east, west)


def test_a_site_waits_for_a_server_behind_a_forwarder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Something accepts the connections and closes them, as balancers do: that is no word about certificates."""
    recipe = recipe_of(steps=4)
    certificates.create(tmp_path / "certs", [], ["east", "west"])
    with Hub(recipe, certs=tmp_path / "certs") as hub, proxy(hub.address) as between:
        between.cut()
        east = Runner(recipe, "east", between.address, certs=tmp_path / "certs", timeout=PATIENCE_S)
        hub.until(lambda: "trying again" in caplog.text)
        between.heal()
        finish(east, Runner(recipe, "west", hub.address, certs=tmp_path / "certs"))
        assert_agree(hub, east)


# -- a server that is started again -------------------------------------------------------------


def test_a_server_started_again_in_the_middle_of_a_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = recipe_of()
    with Hub(recipe, state=tmp_path) as hub:
        east, west = Runner(recipe, "east", hub.address), Runner(recipe, "west", hub.address, to=10)
        hub.until(lambda: west.site.steps == 10 and hub.server.status()["waiting_for"] == ["west"])
    assert east.site.steps == 12
    west.limit = 18  # it goes on while nobody is there
    with Hub(recipe, state=tmp_path, listen=hub.address) as again:
        assert again.version == 2
        again.until(lambda: west.site.steps == 18)
    with Hub(recipe, state=tmp_path, listen=hub.address) as third:
        finish(east, west)
        assert_agree(third, east, west)
        assert_foretold(third)
    assert caplog.text.count("east: the global server does not know this session") == 2


def test_a_server_that_went_before_it_had_a_global_model() -> None:
    """The site that was to send it sends it again."""
    recipe = recipe_of()
    with Hub(recipe) as hub:
        east = Runner(recipe, "east", hub.address)
        hub.until(lambda: east.site.steps == 4)
    with Hub(recipe, listen=hub.address) as again:
        again.until(lambda: again.server.coordinator is not None)
        west = Runner(recipe, "west", hub.address)
        finish(east, west)
        assert_agree(again, east, west)
        assert_foretold(again)


def test_a_server_without_its_state_is_told_apart() -> None:
    recipe = recipe_of()
    with Hub(recipe) as hub:
        sites = [Runner(recipe, name, hub.address, to=6) for name in ("east", "west")]
        hub.until(lambda: all(site.version == 1 for site in sites))
    with Hub(recipe, listen=hub.address) as again:
        for site in sites:
            with pytest.raises(RefusedError, match=f"{site.name} has global model version 1 and the server none"):
                finish(site)
        assert again.server.status()["healthy"]
        assert again.server.admission.initializer is None


def test_a_site_with_a_state_and_a_server_without_one(tmp_path: Path) -> None:
    recipe = recipe_of()
    options: dict[str, Any] = {"state": tmp_path, "checkpoint_every": 2}
    with Hub(recipe) as hub:
        east, west = Runner(recipe, "east", hub.address, to=6, **options), Runner(recipe, "west", hub.address, to=6)
        hub.until(lambda: east.site.steps == west.site.steps == 6)
        east.vanish()
        west.vanish()
    with Hub(recipe) as again:
        with pytest.raises(
            RefusedError, match="east has global model version 1 and the server none: it was started without"
        ):
            finish(Runner(recipe, "east", again.address, **options))
        again.until(lambda: again.server.admission.initializer is None)
        finish(*[Runner(recipe, name, again.address) for name in ("east", "west")])
        assert_foretold(again)
