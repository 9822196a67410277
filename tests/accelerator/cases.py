"""What is done on the pretend accelerator, each in a process: `run_case.py CASE [ARGUMENTS]`.

Every case is a process of its own, because a device is known to the whole process.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from tests.accelerator import interpreter, pretend, streams
from tests.accelerator.pretend import ACCELERATOR, Counts, HostReadError, MixedDevicesError, Traffic
from tests.accelerator.streams import DeviceModule, RaceError, current_stream, stream
from tests.runtime import user_sites
from tests.runtime.deployment import PATIENCE_S
from tests.runtime.user_sites import Meet
from weightgrad import codecs, kernels
from weightgrad.core.layout import Layout
from weightgrad.core.residual import Residual
from weightgrad.errors import StrategyError
from weightgrad.lab.bench import gpu_check, gpu_steps
from weightgrad.runtime.join import join
from weightgrad.runtime.model import device_copies
from weightgrad.runtime.model.device_copies import DeviceCopies
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.runtime.model.named_parameter import NamedParameter
from weightgrad.runtime.model.weights_snapshot import WeightsSnapshot
from weightgrad.runtime.session import Site
from weightgrad.wire.intervals import Intervals

DEVICE = torch.device("privateuseone", 0)  # its name until `register` has been called
Case = Callable[..., None]
CASES: dict[str, Case] = {}
STEPS = 8


def case(function: Case) -> Case:
    """Let a function be called by its name."""
    CASES[function.__name__] = function
    return function


def raises(kind: type[BaseException], work: Callable[[], object]) -> None:
    try:
        work()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def same(first: Tensor, second: Tensor) -> None:
    assert torch.equal(pretend.values(first), pretend.values(second)), (first, second)


# -- the device itself ---------------------------------------------------------------------------


@case
def refuses() -> None:
    """What would fail or be slow on a GPU raises."""
    here, there = torch.ones(3), torch.ones(3).to(DEVICE)
    raises(MixedDevicesError, lambda: here + there)
    raises(MixedDevicesError, lambda: there.add_(here))
    raises(MixedDevicesError, lambda: there[torch.tensor([0, 1])])
    raises(TypeError, lambda: there.numpy())
    raises(TypeError, lambda: there.data_ptr() + 4)
    library = kernels.native.library_for(here)
    if library is not None:
        import ctypes

        raises(ctypes.ArgumentError, lambda: library.wg_largest(there.data_ptr(), 3))
    assert kernels.native.library_for(there) is None
    assert there.data_ptr() == there.view(3, 1).data_ptr()
    assert there.data_ptr() != there[1:].data_ptr()
    raises(AssertionError, lambda: torch.get_device_module(DEVICE).synchronize())
    raises(AssertionError, lambda: torch.empty(3).copy_(there, non_blocking=True))  # not pinned
    same(there + 1, here + 1)
    with ACCELERATOR.counted() as counts:
        assert float(there.sum()) == 3
    assert counts.reads == ["user"]
    flat = torch.ones(3, dtype=torch.float64).to(DEVICE)
    raises(HostReadError, lambda: codecs.parse("fp32").encode(flat, {}, 0))  # asks whether all of it is finite


@case
def counts() -> None:
    """Copies are counted each way, in number and bytes, and those for which the host waits."""
    with ACCELERATOR.counted() as found:
        there = torch.ones(3, dtype=torch.bfloat16).to(DEVICE)
        (there * 2 + there).clone()
        there.cpu()
        torch.empty(3).copy_(there)
    assert found.to_device == Traffic(1, 6)
    assert found.to_host == Traffic(2, 12)
    assert found.blocking == 3


@case
def copies_need_to_be_waited_for() -> None:
    """The target of a copy holds garbage, and its source must be left alone, until an event is waited for."""
    there = torch.arange(4.0).to(DEVICE)
    buffer = ACCELERATOR.pinned(16, DEVICE).view(torch.float32)
    buffer.copy_(there, non_blocking=True)
    assert not torch.equal(buffer, torch.arange(4.0))
    event = current_stream().record_event()
    assert not torch.equal(buffer, torch.arange(4.0)), "recording is not waiting"
    event.synchronize()
    same(buffer, torch.arange(4.0))
    there.copy_(buffer, non_blocking=True)
    buffer.fill_(7)
    raises(RaceError, lambda: current_stream().synchronize())


@case
def streams_need_to_wait() -> None:
    """A stream that uses what another has written, or writes what another reads, must wait for it."""
    own = DeviceModule.Stream()
    there = torch.zeros(4).to(DEVICE).mul_(2)

    def beside() -> Tensor:
        with stream(own):
            return there + 1

    raises(RaceError, beside)
    own.wait_stream(current_stream())
    found = beside()
    raises(RaceError, lambda: there.add_(1))
    raises(RaceError, lambda: found + 1)
    current_stream().wait_event(own.record_event())
    there.add_(1)
    same(found + 1, torch.full((4,), 2.0))
    with stream(own):
        event = own.record_event()
    event.synchronize()  # what the host has waited for comes before all that it asks for
    there.add_(found)


# -- copies of the package -----------------------------------------------------------------------


def _parameters(*tensors: Tensor) -> tuple[list[NamedParameter], Layout]:
    named = [NamedParameter(f"p{place}", nn.Parameter(one.to(DEVICE))) for place, one in enumerate(tensors)]
    return named, Layout.of_shapes((one.name, one.shape) for one in named)


@case
def rooms_are_used_again() -> None:
    """More than fits the buffers, each way, with other work of the user's stream in between."""
    device_copies._MOST_STAGED = 64  # elements: many buffers are needed
    values = torch.randn(5, 100)
    there = values.to(DEVICE)
    copies = DeviceCopies(DEVICE)
    out = torch.empty(500)
    copies.read(list(there.view(-1).split(70)), list(out.split(70)))
    same(out, values.view(-1))
    with ACCELERATOR.counted() as found:
        copies.store([there.view(-1)], [out * 2])
        copies.add([there.view(-1)], [out])
        there.mul_(2)
        copies.add_entries(there.view(-1), torch.tensor([3, 499]), torch.tensor([1.0, 2.0]))
    expected = (values.view(-1) * 2 + values.view(-1)) * 2
    expected[3] += 1
    expected[499] += 2
    same(there.view(-1), expected)
    assert found.blocking == 0
    assert found.to_device.nbytes == 500 * 4 * 2 + 2 * (4 + 4)


