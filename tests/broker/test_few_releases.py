"""A few releases encoded row by row give the same rows, offsets and index entries as releases in columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash.lives import run
from tests.crash.world import World
from tests.crash_files import CrashFiles

from timeball.broker.accepting import delivery
from timeball.broker.registry.topics import TopicConfig
from timeball.io.clock import ManualClock
from timeball.log.row_encoder import NumberedRows
from timeball.model import limits
from timeball.model.message import READ_SCHEMA, Kind, encode_properties, int64
from timeball.schedule.level_cascade import NAME as TIMING_LIST

NOW_MS = 1_700_000_000_000
INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TEXT = st.one_of(st.none(), st.text(max_size=4), st.sampled_from(["a||b", "ü"]))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "kind": st.sampled_from([int(Kind.SCHEDULED), int(Kind.MOVED)]),
    "topic": st.sampled_from(["one", "many", "missing"]),
    "queue_id": st.one_of(st.none(), st.integers(-2, 5)),
    "queue_offset": st.none(),
    "tag": TEXT,
    "keys": TEXT,
    "unique_key": TEXT,
    "body": st.binary(max_size=4),
    "properties": st.one_of(TEXT, st.just(encode_properties({"a": "b", TIMING_LIST: "7"}))),
    "born_ms": INT64,
    "born_host": TEXT,
    "store_ms": st.integers(0, NOW_MS),
    "store_host": TEXT,
    "flag": INT32,
    "sys_flag": INT32,
    "reconsume_times": INT32,
    "due_ms": st.integers(NOW_MS - 9, NOW_MS),
    "accepted_ms": st.none(),
    "source_seq": st.integers(1, 9),
    "version_seq": st.none(),
    "from_due_ms": st.none(),
}
SCHEDULED_ROWS = st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=8)


def scheduled_of(values: list[dict[str, Any]]) -> pa.RecordBatch:
    """Build scheduled messages (READ_SCHEMA) from values, sorted like a hand-out."""
    rows = sorted(values, key=lambda row: row["due_ms"])
    for seq, row in enumerate(rows, 1_000):
        row["seq"] = seq
        if row["kind"] == Kind.SCHEDULED:
            row["source_seq"] = None
    return pa.RecordBatch.from_pylist(rows, READ_SCHEMA)


def as_numbered(scheduled_rows: pa.RecordBatch) -> NumberedRows:
    """Convert rows to values, as a small send hands them to the schedule."""
    return NumberedRows(list(zip(*(column.to_pylist() for column in scheduled_rows.columns), strict=True)))


async def release_and_observe(
    scheduled_rows: pa.RecordBatch, *, by_rows: bool, as_values: bool = False
) -> tuple[Any, ...]:
    """Release messages twice on a new broker. Returns the rows of its log, its queues, its counts and its lateness.

    Without `by_rows`, they are released as columns. With `as_values`, they are handed out as values.
    """
    world = World(CrashFiles(), ManualClock(wall=NOW_MS))
    with pytest.MonkeyPatch.context() as patch:
        if not by_rows:
            patch.setattr(delivery, "values_if_few", lambda scheduled_rows: None)
        await world.start()
        try:
            broker = world.broker
            for name, kind in (("one", "SINGLE_TAG"), ("many", "MULTI_TAG")):
                broker.tables.topics.configure(name, TopicConfig(3, 2), filter_type=kind)  # type: ignore[arg-type]
            due_ms, seq = int64(scheduled_rows.column("due_ms")), int64(scheduled_rows.column("seq"))
            for _ in range(2):
                broker.scheduling.outcomes.hand_out(due_ms, seq, due_ms)
                few = as_numbered(scheduled_rows) if as_values else scheduled_rows
                await broker.delivery.release(few, NOW_MS)
            frames = [
                row for part in broker.read_log(1, broker.log.reader.next_seq) for row in part.to_pylist()
            ]
            queues = [
                (topic.name, at, queue.next_offset, queue.index.read(0, 100).tolist(), topic.turn)
                for topic in broker.tables.topics.all()
                for at, queue in enumerate(topic.queues)
            ]
            counts = [broker.rates.total("TOPIC_PUT_SIZE", name) for name in ("one", "many", "missing")]
            return frames, queues, counts, broker.lateness.summary()
        finally:
            await world.abandon()


@settings(max_examples=30)
@given(SCHEDULED_ROWS)
def test_releases_as_values_write_the_same_rows_as_columns(values: list[dict[str, Any]]) -> None:
    scheduled_rows = scheduled_of(values)
    state_by_rows, state_by_columns = (
        run(release_and_observe(scheduled_rows, by_rows=by_rows)) for by_rows in (True, False)
    )
    assert state_by_rows == state_by_columns


@settings(max_examples=30)
@given(SCHEDULED_ROWS)
def test_a_release_of_values_equals_a_release_of_columns(
    values: list[dict[str, Any]],
) -> None:
    scheduled_rows = scheduled_of([row | {"kind": int(Kind.SCHEDULED)} for row in values])
    state_of_values, state_of_columns = (
        run(release_and_observe(scheduled_rows, by_rows=True, as_values=as_values))
        for as_values in (True, False)
    )
    assert state_of_values == state_of_columns


PLAIN = dict.fromkeys(VALUES) | {
    "kind": int(Kind.SCHEDULED), "topic": "one", "body": b"x", "due_ms": NOW_MS, "store_ms": 1, "born_ms": 1,
    "flag": 0, "sys_flag": 0, "reconsume_times": 0, "queue_id": -1,
}  # fmt: skip


def test_a_different_queue_choice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the comparison fails if one way counts other sizes, so that it chooses other queues."""
    scheduled_rows = scheduled_of([dict(PLAIN)])
    assert run(release_and_observe(scheduled_rows, by_rows=True)) == run(
        release_and_observe(scheduled_rows, by_rows=False)
    )
    monkeypatch.setattr(delivery, "stored_size", lambda *_: 0)
    assert run(release_and_observe(scheduled_rows, by_rows=True)) != run(
        release_and_observe(scheduled_rows, by_rows=False)
    )


def test_many_large_or_listed_messages_are_released_as_columns() -> None:
    rows_max = delivery.FEW_ROWS
    large = {"body": bytes(limits.REQUEST_BYTES_MAX // 64)}
    listed = {"properties": encode_properties({TIMING_LIST: "7,9"})}
    few = scheduled_of([dict(PLAIN) for _ in range(rows_max)])
    assert delivery.values_if_few(few) == delivery.values_if_few(as_numbered(few)) == as_numbered(few).values
    for rows in ([dict(PLAIN)] * (rows_max + 1), [PLAIN | large], [PLAIN | listed]):
        scheduled_rows = scheduled_of(rows)
        assert (
            delivery.values_if_few(scheduled_rows)
            is delivery.values_if_few(as_numbered(scheduled_rows))
            is None
        )


def test_an_early_release_is_refused_as_values_and_as_columns() -> None:
    for by_rows in (True, False):
        with pytest.raises(AssertionError, match="never be released before its due time"):
            run(release_and_observe(scheduled_of([PLAIN | {"due_ms": NOW_MS + 1}]), by_rows=by_rows))
