"""Checkpoints of a simulated run, from which it goes on to the same bits: the same event log, byte by byte.

A checkpoint holds everything that changes during a run: both state machines, optimizers, messages under way and
the clock's queue, the module's buffers, and the event log so far. The plan, the data and the initial module follow from
the recipe and are made anew. Views of one memory stay views of one memory.

It is a pickle, for the machine and the sources that wrote it, which a hash in its first line tells: unlike what a
deployment receives or keeps, it is no format to exchange. Read only what you wrote.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

import weightgrad
from weightgrad.event_log import EventLog
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.task import Training
from weightgrad.lab.sim.plan import SimulationPlan
from weightgrad.lab.sim.simulator import Simulator

FILE = "checkpoint.pickle"


class _Memory:
    """The bytes of a storage, which several tensors may share."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        flat = torch.empty(0, dtype=torch.uint8).set_(self.storage)
        return _memory, (flat.numpy(),)


def _memory(data: Any) -> _Memory:
    return _Memory(torch.from_numpy(data).untyped_storage())


def _typed(memory: _Memory, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=memory.storage, dtype=dtype, _internal=True)


def _parameter(data: Tensor, requires_grad: bool, grad: Tensor | None) -> nn.Parameter:
    made = nn.Parameter(data, requires_grad=requires_grad)
    made.grad = grad
    return made


def _recached(function: Callable[..., Any], maxsize: int | None) -> Callable[..., Any]:
    return functools.lru_cache(maxsize=maxsize)(function)


class _Pickler(pickle.Pickler):
    """Leaves out what follows from the recipe, and writes shared memory once."""

    def __init__(self, file: BinaryIO, outside: dict[str, object]) -> None:
        super().__init__(file, protocol=5)
        self._outside = {id(one): name for name, one in outside.items()}
        self._memory: dict[int, _Memory] = {}

    def persistent_id(self, obj: Any) -> str | None:
        """The name of an object that is not written."""
        return self._outside.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        """How storages, parameters with their gradients and caches of methods are written; all else as usual."""
        if isinstance(obj, torch.storage.TypedStorage):
            untyped = obj._untyped_storage
            return _typed, (self._memory.setdefault(untyped._cdata, _Memory(untyped)), obj.dtype)
        if isinstance(obj, nn.Parameter):
            return _parameter, (obj.data, obj.requires_grad, obj.grad)
        if isinstance(obj, functools._lru_cache_wrapper) and hasattr(obj.__wrapped__, "__self__"):
            return _recached, (obj.__wrapped__, obj.cache_parameters()["maxsize"])
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Takes what was left out from `outside`."""

    def __init__(self, file: BinaryIO, outside: dict[str, object]) -> None:
        super().__init__(file)
        self._outside = outside

    def persistent_load(self, pid: Any) -> object:
        """The object of a name."""
        return self._outside[pid]


def mark(recipe: Recipe) -> str:
    """A hash of the recipe, of torch's version and of the sources: a checkpoint of another one is of no use."""
    found = hashlib.sha256(json.dumps([recipe.dump(), torch.__version__], sort_keys=True, default=str).encode())
    root = Path(weightgrad.__file__).parent
    for path in sorted(root.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Begun:
    """What a checkpoint says about a run before it is read whole: the event log so far, and its wall time."""

    log: bytes
    wall_seconds: float


def write(path: Path, simulator: Simulator, task: Training, *, mark: str, wall_seconds: float) -> None:
    """Write a checkpoint, between two actions of the clock; the file is there whole or not at all.

    Args:
        path: The file.
        simulator: The run.
        task: Its task.
        mark: `mark` of its recipe.
        wall_seconds: Wall time of the run so far.
    """
    watch, simulator.watch = simulator.watch, None
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            file.write(mark.encode() + b"\n")
            pickle.dump(Begun(simulator.events.path.read_bytes(), wall_seconds), file)
            outside = _outside(simulator.plan, task, simulator.events)
            _Pickler(file, outside).dump((simulator, dict(task.module.named_buffers())))
        os.replace(partial, path)
    finally:
        simulator.watch = watch
        partial.unlink(missing_ok=True)


def begun(path: Path, *, mark: str) -> Begun | None:
    """How far a run is; None if there is no checkpoint, or it is of another recipe or of other sources."""
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        if file.readline() != mark.encode() + b"\n":
            return None
        found = pickle.load(file)
    assert isinstance(found, Begun)
    return found


def read(path: Path, plan: SimulationPlan, task: Training, events: EventLog) -> Simulator:
    """Read the simulator of a checkpoint that `begun` has found good.

    Args:
        path: The file.
        plan: The plan of the recipe.
        task: Its task, whose buffers are set.
        events: The event log to continue.
    """
    with open(path, "rb") as file:
        file.readline()
        pickle.load(file)
        simulator, buffers = _Unpickler(file, _outside(plan, task, events)).load()
    assert isinstance(simulator, Simulator)
    for name, buffer in task.module.named_buffers():
        buffer.copy_(buffers[name])
    return simulator


def _outside(plan: SimulationPlan, task: Training, events: EventLog) -> dict[str, object]:
    """What follows from the recipe, by name."""
    return {"plan": plan, "strategy": plan.strategy, "rate": plan.rate, "task": task, "events": events}
