"""Leaving, in every way: before `prepare`, at the end of a `with` block, and by an error in it."""

from __future__ import annotations

import threading
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from torch import nn

from weightgrad.errors import LinkError, StrategyError
from weightgrad.lab.run.launch import free_port
from weightgrad.runtime.join import join
from weightgrad.runtime.session import Site

from .deployment import PATIENCE_S, Hub, tiny

STEPS = 12


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Script(threading.Thread):
    """A user's script with a `with` block, in a thread."""

    def __init__(self, name: str, address: str, *, fails_at: int | None = None) -> None:
        super().__init__(daemon=True)
        self.site = join(address, site=name, insecure=True)
        self._fails_at = fails_at
        self.steps = 0
        self.error: BaseException | None = None
        self.model, self._optimizer = small()
        self.start()

    def run(self) -> None:
        try:
            with self.site as site:
                assert isinstance(site, Site)
                site.prepare(self.model, self._optimizer)
                self._train()
        except (RuntimeError, KeyboardInterrupt) as error:
            self.error = error

    def _train(self) -> None:
        for step in range(STEPS):
            if step == self._fails_at:
                raise KeyboardInterrupt if step % 2 else RuntimeError("out of data")
            self.model(torch.full((2, 4), float(step))).square().sum().backward()
            self._optimizer.step()
            self.steps = step + 1

    def end(self) -> None:
        self.join(PATIENCE_S)
        assert not self.is_alive()


def test_a_with_block_leaves_at_its_end() -> None:
    with Hub(tiny("{name: diloco, every: 4}", workers=1), until_finished=True) as hub:
        sites = [Script(name, hub.address) for name in ("east", "west")]
        for site in sites:
            site.end()
            assert site.error is None
            assert site.steps == STEPS
        hub.until(lambda: all(member.done and not member.live for member in hub.core.members.by_name.values()))
        vector = hub.global_model.vector
    for site in sites:
        assert torch.equal(torch.cat([p.detach().flatten() for p in site.model.parameters()]), vector)


@pytest.mark.parametrize("fails_at", [5, 6], ids=["KeyboardInterrupt", "RuntimeError"])
def test_an_error_in_the_block_goes_on_and_the_other_site_is_not_kept_waiting(fails_at: int) -> None:
    with Hub(tiny("{name: diloco, every: 4, t_global: 100000}", workers=1)) as hub:
        east, west = Script("east", hub.address, fails_at=fails_at), Script("west", hub.address)
        east.end()
        assert isinstance(east.error, KeyboardInterrupt if fails_at % 2 else RuntimeError)
        assert east.steps == fails_at
        west.end()
        assert west.error is None
        assert west.steps == STEPS
        member = hub.core.members.by_name["east"]
        assert not member.live
        assert member.included_round == 1, "its residual was not sent"
        with pytest.raises(StrategyError, match="the site has left"):
            east._optimizer.step()


def test_leaving_before_prepare_needs_no_server() -> None:
    site = join(f"127.0.0.1:{free_port()}", site="east", insecure=True)
    site.leave()
    site.leave()
    with pytest.raises(StrategyError, match=r"the site has left; call weightgrad\.join again"):
        site.prepare(*small())


def test_a_block_without_prepare_ends_well() -> None:
    with join(f"127.0.0.1:{free_port()}", site="east", insecure=True) as site:
        assert site.steps == 0
        site.new_epoch()
        site.note(0.5)


def test_an_error_in_prepare_goes_through_the_block() -> None:
    address = f"127.0.0.1:{free_port()}"
    with (
        pytest.raises(LinkError, match="nothing listens"),
        join(address, site="east", insecure=True, timeout=0.1) as site,
    ):
        site.prepare(*small())
    assert site._entry is not None
    assert site._entry._coordinator_client is not None
    with pytest.raises(LinkError, match="closed"):
        site._entry._coordinator_client.enter(b"", 1.0)


def test_leave_after_a_prepare_that_failed_is_allowed() -> None:
    site = join(f"127.0.0.1:{free_port()}", site="east", insecure=True, timeout=0.1)
    with pytest.raises(LinkError):
        site.prepare(*small())
    site.leave()


def test_a_site_serves_its_metrics_while_it_trains() -> None:
    page = f"http://127.0.0.1:{(port := free_port())}/metrics"
    with Hub(tiny("{name: diloco, every: 4}", workers=1)) as hub:
        site = join(hub.address, site="east", insecure=True, metrics=f"127.0.0.1:{port}")
        site.prepare(*small())
        assert b"weightgrad_" in urlopen(page, timeout=60).read()
        with pytest.raises(RuntimeError, match="enough"), site:
            raise RuntimeError("enough")
    with pytest.raises(URLError):
        urlopen(page, timeout=60)
