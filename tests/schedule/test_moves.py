"""What is written again: read in chunks, in order, without what is settled, and not done before it is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from tests.schedule.rigs import HourLogRig
from tests.schedule.world import World

from timeball.errors import OutOfRange
from timeball.message import Int64Array
from timeball.schedule.moves import Moves
from timeball.schedule.places import take_promises
from timeball.schedule.settling import Settling

CHUNK_BYTES = 1_000_000


class Stage(World):
    """A log with promises in it, and `Moves` for them."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(HourLogRig())
        self.settling = Settling()
        self.dressed: list[int] = []
        self.moves = Moves(
            self.reader, self.reader_thread, self.settling, chunk_bytes=chunk_bytes,
            on_change=lambda: None, on_failure=self.failures.append, dress=self.dress,
        )  # fmt: skip

    def dress(self, rows: pa.RecordBatch, note: Int64Array) -> pa.RecordBatch:
        self.dressed += note.tolist()
        assert len(note) == rows.num_rows
        return rows

    def add(self, dues: list[int]) -> tuple[int, np.ndarray]:
        seqs = np.array(self.admit(dues), dtype=np.int64)

        async def add() -> int:
            return self.moves.add(np.array(dues), seqs, seqs, seqs * 10)

        return self.run(add()), seqs

    def take(self, limit: int = 100) -> list[int]:  # type: ignore[override]
        async def take() -> pa.RecordBatch | None:
            while self.moves.busy and self.moves._loading is not None:
                await self._pump(self.moves._loading)
            return self.moves.take(limit)

        rows = self.run(take())
        if rows is None:
            return []
        seqs = rows["seq"].to_numpy()
        assert rows.equals(take_promises(self.reader, seqs))
        return list(seqs.tolist())


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def test_a_ticket_is_open_until_the_last_is_durable(stage: Stage) -> None:
    far_ms = stage.now_ms + 1_000_000
    one, first = stage.add([far_ms, far_ms + 1])
    two, second = stage.add([far_ms + 2])
    assert stage.take() == first.tolist()
    assert stage.take() == second.tolist()
    assert stage.take() == []
    assert stage.moves.is_open(one) and stage.moves.is_open(two)
    assert stage.moves.first_due_ms == far_ms
    movers, at = stage.moves.moved(first[:1], np.array([900]))
    assert (movers.seq.tolist(), movers.note.tolist(), at.tolist()) == ([first[0]], [first[0] * 10], [900])
    assert stage.moves.is_open(one) and len(stage.moves) == 2
    stage.moves.moved(first[1:], np.array([901]))
    assert not stage.moves.is_open(one) and stage.moves.is_open(two)
    stage.moves.moved(second, np.array([902]))
    assert not stage.moves.is_open(two) and len(stage.moves) == 0
    assert stage.moves.first_due_ms is None


def test_nothing_to_move_is_no_open_ticket(stage: Stage) -> None:
    none = np.empty(0, np.int64)
    assert not stage.moves.is_open(stage.moves.add(none, none, none, none))


def test_what_is_settled_on_the_way_is_left_out(stage: Stage) -> None:
    far_ms = stage.now_ms + 1_000_000
    ticket, seqs = stage.add([far_ms] * 4)
    stage.settling.cancel(np.array([far_ms]), seqs[1:2])
    assert stage.take(1) == [seqs[0]]
    stage.settling.cancel(np.array([far_ms]), seqs[2:3])
    assert stage.take() == [seqs[3]]
    stage.moves.moved(seqs[:1], np.array([900]))
    stage.moves.moved(seqs[3:], np.array([901]))
    assert not stage.moves.is_open(ticket)


def test_what_is_settled_on_the_move_holds_up_nothing(stage: Stage) -> None:
    dues = [stage.now_ms + ms for ms in (300, 100, 200, 100)]
    _, seqs = stage.add(dues)
    _, later = stage.add([stage.now_ms + 250])
    assert stage.moves.first_due_ms == dues[1]
    stage.settling.cancel(np.array([dues[1]]), seqs[1:2])
    assert stage.moves.first_due_ms == dues[3]
    stage.settling.cancel(np.array(dues[2:]), seqs[2:])
    assert stage.moves.first_due_ms == dues[0] - 50
    assert stage.take() == [seqs[0]]
    stage.settling.cancel(np.array([dues[0] - 50]), later)
    assert stage.moves.first_due_ms == dues[0], "in flight"
    stage.settling.cancel(np.array(dues[:1]), seqs[:1])
    assert stage.moves.first_due_ms is None


def test_all_settled_before_they_were_read(stage: Stage) -> None:
    far_ms = stage.now_ms + 1_000_000
    stage.reader_thread.is_open = False
    _, first = stage.add([far_ms])
    ticket, second = stage.add([far_ms] * 2)
    stage.settling.cancel(np.full(2, far_ms), second)
    stage.reader_thread.is_open = True
    assert stage.take() == first.tolist()
    assert not stage.moves.is_open(ticket)
    assert stage.dressed == (first * 10).tolist(), "the settled are not read"


def test_memory_is_bounded_by_chunks() -> None:
    stage = Stage(chunk_bytes=2_000)
    try:
        _, seqs = stage.add([stage.now_ms + 1_000_000] * 200)
        taken: list[int] = []
        most = 0
        while len(taken) < len(seqs):
            most = max(most, stage.moves.rows_in_memory)
            got = stage.take()
            assert got
            taken += got
        assert taken == seqs.tolist()
        assert 0 < most < 100
    finally:
        stage.close()


def test_who_takes_at_every_turn_of_the_loop_gets_all() -> None:
    """Between the end of a read and whoever is told of it there is a turn; what is taken in it must start the next."""
    stage = Stage(chunk_bytes=2_000)
    dues = [stage.now_ms + 1_000_000] * 200
    seqs = np.array(stage.admit(dues), dtype=np.int64)

    async def take_all() -> list[int]:
        taken: list[int] = []
        stage.moves.add(np.array(dues), seqs, seqs, seqs)
        for _ in range(10 * len(seqs)):
            rows = stage.moves.take(100)
            taken += [] if rows is None else rows["seq"].to_pylist()
            await asyncio.sleep(0)
        return taken

    assert stage.run(take_all()) == seqs.tolist()
    stage.close()


def test_another_order_is_refused(stage: Stage) -> None:
    _, seqs = stage.add([stage.now_ms + 1_000_000] * 2)
    stage.take()
    with pytest.raises(AssertionError, match="order"):
        stage.moves.moved(seqs[1:], np.array([900]))


def test_a_row_that_cannot_be_read_is_told(stage: Stage) -> None:
    async def add() -> None:
        stage.moves.add(*(np.array([9_999]) for _ in range(4)))
        while stage.moves.busy:
            stage.reader_thread.step()
            await asyncio.sleep(0)

    stage.run(add())
    assert [type(error) for error in stage.failures] == [OutOfRange]
    stage.failures.clear()
