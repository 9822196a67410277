"""A fork server: processes that start with torch already imported.

Importing torch and the rest of a site takes a process five seconds of a core, and a test of two sites under torchrun
starts seven processes. The fork server is one process that has imported everything and done nothing else, so it has one
thread and can be forked safely. A forked process is like any other: it has a session, an environment, output and an
exit of its own, and torchrun's workers are forked too.

A fork cannot show a missing import of a script, a dependence on the hash seed, or an interpreter that fails while it
shuts down. So of every kind of run one test starts its processes as ordinary interpreters, as an operator does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    from weightgrad.lab.run.launch import Popen

MODULES = (
    "weightgrad.cli", "weightgrad.runtime.server.global_server", "weightgrad.runtime.session",
    "weightgrad.lab.run.deployment",
    "sklearn.datasets", "torch._dynamo", "torch.distributed.launcher.api",
    "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.distributed.pipelining",
)  # fmt: skip
NUMBER = struct.Struct("i")
TORCHRUN = "torch.distributed.run"


class Child:
    """A forked process, with the methods of `subprocess.Popen` that tests and torchrun use."""

    def __init__(
        self,
        address: str,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | int | None = None,
        stdin: int | None = None,
        start_new_session: bool,
    ) -> None:
        assert start_new_session
        assert stdin in (None, subprocess.DEVNULL)
        assert args[0] == sys.executable
        self.returncode: int | None = None
        out = 1 if stdout is None else stdout.fileno()
        error = (
            out if stderr == subprocess.STDOUT else 2 if stderr is None or isinstance(stderr, int) else stderr.fileno()
        )
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(address)
        order = json.dumps({"args": list(args[1:]), "env": dict(env), "cwd": os.getcwd()}).encode()
        socket.send_fds(self._line, [NUMBER.pack(len(order))], [out, error])
        self._line.sendall(order)
        self.pid = self._number()

    def _number(self) -> int:
        found = self._line.recv(NUMBER.size, socket.MSG_WAITALL)
        assert len(found) == NUMBER.size, "the fork server has ended"
        return int(NUMBER.unpack(found)[0])

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended; returns its exit code."""
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                self.returncode = self._number()
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from error
            self._line.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, as `Popen.send_signal` does."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, as `Popen.kill` does."""
        self.send_signal(signal.SIGKILL)


@cache
def popen() -> Popen:
    """A replacement of `subprocess.Popen`; the first call starts the fork server of this process."""
    directory = tempfile.TemporaryDirectory()
    address = str(Path(directory.name) / "fork_server.sock")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
    environment["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow, which Ray brings and sklearn imports
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, __file__, address], env=environment, **pipes)

    def end() -> None:
        process.communicate()
        directory.cleanup()

    atexit.register(end)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return cast("Popen", partial(Child, address))


# -- in the fork server ------------------------------------------------------------------------------


def run(args: list[str], address: str) -> None:
    """Do what `python ARGS` does."""
    args = args[1:] if args[0] == "-u" else args
    if TORCHRUN in args:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = partial(Child, address)  # type: ignore[attr-defined, assignment]
    if args[0] == "-m":
        sys.argv, sys.path[0] = args[1:], os.getcwd()
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = args, str(Path(args[0]).parent)
        runpy.run_path(args[0], run_name="__main__")


def become_child(line: socket.socket, order: dict[str, Any], files: list[int]) -> None:
    """Take over session, output, environment and directory of the process that was requested."""
    os.setsid()
    for place, file in zip((0, 1, 2), (os.open(os.devnull, os.O_RDONLY), *files), strict=True):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    line.sendall(NUMBER.pack(os.getpid()))
    line.close()


def run_and_exit(work: Callable[[], None]) -> NoReturn:
    """Run and exit as an interpreter does, without unloading modules, which would take longer than the tests."""
    code: object = 0
    try:
        work()
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else 1)


def serve(address: str) -> None:
    """Fork a process for every connection, until stdin is closed."""
    for name in MODULES:
        __import__(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be in a fork"
    gc.collect()
    gc.freeze()  # otherwise the collector of every fork would copy the pages of all imported modules
    waiting, listener = selectors.DefaultSelector(), socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(0, selectors.EVENT_READ)
    os.write(1, b"ready\n")
    while True:
        for key, _ in waiting.select():
            if key.fd == 0:
                return
            if key.data is not None:  # a child has ended
                pid, line = key.data
                _, status = os.waitpid(pid, 0)
                waiting.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(OSError):  # the process that asked for it may have ended too
                    line.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
                line.close()
                continue
            line, _ = listener.accept()
            head, files, _, _ = socket.recv_fds(line, NUMBER.size, 2)
            order = json.loads(line.recv(NUMBER.unpack(head)[0], socket.MSG_WAITALL))
            pid = os.fork()
            if pid == 0:
                for other in list(waiting.get_map().values()):
                    if other.fd != 0:
                        os.close(other.fd)
                        if other.data is not None:
                            other.data[1].close()
                listener.detach()
                waiting.close()
                become_child(line, order, files)
                run_and_exit(partial(run, order["args"], address))
            for file in files:
                os.close(file)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, line))


if __name__ == "__main__":
    serve(sys.argv[1])
