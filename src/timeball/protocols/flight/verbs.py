"""From a decoded request to the broker's verb, and from its result to the answer's JSON. Runs on the loop.

One function a verb would be one line each; the tables below are those lines. Whatever raises here is one of
our errors, or a bug that `failures` hides from the client and shows to the operator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from timeball import wire
from timeball.access import ANONYMOUS, Caller
from timeball.protocols.flight import codec, groups
from timeball.table.attachment import Attachment

if TYPE_CHECKING:
    from timeball.broker.service import Broker


Status = Callable[[Caller], dict[str, object]]


async def perform(
    broker: Broker, verb: str, request: codec.ActionRequest, status: Status, caller: Caller = ANONYMOUS
) -> Any:
    """Do an action for a caller; returns what becomes the JSON of its answer."""
    match request:
        case wire.Nothing():
            return await _plain(broker, verb, status, caller)
        case wire.CreateTopic():
            await broker.create_topic(request.topic, request.queues, caller)
            return {}
        case wire.Queues():
            ranges = broker.queues(request.topic, caller)
            return {"queues": {str(q): {"min": low, "max": high} for q, (low, high) in ranges.items()}}
        case wire.GetOffsets():
            offsets = broker.offsets(request.group, request.topic, caller)
            return {"offsets": {str(queue): offset for queue, offset in offsets.items()}}
        case wire.Commit():
            await broker.commit_offsets(request.group, request.topic, dict(request.offsets), caller)
            return {}
        case wire.Acknowledge():
            return {"valid": await groups.acknowledge(broker, request, caller)}
        case wire.ChangeInvisibleTime():
            return {"receipts": await groups.change_invisible_time(broker, request, caller)}
        case wire.DeadLetter():
            return {"valid": await groups.dead_letter(broker, request, caller)}
        case wire.Cancel():
            return {
                "verdicts": await broker.cancel(
                    ids=request.ids, keys=request.keys, seqs=request.seqs, caller=caller
                )
            }
        case wire.Reschedule():
            return {
                "verdicts": await broker.reschedule(
                    ids=request.ids, keys=request.keys, seqs=request.seqs, caller=caller,
                    due_ms=request.due_ms, delay_ms=request.delay_ms,
                )
            }  # fmt: skip
        case wire.CancelRange():
            return await broker.cancel_ranges(request.ranges, request.reason, caller)
        case wire.Starts():
            return {
                "starts": await asyncio.to_thread(broker.starts, request.from_seq, request.to_seq, caller)
            }
        case wire.Reserve():
            return {"first_seq": await broker.reserve(request.rows, caller)}
        case wire.Lease():
            broker.compactor_lease(request.lease_ms, caller)
            return {}
        case wire.DispatcherLease():
            broker.dispatcher_lease(request.lease_ms, caller)
            return {}
        case Attachment():
            return await broker.attach(request, caller)
    raise AssertionError(f"no verb for {request!r}")


async def _plain(broker: Broker, verb: str, status: Status, caller: Caller) -> Any:
    if verb == "status":
        return status(caller)
    if verb == "topics":
        return {"topics": broker.topics(caller)}
    assert verb == "compact", verb
    return await broker.compact(caller) or {}


async def rows(
    broker: Broker, request: wire.ReadQueue | wire.Pull, caller: Caller = ANONYMOUS
) -> pa.RecordBatch:
    """The rows a queue read or a pull asks for, in READ_SCHEMA."""
    if isinstance(request, wire.Pull):
        return await broker.pull(request.topic, request.offsets, request.rows, request.wait_ms, caller)
    return await broker.read_queue(request.topic, request.queue_id, request.offset, request.rows, caller)
