"""Serve queries: for messages by key or sequence number, and those to a name server for routes, brokers and topics.

A message is found by its unique key, by KEYS, or by the sequence number in an offsetMsgId, as soon as it is accepted. A
row that gives a message a due time is returned as it is in the log, without a queue offset, also if the message was
cancelled (RocketMQ finds a message only when it is due). A pending message that was compacted away from the tail of the
log is no longer a row of the log. `timeball pending` finds it, but these queries do not.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.registry.topics import INHERIT, READ, WRITE, check_topic
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply, address, store_host
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.records import encode_stored
from timeball.edges.remoting.codec.sends import Int64
from timeball.edges.remoting.connection import Connection
from timeball.edges.remoting.handlers.admin.topics import order_conf
from timeball.edges.shared.error_codes import Refused
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model.access import Verb
from timeball.model.errors import OutOfRange
from timeball.model.key_hash import hash_text
from timeball.model.message import RETRY_PREFIX, Int64Array, Kind, byte_lengths
from timeball.model.rules import AUTO_CREATE_TOPIC, is_reply_topic

# ---- messages ------------------------------------------------------------------------------------------------

ROWS_MAX = 64  # RocketMQ's maxMsgsNumBatch: only the newest messages of a key are returned
CANDIDATES_MAX = 4_096  # rows with the key's hash that are read at most
ROWS_PER_READ = 32  # few, since each may have a body of 4 MiB
BYTES_MAX = 8 * 1024 * 1024  # bodies of one answer, or one larger body. Clients disconnect at 16 MiB
VISIBLE, SCHEDULING_KINDS = [Kind.MESSAGE, Kind.RELEASE], [Kind.SCHEDULED, Kind.MOVED]


class _Query(msgspec.Struct, rename="camel"):
    topic: str
    key: str
    max_num: int = 32
    begin_timestamp: int = 0
    end_timestamp: int = (1 << 63) - 1
    unique_key_query: bool = msgspec.field(name="_UNIQUE_KEY_QUERY", default=False)
    index_type: str = ""  # of 5.x tools: "U" queries unique keys, as `_UNIQUE_KEY_QUERY` does


class _View(msgspec.Struct):
    offset: Int64


class _NewestRows:
    """Collects the newest rows that fit into one answer. Batches are added newest first. Rows stay in log order."""

    def __init__(self, rows_max: int) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._row_count, self._rows_max, self._bytes = 0, rows_max, 0
        self.is_full = False

    def add(self, rows: pa.RecordBatch) -> None:
        """Add the newest of these rows that still fit. They are older than all rows added before."""
        if self.is_full or not rows.num_rows:
            return
        total_bytes = self._bytes + np.cumsum(byte_lengths(rows.column("body"))[::-1])
        fit_count = min(
            int(np.searchsorted(total_bytes, BYTES_MAX, side="right")), self._rows_max - self._row_count
        )
        if not self._row_count:
            fit_count = max(fit_count, 1)  # one row is always returned, even if larger than BYTES_MAX
        self.is_full = fit_count < rows.num_rows or self._row_count + fit_count == self._rows_max
        if fit_count:
            self._batches.insert(0, rows.slice(rows.num_rows - fit_count))
            self._row_count, self._bytes = self._row_count + fit_count, int(total_bytes[fit_count - 1])

    def rows(self) -> pa.RecordBatch | None:
        return pa.concat_batches(self._batches) if self._batches else None


class Queries:
    """Serves the queries for messages."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self.handlers: Handlers = {
            RequestCode.QUERY_MESSAGE: self._query,
            RequestCode.VIEW_MESSAGE_BY_ID: self._view_message,
        }

    async def _query(self, call: Call) -> Reply:
        """Serve QUERY_MESSAGE: the newest messages with a key or unique key. Raises Refused if there are none."""
        fields = call.fields(_Query)
        rows = await in_thread(self._context.broker.threads.reader, self._find, fields)
        await self._context.broker.confirm_lead()
        if rows is None:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, "can not find message, maybe time range not correct")
        body = encode_stored(rows, store_host=store_host(self._context, call.connection))
        ext = {
            "indexLastUpdateTimestamp": str(self._context.broker.clock.now_ms()),
            "indexLastUpdatePhyoffset": str(self._context.broker.log.reader.next_seq),
        }
        return call.answer(ext=ext, body=body)

    def _find(self, fields: _Query) -> pa.RecordBatch | None:
        """Find the newest matching rows, in log order. Runs in the reader thread. Returns None if there is no match.

        Visible messages are returned if any of them match, otherwise the rows that give a message a due time.
        """
        key_hash = hash_text(pa.array([fields.key], pa.string()))
        seqs = self._context.broker.log.key_index.find_rows(key_hash)[-CANDIDATES_MAX:]
        rows_max = max(1, min(fields.max_num, ROWS_MAX))
        visible, scheduling = _NewestRows(rows_max), _NewestRows(rows_max)
        for end in range(len(seqs), 0, -ROWS_PER_READ):
            matches = _select_matches(
                self._context.broker.log.reader.read_rows(seqs[max(0, end - ROWS_PER_READ) : end]), fields
            )
            visible.add(matches.filter(pa.array(np.isin(matches.column("kind").to_numpy(), VISIBLE))))
            scheduling.add(matches.filter(_sets_due_time(matches)))
            if visible.is_full:
                break
        rows = visible.rows()
        return scheduling.rows() if rows is None else rows

    async def _view_message(self, call: Call) -> Reply:
        return call.answer(body=await stored_message(self._context, call, call.fields(_View).offset))


