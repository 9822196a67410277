"""A site whose processes are stopped: the server notices, says so and to whom it matters; then everybody goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server
from weightgrad.runtime.transport.grpc_sessions import TransportLimits
from weightgrad.runtime.transport.message_stream import HEARTBEAT_S

from . import departing_site
from .deployment import Hub
from .test_departures import Thread, further, recipe


def start(address: str, log: Path) -> subprocess.Popen[bytes]:
    """A site in a process group of its own."""
    command = [sys.executable, str(Path(departing_site.__file__)), address, "stopped"]
    with open(log, "wb") as file:
        return fork_server.popen()(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=dict(os.environ),
            start_new_session=True,
        )  # fmt: skip


def test_a_stopped_peer_is_noticed_within_ten_seconds_by_default() -> None:
    limits = TransportLimits()
    assert 2 * HEARTBEAT_S < limits.silent_s < 10


def test_a_stopped_site_is_noticed_long_before_rounds_give_it_up(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO", "weightgrad")
    strategy = "{name: baseline, t_global: 60}"
    with Hub(recipe("stays", "stopped", strategy=strategy), waiting_s=0) as hub:
        hub.transport.limits = TransportLimits(silent_s=2.5 * HEARTBEAT_S)
        process = start(hub.address, tmp_path / "log")
        try:
            stays = Thread(hub.address, "stays")
            hub.until(lambda: hub.version > 0 and len(hub.transport.sessions()) == 2)
            further(hub)
            os.kill(process.pid, signal.SIGSTOP)  # the training alone: the process with its connections lives
            caplog.clear()
            hub.until(lambda: "stays waits for stopped" in caplog.text and "(not connected)" in caplog.text)
            lines = [record.getMessage() for record in caplog.records]
            assert "stopped: connection lost" in lines
            assert not [line for line in lines if "rounds continue without it" in line]
            os.kill(process.pid, signal.SIGCONT)
            further(hub)
            assert hub.core.members.by_name["stopped"].live
            stays.leave()  # before the other one is killed, for which rounds would wait
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
