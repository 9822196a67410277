"""Runs the scripts in the documentation at two sites, as they are there."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import fork_server
from tests.integrations import documented_site
from tests.runtime.deployment import PATIENCE_S
from tests.runtime.user_sites import NAMES, flat, served
from weightgrad.lab.run.launch import Processes
from weightgrad.runtime.session import Site


class Run(threading.Thread):
    """One site that runs a script."""

    def __init__(self, main: Any, *args: Any) -> None:
        super().__init__(daemon=True)
        self._main, self._args = main, args
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._main(*self._args)
        except BaseException as error:
            self.error = error


def run_two_processes(page: str, strategy: str, out: Path, *more: str) -> torch.Tensor:
    """Run the script of a page at two sites in processes, the second with two ranks; the global model, flat.

    Accelerate has one state for a process, so that two sites need two.
    """
    (out / "logs").mkdir()
    processes = Processes(out / "logs")
    with served(strategy) as hub:
        try:
            for name, ranks in zip(NAMES, (1, 2), strict=True):
                command = [documented_site.__file__, page, str(out / name), hub.address, name, *more]
                if ranks > 1:
                    endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
                    command = ["-m", fork_server.TORCHRUN, "--nproc-per-node", str(ranks), *endpoint, *command]
                processes.start(name, [sys.executable, *command], fork_server.popen())
            while not processes.all_done():
                assert (failed := processes.failed()) is None, processes.tail(str(failed), 60)
                hub.tick()
        finally:
            processes.end()
        assert hub.version >= 3
        found = [torch.load(out / f"{name}.pt") for name in ("east-0", "west-0", "west-1")]
        assert torch.equal(found[1], found[2]), "both ranks have the same weights"
        last = [vector for vector in found if torch.equal(vector, hub.global_model.vector)]
        assert last, "the site that leaves last ends with the global model; the other one may have had fewer steps"
        return hub.global_model.vector.clone()


def run_two_sites(main: Any, strategy: str, *more: Any) -> list[Any]:
    """Run `main(server, site)` at two sites, which both are there before either takes a step; what they return."""
    meeting, prepare = threading.Barrier(2, timeout=PATIENCE_S), Site.prepare

    def prepare_together(site: Site, *args: Any, **kwargs: Any) -> Any:
        found = prepare(site, *args, **kwargs)
        meeting.wait()
        return found

    with pytest.MonkeyPatch.context() as patch, served(strategy) as hub:
        patch.setattr(Site, "prepare", prepare_together)
        runs = [Run(main, hub.address, name, *more) for name in NAMES]
        for one in runs:
            one.join(PATIENCE_S)
            assert not one.is_alive()
            if one.error is not None:
                raise one.error
        hub.until(lambda: all(not member.live for member in hub.core.members.by_name.values()))
        assert hub.version >= 3
        for one in runs:
            assert torch.equal(flat(one.result), hub.global_model.vector), "the site ends with the global model"
        return [one.result for one in runs]
