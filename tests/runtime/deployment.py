"""Small recipes and whole runs of them: as real processes, or a server and sites in threads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from weightgrad.core import optimizers
from weightgrad.core.global_model import GlobalModel, digest_of
from weightgrad.core.optimizers.learning_rates import set_rate
from weightgrad.core.server.coordinator import ServerCoordinator
from weightgrad.core.server.guard import Guard
from weightgrad.core.server.open_round import ClosedRound
from weightgrad.core.server.shard import ServerShard
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.core.site.shard import SiteShard
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.errors import WeightGradError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.deployment import run_config
from weightgrad.lab.run.launch import Popen, Processes, commands, free_port, prepare, progress_of
from weightgrad.lab.run.model_file import read_global_model
from weightgrad.lab.run.simulation import optimizer_options, rate_of
from weightgrad.lab.run.task import Training
from weightgrad.runtime.join import join
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.server.global_server import GlobalServer, ServeOptions
from weightgrad.runtime.site import present_sites
from weightgrad.runtime.transport.grpc_server import GrpcServer
from weightgrad.wire.intervals import Intervals

PATIENCE_S = 300.0  # for a busy machine; nothing here should need it

TINY = """
name: tiny
seed: 3
data: {{name: digits}}
model: {{name: lenet-digits}}
training:
  steps: {steps}
  batch: 32
  optimizer: {{name: {optimizer}}}
  schedule: cosine
  evaluate_every: 1000
server: {{name: hub}}
sites:
  - {{name: east, workers: {workers}}}
  - {{name: west, workers: {workers}}}
lan: {{bandwidth: 900 Mbit/s, delay: 0.1 ms}}
links:
  - {{between: [hub, east], bandwidth: 100 Mbit/s, delay: 5 ms}}
  - {{between: [hub, west], bandwidth: 50 Mbit/s, delay: 10 ms}}
