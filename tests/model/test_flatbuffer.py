"""Fields of a flatbuffer: those of a message that pyarrow has written, and of one that is cut off."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from timeball.model import flatbuffer as fb

MESSAGE = pa.RecordBatch.from_pydict({"a": [1, 2, None]}).serialize().to_pybytes()
METADATA = MESSAGE[
    8 : 8 + struct.unpack_from("<i", MESSAGE, 4)[0]
]  # after a marker and the length, 4 bytes each


def batch_at() -> int:
    return fb.target(METADATA, fb.present_field(METADATA, fb.target(METADATA, 0), fb.MESSAGE_HEADER))


def number_at(at: int) -> int:
    return int(struct.unpack_from("<q", METADATA, at)[0])


def test_the_numbers_of_an_arrow_message_are_read() -> None:
    body_at = fb.present_field(METADATA, fb.target(METADATA, 0), fb.MESSAGE_BODY_BYTES)
    assert number_at(body_at) == len(MESSAGE) - 8 - len(METADATA)
    assert number_at(fb.present_field(METADATA, batch_at(), fb.BATCH_ROWS)) == 3
    node_at = fb.target(METADATA, fb.present_field(METADATA, batch_at(), fb.BATCH_NODES)) + 4
    assert (number_at(node_at), number_at(node_at + 8)) == (3, 1)


def test_a_field_that_is_left_out_has_no_position() -> None:
    assert fb.field(METADATA, batch_at(), fb.BATCH_COMPRESSION) is None
    assert fb.field(METADATA, batch_at(), 99) is None
    with pytest.raises(AssertionError, match="left out"):
        fb.present_field(METADATA, batch_at(), 99)


def can_read(metadata: bytes) -> bool:
    try:
        header_at = fb.present_field(metadata, fb.target(metadata, 0), fb.MESSAGE_HEADER)
        fb.present_field(metadata, fb.target(metadata, header_at), fb.BATCH_BUFFERS)
    except (struct.error, IndexError):
        return False
    return True


def test_a_truncated_flatbuffer_raises() -> None:
    results = [can_read(METADATA[:size]) for size in range(len(METADATA) + 1)]
    assert results == sorted(results) and not results[0] and results[-1]
    assert not can_read(struct.pack("<ii", 4, 8)), "a vtable before the begin"


SCHEMA = pa.schema([("tag", pa.string()), ("größe", pa.int32())]).serialize().to_pybytes()[8:]


def names(metadata: bytes) -> list[str]:
    schema = fb.target(metadata, fb.present_field(metadata, fb.target(metadata, 0), fb.MESSAGE_HEADER))
    fields = fb.tables(metadata, fb.present_field(metadata, schema, fb.SCHEMA_FIELDS))
    return [fb.text(metadata, fb.present_field(metadata, at, fb.FIELD_NAME)) for at in fields]


def test_the_field_names_of_a_schema_are_read() -> None:
    assert names(SCHEMA) == ["tag", "größe"]


def test_tables_and_texts_that_are_cut_off_raise() -> None:
    end = max(SCHEMA.index(name.encode()) + len(name.encode()) for name in names(SCHEMA))
    for size in range(end):
        with pytest.raises((struct.error, IndexError, AssertionError)):
            assert names(SCHEMA[:size]) == ["tag", "größe"]
