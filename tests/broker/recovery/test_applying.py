"""Recovery in steps: any steps give the result of one step, snapshots replace earlier rows, and a follower leads."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.broker.on_node import InTurn, on_node
from tests.crash.folder import VARIANTS, Kept, lived, look
from tests.crash.lives import live
from tests.crash.world import HOUR_MS, SECOND_MS, World
from tests.crash_files import CrashFiles
from tests.schedule.test_moved import entries_of

from timeball.broker import recovery as module
from timeball.broker.recovery import Applying, Recovered, Replayed, TailScheduled, apply_log, starting_point
from timeball.broker.registry.campaigns import AttachState
from timeball.broker.registry.tables import Tables
from timeball.log import checkpoint
from timeball.log.checkpoint import Checkpoint, Facts
from timeball.log.reader import LogReader
from timeball.log.recovery import OpenedLog, open_log
from timeball.model.config import MIB
from timeball.node.node import Node
from timeball.schedule.outcomes import Moved
from timeball.table.catalog import Catalog

# Bytes of log between two snapshots, so small that these short runs have some.
SMALL_BYTES, SMALLEST_BYTES = 150_000, 2_000
# Scenarios of tests/crash/lives.py. A life is a run of one of them, or of a variant of tests/crash/folder.py.
LIVES = ["plain", "compact", "bulk", "roll", "levels", "campaign", "wheel", "cascade", "moves"]
# The lives whose log still has its first row.
WHOLE = ["hour_log", "timer_wheel", "level_cascade", "plain", "compact", "bulk", "campaign", "moves"]


def opened_log(files: CrashFiles) -> OpenedLog:
    """Open the log on this disk, as a start does."""
    return open_log(files, segment_bytes=MIB, now_ms=0)


def results_of(recovered: Recovered | Any) -> dict[str, Any]:
    """Convert the result of `finish` to lists, for comparison."""
    settled, waiting = recovered.settled, recovered.waiting
    return {
        "settled": (settled.due_ms.tolist(), settled.seq.tolist(), settled.released),
        "mark": (settled.before_ms, settled.before_seq, settled.late),
        "waiting": [waiting.due_ms.tolist(), waiting.seq.tolist(), waiting.row_seq.tolist()],
        "redeliveries": recovered.redeliveries.facts(),
        "woken": [column.tolist() for column in recovered.woken],
        "moved": recovered.moved.tolist(),
        **{
            name: getattr(recovered, name)
            for name in Recovered.__slots__
            if name not in ("settled", "waiting", "redeliveries", "woken", "moved", "bring_up")
        },
    }


def contents_of(tables: Tables, attach_state: AttachState) -> dict[str, Any]:
    """Convert the caches to lists, for comparison."""
    topics = tables.topics.all()
    return {
        "meta": {key: bytes(value) for key, value in tables.meta.copied()().items()},
        "queues": {
            (topic.name, number): (
                queue.index.min_offset,
                queue.next_offset,
                queue.index.read(queue.index.min_offset, 1 << 30).tolist(),
            )
            for topic in topics
            for number, queue in enumerate(topic.queues)
        },
        "campaigns": tables.campaigns.all(),
        "groups": tables.groups.all(),
        "attach_state": attach_state,
    }


def applied(
    files: CrashFiles, steps: list[float], *, from_checkpoint: bool, resumes: bool, tail_after: int | None
) -> dict[str, Any]:
    """Apply the log of these files in steps, given as shares of the log, and finish. Returns the whole state.

    The tail is read after step `tail_after`. None: only by `finish`.
    """
    opened = opened_log(files)
    saved = checkpoint.load(files) if from_checkpoint else None
    reader, tables = LogReader(opened.segments), Tables(files, 2)
    applying = Applying(starting_point(saved, opened.segments), reader, tables, resumes=resumes)
    first, last = applying.applied_seq, reader.next_seq
    for step, share in enumerate(sorted(steps)):
        if step == tail_after:
            applying.read_tail()
        applying.apply(first + int(share * (last - first)))
    applying.apply(last)
    recovered = applying.finish(Catalog(files), 0)
    recovered.bring_up()
    return {**results_of(recovered), **contents_of(tables, applying.ledger)}


@dataclass(frozen=True)
class Life:
    """A disk after a run with several snapshots, checkpoints and segments."""

    files: CrashFiles

    def copy(self) -> CrashFiles:
        return self.files.crash(survival="everything")


@functools.cache
def life_of(name: str) -> Life:
    """Run a life with many snapshots, once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SNAPSHOT_BYTES", SMALL_BYTES if name in VARIANTS else SMALLEST_BYTES)
        return Life(lived(name).files if name in VARIANTS else live(name).files)


@pytest.fixture(params=[*VARIANTS, *LIVES])
def life(request: pytest.FixtureRequest) -> Life:
    return life_of(request.param)


@pytest.fixture(autouse=True)
def fold_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLD_ROWS", 5)