@case
def weights_cross_in_their_dtype() -> None:
    """Expected or not, once, and as many bytes as they have on the device."""
    first, second = torch.randn(3, 5), torch.randn(40).to(torch.bfloat16)
    named, layout = _parameters(first, second)
    weights = ModuleWeights(named, layout)
    whole = torch.cat((first.view(-1), second.float()))
    parts = [Intervals(((0, 20),)), Intervals(((20, 30), (40, 55))), Intervals(((30, 40),))]

    def expected(part: Intervals) -> Tensor:
        return torch.cat([whole[start:stop] for start, stop in part.spans])

    for told in (True, False):
        with ACCELERATOR.counted() as found:
            weights.expect(parts if told else ())
            for part in parts:
                same(weights.read(part, torch.empty(part.numel)), expected(part))
        assert found.to_host == Traffic(5, 4 * 15 + 2 * 40)
        assert found.blocking == 0
    with ACCELERATOR.counted() as found:
        weights.write(Intervals.whole(55), whole * 2)
        weights.add(Intervals.whole(55), whole)
    same(named[0].parameter, first * 2 + first)
    same(named[1].parameter, ((second * 2).float() + second.float()).to(torch.bfloat16))
    assert found.to_device == Traffic(4, (4 * 15 + 2 * 40) + 4 * 55)
    with ACCELERATOR.counted() as found:
        there = torch.empty(15, device=DEVICE)
        same(weights.read(Intervals.whole(15), there), (first * 3).view(-1))
        weights.write(Intervals.whole(15), there * 2)
    assert found == Counts(), "nothing crosses where the memory given is on the device"


# -- a whole site --------------------------------------------------------------------------------


