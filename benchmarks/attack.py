"""A hostile site beside two honest ones, over real TLS, for thousands of sessions: the run must not notice it.

    python benchmarks/attack.py --sessions 2000 --seed 7

One server of three sites; two train a small model and must end with the bits that they have without the third, whose
every session does its worst (`weightgrad/lab/chaos/hostile_site.py`). The memory of the server's process is measured
all the while. The exit code is 1 if the bits differ, or if memory grows by more than `--most-mb`.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

from weightgrad.core.server.guard import Guard
from weightgrad.core.strategies import find
from weightgrad.lab.chaos.hostile_site import HostileSite
from weightgrad.machine import measured_on
from weightgrad.runtime.join import join
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.security import certificates
from weightgrad.runtime.security.credentials import Credentials
from weightgrad.runtime.server.global_server import GlobalServer, ServeOptions
from weightgrad.runtime.transport.grpc_server import GrpcServer

SITES = ("east", "mallory", "west")


def make_model() -> nn.Module:
    """The model of all sites."""
    torch.manual_seed(1)
    return nn.Linear(64, 32)


def train(address: str, name: str, certs: Path, model: nn.Module, steps: int) -> None:
    """An honest site, for so many steps."""
    site = join(address, site=name, credentials=certs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    site.prepare(model, optimizer)
    while site.steps < steps:
        optimizer.zero_grad()
        x = torch.ones(4, 64) * (1.0 if name == "east" else 0.7)
        model(x).square().sum().backward()
        optimizer.step()
    site.leave()


def run(certs: Path, *, steps: int, sessions: int, seed: int) -> tuple[str, HostileSite | None, float]:
    """A run. Returns the digest of its model, the hostile site, and by how many MB the process has grown."""
    config = RunConfig(
        SITES, lambda numel: find("diloco", {"every": 1, "aggregator": "mean", "t_global": 10.0}), seed=3
    )
    credentials = Credentials.load(certs, server=True)
    transport = GrpcServer("127.0.0.1:0", credentials=credentials.for_server())
    server = GlobalServer(config, ServeOptions(guard=Guard()), transport, credentials)
    serving = threading.Thread(target=server.run, daemon=True)
    serving.start()
    address = f"127.0.0.1:{transport.port}"
    sites = [
        threading.Thread(target=train, args=(address, name, certs, make_model(), steps)) for name in ("east", "west")
    ]
    for site in sites:
        site.start()
    while server.rounds is None:
        time.sleep(0.01)
    hostile: HostileSite | None = None
    before = grown = resident_mb()
    if sessions:
        layout = [(name, list(one.shape)) for name, one in make_model().named_parameters()]
        own = Credentials.load(certs, site="mallory")
        hostile = HostileSite(address, "mallory", own, layout, seed, timeout_s=0.5)
        while hostile.sessions < sessions:
            hostile.session()
            grown = max(grown, resident_mb())
    for site in sites:
        site.join()
    assert server.process.serving is not None
    digest = server.process.serving.shard.global_model.digest()
    server.stop()
    serving.join()
    return digest, hostile, grown - before


def resident_mb() -> float:
    """The memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    """Run with and without the hostile site, and compare."""
    parser = argparse.ArgumentParser(description="A hostile site beside honest ones.")
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200, help="of the honest sites")
    parser.add_argument("--most-mb", type=float, default=300.0, help="by which memory may grow")
    given = parser.parse_args()
    logging.getLogger("weightgrad").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        certs = Path(folder) / "certs"
        certificates.create(certs, [], SITES)
        alone, _, _ = run(certs, steps=given.steps, sessions=0, seed=0)
        began = time.monotonic()
        beside, hostile, grown = run(certs, steps=given.steps, sessions=given.sessions, seed=given.seed)
    assert hostile is not None
    seconds = time.monotonic() - began
    print(f"{hostile.sessions:,} hostile sessions of seed {given.seed} in {seconds:.0f} s; {measured_on()}")
    print(f"  the bits are {'the same' if alone == beside else 'OTHERS'}: {alone} and {beside}")
    print(f"  memory of server, honest and hostile sites together grew by {grown:.0f} MB")
    for deed, count in sorted(hostile.done.items()):
        print(f"  {deed:20} {count:,}")
    if alone != beside or grown > given.most_mb:
        sys.exit(1)


if __name__ == "__main__":
    main()
