"""Which entries of a commit share a frame: neighbours do, reservations and flagged rows do not."""

import asyncio
from concurrent.futures import Future
from typing import NamedTuple

from timeball.log.row_encoder import Payload, build_by_pyarrow
from timeball.log.writer import Entry, group_entries
from timeball.model.message import LOG_SCHEMA, SMALL_ROWS, Kind, meta_rows


class OneRow(NamedTuple):
    """An entry of one row."""

    first_seq: int
    span: int = 1
    flags: int = 0


class Frame(NamedTuple):
    """A frame of `rows` rows."""

    first_seq: int
    rows: int = 1
    span: int = 1
    flags: int = 0


def frames(*entries: OneRow) -> list[Frame]:
    """Group these entries of one commit. Returns its frames."""

    async def work() -> list[Frame]:
        loop, rows = asyncio.get_running_loop(), meta_rows([("key", b"value")], now_ms=0)
        appended = [
            Entry(rows, entry.first_seq, entry.span, rows.nbytes, loop.create_future(), None, entry.flags)
            for entry in entries
        ]
        return [
            Frame(frame.first_seq, frame.rows.num_rows, frame.span, frame.flags)
            for frame in group_entries(appended)
        ]

    return asyncio.run(work())


def test_neighbouring_entries_share_a_frame() -> None:
    assert frames(OneRow(1), OneRow(2), OneRow(3)) == [Frame(1, rows=3, span=3)]


def test_a_reservation_gets_a_frame_of_its_own() -> None:
    assert frames(OneRow(1), OneRow(2, span=10), OneRow(12)) == [Frame(1), Frame(2, span=10), Frame(12)]


def test_flagged_rows_get_a_frame_of_their_own() -> None:
    assert frames(OneRow(1), OneRow(2, flags=1), OneRow(3)) == [Frame(1), Frame(2, flags=1), Frame(3)]


def test_rows_encoded_ahead_get_a_frame_of_their_own() -> None:
    async def work() -> None:
        loop, rows = asyncio.get_running_loop(), meta_rows([("key", b"value")], now_ms=0)
        payload: Future[Payload] = Future()
        appended = [Entry(rows, seq, 1, rows.nbytes, loop.create_future(), None) for seq in range(1, 5)]
        appended[1].payload = payload
        frames = group_entries(appended)
        assert [(frame.first_seq, frame.span) for frame in frames] == [(1, 1), (2, 1), (3, 2)]
        assert [frame.payload for frame in frames] == [None, payload, None]

    asyncio.run(work())


def test_many_encoded_rows_get_a_frame_of_their_own_and_few_share_one() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        value = tuple({"kind": int(Kind.MESSAGE), "topic": "t"}.get(name) for name in LOG_SCHEMA.names)
        many = SMALL_ROWS
        appended, next_seq = [], 1
        for count in (many, 1, 2, many, many):
            rows = build_by_pyarrow([value] * count)
            appended.append(Entry(rows, next_seq, count, len(rows.message), loop.create_future(), None))
            next_seq += count
        frames = group_entries(appended)
        assert [frame.rows.num_rows for frame in frames] == [many, 3, many, many]
        assert [frame.first_seq for frame in frames] == [1, many + 1, many + 4, 2 * many + 4]
        assert frames[0].rows is appended[0].rows, "the rows are not encoded again"

    asyncio.run(work())
