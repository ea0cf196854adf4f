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


def starting_point(pairs: list[tuple[int, int]], released: int = 0, **facts: Any) -> Checkpoint:
    due_ms, seq = (np.array([pair[at] for pair in pairs], np.int64) for at in (0, 1))
    return Checkpoint(Facts(**{"seq": 100, "settled_released": released, **facts}), due_ms, seq)


def rows(first_seq: int, *each: dict[str, Any]) -> Any:
    names = {name for row in each for name in row}
    columns = {name: [row.get(name) for row in each] for name in names}
    return with_seq(build_rows(len(each), **columns), first_seq)


def release(due_ms: int, number: int) -> dict[str, Any]:
    return {"kind": int(Kind.RELEASE), "due_ms": due_ms, "source_seq": number}


def cancel(due_ms: int, number: int) -> dict[str, Any]:
    return {"kind": int(Kind.CANCEL), "due_ms": due_ms, "source_seq": number}


def moved(due_ms: int, number: int, from_due_ms: int) -> dict[str, Any]:
    return {"kind": int(Kind.MOVED), "due_ms": due_ms, "source_seq": number, "from_due_ms": from_due_ms}


def woken(due_ms: int, number: int, from_due_ms: int) -> dict[str, Any]:
    base = f"{BASE}{PROPERTY_NAME_END}{from_due_ms}:{number}{PROPERTY_END}"
    return moved(due_ms, number, from_due_ms) | {"properties": base}


def scheduled_row(due_ms: int | None) -> dict[str, Any]:
    return {"kind": int(Kind.SCHEDULED), "due_ms": due_ms}


def replayed(start: Checkpoint, *batches: Any, ledger: AttachState | None = None) -> Replayed:
    found = Replayed(start, ledger or AttachState())
    for batch in batches:
        found.apply(batch)
    found.fold()
    return found


