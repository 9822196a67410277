"""Messages cut into chunks: whole, once, in order, within memory, whatever happens to the streams."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad.errors import ProtocolError, RefusedError, SpecError
from weightgrad.runtime.transport.receive_queue import BufferPool, ReceiveQueue
from weightgrad.runtime.transport.records import (
    MAX_ACKS,
    MAX_GOODBYE_BYTES,
    OVERHEAD_BYTES,
    Ack,
    Chunk,
    Chunking,
    Goodbye,
    Hello,
    Record,
    parse,
    to_bytes,
)
from weightgrad.runtime.transport.send_queue import SendQueue

SMALL = Chunking(most_bytes=4, least_bytes=4)
U63 = st.integers(0, 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)


def incoming(max_message: int = 10_000, max_buffered: int = 100_000, chunking: Chunking = SMALL) -> ReceiveQueue:
    return ReceiveQueue(max_message=max_message, max_buffered=max_buffered, chunking=chunking)


# -- records ----------------------------------------------------------------------------------


def test_golden_records() -> None:
    assert to_bytes(Hello(5, 6)).hex() == "010000000200000005000000000000000600000000000000"
    assert to_bytes(Chunk(1, 2, 5, b"abc")).hex() == (
        "0200000000000000010000000000000002000000000000000500000000000000616263"
    )
    assert to_bytes(Ack(7, ((8, 9),))).hex() == ("0300000001000000070000000000000008000000000000000900000000000000")
    assert to_bytes(Goodbye("bye")) == b"\x04bye"


@given(
    st.one_of(
        st.builds(Hello, U64, U64),
        st.builds(Ack, U64, st.lists(st.tuples(U64, U64), max_size=20).map(tuple)),
        st.builds(Goodbye, st.text(max_size=MAX_GOODBYE_BYTES // 4)),
        st.builds(
            lambda m, o, more, d: Chunk(m + 1, o, o + len(d) + more, d),
            U63,
            U63.map(lambda x: x // 4),
            st.integers(0, 99),
            st.binary(),
        ),
    )
)
def test_records_survive(record: Record) -> None:
    assert parse(to_bytes(record)) == record


@given(st.binary(max_size=80))
def test_noise_is_refused_or_is_a_record(data: bytes) -> None:
    try:
        record = parse(data)
    except ProtocolError:
        return
    if not isinstance(record, Goodbye):  # text that is not UTF-8 is shown as well as it can be
        assert to_bytes(record) == data


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "kind None"),
        (b"\x09abc", "kind 9"),
        (to_bytes(Hello(1, 2))[:-1], "hello of 23 bytes"),
        (to_bytes(Hello(1, 2)) + b"x", "hello of 25 bytes"),
        (b"\x01\x01" + to_bytes(Hello(1, 2))[2:], "reserved"),
        (b"\x01\0\0\0\x07" + to_bytes(Hello(1, 2))[5:], "version 7"),
        (to_bytes(Chunk(1, 0, 0, b""))[:-1], "header"),
        (b"\x02\x01" + to_bytes(Chunk(1, 0, 0, b""))[2:], "reserved"),
        (to_bytes(Chunk(0, 0, 3, b"abc")), "message 0"),
        (to_bytes(Chunk(1, 1, 3, b"abc")), "within the message"),
        (to_bytes(Chunk(1, 2**64 - 1, 3, b"abc")), "within the message"),
        (to_bytes(Chunk(1, 0, 2**63, b"abc")), "within the message"),
        (to_bytes(Ack(1, ((1, 2),)))[:-1], "acknowledgements in 31 bytes"),
        (to_bytes(Ack(1)) + b"x", "acknowledgements in 17 bytes"),
        (to_bytes(Ack(1))[:-1], "header"),
        (b"\x03\x01" + to_bytes(Ack(1))[2:], "reserved"),
        (to_bytes(Ack(1, ((1, 2),) * (MAX_ACKS + 1))), "at most"),
        (b"\x04" + b"x" * (MAX_GOODBYE_BYTES + 1), "at most"),
    ],
)
def test_bytes_that_are_not_a_record_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        parse(data)


def test_a_chunk_is_not_copied_when_read() -> None:
    data = to_bytes(Chunk(1, 0, 5, b"abcde"))
    chunk = parse(data)
    assert isinstance(chunk, Chunk)
    assert isinstance(chunk.data, memoryview)
    assert chunk.data.obj is data


def test_chunking_depends_on_the_length_alone() -> None:
    assert [Chunking().count(total) for total in (0, 1, 8 << 10, 12 << 10, 1 << 20, 5 << 20, 1 << 30)] == [
        *(1, 1, 1, 2),
        *(4, 5, 1024),
    ]


@given(st.integers(0, 1 << 34))
def test_chunks_cover_a_message_and_are_dealt_among_all_connections(total: int) -> None:
    chunking = Chunking()
    size, count = chunking.chunk_bytes(total), chunking.count(total)
    assert (count - 1) * size < max(1, total) <= count * size
    assert size <= chunking.most_bytes
    if total >= chunking.connections * chunking.least_bytes:
        assert count >= chunking.connections - 1


# -- both queues together ---------------------------------------------------------------------


@settings(max_examples=100)
@given(st.lists(st.integers(0, 200), max_size=12), st.integers(0, 2**32))
def test_every_message_once_and_in_order(lengths: list[int], seed: int) -> None:
    chance = random.Random(seed)
    messages = [chance.randbytes(n) for n in lengths]
    there, here = SendQueue(stream_bytes=40, chunking=SMALL), incoming(200, 200 + OVERHEAD_BYTES + 500)
    there.granted(here.window)
    flying: dict[int, list[Chunk]] = {}  # by stream
    strays: list[Chunk] = []  # of streams that broke, still on their way
    acks: dict[int, list[tuple[int, int]]] = {}  # on their way back
    got: list[bytes] = []
    streams, left = 4, list(messages)

    def arrive(stream: int | None, chunk: Chunk) -> None:
        here.add(chunk)
        if stream is not None:
            acks.setdefault(stream, []).append((chunk.message, chunk.offset))
        assert here.buffered_bytes <= here.window

    for turn in range(20_000):
        settling = turn > 300  # no more faults: it has to end
        stream = chance.randrange(streams - 4, streams)
        act = chance.randrange(8)
        if act == 0 and left:
            there.put(left.pop(0))
        elif act <= 2:
            if chunk := there.take(stream):
                flying.setdefault(stream, []).append(chunk)
                held = [c for c in flying[stream] if c.message > here.released]
                assert sum(len(c.data) for c in held) <= 40 or len(held) == 1
        elif act == 3 and flying.get(stream):
            arrive(stream, flying[stream].pop(chance.randrange(len(flying[stream]))))
        elif act == 4 and acks.get(stream):
            there.acknowledged(*acks[stream].pop(0))
            there.released(here.released if chance.random() < 0.5 else 0)
        elif act == 5 and (message := here.get()) is not None:
            got.append(bytes(message))
        elif act == 6 and not settling and chance.random() < 0.2:
            there.stream_broke(stream)
            strays += flying.pop(stream, [])
            acks.pop(stream, None)
            if stream == streams - 4:
                streams += 1  # a stream that is opened again has a new number
        elif act == 7:
            if strays and chance.random() < 0.5:
                arrive(None, strays.pop(chance.randrange(len(strays))))
            there.released(here.released)
            if settling and len(got) == len(messages) and there.wait_empty(0):
                break
    assert got == messages
    assert there.wait_empty(0)
    assert there.unacknowledged_bytes == 0


def test_threads_share_the_queues() -> None:
    chance = random.Random(5)
    messages = [chance.randbytes(chance.choice([0, 1, 15, 16, 17, 3000, 9000])) for _ in range(200)]
    there, here = SendQueue(stream_bytes=64, chunking=SMALL), incoming(10_000, 40_000)
    there.granted(here.window)
    done = threading.Event()

    def carry(stream: int) -> None:
        mine = random.Random(stream)
        while not done.is_set():
            chunk = there.take(stream, timeout=0.01)
            if chunk is None:
                continue
            if mine.random() < 0.05:
                if mine.random() < 0.5:
                    here.add(chunk)  # it arrived, and nobody heard of it
                there.stream_broke(stream)
                continue
            here.add(chunk)
            there.acknowledged(chunk.message, chunk.offset)

    threads = [threading.Thread(target=carry, args=(stream,), daemon=True) for stream in range(4)]
    for thread in threads:
        thread.start()
    for message in messages:
        there.put(message)
    for message in messages:
        got = here.get(30)
        assert got is not None
        assert got == message
        there.released(here.released)
    assert there.wait_empty(30)
    done.set()
    for thread in threads:
        thread.join()


# -- SendQueue ---------------------------------------------------------------------------------


def test_what_a_broken_stream_had_goes_first_and_in_order() -> None:
    queue = SendQueue(chunking=SMALL)
    queue.put(bytes(12))
    a, b = queue.take(1), queue.take(2)
    assert (a, b) == (Chunk(1, 0, 12, bytes(4)), Chunk(1, 4, 12, bytes(4)))
    queue.stream_broke(2)
    queue.stream_broke(1)
    assert [chunk.offset for _ in range(3) if (chunk := queue.take(3))] == [0, 4, 8]
    assert queue.take(3) is None


def test_only_what_was_not_acknowledged_is_sent_again() -> None:
    queue = SendQueue(chunking=SMALL)
    queue.put(bytes(12))
    for _ in range(3):
        queue.take(1)
    queue.acknowledged(1, 4)
    queue.stream_broke(1)
    assert [chunk.offset for _ in range(3) if (chunk := queue.take(2))] == [0, 8]
    queue.stream_broke(2)
    queue.acknowledged(1, 0)  # late, of the stream that broke
    assert [chunk.offset for _ in range(3) if (chunk := queue.take(3))] == [8]


def test_a_stream_takes_no_more_than_its_share() -> None:
    queue = SendQueue(stream_bytes=8, chunking=SMALL)
    queue.put(bytes(40))
    assert queue.take(1)
    assert queue.take(1)
    assert queue.take(1) is None
    assert not queue.has_for(1)
    assert queue.take(2)
    queue.acknowledged(1, 0)
    assert queue.take(1)


def test_a_message_waits_for_room_at_the_other_end() -> None:
    queue = SendQueue(chunking=SMALL)
    queue.granted(2 * OVERHEAD_BYTES + 5)
    for _ in range(3):
        queue.put(b"abc")
    assert queue.take(1)
    assert queue.take(1) is None  # 2 * 3 bytes and their overhead do not fit
    queue.acknowledged(1, 0)
    assert queue.take(1) is None  # it is there, and still takes room
    queue.released(1)
    assert queue.take(1)


def test_what_was_taken_needs_no_acknowledgement() -> None:
    queue = SendQueue(chunking=SMALL)
    queue.put(bytes(8))
    queue.take(1)
    queue.take(2)
    queue.stream_broke(2)
    queue.released(1)
    assert queue.wait_empty(0)
    assert queue.take(3) is None


def test_acknowledging_what_was_never_sent_is_refused() -> None:
    queue = SendQueue(chunking=SMALL)
    queue.put(bytes(8))
    queue.take(1)
    with pytest.raises(ProtocolError, match="never sent"):
        queue.acknowledged(1, 4)
    with pytest.raises(ProtocolError, match="never sent"):
        queue.acknowledged(2, 0)
    with pytest.raises(ProtocolError, match="never sent whole"):
        queue.released(1)


def test_clear_forgets_and_numbers_go_on() -> None:
    queue = SendQueue(chunking=SMALL)
    queue.put(bytes(8))
    queue.take(1)
    queue.clear()
    queue.acknowledged(1, 0)
    queue.stream_broke(1)
    assert queue.wait_empty(0)
    assert queue.take(1) is None
    assert queue.put(b"x") == 2
    assert queue.take(1) == Chunk(2, 0, 1, b"x")


def test_messages_are_not_copied_on_the_way_out() -> None:
    queue, data = SendQueue(chunking=SMALL), bytes(12)
    queue.put(data)
    chunk = queue.take(1)
    assert chunk is not None
    assert isinstance(chunk.data, memoryview)
    assert chunk.data.obj is data


# -- ReceiveQueue ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(1, 2, 12, bytes(4)),  # between two cuts
        Chunk(1, 0, 12, bytes(3)),  # shorter than the cut
        Chunk(1, 0, 12, bytes(5)),
        Chunk(1, 8, 12, bytes(3)),  # the last is shorter than its rest
        Chunk(1, 12, 12, b""),
        Chunk(0, 0, 4, bytes(4)),
    ],
)
def test_chunks_cut_elsewhere_are_refused(chunk: Chunk) -> None:
    with pytest.raises(ProtocolError):
        incoming().add(chunk)


def test_a_message_cannot_change_its_length() -> None:
    here = incoming()
    here.add(Chunk(1, 0, 12, bytes(4)))
    with pytest.raises(ProtocolError, match="had 12 before"):
        here.add(Chunk(1, 4, 11, bytes(4)))


def test_a_long_message_is_refused_before_it_costs_anything() -> None:
    here = ReceiveQueue(max_message=1 << 20, max_buffered=2 << 20)
    with pytest.raises(RefusedError, match="takes at most 1048576"):
        here.add(Chunk(1, 0, 1 << 50, bytes(1 << 20)))
    assert here.buffered_bytes == 0


def test_more_than_was_granted_is_refused() -> None:
    here = incoming(100, 3 * OVERHEAD_BYTES)
    for number in (7, 5):  # ones that have to wait for those before, and are empty
        here.add(Chunk(number, 0, 0, b""))
    with pytest.raises(RefusedError, match="had granted"):
        here.add(Chunk(6, 0, 1, b"x"))
    assert here.buffered_bytes == 2 * OVERHEAD_BYTES


def test_admission_is_asked_once_a_message() -> None:
    asked: list[int] = []
    here = ReceiveQueue(max_message=100, max_buffered=10_000, chunking=SMALL, admit=asked.append)
    for offset in (0, 4, 0, 8):
        here.add(Chunk(1, offset, 12, bytes(4)))
    here.add(Chunk(1, 0, 12, bytes(4)))
    assert asked == [12]
    assert bytes(here.get() or b"") == bytes(12)


def test_closed_keeps_what_is_whole_unless_told_to_forget() -> None:
    for forget in (False, True):
        here = incoming()
        here.add(Chunk(1, 0, 1, b"x"))
        here.add(Chunk(2, 0, 12, bytes(4)))
        here.close(forget=forget)
        here.add(Chunk(3, 0, 1, b"x"))
        assert here.get(None) == (None if forget else b"x")
        assert here.get(None) is None


def test_limits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SpecError, match="must fit"):
        ReceiveQueue(max_message=100, max_buffered=100)


# -- memory -----------------------------------------------------------------------------------


def test_memory_is_used_again_once_nobody_looks_at_it() -> None:
    buffers = BufferPool(keep_bytes=8 << 20)
    first = buffers.take(2 << 20)
    memory = first.obj
    tensor = torch.frombuffer(first[100:], dtype=torch.uint8)
    del first
    assert buffers.take(2 << 20).obj is not memory
    assert tensor.numel() == (2 << 20) - 100
    del tensor
    taken = [buffers.take((2 << 20) - n) for n in range(2)]
    assert any(view.obj is memory for view in taken)


def test_no_more_memory_is_kept_than_allowed() -> None:
    buffers = BufferPool(keep_bytes=5 << 20)
    views = [buffers.take(2 << 20) for _ in range(4)]
    assert len({id(view.obj) for view in views}) == 4
    memory = {id(view.obj): view.obj for view in views}
    del views
    kept = sum(len(one) for one in buffers._kept)
    assert kept <= 5 << 20
    assert len(buffers.take(4 << 20)) == 4 << 20  # makes room by forgetting the free ones
    assert sum(len(one) for one in buffers._kept) <= 5 << 20
    assert len(buffers.take(6 << 20)) == 6 << 20  # is not kept at all
    assert len(buffers.take(10)) == 10
    del memory
