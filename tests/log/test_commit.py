"""Which entries of a commit share a frame: neighbours do, reservations and flagged rows do not."""

import asyncio
from concurrent.futures import Future

import pyarrow as pa

from timeball.log.row_encoder import build_by_pyarrow
from timeball.log.writer import Entry, frames_of
from timeball.model.message import LOG_SCHEMA, SMALL_ROWS, Kind, meta_rows


def frames(*entries: tuple[int, int, int]) -> list[tuple[int, int, int, int]]:
    """Group entries of one row, each (first_seq, span, flags). Returns (first_seq, span, flags, rows) of the frames."""

    async def work() -> list[tuple[int, int, int, int]]:
        loop, rows = asyncio.get_running_loop(), meta_rows([("key", b"value")], now_ms=0)
        appended = [
            Entry(rows, first_seq, span, rows.nbytes, loop.create_future(), None, flags)
            for first_seq, span, flags in entries
        ]
        return [
            (group.first_seq, group.span, group.flags, group.rows.num_rows) for group in frames_of(appended)
        ]

    return asyncio.run(work())


def test_neighbouring_entries_share_a_frame() -> None:
    assert frames((1, 1, 0), (2, 1, 0), (3, 1, 0)) == [(1, 3, 0, 3)]


def test_reservations_and_flagged_rows_get_a_frame_of_their_own() -> None:
    alone = frames((1, 1, 0), (2, 10, 0), (12, 1, 0), (13, 1, 1), (14, 1, 0))
    assert alone == [(1, 1, 0, 1), (2, 10, 0, 1), (12, 1, 0, 1), (13, 1, 1, 1), (14, 1, 0, 1)]


def test_rows_encoded_ahead_get_a_frame_of_their_own() -> None:
    async def work() -> None:
        loop, rows = asyncio.get_running_loop(), meta_rows([("key", b"value")], now_ms=0)
        ahead: Future[bytes | pa.Buffer] = Future()
        appended = [Entry(rows, seq, 1, rows.nbytes, loop.create_future(), None) for seq in range(1, 5)]
        appended[1].payload = ahead
        groups = [(group.first_seq, group.span, group.payload) for group in frames_of(appended)]
        assert groups == [(1, 1, None), (2, 1, ahead), (3, 2, None)]

    asyncio.run(work())


def test_many_encoded_rows_get_a_frame_of_their_own_and_few_share_one() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        value = tuple({"kind": int(Kind.MESSAGE), "topic": "t"}.get(name) for name in LOG_SCHEMA.names)
        counts, appended, seq = (SMALL_ROWS, 1, 2, SMALL_ROWS, SMALL_ROWS), [], 1
        for count in counts:
            rows = build_by_pyarrow([value] * count)
            appended.append(Entry(rows, seq, count, len(rows.message), loop.create_future(), None))
            seq += count
        groups = frames_of(appended)
        assert [group.rows.num_rows for group in groups] == [SMALL_ROWS, 3, SMALL_ROWS, SMALL_ROWS]
        assert groups[0].rows is appended[0].rows, "it is not encoded once more"
        assert [group.first_seq for group in groups] == [
            1,
            SMALL_ROWS + 1,
            SMALL_ROWS + 4,
            2 * SMALL_ROWS + 4,
        ]

    asyncio.run(work())
