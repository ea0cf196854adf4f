"""POP: the broker hands out single messages, and a group's members need not divide the queues among themselves.

    POP_MESSAGE                  messages, and the parts of their check points (codec/check_points.py)
    ACK_MESSAGE, BATCH_ACK_…     acknowledge; NO_MESSAGE for a check point that is no longer valid
    CHANGE_MESSAGE_INVISIBLETIME extend or shorten the invisible time. Clients also report failures with it
    NOTIFICATION                 whether there is a message, without taking it

A message from the group's retry topic appears under the topic asked for. Its check point is a property, since the
client could not build it from the header. If a client has gone, messages popped for it are given back at once.
"""

from __future__ import annotations

from typing import cast

import msgspec
import pyarrow as pa

from timeball.broker.consuming.requests import PositionReceipt, Received, ReceiveRequest
from timeball.broker.filters import EVERYTHING, TAG, Filter
from timeball.broker.filters.compiler import FiltersKept
from timeball.broker.registry.topics import Topic
from timeball.edges.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    compiled,
    illegal_queue,
    store_host,
)
from timeball.edges.remoting.codec import check_points
from timeball.edges.remoting.codec.check_points import CheckPoint, Place
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import text
from timeball.edges.remoting.codec.implementation import PYTHON, Codec
from timeball.edges.shared.error_codes import Refused
from timeball.model.access import Caller, Verb
from timeball.model.errors import OutOfRange, OverLimit
from timeball.model.message import RETRY_PREFIX, decode_properties, encode_properties

ROWS_MAX = 32  # RocketMQ's limit


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
    """One queue's part of a batch. RocketMQ shortens the names."""

    c: str  # consumerGroup
    t: str  # topic
    so: int  # startOffset
    q: int  # queueId
    pt: int  # popTime
    b: str  # bitSet
    r: str = check_points.NORMAL  # retry


class _BatchAcks(msgspec.Struct, rename="camel"):
    acks: list[_BatchAck] = []


class Pops:
    """Serves POP_MESSAGE and the requests that contain a check point."""

    def __init__(self, context: RemotingContext, codec: Codec = PYTHON) -> None:
        self._codec = codec
        self._context = context
        self._broker = context.broker
        self._filters = FiltersKept()
        self.handlers: Handlers = {
            RequestCode.POP_MESSAGE: self._pop,
            RequestCode.ACK_MESSAGE: self._ack,
            RequestCode.BATCH_ACK_MESSAGE: self._batch_ack,
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME: self._change_invisible,
            RequestCode.NOTIFICATION: self._notification,
        }

    # -- handing out -------------------------------------------------------------------------------------------

    async def _pop(self, call: Call) -> Reply:
        fields = call.fields(_Pop)
        if not 1 <= fields.max_msg_nums <= ROWS_MAX:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"maxMsgNums {fields.max_msg_nums}: the broker's pop message's num is 1 to {ROWS_MAX}",
            )
        topic = self._readable(fields, call.caller)
        ask = ReceiveRequest(
            fields.consumer_group, fields.topic, queue_id=max(-1, fields.queue_id), rows=fields.max_msg_nums,
            invisible_ms=fields.invisible_time, wanted=_wanted(self._filters, fields, topic),
            from_max=fields.init_mode == 1, in_order=fields.order, attempt_id=fields.attempt_id,
        )  # fmt: skip
        try:
            with call.connection.waits():
                popped = await self._broker.consuming.receive(ask, max(0, fields.poll_time))
        except OverLimit as error:
            # With this code, the client waits before it asks again.
            return call.answer(ResponseCode.POLLING_FULL, str(error), ext=_header(ask, None))
        if not popped.rows.num_rows:
            code = ResponseCode.POLLING_TIMEOUT if fields.poll_time > 0 else ResponseCode.PULL_NOT_FOUND
            return call.answer(code, code.name, ext=_header(ask, popped))
        if not call.connection.is_open:
            self._broker.consuming.not_seen(popped.receipts)
            return None
        return self._found(call, ask, popped)

    def _found(self, call: Call, ask: ReceiveRequest, popped: Received) -> Reply:
        places = [
            (check_points.retry_mark(receipt.topic), receipt.queue_id, receipt.offset)
            for receipt in cast("list[PositionReceipt]", popped.receipts)  # POP's leases are kept in memory
        ]
        header = _header(ask, popped)
        header["startOffsetInfo"] = check_points.start_offset_info(places)
        header["msgOffsetInfo"] = check_points.msg_offset_info(places)
        if ask.in_order:
            header["orderCountInfo"] = check_points.order_count_info(places, popped.times)
        rows = _as_asked(popped, ask, places, self._context.broker_name)
        host = store_host(self._context, call.connection)
        return call.answer(ext=header, body=b"".join(self._codec.encode_each(rows, store_host=host)))

    async def _notification(self, call: Call) -> Reply:
        fields = call.fields(_Notification)
        self._readable(fields, call.caller)
        ask = ReceiveRequest(
            fields.consumer_group, fields.topic, queue_id=max(-1, fields.queue_id), in_order=fields.order
        )
        full = found = False
        try:
            with call.connection.waits():
                found = await self._broker.consuming.wait_for_some(ask, max(0, fields.poll_time))
        except OverLimit:
            full = True
        return call.answer(ext={"hasMsg": text(found), "pollingFull": text(full)})

    def _readable(self, fields: _Queue, caller: Caller) -> Topic:
        self._broker.policy.joined(fields.consumer_group, caller)
        topic = self._broker.policy.readable(fields.topic, caller)
        if fields.queue_id >= topic.read_queues:
            raise illegal_queue(ResponseCode.INVALID_PARAMETER, fields.queue_id, topic)
        return topic

    # -- receipts ----------------------------------------------------------------------------------------------

    def _ack(self, call: Call) -> Reply:
        fields = call.fields(_Ack)
        receipt, _ = self._receipt(fields)
        consuming = self._broker.consuming
        if not consuming.acknowledge_positions([receipt])[0] and not consuming.was_ended([receipt])[0]:
            return _not_valid(call, receipt)
        return call.answer()

    def _batch_ack(self, call: Call) -> Reply:
        receipts: list[PositionReceipt] = []
        for one in call.body(_BatchAcks).acks:
            self._broker.policy.allow(call.caller, Verb.RECEIVE, topic=one.t, group=one.c)
            topic = check_points.real_topic(one.t, one.c, one.r)
            receipts += [
                PositionReceipt(one.c, topic, one.q, one.so + bit, one.pt) for bit in check_points.bits(one.b)
            ]
            if len(receipts) > check_points.BITS_MAX:
                raise OutOfRange(
                    f"more than {check_points.BITS_MAX} messages in one acknowledgement; split it"
                )
        consuming = self._broker.consuming
        if not any(consuming.acknowledge_positions(receipts)) and not any(consuming.was_ended(receipts)):
            return call.answer(ResponseCode.NO_MESSAGE, "none of these is in hand")
        return call.answer()

    async def _change_invisible(self, call: Call) -> Reply:
        fields = call.fields(_ChangeInvisible)
        receipt, old = self._receipt(fields)
        now_ms = self._broker.clock.now_ms()
        new = await self._broker.consuming.change_invisible_time(receipt, fields.invisible_time)
        if not isinstance(new, PositionReceipt):
            return _not_valid(call, receipt)
        # The client builds the new check point from these fields. For a group in order, the pop time stays, and the
        # invisible time counts from it.
        in_order = old.revive_queue_id == check_points.REVIVE_QUEUE_IN_ORDER
        since_ms = now_ms - new.pop_ms if in_order else 0
        return call.answer(
            ext={
                "popTime": str(new.pop_ms),
                "invisibleTime": str(fields.invisible_time + since_ms),
                "reviveQid": str(old.revive_queue_id),
            }
        )

    def _receipt(self, fields: _Ack) -> tuple[PositionReceipt, CheckPoint]:
        topic = self._broker.tables.topics.get(fields.topic)
        if not 0 <= fields.queue_id < topic.read_queues:
            raise illegal_queue(ResponseCode.MESSAGE_ILLEGAL, fields.queue_id, topic)
        point = check_points.parse(fields.extra_info)
        name = check_points.real_topic(fields.topic, fields.consumer_group, point.retry)
        return PositionReceipt(
            fields.consumer_group, name, fields.queue_id, fields.offset, point.pop_ms
        ), point


