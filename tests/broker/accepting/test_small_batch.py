"""A few sends encoded row by row give the same rows, offsets and index entries as the same sends as columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.crash.lives import run
from tests.crash.world import World
from tests.crash_files import CrashFiles

from timeball.broker.accepting import admission
from timeball.broker.accepting.admission import batch_of
from timeball.broker.registry.idempotency import KeyedSend
from timeball.broker.registry.meta import Change
from timeball.broker.registry.topics import TopicConfig
from timeball.io.clock import ManualClock
from timeball.log import format as fmt
from timeball.log.row_encoder import rows_of
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.errors import TimeballError
from timeball.model.message import LOG_SCHEMA, SEND_NAMES, Kind, SendRow, build_rows

NOW_MS = 1_700_000_000_000
TOPICS = ("one", "many", "missing")
INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TEXT = st.one_of(st.none(), st.text(max_size=4), st.sampled_from(["a||b", "x" * (limits.TAG_BYTES_MAX + 1)]))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "topic": st.sampled_from(TOPICS),
    "body": st.binary(max_size=4),
    "queue_id": st.one_of(st.none(), st.integers(-2, 5)),
    "born_ms": st.one_of(st.none(), INT64),
    "flag": st.one_of(st.none(), INT32),
    "sys_flag": st.one_of(st.none(), INT32),
    "reconsume_times": st.one_of(st.none(), INT32),
    "due_ms": st.one_of(
        st.none(), st.none(), st.integers(-1, 5_000).map(lambda ms: NOW_MS + ms), st.just(-1)
    ),
    "delay_level": st.one_of(st.none(), st.none(), st.integers(-1, 2)),
}
ROWS = st.lists(st.tuples(*(VALUES.get(name, TEXT) for name in SEND_NAMES)), min_size=1, max_size=8)


def never(*_: Any, **__: Any) -> bool:
    """Replaces `are_plain`, so that no batch is encoded row by row."""
    return False


async def write_and_observe(
    batches: list[list[SendRow]], are_plain: Callable[..., Any] | None, *, has_keys: bool = False
) -> tuple[Any, ...]:
    """Send to a new broker and return its answers, the rows of its log, its queues, its counts, and its keys.

    `are_plain` replaces the check that a batch may be encoded row by row. With `has_keys`, each send has an idempotency
    key.
    """
    world = World(CrashFiles(), ManualClock(wall=NOW_MS), auto_create_topics=False)
    with pytest.MonkeyPatch.context() as patch:
        if are_plain is not None:
            patch.setattr(admission, "are_plain", are_plain)
        await world.start()
        try:
            broker = world.broker
            for name, kind in (("one", "SINGLE_TAG"), ("many", "MULTI_TAG")):
                broker.tables.topics.configure(name, TopicConfig(3, 2), filter_type=kind)  # type: ignore[arg-type]
            answers: list[object] = []
            for rows in batches:

                def key_change(first_seq: int, store_ms: int, rows: list[SendRow] = rows) -> Change:
                    keyed = KeyedSend(first_seq, len(rows), store_ms, "content")
                    return broker.tables.idempotency_keys.build_change([(f"key-{first_seq}", keyed)])

                try:
                    if has_keys:
                        accepted, durable = broker.appender.send_with(rows, key_change, ANONYMOUS)
                    else:
                        accepted, durable = broker.appender.send(rows)
                    await durable
                    answers.append((accepted.first_seq, accepted.rows, accepted.stored_rows.to_pylist()))
                except TimeballError as error:
                    answers.append((type(error), str(error)))
            logged = [
                row for part in broker.read_log(1, broker.log.reader.next_seq) for row in part.to_pylist()
            ]
            queues = [
                (topic.name, queue_id, queue.next_offset, queue.index.read(0, 100).tolist(), topic.turn)
                for topic in broker.tables.topics.all()
                for queue_id, queue in enumerate(topic.queues)
            ]
            counts = [broker.rates.total("TOPIC_PUT_SIZE", name) for name in TOPICS]
            keys = broker.tables.idempotency_keys._table.values
            return answers, logged, queues, counts, broker.mover.tail_count.rows, dict(keys)
        finally:
            await world.abandon()


@settings(max_examples=30)
@given(st.lists(ROWS, min_size=1, max_size=3), st.booleans())
def test_sends_encoded_row_by_row_leave_the_same_state_as_sends_in_columns(
    batches: list[list[SendRow]], has_keys: bool
) -> None:
    state_by_rows, state_by_columns = (
        run(write_and_observe(batches, are_plain, has_keys=has_keys)) for are_plain in (None, never)
    )
    assert state_by_rows == state_by_columns


def test_a_different_queue_choice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the comparison fails if one way counts other sizes, so that it chooses other queues."""
    row = tuple({"topic": "one", "body": b"x", "tag": "a"}.get(name) for name in SEND_NAMES)
    assert run(write_and_observe([[row]], None)) == run(write_and_observe([[row]], never))
    monkeypatch.setattr(admission, "stored_size", lambda *_: 0)
    assert run(write_and_observe([[row]], None)) != run(write_and_observe([[row]], never))


