"""The layout of a log row message: the positions of its numbers, and the zeros that its columns share.

The metadata of an Arrow message is a flatbuffer. All messages of one schema have the same metadata except for some
numbers: the rows, the nulls of each column, the position and size of each buffer, and the bytes of the body. So a
message that pyarrow wrote serves as a template, and its tables give the positions of these numbers (Arrow's
format/Message.fbs).

In the rows of a scheduled message, seven columns are nearly always null and three more are 0: sixty bytes a row without
information. Arrow allows the buffers of a message to lie anywhere in its body. So all buffers that contain only zeros
overlap at the beginning of the body. Every Arrow reader sees the same columns as in a message without overlap.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from timeball.model import flatbuffer as fb
from timeball.model.message import LOG_SCHEMA

_PREFIX = struct.Struct("<iI")  # -1, then the bytes of the metadata
_NUMBER = struct.Struct("<q")
_ROOT_AT = _PREFIX.size
_WORD = 8  # buffers begin at multiples of it and are padded with zeros
# Messages of fewer rows keep their zeros: they save little, and small commits must be cheap.
SHARING_ROWS_MIN = 16


class Form(NamedTuple):
    """The metadata of a schema's messages, and the byte positions of the variable numbers in it."""

    head: bytes  # everything before the body
    rows_at: int
    nodes_at: int  # rows and nulls of each column
    buffers_at: int  # position and size of each buffer
    body_bytes_at: int


def form_of(schema: pa.Schema) -> Form:
    """Derive the form of messages with rows of this schema."""
    no_value = {pa.string(): "", pa.binary(): b""}
    row = [pa.array([no_value.get(field.type, 0)], field.type) for field in schema]
    message = pa.RecordBatch.from_arrays(row, schema=schema).serialize().to_pybytes()
    _, metadata_bytes = _PREFIX.unpack_from(message)
    message_at = fb.target(message, _ROOT_AT)
    batch_at = fb.target(message, fb.present_field(message, message_at, fb.MESSAGE_HEADER))
    # A flatbuffer vector is its length (4 bytes), then its elements.
    nodes_at, buffers_at = (
        fb.target(message, fb.present_field(message, batch_at, field)) + 4
        for field in (fb.BATCH_NODES, fb.BATCH_BUFFERS)
    )
    return Form(
        message[: _PREFIX.size + metadata_bytes],
        fb.present_field(message, batch_at, fb.BATCH_ROWS),
        nodes_at,
        buffers_at,
        fb.present_field(message, message_at, fb.MESSAGE_BODY_BYTES),
    )


_LOG_FORM = form_of(LOG_SCHEMA)
_HEAD_BYTES = len(_LOG_FORM.head)
# Whether each buffer may share the zeros. The bytes of texts (the third buffer of a column) are never examined.
_MAY_SHARE = np.array([at < 2 for field in LOG_SCHEMA for at in range(field.type.num_buffers)])


def share(message: pa.Buffer) -> bytes | pa.Buffer:
    """Move the zeros of a LOG_SCHEMA message from pyarrow to one place. Returns a message without zeros unchanged."""
    places, sizes = (
        np.frombuffer(message, np.int64, 2 * len(_MAY_SHARE), _LOG_FORM.buffers_at).reshape(-1, 2).T
    )
    begins, words = places // _WORD, -(-sizes // _WORD)
    body = np.frombuffer(message, np.int64, offset=_HEAD_BYTES)
    # Cheap test first: most columns that are not all zeros have a non-zero first word.
    may_be = _MAY_SHARE & (words > 0) & (body[np.minimum(begins, len(body) - 1)] == 0)
    shared = [
        at for at in np.flatnonzero(may_be).tolist() if not body[begins[at] : begins[at] + words[at]].any()
    ]
    if not shared:
        return message
    zeros, kept = int(words[shared].max()), words.copy()
    kept[shared] = 0
    moved = zeros + np.cumsum(kept) - kept
    moved[shared] = 0
    head = bytearray(memoryview(message)[:_HEAD_BYTES])
    head[_LOG_FORM.buffers_at : _LOG_FORM.buffers_at + 16 * len(moved)] = np.column_stack(
        (_WORD * moved, sizes)
    ).tobytes()
    _NUMBER.pack_into(head, _LOG_FORM.body_bytes_at, _WORD * (zeros + int(kept.sum())))
    # pyarrow writes the buffers one after the other, so the kept ones are the stretches between the shared ones.
    ends = [*begins[shared].tolist(), len(body)]
    starts = [0, *(begins[shared] + words[shared]).tolist()]
    pieces = [body[start:end].data for start, end in zip(starts, ends, strict=True)]
    return b"".join([head, bytes(_WORD * zeros), *pieces])
