"""Performs decoded requests by the broker's verbs, and builds their answers. Runs on the event loop.

Most verbs need a single line of code, so `perform` is a table of these lines. Errors raised here are TimeballErrors, or
internal faults. The client is only told the name of an internal fault, and the details are in the log.

The members of a group share its messages. Each message is leased for a time, and answered with its receipt. A receipt
is sent as a sealed text (receipt_handles.py) in an additional column of the rows. Messages from the group's retry topic
are returned under the requested topic, because their receipts are made for that topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa

from timeball.broker.consuming.requests import NO_ROWS, Receipt, Received, ReceiveRequest
from timeball.broker.filters import EVERYTHING, SQL92, TAG, Filter
from timeball.broker.filters.compiler import FilterCache
from timeball.broker.registry.topics import Topic
from timeball.broker.service import Broker
from timeball.edges.flight import codec
from timeball.edges.shared.receipt_handles import ReceiptHandles
from timeball.log.row_encoder import NumberedRows, encoder_of
from timeball.model import answers, time_parsing, wire
from timeball.model.access import Caller, Verb
from timeball.model.message import READ_SCHEMA, RECEIVED_SCHEMA, RETRY_PREFIX
from timeball.table.attachment import Attachment

Status = Callable[[Caller], dict[str, object]]

_TOPIC_COLUMN = READ_SCHEMA.get_field_index("topic")
_ROW_ENCODER = encoder_of(RECEIVED_SCHEMA)


class LeasedRows(NamedTuple):
    """Leased messages in RECEIVED_SCHEMA, as a batch or an encoded Arrow message, and their receipts."""

    rows: pa.RecordBatch | bytes
    receipts: list[Receipt]


class ServedBroker(NamedTuple):
    """The broker that serves the requests, the function for its status, and the codec of its receipts."""

    broker: Broker
    status: Status
    handles: ReceiptHandles

    @classmethod
    def by(cls, broker: Broker, status: Status) -> ServedBroker:
        """Bundle a broker with its status and the codec of its receipts."""
        return cls(broker, status, ReceiptHandles(broker.tables.receipt_secret.get))


async def perform(served: ServedBroker, verb: str, request: codec.ActionRequest, caller: Caller) -> Any:
    """Perform an action for a caller. The result is encoded as the JSON of the answer."""
    broker = served.broker
    match request:
        case wire.Acknowledge():  # first, because most requests are acknowledgements
            return {"valid": await acknowledge(served, request, caller)}
        case wire.Nothing():
            return await _perform_plain(served, verb, caller)
        case wire.CreateTopic():
            await broker.create_topic(request.topic, request.queues, caller)
            return {}
        case wire.Queues():
            ranges = broker.queues(request.topic, caller)
            return {
                "queues": {str(queue): {"min": low, "max": high} for queue, (low, high) in ranges.items()}
            }
        case wire.GetOffsets():
            return {"offsets": _with_text_keys(broker.offsets(request.group, request.topic, caller))}
        case wire.SourcePositions():
            return {"positions": _with_text_keys(broker.sourced_sends.positions(request.source, caller))}
        case wire.Commit():
            await broker.commit_offsets(request.group, request.topic, dict(request.offsets), caller)
            return {}
        case wire.ChangeInvisibleTime():
            return {"receipts": await change_invisible_time(served, request, caller)}
        case wire.DeadLetter():
            return {"valid": await dead_letter(served, request, caller)}
        case wire.Get():
            return {"messages": await broker.find(request.id, request.topic, caller)}
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
        case wire.CancelRange() | wire.Campaigns() | wire.ChangeCampaign() | wire.Drain():
            return await _perform_bulk(broker, request, caller)
        case wire.Groups() | wire.DeadLetters() | wire.ResolveDeadLetters():
            return await _perform_for_groups(broker, verb, request, caller)
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


def _with_text_keys(numbers: dict[int, int]) -> dict[str, int]:
    # The keys of JSON objects are strings.
    return {str(number): value for number, value in numbers.items()}


async def _perform_for_groups(
    broker: Broker,
    verb: str,
    request: wire.Groups | wire.DeadLetters | wire.ResolveDeadLetters,
    caller: Caller,
) -> Any:
    """Perform an action on consumer groups or their dead letters."""
    if isinstance(request, wire.Groups):
        if request.group is None:
            return await broker.groups.page(request.rows, request.after, caller)
        return answers.GroupPage([await broker.groups.one(request.group, caller)])
    dead_letters = broker.dead_letters
    if isinstance(request, wire.DeadLetters):
        return await dead_letters.page(request.group, request.rows, request.after, caller)
    resolve = dead_letters.resend if verb == "resend_dead_letters" else dead_letters.delete
    return await resolve(request.group, request.dead_letters, caller)


async def _perform_bulk(
    broker: Broker,
    request: wire.CancelRange | wire.Campaigns | wire.ChangeCampaign | wire.Drain,
    caller: Caller,
) -> Any:
    """Perform an action on many messages at once: a range, a campaign, or all pending messages."""
    if isinstance(request, wire.Drain):
        return await broker.drain(request.heir, dry_run=request.dry_run, caller=caller)
    if isinstance(request, wire.CancelRange):
        return await broker.cancel_ranges(request.ranges, request.reason, caller)
    if isinstance(request, wire.Campaigns):
        return {"campaigns": broker.campaigns(request.campaign, caller)}
    return await broker.change_campaign(
        request.campaign, request.change,
        rows=request.rows, at_ms=request.at_ms, shift=request.shift, groups=request.groups, caller=caller,
    )  # fmt: skip


async def _perform_plain(served: ServedBroker, verb: str, caller: Caller) -> Any:
    """Perform an action without arguments."""
    if verb == "status":
        return served.status(caller)
    if verb == "topics":
        return {"topics": served.broker.topics(caller)}
    assert verb == "compact", verb
    return await served.broker.compact(caller) or {}


async def rows(broker: Broker, request: wire.ReadQueue | wire.Pull, caller: Caller) -> pa.RecordBatch:
    """Read the rows for a queue read or a pull, in READ_SCHEMA."""
    if isinstance(request, wire.Pull):
        return await broker.pull(request.topic, request.offsets, request.rows, request.wait_ms, caller)
    return await broker.read_queue(request.topic, request.queue_id, request.offset, request.rows, caller)


async def receive(
    served: ServedBroker,
    filters: FilterCache,
    request: wire.Receive,
    caller: Caller,
    on_wait: Callable[[], None] = lambda: None,
) -> LeasedRows:
    """Lease messages to a member of a group. If a message may still create the topic, wait for that message.

    `on_wait` is called before the wait for messages.
    """
    broker = served.broker
    policy = broker.policy
    # Check the filter before waiting for the topic, so that an invalid filter is refused at once.
    _build_filter(filters, request, None)
    policy.allow(caller, Verb.RECEIVE, topic=request.topic, group=request.group)
    group = policy.joined(request.group, caller)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + request.wait_ms / 1000
    if request.wait_ms and policy.will_be_created(request.topic):
        on_wait()
        if not await broker.waiters.wait(request.topic, request.wait_ms / 1000):
            return _encode_leased(served, request, Received(NO_ROWS, []))
    elif request.latest:
        await broker.begin(request.group, request.topic, time_parsing.END, caller)
    received = await broker.consuming.receive(
        ReceiveRequest(
            request.group,
            request.topic,
            rows=request.rows,
            invisible_ms=request.invisible_ms,
            wanted=_build_filter(filters, request, broker.tables.topics.find_topic(request.topic)),
            in_order=group.consume_message_orderly,
            counts_times=True,
        ),
        max(0, round(1000 * (deadline_s - loop.time()))),
        on_wait,
    )
    return _encode_leased(served, request, received)


def _build_filter(filters: FilterCache, request: wire.Receive, topic: Topic | None) -> Filter:
    """Build the filter of a receive. Raises InvalidFilter."""
    text = request.tag or request.sql
    # Messages in a retry topic passed the filter when they were first handed out.
    if not text or request.topic.startswith(RETRY_PREFIX):
        return EVERYTHING
    kind = SQL92 if request.sql else TAG
    return filters.get(text, kind, bit_mask=topic is not None and topic.filter_type == "MULTI_TAG")


async def acknowledge(served: ServedBroker, request: wire.Acknowledge, caller: Caller) -> list[bool]:
    """Acknowledge messages. The result has False for each lease that had ended before."""
    return await served.broker.consuming.acknowledge(_receipts(served, request, caller))


async def change_invisible_time(
    served: ServedBroker, request: wire.ChangeInvisibleTime, caller: Caller
) -> list[str | None]:
    """Change the end of leases.

    The result has the new receipt of each lease, None for a lease that had ended before.
    """
    receipts, handles = _receipts(served, request, caller), served.handles
    consuming, delay_ms, counts = served.broker.consuming, request.invisible_ms, request.counts
    changed = await asyncio.gather(
        *(
            consuming.nack(receipt, delay_ms, request.reason, counts=counts)
            if request.nack
            else consuming.change_invisible_time(receipt, delay_ms, counts=counts)
            for receipt in receipts
        )
    )
    return [None if receipt is None else handles.encode(receipt) for receipt in changed]


async def dead_letter(served: ServedBroker, request: wire.DeadLetter, caller: Caller) -> list[bool]:
    """Move messages to the group's dead letters. The result has False for each lease that had ended before."""
    receipts, consuming = _receipts(served, request, caller), served.broker.consuming
    return list(
        await asyncio.gather(*(consuming.dead_letter(receipt, request.reason) for receipt in receipts))
    )


