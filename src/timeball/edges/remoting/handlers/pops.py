"""Serve POP_MESSAGE and related requests: the broker leases single messages, so members need not divide the queues.

    POP_MESSAGE                  messages, and the fields of their check points (codec/records.py)
    ACK_MESSAGE, BATCH_ACK_…     acknowledge. NO_MESSAGE for a check point that is no longer valid
    CHANGE_MESSAGE_INVISIBLETIME extend or shorten the invisible time. Clients also report failures with it
    NOTIFICATION                 whether there is a message, without a lease

A message from the group's retry topic is delivered under the requested topic. Its check point is a property of the
message, since the client could not build it from the header. If a client disconnects, the leases of messages popped for
it end at once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Iterable, Iterator

import msgspec
import pyarrow as pa

from timeball.broker.consuming.requests import Receipt, Received, ReceiveRequest
from timeball.broker.filters import EVERYTHING, TAG, Filter
from timeball.broker.filters.compiler import FilterCache
from timeball.broker.registry.topics import Topic
from timeball.edges.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    compile_subscription,
    illegal_queue_error,
    store_host,
)
from timeball.edges.remoting.codec import records
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import text
from timeball.edges.remoting.codec.implementation import PYTHON, Codec
from timeball.edges.remoting.codec.records import CheckPoint, Position
from timeball.edges.shared.error_codes import Refused
from timeball.model.access import Caller, Verb
from timeball.model.errors import OutOfRange, OverLimit
from timeball.model.message import RETRY_PREFIX, decode_properties, encode_properties

ROWS_MAX = 32  # RocketMQ's limit
ATTEMPT_ID_CHARACTERS_MAX = 128  # clients send a UUID
ACKNOWLEDGED_AT_ONCE = 256  # messages of a batch between two turns of the loop, about two milliseconds


class _Queue(msgspec.Struct, rename="camel"):
    consumer_group: str
    topic: str
    queue_id: int


class _Pop(_Queue, rename="camel", kw_only=True):
    max_msg_nums: int
    invisible_time: int
    poll_time: int = 0
    init_mode: int = 0
    exp_type: str | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: str = ""


class _Notification(_Queue, rename="camel", kw_only=True):
    poll_time: int = 0
    order: bool = False
    attempt_id: str = ""


class _Ack(_Queue, rename="camel", kw_only=True):
    extra_info: str
    offset: int


class _ChangeInvisible(_Ack, rename="camel", kw_only=True):
    invisible_time: int


class _BatchAck(msgspec.Struct):
    """The acknowledgements for one queue, with RocketMQ's short names."""

    c: str  # consumerGroup
    t: str  # topic
    so: int  # startOffset
    q: int  # queueId
    pt: int  # popTime
    b: str  # bitSet
    r: str = records.NORMAL  # retry


class _BatchAcks(msgspec.Struct, rename="camel"):
    acks: list[_BatchAck] = []


