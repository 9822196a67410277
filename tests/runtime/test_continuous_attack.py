"""Two honest sites beside a hostile one, over real TLS: they end with the bits of a run without it.

`benchmarks/attack.py` does the same with thousands of sessions.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from weightgrad.core.strategies import find
from weightgrad.lab.chaos.hostile_site import HostileSite
from weightgrad.runtime.join import join
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.security import certificates
from weightgrad.runtime.security.credentials import Credentials

from .deployment import PATIENCE_S, Hub
from .test_refusals import LAYOUT, model

SITES = ("east", "mallory", "west")
STEPS = 15


def rules() -> RunConfig:
    row = {"every": 1, "aggregator": "mean", "t_global": 600}  # no honest site is given up on a busy machine
    return RunConfig(sites=SITES, fit=lambda numel: find("diloco", row), seed=3)


@pytest.fixture(name="made", scope="module")
def fixture_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "all"
    certificates.create(directory, [], SITES)
    return directory


class Honest(threading.Thread):
    """A site that trains; it knows nothing of the other one."""

    def __init__(self, address: str, name: str, made: Path, scale: float, meet: threading.Barrier) -> None:
        super().__init__(daemon=True, name=name)
        self.site = join(address, site=name, credentials=made)
        self._scale, self._meet = scale, meet
        self._model = model()  # here: two threads would share torch's generator
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            trained = self._model
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
            self.site.prepare(trained, optimizer)
            self._meet.wait(PATIENCE_S)
            while self.site.steps < STEPS:
                optimizer.zero_grad()
                (self._scale * trained(torch.ones(2, 4))).square().sum().backward()
                optimizer.step()
            self.site.leave()
        except BaseException as error:
            self.error = error


def train(made: Path, seed: int | None) -> str:
    """The digest of the global model after a run, with a hostile site if there is a seed."""
    with Hub(rules(), certs=made) as hub:
        meet = threading.Barrier(3)
        sites = [Honest(hub.address, name, made, scale, meet) for name, scale in (("east", 1.0), ("west", 0.7))]
        for site in sites:
            site.start()
        hub.until(lambda: hub.server.rounds is not None)
        hub.core.members.by_name["mallory"].aside = 10**6  # tests/core/test_hostile_numbers.py has the way to there
        meet.wait(PATIENCE_S)
        if seed is not None:
            own = Credentials.load(made, site="mallory")
            hostile = HostileSite(hub.address, "mallory", own, LAYOUT, seed, timeout_s=0.3)
            while hostile.sessions < 10:
                hostile.session()
        for site in sites:
            site.join(PATIENCE_S)
            assert not site.is_alive(), f"{site.name} is at step {site.site.steps}"
            assert site.error is None, site.error
        serving = hub.server.process.serving
        assert serving is not None
        held = sum(serving._costs.values()) + sum(
            cost for one in serving._sites.values() for by_rank in one.costs.values() for cost in by_rank.values()
        )
        assert held <= len(SITES) * serving.most_bytes
        return hub.global_model.digest()


@pytest.fixture(name="alone", scope="module")
def fixture_alone(made: Path) -> str:
    return train(made, None)


@settings(
    max_examples=1,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_honest_sites_end_with_the_bits_of_a_run_without_the_hostile_one(made: Path, alone: str, seed: int) -> None:
    assert train(made, seed) == alone