def _receipts(
    served: ServedBroker,
    request: wire.Acknowledge | wire.ChangeInvisibleTime | wire.DeadLetter,
    caller: Caller,
) -> list[Receipt]:
    """Decode the receipts of a request. Raises Forbidden and InvalidReceipt."""
    policy = served.broker.policy
    policy.allow(caller, Verb.RECEIVE, topic=request.topic, group=request.group)
    policy.check_group(request.group)
    return list(map(served.handles.decoder(request.group, request.topic), request.receipts))


def _encode_leased(served: ServedBroker, request: wire.Receive, received: Received) -> LeasedRows:
    """Add the receipts to received rows, and set the requested topic.

    A list of rows is encoded directly to an Arrow message, if the compiled encoder supports these rows.
    """
    rows, receipt_texts = received.handed_out, served.handles.encode_all(received.receipts)
    if isinstance(rows, NumberedRows) and _ROW_ENCODER is not None:
        topic = request.topic
        arrow_message = _ROW_ENCODER.encode(
            [
                (*row[:_TOPIC_COLUMN], topic, *row[_TOPIC_COLUMN + 1 :], receipt_text)
                for row, receipt_text in zip(rows.values, receipt_texts, strict=True)
            ]
        )
        if arrow_message is not None:
            return LeasedRows(arrow_message, received.receipts)
    columns = received.rows.columns
    columns[_TOPIC_COLUMN] = pa.array(
        [request.topic] * len(receipt_texts), READ_SCHEMA.field(_TOPIC_COLUMN).type
    )
    batch = pa.RecordBatch.from_arrays(
        [*columns, pa.array(receipt_texts, pa.string())], schema=RECEIVED_SCHEMA
    )
    return LeasedRows(batch, received.receipts)
