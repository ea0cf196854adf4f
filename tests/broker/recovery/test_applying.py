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
from timeball.log.recovery import Opened, open_log
from timeball.model.config import MIB
from timeball.node.node import Node
from timeball.schedule.outcomes import Moved
from timeball.table.catalog import Catalog

# Bytes of log between two snapshots, so that these short runs have some.
SMALL_BYTES, SMALLEST_BYTES = 150_000, 2_000
WHOLE = ["hour_log", "timer_wheel", "level_cascade", "plain", "compact", "bulk", "campaign", "moves"]
LIVES = ["plain", "compact", "bulk", "roll", "levels", "campaign", "wheel", "cascade", "moves"]


def opened_log(files: CrashFiles) -> Opened:
    return open_log(files, segment_bytes=MIB, now_ms=0)


def lists(found: Recovered | Any) -> dict[str, Any]:
    """The results of `finish`, for comparison."""
    settled, waiting = found.settled, found.waiting
    return {
        "settled": (settled.due_ms.tolist(), settled.seq.tolist(), settled.released),
        "mark": (settled.before_ms, settled.before_seq, settled.late),
        "waiting": [waiting.due_ms.tolist(), waiting.seq.tolist(), waiting.row_seq.tolist()],
        "redeliveries": found.redeliveries.facts(),
        "woken": [column.tolist() for column in found.woken],
        "moved": found.moved.tolist(),
        **{
            name: getattr(found, name)
            for name in Recovered.__slots__
            if name not in ("settled", "waiting", "redeliveries", "woken", "moved", "bring_up")
        },
    }


def caches(tables: Tables, ledger: AttachState) -> dict[str, Any]:
    """The contents of the tables."""
    topics = tables.topics.all()
    return {
        "meta": {key: bytes(value) for key, value in tables.meta.copied()().items()},
        "queues": {
            (topic.name, at): (
                queue.index.min_offset,
                queue.next_offset,
                queue.index.read(queue.index.min_offset, 1 << 30).tolist(),
            )
            for topic in topics
            for at, queue in enumerate(topic.queues)
        },
        "campaigns": tables.campaigns.all(),
        "groups": tables.groups.all(),
        "ledger": ledger,
    }


def applied(
    files: CrashFiles, steps: list[float], *, from_checkpoint: bool, resumes: bool, tail_after: int | None
) -> dict[str, Any]:
    """Apply the log of these files in steps, given as shares, and finish. Read the tail after step `tail_after`."""
    opened = opened_log(files)
    saved = checkpoint.load(files) if from_checkpoint else None
    reader, tables = LogReader(opened.segments), Tables(files, 2)
    applying = Applying(starting_point(saved, opened.segments), reader, tables, resumes=resumes)
    first, last = applying.applied_seq, reader.next_seq
    for at, share in enumerate(sorted(steps)):
        if at == tail_after:
            applying.read_tail()
        applying.apply(first + int(share * (last - first)))
    applying.apply(last)
    found = applying.finish(Catalog(files), 0)
    found.bring_up()
    return {**lists(found), **caches(tables, applying.ledger)}


@dataclass(frozen=True)
class Life:
    """A disk after a run with several snapshots, checkpoints and segments."""

    files: CrashFiles

    def copy(self) -> CrashFiles:
        return self.files.crash(survival="everything")


@functools.cache
def life_of(name: str) -> Life:
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
def test_applying_the_log_in_any_steps_gives_the_same_state(life: Life, data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.floats(0, 1), max_size=40), label="steps")
    start = {
        "from_checkpoint": data.draw(st.booleans(), label="from_checkpoint"),
        "resumes": data.draw(st.booleans(), label="resumes"),
    }
    tail_after = None if start["resumes"] else data.draw(st.none() | st.integers(0, 3), label="tail_after")
    expected = applied(life.copy(), [], tail_after=None, **start)
    assert applied(life.copy(), steps, tail_after=tail_after, **start) == expected


