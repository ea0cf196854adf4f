"""Near messages are loaded ahead, in bounded memory, and handed out in order, in whatever order they arrive.

The strategies run the whole contract over this module. These tests cover its own edges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st
from tests.schedule.rigs import HourLogRig
from tests.schedule.world import World

from timeball.broker.accepting.delivery import moved_rows
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.loaded import Loaded, Source
from timeball.schedule.locations import take_scheduled
from timeball.schedule.outcomes import Outcomes

AHEAD_MS = 10_000


class Stage(World):
    """A log with scheduled messages, and a `Loaded` that receives them."""

    def __init__(self, gather_bytes: int = 1 << 30) -> None:
        super().__init__(HourLogRig())
        self.outcomes, self.source = Outcomes(), Source(self.backlog.read_bodies)
        self.changes = 0
        self.near = Loaded(
            self.reader_thread, self.outcomes, [self.source],
            ahead_ms=AHEAD_MS, gather_bytes=gather_bytes, on_change=self.changed, on_failure=self.failures.append,
        )  # fmt: skip

    def changed(self) -> None:
        self.changes += 1

    def append_scheduled(self, due_times: list[int]) -> np.ndarray:
        """Append scheduled messages to the log, and return their numbers. They are not loaded."""
        return np.array(self.admit(due_times), dtype=np.int64)

    def admit_near(self, due_times: list[int]) -> list[int]:
        """Append scheduled messages and add them with their bodies. Returns their numbers."""
        seqs = self.append_scheduled(due_times)
        self.near.add(self.source, take_scheduled(self.reader, seqs), self.now_ms)
        return seqs.tolist()

    def add_without_bodies(self, due_times: list[int]) -> list[int]:
        """Append scheduled messages and add them without bodies. Returns their numbers."""
        seqs = self.append_scheduled(due_times)
        self.near.add_without_bodies(self.source, np.array(due_times), seqs, seqs)
        return seqs.tolist()

    def all_due(self, below_ms: int = FAR_MS, limit: int = 1_000) -> list[tuple[int, int]]:
        """Hand out all due messages and let gathers finish. Returns their (due_ms, seq)."""
        return self.run(self._all_due(below_ms, limit))

    async def _all_due(self, below_ms: int, limit: int) -> list[tuple[int, int]]:
        pairs: list[tuple[int, int]] = []
        while True:
            rows = self.near.take_due(self.now_ms, limit, below_ms)
            if rows is not None:
                assert rows.num_rows <= limit
                pairs += list(zip(rows["due_ms"].to_pylist(), rows["seq"].to_pylist(), strict=True))
            elif self.near.is_gathering:
                await self._let_load()
            else:
                return pairs

    async def take_one(self) -> pa.RecordBatch | None:
        return self.near.take_due(self.now_ms, 1, FAR_MS)

    async def _let_load(self) -> None:
        while self.near.is_gathering:
            self.reader_thread.step()
            await asyncio.sleep(0)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def test_message_without_a_body_delays_later_ones(stage: Stage) -> None:
    now = stage.now_ms
    (early,) = stage.add_without_bodies([now + 5])
    (late,) = stage.admit_near([now + 6])
    stage.advance(10)
    stage.reader_thread.is_open = False

    async def first() -> None:
        assert stage.near.take_due(stage.now_ms, 10, FAR_MS) is None

    stage.run(first())
    assert stage.near.is_gathering and stage.near.next_ms(stage.now_ms, FAR_MS) == FAR_MS, (
        "the scheduler is woken at the end of a gather"
    )
    stage.reader_thread.is_open = True
    assert stage.all_due() == [(now + 5, early), (now + 6, late)]


def test_no_message_is_handed_out_while_a_running_gather_delays_the_next_one(stage: Stage) -> None:
    now = stage.now_ms
    stage.add_without_bodies([now + 20])
    stage.reader_thread.is_open = False

    async def take() -> pa.RecordBatch | None:
        return stage.near.take_due(stage.now_ms, 10, FAR_MS)

    assert stage.run(take()) is None and stage.near.is_gathering
    # Due before all messages of the gather, but its body has to wait for the end of the gather.
    (early,) = stage.add_without_bodies([now + 5])
    (late,) = stage.admit_near([now + 6])
    stage.advance(10)
    assert stage.run(take()) is None
    assert stage.near.next_ms(stage.now_ms, FAR_MS) == FAR_MS, "otherwise the ticker would loop without work"
    stage.reader_thread.is_open = True
    assert stage.all_due() == [(now + 5, early), (now + 6, late)]


def test_message_due_after_an_unopened_one_is_not_handed_out(stage: Stage) -> None:
    now = stage.now_ms
    one, two = stage.admit_near([now + 5, now + 6])
    stage.advance(10)
    assert stage.all_due(below_ms=now + 6) == [(now + 5, one)]
    assert stage.near.next_ms(stage.now_ms, now + 6) == FAR_MS, "otherwise the ticker would loop without work"
    assert stage.all_due(below_ms=now + 7) == [(now + 6, two)]


def test_next_ms_is_before_the_due_time_so_that_bodies_are_loaded(stage: Stage) -> None:
    due_ms = stage.now_ms + 60_000
    stage.add_without_bodies([due_ms])
    assert stage.near.next_ms(stage.now_ms, FAR_MS) == due_ms - AHEAD_MS // 2
    stage.advance(60_000 - AHEAD_MS // 2)
    assert stage.all_due() == []
    assert stage.near.wheel_rows == 1
    assert stage.near.next_ms(stage.now_ms, FAR_MS) == due_ms


def test_memory_is_bounded_and_every_message_is_handed_out() -> None:
    stage = Stage(gather_bytes=1)
    try:
        now = stage.now_ms
        seqs = stage.add_without_bodies([now + 100 + number for number in range(20)])
        stage.admit_near([now + 90])
        wheel_rows_max = 0
        pairs: list[tuple[int, int]] = []
        for _ in range(130):
            stage.advance(1)
            pairs += stage.all_due()
            wheel_rows_max = max(wheel_rows_max, stage.near.wheel_rows)
        assert wheel_rows_max <= 2
        assert [seq for _, seq in pairs[1:]] == seqs
    finally:
        stage.close()


def test_bodies_of_one_due_time_are_handed_out_while_later_ones_are_read(stage: Stage) -> None:
    """The position of the first unread message is a due time and a number, not only a due time."""
    due_ms = stage.now_ms + 5
    loaded = stage.add_without_bodies([due_ms] * 7)
    assert stage.all_due() == []
    assert stage.near.wheel_rows == 7
    unread, last = stage.add_without_bodies([due_ms] * 2), stage.admit_near([due_ms])
    stage.reader_thread.is_open = False
    stage.advance(5)

    async def while_reading() -> None:
        rows = stage.near.take_due(stage.now_ms, 10, FAR_MS)
        assert stage.near.is_gathering
        assert rows is not None and rows["seq"].to_pylist() == loaded
        assert stage.near.next_ms(stage.now_ms, FAR_MS) == FAR_MS, (
            "otherwise the ticker would loop without work"
        )
        assert stage.near.take_due(stage.now_ms, 10, FAR_MS) is None

    stage.run(while_reading())
    assert stage.all_due() == [(due_ms, seq) for seq in unread + last]


def test_memory_is_bounded_for_messages_of_one_due_time() -> None:
    """Bodies that can be handed out make room before more are read."""
    stage = Stage(gather_bytes=4_096)
    try:
        seqs = stage.add_without_bodies([stage.now_ms + 5] * 100)
        stage.all_due()
        wheel_rows_max = stage.near.wheel_rows
        assert wheel_rows_max < 50
        stage.advance(5)
        pairs: list[tuple[int, int]] = []
        while len(pairs) < len(seqs):
            rows = stage.run(stage.take_one())
            if rows is None:
                stage.run(stage._let_load())
            else:
                pairs += list(zip(rows["due_ms"].to_pylist(), rows["seq"].to_pylist(), strict=True))
            assert stage.near.wheel_rows <= wheel_rows_max
        assert [seq for _, seq in pairs] == seqs
    finally:
        stage.close()


def test_rewritten_message_is_loaded_from_its_new_row(stage: Stage) -> None:
    due_ms = stage.now_ms + 5
    seqs = stage.append_scheduled([due_ms] * 2)
    new_row_seq = stage.writer.next_seq
    rows = moved_rows(take_scheduled(stage.reader, seqs[:1]), now_ms=stage.now_ms)

    async def move() -> None:
        await stage.writer.append(rows)[1]

    stage.run(move())
    stage.near.add_without_bodies(stage.source, np.full(2, due_ms), seqs, np.array([new_row_seq, seqs[1]]))
    stage.advance(5)
    assert stage.all_due() == [(due_ms, seq) for seq in seqs.tolist()]


def test_unreadable_body_is_reported_as_a_failure(stage: Stage) -> None:
    stage.near.add_without_bodies(
        stage.source, np.array([stage.now_ms]), np.array([9_999]), np.array([9_999])
    )
    stage.all_due()
    assert len(stage.failures) == 1
    stage.failures.clear()


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["admit", "add without bodies", "cancel", "advance", "take"]),
            st.lists(st.integers(-50, 30_000), min_size=1, max_size=8),
        ),
        max_size=25,
    ),
    gather_bytes=st.sampled_from([1, 4_096, 1 << 30]),
)
def test_every_message_is_handed_out_once_and_in_order(
    steps: list[tuple[str, list[int]]], gather_bytes: int
) -> None:
    stage = Stage(gather_bytes)
    try:
        waiting: dict[int, int] = {}
        for step, values in steps:
            due_times = [max(0, stage.now_ms + value) for value in values]
            if step == "advance":
                stage.advance(abs(values[0]))
            elif step == "take":
                taken = stage.all_due(limit=3)
                expected = sorted((due, seq) for seq, due in waiting.items() if due <= stage.now_ms)
                assert taken == expected
                for _, seq in taken:
                    del waiting[seq]
            elif step == "cancel" and waiting:
                seq = sorted(waiting)[values[0] % len(waiting)]
                assert stage.outcomes.cancel(np.array([waiting.pop(seq)]), np.array([seq])).all()
            elif step in ("admit", "add without bodies"):
                seqs = stage.admit_near(due_times) if step == "admit" else stage.add_without_bodies(due_times)
                waiting |= dict(zip(seqs, due_times, strict=True))
        first = stage.near.first_due_ms()
        assert not waiting or first <= min(waiting.values())
    finally:
        stage.close()


def test_needed_seq_is_the_current_row_of_a_message(stage: Stage) -> None:
    """A rewritten message does not need its first row."""
    far_ms = stage.now_ms + 60_000
    seqs = stage.append_scheduled([far_ms] * 3)
    stage.near.add_without_bodies(stage.source, np.full(2, far_ms), seqs[1:], np.array([90, seqs[2]]))
    assert stage.near.needed_seq() == seqs[2]
    stage.near.add_without_bodies(stage.source, np.full(1, far_ms), seqs[:1], np.array([80]))
    assert stage.near.needed_seq() == seqs[2]
