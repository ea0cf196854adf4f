"""Periodic duties: they save enough and no more, remove unneeded data, and report their failures."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.scenarios import FAR_MS
from tests.crash.world import GROUP, HOUR_MS, SECOND_MS, World

from timeball.broker import maintenance
from timeball.broker.registry.rates import GROUPS_AT_ONCE
from timeball.log import checkpoint, queue_index
from timeball.log import format as fmt
from timeball.model import limits
from timeball.model.config import MIB
from timeball.model.errors import Corrupt, DiskFailed, OverLimit
from timeball.model.key_hash import KeyRun
from timeball.model.limits import DAY_MS, MINUTE_MS
from timeball.table.layout import FOLDER, KEYS_FOLDER
from timeball.table.merging import FILES_MIN


async def start_after_cut(world: World) -> World:
    """Start a second node on the state that a power cut would leave. The first node keeps running."""
    after_cut = World(
        world.files.crash(survival="nothing"), world.clock, retention_ms=world.settings.retention_ms
    )
    await after_cut.start()
    return after_cut


def fill_the_disk(world: World) -> None:
    """Let every later operation that takes disk space fail."""
    world.files.fail_at(world.files.calls + 1, OverLimit("disk full"), forever=True)


# ---- saving -------------------------------------------------------------------------------------------------


@on_node()
async def test_a_checkpoint_is_written_only_after_a_change(world: World) -> None:
    await world.checkpoint()
    calls = world.files.calls
    await world.checkpoint()
    assert world.files.calls == calls
    await world.send("a", [None, FAR_MS])
    await world.checkpoint()
    facts = checkpoint.load(world.files)
    assert facts is not None
    # Rows 1 to 3: the META row of the topic, and two messages.
    assert (facts.facts.seq, facts.facts.queues) == (4, {"a": {0: (0, 1)}})


@on_node()
async def test_a_snapshot_is_written_when_the_log_has_grown_enough(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SNAPSHOT_BYTES", 100_000)
    snapshot_seqs = []
    for _ in range(6):
        await world.send("a", [None, FAR_MS], 30_000)
        await world.checkpoint()
        last = checkpoint.last_snapshot(world.broker.log.reader.segments)
        snapshot_seqs.append(0 if last is None else last.facts.seq)
    assert snapshot_seqs[0] == 0 and len(set(snapshot_seqs)) == 4, (
        "every 100,000 bytes, and not at every checkpoint"
    )
    await world.restart()
    await world.checkpoint()
    last = checkpoint.last_snapshot(world.broker.log.reader.segments)
    assert last is not None and last.facts.seq == snapshot_seqs[-1], "a start finds the last snapshot"


@on_node()
async def test_a_snapshot_that_fits_no_frame_does_not_prevent_the_checkpoint(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint, "SNAPSHOT_BYTES", 0)
    await world.send("a", [FAR_MS])
    monkeypatch.setattr(limits, "FRAME_BYTES_MAX", 2 * fmt.ALIGN + 100)
    with caplog.at_level(logging.WARNING, "timeball.broker.maintenance"):
        await world.checkpoint()
    assert "no snapshot written" in caplog.text
    assert checkpoint.last_snapshot(world.broker.log.reader.segments) is None
    saved = checkpoint.load(world.files)
    assert saved is not None and saved.facts.seq == world.broker.log.reader.next_seq


@on_node()
async def test_log_from_seq_never_decreases(world: World) -> None:
    """Another replica may have removed rows before the last snapshot, and refuses a replica that asks for more."""
    await world.send("a", [None] * 9)
    for log_from_seq, expected in ((6, 6), (1, 1)):
        await maintenance.Maintenance(world.broker, 1, log_from_seq).snapshot()
        last = checkpoint.last_snapshot(world.broker.log.reader.segments)
        assert last is not None and last.facts.log_from_seq == expected


@on_node()
async def test_offsets_are_saved_only_after_a_change(world: World) -> None:
    await world.send("a", [None])
    await world.consume()
    await world.save_offsets()
    calls = world.files.calls
    await world.save_offsets()
    assert world.files.calls == calls
    after_cut = await start_after_cut(world)
    assert after_cut.broker.offsets(GROUP, "a")[0] == 1
    await after_cut.stop()


@on_node()
async def test_a_stop_saves_offsets_and_a_checkpoint(world: World) -> None:
    await world.send("a", [None, FAR_MS])
    await world.consume()
    await world.stop()
    saved = checkpoint.load(world.files)
    # Rows 1 to 4: the META row of the topic, two messages, and the META row of the offset.
    assert saved is not None and saved.facts.seq == 5
    after_cut = await start_after_cut(world)
    assert after_cut.broker.offsets(GROUP, "a")[0] == 1
    await after_cut.stop()
    await world.start()


@on_node()
async def test_a_stop_succeeds_with_a_full_disk(world: World) -> None:
    await world.send("a", [None, FAR_MS])
    await world.consume()
    fill_the_disk(world)
    world.broker.log.writer.next_segment.disk_full_error = OverLimit("full")
    await world.stop()
    world.files.heal()
    await world.start()
    assert world.broker.offsets(GROUP, "a")[0] == 1, "offsets are written to the current segment"


@on_node()
async def test_a_full_disk_refuses_only_the_checkpoint(world: World) -> None:
    """State is written to the current segment, which has reserved space for it."""
    await world.send("a", [None] * 4)
    await world.consume()
    fill_the_disk(world)
    await world.broker.create_topic("made", 3)
    await world.save_offsets()
    with pytest.raises(OverLimit):
        await world.checkpoint()
    world.files.heal()
    await world.checkpoint()
    after_cut = await start_after_cut(world)
    assert after_cut.broker.topics()["made"] == {"queues": 3}
    assert after_cut.broker.offsets(GROUP, "a") == world.broker.offsets(GROUP, "a") != {}
    assert [row.place for row in (await after_cut.outcome()).rows] == [
        row.place for row in (await world.outcome()).rows
    ]
    await after_cut.stop()


# ---- duties -------------------------------------------------------------------------------------------------


async def count_repetitions(world: World, *errors: BaseException) -> int:
    """Run a duty that raises these errors, every millisecond, until it has worked twice. Return its number of calls."""
    calls, done = 0, asyncio.Event()

    async def duty() -> None:
        nonlocal calls
        calls += 1
        if calls <= len(errors):
            raise errors[calls - 1]
        if calls == len(errors) + 2:
            done.set()

    assert world.node is not None
    task = asyncio.create_task(world.node.maintenance._repeat(1, duty))
    finished = asyncio.create_task(done.wait())
    await asyncio.wait([task, finished], return_when=asyncio.FIRST_COMPLETED)
    for each_task in (task, finished):
        each_task.cancel()
    await asyncio.gather(task, finished, return_exceptions=True)
    return calls


@on_node()
async def test_a_duty_refused_by_a_full_disk_is_tried_again(world: World) -> None:
    assert await count_repetitions(world, OverLimit("full"), OverLimit("full")) == 4
    assert world.failure is None


@pytest.mark.parametrize("error", [DiskFailed("gone"), ValueError("a bug")])
@on_node(failing=True)
async def test_a_duty_with_an_unexpected_error_stops_the_broker(world: World, error: Exception) -> None:
    assert await count_repetitions(world, error) == 1
    assert world.failure is error


# ---- compaction by the broker -------------------------------------------------------------------------------

EAGER = {"compact_rows": 200, "compact_interval_ms": 60_000}  # after the interval 2 rows are enough


async def rows_after_compaction_check(world: World) -> int:
    """Run the duty that compacts if it is worth it. Returns the number of rows in the table."""
    assert world.node is not None
    await world.node.maintenance.compact_if_worth()
    return int(world.broker.status()["schedule"]["table_rows"])


@on_node(**EAGER)
async def test_the_tail_is_compacted_when_it_is_long_or_after_an_interval(world: World) -> None:
    await world.send("a", [HOUR_MS] * 199)
    assert await rows_after_compaction_check(world) == 0
    await world.send("a", [HOUR_MS])
    assert await rows_after_compaction_check(world) == 200
    await world.send("a", [HOUR_MS])
    world.clock.advance(60_000)
    assert await rows_after_compaction_check(world) == 200, "a single row is not worth a file"
    await world.send("a", [HOUR_MS])
    assert await rows_after_compaction_check(world) == 202
    await world.send("a", [HOUR_MS] * 199)
    assert await rows_after_compaction_check(world) == 202, "the interval begins anew"


@on_node(**EAGER)
async def test_the_broker_does_not_compact_while_another_compactor_has_a_lease(world: World) -> None:
    await world.send("a", [HOUR_MS] * 200)
    world.broker.compactor_lease(10_000)
    assert await rows_after_compaction_check(world) == 0
    world.clock.advance(10_000)
    assert await rows_after_compaction_check(world) == 200


@on_node(compact_rows=0, compact_interval_ms=1)
async def test_with_compact_rows_0_the_broker_neither_compacts_nor_merges(world: World) -> None:
    for epoch in range(FILES_MIN):
        await world.bulk("a", [HOUR_MS], epoch + 1)
    files = world.broker.status()["schedule"]["table_files"]
    await world.send("a", [HOUR_MS] * 200)
    world.clock.advance(60_000)
    assert await rows_after_compaction_check(world) == FILES_MIN
    assert world.broker.status()["schedule"]["table_files"] == files
    await world.merge()
    assert world.broker.status()["schedule"]["table_files"] < files, "there was something to merge"


@on_node()
async def test_a_compactor_lease_ends_within_an_hour(world: World) -> None:
    world.broker.compactor_lease(1 << 60)
    assert world.broker.mover.external_compactor_until_ms == world.clock.wall + HOUR_MS


# ---- retention ----------------------------------------------------------------------------------------------


async def fill_segments(world: World, rows: int = 24) -> None:
    """Send large messages. A segment holds about ten of them."""
    for _ in range(rows // 6):
        await world.send("filler", [None] * 6, 100_000)
    world.clock.advance(1_000)


@on_node(retention_ms=HOUR_MS)
async def test_segments_are_removed_only_after_the_retention(world: World) -> None:
    await fill_segments(world)
    await world.checkpoint()
    await world.apply_retention()
    assert world.broker.log.reader.first_seq == 1
    world.clock.advance(HOUR_MS)
    await world.apply_retention()
    first_seq = world.broker.log.reader.first_seq
    assert first_seq == 26, "the newest segment is removed too, because it is old"
    for low, high in world.broker.queues("filler").values():
        assert 0 < low <= high == 12
    remaining_seqs = [row.seq for row in (await world.outcome()).rows]
    assert sorted(remaining_seqs) == list(range(first_seq, 26))


@on_node(retention_ms=2 * MINUTE_MS, segment_bytes=4 * MIB)
async def test_a_log_smaller_than_a_segment_is_removed_by_age(world: World) -> None:
    """Fifty minutes of little traffic, which a single segment would keep for months."""
    row_counts = []
    for minute in range(50):
        await world.send("a", [None, 30_000, DAY_MS, MINUTE_MS])
        await world.send_levels("levels", [1, 4])
        await world.advance(MINUTE_MS)
        await world.consume()
        await world.checkpoint()
        await world.apply_retention()
        reader = world.broker.log.reader
        row_counts.append(reader.next_seq - reader.first_seq)
        if minute % 20 == 10:
            await world.restart()
    # The rows of 1.5 times the retention and of the minute until the next pass, some 20 rows a minute. The timing of
    # threads changes the count by a few rows (measured: 30 to 34).
    assert max(row_counts[10:]) <= max(row_counts[:10]) + 5 < 150, row_counts
    segments = world.broker.log.reader.segments.all
    assert len(segments) <= 5 and world.clock.wall - segments[0].newest_append_ms <= 3 * MINUTE_MS
    await world.advance(DAY_MS)
    await world.consume()
    assert world.observed.early == []
    assert sorted(row.key for row in world.observed.seen.values()) == sorted(world.observed.sent)


@on_node(retention_ms=HOUR_MS)
async def test_an_unused_log_is_removed_by_age(world: World) -> None:
    await world.send("a", [None] * 10)
    await world.checkpoint()
    world.clock.advance(HOUR_MS)
    for _ in range(3):
        await world.apply_retention()
        world.clock.advance(HOUR_MS)
    rows = world.broker.log.reader.next_seq
    assert (await world.outcome()).rows == [] and world.broker.log.reader.first_seq > 10
    # From now on retention appends no further snapshot.
    for _ in range(3):
        await world.apply_retention()
        world.clock.advance(HOUR_MS)
    assert world.broker.log.reader.next_seq == rows


@pytest.mark.parametrize("is_used", [True, False])
@on_node(retention_ms=HOUR_MS)
async def test_a_clock_that_was_ahead_for_two_seconds_does_not_stop_retention(
    world: World, is_used: bool
) -> None:
    """The broker never uses the wrong time, but the frames of these two seconds contain it, also after a restart."""
    ahead_ms = 3_650 * DAY_MS
    world.clock.step_wall(ahead_ms)
    await world.send("a", [None])
    world.clock.advance(2_000)
    world.clock.step_wall(-ahead_ms)
    assert world.broker.clock.now_ms() == world.clock.wall
    segment, wrong_seq = world.broker.log.reader.segments.last, world.broker.log.reader.next_seq - 1
    assert segment.first_append_ms == segment.newest_append_ms > world.clock.wall + DAY_MS
    for hour in range(4):
        if is_used:
            await fill_segments(world)
        if hour == 1:
            await world.restart()
        await world.checkpoint()
        await world.apply_retention()
        world.clock.advance(HOUR_MS)
    assert world.broker.log.reader.first_seq > wrong_seq


@pytest.mark.parametrize("seals", [True, False])
@on_node(retention_ms=HOUR_MS)
async def test_retention_hides_offsets_in_shares_and_before_their_rows_go(
    world: World, monkeypatch: pytest.MonkeyPatch, seals: bool
) -> None:
    """Each turn of the event loop hides offsets of a share of the queues. No consumer is offered a removed row."""
    queue_count = 3 * GROUPS_AT_ONCE
    await world.create_topic("a", queue_count)
    await world.send("a", [None] * queue_count)
    if seals:
        for module in (maintenance, queue_index):
            monkeypatch.setattr(module, "SEAL_ENTRIES", 1)
        assert world.node is not None
        await world.node.maintenance.seal_queues()
    await fill_segments(world)
    await world.checkpoint()
    world.clock.advance(HOUR_MS)
    queues = [queue.index for queue in world.broker.tables.topics.find_topic("a").queues]
    hidden_counts = [0]

    async def watch() -> None:
        while hidden_counts[-1] < queue_count:
            first_seq = world.broker.log.reader.first_seq
            shown = [index for index in queues if index.min_offset < index.max_offset]
            seqs = [index.read_numbers(index.min_offset, 1)[0][0] for index in shown]
            assert all(seq >= first_seq for seq in seqs)
            hidden_counts.append(queue_count - len(shown))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await world.apply_retention()
    await watching
    assert max(np.diff(hidden_counts)) <= GROUPS_AT_ONCE
    assert world.broker.log.reader.first_seq > queue_count


@on_node(retention_ms=1)
async def test_a_pending_message_in_a_short_tail_does_not_keep_old_segments(world: World) -> None:
    """The tail is too short for a compaction, but is compacted because it prevents the removal of segments."""
    key = (await world.send("a", [DAY_MS]))[0]
    await fill_segments(world)
    await world.apply_retention()
    assert world.broker.log.reader.first_seq > 1
    after_cut = await start_after_cut(world)
    await after_cut.advance(DAY_MS)
    assert [row.key for row in (await after_cut.outcome()).rows if row.place.topic == "a"] == [key]
    await after_cut.stop()


@on_node()
async def test_data_files_with_only_settled_messages_are_removed_from_the_table(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "BEHIND_FILES_MIN", 2)
        for minutes in (1, 2, 300):
            await world.send("a", [minutes * 60 * SECOND_MS] * 3)
            await world.compact()
        await world.advance(60 * SECOND_MS)
        await world.apply_retention()
        assert world.broker.status()["schedule"]["table_files"] == 3
        await world.advance(2 * 60 * SECOND_MS)
        await world.apply_retention()
    status: dict[str, Any] = world.broker.status()["schedule"]
    assert (status["table_files"], status["table_rows"]) == (1, 3)
    await world.broker.send(batch(1))


# ---- keys of data files -----------------------------------------------------------------------------------------


def indexed_files(world: World) -> set[str]:
    """List the data files whose keys are in a run of keys."""
    runs = [
        KeyRun(world.files.map_readonly(f"{KEYS_FOLDER}/{name}"))
        for name in world.files.list_dir(KEYS_FOLDER)
    ]
    return {path for run in runs for path in run.names}


@on_node()
async def test_a_compaction_indexes_the_keys_of_its_files(world: World) -> None:
    ids = await world.send("orders", [2 * HOUR_MS, 900 * HOUR_MS])
    await world.compact()
    live = {entry.path for entry in world.broker.scheduling.hour_log.pending.live.entries}
    assert len(live) == 2 and indexed_files(world) == live
    await world.cancel(ids[:1])


@on_node()
async def test_the_keys_of_new_data_files_are_indexed_before_the_first_cancel(world: World) -> None:
    """As after an attach of files by a writer that wrote no keys."""
    assert world.node is not None
    ids = await world.send("orders", [2 * HOUR_MS, 900 * HOUR_MS])
    await world.compact()
    for name in world.files.list_dir(KEYS_FOLDER):
        world.files.remove(f"{KEYS_FOLDER}/{name}")
    await world.node.maintenance.index_keys()
    assert indexed_files(world) == {
        entry.path for entry in world.broker.scheduling.hour_log.pending.live.entries
    }
    await world.cancel(ids[:1])


@on_node()
async def test_a_damaged_data_file_does_not_prevent_the_index_of_the_others(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert world.node is not None
    ids = await world.send("orders", [2 * HOUR_MS, 900 * HOUR_MS])
    await world.compact()
    for name in world.files.list_dir(KEYS_FOLDER):
        world.files.remove(f"{KEYS_FOLDER}/{name}")
    first, second = world.broker.scheduling.hour_log.pending.live.entries
    world.files.replace(f"{FOLDER}/{first.path}", b"PAR1 is not all there is to it")
    logging.disable(logging.NOTSET)
    await world.node.maintenance.index_keys()
    assert indexed_files(world) == {second.path}
    with pytest.raises(Corrupt, match=first.path):
        await world.broker.cancel(ids=ids)
    assert caplog.text.count("keys not indexed") == 1, "logged once, and not at every look-up"


@on_node(retention_ms=HOUR_MS)
async def test_files_removed_from_the_table_are_deleted_with_the_log_retention(world: World) -> None:
    assert world.node is not None
    for _ in range(FILES_MIN):
        await world.send("a", [FAR_MS])
        await world.broker.mover.compact()
    folder = f"{FOLDER}/{world.broker.scheduling.hour_log.pending.all()[0].entry.path.rpartition('/')[0]}"
    assert await world.broker.mover.rewrite() is not None
    assert len(world.files.list_dir(folder)) == FILES_MIN + 1, (
        "readers of the previous version can still read its files"
    )
    world.clock.advance(HOUR_MS - SECOND_MS)
    await world.node.maintenance.apply_retention()
    assert len(world.files.list_dir(folder)) == FILES_MIN + 1
    world.clock.advance(2 * SECOND_MS)
    await world.node.maintenance.apply_retention()
    assert len(world.files.list_dir(folder)) == 1


# ---- bursts -------------------------------------------------------------------------------------------------


@on_node()
async def test_log_space_is_prepared_only_for_loaded_messages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "BURST_BYTES_MIN", 200_000)
    assert world.node is not None
    duties, segments = world.node.maintenance, world.broker.log.reader.segments
    warm = world.broker.log.writer.next_segment._warm
    await world.send("a", [FAR_MS] * 10, 30_000)
    await duties.prepare_log_space()
    assert not warm and not duties._is_burst, (
        "the messages are not loaded yet, because they are due in a long time"
    )
    await world.send("a", [2 * SECOND_MS] * 8, 30_000)
    await duties.prepare_log_space()
    warm = world.broker.log.writer.next_segment._warm
    assert warm[segments.last.name] >= segments.last.end + 8 * 30_000 and duties._is_burst
    await world.advance(3 * SECOND_MS)
    await world.settled()
    await duties.prepare_log_space()
    assert not duties._is_burst, "all loaded messages were released"
