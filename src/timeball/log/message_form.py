"""The Arrow message of rows of the log: where its numbers stand, and the zeros that its columns share.

The metadata of a message is a flatbuffer. All messages of one schema have the same metadata but for the numbers in it:
rows, nulls of each column, place and size of each buffer, bytes of all of them. So one that pyarrow has written serves
as a form, and its tables say where these numbers stand (Arrow's format/Message.fbs).

Of the columns of a promise seven are missing in nearly all rows, and three more are 0: sixty bytes a row that say
nothing. A column's buffers may lie anywhere in a message, so those that are all zeros lie at one place, at its
beginning, and overlap. Every reader of Arrow sees the columns that it would see of a message in which they do not.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from timeball import flatbuffer as fb
from timeball.message import LOG_SCHEMA

_PREFIX = struct.Struct("<iI")  # -1, bytes of the metadata
_NUMBER = struct.Struct("<q")
_ROOT_AT = _PREFIX.size
_WORD = 8  # buffers begin at multiples of it, with zeros behind them
# Fewer keep their zeros: there are few of them, and a small commit has better things to do.
SHARING_ROWS_MIN = 16


class Form(NamedTuple):
    """Places of the numbers in a message, and its metadata besides."""

    head: bytes  # all before the body
    rows_at: int
    nodes_at: int  # of each column rows and nulls
    buffers_at: int  # of each buffer place and size
    body_bytes_at: int


def form_of(schema: pa.Schema) -> Form:
    """Return the form of messages with rows of this schema."""
    no_value = {pa.string(): "", pa.binary(): b""}
    row = [pa.array([no_value.get(field.type, 0)], field.type) for field in schema]
    message = pa.RecordBatch.from_arrays(row, schema=schema).serialize().to_pybytes()
    _, metadata_bytes = _PREFIX.unpack_from(message)
    message_at = fb.target(message, _ROOT_AT)
    batch_at = fb.target(message, fb.present_field(message, message_at, fb.MESSAGE_HEADER))
    # A vector: how many, and then one behind the other.
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
# Of each buffer, whether it may be among the zeros: texts themselves are not looked at.
_MAY_SHARE = np.array([at < 2 for field in LOG_SCHEMA for at in range(field.type.num_buffers)])


def share(message: pa.Buffer) -> bytes | pa.Buffer:
    """Return a message with rows of LOG_SCHEMA, as pyarrow has written it, with its zeros in one place."""
    places, sizes = (
        np.frombuffer(message, np.int64, 2 * len(_MAY_SHARE), _LOG_FORM.buffers_at).reshape(-1, 2).T
    )
    begins, words = places // _WORD, -(-sizes // _WORD)
    body = np.frombuffer(message, np.int64, offset=_HEAD_BYTES)
    # Most columns that are no zeros say so in their first word.
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
    # What is kept stands side by side between those that are not, since pyarrow writes one behind the other.
    ends = [*begins[shared].tolist(), len(body)]
    starts = [0, *(begins[shared] + words[shared]).tolist()]
    pieces = [body[start:end].data for start, end in zip(starts, ends, strict=True)]
    return b"".join([head, bytes(_WORD * zeros), *pieces])
