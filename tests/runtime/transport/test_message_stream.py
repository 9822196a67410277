"""The streams of a session and its two lanes: whole, once, in order, whatever happens to the streams."""

from __future__ import annotations

import random
import threading
import time

import pytest

from weightgrad.errors import ProtocolError, RefusedError, SpecError
from weightgrad.runtime.transport.lanes import LaneLimits, Lanes
from weightgrad.runtime.transport.message_stream import MessageStream, Stream
from weightgrad.runtime.transport.records import OVERHEAD_BYTES, Ack, Chunk, Hello, Record, parse, to_bytes

from .harness import by_lane, is_control


def test_messages_over_streams_that_break() -> None:
    chance = random.Random(11)
    limits = LaneLimits(max_message=1 << 22, max_buffered=1 << 23, stream_bytes=1 << 20)
    ends = [Lanes(limits) for _ in range(2)]
    sizes = {b"bulk": [0, 9, 300_000, 2_000_000], b"control": [0, 9, 300_000]}
    lanes = [[chance.choice([b"bulk", b"control"]) for _ in range(60)] for _ in ends]
    messages = [[lane + chance.randbytes(chance.choice(sizes[lane])) for lane in way] for way in lanes]
    done = threading.Event()

    def one_way(source: Stream, target: Stream, records: int) -> None:
        for number, record in enumerate(source.records()):
            target.handle_record(record)
            if number == records:
                break
        source.close()
        target.close()

    def streams(number: int) -> None:
        mine = random.Random(number)
        while not done.is_set():
            pair = [end.open_stream(number) for end in ends]
            ways = [
                threading.Thread(target=one_way, args=(*way, mine.randrange(1, 60)), daemon=True)
                for way in (pair, pair[::-1])
            ]
            for way in ways:
                way.start()
            for way in ways:
                way.join()

    carriers = [threading.Thread(target=streams, args=(number,), daemon=True) for number in range(3)]
    for carrier in carriers:
        carrier.start()
    for end, outgoing in zip(ends, messages, strict=True):
        for message in outgoing:
            end.put(message, control=is_control(message))
    for end, expected in zip(ends, messages[::-1], strict=True):
        assert by_lane([bytes(end.get(60) or b"") for _ in expected]) == by_lane(expected)
        assert end.get() is None
    for end in ends:
        assert end.wait_sent(60)
        assert end.unacknowledged_bytes == 0
    done.set()
    for end in ends:
        end.end()
    for carrier in carriers:
        carrier.join()


def test_control_messages_have_limits_and_memory_of_their_own() -> None:
    """Both are checked before anything is allocated."""
    limits = LaneLimits(max_message=100, max_buffered=10_000, max_control_message=1000)
    lanes = Lanes(limits)
    stream, bulk = lanes.open_stream(0), lanes.open_stream(1)
    for opened in (stream, bulk):
        opened.handle_record(to_bytes(Hello(1, 0)))
    for number in range(1, 5):
        stream.handle_record(to_bytes(Chunk(number, 0, 1000, bytes(1000))))
    assert lanes.control.incoming.buffered_bytes == limits.max_control_buffered
    with pytest.raises(RefusedError, match="had granted"):
        stream.handle_record(to_bytes(Chunk(5, 0, 0, b"")))
    bulk.handle_record(to_bytes(Chunk(1, 0, 100, bytes(100))))
    for opened, length, why in (
        (stream, 1001, "1000; raise max_control_message"),
        (bulk, 101, "100; raise max_message"),
    ):
        with pytest.raises(RefusedError, match=f"{length} bytes; the receiver takes at most {why} there"):
            opened.handle_record(to_bytes(Chunk(9, 0, length, bytes(length))))
    assert lanes.control.incoming.buffered_bytes == limits.max_control_buffered
    assert lanes.bulk.incoming.buffered_bytes == 100 + OVERHEAD_BYTES


def test_ending_forgets_both_lanes_or_keeps_what_is_whole() -> None:
    for forget in (False, True):
        lanes = Lanes(LaneLimits(max_message=100, max_buffered=10_000))
        for number in (0, 1):
            stream = lanes.open_stream(number)
            stream.handle_record(to_bytes(Hello(1, 0)))
            stream.handle_record(to_bytes(Chunk(1, 0, 1, b"%d" % number)))
            lanes.put(b"never sent", control=number == 0)
        assert lanes.unacknowledged_bytes == 20
        assert not lanes.wait_sent(0.0)
        lanes.end(forget=forget)
        assert [lanes.get(None), lanes.get(None)] == ([None, None] if forget else [b"0", b"1"])
        assert lanes.get(None) is None
        assert lanes.unacknowledged_bytes == lanes.open_streams == 0
        assert lanes.wait_sent(0.0)


def test_a_thread_that_runs_first_leaves_chunks_to_the_other_streams() -> None:
    """On a busy machine one thread may ask for several chunks before the others, which wait, run at all."""
    session = MessageStream(max_message=1 << 20, max_buffered=1 << 21, stream_bytes=1 << 20)
    streams = [session.open_stream() for _ in range(4)]
    for stream in streams:
        stream.handle_record(to_bytes(Hello(1 << 21, 0)))
    taken: dict[int, list[Record]] = {stream.number: [] for stream in streams}

    def take(stream: Stream) -> None:
        for record in stream.records():
            taken[stream.number].append(parse(record))

    def end() -> None:
        while session.outgoing.has_for(0):
            time.sleep(0.01)
        session.end()

    first, others = streams[0], streams[1:]
    threads = [threading.Thread(target=take, args=(stream,), daemon=True) for stream in others]
    for thread in threads:
        thread.start()
    while not all(stream.waiting for stream in others):
        time.sleep(0.01)
    with session.lock:  # so no other thread runs until this one waits
        session.put(bytes(60_000))
        threads.append(threading.Thread(target=end, daemon=True))
        threads[-1].start()
        take(first)
    for thread in threads:
        thread.join()
    kinds = [[type(record) for record in own] for own in taken.values()]
    assert kinds == 4 * [[Hello, Chunk]]


@pytest.mark.parametrize("first", [Ack(0), Chunk(1, 0, 1, b"x")])
def test_a_stream_starts_with_one_hello(first: Record) -> None:
    messages = MessageStream(max_message=100, max_buffered=10_000, stream_bytes=100)
    with pytest.raises(ProtocolError, match="exactly one hello"):
        messages.open_stream().handle_record(to_bytes(first))
    stream = messages.open_stream()
    stream.handle_record(to_bytes(Hello(1, 0)))
    with pytest.raises(ProtocolError, match="exactly one hello"):
        stream.handle_record(to_bytes(Hello(1, 0)))


def test_limits_of_lanes_that_cannot_be_are_refused() -> None:
    with pytest.raises(SpecError, match="must fit"):
        LaneLimits(max_message=100, max_buffered=100)
    for name in ("max_control_message", "stream_bytes"):
        limits: dict[str, int] = {"max_message": 1, "max_buffered": 10_000, name: 0}
        with pytest.raises(SpecError, match=f"{name} is 0; it must be positive"):
            LaneLimits(**limits)