class Trial:
    """A site that trains on the device or on the host, and what crossed in each of its steps."""

    def __init__(self, strategy: str, device: torch.device, **options: Any) -> None:
        self.device, self.options = device, options
        self.dtype: torch.dtype = options.pop("dtype", torch.float32)
        self.scaled: bool = options.pop("scaled", False)
        self.make: Callable[[Iterator[nn.Parameter]], Optimizer] = options.pop("make", lambda p: AdamW(p, lr=0.02))
        self.forward: Callable[[nn.Module, Tensor], Tensor] = options.pop("forward", lambda model, x: model(x))
        self.steps: list[Counts] = []
        results, self.global_model = user_sites.run_sites(strategy, self._script, "east")
        self.model: Tensor = results["east"]

    def _script(self, site: Site, meet: Meet) -> Tensor:
        model: nn.Module = user_sites.network().to(self.dtype)
        if self.device.type != "cpu":
            pretend.moved(model)
        model, optimizer = site.prepare(model, self.make(model.parameters()), **self.options)
        scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**8, growth_interval=1000)
        meet()
        for step in range(STEPS):
            x, y = user_sites.batch("east", step)
            scores = self.forward(model, x.to(self.dtype).to(self.device)).float()
            loss = functional.cross_entropy(scores, y.to(self.device))
            (scaler.scale(loss) if self.scaled else loss).backward()
            with ACCELERATOR.counted() as counts:
                if self.scaled:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
            self.steps.append(counts)
            optimizer.zero_grad()
        site.leave()
        return torch.cat([pretend.values(p.detach()).float().flatten() for p in model.parameters()])


NUMEL, TENSORS = 146, 4
TIMED = ("auto", "gaia")  # they follow measured times, so that no two runs have the same bits


@case
def equals_the_host(strategy: str) -> None:
    """A site on the device ends with the same bits as one on the host, and the host never waits for a copy at once."""
    ACCELERATOR.readers = set()
    there = Trial(strategy, DEVICE)
    same(there.model, there.global_model)
    if strategy not in TIMED:
        same(there.global_model, Trial(strategy, torch.device("cpu")).global_model)
    measured = strategy.startswith("weightgrad")  # the significance trigger looks at a sample now and then
    assert all(counts.reads == [] and (counts.blocking == 0 or measured) for counts in there.steps)


@case
def state_on_the_device(strategy: str) -> None:
    """With its state on the device a site has the same bits, and only encoded bytes cross, asynchronously."""
    ACCELERATOR.readers = _Anything()
    there = Trial(strategy, DEVICE, state_on="device")
    same(there.model, there.global_model)
    if strategy not in TIMED:
        same(there.global_model, Trial(strategy, torch.device("cpu")).global_model)
    for counts in there.steps:
        # Entries are found where each tensor begins and ends (8 bytes an edge); codebooks are made from a sample.
        edges = 8 * 2 * TENSORS * counts.blocking
        samples = 2 * 4 * NUMEL if strategy == "weightgrad" else 0  # of its trigger
        assert counts.to_host.nbytes <= 4 * NUMEL + edges + samples, counts
        assert counts.blocking == 0 or strategy in ("auto", "gaia", "weightgrad") or "sparse" in strategy, counts


@case
def triton_kernels(strategy: str, *expected: str) -> None:
    """With the Triton kernels, a site whose state is on the device has the bits of one on the host."""
    ACCELERATOR.readers = _Anything()
    launches = interpreter.installed()
    there = Trial(strategy, DEVICE, state_on="device")
    assert set(expected) <= set(launches), f"{expected} wanted, {dict(launches)} launched"
    same(there.model, there.global_model)
    same(there.global_model, Trial(strategy, torch.device("cpu")).global_model)


