"""Looking messages up: by id, by key, by the number in an offsetMsgId.

By key or id a message is found as soon as it is accepted: one that still waits is shown as it lies in the log,
without a place in its queue (RocketMQ finds it only when it is due). What has been compacted away from the log's
tail is found by `timeball pending`, not here: it is no record of the log any more.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.parts import in_thread
from timeball.errors import OutOfRange
from timeball.key_hash import hash_text
from timeball.message import Int64Array, Kind
from timeball.protocols.remoting.calls import Call, Handlers, Refused, Reply
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.codec.records import Host, encode_stored
from timeball.protocols.remoting.site import Site

ROWS_MAX = 64  # RocketMQ's maxMsgsNumBatch: of one key's messages, the newest
CANDIDATES_MAX = 4_096  # rows with the key's hash that are opened
BORN_HOST = Host(bytes(4), 0)
VISIBLE, WAITING = [Kind.MESSAGE, Kind.RELEASE], [Kind.PROMISE, Kind.LEVEL_PROMISE]


class _Query(msgspec.Struct, rename="camel"):
    topic: str
    key: str
    max_num: int = 32
    begin_timestamp: int = 0
    end_timestamp: int = (1 << 63) - 1
    unique_key_query: bool = msgspec.field(name="_UNIQUE_KEY_QUERY", default=False)


class _View(msgspec.Struct):
    offset: int


class Queries:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {RequestCode.QUERY_MESSAGE: self._query, RequestCode.VIEW_MESSAGE_BY_ID: self._view}

    async def _query(self, call: Call) -> Reply:
        fields = call.fields(_Query)
        parts = self._site.broker.parts
        rows = await in_thread(parts.reader_thread, self._find, fields)
        if not rows.num_rows:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, "can not find message, maybe time range not correct")
        body = encode_stored(rows, store_host=self._site.store_host(call.connection), born_host=BORN_HOST)
        ext = {
            "indexLastUpdateTimestamp": str(parts.clock.now_ms()),
            "indexLastUpdatePhyoffset": str(parts.reader.next_seq),
        }
        return call.answer(ext=ext, body=body)

    def _find(self, fields: _Query) -> pa.RecordBatch:
        """Matching rows, the newest ones, in the log's order (reader thread)."""
        parts = self._site.broker.parts
        seqs = parts.key_index.find(hash_text(pa.array([fields.key], pa.string())))[-CANDIDATES_MAX:]
        rows = parts.reader.take(seqs)
        if fields.unique_key_query:
            named = pc.equal(rows.column("unique_key"), fields.key)
        else:
            named = _has_key(rows.column("keys"), fields.key)
        mask = pc.and_(named.fill_null(False), _within(rows, fields))
        found = rows.filter(pc.and_(mask, _of_topic(rows, fields.topic)))
        kinds = found.column("kind").to_numpy()
        visible = np.isin(kinds, VISIBLE)
        if not visible.any():
            visible = np.isin(kinds, WAITING)
        chosen = np.flatnonzero(visible)[-max(1, min(fields.max_num, ROWS_MAX)) :]
        return found.take(pa.array(chosen))

    async def _view(self, call: Call) -> Reply:
        seq = call.fields(_View).offset
        parts = self._site.broker.parts
        rows = await in_thread(parts.reader_thread, self._read, np.array([seq], dtype=np.int64))
        if rows is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {seq}")
        body = encode_stored(rows, store_host=self._site.store_host(call.connection), born_host=BORN_HOST)
        return call.answer(body=body)

    def _read(self, seqs: Int64Array) -> pa.RecordBatch | None:
        reader = self._site.broker.parts.reader
        try:
            rows = reader.take(seqs)
        except OutOfRange:
            return None
        return rows if rows.column("kind")[0].as_py() in (*VISIBLE, *WAITING) else None


def _has_key(keys: pa.Array, key: str) -> pa.Array:
    """Rows one of whose blank-separated keys this is."""
    padded = pc.binary_join_element_wise("", keys, "", " ")
    return pc.match_substring(padded, f" {key} ")


def _within(rows: pa.RecordBatch, fields: _Query) -> pa.Array:
    stored = rows.column("store_ms").to_numpy()
    return pa.array((stored >= fields.begin_timestamp) & (stored <= fields.end_timestamp))


def _of_topic(rows: pa.RecordBatch, topic: str) -> pa.Array:
    """A message that waits for a level stands under the schedule's topic, its own in a property."""
    real = pc.match_substring(rows.column("properties"), f"REAL_TOPIC\x01{topic}\x02")
    waits = pa.array(rows.column("kind").to_numpy() == Kind.LEVEL_PROMISE)
    return pc.or_(pc.equal(rows.column("topic"), topic), pc.and_(waits, real.fill_null(False)))
