"""Private namespaces with a supervisor in them (supervisor.py), and how to run commands inside."""

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

from weightgrad.errors import EmulatorError, NamespacesRefusedError
from weightgrad.lab.emulate.plan import Step

HERE = Path(__file__).parent
PYTHON = (sys.executable, "-I", "-S")  # the standard library only, so that it starts in milliseconds
_TIMEOUT_S = 5.0


def system_path() -> str:
    """A path with `ip` and `tc`, also for users whose own path lacks the system's programs."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class ControlChannel:
    """Requests to a program of the emulator and its replies, as JSON lines over its pipes; one at a time."""

    def __init__(self, process: subprocess.Popen[Any], name: str) -> None:
        self.process, self._name, self._count = process, name, 0
        self._lock = threading.Lock()

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its reply.

        Raises:
            EmulatorError: The program reports an error, or has ended.
        """
        with self._lock:
            self._count += 1
            with contextlib.suppress(BrokenPipeError, ValueError):
                print(json.dumps({**request, "id": self._count}), file=self._pipe(self.process.stdin), flush=True)
            while True:  # skip the reply to a request that was interrupted (Ctrl-C)
                found = self.receive()
                if found["id"] == self._count:
                    break
        if "error" in found:
            raise EmulatorError(f"{self._name}: {found['error']}")
        return found

    def receive(self) -> dict[str, Any]:
        """The next line from the program."""
        try:
            line = self._pipe(self.process.stdout).readline()
        except ValueError:  # closed
            line = ""
        if not line:
            raise EmulatorError(f"{self._name} has ended{self.error_text()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def error_text(self) -> str:
        """The last line that the program wrote to stderr before it ended."""
        if self.process.stderr is None or self.process.stderr.closed:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_TIMEOUT_S)
            said = self.process.stderr.read().strip()
            return f": {said.splitlines()[-1]}" if said else ""
        return ""

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream

    def close(self) -> None:
        """Tell the program to end; closing its stdin is not enough if a forked process still has it open."""
        stdin = self._pipe(self.process.stdin)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"end": True}), file=stdin, flush=True)
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        try:
            self.process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class HostProcess(subprocess.Popen[Any]):
    """A command on a host. The process that was started is its parent, namespace_exec.py; signals go to the command."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the command; before it exists, to its parent, which hands it on."""
        self.poll()
        if self.returncode is None and not self._signal_command(sig):
            super().send_signal(sig)

    def _signal_command(self, sig: int) -> bool:
        """Send through a pidfd, so that the PID cannot have been reused between look-up and sending."""
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


class Namespaces:
    """Private mount, PID and network namespaces, and a user namespace if rootless.

    They end when closed, and when the process that opened them dies.
    """

    def __init__(self, rootless: bool) -> None:
        self.rootless = rootless
        self._supervisor: ControlChannel | None = None

    def open(self) -> None:
        """Start the supervisor.

        Raises:
            NamespacesRefusedError: This machine does not allow namespaces.
        """
        missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool, path=system_path()) is None]
        if sys.platform != "linux" or missing:
            need = (
                f"{', '.join(missing)} not found: install iproute2 and util-linux" if missing else "this is not Linux"
            )
            raise NamespacesRefusedError(f"no network namespaces here: {need}")
        user = ["--user", "--map-root-user"] if self.rootless else []
        options = [*user, "--mount", "--net", "--pid", "--fork", "--kill-child"]
        owner = os.pidfd_open(os.getpid())
        try:
            process = subprocess.Popen(
                ["unshare", *options, "--", *PYTHON, str(HERE / "supervisor.py"), str(owner)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                pass_fds=[owner], start_new_session=True, env={**os.environ, "PATH": system_path()},
            )  # fmt: skip
        finally:
            os.close(owner)
        self._supervisor = ControlChannel(process, "the supervisor of the namespaces")
        how = "as a normal user (rootless)" if self.rootless else "as root"
        try:
            ready = self._supervisor.receive()
        except EmulatorError as error:
            self.close()
            raise NamespacesRefusedError(f"network namespaces {how} are refused: {error}") from error
        if "error" in ready:
            self.close()
            raise NamespacesRefusedError(f"network namespaces {how} are refused: {ready['error']}")

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._supervisor is None:
            raise EmulatorError("the network is not open: use it in a `with` block")
        return self._supervisor.request(request)

    def apply(self, steps: Sequence[Step]) -> list[str]:
        """Run `ip` and `tc` lines; returns what they printed."""
        out: list[str] = self._ask({"apply": list(steps)})["out"]
        return out

    def name_hosts(self, addresses: dict[str, str]) -> None:
        """Make these names resolve on every host."""
        self._ask({"hosts": addresses})

    def kill(self, net: str) -> None:
        """Kill (-9) every process in a network namespace."""
        self._ask({"kill": net})

    def pids(self, net: str) -> list[int]:
        """The processes in a network namespace, by their PIDs outside."""
        (home,) = self._ask({"inodes": [net]})["inodes"]
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{entry}/ns/net").st_ino == home:
                        found.append(int(entry))
        return sorted(found)

    def popen(self, net: str, hostname: str, command: Sequence[str], **keywords: Any) -> HostProcess:
        """Start a command in a network namespace; an empty `net` is the `wan` namespace."""
        if self._supervisor is None:
            raise EmulatorError("the network is not open: use it in a `with` block")
        supervisor = str(self._supervisor.process.pid)
        shim = [*PYTHON, str(HERE / "namespace_exec.py"), supervisor, str(int(self.rootless)), net, hostname]
        return HostProcess([*shim, *command], **keywords)

    def close(self) -> None:
        """End the namespaces and every process in them."""
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None
