"""Connection and Streams against the client of h2: with any sizes, windows and pieces, each call gets its whole answer.

h2 checks every frame. A frame that breaks a rule or exceeds a window is an error there.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.edges.http2.raw_client import fields

from timeball.edges.http2 import frames
from timeball.edges.http2.connection import Connection
from timeball.edges.http2.frames import RESPONSE, TRAILERS_OK, frame
from timeball.edges.http2.hpack_decoder import Headers
from timeball.edges.http2.streams import OUT_BYTES_MAX, Flushes, Stream, Streams

SIZES = st.integers(0, 70_000) | st.sampled_from([0, 1, 16_383, 16_384, 16_385, 65_535, 300_000])


class Wire(asyncio.Transport):
    """A transport that collects the bytes written, and is full above its high-water mark."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection, self.written, self.high_bytes, self.is_closed = connection, bytearray(), 2**40, False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high_bytes = high or self.high_bytes

    def write(self, data: Any) -> None:
        self.written += data
        if len(self.written) > self.high_bytes:
            self.connection.pause_writing()

    def read(self, size_bytes: int) -> bytes:
        """Remove and return at most `size_bytes` written bytes for the client. An empty buffer resumes writing."""
        data = bytes(self.written[:size_bytes])
        del self.written[:size_bytes]
        if not self.written:
            self.connection.resume_writing()
        return data

    def can_write_eof(self) -> bool:
        return False  # as a transport of TLS

    def close(self) -> None:
        self.is_closed = True

    abort = close


class Echo(Stream):
    """A call that answers a complete request in parts of the sizes in `part_sizes`."""

    def __init__(self, streams: Streams, number: int, part_sizes: list[int]) -> None:
        super().__init__(streams, number, False)
        self.part_sizes, self.received_bytes = part_sizes, 0

    def received(self, payload: bytes) -> None:
        """Take a part of the request, and begin to answer after the last part."""
        self.received_bytes += len(payload)
        self.allow(16_384)
        if self.is_half_closed:
            self.task = asyncio.ensure_future(self.answer())

    async def answer(self) -> None:
        self.streams.write(frame(frames.HEADERS, frames.END_HEADERS, self.number, RESPONSE))
        for size_bytes in self.part_sizes:
            if not self.send(size_bytes * b"x"):
                await self.sent()
        self.end(TRAILERS_OK)

    def abandon(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def check(self, now_s: float) -> None:
        pass


class Pair:
    """A Connection, and the client of h2 at the other end.

    `window` is the client's initial window, and `piece` the number of bytes that `turn` carries at a time.
    """

    def __init__(self, window: int, piece: int) -> None:
        self.calls: dict[int, Echo] = {}
        self.connection = Connection(self.begin, set(), asyncio.get_running_loop())
        self.wire, self.piece = Wire(self.connection), piece
        self.connection.connection_made(self.wire)
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.client.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self.client.initiate_connection()
        self.answer_bytes: dict[int, int] = {}
        self.ended: set[int] = set()

    def begin(
        self,
        streams: Streams,
        number: int,
        headers: Headers,
        size_bytes: int,
        now_s: float,
        is_half_closed: bool,
    ) -> Stream:
        part_sizes = headers["x-part-sizes"]
        self.calls[number] = Echo(streams, number, [int(size) for size in part_sizes.split("-")])
        return self.calls[number]

    async def turn(self) -> None:
        """Carry bytes both ways, in pieces. h2 reads them and raises its windows."""
        data = self.client.data_to_send()
        for at in range(0, len(data), self.piece):
            self.connection.data_received(data[at : at + self.piece])
        await asyncio.sleep(0)
        for event in self.client.receive_data(self.wire.read(7 * self.piece)):
            if isinstance(event, h2.events.DataReceived):
                earlier_bytes = self.answer_bytes.get(event.stream_id, 0)
                self.answer_bytes[event.stream_id] = earlier_bytes + len(event.data)
                if event.flow_controlled_length:
                    self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated), event


async def converse(calls: list[tuple[int, list[int]]], window: int, piece: int) -> Pair:
    """Make these calls (size of the request, sizes of the answer's parts), and check that each ends with its answer."""
    pair = Pair(window, piece)
    unsent: dict[int, int] = {}
    for size_bytes, part_sizes in calls:
        number = pair.client.get_next_available_stream_id()
        pair.client.send_headers(number, fields(x_part_sizes="-".join(map(str, part_sizes))))
        unsent[number] = size_bytes
    expected = dict(zip(unsent, (sum(part_sizes) for _, part_sizes in calls), strict=True))
    sizes = dict(unsent)
    for _ in range(20_000):
        for number, left in list(unsent.items()):
            size_bytes = min(left, pair.client.local_flow_control_window(number), 16_384)
            pair.client.send_data(number, size_bytes * b"y", end_stream=size_bytes == left)
            unsent[number] -= size_bytes
            if size_bytes == left:
                del unsent[number]
        await pair.turn()
        if len(pair.ended) == len(calls):
            break
    assert pair.ended == set(expected), "each call has ended"
    assert {number: pair.answer_bytes.get(number, 0) for number in expected} == expected
    assert {number: call.received_bytes for number, call in pair.calls.items()} == sizes
    assert not pair.connection.streams.open
    return pair


