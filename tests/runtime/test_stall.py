"""T and the stall rule in a deployment: real processes, over a link that is cut and heals."""

from __future__ import annotations

from pathlib import Path

from tests import fork_server
from weightgrad import event_log
from weightgrad.lab.emulate import ModelledWan, WanLink
from weightgrad.lab.run.launch import commands
from weightgrad.lab.run.simulation import simulate

from .deployment import Rehearsal, assert_same_bits, model_of, tiny

STRATEGY = (
    "{name: weightgrad, trigger: every(10), hide: 0, overlap: 1000, t: 0.2, t_global: null}"  # only T makes it wait
)
STEPS = 160


def test_a_site_that_hears_nothing_within_t_stalls_until_the_link_heals(tmp_path: Path) -> None:
    """No weights go to the workers meanwhile; nothing is lost, and the bits are those of a run without a cut."""
    recipe = tiny(STRATEGY, steps=STEPS)
    simulate(recipe, tmp_path / "simulated")
    links = [WanLink(("hub", name), 100e6, 0.005) for name in ("east", "west")]
    with (
        ModelledWan(["hub", "east", "west"], links) as wan,
        Rehearsal(recipe, tmp_path / "run", popen=fork_server.popen()) as run,
    ):
        port = int(run.address.split(":")[1])
        run.commands = commands(recipe, run.out, run.address, lambda site: wan.reach(site, "hub", port))

        def stalls(site: str) -> int:
            return run.log(site).count(f"{site} stalls after step")

        run.start()
        run.until("east", 12)
        before = {site: stalls(site) for site in ("east", "west")}
        wan.cut("hub", "east")
        # The server has no push of east any more, so it closes no round, and west hears nothing either.
        run.until_true(lambda: all(stalls(site) > before[site] for site in before))
        stopped = run.steps()
        assert all(steps < STEPS for steps in stopped.values()), "they were stopped by T, not by the end of training"
        wan.heal("hub", "east")
        run.finish()
        assert run.steps() == {"east": STEPS, "west": STEPS}
    assert_same_bits(model_of(tmp_path / "run"), model_of(tmp_path / "simulated"))
    for site in ("east", "west"):
        events = event_log.read(tmp_path / "run" / "state" / site / "events.jsonl")
        waits = [event for event in events if event["kind"] == "wait" and event["why"] == "stall"]
        assert waits, site
        for wait in waits:  # nobody gets weights while the site stalls, so nobody takes a step
            inside = [e for e in events if e["kind"] == "step" and wait["t"] - wait["seconds"] < e["t"] < wait["t"]]
            assert not inside, (site, wait)