async def stored_message(context: RemotingContext, call: Call, seq: int) -> bytes:
    """Read a message by sequence number, and encode it in RocketMQ's stored form.

    Raises Refused if there is no such message, or Forbidden if the caller may not read its topic.
    """
    rows = await in_thread(
        context.broker.threads.reader,
        _read_message,
        context.broker.log.reader,
        np.array([seq], dtype=np.int64),
    )
    await context.broker.confirm_lead()
    if rows is None:
        raise Refused(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {seq}")
    context.broker.policy.allow(call.caller, Verb.RECEIVE, topic=rows.column("topic")[0].as_py())
    return encode_stored(rows, store_host=store_host(context, call.connection))


def _read_message(reader: LogReader, seqs: Int64Array) -> pa.RecordBatch | None:
    """Read one row, or return None if it is not in the log or is not a message."""
    try:
        rows = reader.read_rows(seqs)
    except OutOfRange:
        return None
    return rows if rows.column("kind")[0].as_py() in VISIBLE or _sets_due_time(rows)[0].as_py() else None


def _sets_due_time(rows: pa.RecordBatch) -> pa.Array:
    """Return a mask of the rows that give a message a due time: SCHEDULED, or MOVED by a reschedule or a commit.

    A MOVED row without `from_due_ms` only changes where the message is stored. A half message has no due time.
    """
    is_scheduling = np.isin(rows.column("kind").to_numpy(), SCHEDULING_KINDS)
    is_scheduling &= np.asarray(
        pc.or_(pc.not_equal(rows.column("kind"), Kind.MOVED), rows.column("from_due_ms").is_valid())
    )
    return pc.and_(pa.array(is_scheduling), rows.column("due_ms").is_valid())


def _select_matches(rows: pa.RecordBatch, fields: _Query) -> pa.RecordBatch:
    """Select the rows that match the query exactly: the key index only compares hashes."""
    if fields.unique_key_query or fields.index_type == "U":
        has_key = pc.equal(rows.column("unique_key"), fields.key)
    else:
        has_key = _has_key(rows.column("keys"), fields.key)
    mask = pc.and_(has_key.fill_null(False), _is_stored_between(rows, fields))
    return rows.filter(pc.and_(mask, _is_of_topic(rows, fields.topic)))


def _has_key(keys: pa.Array, key: str) -> pa.Array:
    """Return a mask of the rows that have this key among their space-separated KEYS."""
    padded = pc.binary_join_element_wise("", keys, "", " ")
    return pc.match_substring(padded, f" {key} ")


def _is_stored_between(rows: pa.RecordBatch, fields: _Query) -> pa.Array:
    store_ms = rows.column("store_ms").to_numpy()
    return pa.array((store_ms >= fields.begin_timestamp) & (store_ms <= fields.end_timestamp))


def _is_of_topic(rows: pa.RecordBatch, topic: str) -> pa.Array:
    """Return a mask of the rows of a topic. Rows that schedule by delay level have it in a property."""
    has_real_topic = pc.match_substring(rows.column("properties"), f"REAL_TOPIC\x01{topic}\x02")
    is_scheduling = pa.array(np.isin(rows.column("kind").to_numpy(), SCHEDULING_KINDS))
    return pc.or_(
        pc.equal(rows.column("topic"), topic), pc.and_(is_scheduling, has_real_topic.fill_null(False))
    )


# ---- the name server: routes, and the lists of brokers and topics --------------------------------------------
# There is one broker, so every route contains it. A topic that does not exist yet has no route. A producer then asks
# for the route of RocketMQ's template topic TBW102 and sends to it, and the first message creates the topic. The names
# of the cluster and of the broker are topics too, because administration tools ask for their routes.

MASTER_ID = "0"


class _Topic(msgspec.Struct):
    topic: str


class Routes:
    """Serves the requests to a name server."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self.handlers: Handlers = {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._cluster,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._topics,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics,
        }

    def _route(self, call: Call) -> Reply:
        """Serve GET_ROUTEINFO_BY_TOPIC. Raises Refused if the topic has no route."""
        topic = call.fields(_Topic).topic
        route: dict[str, object] = {
            "queueDatas": [self._queue_data(topic)],
            "brokerDatas": [self._broker_data(call.connection)],
            "filterServerTable": {},
        }
        existing_topic = self._context.broker.tables.topics.find_topic(topic)
        if existing_topic is not None and existing_topic.config.order:
            route["orderTopicConf"] = order_conf(existing_topic, self._context.broker_name)
        return call.answer_json(route)

    def _queue_data(self, topic: str) -> dict[str, object]:
        """Create RocketMQ's QueueData of a topic. Raises Refused if the topic has no route, or InvalidName."""
        context, settings = self._context, self._context.broker.settings
        read = write = settings.queues_per_topic
        perm, sys_flag = READ | WRITE, 0
        existing_topic = context.broker.tables.topics.find_topic(topic)
        system_topic_queues = context.broker.policy.system_topic_queues(topic)
        if existing_topic is not None:
            read, write, perm = existing_topic.read_queues, existing_topic.write_queues, existing_topic.perm
            sys_flag = existing_topic.config.sys_flag
        elif topic.startswith(RETRY_PREFIX):
            # A consumer asks before its first heartbeat has created the topic. After a refusal it would ask again only
            # after 20 to 30 s.
            check_topic(topic)
            read = write = 1
        elif topic == AUTO_CREATE_TOPIC and context.broker.policy.has_template:
            perm |= INHERIT  # tells a producer that it may create a topic from the template
        elif system_topic_queues is not None:
            read = write = system_topic_queues
        elif is_reply_topic(topic, context.cluster_name):
            # Of a namespace. Replies are not stored, so no topic is created.
            check_topic(topic)
            read = write = 1
        else:
            check_topic(topic)
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST, f"No topic route info in name server for the topic: {topic}"
            )
        return {
            "brokerName": context.broker_name,
            "readQueueNums": read,
            "writeQueueNums": write,
            "perm": context.broker.policy.permission(topic, perm),
            "topicSysFlag": sys_flag,
            "topicSynFlag": 0,
        }

    def _broker_data(self, connection: Connection) -> dict[str, object]:
        """Create RocketMQ's BrokerData: this broker, with its address for the client of this connection."""
        context = self._context
        return {
            "cluster": context.cluster_name,
            "brokerName": context.broker_name,
            "brokerAddrs": {MASTER_ID: address(context, connection)},
        }

    def _cluster(self, call: Call) -> Reply:
        """Serve GET_BROKER_CLUSTER_INFO: a cluster with this broker alone."""
        context = self._context
        broker = self._broker_data(call.connection)
        return call.answer_json(
            {
                "brokerAddrTable": {context.broker_name: broker},
                "clusterAddrTable": {context.cluster_name: [context.broker_name]},
            }
        )

    def _topics(self, call: Call) -> Reply:
        context = self._context
        names = {topic.name for topic in context.broker.tables.topics.all()}
        return call.answer_json({"topicList": sorted(names | {context.cluster_name, context.broker_name})})