@case
def encoded_bytes_cross() -> None:
    """A round brings the bytes of the push to the host and those of the result to the device, and no more."""
    ACCELERATOR.readers = _Anything()
    body = codecs.parse("qsgd(bits=4)").encode(torch.ones(NUMEL), {}, 0)[0].body.numel()
    update = "diloco, every: 4, up: qsgd(bits=4), down: qsgd(bits=4)"
    for strategy, every in ((update, 4), ("qsgd", 1)):
        for step, counts in enumerate(Trial(strategy, DEVICE, state_on="device").steps):
            expected = Traffic(1, body) if step % every == every - 1 else Traffic()
            assert (counts.to_host, counts.to_device, counts.blocking) == (expected, expected, 0), (strategy, step)
    trial = Trial(update, DEVICE, state_on="device", dtype=torch.bfloat16)
    same(trial.global_model, Trial(update, torch.device("cpu"), dtype=torch.bfloat16).global_model)
    assert [counts.to_host.nbytes for counts in trial.steps] == [0, 0, 0, body] * 2


@case
def state_that_devices_refuse() -> None:
    """What would have other bits on a device is refused, with the reason; on the host nothing is."""
    for strategy in ("powersgd", "weightgrad-paper", "diloco, selector: largest(0.1)"):
        raises(StrategyError, functools.partial(Trial, strategy, DEVICE, state_on="device"))
        Trial(strategy, torch.device("cpu"), state_on="device")
    raises(StrategyError, lambda: Trial("diloco", DEVICE, state_on="gpu"))


@case
def pushes_beside_passes(strategy: str) -> None:
    """A push that moves nothing is encoded while the next passes run: it waits here until a forward pass has begun.

    The weights are copied once, at the round, and the host waits for none of it in the step.
    """
    passes, needed, pushes, beside = 0, 0, 0, 0
    begun = threading.Condition()
    take, encode = WeightsSnapshot.take, Residual.take

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal passes
        with begun:
            passes += 1
            begun.notify_all()
        found: Tensor = model(x)
        return found

    def taken(self: WeightsSnapshot, upcoming: Any) -> None:
        nonlocal needed, pushes
        needed, pushes = passes + 1, pushes + 1
        take(self, upcoming)

    def encoded(self: Residual, *args: Any, **kwargs: Any) -> Any:
        nonlocal beside
        if threading.current_thread().name.startswith("push"):  # and not the server's
            with begun:
                assert begun.wait_for(lambda: passes >= needed, PATIENCE_S), "encoded in the step"
            beside += 1
        return encode(self, *args, **kwargs)

    expected = Trial(strategy, torch.device("cpu")).global_model
    WeightsSnapshot.take, Residual.take = taken, encoded  # type: ignore[method-assign]
    for dtype in (torch.float32, torch.bfloat16):
        pushes = beside = 0
        trial = Trial(strategy, DEVICE, forward=forward, dtype=dtype)
        assert beside == pushes > 0, (beside, pushes)
        if dtype == torch.float32:
            same(trial.global_model, expected)
        assert all(counts.reads == [] and counts.blocking == 0 for counts in trial.steps)
        if "every: 3" in strategy:
            pushed = Traffic(TENSORS, dtype.itemsize * NUMEL)
            assert [counts.to_host for counts in trial.steps[:3]] == [Traffic(), Traffic(), pushed], trial.steps


class GoneError(Exception):
    """The process ends here."""


@case
def two_lives(strategy: str) -> None:
    """A site on the device that goes on from its `state_dict` has the bits of one on the host that never ended."""
    ACCELERATOR.readers = _Anything()
    ends = 11

    def script(device: torch.device, place: str, until: int, begins: bytes | None, saved: list[bytes]) -> Any:
        def run(site: Site, meet: Meet) -> None:
            model: nn.Module = user_sites.network(1 if begins is None else 9)
            if device.type != "cpu":
                pretend.moved(model)
            if begins is not None:
                site.load_state_dict({"state": begins})
            model, optimizer = site.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9), state_on=place)
            meet()
            while site.steps < until:
                _gradients(model, device, site.steps, 0)
                optimizer.step()
                optimizer.zero_grad()
            if until < ends:
                saved.append(site.state_dict()["state"])
                raise GoneError
            site.leave()

        return run

    def lives(device: torch.device, place: str, *stops: int) -> Tensor:
        saved: list[bytes] = []
        with user_sites.served(strategy, "east") as hub:
            for until in stops:
                begins = saved[-1] if saved else None
                thread = user_sites.UserScript(hub.address, "east", script(device, place, until, begins, saved))
                while thread.is_alive():
                    hub.tick()
                hub.until(lambda: not any(member.live for member in hub.core.members.by_name.values()))
                if until < ends:
                    assert isinstance(thread.error, GoneError), thread.error
            thread.end()
            return hub.global_model.vector.clone()

    expected = lives(torch.device("cpu"), "host", ends)
    same(lives(DEVICE, "device", 5, ends), expected)
    same(lives(DEVICE, "host", 5, ends), expected)


