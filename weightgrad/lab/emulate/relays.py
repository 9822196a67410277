"""Modelled links: TCP relays on loopback that pass bytes at a link's rate and hold them for its delay.

    leaves = max(now, when the one before has left) + bytes / rate          arrives = leaves + delay ± jitter

All connections of a direction share its rate, piece by piece in turn. A cut holds everything where it is: connections
stay open, as in a silent outage. A new connection waits for a round trip, in place of the handshake that loopback does
not need. Not modelled: slow start, queues that overflow, and loss except that it lowers the rate (see ModelledWan).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from weightgrad.lab.emulate.switch import Lateness, ask_for_short_slices

_PIECE_S, _LEAST_PIECE, _MOST_PIECE = 0.002, 1448, 65536
_HELD = 256  # pieces of a connection on their way: half a second of the line
_HICCUP_S = 0.1  # of idle time, caused by the scheduler, that the line makes up for at most
_KERNEL_BUFFER = 262_144
_ABORT = struct.pack("ii", 1, 0)
_LOOPBACK = "127.0.0.1"

_Result = TypeVar("_Result")


class Direction:
    """One direction of a link; used only in the thread of the relays."""

    def __init__(self) -> None:
        self._rate, self._delay, self._jitter, self._free_at = 1.0, 0.0, 0.0, 0.0
        self._open, self._waiting = asyncio.Event(), 0
        self.bytes = 0
        self.lateness = Lateness()

    def set(self, rate_bytes: float, delay: float, jitter: float, *, cut: bool) -> None:
        """Set rate, delay and jitter of what comes from now on, and cut or heal the direction."""
        self._rate, self._delay, self._jitter = rate_bytes, delay, jitter
        if cut:
            self._open.clear()
        else:
            self._open.set()

    @property
    def piece(self) -> int:
        """Bytes that go at a time: those of two milliseconds."""
        return int(min(max(self._rate * _PIECE_S, _LEAST_PIECE), _MOST_PIECE))

    @property
    def delay(self) -> float:
        """The one-way delay."""
        return self._delay

    async def healed(self) -> None:
        """Wait while the direction is cut."""
        await self._open.wait()

    async def leave(self, size: int, *, ready: bool) -> float:
        """Wait until a piece has left.

        Args:
            size: Bytes of the piece.
            ready: Whether the piece was there before it was asked for; then the line was idle only because of the
                scheduler, and may make up for it.

        Returns:
            When the piece arrives at the other end.
        """
        cut = not self._open.is_set()
        await self._open.wait()
        now = asyncio.get_running_loop().time()
        if cut or not (ready or self._waiting) or self._free_at < now - _HICCUP_S:
            self._free_at = max(self._free_at, now)
        self._free_at += size / self._rate
        left = max(self._free_at, now)
        self._waiting += 1
        try:
            await asyncio.sleep(left - now)
        finally:
            self._waiting -= 1
        return left + self._delay + random.uniform(-self._jitter, self._jitter)


class Relays:
    """All relays of a network, in one thread with one event loop."""

    def __init__(self) -> None:
        # `select` keeps microseconds; `epoll` would round every delay up to a millisecond.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._run, name="relays", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._directions: dict[tuple[str, str], Direction] = {}
        self._listeners: dict[tuple[str, str, int], socket.socket] = {}
        self._thread.start()

    def _run(self) -> None:
        ask_for_short_slices()
        self._loop.run_forever()

    def _in_loop(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def set(self, sender: str, receiver: str, rate_bytes: float, delay: float, jitter: float, *, cut: bool) -> None:
        """Set the values of a direction, and cut or heal it."""

        async def work() -> None:
            direction = self._directions.setdefault((sender, receiver), Direction())
            direction.set(rate_bytes, delay, jitter, cut=cut)

        self._in_loop(work())

    def stats(self) -> dict[tuple[str, str], tuple[int, dict[str, float]]]:
        """Bytes so far and lateness, by direction."""

        async def work() -> dict[tuple[str, str], tuple[int, dict[str, float]]]:
            return {
                ends: (direction.bytes, direction.lateness.summary()) for ends, direction in self._directions.items()
            }

        return self._in_loop(work())

    def reset_stats(self) -> None:
        """Count lateness from now on."""

        async def work() -> None:
            for direction in self._directions.values():
                direction.lateness.clear()

        self._in_loop(work())

    def port(self, sender: str, receiver: str, port: int) -> int:
        """The loopback port at which the sender reaches a port of the receiver."""
        key = (sender, receiver, port)

        async def work() -> None:
            listener = socket.create_server((_LOOPBACK, 0), backlog=64)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER)
            listener.setblocking(False)
            self._listeners[key] = listener
            self._start(
                self._accept(listener, self._directions[sender, receiver], self._directions[receiver, sender], port)
            )

        if key not in self._listeners:
            self._in_loop(work())
        found: int = self._listeners[key].getsockname()[1]
        return found

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket, there: Direction, back: Direction, port: int) -> None:
        while True:
            client, _ = await self._loop.sock_accept(listener)
            self._start(self._join(client, there, back, port))

    async def _join(self, client: socket.socket, there: Direction, back: Direction, port: int) -> None:
        """Relay one connection until either end closes it."""
        with client, socket.socket() as server:
            for one in (client, server):
                one.setblocking(False)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)  # until it ends well
            await there.healed()
            await asyncio.sleep(there.delay + back.delay)
            with contextlib.suppress(OSError):
                await self._loop.sock_connect(server, (_LOOPBACK, port))
                await _both(self._pump(client, server, there), self._pump(server, client, back))
                for one in (client, server):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes(8))

    async def _pump(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_HELD)

        async def take() -> None:
            data = b"."
            while data:
                ready = True
                try:
                    data = source.recv(direction.piece)
                except BlockingIOError:
                    ready = False
                    data = await self._loop.sock_recv(source, direction.piece)
                await held.put((await direction.leave(len(data), ready=ready), data))

        await _both(take(), self._deliver(held, target, direction))

    async def _deliver(
        self, held: asyncio.Queue[tuple[float, bytes]], target: socket.socket, direction: Direction
    ) -> None:
        while True:
            due, data = await held.get()
            if (pause := due - self._loop.time()) > 0:
                await asyncio.sleep(pause)
                direction.lateness.note(self._loop.time() - due)
            await direction.healed()
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            await self._loop.sock_sendall(target, data)
            direction.bytes += len(data)

    def close(self) -> None:
        """Reset every connection and end the thread."""

        async def work() -> None:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._in_loop(work())
        for listener in self._listeners.values():
            listener.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _both(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
    """Run both until they are done; if one fails, cancel the other."""
    tasks = [asyncio.ensure_future(one) for one in (first, second)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