# The fixture only reads, and the disk is copied for each example.
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_sizes_of_the_steps_do_not_change_the_state(life: Life, data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.floats(0, 1), max_size=40), label="steps")
    start = {
        "from_checkpoint": data.draw(st.booleans(), label="from_checkpoint"),
        "resumes": data.draw(st.booleans(), label="resumes"),
    }
    tail_after = None if start["resumes"] else data.draw(st.none() | st.integers(0, 3), label="tail_after")
    expected = applied(life.copy(), [], tail_after=None, **start)
    assert applied(life.copy(), steps, tail_after=tail_after, **start) == expected


@pytest.mark.parametrize("life", WHOLE, indirect=True)
def test_rows_from_the_first_one_on_give_the_same_state_as_snapshots(life: Life) -> None:
    """`replayed` reads no snapshot. `recovered` begins at the last one."""
    files = life.copy()
    opened = opened_log(files)
    reader = LogReader(opened.segments)
    attach_state, tail = AttachState(), TailScheduled(1)
    replayed = Replayed(Checkpoint(Facts(seq=1), np.empty(0, np.int64), np.empty(0, np.int64)), attach_state)
    for rows in reader.coalesced(1, reader.next_seq, None, 100):
        replayed.apply(rows)
        tail.add(rows)
    replayed.fold()
    applying = apply_log(starting_point(None, opened.segments), reader, Tables(files, 2))
    recovered = applying.finish(Catalog(files), 0)
    recovered.bring_up()
    waiting = tail.waiting(replayed.settled(), attach_state.watermark)
    columns = [column.tolist() for column in (waiting.due_ms, waiting.seq, waiting.row_seq)]
    assert columns == results_of(recovered)["waiting"]
    assert replayed.waiting_rows == recovered.waiting_rows
    assert replayed.cursor == recovered.cursor
    assert replayed.redeliveries.facts() == recovered.redeliveries.facts()
    assert replayed.halves.tolist() == [half.seq for half in recovered.halves]
    assert sorted(replayed.files) == sorted(entry.path for entry in recovered.files)
    assert attach_state.watermark == applying.ledger.watermark
    assert attach_state.attach_seq == applying.ledger.attach_seq
    assert tail.count(reader, attach_state.watermark) == recovered.scheduled_since_watermark
    # A snapshot has no moves whose due times have all passed.
    moved = Moved()
    moved.restore(replayed.moved())
    moved.forget_before(recovered.settled.before_ms)
    assert entries_of(moved).tolist() == recovered.moved.tolist()


def test_these_lives_have_snapshots_amid_rows() -> None:
    """The control of the two tests above: without snapshots between other rows, both would pass too easily."""
    has_snapshot = {}
    for name in WHOLE:
        opened = opened_log(life_of(name).copy())
        first, reader = starting_point(None, opened.segments).facts.seq, LogReader(opened.segments)
        has_snapshot[name] = 1 < first < reader.next_seq - 2
    assert sum(has_snapshot.values()) >= 4, has_snapshot


# ---- a follower ------------------------------------------------------------------------------------------------


def follower_of(world: World) -> Applying:
    """Separate caches over the log of a running broker."""
    segments = world.broker.log.reader.segments
    tables = Tables(CrashFiles(), 2)
    return Applying(starting_point(None, segments), LogReader(segments), tables)


ROUNDS, EACH, ROUNDS_PER_SNAPSHOT = 12, 200, 3  # EACH: the messages of a round


async def rounds(world: World, *, snapshots: bool) -> tuple[Applying, int]:
    """Send, reschedule and release messages. Returns a follower, and the largest number of entries that it has kept."""
    follower, most_rows = follower_of(world), 0
    for number in range(1, ROUNDS + 1):
        keys = await world.send("a", [SECOND_MS] * EACH)
        await world.reschedule(keys[:10], SECOND_MS + 100)
        await world.advance(2 * SECOND_MS)
        if snapshots and number % ROUNDS_PER_SNAPSHOT == 0:
            await world.node.maintenance.snapshot()  # type: ignore[union-attr]
        follower.apply(follower.reader.next_seq)
        most_rows = max(most_rows, follower.kept_rows)
    return follower, most_rows


@on_node(InTurn)
async def test_a_follower_keeps_only_pairs_settled_since_the_last_snapshot(world: World) -> None:
    follower, most_rows = await rounds(world, snapshots=True)
    # A settled pair of each message, and a second pair and a move of each of the 10 that were rescheduled.
    assert most_rows <= ROUNDS_PER_SNAPSHOT * (EACH + 2 * 10)
    assert follower.kept_rows <= 10, "the last snapshot covers all settled messages"
    assert follower.snapshot_seq > ROUNDS * EACH


@on_node(InTurn)
async def test_without_snapshots_a_follower_keeps_pairs_but_no_scheduled_messages(world: World) -> None:
    """The control of the test above."""
    follower, _ = await rounds(world, snapshots=False)
    assert ROUNDS * EACH <= follower.kept_rows <= ROUNDS * (EACH + 2 * 10)


