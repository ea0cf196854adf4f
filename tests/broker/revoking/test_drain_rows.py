"""A drained message keeps all its values on its way from one log to another."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.revoking.drain_rows import (
    SENT,
    build_adopted_rows,
    build_drain_rows,
    decode_sent,
    encode_sent,
    has_drain_mark,
)
from timeball.model.errors import InvalidMessage
from timeball.model.message import READ_SCHEMA, Kind, build_rows, encode_properties

PROPERTIES = [
    None,
    encode_properties({"color": "red"}),
    "color\x01red",  # without its end, as other clients write it
    encode_properties({"a": "", "HANDED_TO_ELSE": "x"}),
]


def scheduled_rows(properties: list[str | None], kind: Kind = Kind.SCHEDULED) -> pa.RecordBatch:
    count = len(properties)
    rows = build_rows(
        count, kind=int(kind), topic="orders", queue_id=[3] * count, tag="t", keys="k1 k2",
        unique_key=[f"id{at}" for at in range(count)], body=[b"body"] * count, properties=properties, born_ms=1,
        born_host="here", store_ms=2, store_host="there", flag=3, sys_flag=4, reconsume_times=0,
        due_ms=pa.array(range(100, 100 + count), pa.int64()),
        source_seq=[7] * count if kind is Kind.MOVED else None,
    )  # fmt: skip
    return pa.RecordBatch.from_arrays(
        [pa.array(np.arange(50, 50 + count)), *rows.columns], schema=READ_SCHEMA
    )


def test_a_handed_row_ends_the_scheduled_message_by_its_number_and_version() -> None:
    (plain,) = build_drain_rows(scheduled_rows([None]), "g1", 9).to_pylist()
    assert (plain["kind"], plain["source_seq"], plain["version_seq"]) == (Kind.CANCEL, 50, None)
    assert (plain["due_ms"], plain["store_ms"], plain["accepted_ms"]) == (100, 9, 2)
    (moved,) = build_drain_rows(scheduled_rows([None], Kind.MOVED), "g1", 9).to_pylist()
    assert (moved["source_seq"], moved["version_seq"], moved["from_due_ms"]) == (7, 50, None)


@given(st.lists(st.sampled_from(PROPERTIES), min_size=1, max_size=5), st.integers(0, 300))
def test_transferred_messages_equal_the_sent_ones(properties: list[str | None], now_ms: int) -> None:
    before = scheduled_rows(properties)
    handed = build_drain_rows(before, "g1", 9)
    assert all(has_drain_mark(text) for text in handed.column("properties").to_pylist())
    sent = decode_sent(encode_sent(handed))
    after = build_adopted_rows(sent, now_ms=now_ms, host="heir")
    for name in set(SENT.names) - {"properties", "due_ms"}:
        assert after.column(name) == before.column(name), name
    ended = [None if text is None else text.removesuffix("\x02") + "\x02" for text in properties]
    assert after.column("properties").to_pylist() == ended
    # It is not early, and the time of its transfer does not count as lateness.
    assert after.column("due_ms").to_pylist() == [max(now_ms, 100 + at) for at in range(len(properties))]
    assert set(after.column("kind").to_pylist()) == {Kind.SCHEDULED}


def test_a_message_that_only_looks_handed_over_is_not() -> None:
    assert not has_drain_mark(None) and not has_drain_mark(
        encode_properties({"XHANDED_TO": "g1", "REASON": "HANDED_TO"})
    )
    assert has_drain_mark(encode_properties({"a": "b", "HANDED_TO": "g1"}))


def test_invalid_transfers_are_refused() -> None:
    other = pa.BufferOutputStream()
    with pa.ipc.new_stream(other, pa.schema([("x", pa.int64())])):
        pass
    empty = pa.BufferOutputStream()
    with pa.ipc.new_stream(empty, SENT):
        pass
    for data in (b"", b"nothing", other.getvalue().to_pybytes(), empty.getvalue().to_pybytes()):
        with pytest.raises(InvalidMessage):
            decode_sent(data)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_transfer_is_refused(codec: str) -> None:
    with pa.ipc.open_stream(encode_sent(build_drain_rows(scheduled_rows([None] * 1_000), "g1", 9))) as reader:
        rows = reader.read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SENT, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(rows)
    with pytest.raises(InvalidMessage, match="compressed"):
        decode_sent(sink.getvalue().to_pybytes())


@given(st.data())
def test_a_damaged_transfer_is_refused_or_sound(data: st.DataObject) -> None:
    sent = bytearray(encode_sent(build_drain_rows(scheduled_rows(PROPERTIES), "g1", 9)))
    at = data.draw(st.integers(0, len(sent) - 1))
    sent[at] ^= data.draw(st.integers(1, 255))
    try:
        assert decode_sent(bytes(sent)).schema == SENT
    except InvalidMessage:
        pass
