"""An operator's evening with real processes: a site joins midway, one is removed, the run is paused and killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import fork_server
from weightgrad import event_log
from weightgrad.runtime.security import certificates

from .deployment import Rehearsal
from .test_operators import recipe_of, row


class Operated(Rehearsal):
    """A run, and its operator's commands."""

    def __init__(self, out: Path, *settings: str) -> None:
        recipe = recipe_of(steps=100_000).with_settings(settings)  # the test ends it
        super().__init__(recipe, out, popen=fork_server.popen())
        certificates.add_site(out / "certs", "north")
        certificates.add_operator(out / "certs", "ann")
        theirs = recipe_of(steps=100_000, north=True)
        (out / "north.yaml").write_text(theirs.to_yaml())
        self.commands["north"] = [
            str(out / "north.yaml") if part == str(out / "recipe.yaml") else part.replace("east", "north")
            for part in self.commands["east"]
        ]

    def __enter__(self) -> Operated:
        return self

    def operator(self, *words: str) -> dict[str, Any]:
        """One command of the operator, in a process of its own, and what it prints."""
        command = [sys.executable, "-m", "weightgrad", *words, "--json", "--server", self.address]
        command += ["--credentials", str(self.out / "certs" / "operators" / "ann")]
        log = self.out / "logs" / "operator.log"
        log.unlink(missing_ok=True)
        self.processes.start("operator", command, self.popen)
        assert self.processes.running["operator"].wait(240) == 0, log.read_text()
        del self.processes.running["operator"]
        found = json.loads(log.read_text())
        assert isinstance(found, dict)
        return found

    def senders(self) -> list[list[str]]:
        """Who was in each round so far."""
        return [one["senders"] for one in event_log.read(self.out / "events.jsonl") if one["kind"] == "round"]


def test_an_operators_evening(tmp_path: Path) -> None:
    with Operated(tmp_path / "run") as run:
        run.start("server", "east", "west")
        run.until("east", 8)
        assert run.operator("run", "pause")["paused"]
        assert row(run.operator("sites", "add", "north"), "north")["state"] == "not joined"
        run.start("north")
        run.until_true(lambda: "north joins with global model" in run.log("server"))
        assert set(map(tuple, run.senders())) == {("east", "west")}
        run.operator("run", "resume")
        run.until_true(lambda: run.senders()[-1] == ["east", "north", "west"])
        run.operator("run", "pause")
        run.kill("server")
        run.start("server")
        run.until_true(lambda: run.log("server").count("waiting for east, west, north") == 1)
        found = run.operator("sites", "list")
        assert found["paused"]
        assert row(found, "north")["added"]
        west = run.processes.running.pop("west")
        run.operator("sites", "revoke", "west")
        assert west.wait(240) != 0
        assert "is revoked" in run.log("west")
        run.operator("run", "resume")
        run.until_true(lambda: run.senders()[-1] == ["east", "north"])
        run.operator("sites", "remove", "north")
        north = run.processes.running.pop("north")
        assert north.wait(240) != 0
        assert "the operator has removed this site" in run.log("north")
        run.until_true(lambda: run.senders()[-1] == ["east"])
    book = event_log.read(tmp_path / "run" / "events.jsonl")
    versions = [entry["version"] for entry in book if entry["kind"] == "round"]
    assert versions == sorted(set(versions)), "no round was closed twice"
    done = [(entry["what"], *entry["where"]) for entry in book if entry["kind"] == "operator"]
    wanted = [("pause",), ("add", "north"), ("resume",), ("pause",), ("revoke", "west"), ("resume",)]
    assert done == [*wanted, ("remove", "north")]


def test_all_processes_of_a_server_know_who_takes_part(tmp_path: Path) -> None:
    with Operated(tmp_path / "run", "server.processes=2") as run:
        run.start("server", "east", "west")
        run.until("east", 8)
        run.operator("sites", "add", "north")
        run.start("north")
        run.until_true(lambda: ["east", "north", "west"] in run.senders())
        north = run.processes.running.pop("north")
        run.operator("sites", "revoke", "north")
        assert north.wait(240) != 0
        assert "is revoked" in run.log("north")
        run.until_true(lambda: run.senders()[-1] == ["east", "west"])


def test_the_commands_say_what_is_missing(tmp_path: Path) -> None:
    """As an ordinary interpreter, as an operator starts it."""
    command = [sys.executable, "-m", "weightgrad", "sites", "list", "--server", "127.0.0.1:1"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "certs add-operator" in told.stderr