@given(
    st.lists(st.tuples(SIZES, st.lists(SIZES, min_size=1, max_size=4)), min_size=1, max_size=8),
    st.sampled_from([1_000, 16_384, 65_535, 2**31 - 1]),
    st.sampled_from([700, 5_000, 60_000]),
)
def test_each_call_gets_its_whole_answer(calls: list[tuple[int, list[int]]], window: int, piece: int) -> None:
    asyncio.run(converse(calls, window, piece))


def test_answers_wait_in_their_streams_while_the_socket_accepts_nothing() -> None:
    """Eight answers of a megabyte, with windows that never block, wait in their streams, not in the transport."""

    async def check() -> None:
        pair = Pair(2**31 - 1, 60_000)
        pair.client.increment_flow_control_window(2**30)
        for _ in range(8):
            number = pair.client.get_next_available_stream_id()
            pair.client.send_headers(number, fields(x_part_sizes="1000000"))
            pair.client.send_data(number, b"", end_stream=True)
        pair.connection.data_received(pair.client.data_to_send())
        for _ in range(20):
            await asyncio.sleep(0)
        assert OUT_BYTES_MAX < len(pair.wire.written) < 3 * OUT_BYTES_MAX
        assert len(pair.connection.streams.open) == 8
        pair.connection.connection_lost(None)
        await asyncio.sleep(0)
        assert all(call.task is not None and call.task.cancelled() for call in pair.calls.values())

    asyncio.run(check())


def test_a_stream_with_an_empty_window_blocks_only_itself() -> None:
    async def check() -> None:
        pair = Pair(1_000, 60_000)
        for part_size in ("5000", "10"):
            number = pair.client.get_next_available_stream_id()
            pair.client.send_headers(number, fields(x_part_sizes=part_size))
            pair.client.send_data(number, b"", end_stream=True)
        pair.connection.data_received(pair.client.data_to_send())
        for _ in range(5):
            await asyncio.sleep(0)
        assert list(pair.connection.streams.open) == list(pair.connection.streams.blocked_by_stream) == [1]
        assert not pair.connection.streams.waiting
        pair.connection.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(check())


def test_a_change_of_the_initial_window_lets_only_unblocked_streams_send() -> None:
    """One setting changes the windows of all open streams, and only streams that it unblocks are visited."""

    async def check() -> None:
        pair = Pair(1_000, 60_000)
        for _ in range(100):
            number = pair.client.get_next_available_stream_id()
            pair.client.send_headers(number, fields(x_part_sizes="2000"))
            pair.client.send_data(number, b"", end_stream=number < 40)  # twenty complete requests
        pair.connection.data_received(pair.client.data_to_send())
        streams = pair.connection.streams

        async def change(size_bytes: int) -> list[int]:
            pair.connection.data_received(frames.settings({frames.INITIAL_WINDOW: size_bytes}))
            for _ in range(3):
                await asyncio.sleep(0)
            return [stream.window_delta for stream in streams.open.values()]

        deltas = await change(1_000)
        assert deltas == [-1_000] * 20 + [0] * 80 and len(streams.blocked_by_stream) == 20
        for size_bytes in (500, 0, 900):
            assert await change(size_bytes) == deltas
            windows = [stream.send_window for stream in streams.open.values()]
            assert windows == [size_bytes - 1_000] * 20 + [size_bytes] * 80
        assert await change(1_001) == [-1_001] * 20 + [0] * 80
        assert await change(2_000) == [0] * 80, "the answers have left"
        pair.connection.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(check())


def test_streams_blocked_by_the_connection_s_window_send_in_turn() -> None:
    async def check() -> None:
        pair = Pair(2**20, 10**6)
        for _ in range(20):
            number = pair.client.get_next_available_stream_id()
            pair.client.send_headers(number, fields(x_part_sizes="10000"))
            pair.client.send_data(number, b"", end_stream=True)
        pair.connection.data_received(pair.client.data_to_send())
        for _ in range(5):
            await asyncio.sleep(0)
        streams = pair.connection.streams
        # The window of the connection, 65,535 bytes, is enough for six of the answers.
        assert (
            len(streams.blocked_by_connection) == 14
            and not streams.blocked_by_stream
            and not streams.send_window
        )
        first = list(streams.blocked_by_connection)
        pair.connection.data_received(frames.window_update(0, 1))
        assert list(streams.blocked_by_connection) == [*first[1:], first[0]], (
            "a window of one byte lets one stream send"
        )
        pair.connection.data_received(frames.window_update(0, 10**6))
        assert not streams.blocked_by_connection
        pair.connection.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(check())


def test_the_harness_sees_more_data_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: if `Stream.send` ignores the windows, h2 raises an error."""

    def send_without_window(stream: Stream, data: bytes) -> bool:
        for at in range(0, len(data), 16_384):
            stream.streams.write_data(stream, data[at : at + 16_384])
        return True

    monkeypatch.setattr(Stream, "send", send_without_window)
    with pytest.raises(h2.exceptions.FlowControlError):
        asyncio.run(converse([(10, [100_000])], 65_535, 60_000))


def test_a_connection_that_fails_to_flush_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class BrokenStreams(Streams):
        def flush(self) -> None:
            raise RuntimeError("no socket")

    async def check() -> None:
        flushes, wire = Flushes(asyncio.get_running_loop()), Wire(None)  # type: ignore[arg-type]
        for streams in (BrokenStreams(flushes), Streams(flushes)):
            streams.attach(wire, "peer")
            streams.write(b"one ")
            streams.write(b"write")
        assert not wire.written
        await asyncio.sleep(0)
        assert wire.written == b"one write"

    asyncio.run(check())
    assert "no socket" in caplog.text
