"""The way into a host: becomes a process of the lab that looks, from outside, like the command itself.

    python -I -S enter.py LAB_PID ROOTLESS NET HOSTNAME COMMAND...

Entering a PID namespace takes a fork, so what the caller started is not the command but its parent. This parent does
nothing but wait: it hands on every signal, ends as the command ended (exit code or signal), and the command dies
with it (PDEATHSIG). The command leads a process group of its own, so that a signal to the caller's group reaches it
once and not twice; at a terminal that group becomes the foreground.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys

_SPACES = ("user", "pid_for_children", "mnt", "net")
_CLONE_NEWUTS, _PR_SET_PDEATHSIG = 0x04000000, 1
_NOT_OURS = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _go_home(here: str, fallback: int) -> None:
    """A new mount namespace starts at its root; the caller's directory is nearly always there too."""
    try:
        os.chdir(here)
    except OSError:
        os.fchdir(fallback)


def become(command: list[str], spaces: dict[str, int], net: str, hostname: str, mask: set[int]) -> None:
    """In the child: the host's namespaces, then the command. Returns only by an exception."""
    here, place = os.getcwd(), os.open(".", os.O_RDONLY)
    _check(_libc.setns(spaces["mnt"], 0), "enter the mount namespace")
    network = os.open(f"/run/netns/{net}", os.O_RDONLY) if net else spaces["net"]
    _check(_libc.setns(network, 0), "enter the network namespace")
    if hostname:
        _check(_libc.unshare(_CLONE_NEWUTS), "a hostname of its own")
        socket.sethostname(hostname)
    _go_home(here, place)
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != 0:  # our parent is outside, and has no number here; a number means that it is gone
        os._exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # Python changes these
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.execvp(command[0], command)


def follow(pid: int) -> int:
    """Until the command has ended; hands on what comes meanwhile. Returns its wait status."""
    heard = signal.valid_signals() - _NOT_OURS
    while True:
        info = signal.sigwaitinfo(heard)
        if info.si_signo == signal.SIGCHLD:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status
        elif info.si_code > 0:  # from the kernel: the terminal means the whole group
            os.killpg(pid, info.si_signo)
        else:
            os.kill(pid, info.si_signo)


def end_like(status: int) -> None:
    """Exit with the command's code, or die of its signal."""
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def run(lab: str, rootless: str, net: str, hostname: str, *command: str) -> int:
    """Enter, start, follow. Returns how the command ended."""
    spaces = {kind: os.open(f"/proc/{lab}/ns/{kind}", os.O_RDONLY) for kind in _SPACES}
    if rootless == "1":
        _check(_libc.setns(spaces["user"], 0), "enter the user namespace")
    _check(_libc.setns(spaces["pid_for_children"], 0), "enter the PID namespace")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _NOT_OURS)
    terminal = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            if terminal:
                os.tcsetpgrp(0, os.getpgrp())
            become(list(command), spaces, net, hostname, {*mask})
        except OSError as error:
            os.write(2, f"weightgrad: cannot run {command[0]} on {hostname or net}: {error}\n".encode())
        os._exit(127)
    with contextlib.suppress(OSError):  # it does so itself; whoever comes first
        os.setpgid(pid, pid)
    status = follow(pid)
    if terminal:
        os.tcsetpgrp(0, os.getpgrp())
    return status


def main() -> None:
    """A network that goes away while we enter it kills us too."""
    try:
        end_like(run(*sys.argv[1:]))
    except OSError as error:
        if os.path.exists(f"/proc/{sys.argv[1]}/ns/mnt"):
            sys.exit(f"weightgrad: cannot enter {sys.argv[4]}: {error}")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