@case
def a_round_copies_the_shard_once() -> None:
    """Between rounds nothing crosses; at a round the weights do once, each way."""
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        trial = Trial("diloco, every: 4", DEVICE, dtype=dtype)
        for step, counts in enumerate(trial.steps):
            round_ = step % 4 == 3
            expected = Traffic(TENSORS, width * NUMEL) if round_ else Traffic()
            assert counts == Counts(expected, expected), (dtype, step, counts)


@case
def gradients_cross_at_every_step() -> None:
    """Strategies that share gradients have a round at every step, and no other copies."""
    for counts in Trial("qsgd", DEVICE).steps:
        assert counts == Counts(Traffic(TENSORS, 4 * NUMEL), Traffic(TENSORS, 4 * NUMEL))


@case
def sparse_results_cross_as_entries() -> None:
    """Of a sparse result that comes during training only the entries cross: a place and a value, four bytes each."""
    trial = Trial("weightgrad, every: 4", DEVICE)
    crossed = [counts.to_device.nbytes for counts in trial.steps]
    assert any(0 < nbytes < 4 * NUMEL for nbytes in crossed), crossed
    assert all(nbytes % 8 == 0 for nbytes in crossed)


@case
def scalers_and_optimizers() -> None:
    """GradScaler, foreach and bfloat16: the same as on the host, and one value read for a step of a scaler."""
    ACCELERATOR.readers = {"step_hooks.py:_scaler_skips"}
    makers: tuple[Callable[[Iterator[nn.Parameter]], Optimizer], ...] = (
        lambda p: AdamW(p, lr=0.02, foreach=True),
        lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=False),
    )
    for make, strategy in itertools.product(makers, ("diloco, every: 4", "baseline")):
        there = Trial(strategy, DEVICE, scaled=True, make=make)
        here = Trial(strategy, torch.device("cpu"), scaled=True, make=make)
        same(there.global_model, here.global_model)
        assert [counts.reads for counts in there.steps] == [["step_hooks.py:_scaler_skips"]] * STEPS
    for strategy in ("diloco, every: 4", "weightgrad", "streaming"):
        there = Trial(strategy, DEVICE, dtype=torch.bfloat16)
        here = Trial(strategy, torch.device("cpu"), dtype=torch.bfloat16)
        same(there.global_model, here.global_model)


