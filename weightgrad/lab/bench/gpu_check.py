"""Everything that nobody could run on a GPU yet, in one command: `./scripts/test-gpu`.

1. Kernels: what a GPU encodes and decodes has the bytes and floats of the CPU, for odd shapes.
2. Bandwidth: how fast the GPU encodes and decodes, against a copy on the device.
3. Steps: GPT with 124 M parameters, plain, between rounds and with a round; under FSDP2 where there are several GPUs.
4. Sites: two on one GPU, and on two where there are two. Both end with the same global model.

The results are one Markdown file, to be sent in.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

import weightgrad
from weightgrad import kernels
from weightgrad.codecs import decode, decode_add, parse
from weightgrad.lab.bench.gpu_steps import Steps
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.deployment import run_config
from weightgrad.machine import processor
from weightgrad.runtime.server.global_server import GlobalServer, ServeOptions
from weightgrad.runtime.transport.grpc_server import GrpcServer

NO_GPU = 3
"""The exit code where there is no GPU."""
_MOST_SAID = 600  # characters of an error in the report

SPECS = (
    "qsgd(bits=2)", "qsgd(bits=4)", "qsgd(bits=8)", "ef(qsgd(bits=4))", "terngrad(clip=2.5)", "onebit()", "sign()",
    "topk(0.01)", "ef(topk(0.01) > sign())", "ef(topk(0.01) > qsgd(bits=4))", "threshold(1.0)",
)  # fmt: skip
SHAPES = ((), (1,), (17,), (33, 31), (2, 3, 4, 5), (70001,), (515, 129))
_RECIPE = """
name: gpu-check
data: {name: digits}
model: {name: lenet-digits}
training: {steps: 1, batch: 2, optimizer: {name: sgd, lr: 0.1}}
server: {name: hub}
sites: [{name: east, workers: 1}, {name: west, workers: 1}]
links:
  - {between: [hub, east], bandwidth: 1 Gbit/s, delay: 1 ms}
  - {between: [hub, west], bandwidth: 1 Gbit/s, delay: 1 ms}
compute: {seconds_per_step: 1}
strategy: {name: diloco, every: EVERY, t_global: 600}
"""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    what: str
    result: str
    good: bool


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    """Floats of many sizes, with zeros of both signs and ties among them."""
    draw, n = torch.Generator().manual_seed(seed), math.prod(shape)
    x = torch.randn(n, generator=draw) * torch.exp(2 * torch.randn(n, generator=draw))
    x[::17], x[5::23], x[3::29] = 0.0, -0.0, 1.0
    return x.view(shape)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors on the host are equal to the last bit."""
    return torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))


def kernels_agree(
    device: torch.device, specs: Sequence[str] = SPECS, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[Check]:
    """Encode and decode the same tensors on a device and on the CPU, three times with a memory in between."""
    return [line for spec in specs for line in attempt(f"`{spec}`", partial(_agreement, spec, shapes, device))]


def _agreement(spec: str, shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Check]:
    wrong = [str(list(shape)) for shape in shapes if not _agrees(spec, shape, device)]
    return [Check(f"`{spec}`", f"differs for {', '.join(wrong)}" if wrong else "same bytes", not wrong)]


def attempt(what: str, work: Callable[[], list[Check]]) -> list[Check]:
    """The lines of a check; one that fails is a line itself, and the checks after it are made all the same."""
    try:
        return work()
    except Exception as failure:
        print("".join(traceback.format_exception(failure)), file=sys.stderr)
        said = " ".join(f"{type(failure).__name__}: {failure}".split()).replace("|", "\\|")
        return [Check(what, said if len(said) <= _MOST_SAID else f"... {said[-_MOST_SAID:]}", False)]


def _agrees(spec: str, shape: tuple[int, ...], device: torch.device) -> bool:
    codec = parse(spec)
    here, there = codec.init(torch.zeros(shape)), codec.init(torch.zeros(shape, device=device))
    for step in range(3):
        x = values(shape, step)
        ours, here = codec.encode(x, here, step)
        theirs, there = codec.encode(x.to(device), there, step)
        added, sums = x.clone(), x.to(device)
        decode_add(ours, added)
        decode_add(theirs, sums)
        pairs = ((ours.body, theirs.body), (decode(ours), decode(theirs)), (added, sums))
        if ours.params != theirs.params or not all(same_bits(one, other.cpu()) for one, other in pairs):
            return False
    return True


def bandwidths(device: torch.device, wait: Callable[[], None], megabytes: float = 256) -> list[Check]:
    """The speed of each codec on a device, against a copy there of the same floats."""
    n = int(megabytes * 1e6 / 4)
    x = values((n,), 0).to(device)
    target = torch.empty_like(x)
    copy = _seconds(lambda: target.copy_(x), wait)
    found = [Check("a copy on the device", f"{4e-9 * n / copy:.1f} GB/s", True)]
    for spec in SPECS:
        found += attempt(f"`{spec}`", partial(_bandwidth, spec, x, target, wait, copy))
    return found


def _bandwidth(spec: str, x: Tensor, target: Tensor, wait: Callable[[], None], copy: float) -> list[Check]:
    codec = parse(spec)
    payload, state = codec.encode(x, codec.init(x), 0)
    encoding = _seconds(lambda: codec.encode(x, state, 1), wait)
    decoding = _seconds(lambda: decode(payload, out=target), wait)
    return [Check(f"`{spec}`", f"encodes {copy / encoding:.2f}, decodes {copy / decoding:.2f} of a copy", True)]


def _seconds(work: Callable[[], object], wait: Callable[[], None], repeats: int = 5) -> float:
    best = math.inf
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - began)
    return best


