"""Rewrites: read in chunks and in order, without settled messages, and done when the new rows are durable."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from tests.schedule.rigs import HourLogRig
from tests.schedule.world import World

from timeball.model.errors import OutOfRange
from timeball.model.message import Int64Array
from timeball.schedule.backlog import Opened
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.hour_log import HourLog
from timeball.schedule.locations import take_scheduled
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.rewrites import Rewrites

CHUNK_BYTES = 1_000_000


class NoteRecorder(HourLog):
    """A backlog that records the notes with which its rows were rewritten."""

    def encode_rewrite(self, scheduled_rows: pa.RecordBatch, note: Int64Array) -> pa.RecordBatch:
        self.notes = [*getattr(self, "notes", []), *note.tolist()]
        assert len(note) == scheduled_rows.num_rows
        return scheduled_rows


def opened(due_times: list[int], seq: Int64Array) -> Opened:
    """Build messages that must be rewritten, in the rows `seq`. The note of each is ten times its number."""
    return Opened(np.array(due_times), seq, seq, seq * 10, np.ones(len(seq), np.bool_))


class Stage(World):
    """A log with scheduled messages, and `Rewrites` for them."""

    backlog: NoteRecorder

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(HourLogRig(NoteRecorder))
        self.outcomes = Outcomes()
        self.rewrites = Rewrites(
            self.reader, self.reader_thread, self.outcomes, chunk_bytes=chunk_bytes,
            on_change=lambda: None, on_failure=self.failures.append,
        )  # fmt: skip

    def add_to_rewrites(self, due_times: list[int]) -> Int64Array:
        """Append scheduled messages and queue them for a rewrite. Returns their numbers."""
        seqs = np.array(self.admit(due_times), dtype=np.int64)

        async def add() -> None:
            self.rewrites.add(self.backlog, opened(due_times, seqs))

        self.run(add())
        return seqs

    def take(self, limit: int = 100) -> list[int]:  # type: ignore[override]
        """Take the rows of the next rewrite when they are read. Returns the numbers of their messages."""

        async def take() -> pa.RecordBatch | None:
            while self.rewrites.is_loading:
                self.reader_thread.step()
                await asyncio.sleep(0)
            return self.rewrites.take_rows(limit)

        rows = self.run(take())
        if rows is None:
            return []
        seqs = rows["seq"].to_numpy()
        assert rows.equals(take_scheduled(self.reader, seqs))
        return list(seqs.tolist())


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def test_durable_messages_come_back_with_their_old_rows_and_notes(stage: Stage) -> None:
    far_ms = stage.now_ms + 1_000_000
    first, second = stage.add_to_rewrites([far_ms, far_ms + 1]), stage.add_to_rewrites([far_ms + 2])
    assert stage.take() == first.tolist()
    assert stage.take() == second.tolist()
    assert stage.take() == []
    assert (stage.rewrites.first_due_ms(), stage.rewrites.in_flight_rows) == (far_ms, 3)
    batch = stage.rewrites.rewritten(first[:1])
    assert batch.backlog is stage.backlog
    assert (batch.opened.row_seq.tolist(), batch.opened.note.tolist()) == (
        [first[0]],
        [first[0] * 10],
    )
    assert (stage.rewrites.rows, stage.rewrites.first_due_ms()) == (2, far_ms + 1)
    stage.rewrites.rewritten(first[1:])
    stage.rewrites.rewritten(second)
    assert (stage.rewrites.rows, stage.rewrites.first_due_ms()) == (0, FAR_MS)
    assert stage.rewrites.needed_seq() is None


def test_old_row_is_needed_until_the_new_one_is_durable(stage: Stage) -> None:
    seqs = stage.add_to_rewrites([stage.now_ms + 1_000_000] * 2)
    assert stage.rewrites.needed_seq() == seqs[0]
    stage.take(1)
    assert stage.rewrites.needed_seq() == seqs[0]
    stage.rewrites.rewritten(seqs[:1])
    assert stage.rewrites.needed_seq() == seqs[1]


def test_message_settled_before_its_rewrite_is_skipped(stage: Stage) -> None:
    far_ms = stage.now_ms + 1_000_000
    seqs = stage.add_to_rewrites([far_ms] * 4)
    stage.outcomes.cancel(np.array([far_ms]), seqs[1:2])
    assert stage.take(1) == [seqs[0]]
    stage.outcomes.cancel(np.array([far_ms]), seqs[2:3])
    assert stage.take() == [seqs[3]]
    stage.rewrites.rewritten(seqs[:1])
    stage.rewrites.rewritten(seqs[3:])
    assert stage.rewrites.rows == 0


def test_message_settled_during_its_rewrite_delays_no_other(stage: Stage) -> None:
    due_times = [stage.now_ms + ms for ms in (300, 100, 200, 100)]
    seqs = stage.add_to_rewrites(due_times)
    later = stage.add_to_rewrites([stage.now_ms + 250])
    first_due_ms = stage.rewrites.first_due_ms
    assert first_due_ms() == due_times[1]
    stage.outcomes.cancel(np.array([due_times[1]]), seqs[1:2])
    assert first_due_ms() == due_times[3]
    stage.outcomes.cancel(np.array(due_times[2:]), seqs[2:])
    assert first_due_ms() == due_times[0] - 50
    assert stage.take() == [seqs[0]]
    stage.outcomes.cancel(np.array([due_times[0] - 50]), later)
    assert first_due_ms() == due_times[0], "the rewrite in flight counts"
    stage.outcomes.cancel(np.array(due_times[:1]), seqs[:1])
    assert first_due_ms() == FAR_MS


def test_batch_whose_messages_are_all_settled_is_skipped(stage: Stage) -> None:
    far_ms = stage.now_ms + 1_000_000
    stage.reader_thread.is_open = False
    first, second = stage.add_to_rewrites([far_ms]), stage.add_to_rewrites([far_ms] * 2)
    stage.outcomes.cancel(np.full(2, far_ms), second)
    stage.reader_thread.is_open = True
    assert stage.take() == first.tolist()
    assert stage.backlog.notes == (first * 10).tolist(), "settled messages are not read"


def test_memory_is_bounded_by_chunks() -> None:
    stage = Stage(chunk_bytes=2_000)
    try:
        seqs = stage.add_to_rewrites([stage.now_ms + 1_000_000] * 200)
        taken: list[int] = []
        rows_max = 0
        while len(taken) < len(seqs):
            rows_max = max(rows_max, stage.rewrites.rows_in_memory)
            seqs_taken = stage.take()
            assert seqs_taken
            taken += seqs_taken
        assert taken == seqs.tolist()
        assert 0 < rows_max < 100
    finally:
        stage.close()


def test_taking_rows_at_each_loop_iteration_gets_all() -> None:
    """One loop iteration is between the end of a read and its callback. Taking rows in it must start the next read."""
    stage = Stage(chunk_bytes=2_000)
    due_times = [stage.now_ms + 1_000_000] * 200
    seqs = np.array(stage.admit(due_times), dtype=np.int64)

    async def take_all() -> list[int]:
        taken: list[int] = []
        stage.rewrites.add(stage.backlog, opened(due_times, seqs))
        for _ in range(10 * len(seqs)):
            rows = stage.rewrites.take_rows(100)
            taken += [] if rows is None else rows["seq"].to_pylist()
            await asyncio.sleep(0)
        return taken

    assert stage.run(take_all()) == seqs.tolist()
    stage.close()


def test_rows_durable_in_another_order_are_refused(stage: Stage) -> None:
    seqs = stage.add_to_rewrites([stage.now_ms + 1_000_000] * 2)
    stage.take()
    with pytest.raises(AssertionError, match="order"):
        stage.rewrites.rewritten(seqs[1:])


def test_a_rewrite_of_a_row_beyond_the_log_is_reported(stage: Stage) -> None:
    missing_seq = 9_999

    async def add() -> None:
        stage.rewrites.add(stage.backlog, opened([stage.now_ms], np.array([missing_seq])))
        while stage.rewrites.is_loading:
            stage.reader_thread.step()
            await asyncio.sleep(0)

    stage.run(add())
    assert [type(error) for error in stage.failures] == [OutOfRange]
    stage.failures.clear()  # the fixture refuses failures at the end
