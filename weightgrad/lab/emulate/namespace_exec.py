"""Runs a command in the namespaces of an emulated host; to the caller it looks like the command itself.

    python -I -S namespace_exec.py SUPERVISOR_PID ROOTLESS NET HOSTNAME COMMAND...

Entering a PID namespace takes a fork, so the process that the caller started is not the command but its parent. This
parent only waits: it hands on every signal and ends as the command ended (exit code or signal), and the command dies
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

_NAMESPACES = ("user", "pid_for_children", "mnt", "net")
_CLONE_NEWUTS, _PR_SET_PDEATHSIG = 0x04000000, 1
_NOT_FORWARDED = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _restore_directory(here: str, fallback: int) -> None:
    """Go to the caller's directory: a new mount namespace starts at its root."""
    try:
        os.chdir(here)
    except OSError:
        os.fchdir(fallback)


def exec_command(command: list[str], namespaces: dict[str, int], net: str, hostname: str, mask: set[int]) -> None:
    """In the child: enter the host's namespaces and become the command. Returns only by an exception."""
    here, place = os.getcwd(), os.open(".", os.O_RDONLY)
    _check(_libc.setns(namespaces["mnt"], 0), "enter the mount namespace")
    network = os.open(f"/run/netns/{net}", os.O_RDONLY) if net else namespaces["net"]
    _check(_libc.setns(network, 0), "enter the network namespace")
    if hostname:
        _check(_libc.unshare(_CLONE_NEWUTS), "a hostname of its own")
        socket.sethostname(hostname)
    _restore_directory(here, place)
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != 0:  # the parent is outside and has no number here; a number means that it is gone
        os._exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # Python changes these
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.execvp(command[0], command)


def follow(pid: int) -> int:
    """Hand on signals until the command has ended; returns its wait status."""
    heard = signal.valid_signals() - _NOT_FORWARDED
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


def exit_like(status: int) -> None:
    """Exit with the command's exit code, or by the signal that ended it."""
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def run(supervisor: str, rootless: str, net: str, hostname: str, *command: str) -> int:
    """Enter the namespaces and run the command; returns its wait status."""
    namespaces = {kind: os.open(f"/proc/{supervisor}/ns/{kind}", os.O_RDONLY) for kind in _NAMESPACES}
    if rootless == "1":
        _check(_libc.setns(namespaces["user"], 0), "enter the user namespace")
    _check(_libc.setns(namespaces["pid_for_children"], 0), "enter the PID namespace")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _NOT_FORWARDED)
    terminal = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            if terminal:
                os.tcsetpgrp(0, os.getpgrp())
            exec_command(list(command), namespaces, net, hostname, {*mask})
        except OSError as error:
            os.write(2, f"weightgrad: cannot run {command[0]} on {hostname or net}: {error}\n".encode())
        os._exit(127)
    with contextlib.suppress(OSError):  # the child does the same; whichever is first
        os.setpgid(pid, pid)
    status = follow(pid)
    if terminal:
        os.tcsetpgrp(0, os.getpgrp())
    return status


def main() -> None:
    """Run the command; if the network goes away meanwhile, die as its other processes do."""
    try:
        exit_like(run(*sys.argv[1:]))
    except OSError as error:
        if os.path.exists(f"/proc/{sys.argv[1]}/ns/mnt"):
            sys.exit(f"weightgrad: cannot enter {sys.argv[4]}: {error}")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
