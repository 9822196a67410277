"""The process that has this process's gRPC connections, as seen from here: it is started, asked and ended.

gRPC has threads of its own, and a process with them cannot be forked: in the child its fork handlers abort, or wait
for threads that are not there. But training scripts fork all the time, in `DataLoader(num_workers=...)` above all. So
gRPC runs in a process of its own, one for all connections of this process. It is a fresh interpreter, so it has nothing
of this process's memory and loads neither torch nor the user's script.

It lives until this process ends, and ends with it. If it is killed, it is started again at the next call, and the
sessions, which are kept here, go on.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from weightgrad.errors import LinkError
from weightgrad.runtime.transport.connection_main import send_request

_BUFFER_BYTES = 1 << 20  # of a socket, so that a whole record fits; the system may give less
_END_S = 5.0  # to wait for the process to end
_PACKAGE = Path(__file__).parents[2]
# The package itself is not imported, because that loads torch: modules are found by the package's path.
_PROGRAM = """
import sys, types  # the connections of weightgrad
if sys.path[0] == "":
    del sys.path[0]
package = sys.modules["weightgrad"] = types.ModuleType("weightgrad")
package.__path__ = [sys.argv[3]]
from weightgrad.runtime.transport.connection_main import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


class ConnectionProcess:
    """A process with gRPC connections. Any thread may call any method.

    Raises:
        LinkError: the process cannot be started.
    """

    def __init__(self) -> None:
        ours, theirs = _socket_pair()
        with theirs:
            command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), str(_PACKAGE)]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # what ends the group of this process is noticed, and told to the server
                )
            except OSError as error:
                ours.close()
                raise LinkError(
                    f"cannot start a process for the connections ({sys.executable}: {error.strerror}); it needs "
                    "a Python interpreter in sys.executable, and room for one more process"
                ) from error
        self._control, self._lock = ours, threading.Lock()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def ask(self, facts: Any) -> socket.socket:
        """Send a request.

        Returns:
            The socket on which it is answered.

        Raises:
            OSError: the process has ended.
        """
        ours, theirs = _socket_pair()
        with theirs:
            try:
                with self._lock:
                    send_request(self._control, facts, theirs)
            except OSError:
                ours.close()
                raise
        return ours

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def why_ended(self) -> str:
        """What became of a process that has closed its sockets."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.returncode
        how = "does not answer" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        return f"the process with this process's connections, {self.pid}, {how}"

    def end(self) -> None:
        """End the process. May be called again."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if self.alive:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Leave the process to the parent of this one, which was forked from it."""
        self._process.returncode = 0  # it is nobody's child here
        self._control.close()


_opened: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # what a forked child has to close
_opening = threading.Lock()  # held during a fork, so that no socket is missing there
_start = threading.Lock()
_shared: ConnectionProcess | None = None


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    with _opening:
        pair = socket.socketpair()
        _opened.update(pair)
        for one in pair:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        return pair


def shared() -> ConnectionProcess:
    """The process for all connections of this process, started where there is none.

    Raises:
        LinkError: it cannot be started.
    """
    global _shared
    with _start:
        if _shared is not None and not _shared.alive:
            _shared.end()
        if _shared is None or not _shared.alive:
            _shared = ConnectionProcess()
        return _shared


def _end() -> None:
    if _shared is not None:
        _shared.end()


def _after_fork() -> None:
    """In a forked child: it has no connections, and must not keep those of its parent open."""
    global _shared, _start
    _opening.release()
    _start = threading.Lock()
    if _shared is not None:
        _shared.forget()
        _shared = None
    for one in list(_opened):
        one.close()
    _opened.clear()


atexit.register(_end)  # now, so that whoever says goodbye at exit does so before
os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_after_fork)
