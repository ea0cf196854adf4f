"""Rows of several kinds in one append: each kind is stored in its own way, and a refused batch leaves no row."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import column, on_node
from tests.crash.world import World

from timeball.broker.accepting.appender import TailCount
from timeball.model import limits
from timeball.model.errors import OverLimit
from timeball.model.message import Kind, build_rows

KINDS = [Kind.CANCEL, Kind.MESSAGE, Kind.SCHEDULED]


def mixed(now_ms: int, cancelled_topic: str = "gone") -> pa.RecordBatch:
    """Build a CANCEL row, a MESSAGE row and a SCHEDULED row, which is due in 5 s."""
    return build_rows(
        3,
        kind=[int(kind) for kind in KINDS],
        topic=[cancelled_topic, "now", "later"],
        queue_id=-1,
        body=[None, b"a", b"b"],
        store_ms=now_ms,
        store_host="here",
        born_ms=now_ms,
        born_host="here",
        flag=0,
        sys_flag=0,
        reconsume_times=0,
        due_ms=[now_ms + 5_000, None, now_ms + 5_000],
        source_seq=[10**9, None, None],
    )


@on_node()
async def test_appended_rows_are_indexed_or_scheduled_by_their_kind(world: World) -> None:
    appender = world.broker.appender
    next_seqs_in_callback: list[int] = []
    rows = mixed(world.clock.wall)
    appender.make_topics(rows.slice(1))
    assert set(world.broker.topics()) == {"now", "later"}
    rows = appender.prepare(rows, world.clock.wall)
    appended = appender.append(rows, lambda: next_seqs_in_callback.append(world.broker.log.reader.next_seq))
    assert not next_seqs_in_callback and appended.rows.num_rows == 3
    assert await appended.durable == appended.first_seq
    assert next_seqs_in_callback == [appended.first_seq + 3], "called when the rows are readable"
    assert column(appended.rows, "queue_offset") == [None, 0, None]
    visible_rows = await world.broker.pull("now", {0: 0, 1: 0}, 8, 0)
    assert column(visible_rows, "seq") == [appended.first_seq + 1]
    await world.advance(5_000)
    released_rows = await world.broker.pull("later", {0: 0, 1: 0}, 8, 0)
    assert column(released_rows, "source_seq") == [appended.first_seq + 2]
    assert world.broker.mover.tail_count.rows == 1


@on_node()
async def test_due_messages_share_the_commit_of_a_send(world: World) -> None:
    await world.send("later", [5_000])
    await world.send("now", [None])
    await world.until(lambda: world.broker.ticker._sleeping is not None, "the ticker sleeps")
    commits = world.broker.log.writer.statistics.commits
    world.clock.advance(5_000)  # only the clock moves: the timer of the ticker still runs
    await world.broker.send(pa.record_batch({"topic": ["now"], "body": [b"a"]}))
    assert world.broker.log.writer.statistics.commits == commits + 1
    queues = world.broker.tables.topics.find_topic("later").queues
    assert sum(queue.index.max_offset for queue in queues) == 1


@on_node(auto_create_topics=False)
async def test_a_refused_batch_writes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOPICS_MAX", 0)
    before = world.broker.log.writer.next_seq
    with pytest.raises(OverLimit, match="topics exist"):
        world.broker.appender.make_topics(mixed(world.clock.wall).slice(1))
    assert world.broker.log.writer.next_seq == before


@on_node()
async def test_some_of_the_prepared_rows_may_be_appended(world: World) -> None:
    rows = world.broker.appender.prepare(mixed(world.clock.wall), world.clock.wall)
    appended = world.broker.appender.append(rows.filter(pa.array([False, True, False])))
    await appended.durable
    assert column(appended.rows, "kind") == [Kind.MESSAGE]
    assert world.broker.log.reader.next_seq == appended.first_seq + 1


# ---- the row count of the tail --------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.integers(1, 2 * TailCount.STEP), st.booleans()), max_size=30)


@given(STEPS, st.data())
def test_the_tail_count_is_wrong_by_less_than_a_step(
    steps: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """Compare with a list of all appends. The watermark moves to any row, also to a row between two marks."""
    count, appends, next_seq, watermark = TailCount(1, 0), [], 1, 1
    for rows, moves_watermark in steps:
        next_seq += rows
        appends.append((next_seq, rows))
        count.add(next_seq, rows)
        if moves_watermark:
            watermark = data.draw(st.integers(watermark, next_seq))
            count.drop_below(watermark)
        # If the watermark is within an append, only its rows from the watermark on count.
        correct = sum(min(rows, end - watermark) for end, rows in appends if end > watermark)
        largest = max(rows for _, rows in appends)
        assert abs(count.rows - correct) <= TailCount.STEP + largest


def test_the_tail_count_is_near_zero_after_the_whole_tail_was_compacted() -> None:
    count = TailCount(1, 50_000)
    for _ in range(10):
        count.add(60_000, 9_999)
        count.drop_below(60_000)
        assert 0 <= count.rows < TailCount.STEP