# Of the others the first rows are gone.
@pytest.mark.parametrize("life", WHOLE, indirect=True)
def test_the_rows_alone_give_the_same_state_as_snapshots(life: Life) -> None:
    """Apply all rows from the first one on, without using a snapshot."""
    files = life.copy()
    opened = opened_log(files)
    reader = LogReader(opened.segments)
    ledger, tail = AttachState(), TailScheduled(1)
    plain = Replayed(Checkpoint(Facts(seq=1), np.empty(0, np.int64), np.empty(0, np.int64)), ledger)
    for rows in reader.coalesced(1, reader.next_seq, None, 100):
        plain.apply(rows)
        tail.add(rows)
    plain.fold()
    applying = apply_log(starting_point(None, opened.segments), reader, Tables(files, 2))
    found = applying.finish(Catalog(files), 0)
    found.bring_up()
    waiting = tail.waiting(plain.settled(), ledger.watermark)
    assert [column.tolist() for column in (waiting.due_ms, waiting.seq, waiting.row_seq)] == lists(found)[
        "waiting"
    ]
    assert plain.waiting_rows == found.waiting_rows
    assert plain.cursor == found.cursor
    assert plain.redeliveries.facts() == found.redeliveries.facts()
    assert plain.halves.tolist() == [half.seq for half in found.halves]
    assert sorted(plain.files) == sorted(entry.path for entry in found.files)
    assert (ledger.watermark, ledger.attach_seq) == (applying.ledger.watermark, applying.ledger.attach_seq)
    assert tail.count(reader, ledger.watermark) == found.scheduled_since_watermark
    # The schedule has forgotten moves of messages whose due times have all passed.
    moved = Moved()
    moved.restore(plain.moved())
    moved.forget_before(found.settled.before_ms)
    assert entries_of(moved).tolist() == found.moved.tolist()


def test_these_lives_have_snapshots_amid_rows() -> None:
    """The control of the two tests above."""
    found = {}
    for name in WHOLE:
        opened = opened_log(life_of(name).copy())
        first, reader = starting_point(None, opened.segments).facts.seq, LogReader(opened.segments)
        found[name] = 1 < first < reader.next_seq - 2
    assert sum(found.values()) >= 4, found


# ---- a follower ------------------------------------------------------------------------------------------------


def follower_of(world: World) -> Applying:
    """Separate caches over the log of a running broker."""
    segments = world.broker.log.reader.segments
    tables = Tables(CrashFiles(), 2)
    return Applying(starting_point(None, segments), LogReader(segments), tables)


ROUNDS, EACH, ROUNDS_PER_SNAPSHOT = 12, 200, 3


async def rounds(world: World, *, snapshots: bool) -> tuple[Applying, int]:
    """Send, release and reschedule scheduled messages. Return a follower, and its largest number of kept entries."""
    follower, most = follower_of(world), 0
    for number in range(1, ROUNDS + 1):
        keys = await world.send("a", [SECOND_MS] * EACH)
        await world.reschedule(keys[:10], SECOND_MS + 100)
        await world.advance(2 * SECOND_MS)
        if snapshots and number % ROUNDS_PER_SNAPSHOT == 0:
            await world.node.maintenance.snapshot()  # type: ignore[union-attr]
        follower.apply(follower.reader.next_seq)
        most = max(most, follower.memory_rows)
    return follower, most


@on_node(InTurn)
async def test_a_follower_holds_only_pairs_settled_since_the_last_snapshot(world: World) -> None:
    follower, most = await rounds(world, snapshots=True)
    # A settled pair for each message. Two pairs and a move for each one that was rescheduled.
    assert most <= ROUNDS_PER_SNAPSHOT * (EACH + 2 * 10)
    assert follower.memory_rows <= 10, "the last snapshot covers all that was settled"
    assert follower.snapshot_seq > ROUNDS * EACH


@on_node(InTurn)
async def test_without_snapshots_a_follower_keeps_pairs_but_no_scheduled_messages(world: World) -> None:
    """The control of the test above."""
    follower, _ = await rounds(world, snapshots=False)
    assert ROUNDS * EACH <= follower.memory_rows <= ROUNDS * (EACH + 2 * 10)