compute: {{seconds_per_step: 0.01}}
strategy: {strategy}
"""

SGD = "sgd, lr: 0.05, momentum: 0.9"


def tiny(strategy: str, *, steps: int = 24, workers: int = 2, optimizer: str = SGD) -> Recipe:
    """Two sites on digits."""
    text = TINY.format(strategy=strategy, steps=steps, workers=workers, optimizer=optimizer)
    return Recipe.parse(text, "tiny.yaml")


def model_of(directory: Path) -> dict[str, torch.Tensor]:
    """The global model that a run left, in full precision."""
    return read_global_model(directory)


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Every tensor, every bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)), name


class Rehearsal:
    """A launched run whose processes can be killed and started again with the same commands."""

    def __init__(self, recipe: Recipe, out: Path, *more: str, popen: Popen = subprocess.Popen) -> None:
        self.recipe, self.out, self.popen = recipe, out, popen
        self.address = f"127.0.0.1:{free_port(recipe.server.processes)}"
        self._more = more
        prepare(recipe, out)
        self.use(recipe)
        self.processes = Processes(out / "logs")

    def use(self, recipe: Recipe) -> None:
        """What is started from now on follows this recipe."""
        self.recipe = recipe
        (self.out / "recipe.yaml").write_text(recipe.to_yaml())
        self.commands = commands(recipe, self.out, self.address, lambda _: self.address)
        for name in self.commands:
            if name != "server":
                self.commands[name] += self._more

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.end()

    def start(self, *names: str) -> None:
        for name in names or self.commands:
            self.processes.start(name, self.commands[name], self.popen)

    def steps(self) -> dict[str, int]:
        return progress_of(self.recipe, self.out, 0.0).steps

    def until(self, site: str, step: int) -> None:
        """Until that site has done so many steps."""
        self.until_true(lambda: self.steps()[site] >= step)

    def until_true(self, happened: Callable[[], bool], *, seconds: float = 240.0) -> None:
        limit = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < limit, {n: self.processes.tail(n) for n in self.processes.running}
            if (name := self.processes.failed()) is not None:
                raise AssertionError(f"{name}: {self.processes.tail(name, 40)}")
            time.sleep(0.02)

    def kill(self, name: str) -> None:
        """kill -9 of the process and of all ranks that torchrun has started for it."""
        process = self.processes.running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pid in self._ranks(name).values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_worker(self, name: str, rank: int) -> None:
        """kill -9 of one rank of a site or of the server; torchrun lives and starts all ranks again."""
        os.kill(self._ranks(name)[rank], signal.SIGKILL)

    def _ranks(self, name: str) -> dict[int, int]:
        """The process ids of the ranks that torchrun has started for a site or for the server."""
        role, found = "\0serve\0" if name == "server" else f"--site\0{name}\0", {}
        for directory in Path("/proc").iterdir():
            if not directory.name.isdigit():
                continue
            try:
                variables = dict(
                    one.split("=", 1) for one in (directory / "environ").read_text().split("\0") if "=" in one
                )
                command = (directory / "cmdline").read_text()
            except (OSError, UnicodeDecodeError):
                continue
            if f"{self.out}" in command and role in command and "LOCAL_RANK" in variables:
                found[int(variables["LOCAL_RANK"])] = int(directory.name)
        return found

    def finish(self) -> None:
        self.until_true(self.processes.all_done)
        assert self.processes.failed() is None

    def log(self, name: str) -> str:
        return (self.out / "logs" / f"{name}.log").read_text(errors="replace")


class Hub:
    """A global server in a thread of this process."""

    def __init__(
        self,
        recipe: Recipe | RunConfig,
        *,
        certs: Path | None = None,
        listen: str = "127.0.0.1:0",
        **options: Any,
    ) -> None:
        asked = recipe if isinstance(recipe, RunConfig) else run_config(recipe)
        credentials = Credentials.load(certs, server=True) if certs is not None else None
        options = {"guard": Guard(), "agree_s": 0.0, **options}
        own = credentials.for_server() if credentials is not None else None
        self.transport = GrpcServer(listen, credentials=own)
        self.address = f"127.0.0.1:{self.transport.port}"
        try:
            self.server = GlobalServer(asked, ServeOptions(**options), self.transport, credentials)
        except WeightGradError:
            self.transport.stop(0.0)
            raise
        self.error: BaseException | None = None
        self.global_models: dict[int, str] = {}  # digests by version, of the rounds that this server has closed
        self._report = self.server.telemetry.closed
        self.server.telemetry.closed = self._keep  # type: ignore[method-assign]
        self._until = time.monotonic() + PATIENCE_S
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _keep(self, closed: ClosedRound) -> None:
        self.global_models[closed.result.version] = closed.digest
        self._report(closed)

    def _run(self) -> None:
        try:
            self.server.run()
        except WeightGradError as error:
            self.error = error

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """As by SIGTERM."""
        self.server.stop()
        self.join()

    def join(self) -> None:
        """Until it has ended by itself."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def wait_for(self, seconds: float) -> None:
        """Let `tick` wait so long from now on, for what is slow to start."""
        self._until = time.monotonic() + seconds

    def tick(self) -> None:
        """Wait a little for something to happen."""
        assert self.error is None, self.error
        assert time.monotonic() < self._until, "waited too long"
        time.sleep(0.01)

    def until(self, happened: Callable[[], object]) -> None:
        """Wait for it."""
        while not happened():
            self.tick()

    @property
    def core(self) -> ServerCoordinator:
        assert self.server.coordinator is not None
        return self.server.coordinator

    @property
    def shard(self) -> ServerShard:
        assert self.server.process.serving is not None
        return self.server.process.serving.shard

    @property
    def global_model(self) -> GlobalModel:
        return self.shard.global_model

    @property
    def version(self) -> int:
        return self.server.coordinator.version if self.server.coordinator is not None else 0

    def counted(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self.server.metrics.registry.get_sample_value(f"weightgrad_{name}", labels) or 0.0

    def refused(self, reason: str) -> float:
        """How many connections were, for that reason."""
        return self.counted("refused_connections_total", reason=reason)


class Runner:
    """A site of one worker that trains a recipe in a thread of this process, as far as it is told to."""

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        address: str,
        *,
        to: int = 10**9,
        certs: Path | None = None,
        module: torch.nn.Module | None = None,
        leaves_at: int | None = None,
        **options: Any,
    ) -> None:
        self.name, self.limit = name, to
        self._steps = recipe.training.steps if leaves_at is None else leaves_at
        self.error: BaseException | None = None
        self._task = Training(recipe)
        self._task.module = module or self._task.module
        self._recipe, self._gone = recipe, False
        self.site = join(address, site=name, credentials=certs, insecure=certs is None, **options)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._train()
        except WeightGradError as error:
            self.error = error
        finally:
            self._hang_up()

    def _train(self) -> None:
        """As `train.field.train` does."""
        recipe, task, site = self._recipe, self._task, self.site
        number = [one.name for one in recipe.site_list].index(self.name)
        chosen = recipe.training.optimizer
        optimizer = optimizers.build(chosen.name, list(task.module.parameters()), optimizer_options(chosen))
        site.prepare(task.module, optimizer, samples=task.samples(number))
        rate = rate_of(recipe)
        while site.steps < self._steps:
            while site.steps >= self.limit and not self._gone:
                time.sleep(0.01)
            if self._gone:
                return
            step = site.steps
            if step and step % task.epoch_steps == 0:
                set_rate(optimizer, rate(step - 1))
                site.new_epoch()
            task.backward(number, 0, step)
            set_rate(optimizer, rate(step))
            optimizer.step()
            optimizer.zero_grad()
        site.leave()

    @property
    def shard(self) -> SiteShard:
        assert self.site._training is not None
        return self.site._training.shard

    @property
    def coordinator(self) -> SiteCoordinator:
        assert self.site._training is not None
        assert self.site._training.coordinator is not None
        return self.site._training.coordinator

    def digest(self) -> str:
        """Of the site's global model."""
        if isinstance(self.shard, UpdateShard):
            return f"{digest_of(self.shard.global_model, self.shard.held):016x}"
        whole = self._task.layout.gather(self._task.module)
        return f"{digest_of(whole, self.shard.held):016x}"

    def extend(self, steps: int) -> bool:
        """Let it go on so far, once it has come to its limit; false, for use while waiting."""
        if self.site.steps >= self.limit:
            self.limit += steps
        return False

    @property
    def version(self) -> int:
        training = self.site._training
        return training.coordinator.version if training is not None and training.coordinator is not None else 0

    def vanish(self) -> None:
        """As by kill -9 when the disk is idle: the connections are gone and nobody has said goodbye."""
        self._gone = True
        self._hang_up()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if (training := self.site._training) is not None and training.checkpoint is not None:
            training.checkpoint.writer.wait()

    def _hang_up(self) -> None:
        present_sites.remove(self.site._options.address, self.site.name, self.site)
        if self.site.events is not None:
            self.site.events.close()
        if (entry := self.site._entry) is not None and entry.connection is not None:
            entry.connection.abort()


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The facts and the tensors of a site's newest checkpoint."""
    newest = sorted(directory.glob("checkpoint-*"))[-1]
    reader = FileSystemReader(newest)
    about: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in about.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch would like a process group
        load(tensors, storage_reader=reader, no_dist=True)
    return json.loads((newest / "facts.json").read_text()), tensors


def digest_text(vector: torch.Tensor) -> str:
    """The digest of a whole flat model."""
    return f"{digest_of(vector, Intervals.whole(vector.numel())):016x}"


def finish(*sites: Runner) -> None:
    """Until all have left; raises if one has failed."""
    for site in sites:
        site.limit = 10**9
    for site in sites:
        site._thread.join(PATIENCE_S)
        assert not site._thread.is_alive(), f"{site.name} is at step {site.site.steps}"
        if site.error is not None:
            raise site.error
