"""The supervisor of the emulator's namespaces: process 1 of a private PID namespace.

The network lives as long as the supervisor does.

`unshare` starts it in fresh mount, PID and network namespaces (and a user namespace, if rootless). It gives `/run` a
private `netns` directory, runs `ip -batch` and `tc -batch` on request, and waits. It ends when its stdin does or when
the process that started it is gone (a pidfd tells, also after `kill -9`); the kernel then kills everything in the PID
namespace, and with the last process go the mounts, the networks and their interfaces.

Started by path (`python -I -S supervisor.py PIDFD`): standard library only. JSON lines on stdin, one reply each.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_MS_BIND, _MS_REC, _CLONE_NEWNET = 0x1000, 0x4000, 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class RefusedError(Exception):
    """The kernel or a tool refused."""


def _check(result: int, what: str) -> None:
    if result:
        raise RefusedError(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    """Call mount(2)."""
    made = _libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), None)
    _check(made, f"mount {kind or 'bind'} on {target}")


def make_private_run() -> None:
    """Mount a `/run` with a private `netns` directory and the rest as before: some systems keep programs in it."""
    old = os.open("/run", os.O_RDONLY | os.O_DIRECTORY)
    entries = [entry for entry in os.scandir(old) if entry.name != "netns"]
    mount("tmpfs", "/run", "tmpfs")
    os.mkdir("/run/netns")
    for entry in entries:
        target = f"/run/{entry.name}"
        with contextlib.suppress(OSError, RefusedError):  # what cannot be mounted is not needed
            if entry.is_symlink():
                os.symlink(os.readlink(entry.name, dir_fd=old), target)
            elif entry.is_dir():
                os.mkdir(target)
                mount(f"/proc/self/fd/{old}/{entry.name}", target, flags=_MS_BIND | _MS_REC)
    os.close(old)


def name_hosts(addresses: dict[str, str]) -> None:
    """Add the hosts' names to a private /etc/hosts."""
    known = Path("/etc/hosts")
    if known.exists():
        lines = "".join(f"{address}\t{name}\n" for name, address in addresses.items())
        Path("/run/hosts").write_text(f"{known.read_text()}\n{lines}")
        with contextlib.suppress(RefusedError):
            mount("/run/hosts", "/etc/hosts", flags=_MS_BIND)


def write_sysctls(net: str | None, values: dict[str, str]) -> None:
    """Write sysctls in a network namespace; those that the kernel lacks (IPv6) are skipped."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{net}", os.O_RDONLY) if net else own
    try:
        _check(_libc.setns(there, _CLONE_NEWNET), f"enter {net}")
        for name, value in values.items():
            path = Path("/proc/sys", name.replace(".", "/"))
            if path.exists():
                path.write_text(value)
    except OSError as error:
        raise RefusedError(f"sysctl in {net}: {error}") from error
    finally:
        _check(_libc.setns(own, _CLONE_NEWNET), "return")
        for fd in {own, there}:
            os.close(fd)


def run(command: list[str], typed: str = "") -> str:
    """Run a tool and return its output.

    Raises:
        RefusedError: The tool failed; the message is what it wrote to stderr.
    """
    done = subprocess.run(command, input=typed, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(f"{' '.join(command)}: {' '.join(done.stderr.split())}; given {typed!r}")
    return done.stdout


def apply(steps: list[dict[str, Any]]) -> list[str]:
    """Apply steps in order: sysctls, `ip` and `tc` lines of a network namespace. Returns what the tools printed."""
    out = []
    for step in steps:
        net = step.get("net")
        if step.get("sysctl"):
            write_sysctls(net, step["sysctl"])
        for tool in ("ip", "tc"):
            if step.get(tool):
                there = ["-n", net] if net else []
                out.append(run([tool, *there, *step.get("options", ()), "-batch", "-"], "\n".join(step[tool]) + "\n"))
    return out


def processes_in(net: str) -> list[int]:
    """The PIDs in a network namespace, without zombies."""
    home, found = os.stat(f"/run/netns/{net}").st_ino, []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/net").st_ino == home:
                    found.append(int(entry))
    return found


def kill(net: str) -> None:
    """Kill (-9) all processes in a network namespace until none is left: one that dies may just have forked."""
    while living := processes_in(net):
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def handle_request(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request; returns the reply."""
    try:
        if "apply" in request:
            return {"out": apply(request["apply"])}
        if "hosts" in request:
            name_hosts(request["hosts"])
        if "kill" in request:
            kill(request["kill"])
        if "inodes" in request:
            return {"inodes": [os.stat(f"/run/netns/{name}").st_ino for name in request["inodes"]]}
        return {}
    except (RefusedError, OSError) as error:
        return {"error": str(error)}


def reap() -> None:
    """Reap the orphans that process 1 inherits."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def reply(value: dict[str, Any]) -> None:
    """Write one line to the owner."""
    os.write(sys.stdout.fileno(), json.dumps(value).encode() + b"\n")


def main() -> None:
    """Serve requests until the owner is gone."""
    owner, typed = int(sys.argv[1]), b""
    try:
        make_private_run()
        mount("proc", "/proc", "proc")
    except (RefusedError, OSError) as error:
        reply({"error": str(error)})
        return
    reply({"ready": True})
    waiting = select.poll()
    waiting.register(sys.stdin.fileno(), select.POLLIN)
    waiting.register(owner, select.POLLIN)
    while True:
        for fd, _ in waiting.poll(250):
            got = b"" if fd == owner else os.read(fd, 1 << 16)
            if not got:
                return
            *lines, typed = (typed + got).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "end" in request:
                    return
                reply({**handle_request(request), "id": request["id"]})
        reap()


if __name__ == "__main__":
    main()