@case
def saved_activations() -> None:
    """Activations that wait on the host, and gradient checkpointing: the hooks see the same gradients.

    Checkpointing is tried on the host: computing again in backward aborts torch's backends in Python.
    """

    def offloaded(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            found: Tensor = model(x)
            return found

    def again(model: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(model, x, use_reentrant=False)
        return found

    expected = Trial("diloco, every: 4", DEVICE).global_model
    trial = Trial("diloco, every: 4", DEVICE, forward=offloaded)
    same(trial.global_model, expected)
    assert [counts.to_host.copies for counts in trial.steps] == [0, 0, 0, TENSORS] * 2
    same(Trial("diloco, every: 4", torch.device("cpu"), forward=again).global_model, expected)


# -- ./scripts/test-gpu --------------------------------------------------------------------------


@case
def the_check_of_gpus() -> None:
    """What `./scripts/test-gpu` does with a device: encode and decode there, measure, and train two sites on it."""
    ACCELERATOR.readers = _Anything()
    lines = gpu_check.kernels_agree(DEVICE, shapes=((), (17,), (33, 31), (3000,)))
    assert len(lines) == len(gpu_check.SPECS)
    assert all(line.good for line in lines), lines
    lines = gpu_check.bandwidths(DEVICE, lambda: None, megabytes=0.05)
    assert len(lines) == 1 + len(gpu_check.SPECS)
    found: dict[str, gpu_steps.Steps] = {}
    with gpu_check.Server(("east", "west"), every=4) as server:
        sites = [join(server.address, site=name, insecure=True) for name in ("east", "west")]

        def train(site: Site) -> None:
            found[site.name] = gpu_steps.measure(site, DEVICE, steps=8, every=4, move=pretend.moved)

        threads = [threading.Thread(target=train, args=(site,), daemon=True) for site in sites]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    lines = gpu_check.step_checks("both on one device", found)
    assert [line.good for line in lines] == [True] * 3
    assert gpu_check.report({"Steps": lines}, "pretend").count("| ok |") == 3


class _Anything(set[str]):
    """Every function may read: codecs read scales and counts where they encode."""

    def __contains__(self, name: object) -> bool:
        return True


# -- ranks of a site -----------------------------------------------------------------------------


@case
def rank(server: str, kind: str, out: str) -> None:
    """One of the ranks of a site, on the device or on the host; leaves its model in a file."""
    on_device = kind.startswith("device")
    ACCELERATOR.readers = _Anything() if "state" in kind else set()
    device = DEVICE if on_device else torch.device("cpu")
    with join(server, site="east", insecure=True, timeout=300) as site:
        model: nn.Module = user_sites.network()
        if on_device:
            pretend.moved(model)
        if "shards" in kind:
            _shard(model, site.group.rank, site.group.size)
        if "fsdp2" in kind:
            offload = CPUOffloadPolicy(pin_memory=False) if "offload" in kind else OffloadPolicy()
            fully_shard(model, mesh=init_device_mesh("cpu", (site.group.size,)), offload_policy=offload)
        place = "device" if "state" in kind else "host"
        model, optimizer = site.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9), state_on=place)
        steps = []
        for step in range(STEPS):
            if "fsdp2" in kind:
                x, y = user_sites.batch("east", step)
                functional.cross_entropy(model(x), y).backward()
            else:
                _gradients(model, device, step, 0 if "shards" in kind else site.group.rank)
            with ACCELERATOR.counted() as found:
                optimizer.step()
            steps.append((found.to_host.nbytes, found.to_device.nbytes, found.blocking))
            optimizer.zero_grad()
    local = [_local(parameter) for parameter in model.parameters()]
    torch.save((steps, torch.cat([pretend.values(one).flatten() for one in local])), f"{out}/{site.group.rank}.pt")


def _local(parameter: nn.Parameter) -> Tensor:
    found: Tensor = parameter.detach()
    return found.to_local() if hasattr(found, "to_local") else found


def _shard(model: nn.Module, rank: int, ranks: int) -> None:
    """Let each rank have some rows of every parameter, as FSDP2 does, in DTensors whose memory is on the device."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh = init_device_mesh("cpu", (ranks,))  # only who the ranks are; nothing is exchanged over it
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            whole = parameter.detach()
            rows = -(-whole.shape[0] // ranks)
            local = whole[rank * rows : (rank + 1) * rows].clone()
            meta = TensorMeta(whole.shape, torch.Size(whole.stride()), whole.dtype)
            spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
            made = DTensor(local, spec, requires_grad=False)
            module._parameters[name] = nn.Parameter(made)


def _gradients(model: nn.Module, device: torch.device, step: int, rank: int) -> None:
    """Leave gradients, as FSDP2 leaves them on shards: what they are does not matter, only where."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    parameter: Any
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=draw)
        if not hasattr(parameter, "to_local"):
            parameter.grad = whole.to(device)
            continue
        from torch.distributed.tensor import DTensor

        local = parameter.to_local()
        first = parameter.__create_chunk_list__()[0].offsets[0]
        own = whole[first : first + local.shape[0]].to(device)
        parameter.grad = DTensor(own, parameter._spec, requires_grad=False)


def main(name: str, *arguments: str) -> None:
    """Do one thing on the device."""
    torch.set_num_threads(1)
    pretend.register()
    device_copies.pinned = ACCELERATOR.pinned
    CASES[name](*arguments)
    streams.finish()
