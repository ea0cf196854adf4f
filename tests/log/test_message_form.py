"""Columns whose rows are all null or 0 share one range of zeros in a message. Arrow readers see the same columns."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.log import format as fmt
from timeball.log import row_encoder
from timeball.log.row_encoder import build_compiled, rows_of
from timeball.model.message import LOG_SCHEMA, Kind, LogRow, build_rows

ROWS_MIN = row_encoder.SHARING_ROWS_MIN
EMPTY = {pa.string(): "", pa.binary(): b""}  # 0 for any other type
VALUES: dict[pa.DataType, list[Any]] = {
    pa.int8(): [-1, 0, 1],
    pa.int32(): [-1, 0, 1],
    pa.int64(): [0, 1, -(2**63)],
    pa.string(): ["", "é", "\x00"],
    pa.binary(): [b"", b"\x00", b"x"],
}


@st.composite
def rows(draw: st.DrawFn) -> list[LogRow]:
    """Build rows in which many columns are null or 0 in all rows."""
    count, chance = draw(st.integers(1, 3 * ROWS_MIN)), random.Random(draw(st.integers(0, 2**32)))
    columns = []
    for field in LOG_SCHEMA:
        empty = EMPTY.get(field.type, 0)
        values = draw(st.sampled_from([[None], [empty], [None, empty], [None, *VALUES[field.type]]]))
        columns.append(chance.choices(values, k=count))
    return list(zip(*columns, strict=True))


@given(rows())
def test_columns_with_shared_zeros_equal_the_original(values: list[LogRow]) -> None:
    reference = rows_of(values)
    message = row_encoder.encode(reference)
    decoded = pa.ipc.read_record_batch(message, LOG_SCHEMA)
    decoded.validate(full=True)
    assert decoded.equals(reference) and decoded.slice(1).equals(reference.slice(1))
    assert pa.concat_batches([decoded, decoded]).equals(pa.concat_batches([reference, reference]))
    assert [column.null_count for column in decoded.columns] == [
        column.null_count for column in reference.columns
    ]
    if len(values) >= ROWS_MIN:
        assert b"".join(row_encoder.share_zeros(reference.serialize())) == message.to_pybytes()
    assert message.size <= pa.ipc.get_record_batch_size(reference)
    if row_encoder.MessageEncoder is not None:
        encoded = build_compiled(values)
        assert encoded.message == message.to_pybytes()
        rows_without_seq = [
            row_encoder.read_numbered_row(encoded, index, 7)[1:] for index in range(len(values))
        ]
        assert rows_without_seq == values


def test_the_parts_of_a_large_message_are_the_message_that_a_frame_contains() -> None:
    """Large messages stay in parts, so that bodies are not copied."""
    rows = build_rows(
        2 * ROWS_MIN,
        kind=int(Kind.SCHEDULED),
        topic="t",
        queue_id=0,
        body=bytes(range(256)) * 256,
        store_ms=2,
        due_ms=3,
    )
    assert pa.ipc.get_record_batch_size(rows) >= row_encoder.PARTS_BYTES_MIN
    parts = row_encoder.encode_parts(rows)
    assert len(parts) > 2 and b"".join(parts) == row_encoder.encode(rows).to_pybytes()
    if row_encoder.MessageEncoder is not None:
        assert b"".join(parts) == row_encoder.LOG_ENCODER.share(rows.serialize())
    _, buffers = fmt.encode_frame(
        rows, first_seq=1, span=rows.num_rows, append_ms=2, epoch=1, position=0, synced_to=0
    )
    segment = pa.py_buffer(b"".join(buffers))
    frame = fmt.read_frame(segment, 0)
    assert frame is not None and frame.end == segment.size
    assert fmt.decode_rows(segment, frame).equals(rows)


@pytest.mark.parametrize(
    ("count", "least", "most"), [(ROWS_MIN - 1, 0, 0), (ROWS_MIN, 56, 64), (131_072, 56, 57)]
)
def test_scheduled_rows_store_their_zeros_once(count: int, least: int, most: int) -> None:
    """Seven columns are null, queue and flags 0. The shared zeros are as long as the widest column: 8 bytes a row."""
    batch = build_rows(
        count, kind=int(Kind.SCHEDULED), topic="t", queue_id=0, unique_key="k", body=b"b", properties="p",
        born_ms=1, born_host="h", store_ms=2, store_host="s", flag=0, sys_flag=0, reconsume_times=0, due_ms=3,
    )  # fmt: skip
    full_bytes = pa.ipc.get_record_batch_size(batch)
    saved = full_bytes - len(row_encoder.encode(batch))
    assert least * count <= saved <= most * count
    # A slice has the same message, although its buffers begin with rows of the whole batch.
    assert row_encoder.encode(pa.concat_batches([batch, batch]).slice(count)) == row_encoder.encode(batch)
