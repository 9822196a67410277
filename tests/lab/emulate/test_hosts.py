"""Commands on hosts are like commands anywhere: codes, signals, pipes; and a power cut ends them all."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightgrad.errors import EmulatorError, TopologyError
from weightgrad.lab.emulate import Network, WanLink, open_wan

from .networks import ALONE, KINDS, PACKAGE, PYTHON, TIMEOUT_S, need, pair, printed, started, until

FAMILY = "setsid sleep 1000 & sleep 1000 & echo up; wait"
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print("up", flush=True); time.sleep(1000)
"""
TERMINAL = """
import fcntl, os, termios
CATCHES = '''
import signal, time
count = 0
def hear(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, hear)
print("ready", flush=True)
while not count: time.sleep(0.01)
time.sleep(0.3)
raise SystemExit(6 + count)
'''
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
with Wan(["hub"], []) as wan:
    inside = wan.host("hub").popen([sys.executable, "-I", "-S", "-c", CATCHES])
    print("ended", inside.wait(), os.tcgetpgrp(0) == os.getpgrp())
"""
SLEEP = ["sh", "-c", "echo up; exec sleep 1000"]


@pytest.fixture(scope="module", params=KINDS)
def wan(request: pytest.FixtureRequest) -> Iterator[Network]:
    with pair(request.param) as network:
        yield network


def test_exit_codes(wan: Network) -> None:
    for code in (0, 3, 127):
        assert wan.host("east").popen(["sh", "-c", f"exit {code}"]).wait(TIMEOUT_S) == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_command_and_its_end_comes_back(wan: Network, number: signal.Signals) -> None:
    process, _ = started(wan.host("east"), SLEEP)
    process.send_signal(number)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -number


def test_a_command_may_end_in_its_own_way(wan: Network) -> None:
    process, _ = started(wan.host("east"), [*PYTHON, WAITS], start_new_session=True)
    os.killpg(process.pid, signal.SIGTERM)  # as `launch` does
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 7


def test_stop_and_go_on(wan: Network) -> None:
    host = wan.host("east")
    process, _ = started(host, SLEEP)
    (pid,) = host.pids()

    def state() -> str:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    process.send_signal(signal.SIGSTOP)
    until(lambda: state() == "T")
    process.send_signal(signal.SIGCONT)
    until(lambda: state() == "S")
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -9


def test_what_we_started_dies_with_its_number(wan: Network) -> None:
    """Whoever has only the number of the process can kill the command by it."""
    host = wan.host("east")
    process, _ = started(host, SLEEP)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -9
    until(lambda: not host.pids())


def test_a_power_cut_ends_everything_on_one_host(wan: Network) -> None:
    hub, east = wan.host("hub"), wan.host("east")
    there = [started(host, ["sh", "-c", FAMILY])[0] for host in (hub, east)]
    until(lambda: len(east.pids()) == 3 and len(hub.pids()) == 3)
    starting = east.popen(["sleep", "1000"])  # and what has not even begun
    east.kill_all()
    assert starting.wait(TIMEOUT_S) == -9
    assert there[1].wait(TIMEOUT_S) == -9
    assert east.pids() == []
    assert len(hub.pids()) == 3
    hub.kill_all()
    for process in there:
        process.communicate(timeout=TIMEOUT_S)
    until(lambda: hub.pids() == [])


def test_keywords_of_popen(wan: Network, tmp_path: Path) -> None:
    host = wan.host("east")
    environment = {"PATH": os.environ["PATH"], "COLOUR": "blue"}
    code = "import os, sys; print(os.getcwd(), os.environ['COLOUR'], sys.stdin.read())"
    process = host.popen(
        [*PYTHON, code], cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate("typed", timeout=TIMEOUT_S)
    assert out.split() == [str(tmp_path), "blue", "typed"]
    with open(tmp_path / "log", "wb") as log:
        assert host.popen(["echo", "hello"], stdout=log).wait(TIMEOUT_S) == 0
    assert (tmp_path / "log").read_text() == "hello\n"


def test_run_gives_the_output_or_raises(wan: Network) -> None:
    host = wan.host("east")
    assert host.run(["echo", "hello"]) == "hello\n"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        host.run(["sh", "-c", "echo bad >&2; exit 4"])
    assert (caught.value.returncode, caught.value.stderr) == (4, "bad\n")
    with pytest.raises(subprocess.TimeoutExpired):
        host.run(["sleep", "1000"], timeout=0.5)
    until(lambda: not host.pids())
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        host.popen(["no-such-command"])
    for wrong in ("ls -l", ()):
        with pytest.raises(TopologyError, match="wanted a list"):
            host.popen(wrong)
    with pytest.raises(TopologyError, match="without shell="):
        host.popen(["ls"], shell=True)


def test_only_hosts_that_there_are(wan: Network) -> None:
    with pytest.raises(TopologyError, match="no host is named 'mars'; there are hub, east"):
        wan.host("mars")
    for act in (wan.cut, wan.heal, wan.set_link):
        with pytest.raises(TopologyError, match="mars"):
            act("hub", "mars")


@pytest.mark.parametrize("kind", ["root", "rootless"])
def test_a_host_is_a_machine_of_its_own(kind: str) -> None:
    need(kind)
    with open_wan(["hub", "east"], [WanLink(("hub", "east"), 50e6, 0.005)], kind=kind) as wan:
        host = wan.host("east")
        assert host.address == "10.77.2.2"
        said = "import os, socket; print(os.getpid() < 99, socket.gethostname(), socket.gethostbyname('hub'))"
        assert printed(host, said) == "True east 10.77.1.2"
        names = host.run(["ip", "-o", "link"]).split()
        assert "eth0@if3:" in names or any(name.startswith("eth0@") for name in names)
        process = host.popen(["sleep", "1000"])
    assert process.wait(TIMEOUT_S) == -9  # the network is gone, and all on it
    with pytest.raises(EmulatorError, match="not open"):
        host.popen(["true"])


def test_a_terminal_belongs_to_the_command() -> None:
    """Ctrl-C reaches it once, and nobody else; afterwards the terminal is ours again."""
    need("root")
    script = ALONE.format(package=str(PACKAGE), module="wan", name="Wan") + TERMINAL
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        watch = threading.Timer(TIMEOUT_S, process.kill)
        watch.start()
        said = b""
        while b"ready" not in said:
            said += os.read(ours, 1000)
        os.write(ours, b"\x03")
        with contextlib.suppress(OSError):  # the end of a terminal
            while got := os.read(ours, 1000):
                said += got
        watch.cancel()
    os.close(ours)
    assert b"ended 7 True" in said
    assert process.returncode == 0
