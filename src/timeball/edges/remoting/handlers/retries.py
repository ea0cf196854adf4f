"""Messages that a consumer sends back: failed messages to be retried, and replies to requests (request-reply).

A consumer returns a failed message (CONSUMER_SEND_MSG_BACK), or sends it to a %RETRY% topic itself.
broker/consuming/retry.py decides where the message goes. `Retries` reads a returned message again from the log and
sends a copy. The client identifies the message by its sequence number, which it got as the physical offset. Nothing
else that the client states about the message is trusted.

In request-reply, the broker pushes a consumer's reply to the producer that waits for it:

    producer --- request, REPLY_TO_CLIENT=its id, CORRELATION_ID ---> topic ---> consumer
    producer <------- PUSH_REPLY_MESSAGE_TO_CLIENT (326) ------------ broker <--- SEND_REPLY_MESSAGE (324, 325)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import pyarrow as pa

from timeball.broker.accepting.ingress import AsyncBatcher
from timeball.broker.consuming import retry
from timeball.broker.registry.groups import times_max
from timeball.broker.registry.rates import Stat, of_group
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply, address, store_host
from timeball.edges.remoting.codec import delays
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, Int32, text
from timeball.edges.remoting.codec.records import Host, offset_msg_id
from timeball.edges.remoting.codec.sends import TRACED, LongFields, SendFields
from timeball.edges.remoting.connection import Connection
from timeball.edges.shared.error_codes import Refused
from timeball.io.threads import in_thread
from timeball.model import limits
from timeball.model.access import Verb
from timeball.model.errors import OutOfRange, TimeballError, Unavailable
from timeball.model.message import SEND_COLUMNS, Kind, decode_properties, encode_properties
from timeball.model.rules import is_reply_topic, reply_topic

# ---- retries of failed messages ------------------------------------------------------------------------------

HAS_TIMES_MAX_VERSION = 121  # MQVersion.V3_4_9: older clients send no maxReconsumeTimes
VISIBLE = [Kind.MESSAGE, Kind.RELEASE]
# So many messages of the largest size fit into one request. A larger batch would be refused as a whole, including the
# messages of other clients.
RETURNS_PER_BATCH = limits.REQUEST_BYTES_MAX // (limits.BODY_BYTES_MAX + 64 * 1024)
# The columns from which the destination is decided.
_DECISION_COLUMNS = ["kind", "topic", "properties", "reconsume_times"]
# The columns that the copy has unchanged.
COPIED_COLUMNS = ("body", "tag", "keys", "unique_key", "born_ms", "born_host", "flag", "sys_flag")


class _SendBack(msgspec.Struct):
    offset: int
    group: str
    delayLevel: Int32 = 0  # noqa: N815  RocketMQ's names
    maxReconsumeTimes: Int32 | None = None  # noqa: N815


class _Returned(NamedTuple):
    """A returned message: its request, and the settings of its group."""

    call: Call
    fields: _SendBack
    retry_queues: int
    times_max: int  # attempts before the message becomes a dead letter
    store_host: Host


class Retries:
    """Serves CONSUMER_SEND_MSG_BACK. `is_orderly(group)`: whether members hold queue locks, as orderly consumers do."""

    def __init__(
        self, context: RemotingContext, is_orderly: Callable[[str], bool] = lambda group: False
    ) -> None:
        self._context, self._is_orderly = context, is_orderly
        self._batcher: AsyncBatcher[_Returned, None] = AsyncBatcher(self._send_copies, RETURNS_PER_BATCH)
        self.handlers: Handlers = {RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back}

    async def send_back(self, call: Call) -> Reply:
        """Serve CONSUMER_SEND_MSG_BACK: deliver the message at `offset` again, later, or as a dead letter.

        Durable when answered. Raises GroupNotFound, Refused (no such message), Forbidden, OverLimit, InvalidMessage.
        """
        fields = call.fields(_SendBack)
        retry_queues, attempts_max = self._retry_limits(
            fields.group, call.command.version, fields.maxReconsumeTimes
        )
        if retry_queues <= 0:
            # As in RocketMQ: a group without retry queues has no retries. No copy is sent, and the request succeeds.
            return call.answer()
        host = store_host(self._context, call.connection)
        await self._batcher.put(_Returned(call, fields, retry_queues, attempts_max, host))
        return call.answer()

    async def _send_copies(self, returned_messages: list[_Returned]) -> list[TimeballError | None]:
        """Read the messages again, decide where each goes, and send the copies as one batch.

        Returns for each message its error, or None if its copy is durable.
        """
        outcomes: list[TimeballError | None] = [None] * len(returned_messages)
        rows = await self._read([each.fields.offset for each in returned_messages])
        destinations = []
        for index, (row, each) in enumerate(
            zip(rows.select(_DECISION_COLUMNS).to_pylist(), returned_messages, strict=True)
        ):
            if row["kind"] not in VISIBLE:
                outcomes[index] = _not_found(each.fields.offset)
                continue
            destination = _decide_destination(row, each)
            try:
                # The sequence number may be of any row: returning it must not copy a row that the client may not read.
                self._context.broker.policy.allow(each.call.caller, Verb.RECEIVE, topic=row["topic"])
                self._context.broker.policy.ensure_return_topic(
                    destination.topic, 1 if destination.is_dead_letter else each.retry_queues
                )
            except TimeballError as error:
                outcomes[index] = error
            else:
                destinations.append(destination)
        if destinations:
            accepted_rows = rows.filter(pa.array([outcome is None for outcome in outcomes]))
            await self._context.broker.send_again(_build_copies(accepted_rows, destinations))
            accepted_messages = [
                each for each, outcome in zip(returned_messages, outcomes, strict=True) if outcome is None
            ]
            self._count_returns(accepted_rows, accepted_messages)
        return outcomes

    def _count_returns(self, rows: pa.RecordBatch, returned_messages: list[_Returned]) -> None:
        """Count the returned messages by topic and group. `rows` are the messages, in the same order."""
        for topic, each in zip(rows.column("topic").to_pylist(), returned_messages, strict=True):
            key = of_group(topic, each.fields.group)
            self._context.broker.rates.add(Stat.SNDBCK_PUT_NUMS, key, 1)

    def redirect(
        self,
        topic: str,
        properties: dict[str, str],
        reconsume_times: int | None,
        max_reconsume_times: int | None,
        version: int,
    ) -> retry.Destination:
        """Decide the destination of a message that a client sends to a %RETRY% topic. Raises GroupNotFound, Forbidden.

        `properties` are those of the message, `version` is the client's. `reconsume_times` and `max_reconsume_times`
        are from the header of the send. A count that is missing there, or reconsume times of 0, are read from the
        properties.
        """
        group = retry.group_of(topic)
        if max_reconsume_times is None:
            max_reconsume_times = _int_property(properties, "MAX_RECONSUME_TIMES")
        retry_queues, attempts_max = self._retry_limits(group, version, max_reconsume_times)
        destination = retry.resend(
            group,
            properties=properties,
            delay_level=_int_property(properties, delays.LEVEL) or 0,
            reconsume_times=reconsume_times or _int_property(properties, "RECONSUME_TIME") or 0,
            times_max=attempts_max,
            in_order=self._is_orderly(group),
        )
        self._context.broker.policy.ensure_return_topic(
            destination.topic, 1 if destination.is_dead_letter else retry_queues
        )
        return destination

    def _retry_limits(self, group: str, version: int, client_times_max: int | None) -> tuple[int, int]:
        """Return a group's number of retry queues, and its maximum number of attempts. Raises GroupNotFound.

        `client_times_max` is the maximum that the client requests. It has no effect for a client of an old `version`.
        """
        config = self._context.broker.tables.groups.get(group)
        requested_times_max = client_times_max if version >= HAS_TIMES_MAX_VERSION else None
        return config.retry_queue_nums, times_max(config.retry_max_times, requested_times_max)

    async def _read(self, seqs: list[int]) -> pa.RecordBatch:
        """Read the rows with these sequence numbers. Raises Refused if one of them is missing."""
        reader = self._context.broker.log.reader
        outside_seqs = [seq for seq in seqs if not reader.first_seq <= seq < reader.next_seq]
        if outside_seqs:
            raise _not_found(outside_seqs[0])
        try:
            seqs_array = np.array(seqs, dtype=np.int64)
            return await in_thread(self._context.broker.threads.reader, reader.read_rows, seqs_array)
        except OutOfRange as error:  # a reserved number, or a segment that retention has deleted since
            raise _not_found(seqs[0]) from error


def _not_found(seq: int) -> Refused:
    return Refused(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {seq}")


def _decide_destination(row: dict[str, Any], returned: _Returned) -> retry.Destination:
    """Decide where a returned message goes next: its retry topic with a delay level, or the dead-letter topic."""
    fields = returned.fields
    return retry.next_copy_of_returned(
        fields.group,
        topic=row["topic"],
        properties=decode_properties(row["properties"] or ""),
        reconsume_times=row["reconsume_times"] or 0,
        message_id=offset_msg_id(returned.store_host, fields.offset),
        delay_level=fields.delayLevel,
        times_max=returned.times_max,
    )


def _build_copies(rows: pa.RecordBatch, destinations: list[retry.Destination]) -> pa.RecordBatch:
    """Build the copies of returned messages as a batch of SEND_COLUMNS, one for each row.

    Topic, properties, reconsume times and delay level are from `destinations`, all other columns from the row.
    """
    changed_columns = {
        "topic": [destination.topic for destination in destinations],
        "properties": [encode_properties(destination.properties) for destination in destinations],
        "reconsume_times": [destination.reconsume_times for destination in destinations],
        "delay_level": [destination.delay_level or None for destination in destinations],
    }
    columns = {name: rows.column(name) for name in COPIED_COLUMNS}
    columns |= {name: pa.array(values, SEND_COLUMNS[name]) for name, values in changed_columns.items()}
    return pa.RecordBatch.from_pydict(columns)


def _int_property(properties: dict[str, str], name: str) -> int | None:
    """Read a numeric property. Returns None if it is missing or not a number."""
    try:
        return int(properties[name])
    except (KeyError, ValueError):
        return None


# ---- request-reply -------------------------------------------------------------------------------------------
# A request is an ordinary message. The broker adds the name of the cluster to it, from which clients derive the reply
# topic. A reply is not stored: the broker pushes it to the connected producer. The answer to the consumer states
# whether the producer has accepted it. So a reply to a producer that has disconnected is refused at once.

REPLY_TO = "REPLY_TO_CLIENT"
PUSH_TIMEOUT_S = 3.0  # for the producer to accept the reply. Producers wait 3 s by default


class Replies:
    """Serves SEND_REPLY_MESSAGE. Belongs to the event loop."""

    def __init__(self, context: RemotingContext) -> None:
        self._context, self._topic = context, reply_topic(context.cluster_name)
        self.handlers: Handlers = {
            RequestCode.SEND_REPLY_MESSAGE: self._reply_v1,
            RequestCode.SEND_REPLY_MESSAGE_V2: self._reply,
        }

    async def _reply(self, call: Call) -> Reply:
        return await self._push(call, call.fields(SendFields))

    async def _reply_v1(self, call: Call) -> Reply:
        return await self._push(call, cast(SendFields, call.fields(LongFields)))

    async def _push(self, call: Call, fields: SendFields) -> Reply:
        """Push a reply to the producer that waits for it, and answer the consumer.

        Raises Refused if the topic is no reply topic, or if no producer accepts the reply within PUSH_TIMEOUT_S.
        """
        if not is_reply_topic(fields.topic, self._context.cluster_name):
            # A client with permission for any other topic must not be able to push messages to every client.
            remark = f"replies go to topic[{self._topic}], not to [{fields.topic}]"
            raise Refused(ResponseCode.INVALID_PARAMETER, remark)
        client_id = decode_properties(fields.properties or "").get(REPLY_TO)
        if client_id is None:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"reply message properties[{REPLY_TO}] is null")
        push_command = Command(
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
            ext=self._reply_header(call, fields),
            body=call.command.body,
        )
        try:
            push_answer = await self._find_producer(client_id).request(push_command, PUSH_TIMEOUT_S)
        except Unavailable as error:
            raise _push_failed(client_id, str(error)) from error
        if push_answer.code != ResponseCode.SUCCESS:
            raise _push_failed(client_id, push_answer.remark or f"code {push_answer.code}")
        # A reply has no queue position, but clients fail if these fields are missing.
        position_fields = {"msgId": "0", "queueId": str(max(0, fields.queue_id or 0)), "queueOffset": "0"}
        return call.answer(ext=position_fields | TRACED)

    def _find_producer(self, client_id: str) -> Connection:
        """Find the connection of a producer by client id. Raises Refused."""
        for member in self._context.sessions.all():
            if member.client_id == client_id and member.produces and member.connection.is_open:
                return member.connection
        remark = f"push reply message fail, channel of <{client_id}> not found."
        raise Refused(ResponseCode.SYSTEM_ERROR, remark)

    def _reply_header(self, call: Call, fields: SendFields) -> dict[str, str]:
        """Build RocketMQ's ReplyMessageRequestHeader: the send's fields with long names, and the broker's fields.

        Fields that the consumer has not set are left out.
        """
        fields_by_name: dict[str, Any] = {
            "producerGroup": fields.group,
            "topic": fields.topic,
            "defaultTopic": fields.default_topic,
            "defaultTopicQueueNums": fields.default_queues,
            "queueId": fields.queue_id or 0,
            "sysFlag": fields.sys_flag or 0,
            "bornTimestamp": fields.born_ms or 0,
            "flag": fields.flag or 0,
            "properties": fields.properties,
            "reconsumeTimes": fields.reconsume_times or 0,
            "unitMode": bool(fields.unit_mode),
            "bornHost": call.connection.name,
            "storeHost": address(self._context, call.connection),
            "storeTimestamp": self._context.broker.clock.now_ms(),
        }
        return {name: text(value) for name, value in fields_by_name.items() if value is not None}


def _push_failed(client_id: str, reason: str) -> Refused:
    return Refused(ResponseCode.SYSTEM_ERROR, f"push reply message to {client_id} fail: {reason}")