class Pops:
    """Serves POP_MESSAGE, NOTIFICATION and the requests that contain a check point."""

    def __init__(self, context: RemotingContext, codec: Codec = PYTHON) -> None:
        self._codec = codec
        self._context = context
        self._broker = context.broker
        self._filters = FilterCache()
        self.handlers: Handlers = {
            RequestCode.POP_MESSAGE: self._pop,
            RequestCode.ACK_MESSAGE: self._ack,
            RequestCode.BATCH_ACK_MESSAGE: self._batch_ack,
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME: self._change_invisible,
            RequestCode.NOTIFICATION: self._notification,
        }

    # -- leases ------------------------------------------------------------------------------------------------

    async def _pop(self, call: Call) -> Reply:
        """Serve POP_MESSAGE: lease messages, and wait for them up to the poll time. Raises Refused, Forbidden."""
        fields = call.fields(_Pop)
        if not 1 <= fields.max_msg_nums <= ROWS_MAX:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"maxMsgNums {fields.max_msg_nums}: the broker's pop message's num is 1 to {ROWS_MAX}",
            )
        if len(fields.attempt_id) > ATTEMPT_ID_CHARACTERS_MAX:
            raise Refused(
                ResponseCode.INVALID_PARAMETER, f"attemptId: at most {ATTEMPT_ID_CHARACTERS_MAX} characters"
            )
        topic = self._check_readable(fields, call.caller)
        request = ReceiveRequest(
            fields.consumer_group, fields.topic, queue_id=max(-1, fields.queue_id), rows=fields.max_msg_nums,
            invisible_ms=fields.invisible_time, wanted=_filter_of(self._filters, fields, topic),
            from_max=fields.init_mode == 1, in_order=fields.order, attempt_id=fields.attempt_id if fields.order else "",
        )  # fmt: skip
        try:
            with call.connection.cancelled_on_close():
                popped = await self._broker.consuming.receive(request, max(0, fields.poll_time))
        except OverLimit as error:
            # POLLING_FULL makes the client pause before its next request.
            return call.answer(ResponseCode.POLLING_FULL, str(error), ext=_answer_header(request, None))
        if not popped.rows.num_rows:
            code = ResponseCode.POLLING_TIMEOUT if fields.poll_time > 0 else ResponseCode.PULL_NOT_FOUND
            return call.answer(code, code.name, ext=_answer_header(request, popped))
        if not call.connection.is_open:
            self._broker.consuming.return_unseen(popped.receipts)
            return None
        return self._answer_with(call, request, popped)

    def _answer_with(self, call: Call, request: ReceiveRequest, popped: Received) -> Reply:
        """Create the answer with the popped messages and the fields of their check points."""
        positions = [
            (records.retry_word(receipt.topic), receipt.queue_id, receipt.offset)
            for receipt in popped.receipts
        ]
        ext = _answer_header(request, popped)
        ext["startOffsetInfo"] = records.start_offset_info(positions)
        ext["msgOffsetInfo"] = records.msg_offset_info(positions)
        if request.in_order:
            ext["orderCountInfo"] = records.order_count_info(positions, popped.times)
        rows = _rows_for_client(popped, request, positions, self._context.broker_name)
        host = store_host(self._context, call.connection)
        return call.answer(ext=ext, body=b"".join(self._codec.encode_each(rows, store_host=host)))

    async def _notification(self, call: Call) -> Reply:
        """Serve NOTIFICATION: wait until there is a message that could be popped, or until the poll time is over."""
        fields = call.fields(_Notification)
        self._check_readable(fields, call.caller)
        request = ReceiveRequest(
            fields.consumer_group, fields.topic, queue_id=max(-1, fields.queue_id), in_order=fields.order
        )
        is_full = has_message = False
        try:
            with call.connection.cancelled_on_close():
                has_message = await self._broker.consuming.wait_for_rows(request, max(0, fields.poll_time))
        except OverLimit:
            is_full = True
        return call.answer(ext={"hasMsg": text(has_message), "pollingFull": text(is_full)})

    def _check_readable(self, fields: _Queue, caller: Caller) -> Topic:
        """Check that the caller may read this queue for its group, and return the topic. A queue id of -1 is any queue.

        Raises Refused, NotFound, Forbidden, InvalidName and OverLimit.
        """
        self._broker.policy.ensure_group(fields.consumer_group, caller)
        topic = self._broker.policy.find_readable_topic(fields.topic, caller)
        if fields.queue_id >= topic.read_queues:
            raise illegal_queue_error(ResponseCode.INVALID_PARAMETER, fields.queue_id, topic)
        return topic

    # -- receipts ----------------------------------------------------------------------------------------------

    def _ack(self, call: Call) -> Reply | Awaitable[Reply]:
        """Serve ACK_MESSAGE. A repeated acknowledgement succeeds, too. Raises Refused, NotFound, InvalidMessage."""
        fields = call.fields(_Ack)
        receipt, _ = self._decode_receipt(fields)
        consuming = self._broker.consuming
        if not consuming.acknowledge_now([receipt])[0] and not consuming.was_ended([receipt])[0]:
            return _answer_not_leased(call, receipt)
        return call.answer() if consuming.saver.save_ms else self._answer_saved(call)

    async def _batch_ack(self, call: Call) -> Reply:
        """Serve BATCH_ACK_MESSAGE. Succeeds if at least one of the receipts is valid or was acknowledged before.

        Raises OutOfRange for too many messages, and InvalidMessage or Forbidden before any message is acknowledged.
        """
        acks = call.body(_BatchAcks).acks
        # An entry without bits counts as one byte, because each entry is checked.
        if sum(max(8, records.bit_count(ack.b)) for ack in acks) > records.BITS_MAX:
            raise OutOfRange(f"more than {records.BITS_MAX} bits in one acknowledgement; split it")
        entries: list[tuple[_BatchAck, list[int]]] = []
        for number, ack in enumerate(acks, 1):  # all are checked before the first message is acknowledged
            self._broker.policy.allow(call.caller, Verb.RECEIVE, topic=ack.t, group=ack.c)
            entries.append((ack, records.decode_bit_set(ack.b)))
            if number % ACKNOWLEDGED_AT_ONCE == 0:
                await asyncio.sleep(0)
        receipts = _receipts_of(entries)
        consuming, is_known = self._broker.consuming, False
        while part := list(itertools.islice(receipts, ACKNOWLEDGED_AT_ONCE)):
            is_known |= any(consuming.acknowledge_now(part)) or any(consuming.was_ended(part))
            if len(part) == ACKNOWLEDGED_AT_ONCE:
                await asyncio.sleep(0)
        if not is_known:
            return call.answer(
                ResponseCode.NO_MESSAGE, "none of these messages is leased under its check point"
            )
        return await self._answer_saved(call)

    async def _answer_saved(self, call: Call) -> Reply:
        """Answer an acknowledgement. Without a save interval (`ack_save_ms` 0), wait first until it is durable."""
        saver = self._broker.consuming.saver
        if not saver.save_ms:
            await saver.save_and_wait()
        return call.answer()

    async def _change_invisible(self, call: Call) -> Reply:
        """Serve CHANGE_MESSAGE_INVISIBLETIME: renew a lease and answer with the fields of its new check point."""
        fields = call.fields(_ChangeInvisible)
        receipt, old_check_point = self._decode_receipt(fields)
        now_ms = self._broker.clock.now_ms()
        new_receipt = await self._broker.consuming.change_invisible_time(
            receipt, fields.invisible_time, new_receipt=True
        )
        if new_receipt is None:
            return _answer_not_leased(call, receipt)
        # The client builds the new check point from these fields. For an orderly group, the pop time does not change,
        # and the invisible time counts from the pop time.
        in_order = old_check_point.revive_queue_id == records.REVIVE_QUEUE_IN_ORDER
        elapsed_ms = now_ms - new_receipt.pop_ms if in_order else 0
        return call.answer(
            ext={
                "popTime": str(new_receipt.pop_ms),
                "invisibleTime": str(fields.invisible_time + elapsed_ms),
                "reviveQid": str(old_check_point.revive_queue_id),
            }
        )

    def _decode_receipt(self, fields: _Ack) -> tuple[Receipt, CheckPoint]:
        """Decode the check point of a request, and build the receipt of its message. Returns both.

        Raises NotFound, Refused, InvalidMessage.
        """
        topic = self._broker.tables.topics.get(fields.topic)
        if not 0 <= fields.queue_id < topic.read_queues:
            raise illegal_queue_error(ResponseCode.MESSAGE_ILLEGAL, fields.queue_id, topic)
        check_point = records.parse_check_point(fields.extra_info)
        topic_name = records.real_topic(fields.topic, fields.consumer_group, check_point.retry)
        return Receipt(
            fields.consumer_group, topic_name, fields.queue_id, fields.offset, check_point.pop_ms
        ), check_point