@on_node(retention_ms=1)
async def test_a_follower_learns_the_first_needed_row_from_the_last_snapshot(world: World) -> None:
    follower = follower_of(world)
    assert follower.log_from_seq == 1
    for _ in range(4):
        await world.send("a", [None, SECOND_MS, HOUR_MS, None, None], 100_000)
        await world.advance(2 * SECOND_MS)
        follower.apply(follower.reader.next_seq)
    await world.consume()
    await world.compact()
    await world.checkpoint()
    await world.apply_retention()
    first_seq = world.broker.log.reader.first_seq
    assert follower.log_from_seq == 1 < first_seq, "the row of the snapshot is not applied yet"
    follower.apply(follower.reader.next_seq)
    assert follower.log_from_seq == first_seq
    first_offsets = {queue.index.min_offset for queue in follower.tables.topics.get("a").queues}
    assert first_offsets == {low for low, _ in world.broker.queues("a").values()}
    assert first_offsets != {0}
    recovered = follower.finish(Catalog(world.files.crash(survival="everything")), 0)
    assert recovered.waiting_rows == 4
    assert recovered.log_from_seq == first_seq


@on_node()
async def test_a_snapshot_that_is_not_committed_is_no_starting_point(world: World) -> None:
    await world.send("a", [HOUR_MS] * 3)
    await world.node.maintenance.snapshot()  # type: ignore[union-attr]
    await world.send("a", [HOUR_MS] * 2)
    await world.node.maintenance.snapshot()  # type: ignore[union-attr]
    reader = world.broker.log.reader
    newest = starting_point(None, reader.segments)
    # The row of the second snapshot is the last row of the log, and not committed.
    first = starting_point(None, reader.segments, reader.next_seq - 1)
    assert 1 < first.facts.seq < newest.facts.seq
    assert starting_point(None, reader.segments, first.facts.seq).facts.seq == 1
    # From the first snapshot a follower can still apply all rows.
    follower = Applying(first, reader, Tables(CrashFiles(), 2))
    follower.apply(first.facts.seq + 2)
    with pytest.raises(AssertionError, match="would be forgotten"):
        follower.finish(Catalog(CrashFiles()), 0)
    follower.apply(reader.next_seq)
    assert follower.finish(Catalog(CrashFiles()), 0).waiting_rows == 5


@on_node(InTurn)
async def test_rows_appended_while_a_snapshot_was_written_are_applied_after_it(world: World) -> None:
    follower = follower_of(world)
    keys = await world.send("a", [HOUR_MS] * 6)
    reader = world.broker.log.reader
    before = asyncio.gather(world.cancel(keys[:2]), world.reschedule(keys[2:3], 2 * HOUR_MS))
    while world.broker.log.writer.next_seq == reader.next_seq:
        await asyncio.sleep(0)
    # The cancel and the reschedule were decided before the snapshot, and their rows come after it. These sends and this
    # cancel come while it is being written.
    await asyncio.gather(
        world.node.maintenance.snapshot(),  # type: ignore[union-attr]
        world.send("a", [HOUR_MS] * 3),
        world.cancel(keys[3:4]),
    )
    await before
    await world.send("a", [HOUR_MS])
    snapshot = starting_point(None, reader.segments)
    for seq in range(1, reader.next_seq + 1):
        follower.apply(seq)
    assert snapshot.facts.seq + 4 <= follower.snapshot_seq
    recovered, scheduling = follower.finish(Catalog(CrashFiles()), 0), world.broker.scheduling
    assert recovered.waiting_rows == len(recovered.waiting) == 7
    assert scheduling.outcomes.waiting_rows == 7
    assert recovered.moved.tolist() == entries_of(scheduling.outcomes.moved).tolist()
    assert sorted(recovered.settled.seq.tolist()) == sorted(scheduling.scheduler.settled().seq.tolist())


class TakeoverWorld(World):
    """A node that starts with caches which have applied the log in steps, as those of a follower."""

    async def build(self, node: Node) -> None:
        opened = opened_log(self.files)
        reader = LogReader(opened.segments)
        applying = Applying(starting_point(None, opened.segments), reader, Tables(self.files, 2))
        for seq in range(applying.applied_seq, reader.next_seq + 3, 3):
            applying.apply(seq)
        applying.read_tail()
        await node.start(listen=False, hot=(opened, applying))


class TakeoverFolder(Kept):
    """A data folder on which a follower becomes the leader, where `Kept` starts a broker."""

    def world(self, files: CrashFiles) -> World:
        world = super().world(files)
        world.__class__ = TakeoverWorld  # the same object, with another way to start its node
        return world


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_takeover_shows_the_same_as_a_restart(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SNAPSHOT_BYTES", SMALL_BYTES)
    restarted = lived(variant)
    taken_over = TakeoverFolder(
        restarted.files, restarted.clock, restarted.observed, restarted.settings, restarted.keys,
        restarted.halves,
    )  # fmt: skip
    # `look` starts the node, and lists everything that its users can see.
    assert look(taken_over, restarted.copy()) == look(restarted, restarted.copy())
