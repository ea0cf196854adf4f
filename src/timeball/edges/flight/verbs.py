"""Performs decoded requests by the broker's verbs, and builds their answers. Runs on the event loop.

Most verbs need a single line of code, so `perform` is a table of these lines. Errors raised here are TimeballErrors, or
internal faults. The client is only told the name of an internal fault, and the details are in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from timeball.broker.service import Broker
from timeball.edges.flight import codec
from timeball.model import wire
from timeball.model.access import Caller
from timeball.table.attachment import Attachment

Status = Callable[[Caller], dict[str, object]]


async def perform(
    broker: Broker, status: Status, verb: str, request: codec.ActionRequest, caller: Caller
) -> Any:
    """Perform an action for a caller. The result is encoded as the JSON of the answer."""
    match request:
        case wire.Nothing():
            return status(caller) if verb == "status" else await broker.compact(caller) or {}
        case wire.Queues():
            ranges = broker.queues(request.topic, caller)
            return {
                "queues": {str(queue): {"min": low, "max": high} for queue, (low, high) in ranges.items()}
            }
        case wire.SourcePositions():
            positions = broker.sourced_sends.positions(request.source, caller)
            # The keys of JSON objects are strings.
            return {"positions": {str(partition): position for partition, position in positions.items()}}
        case wire.CancelRange():
            return await broker.cancel_ranges(request.ranges, request.reason, caller)
        case wire.Campaigns():
            return {"campaigns": broker.campaigns(request.campaign, caller)}
        case wire.ChangeCampaign():
            return await broker.change_campaign(
                request.campaign, request.change, rows=request.rows, at_ms=request.at_ms, shift=request.shift,
                groups=request.groups, caller=caller,
            )  # fmt: skip
        case wire.Drain():
            return await broker.drain(request.heir, dry_run=request.dry_run, caller=caller)
        case wire.Starts():
            starts = await asyncio.to_thread(broker.starts, request.from_seq, request.to_seq, caller)
            return {"starts": starts}
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


async def rows(broker: Broker, request: wire.ReadQueue | wire.Pull, caller: Caller) -> pa.RecordBatch:
    """Read the rows for a queue read or a pull, in READ_SCHEMA."""
    if isinstance(request, wire.Pull):
        return await broker.pull(request.topic, request.offsets, request.rows, request.wait_ms, caller)
    return await broker.read_queue(request.topic, request.queue_id, request.offset, request.rows, caller)