def _filter_of(filters: FilterCache, fields: _Pop, topic: Topic) -> Filter:
    if not fields.exp or topic.name.startswith(RETRY_PREFIX):
        return EVERYTHING
    return compile_subscription(filters, fields.exp, fields.exp_type or TAG, topic)


def _answer_header(request: ReceiveRequest, popped: Received | None) -> dict[str, str]:
    """Build the header fields that every answer to POP_MESSAGE has."""
    revive = records.REVIVE_QUEUE_IN_ORDER if request.in_order else records.REVIVE_QUEUE
    return {
        "popTime": str(popped.pop_ms if popped else 0),
        "invisibleTime": str(request.invisible_ms),
        "reviveQid": str(revive),
        "restNum": str(popped.rest if popped else 0),
    }


def _rows_for_client(
    popped: Received, request: ReceiveRequest, positions: list[Position], broker_name: str
) -> pa.RecordBatch:
    """Convert the popped rows for the client: rows from the retry topic get the requested topic, and a check point.

    `positions` has the position of each row. A POP_CK that a producer has set is removed, because the client would take
    it for the broker's.
    """
    rows = popped.rows
    properties_texts, topics = rows.column("properties").to_pylist(), rows.column("topic").to_pylist()
    has_check_point = any(records.POP_CK in (text or "") for text in properties_texts)
    if not has_check_point and set(topics) == {request.topic}:
        return rows  # the usual case: no row changes
    first_offsets: dict[tuple[str, int], int] = {}
    for row_index, (retry, queue_id, offset) in enumerate(positions):
        first_offset = first_offsets.setdefault((retry, queue_id), offset)
        properties = decode_properties(properties_texts[row_index] or "")
        properties.pop(records.POP_CK, None)
        if topics[row_index] != request.topic:
            properties[records.POP_CK] = CheckPoint(
                first_offset, popped.pop_ms, request.invisible_ms, records.REVIVE_QUEUE, retry, broker_name,
                queue_id, offset,
            ).encode()  # fmt: skip
        properties_texts[row_index] = encode_properties(properties)
    columns = {"properties": properties_texts, "topic": [request.topic] * len(properties_texts)}
    for name, values in columns.items():
        column_index = rows.schema.get_field_index(name)
        rows = rows.set_column(column_index, rows.schema.field(column_index), pa.array(values, pa.string()))
    return rows


def _receipts_of(entries: Iterable[tuple[_BatchAck, list[int]]]) -> Iterator[Receipt]:
    """Yield the receipts of a batch acknowledgement. Each entry comes with the positions of its set bits."""
    for ack, set_bits in entries:
        topic = records.real_topic(ack.t, ack.c, ack.r)
        for bit in set_bits:
            yield Receipt(ack.c, topic, ack.q, ack.so + bit, ack.pt)


def _answer_not_leased(call: Call, receipt: Receipt) -> Reply:
    """Create the answer for a receipt that is not valid any more."""
    return call.answer(
        ResponseCode.NO_MESSAGE,
        f"offset {receipt.offset} of queue {receipt.queue_id} of {receipt.topic} is not leased since "
        f"{receipt.pop_ms}: it was acknowledged or leased again, or its invisible time is over",
    )