class Server:
    """A global server in a thread of this process, for these sites."""

    def __init__(self, sites: Sequence[str], every: int) -> None:
        config = run_config(Recipe.parse(_RECIPE.replace("EVERY", str(every)), "gpu-check.yaml"))
        self._transport = GrpcServer("127.0.0.1:0", credentials=None)
        self.address = f"127.0.0.1:{self._transport.port}"
        self._server = GlobalServer(replace(config, sites=tuple(sites)), ServeOptions(), self._transport, None)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
        self._thread.join(60)


@dataclass(frozen=True)
class Plan:
    """How much is measured: less of it to try the check itself."""

    size: str = "124m"
    batch: int = 2
    steps: int = 24
    every: int = 8
    megabytes: float = 256
    timeout: float = 3600


def run_sites(devices: dict[str, str], plan: Plan, *, ranks: int = 1, shards: bool = False) -> dict[str, Steps]:
    """Run sites as processes of this machine, each on its device; of several ranks under torchrun."""
    with tempfile.TemporaryDirectory() as directory, Server(tuple(devices), plan.every) as server:
        started = {
            site: subprocess.Popen(
                _command(site, device, server.address, Path(directory), plan, ranks, shards),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for site, device in devices.items()
        }
        try:
            for site, process in started.items():
                said, _ = process.communicate(timeout=plan.timeout)
                if process.returncode:
                    raise RuntimeError(f"{site} on {devices[site]} ended with {process.returncode}:\n{said[-3000:]}")
        finally:
            for process in started.values():
                process.kill()
                process.wait()
        return {site: Steps(**json.loads((Path(directory) / f"{site}.json").read_text())) for site in devices}


def _command(site: str, device: str, address: str, directory: Path, plan: Plan, ranks: int, shards: bool) -> list[str]:
    module = ["-m", "weightgrad.lab.bench.gpu_steps"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    options = ["--server", address, "--site", site, "--device", device, "--size", plan.size]
    options += ["--batch", str(plan.batch), "--steps", str(plan.steps), "--every", str(plan.every)]
    options += ["--out", str(directory / f"{site}.json"), *(["--shards"] if shards else [])]
    return [sys.executable, *launcher, *module, *options]


def step_checks(what: str, found: dict[str, Steps]) -> list[Check]:
    """Lines about the steps of some sites; they must agree on the global model."""
    lines = []
    for site, one in found.items():
        text = (
            f"{one.parameters / 1e6:.1f} M parameters on {one.ranks} rank(s): plain {1e3 * one.plain:.1f} ms a step, "
            f"between rounds {1e3 * one.between:.1f} ms ({one.between / one.plain - 1:+.1%}), with a round "
            f"{1e3 * one.rounds:.1f} ms"
        )
        lines.append(Check(f"{what}, {site}", text, True))
    if len(found) > 1:
        digests = {one.digest for one in found.values()}
        same = len(digests) == 1
        lines.append(Check(f"{what}, global models", "the same bits" if same else "differ", same))
    return lines


def checks(kind: str, count: int, plan: Plan, wait: Callable[[], None]) -> dict[str, list[Check]]:
    """All checks on so many devices of a kind."""
    first, second = (f"{kind}:0", f"{kind}:1") if kind == "cuda" else (kind, kind)

    def steps(what: str, devices: dict[str, str], ranks: int = 1) -> list[Check]:
        return attempt(what, lambda: step_checks(what, run_sites(devices, plan, ranks=ranks, shards=ranks > 1)))

    found = {
        "Kernels against the CPU": kernels_agree(torch.device(first)),
        "Bandwidth": attempt("bandwidth", lambda: bandwidths(torch.device(first), wait, plan.megabytes)),
        "Steps": steps("one site, one rank", {"east": first}),
        "Two sites": steps("both on one device", {"east": first, "west": first}),
    }
    if count > 1:
        found["Steps"] += steps("one site, FSDP2", {"east": kind}, ranks=count)
        found["Two sites"] += steps("each on its own", {"east": first, "west": second})
    return found


def report(found: dict[str, list[Check]], devices: str) -> str:
    """The checks as a Markdown document."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        "# WeightGrad on GPUs",
        "",
        f"`./scripts/test-gpu`, {now}",
        "",
        f"- weightgrad {weightgrad.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        f"- devices: {devices}",
        f"- processor: {processor()}",
        f"- kernels on GPUs: {kernels.gpu_status()}; on the CPU: {kernels.status()}",
    ]
    for title, rows in found.items():
        lines += ["", f"## {title}", "", "| | result | |", "|---|---|---|"]
        lines += [f"| {row.what} | {row.result} | {'ok' if row.good else 'WRONG'} |" for row in rows]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Check the GPUs of this machine; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/test-gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check.md"), help="the file to send in")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("No GPU: torch finds no CUDA device, so nothing was checked. See docs/gpus.md.", file=sys.stderr)
        return NO_GPU
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(place) for place in range(count))
    found = checks("cuda", count, Plan(), torch.cuda.synchronize)
    text = report(found, names)
    args.out.write_text(text)
    print(text)
    print(f"Written to {args.out}.")
    return 0 if all(row.good for rows in found.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
