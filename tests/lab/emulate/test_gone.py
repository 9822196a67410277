"""When the process that made a network is gone, so is all of it: also by kill -9, also for a normal user."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .networks import ALONE, PACKAGE, TIMEOUT_S, need, refusal, until

OWNER = """
import json, os, subprocess, sys, time
with Wan(["hub", "east"], [WanLink(("hub", "east"), 50e6, 0.005)], rootless={rootless}) as wan:
    host = wan.host("east")
    there = host.popen(["sh", "-c", "setsid sleep 1000 & sleep 1000 & echo up; wait"], stdout=subprocess.PIPE)
    there.stdout.readline()
    while len(host.pids()) < 3: time.sleep(0.02)
    if {check}: checks = [str(one) for one in wan.check() if not one.ok]
    first = wan._namespaces._supervisor.process.pid
    spaces = {{kind: os.stat(f"/proc/{{first}}/ns/{{kind}}").st_ino for kind in ("net", "mnt", "pid_for_children")}}
    nets = [*wan._namespaces._ask({{"inodes": ["h0", "h1", "g0", "g1"]}})["inodes"], spaces["net"]]
    print(json.dumps({{"pids": [first, there.pid, *host.pids()], "mnt": spaces["mnt"], "nets": nets,
        "pid": spaces["pid_for_children"], "kind": wan.describe()["kind"], "uid": os.getuid()}}), flush=True)
    if {stay}: time.sleep(1000)
    host.kill_all()
    print(json.dumps([there.wait(), host.pids()]))
"""


def owner(*, rootless: bool | None, stay: bool, check: bool = False, package: Path = PACKAGE) -> str:
    """A script that makes a network, says what it is made of, and stays."""
    return ALONE.format(package=str(package), module="wan", name="Wan") + OWNER.format(
        rootless=rootless, stay=stay, check=check
    )


def residents(kind: str, inodes: set[int]) -> list[str]:
    """Processes anywhere that are in these namespaces."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(entry / "ns" / kind).st_ino in inodes:
                found.append(entry.name)
    return found


def mounted(nets: list[int]) -> list[str]:
    """Mounts anywhere that keep these networks alive."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (entry / "mountinfo").read_text()
            found += [entry.name for net in nets if f"net:[{net}]" in text]
    return found


def assert_gone(made: dict[str, Any]) -> None:
    until(lambda: not [pid for pid in made["pids"] if Path(f"/proc/{pid}").exists()])
    until(lambda: not residents("pid", {made["pid"]}))
    until(lambda: not residents("mnt", {made["mnt"]}))
    until(lambda: not residents("net", set(made["nets"])))
    assert not mounted(made["nets"])


@pytest.mark.parametrize("kind", ["root", "rootless"])
def test_kill_9_of_the_owner_leaves_nothing(kind: str) -> None:
    need(kind)
    before = set(os.listdir("/sys/class/net"))
    script = owner(rootless=kind == "rootless", stay=True)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        made = json.loads(process.stdout.readline())
        assert made["kind"] == f"namespaces, {kind}"
        assert len(made["pids"]) == 5
        assert residents("net", set(made["nets"])) != []
        process.kill()
    assert_gone(made)
    assert set(os.listdir("/sys/class/net")) == before


@contextlib.contextmanager
def readable_package() -> Iterator[Path]:
    """A copy of the emulator that every user may read."""
    directory = Path(tempfile.mkdtemp())
    try:
        directory.chmod(0o755)
        emulator = directory / "lab" / "emulate"
        shutil.copytree(PACKAGE / "lab" / "emulate", emulator, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("errors.py", "units.py"):
            shutil.copy(PACKAGE / name, directory / name)
        for path in [directory / "lab", emulator, *directory.rglob("*.py")]:
            path.chmod(0o755)
        yield directory
    finally:
        shutil.rmtree(directory)


def test_a_normal_user_makes_and_leaves_one() -> None:
    if os.geteuid() != 0:
        need("rootless")
        pytest.skip("we are a normal user: the other tests are this one")
    if (why := refusal("rootless")) is not None:
        pytest.skip(why)
    nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/", "capture_output": True}
    version = "import json, sys; sys.exit(sys.version_info < (3, 10))"
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", version], check=False, **nobody).returncode == 0:
                break
    else:
        pytest.skip("no Python 3.10 here that user 65534 may run")
    with readable_package() as package:
        script = owner(rootless=None, stay=False, check=True, package=package)
        done = subprocess.run([python, "-B", "-c", script], text=True, timeout=2 * TIMEOUT_S, check=False, **nobody)
        assert done.returncode == 0, done.stderr
    made, (code, left) = map(json.loads, done.stdout.splitlines())
    assert (made["kind"], made["uid"]) == ("namespaces, rootless", 65534)
    assert (code, left) == (-9, [])
    assert_gone(made)


def test_modelled_processes_go_too() -> None:
    """No namespaces, so a reaper looks for their mark."""
    script = ALONE.format(package=str(PACKAGE), module="modelled", name="ModelledWan")
    script += """
import subprocess, time
with ModelledWan(["hub"], []) as wan:
    there = wan.host("hub").popen(["sh", "-c", "setsid sleep 1000 & echo up; wait"], stdout=subprocess.PIPE)
    there.stdout.readline()
    while len(wan.host("hub").pids()) < 2: time.sleep(0.02)
    print(*wan.host("hub").pids(), wan._reaper.pid, flush=True)
    time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        assert len(pids) == 3
        process.kill()
    until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])
