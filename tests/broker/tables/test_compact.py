"""Compaction by the broker moves all messages that may be pending, once, with all their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import batch, column, on_node
from tests.crash.scenarios import FAR_MS
from tests.crash.world import HOUR_MS, SECOND_MS, World
from tests.crash_files import CrashFiles
from tests.table.small_table import NOW_MS, table_rows

from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.tables import compact
from timeball.model.message import TABLE_SCHEMA
from timeball.schedule.outcomes import Settled
from timeball.table import layout
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile
from timeball.table.layout import FOLDER

# ---- the messages that are moved ----------------------------------------------------------------------------


def in_table(world: World) -> list[dict[str, Any]]:
    """All rows in the data files of the table, sorted by number."""
    files = world.broker.scheduling.hour_log.pending.all()
    parts = [file.rows_between((-1, 0), (1 << 62, 0)) for file in files]
    assert all(part.schema == TABLE_SCHEMA for part in parts)
    return sorted((row for part in parts for row in part.to_pylist()), key=lambda row: row["seq"])


@on_node()
async def test_pending_messages_are_moved_with_all_columns(world: World) -> None:
    columns = {
        "tag": ["t"], "keys": ["k l"], "unique_key": ["id"], "properties": ["a\1b\2"], "born_ms": [7],
        "born_host": ["far"], "flag": [1], "sys_flag": [2], "reconsume_times": [3], "queue_id": [1],
        "due_ms": [world.clock.wall + HOUR_MS],
    }  # fmt: skip
    await world.broker.send(batch(1, **columns))
    attached = await world.broker.compact()
    assert (attached.watermark, attached.version) == (3, 1)
    values = {name: value for name, [value] in columns.items()}
    added = {"seq": 2, "topic": "orders", "body": b"body", "accepted_ms": world.clock.wall, "number": None}
    assert in_table(world) == [{**values, **added}]
    await world.advance(HOUR_MS)
    release_row = (await world.broker.read_queue("orders", 1, 0, 1)).to_pylist()[0]
    assert {name: release_row[name] for name in values} == values
    assert (release_row["accepted_ms"], release_row["source_seq"]) == (added["accepted_ms"], 2)


@on_node()
async def test_released_and_visible_messages_are_not_moved(world: World) -> None:
    await world.send("a", [None, SECOND_MS, FAR_MS, None, 2 * FAR_MS])
    await world.advance(SECOND_MS)
    await world.compact()
    assert [row["seq"] for row in in_table(world)] == [4, 6]
    assert world.broker.status()["schedule"]["tail_rows"] == 0


@on_node()
async def test_each_compaction_begins_where_the_previous_one_ended(world: World) -> None:
    for _ in range(3):
        await world.send("a", [FAR_MS, None])
        await world.compact()
    assert [row["seq"] for row in in_table(world)] == [2, 5, 8]  # 1 is the topic, 4 and 7 are the TABLE rows


@on_node()
async def test_a_long_tail_is_moved_in_runs(world: World) -> None:
    await world.send("a", [FAR_MS] * 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact, "RUN_ROWS_MAX", 4)
        attached = await world.broker.compact()
    assert world.broker.mover.compactions.runs["broker"] == 3, "a run has four sequence numbers"
    assert attached.watermark == world.broker.status()["watermark"] >= 12
    assert [row["seq"] for row in in_table(world)] == list(range(2, 12))
    assert world.broker.status()["schedule"]["tail_rows"] == 0


@on_node()
async def test_rows_after_a_run_without_scheduled_messages_are_moved_too(world: World) -> None:
    await world.send("a", [None] * 9)
    await world.send("a", [FAR_MS] * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact, "RUN_ROWS_MAX", 4)
        await world.broker.compact()
    assert len(in_table(world)) == 2
    assert world.broker.status()["schedule"]["tail_rows"] == 0


def test_each_bucket_with_rows_gets_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "FILE_ROWS", 2)
    files = CrashFiles()
    assert compact.write_files(files, table_rows([]), NOW_MS) == []
    rows = table_rows([NOW_MS + 2 * HOUR_MS, NOW_MS, NOW_MS + 1])  # not sorted
    near, far = compact.write_files(files, rows, NOW_MS)
    assert (near.rows, far.rows) == (2, 1)
    assert column(DataFile(files, near).rows_between((0, 0), (1 << 62, 0)), "seq") == [2, 3]
    assert files.exists(f"{FOLDER}/{far.path}")


@on_node(compact_rows=10)
async def test_cancelled_redeliveries_are_neither_compacted_nor_examined_again(world: World) -> None:
    await world.send("a", [HOUR_MS] * 8)
    keys = await world.send("now", [None] * 12)

    async def nack_and_cancel(group: str) -> None:
        received = await world.broker.consuming.receive(ReceiveRequest(group, "now"), 0)
        for receipt in received.receipts:
            assert await world.broker.consuming.nack(receipt, HOUR_MS)
        verdicts = await world.broker.cancel(ids=keys, topic=f"%RETRY%{group}_now")
        assert [verdict.verdict for verdict in verdicts] == ["cancelled"] * 12

    await nack_and_cancel("g")
    await world.node.maintenance.compact_if_worth()  # type: ignore[union-attr]
    assert world.broker.status()["schedule"]["table_rows"] == 8
    assert world.broker.mover.tail_count.rows == 0
    watermark = world.broker.status()["watermark"]
    await nack_and_cancel("h")
    await world.node.maintenance.compact_if_worth()  # type: ignore[union-attr]
    assert world.broker.status()["watermark"] > watermark, "it moves also without messages to move"
    assert world.broker.mover.tail_count.rows == 0


@on_node(compact_rows=10)
async def test_leases_and_acknowledgements_add_no_rows_to_compact(world: World) -> None:
    await world.send("now", [None] * 12)
    consuming = world.broker.consuming
    received = await consuming.receive(ReceiveRequest("g", "now", invisible_ms=HOUR_MS), 0)
    assert len(received.receipts) == 12
    await consuming.saver.save_and_wait()
    assert (world.broker.mover.tail_count.rows, world.broker.pending_messages) == (0, 0)
    assert await consuming.acknowledge(received.receipts) == [True] * 12
    await consuming.saver.save_and_wait()
    assert (world.broker.mover.tail_count.rows, world.broker.pending_messages) == (0, 0)


# ---- the settled messages of a resume -----------------------------------------------------------------------

SEQS = st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=4)


def settled_pairs(seqs: list[list[int]]) -> Settled:
    """Settled messages with these versions, in several runs."""
    return Settled(0, tuple((np.zeros(len(part), np.int64), np.array(part, np.int64)) for part in seqs))


def entry(min_seq: int, max_seq: int) -> FileEntry:
    """The entry of a file with numbers from `min_seq` to `max_seq`."""
    return FileEntry(
        path="f", bucket="b", rows=1, size_bytes=1, min_due_ms=0, max_due_ms=1, min_seq=min_seq, max_seq=max_seq
    )  # fmt: skip


@given(SEQS, SEQS, st.sets(st.integers(0, 13)), st.lists(st.tuples(*[st.integers(0, 40)] * 2), max_size=3))
def test_settled_messages_are_found_in_the_files_and_ranges_of_a_resume(
    before: list[list[int]], later: list[list[int]], range_numbers: set[int], spans: list[tuple[int, int]]
) -> None:
    entries, ranges = [entry(*sorted(span)) for span in spans], [(3 * number, 2) for number in range_numbers]
    known = compact.settled_in(settled_pairs(before), entries)
    low, high = (
        min((entry.min_seq for entry in entries), default=1),
        max((entry.max_seq for entry in entries), default=0),
    )
    assert known.tolist() == sorted(seq for part in before for seq in part if low <= seq <= high)
    all_seqs, new_seqs = compact.settled_since(known, settled_pairs(before + later), ranges)
    in_ranges = [
        seq for part in before + later for seq in part if any(first <= seq < first + 2 for first, _ in ranges)
    ]
    assert new_seqs.tolist() == sorted(seq for seq in in_ranges if seq not in known)
    assert all_seqs.tolist() == sorted([*known.tolist(), *new_seqs.tolist()])
