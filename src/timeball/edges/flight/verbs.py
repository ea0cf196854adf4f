"""Calls the broker's method for each decoded request, and builds the answer. Runs on the event loop.

Errors raised here are TimeballErrors, or internal faults. Of an internal fault, the client gets only the class name.
The details are in the broker's log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from timeball.broker.admin.schedule_changes import Shown
from timeball.broker.registry.zones import zone_of_rule
from timeball.broker.service import Broker
from timeball.edges.flight import codec
from timeball.model import answers, wire
from timeball.model.access import Caller, Verb
from timeball.table.attachment import Attachment

PAGE_ROWS = 100  # schedules in an answer

Status = Callable[[Caller], dict[str, object]]


async def perform(
    broker: Broker, status: Status, verb: str, request: codec.ActionRequest, caller: Caller
) -> Any:
    """Perform an action for a caller. Returns the answer, which the server encodes as JSON.

    `verb`: the name of the action, which tells apart the actions without arguments. Raises the errors of the broker.
    """
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
        case wire.Occurrences():
            broker.policy.allow(caller, Verb.ADMIN)  # as for the log and its messages
            return await broker.forecast.recurring(request.from_ms, request.to_ms, request.width_ms, caller)
        case wire.Schedules():
            broker.policy.allow(caller, Verb.ADMIN)
            page = await broker.schedules.page(PAGE_ROWS, request.page, None, caller)
            return {"schedules": list(map(_to_answer, page.schedules)), "next_page": page.next_page}
        case wire.Selections():
            broker.policy.allow(caller, Verb.ADMIN)
            selections = broker.tables.selections.all()
            return {
                "selections": [
                    {"id": name, "state": broker.selections.state(name), "facts": facts}
                    for name, facts in selections.items()
                ]
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


def _to_answer(shown: Shown) -> answers.RecurringSchedule:
    """Convert a schedule to its form in an answer."""
    facts, progress = shown.facts, shown.progress
    has_run = progress.runs > 0
    return answers.RecurringSchedule(
        name=shown.name, state=progress.state.name.lower(), topic=facts.topic, rule=facts.rule_text,
        zone=zone_of_rule(facts.rule), runs=progress.runs,
        next_due_ms=progress.due_ms if progress.number else None,
        last_due_ms=progress.last_due_ms if has_run else None, last_ms=progress.last_ms if has_run else None,
        error=progress.error or None,
    )  # fmt: skip


async def rows(broker: Broker, request: wire.ReadQueue | wire.Pull, caller: Caller) -> pa.RecordBatch:
    """Read the rows for a queue read or a pull, in READ_SCHEMA. Raises the errors of the broker."""
    if isinstance(request, wire.Pull):
        return await broker.pull(request.topic, request.offsets, request.rows, request.wait_ms, caller)
    return await broker.read_queue(request.topic, request.queue_id, request.offset, request.rows, caller)
