"""Queries: find messages by id, by key, or by the number in an offsetMsgId.

A message can be found by key or id as soon as it is accepted. A pending message is returned as it is in the log,
without an offset in its queue (RocketMQ finds it only when it is due). A pending message that was compacted away from
the log's tail is no longer a row of the log. `timeball pending` finds it, this module does not.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply, store_host
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.records import encode_stored
from timeball.edges.remoting.codec.sends import Int64
from timeball.edges.shared.error_codes import Refused
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model.access import Verb
from timeball.model.errors import OutOfRange
from timeball.model.key_hash import hash_text
from timeball.model.message import Int64Array, Kind, byte_lengths

ROWS_MAX = 64  # RocketMQ's maxMsgsNumBatch: the newest messages of a key
CANDIDATES_MAX = 4_096  # rows with the key's hash that are read
OPENED_AT_ONCE = 32  # of these rows, since each may have a body of 4 MiB
BYTES_MAX = 8 * 1024 * 1024  # bodies of one answer, or one larger body. Clients close at 16 MiB
VISIBLE, WAITING = [Kind.MESSAGE, Kind.RELEASE], [Kind.SCHEDULED, Kind.MOVED]


class _Query(msgspec.Struct, rename="camel"):
    topic: str
    key: str
    max_num: int = 32
    begin_timestamp: int = 0
    end_timestamp: int = (1 << 63) - 1
    unique_key_query: bool = msgspec.field(name="_UNIQUE_KEY_QUERY", default=False)
    index_type: str = ""  # from 5.x tools: "U" asks for an id, as `_UNIQUE_KEY_QUERY` does


class _View(msgspec.Struct):
    offset: Int64


class _Newest:
    """The newest rows that fit into one answer. Pieces are added from the newest on, each in the log's order."""

    def __init__(self, rows_max: int) -> None:
        self._pieces: list[pa.RecordBatch] = []
        self._rows, self._rows_max, self._bytes = 0, rows_max, 0
        self.is_full = False

    def add(self, rows: pa.RecordBatch) -> None:
        if self.is_full or not rows.num_rows:
            return
        sizes = self._bytes + np.cumsum(byte_lengths(rows.column("body"))[::-1])
        fit = min(int(np.searchsorted(sizes, BYTES_MAX, side="right")), self._rows_max - self._rows)
        fit = max(fit, 0 if self._rows else 1)
        self.is_full = fit < rows.num_rows or self._rows + fit == self._rows_max
        if fit:
            self._pieces.insert(0, rows.slice(rows.num_rows - fit))
            self._rows, self._bytes = self._rows + fit, int(sizes[fit - 1])

    def rows(self) -> pa.RecordBatch | None:
        return pa.concat_batches(self._pieces) if self._pieces else None


class Queries:
    """Serves the queries for messages."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self.handlers: Handlers = {
            RequestCode.QUERY_MESSAGE: self._query,
            RequestCode.VIEW_MESSAGE_BY_ID: self._view,
        }

    async def _query(self, call: Call) -> Reply:
        fields = call.fields(_Query)
        rows = await in_thread(self._context.broker.threads.reader, self._find, fields)
        if rows is None:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, "can not find message, maybe time range not correct")
        body = encode_stored(rows, store_host=store_host(self._context, call.connection))
        ext = {
            "indexLastUpdateTimestamp": str(self._context.broker.clock.now_ms()),
            "indexLastUpdatePhyoffset": str(self._context.broker.log.reader.next_seq),
        }
        return call.answer(ext=ext, body=body)

    def _find(self, fields: _Query) -> pa.RecordBatch | None:
        """Return the newest matching rows in the log's order, or None if there are none (reader thread)."""
        seqs = self._context.broker.log.key_index.find_rows(hash_text(pa.array([fields.key], pa.string())))[
            -CANDIDATES_MAX:
        ]
        rows_max = max(1, min(fields.max_num, ROWS_MAX))
        visible, waiting = _Newest(rows_max), _Newest(rows_max)
        for end in range(len(seqs), 0, -OPENED_AT_ONCE):
            found = _matching(
                self._context.broker.log.reader.read_rows(seqs[max(0, end - OPENED_AT_ONCE) : end]), fields
            )
            visible.add(found.filter(pa.array(np.isin(found.column("kind").to_numpy(), VISIBLE))))
            waiting.add(found.filter(_waits(found)))
            if visible.is_full:
                break
        rows = visible.rows()
        return waiting.rows() if rows is None else rows

    async def _view(self, call: Call) -> Reply:
        return call.answer(body=await stored_message(self._context, call, call.fields(_View).offset))


async def stored_message(context: RemotingContext, call: Call, seq: int) -> bytes:
    """Return the message with this sequence number in RocketMQ's stored form. Raises Refused, Forbidden."""
    rows = await in_thread(
        context.broker.threads.reader, _read, context.broker.log.reader, np.array([seq], dtype=np.int64)
    )
    if rows is None:
        raise Refused(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {seq}")
    context.broker.policy.allow(call.caller, Verb.RECEIVE, topic=rows.column("topic")[0].as_py())
    return encode_stored(rows, store_host=store_host(context, call.connection))


def _read(reader: LogReader, seqs: Int64Array) -> pa.RecordBatch | None:
    try:
        rows = reader.read_rows(seqs)
    except OutOfRange:
        return None
    return rows if rows.column("kind")[0].as_py() in VISIBLE or _waits(rows)[0].as_py() else None


def _waits(rows: pa.RecordBatch) -> pa.Array:
    """Return which rows gave a message a due time. Half messages have none."""
    promised = np.isin(rows.column("kind").to_numpy(), WAITING)
    promised &= np.asarray(
        pc.or_(pc.not_equal(rows.column("kind"), Kind.MOVED), rows.column("from_due_ms").is_valid())
    )
    return pc.and_(pa.array(promised), rows.column("due_ms").is_valid())


def _matching(rows: pa.RecordBatch, fields: _Query) -> pa.RecordBatch:
    if fields.unique_key_query or fields.index_type == "U":
        named = pc.equal(rows.column("unique_key"), fields.key)
    else:
        named = _has_key(rows.column("keys"), fields.key)
    mask = pc.and_(named.fill_null(False), _within(rows, fields))
    return rows.filter(pc.and_(mask, _of_topic(rows, fields.topic)))


def _has_key(keys: pa.Array, key: str) -> pa.Array:
    """Return which rows have this key among their blank-separated keys."""
    padded = pc.binary_join_element_wise("", keys, "", " ")
    return pc.match_substring(padded, f" {key} ")


def _within(rows: pa.RecordBatch, fields: _Query) -> pa.Array:
    stored = rows.column("store_ms").to_numpy()
    return pa.array((stored >= fields.begin_timestamp) & (stored <= fields.end_timestamp))


def _of_topic(rows: pa.RecordBatch, topic: str) -> pa.Array:
    """Return which rows belong to a topic. A pending message with a level has its own topic in a property."""
    real = pc.match_substring(rows.column("properties"), f"REAL_TOPIC\x01{topic}\x02")
    waits = pa.array(np.isin(rows.column("kind").to_numpy(), WAITING))
    return pc.or_(pc.equal(rows.column("topic"), topic), pc.and_(waits, real.fill_null(False)))
