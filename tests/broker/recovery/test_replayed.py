"""The state after replaying rows on a starting point: settled numbers, the last due time of each, half messages."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.schedule.test_moved import entries_of

from timeball.broker.recovery import Replayed
from timeball.broker.registry.campaigns import AttachState, CampaignFacts
from timeball.log.checkpoint import Checkpoint, Facts
from timeball.model.message import (
    BASE,
    NO_DUE_TIME_MS,
    PROPERTY_END,
    PROPERTY_NAME_END,
    Kind,
    build_rows,
    with_seq,
)
from timeball.schedule.outcomes import Moved
from timeball.table.attachment import Attachment, FileEntry, Reservation, encode

NONE = np.empty(0, np.int64)
NOTHING = Checkpoint(Facts(seq=1), NONE, NONE)


def checkpoint_with(pairs: list[tuple[int, int]], released: int = 0, **facts: Any) -> Checkpoint:
    """A checkpoint at row 100 with these settled pairs (due_ms, number), of which the last `released` are released."""
    due_ms = np.array([due_ms for due_ms, _ in pairs], np.int64)
    seq = np.array([number for _, number in pairs], np.int64)
    return Checkpoint(Facts(**{"seq": 100, "settled_released": released, **facts}), due_ms, seq)


def rows(first_seq: int, *values: dict[str, Any]) -> Any:
    """Build rows, numbered from `first_seq` on, from the columns of each that are not null."""
    names = {name for row in values for name in row}
    columns = {name: [row.get(name) for row in values] for name in names}
    return with_seq(build_rows(len(values), **columns), first_seq)


def release(due_ms: int, number: int) -> dict[str, Any]:
    return {"kind": int(Kind.RELEASE), "due_ms": due_ms, "source_seq": number}


def cancel(due_ms: int, number: int) -> dict[str, Any]:
    return {"kind": int(Kind.CANCEL), "due_ms": due_ms, "source_seq": number}


def moved(due_ms: int, number: int, from_due_ms: int) -> dict[str, Any]:
    return {"kind": int(Kind.MOVED), "due_ms": due_ms, "source_seq": number, "from_due_ms": from_due_ms}


def woken(due_ms: int, number: int, from_due_ms: int) -> dict[str, Any]:
    """A wake-up: a MOVED row that names the due time and the version of the message's base."""
    base = f"{BASE}{PROPERTY_NAME_END}{from_due_ms}:{number}{PROPERTY_END}"
    return moved(due_ms, number, from_due_ms) | {"properties": base}


def scheduled_row(due_ms: int | None) -> dict[str, Any]:
    return {"kind": int(Kind.SCHEDULED), "due_ms": due_ms}


def replayed(start: Checkpoint, *batches: Any, attach_state: AttachState | None = None) -> Replayed:
    """Apply batches of rows to a starting point."""
    result = Replayed(start, attach_state or AttachState())
    for batch in batches:
        result.apply(batch)
    result.fold()
    return result