@on_node(retention_ms=1)
async def test_a_follower_knows_log_from_seq_of_the_last_snapshot(world: World) -> None:
    follower = follower_of(world)
    assert follower.log_from_seq == 1
    for _ in range(4):
        await world.send("a", [None, SECOND_MS, HOUR_MS, None, None], 100_000)
        await world.advance(2 * SECOND_MS)
        follower.apply(follower.reader.next_seq)
    await world.consume()
    await world.compact()
    await world.checkpoint()
    await world.let_go()
    first_seq = world.broker.log.reader.first_seq
    assert follower.log_from_seq == 1 < first_seq, "the row of the snapshot is not applied yet"
    follower.apply(follower.reader.next_seq)
    assert follower.log_from_seq == first_seq
    kept = {queue.index.min_offset for queue in follower.tables.topics.get("a").queues}
    assert kept == {low for low, _ in world.broker.queues("a").values()} != {0}
    found = follower.finish(Catalog(world.files.crash(survival="everything")), 0)
    assert found.waiting_rows == 4
    assert found.log_from_seq == first_seq


@on_node()
async def test_an_uncommitted_snapshot_is_not_used_as_the_starting_point(world: World) -> None:
    await world.send("a", [HOUR_MS] * 3)
    await world.node.maintenance.snapshot()  # type: ignore[union-attr]
    await world.send("a", [HOUR_MS] * 2)
    await world.node.maintenance.snapshot()  # type: ignore[union-attr]
    reader = world.broker.log.reader
    newest = starting_point(None, reader.segments)
    first = starting_point(None, reader.segments, reader.next_seq - 1)
    assert 1 < first.facts.seq < newest.facts.seq
    assert starting_point(None, reader.segments, first.facts.seq).facts.seq == 1
    # A follower that begins at the first snapshot applies the later rows, too.
    follower = Applying(first, reader, Tables(CrashFiles(), 2))
    follower.apply(first.facts.seq + 2)
    with pytest.raises(AssertionError, match="would be forgotten"):
        follower.finish(Catalog(CrashFiles()), 0)
    follower.apply(reader.next_seq)
    assert follower.finish(Catalog(CrashFiles()), 0).waiting_rows == 5


@on_node(InTurn)
async def test_rows_appended_while_a_snapshot_was_made_are_applied_after_it(world: World) -> None:
    follower = follower_of(world)
    keys = await world.send("a", [HOUR_MS] * 6)
    reader = world.broker.log.reader
    before = asyncio.gather(world.cancel(keys[:2]), world.reschedule(keys[2:3], 2 * HOUR_MS))
    while world.broker.log.writer.next_seq == reader.next_seq:
        await asyncio.sleep(0)
    # The cancels and reschedules were decided before the snapshot, and their rows follow it. Others are sent while the
    # snapshot is being written.
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
    found = follower.finish(Catalog(CrashFiles()), 0)
    assert found.waiting_rows == world.broker.scheduling.outcomes.waiting_rows == len(found.waiting) == 7
    assert found.moved.tolist() == entries_of(world.broker.scheduling.outcomes.moved).tolist()
    assert sorted(found.settled.seq.tolist()) == sorted(
        world.broker.scheduling.scheduler.settled().seq.tolist()
    )


class TakeoverWorld(World):
    """A node that starts like a follower that becomes leader: its caches have applied the log in steps."""

    async def build(self, node: Node) -> None:
        opened = opened_log(self.files)
        reader = LogReader(opened.segments)
        applying = Applying(starting_point(None, opened.segments), reader, Tables(self.files, 2))
        for seq in range(applying.applied_seq, reader.next_seq + 3, 3):
            applying.apply(seq)
        applying.read_tail()
        await node.start(listen=False, hot=(opened, applying))


class TakeoverFolder(Kept):
    """A data folder on which each start is a takeover by a follower."""

    def world(self, files: CrashFiles) -> World:
        world = super().world(files)
        world.__class__ = TakeoverWorld  # the same object, but it builds its node in another way
        return world


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_takeover_gives_the_same_state_as_a_restart(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SNAPSHOT_BYTES", SMALL_BYTES)
    folder = lived(variant)  # after a run that made all kinds of state
    takeover = TakeoverFolder(
        folder.files, folder.clock, folder.observed, folder.settings, folder.keys, folder.halves
    )
    # `look` starts a broker on a copy of the folder, and returns all that is visible from then on.
    assert look(takeover, folder.copy()) == look(folder, folder.copy())
