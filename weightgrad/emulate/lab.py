"""The lab: private namespaces with a keeper in them, and the way to run commands inside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from weightgrad.emulate.plan import Step
from weightgrad.errors import EmulatorError, NamespacesRefusedError

HERE = Path(__file__).parent
PYTHON = (sys.executable, "-I", "-S")  # the standard library only: up in milliseconds
_PATIENCE_S = 5.0


def system_path() -> str:
    """Where `ip` and `tc` are, also for users whose own path leaves the system's programs out."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class Conversation:
    """JSON lines to a program of ours and its answers; one question at a time."""

    def __init__(self, process: subprocess.Popen[Any], name: str) -> None:
        self.process, self._name, self._count = process, name, 0
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its answer; raises when it cannot do it or is gone."""
        with self._lock:
            self._count += 1
            with contextlib.suppress(BrokenPipeError, ValueError):
                print(json.dumps({**request, "id": self._count}), file=self._pipe(self.process.stdin), flush=True)
            while True:  # past the answer to a question that was interrupted (Ctrl-C) before it came
                found = self.hear()
                if found["id"] == self._count:
                    break
        if "error" in found:
            raise EmulatorError(f"{self._name}: {found['error']}")
        return found

    def hear(self) -> dict[str, Any]:
        """The next line it says."""
        try:
            line = self._pipe(self.process.stdout).readline()
        except ValueError:  # closed
            line = ""
        if not line:
            raise EmulatorError(f"{self._name} has ended{self.complaint()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def complaint(self) -> str:
        """What it wrote to stderr before it ended."""
        if self.process.stderr is None or self.process.stderr.closed:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_PATIENCE_S)
            said = self.process.stderr.read().strip()
            return f": {said.splitlines()[-1]}" if said else ""
        return ""

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream

    def close(self) -> None:
        """Tell it to end; closing its stdin might not do if a fork of ours holds it too."""
        stdin = self._pipe(self.process.stdin)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"end": True}), file=stdin, flush=True)
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class HostProcess(subprocess.Popen[Any]):
    """A command on a host. Its parent, `enter.py`, is what we started; signals go straight to the command."""

    def send_signal(self, sig: int) -> None:
        """To the command, once there is one; to its parent, which hands it on, until then."""
        self.poll()
        if self.returncode is None and not self._straight(sig):
            super().send_signal(sig)

    def _straight(self, sig: int) -> bool:
        """Through a pidfd: the number cannot have become somebody else's between looking and sending."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        try:
            pid = int(children.read_text().split()[0])
            handle = os.pidfd_open(pid)
        except (OSError, IndexError):
            return False
        try:
            if str(pid) not in children.read_text().split():
                return False
            signal.pidfd_send_signal(handle, sig)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True


class Lab:
    """Namespaces of our own: mounts, processes, networks, and users if rootless. Gone when closed or when we die."""

    def __init__(self, rootless: bool) -> None:
        self.rootless = rootless
        self._keeper: Conversation | None = None

    def open(self) -> None:
        """Start the keeper; raises NamespacesRefusedError if this machine does not allow it."""
        missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool, path=system_path()) is None]
        if sys.platform != "linux" or missing:
            need = (
                f"{', '.join(missing)} not found: install iproute2 and util-linux" if missing else "this is not Linux"
            )
            raise NamespacesRefusedError(f"no network namespaces here: {need}")
        user = ["--user", "--map-root-user"] if self.rootless else []
        spaces = [*user, "--mount", "--net", "--pid", "--fork", "--kill-child"]
        owner = os.pidfd_open(os.getpid())
        try:
            process = subprocess.Popen(
                ["unshare", *spaces, "--", *PYTHON, str(HERE / "keeper.py"), str(owner)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                pass_fds=[owner], start_new_session=True, env={**os.environ, "PATH": system_path()},
            )  # fmt: skip
        finally:
            os.close(owner)
        self._keeper = Conversation(process, "the keeper of the namespaces")
        how = "as a normal user (rootless)" if self.rootless else "as root"
        try:
            ready = self._keeper.hear()
        except EmulatorError as error:
            self.close()
            raise NamespacesRefusedError(f"network namespaces {how} are refused: {error}") from error
        if "error" in ready:
            self.close()
            raise NamespacesRefusedError(f"network namespaces {how} are refused: {ready['error']}")

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._keeper is None:
            raise EmulatorError("the network is not open: use it in a `with` block")
        return self._keeper.ask(request)

    def apply(self, steps: Sequence[Step]) -> list[str]:
        """Have the keeper do it; returns what `ip` and `tc` printed."""
        out: list[str] = self._ask({"apply": list(steps)})["out"]
        return out

    def name_hosts(self, addresses: dict[str, str]) -> None:
        """Names that resolve on every host."""
        self._ask({"hosts": addresses})

    def kill(self, net: str) -> None:
        """kill -9 of every process in that network namespace."""
        self._ask({"kill": net})

    def pids(self, net: str) -> list[int]:
        """The processes in that network namespace, by the numbers that they have for us."""
        (home,) = self._ask({"inodes": [net]})["inodes"]
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{entry}/ns/net").st_ino == home:
                        found.append(int(entry))
        return sorted(found)

    def popen(self, net: str, hostname: str, command: Sequence[str], **keywords: Any) -> HostProcess:
        """Start a command there; an empty `net` is the wan."""
        if self._keeper is None:
            raise EmulatorError("the network is not open: use it in a `with` block")
        lab = str(self._keeper.process.pid)
        shim = [*PYTHON, str(HERE / "enter.py"), lab, str(int(self.rootless)), net, hostname]
        return HostProcess([*shim, *command], **keywords)

    def close(self) -> None:
        """Everything in it ends."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
