"""Seconds and bytes inside a site."""

from __future__ import annotations

import pytest

from weightgrad.lab.sim.local_network import LocalNetwork, allreduce_bytes, shared_finish

LAN = LocalNetwork(8e6, 0.001)  # 1 MB/s


def test_one_worker_has_nothing_to_exchange() -> None:
    assert LAN.gather([0.3], [10**9]) == 0.3
    assert LAN.exchange(0) == LAN.pass_on([10**9]) == LAN.allreduce(1, 10**9) == 0.0
    assert allreduce_bytes(1, 10**9) == 0


def test_the_servers_card_takes_one_after_the_other() -> None:
    """Worker 0 is the local server: its own gradient does not travel."""
    assert LAN.gather([0.0, 0.0, 0.0], [1_000_000] * 3) == pytest.approx(2.001)
    assert LAN.gather([0.0, 0.0, 10.0], [1_000_000] * 3) == pytest.approx(11.001)  # the first is long done
    assert LAN.gather([0.0, 0.0, 0.5], [1_000_000] * 3) == pytest.approx(2.001)
    assert LAN.gather([0.0, 0.5, 0.0], [1_000_000] * 3) == pytest.approx(2.001)
    assert LAN.gather([5.0, 0.0, 0.0], [1_000_000] * 3) == 5.0


def test_the_busiest_card_decides() -> None:
    assert LAN.exchange(3_000_000) == pytest.approx(3.001)


def test_what_all_need_is_passed_on_from_worker_to_worker() -> None:
    assert LAN.pass_on([0, 1_000_000, 0, 0]) == pytest.approx(1.003)
    assert LAN.pass_on([250_000] * 4) == pytest.approx(0.753), "what a worker has it does not receive"
    assert LAN.pass_on([0] * 4) == LAN.pass_on([]) == 0.0


def test_a_ring_moves_twice_the_vector_less_a_share() -> None:
    assert LAN.allreduce(4, 1_000_000) == pytest.approx(1.5 + 6 * 0.001)
    assert allreduce_bytes(4, 1_000_000) == 6_000_000


def test_a_shared_link_is_never_idle_while_something_waits() -> None:
    assert shared_finish([1.0, 2.0, 9.0], [3, 3, 1], 1.0) == 10.0
    assert shared_finish([1.0, 2.0, 3.0], [3, 3, 1], 1.0) == 8.0
