"""Groups over Flight: members of one group share messages out, each for a time, and answer with receipts.

A receipt travels as a sealed text (receipt_handles.py) in a column beside the columns of the log. What comes from the
group's retry topic is shown under the topic that was asked for, since the receipt is made for that one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from timeball import wire
from timeball.access import Caller, Verb
from timeball.broker.consuming.receipts import AnyReceipt
from timeball.broker.consuming.requests import NO_ROWS, Received, ReceiveRequest
from timeball.message import READ_SCHEMA
from timeball.protocols.receipt_handles import ReceiptHandles

if TYPE_CHECKING:
    from timeball.broker.service import Broker

_TOPIC = READ_SCHEMA.get_field_index("topic")


class HandedOut(NamedTuple):
    """Rows in wire.RECEIVED_SCHEMA, and the receipts whose texts they bear."""

    rows: pa.RecordBatch
    receipts: list[AnyReceipt]


async def receive(broker: Broker, request: wire.Receive, caller: Caller) -> HandedOut:
    """Lease messages to a member; a topic that is missing is waited for where its first message may make it."""
    policy, parts = broker.policy, broker.parts
    policy.allow(caller, Verb.RECEIVE, topic=request.topic, group=request.group)
    group = policy.joined(request.group, caller=caller)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + request.wait_ms / 1000
    if parts.topics.find(request.topic) is None and request.wait_ms and policy.may_be_made(request.topic):
        if not await broker.waiters.wait(request.topic, request.wait_ms / 1000):
            return _handed_out(broker, request, Received(NO_ROWS, []))
    elif request.latest and not parts.offsets.get(request.group, request.topic):
        ends = {queue: end for queue, (_, end) in broker.queues(request.topic).items()}
        await broker.commit_offsets(request.group, request.topic, ends, caller)
    received = await broker.consuming.receive(
        ReceiveRequest(
            request.group,
            request.topic,
            rows=request.rows,
            invisible_ms=request.invisible_ms,
            in_order=group.consume_message_orderly,
            in_log=True,
        ),
        max(0, round(1000 * (deadline_s - loop.time()))),
    )
    return _handed_out(broker, request, received)


async def acknowledge(broker: Broker, request: wire.Acknowledge, caller: Caller) -> list[bool]:
    """End leases for good; false for one that has ended before."""
    return await broker.consuming.acknowledge(_receipts(broker, request, caller))


async def change_invisible_time(
    broker: Broker, request: wire.ChangeInvisibleTime, caller: Caller
) -> list[str | None]:
    """Return the receipts for the new times; None for a lease that has ended before."""
    receipts, handles = _receipts(broker, request, caller), _handles(broker)
    changes = (
        broker.consuming.change_invisible_time(receipt, request.invisible_ms, counts=request.counts)
        for receipt in receipts
    )
    changed = await asyncio.gather(*changes)
    return [None if receipt is None else handles.encode(receipt) for receipt in changed]


async def dead_letter(broker: Broker, request: wire.DeadLetter, caller: Caller) -> list[bool]:
    """Put messages into the group's dead letters; false for a lease that has ended before."""
    receipts = _receipts(broker, request, caller)
    return list(await asyncio.gather(*map(broker.consuming.dead_letter, receipts)))


def _receipts(
    broker: Broker, request: wire.Acknowledge | wire.ChangeInvisibleTime | wire.DeadLetter, caller: Caller
) -> list[AnyReceipt]:
    """Return the receipts of a request; raise Forbidden, InvalidReceipt."""
    broker.policy.allow(caller, Verb.RECEIVE, topic=request.topic, group=request.group)
    broker.policy.check_group(request.group)
    handles = _handles(broker)
    return [handles.decode(text, request.group, request.topic) for text in request.receipts]


def _handles(broker: Broker) -> ReceiptHandles:
    return ReceiptHandles(broker.parts.receipt_secret.get)


def _handed_out(broker: Broker, request: wire.Receive, received: Received) -> HandedOut:
    columns, handles = received.rows.columns, _handles(broker)
    columns[_TOPIC] = pa.array([request.topic] * received.rows.num_rows, READ_SCHEMA.field(_TOPIC).type)
    texts = pa.array([handles.encode(receipt) for receipt in received.receipts], pa.string())
    batch = pa.RecordBatch.from_arrays([*columns, texts], schema=wire.RECEIVED_SCHEMA)
    return HandedOut(batch, received.receipts)
