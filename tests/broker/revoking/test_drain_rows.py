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
    """Scheduled messages as they are read (READ_SCHEMA): the rows 50, 51, … are due at 100, 101, … ms.

    MOVED rows are all versions of message 7.
    """
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


def test_a_drain_row_names_the_number_and_the_version_of_its_message() -> None:
    (drain_row,) = build_drain_rows(scheduled_rows([None]), "g1", 9).to_pylist()
    assert (drain_row["kind"], drain_row["source_seq"], drain_row["version_seq"]) == (Kind.CANCEL, 50, None)
    assert (drain_row["due_ms"], drain_row["store_ms"], drain_row["accepted_ms"]) == (100, 9, 2)
    (of_moved,) = build_drain_rows(scheduled_rows([None], Kind.MOVED), "g1", 9).to_pylist()
    assert (of_moved["source_seq"], of_moved["version_seq"], of_moved["from_due_ms"]) == (7, 50, None)


@given(st.lists(st.sampled_from(PROPERTIES), min_size=1, max_size=5), st.integers(0, 300))
def test_transferred_messages_equal_the_sent_ones(properties: list[str | None], now_ms: int) -> None:
    before = scheduled_rows(properties)
    drain_rows = build_drain_rows(before, "g1", 9)
    assert all(has_drain_mark(text) for text in drain_rows.column("properties").to_pylist())
    sent = decode_sent(encode_sent(drain_rows))
    after = build_adopted_rows(sent, now_ms=now_ms, host="receiver")
    for name in set(SENT.names) - {"properties", "due_ms"}:
        assert after.column(name) == before.column(name), name
    with_separators = [None if text is None else text.removesuffix("\x02") + "\x02" for text in properties]
    assert after.column("properties").to_pylist() == with_separators
    # A due time that passed during the transfer becomes now, so that the transfer does not count as lateness.
    assert after.column("due_ms").to_pylist() == [max(now_ms, 100 + at) for at in range(len(properties))]
    assert set(after.column("kind").to_pylist()) == {Kind.SCHEDULED}


def test_only_the_exact_property_is_a_drain_mark() -> None:
    assert not has_drain_mark(None)
    assert not has_drain_mark(encode_properties({"XHANDED_TO": "g1", "REASON": "HANDED_TO"}))
    assert has_drain_mark(encode_properties({"a": "b", "HANDED_TO": "g1"}))


def test_a_transfer_without_rows_or_with_other_columns_is_refused() -> None:
    other_columns = pa.BufferOutputStream()
    with pa.ipc.new_stream(other_columns, pa.schema([("x", pa.int64())])):
        pass
    no_rows = pa.BufferOutputStream()
    with pa.ipc.new_stream(no_rows, SENT):
        pass
    for data in (b"", b"nothing", other_columns.getvalue().to_pybytes(), no_rows.getvalue().to_pybytes()):
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
def test_a_transfer_with_a_damaged_byte_is_refused_or_has_valid_rows(data: st.DataObject) -> None:
    sent = bytearray(encode_sent(build_drain_rows(scheduled_rows(PROPERTIES), "g1", 9)))
    at = data.draw(st.integers(0, len(sent) - 1))
    sent[at] ^= data.draw(st.integers(1, 255))
    try:
        assert decode_sent(bytes(sent)).schema == SENT
    except InvalidMessage:
        pass