def _wanted(filters: FiltersKept, fields: _Pop, topic: Topic) -> Filter:
    if not fields.exp or topic.name.startswith(RETRY_PREFIX):
        return EVERYTHING
    return compiled(filters, fields.exp, fields.exp_type or TAG, topic)


def _header(ask: ReceiveRequest, popped: Received | None) -> dict[str, str]:
    revive = check_points.REVIVE_QUEUE_IN_ORDER if ask.in_order else check_points.REVIVE_QUEUE
    return {
        "popTime": str(popped.pop_ms if popped else 0),
        "invisibleTime": str(ask.invisible_ms),
        "reviveQid": str(revive),
        "restNum": str(popped.rest if popped else 0),
    }


def _as_asked(popped: Received, ask: ReceiveRequest, places: list[Place], broker_name: str) -> pa.RecordBatch:
    """Return the rows as the client expects them: retries under the topic asked for, with their check points.

    A POP_CK that a producer has set is removed, because it would be mistaken for the broker's.
    """
    rows = popped.rows
    texts, names = rows.column("properties").to_pylist(), rows.column("topic").to_pylist()
    if not any(check_points.POP_CK in (text or "") for text in texts) and set(names) == {ask.topic}:
        return rows
    firsts: dict[tuple[str, int], int] = {}
    for at, (retry, queue_id, offset) in enumerate(places):
        first = firsts.setdefault((retry, queue_id), offset)
        properties = decode_properties(texts[at] or "")
        properties.pop(check_points.POP_CK, None)
        if names[at] != ask.topic:
            properties[check_points.POP_CK] = CheckPoint(
                first, popped.pop_ms, ask.invisible_ms, check_points.REVIVE_QUEUE, retry, broker_name,
                queue_id, offset,
            ).encode()  # fmt: skip
        texts[at] = encode_properties(properties)
    for name, values in (("properties", texts), ("topic", [ask.topic] * len(texts))):
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.array(values, pa.string()))
    return rows


def _not_valid(call: Call, receipt: PositionReceipt) -> Reply:
    return call.answer(
        ResponseCode.NO_MESSAGE,
        f"offset {receipt.offset} of queue {receipt.queue_id} of {receipt.topic} is not in hand since "
        f"{receipt.pop_ms}: acknowledged, handed out again, or its time is over",
    )