def settled(result: Replayed) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The pairs (due_ms, version) that were cancelled or moved, and the pairs that were released."""
    columns = result.settled()
    pairs = list(zip(columns.due_ms.tolist(), columns.seq.tolist(), strict=True))
    first_released = len(pairs) - columns.released
    return pairs[:first_released], pairs[first_released:]


def test_a_message_settled_twice_counts_once() -> None:
    start = checkpoint_with([(5, 9), (7, 3), (6, 4)], released=1, waiting_rows=10)
    result = replayed(start, rows(100, release(7, 3), cancel(8, 50)), rows(102, release(20, 51)))
    assert settled(result) == ([(5, 9), (8, 50)], [(7, 3), (6, 4), (20, 51)])
    assert result.waiting_rows == 8, "number 3 was settled before"
    assert len(result) == 5


def test_a_message_that_the_mark_covers_is_not_counted_again_unless_it_was_held() -> None:
    campaign = CampaignFacts(
        state="paused", since_ms=0, planned_ms=0, planned_seq=1, rows=2, ranges=[(20, 2)], held_from_ms=50
    )
    start = checkpoint_with(
        [], settled_before_ms=100, settled_before_seq=90, waiting_rows=10,
        meta={"campaign/c": msgspec.Raw(msgspec.json.encode(campaign))},
    )  # fmt: skip
    # Number 20 is held. The mark covers 30, but not 95 (its number) and 31 (its due time).
    result = replayed(start, rows(100, cancel(60, 20), cancel(60, 30), cancel(60, 95), cancel(200, 31)))
    assert result.waiting_rows == 10 - 3
    # Each has a settled pair, because the mark covers only rows before the starting point.
    cancelled, _ = settled(result)
    assert len(cancelled) == 4


def test_the_cursor_does_not_depend_on_the_batches_of_releases() -> None:
    ends = [release(1_500, 1), release(3_000, 2), cancel(9_000, 3), release(3_999, 4), release(2_999, 5)]
    start = checkpoint_with([], tick=(1_000, 7))
    in_one_batch = replayed(start, rows(100, *ends))
    one_by_one = replayed(start, *(rows(seq, end) for seq, end in enumerate(ends, 100)))
    assert in_one_batch.cursor == one_by_one.cursor
    # Two releases are due in the second from 3,000 on.
    assert (in_one_batch.cursor.tick_ms, in_one_batch.cursor.local_index) == (3_000, 2)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 99), st.integers(0, 99)), max_size=30),
    st.integers(1, 7),
)
def test_replayed_moves_equal_those_of_the_running_schedule(
    moves: list[tuple[int, int, int]], batch_rows: int
) -> None:
    move_rows = [moved(due_ms, number, from_ms) for number, due_ms, from_ms in moves]
    batches = [
        rows(100 + begin, *move_rows[begin : begin + batch_rows])
        for begin in range(0, len(moves), batch_rows)
    ]
    running = Moved()
    running.add((due_ms, number, seq, from_ms) for seq, (number, due_ms, from_ms) in enumerate(moves, 100))
    result = replayed(NOTHING, *batches)
    assert result.moved().tolist() == entries_of(running).tolist()
    restored = Moved()
    restored.restore(result.moved())
    assert entries_of(restored).tolist() == entries_of(running).tolist()


def test_a_move_settles_the_version_before_it_and_keeps_the_number_of_pending_messages() -> None:
    result = replayed(checkpoint_with([], waiting_rows=1), rows(100, moved(50, 9, 20)))
    assert settled(result) == ([(20, 9)], [])
    assert result.waiting_rows == 1
    # A half message had no due time and was not counted, so its first due time adds a pending message.
    result = replayed(checkpoint_with([], waiting_rows=1), rows(100, moved(50, 9, NO_DUE_TIME_MS)))
    assert result.waiting_rows == 2


def test_wake_ups_are_kept_unless_the_mark_covers_them() -> None:
    """After a clock was set back, a wake-up may be written after the mark and be due before it."""
    # version, base_ms, base version, due_ms
    saved = [(80, 3_000, 8, 900), (85, 3_000, 9, 1_100), (95, 3_000, 10, 900)]
    facts = Facts(seq=100, settled_before_ms=1_000, settled_before_seq=90, waiting_rows=4)
    start = Checkpoint(facts, NONE, NONE, woken=np.array(saved, np.int64).T)
    versions, base_ms, base_versions, due_ms = replayed(start, rows(100, woken(900, 7, 3_000))).woken()
    assert versions.tolist() == [85, 95, 100], "the mark covers version 80"
    assert (base_ms.tolist(), base_versions.tolist()) == ([3_000] * 3, [9, 10, 7])
    assert due_ms.tolist() == [1_100, 900, 900]


def test_a_half_message_is_open_until_a_row_ends_it() -> None:
    start = checkpoint_with([], halves=[(3, 1), (4, 0), (5, 2)])  # (number, checks)
    new_halves = [scheduled_row(None)] * 3  # 100, 101 and 102
    ends = [
        {**cancel(0, 4), "due_ms": None},  # a rollback
        moved(90, 3, NO_DUE_TIME_MS),  # a commit with a delay
        {**release(0, 101), "due_ms": None},  # a commit
    ]
    result = replayed(start, rows(100, *new_halves), rows(103, *ends))
    assert result.halves.tolist() == [5, 100, 102]


def entry(name: str) -> FileEntry:
    """The entry of a file with two rows."""
    return FileEntry(
        path=name, bucket="b", rows=2, size_bytes=1, min_due_ms=0, max_due_ms=1, min_seq=1, max_seq=2
    )


def table_row(change: Attachment | Reservation) -> dict[str, Any]:
    """The TABLE row of an attach or a reservation."""
    return {"kind": int(Kind.TABLE), "body": encode(change), "store_ms": 5}


def test_table_rows_change_the_attach_state_and_the_live_files() -> None:
    attach_state = AttachState()
    start = checkpoint_with(
        [], files=[msgspec.to_builtins(entry("old"))], watermark=40, waiting_rows=3, late=[(1, 2)]
    )
    bulk = Attachment(job="bulk", job_id="b", epoch=0, files=[entry("new")], ranges=[(101, 2)])
    rewrite = Attachment(job="rewrite", job_id="r", epoch=0, files=[entry("whole")], removes=["old", "new"])
    compact = Attachment(job="compact", job_id="c", epoch=0, files=[entry("tail")], from_seq=40, to_seq=90)
    result = replayed(
        start, rows(100, table_row(Reservation(rows=2))), rows(103, table_row(bulk)),
        rows(104, table_row(rewrite), table_row(compact)), attach_state=attach_state,
    )  # fmt: skip
    assert list(result.files) == ["whole", "tail"]
    assert [seq for seq, _ in result.attaches] == [103, 104, 105]
    assert (attach_state.watermark, attach_state.attach_seq, attach_state.reserved) == (90, 105, {})
    assert result.waiting_rows == 3 + 2, "only a bulk attach brings new messages"
    assert result.settled().late == ((1, 2), (101, 2))