def values_of(field: pa.Field) -> st.SearchStrategy[Any]:
    """Build a strategy for the values of a column."""
    if pa.types.is_string(field.type) or pa.types.is_binary(field.type):
        values: st.SearchStrategy[Any] = st.text(max_size=9)
        return st.one_of(st.none(), values if pa.types.is_string(field.type) else values.map(str.encode))
    return st.one_of(
        st.none(), st.integers(-(2 ** (field.type.bit_width - 1)), 2 ** (field.type.bit_width - 1) - 1)
    )


@given(st.lists(st.tuples(*(values_of(field) for field in LOG_SCHEMA)), min_size=1, max_size=9))
def test_encoded_rows_equal_the_bytes_of_rows_built_as_columns(values: list[tuple[Any, ...]]) -> None:
    columns = dict(zip(LOG_SCHEMA.names, map(list, zip(*values, strict=True)), strict=True))
    by_columns = build_rows(len(values), **columns)
    assert frame_of(rows_of(values)) == frame_of(by_columns)


def frame_of(rows: pa.RecordBatch) -> bytes:
    """Encode rows as a frame of the log."""
    _, parts = fmt.encode_frame(
        rows, first_seq=1, span=rows.num_rows, append_ms=2, epoch=3, position=64, synced_to=64
    )
    return b"".join(bytes(part) for part in parts)


@given(ROWS)
def test_columns_convert_back_to_their_rows(rows: list[SendRow]) -> None:
    assert admission.rows_in(batch_of(rows)) == rows


def test_batches_that_are_large_or_need_a_cast_are_not_converted_to_rows() -> None:
    plain = batch()
    assert admission.rows_in(plain) is not None
    assert admission.rows_in(plain.slice(0, 0)) is None
    assert admission.rows_in(batch(admission.ROWS_MAX + 1)) is None
    for name, values in (
        ("unknown", pa.array(["x"])),
        ("delay_ms", pa.array([5])),
        ("tag", pa.array([b"t"])),
    ):
        assert admission.rows_in(plain.append_column(name, values)) is None
    assert admission.rows_in(plain.append_column("body", plain.column("body"))) is None
    assert admission.rows_in(batch(2, body=[bytes(limits.REQUEST_BYTES_MAX // 64)] * 2)) is None


@on_node(auto_create_topics=False)
async def test_a_refused_value_uses_no_queue_offset(world: World) -> None:
    await world.broker.create_topic("orders", 2)
    good = tuple({"topic": "orders", "body": b"x"}.get(name) for name in SEND_NAMES)
    bad = tuple({"topic": "orders", "body": b"x", "flag": 1 << 40}.get(name) for name in SEND_NAMES)
    next_seq = world.broker.log.writer.next_seq
    with pytest.raises((pa.ArrowInvalid, OverflowError)):
        world.broker.appender.send([good, bad])
    assert world.broker.log.writer.next_seq == next_seq
    accepted, durable = world.broker.appender.send([good])
    await durable
    assert accepted.stored_rows.to_pylist()[0]["queue_offset"] == 0
    assert accepted.stored_rows.column("kind").to_pylist() == [Kind.MESSAGE]