def settled_pairs(found: Replayed) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs that were cancelled or moved, and those that were released."""
    all_of = found.settled()
    pairs = list(zip(all_of.due_ms.tolist(), all_of.seq.tolist(), strict=True))
    cut = len(pairs) - all_of.released
    return pairs[:cut], pairs[cut:]


def test_a_message_settled_twice_counts_once() -> None:
    start = starting_point([(5, 9), (7, 3), (6, 4)], released=1, waiting_rows=10)
    found = replayed(start, rows(100, release(7, 3), cancel(8, 50)), rows(102, release(20, 51)))
    assert settled_pairs(found) == ([(5, 9), (8, 50)], [(7, 3), (6, 4), (20, 51)])
    assert found.waiting_rows == 8, "number 3 was settled before"
    assert len(found) == 5


def test_covered_messages_count_once_unless_they_were_held() -> None:
    campaign = CampaignFacts(
        state="paused", since_ms=0, planned_ms=0, planned_seq=1, rows=2, ranges=[(20, 2)], held_from_ms=50
    )
    start = starting_point(
        [], settled_before_ms=100, settled_before_seq=90, waiting_rows=10,
        meta={"campaign/c": msgspec.Raw(msgspec.json.encode(campaign))},
    )  # fmt: skip
    found = replayed(start, rows(100, cancel(60, 20), cancel(60, 30), cancel(60, 95), cancel(200, 31)))
    assert found.waiting_rows == 7
    # All are settled by name all the same: the mark speaks of what it knew.
    assert len(settled_pairs(found)[0]) == 4


def test_the_release_cursor_is_the_same_for_any_batches_of_releases() -> None:
    each = [release(1_500, 1), release(3_000, 2), cancel(9_000, 3), release(3_999, 4), release(2_999, 5)]
    whole = replayed(starting_point([], tick=(1_000, 7)), rows(100, *each))
    single = replayed(
        starting_point([], tick=(1_000, 7)), *(rows(100 + at, one) for at, one in enumerate(each))
    )
    assert whole.cursor == single.cursor
    assert (whole.cursor.tick_ms, whole.cursor.local_index) == (3_000, 2)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 99), st.integers(0, 99)), max_size=30),
    st.integers(1, 7),
)
def test_replayed_moves_equal_those_of_the_schedule(
    moves: list[tuple[int, int, int]], batch_rows: int
) -> None:
    each = [moved(due_ms, number, from_ms) for number, due_ms, from_ms in moves]
    batches = [
        rows(100 + at, *each[at : at + batch_rows]) for at in range(0, len(each), batch_rows)
    ]  # fmt: skip
    expected = Moved()
    expected.add((due_ms, number, 100 + at, from_ms) for at, (number, due_ms, from_ms) in enumerate(moves))
    found = replayed(NOTHING, *batches)
    assert found.moved().tolist() == entries_of(expected).tolist()
    again = Moved()
    again.restore(found.moved())
    assert entries_of(again).tolist() == entries_of(expected).tolist()


def test_a_move_settles_the_previous_version_and_keeps_the_number_of_pending_messages() -> None:
    found = replayed(starting_point([], waiting_rows=1), rows(100, moved(50, 9, 20)))
    assert settled_pairs(found) == ([(20, 9)], [])
    assert found.waiting_rows == 1
    # A half message had no instant: with it one more waits.
    found = replayed(starting_point([], waiting_rows=1), rows(100, moved(50, 9, NO_DUE_TIME_MS)))
    assert found.waiting_rows == 2


def test_wake_ups_are_kept_while_the_mark_may_wait_for_them() -> None:
    """A clock that was set back: the mark stays, and a wake-up that is written after it may be due before it."""
    before = np.array([[80, 3_000, 8, 900], [85, 3_000, 9, 1_100], [95, 3_000, 10, 900]], np.int64).T
    facts = Facts(seq=100, settled_before_ms=1_000, settled_before_seq=90, waiting_rows=4)
    start = Checkpoint(facts, NONE, NONE, woken=before)
    found = replayed(start, rows(100, woken(900, 7, 3_000)))
    versions, base_ms, base, due_ms = found.woken()
    assert versions.tolist() == [85, 95, 100], "the mark covers version 80"
    assert (base_ms.tolist(), base.tolist()) == ([3_000] * 3, [9, 10, 7])
    assert due_ms.tolist() == [1_100, 900, 900]


def test_half_messages_are_open_until_a_row_names_them() -> None:
    start = starting_point([], halves=[(3, 1), (4, 0), (5, 2)])
    ends = [
        {**cancel(0, 4), "due_ms": None},
        moved(90, 3, NO_DUE_TIME_MS),
        {**release(0, 101), "due_ms": None},
    ]
    found = replayed(
        start, rows(100, scheduled_row(None), scheduled_row(None), scheduled_row(None)), rows(103, *ends)
    )
    assert found.halves.tolist() == [5, 100, 102]


def entry(name: str) -> FileEntry:
    return FileEntry(
        path=name, bucket="b", rows=2, size_bytes=1, min_due_ms=0, max_due_ms=1, min_seq=1, max_seq=2
    )


def table_row(change: Attachment | Reservation) -> dict[str, Any]:
    return {"kind": int(Kind.TABLE), "body": encode(change), "store_ms": 5}


def test_table_rows_change_the_attach_state_and_the_live_files() -> None:
    ledger = AttachState()
    start = starting_point(
        [], files=[msgspec.to_builtins(entry("old"))], watermark=40, waiting_rows=3, late=[(1, 2)]
    )
    bulk = Attachment(job="bulk", job_id="b", epoch=0, files=[entry("new")], ranges=[(101, 2)])
    rewrite = Attachment(job="rewrite", job_id="r", epoch=0, files=[entry("whole")], removes=["old", "new"])
    compact = Attachment(job="compact", job_id="c", epoch=0, files=[entry("tail")], from_seq=40, to_seq=90)
    found = replayed(
        start, rows(100, table_row(Reservation(rows=2))), rows(103, table_row(bulk)),
        rows(104, table_row(rewrite), table_row(compact)), ledger=ledger,
    )  # fmt: skip
    assert list(found.files) == ["whole", "tail"]
    assert [seq for seq, _ in found.attaches] == [103, 104, 105]
    assert (ledger.watermark, ledger.attach_seq, ledger.reserved) == (90, 105, {})
    assert found.waiting_rows == 5, "only a bulk attach brings scheduled messages"
    assert found.settled().late == ((1, 2), (101, 2))
