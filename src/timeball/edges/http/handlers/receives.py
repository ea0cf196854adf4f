"""Receives of consumer groups over HTTP, the requests that settle or extend their leases, and live tails of topics.

Receipts are sealed texts (receipt_handles.py), as over gRPC and Flight. A stream leases messages as they become
visible, up to its credit, which each settled message returns. If its client disconnects, the messages that it holds
come back when their leases end, because it may still settle them. A live tail creates no leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace
from starlette.datastructures import QueryParams

from timeball.broker.consuming.credit import Credit
from timeball.broker.consuming.pull import Offsets
from timeball.broker.consuming.requests import NO_ROWS, Receipt, Received, ReceiveRequest
from timeball.broker.filters import EVERYTHING, SQL92, TAG, Filter
from timeball.broker.filters.compiler import FilterCache
from timeball.broker.registry.topics import Topic
from timeball.broker.service import Broker
from timeball.edges.http import answers_codec, codec
from timeball.edges.http.codec import NDJSON, Answer
from timeball.edges.http.requests import (
    ANSWER_S,
    Call,
    ClientDisconnected,
    Paths,
    Stream,
    check_no_body,
    parse_count,
    parse_group,
    read_request,
)
from timeball.edges.shared.receipt_handles import ReceiptHandles
from timeball.model import http_api, limits
from timeball.model.access import Verb
from timeball.model.errors import (
    Forbidden,
    InvalidMessage,
    NotFound,
    OutOfRange,
    OverLimit,
    TimeballError,
    Unauthorized,
)
from timeball.model.http_api import Answered, AnsweredMany
from timeball.model.message import RETRY_PREFIX
from timeball.model.time_parsing import delay_ms

# ---- receives and leases -------------------------------------------------------------------------------------

DEFAULT_LEASE_MS = 60_000
RECEIVED_ROWS, CREDIT_ROWS = 32, 256  # the defaults of `max` and `credit`
STREAM_ROWS = 256  # at most, in one chunk
KEEP_ALIVE_S = 15.0
OVER_LIMIT_PAUSE_S = 1.0
_TOPIC_PATH = "/v1/topics/{topic}"
FORMER_METHODS = {
    f"{_TOPIC_PATH}/messages": {
        "GET": "to receive, send a POST to /v1/topics/TOPIC/receive with the same parameters. A receive leases "
        "messages, and a GET changes nothing"
    }
}


class Receives:
    """Serves receives, and settles and extends leases by their receipts. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._handles = broker, ReceiptHandles(broker.tables.receipt_secret.get)
        self._filters, self._encoder = FilterCache(), codec.LeasedEncoder()
        self.paths: Paths = {
            f"{_TOPIC_PATH}/receive": {"POST": self._receive},
            f"{_TOPIC_PATH}/stream": {"POST": self._open_stream},
            f"{_TOPIC_PATH}/ack": {"POST": self._ack},
            f"{_TOPIC_PATH}/nack": {"POST": self._nack},
            f"{_TOPIC_PATH}/extend": {"POST": self._extend},
            f"{_TOPIC_PATH}/dead-letter": {"POST": self._dead_letter},
        }

    async def _receive(self, call: Call) -> Answer:
        """Lease messages to a group, and answer with them. With `wait`, wait for the first message.

        Raises OutOfRange for a long wait, the errors of `check_no_body` and `_build_request`, and ClientDisconnected.
        """
        topic, group, query = call.path["topic"], parse_group(call), call.query
        await check_no_body(call, self._broker.policy, Verb.RECEIVE, topic=topic, group=group)
        wait_ms = delay_ms(query.get("wait", "0"), "wait")
        if wait_ms > limits.PULL_WAIT_MS_MAX:
            raise OutOfRange(f"wait of {wait_ms} ms: at most {limits.PULL_WAIT_MS_MAX}")
        rows_max = parse_count(call, "max", RECEIVED_ROWS, limits.POP_ROWS_MAX)
        request = await self._build_request(call, rows_max, is_patient=bool(wait_ms))
        received = await self._receive_for_client(call, request, wait_ms)
        encoded, _ = self._encode(received, group, topic)
        messages = b'{"messages":[%b]}' % b",".join(encoded)
        return Answer(200, messages, size_bytes=len(messages))

    async def _open_stream(self, call: Call) -> Stream:
        """Check the request for a stream, and open it. It leases messages to a group, up to its credit."""
        topic, group = call.path["topic"], parse_group(call)
        await check_no_body(call, self._broker.policy, Verb.RECEIVE, topic=topic, group=group)
        credit = Credit(parse_count(call, "credit", CREDIT_ROWS, limits.CREDIT_ROWS_MAX))
        request = await self._build_request(call, 1, is_patient=True)
        return Stream(self._chunks(call, request, credit), NDJSON)

    async def _chunks(
        self, call: Call, request: ReceiveRequest, credit: Credit
    ) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a stream: a line for each message, and an empty line after KEEP_ALIVE_S without one.

        Messages whose chunk was not written are given back. Ends when the topic or the permission is gone, or when the
        client disconnects.
        """
        consuming = self._broker.consuming
        yield b"\n"  # tells the client that the stream is open
        while True:
            rows_max = min(credit.free_rows, STREAM_ROWS)
            if rows_max <= 0:
                await credit.wait(KEEP_ALIVE_S)
                if credit.free_rows <= 0:
                    yield b"\n"
                continue
            try:
                if not self._broker.policy.will_be_created(request.topic):
                    consuming.join(request.group, request.topic, call.caller)
                received = await self._receive_for_stream(call, replace(request, rows=rows_max))
            except (NotFound, Forbidden, Unauthorized):
                # The topic was deleted, or the account lost its permission. The client reconnects, and that request is
                # refused.
                return
            except OverLimit:  # other consumers have used up the limit, so it is no reason to end this stream
                yield b"\n"
                await asyncio.sleep(OVER_LIMIT_PAUSE_S)
                continue
            lines, receipts = self._encode(received, request.group, request.topic)
            credit.hold(consuming.leases, receipts)
            is_written = False
            try:
                # `Exchange.send` waits before it writes. So if the stream is closed here, nothing was written.
                yield b"\n".join(lines) + b"\n"
                is_written = not call.is_leaving
            finally:
                if not is_written:
                    consuming.return_unseen(receipts)
            if not is_written:
                return

    async def _receive_for_stream(self, call: Call, request: ReceiveRequest) -> Received:
        """Receive messages. If the stream ends meanwhile, give back the messages that it would have got."""
        receiving = asyncio.ensure_future(self._wait_and_receive(call, request, round(1_000 * KEEP_ALIVE_S)))
        try:
            return await asyncio.shield(receiving)
        except asyncio.CancelledError:
            receiving.cancel()
            await asyncio.wait((receiving,))
            if not receiving.cancelled() and receiving.exception() is None:
                self._broker.consuming.return_unseen(receiving.result().receipts)
            raise

    async def _build_request(self, call: Call, rows_max: int, *, is_patient: bool) -> ReceiveRequest:
        """Build the request of a receive or a stream. Checks filter and caller, and lets the group join the topic.

        `is_patient`: the request may wait for the message that creates the topic. A missing topic is then no error.
        Raises InvalidMessage, InvalidFilter, InvalidDelay, InvalidName, OutOfRange, NotFound, Forbidden and OverLimit.
        """
        topic, group, query, policy = call.path["topic"], parse_group(call), call.query, self._broker.policy
        self._build_filter(query, topic, None)  # refuses an invalid filter before the wait
        start_ms = codec.parse_start(query.get("start", "earliest"))
        if not (is_patient and policy.will_be_created(topic)):
            self._broker.consuming.join(group, topic, call.caller)  # refuses a caller who may not receive
            if start_ms:
                await self._broker.begin(group, topic, start_ms, call.caller)
        return ReceiveRequest(
            group,
            topic,
            rows=rows_max,
            invisible_ms=codec.parse_lease(query.get("lease", f"{DEFAULT_LEASE_MS}ms")),
            in_order=policy.ensure_group(group, call.caller).consume_message_orderly,
            counts_times=True,
        )

    def _encode(self, received: Received, group: str, topic: str) -> tuple[list[bytes], list[Receipt]]:
        """Encode received messages for one answer, and give back the messages that exceed it.

        Returns the encoded messages and their receipts.
        """
        handles = self._handles.encode_answer(received.receipts, group, topic)
        encoded = self._encoder.encode(received.handed_out, topic, handles)
        count = len(encoded)
        if count < len(received.receipts):
            self._broker.consuming.return_unseen(received.receipts[count:])
        return encoded, received.receipts[:count]

    async def _receive_for_client(self, call: Call, request: ReceiveRequest, wait_ms: int) -> Received:
        """Receive messages. If the client disconnects meanwhile, give them back and raise ClientDisconnected.

        The answer must be written in the same turn of the loop. Later, the client may have disconnected.
        """
        exchange = call.exchange
        # A client that does not read earlier answers gets no messages.
        if exchange.flow.write_paused and not await exchange.drain(ANSWER_S):
            raise ClientDisconnected
        watch = _DisconnectWatch(call)
        try:
            received = await self._wait_and_receive(call, request, wait_ms, watch.begin)
        except asyncio.CancelledError:
            if watch.has_cancelled:
                raise ClientDisconnected from None
            raise
        finally:
            watch.end()
        if call.is_leaving:
            self._broker.consuming.return_unseen(received.receipts)
            raise ClientDisconnected
        return received

    async def _wait_and_receive(
        self,
        call: Call,
        request: ReceiveRequest,
        wait_ms: int,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Received:
        """Receive messages. If the topic does not exist, first wait for the message that creates it.

        Calls `on_wait` before each wait. Raises Unauthorized or Forbidden if the account lost its right meanwhile.
        """
        if wait_ms and self._broker.policy.will_be_created(request.topic):
            on_wait()
            loop = asyncio.get_running_loop()
            deadline_s = loop.time() + wait_ms / 1_000
            if not await self._broker.waiters.wait(request.topic, wait_ms / 1_000):
                return Received(NO_ROWS, [])
            wait_ms = max(0, round(1_000 * (deadline_s - loop.time())))
        topic = self._broker.tables.topics.find_topic(request.topic)
        message_filter = self._build_filter(call.query, request.topic, topic)
        received = await self._broker.consuming.receive(
            request if message_filter is request.wanted else replace(request, wanted=message_filter),
            wait_ms,
            on_wait,
        )
        try:
            self._broker.policy.allow(call.caller, Verb.RECEIVE, topic=request.topic, group=request.group)
        except (Forbidden, Unauthorized):  # the access file changed during the wait
            self._broker.consuming.return_unseen(received.receipts)
            raise
        return received

    def _build_filter(self, query: QueryParams, topic_name: str, topic: Topic | None) -> Filter:
        """Build the filter of a receive. Raises InvalidFilter and InvalidMessage."""
        tag, sql = query.get("tag", ""), query.get("sql", "")
        if tag and sql:
            raise InvalidMessage("tag and sql: give one of them")
        # Messages in a retry topic passed the filter when they were first handed out.
        if not (tag or sql) or topic_name.startswith(RETRY_PREFIX):
            return EVERYTHING
        bit_mask = topic is not None and topic.filter_type == "MULTI_TAG"
        return self._filters.get(tag or sql, SQL92 if sql else TAG, bit_mask=bit_mask)

    async def _ack(self, call: Call) -> Answer:
        """Acknowledge leased messages, and answer for each receipt whether its lease was still valid."""
        request: http_api.Answering = await self._read_for_group(call, http_api.Answering)
        receipts = self._decode_receipts(call, request.receipts)
        valid_receipts = [receipt for receipt in receipts if receipt is not None]
        # one result for each valid receipt, in order
        lease_results = iter(await self._broker.consuming.acknowledge(valid_receipts))
        return _receipts_answer(
            [
                Answered(text, receipt is not None and next(lease_results))
                for text, receipt in zip(request.receipts, receipts, strict=True)
            ]
        )

    async def _dead_letter(self, call: Call) -> Answer:
        """Move leased messages to the dead letters of the group."""
        request: http_api.GivingUp = await self._read_for_group(call, http_api.GivingUp)
        move_to_dead_letters = self._broker.consuming.dead_letter

        async def move_one(text: str, receipt: Receipt | None) -> Answered:
            return Answered(text, receipt is not None and await move_to_dead_letters(receipt, request.reason))

        receipts = self._decode_receipts(call, request.receipts)
        return _receipts_answer(list(await asyncio.gather(*map(move_one, request.receipts, receipts))))

    async def _nack(self, call: Call) -> Answer:
        """Give leased messages back. They are redelivered after `after`, or by the retry policy of the group."""
        request: http_api.GivingBack = await self._read_for_group(call, http_api.GivingBack)
        after_ms = None if request.after is UNSET else delay_ms(request.after)
        nack = self._broker.consuming.nack
        return await self._change_leases(
            call,
            request.receipts,
            lambda receipt: nack(receipt, after_ms, request.reason, counts=request.counts),
        )

    async def _extend(self, call: Call) -> Answer:
        """Let leases end after the duration `lease` from now. With 0, the messages are available again at once."""
        request: http_api.Extending = await self._read_for_group(call, http_api.Extending)
        lease_ms, change = codec.parse_lease(request.lease, 0), self._broker.consuming.change_invisible_time
        return await self._change_leases(
            call, request.receipts, lambda receipt: change(receipt, lease_ms, counts=request.counts)
        )

    async def _change_leases(
        self, call: Call, texts: list[str], change: Callable[[Receipt], Awaitable[Receipt | None]]
    ) -> Answer:
        """Call `change` for each receipt in `texts`, and answer with the new receipts.

        `change` returns None for a lease that has ended. The receipt of such a lease, and an invalid receipt, are
        answered as not valid.
        """
        receipts = self._decode_receipts(call, texts)

        async def change_one(text: str, receipt: Receipt | None) -> Answered:
            new_receipt = None if receipt is None else await change(receipt)
            return (
                Answered(text, False)
                if new_receipt is None
                else Answered(self._handles.encode(new_receipt), True)
            )

        return _receipts_answer(list(await asyncio.gather(*map(change_one, texts, receipts))))

    async def _read_for_group(self, call: Call, kind: type[Any]) -> Any:
        """Read the body of a request as a `kind`, if the caller may receive from the topic as the group.

        Raises the errors of `read_request`.
        """
        topic, group = call.path["topic"], parse_group(call)
        return await read_request(call, kind, self._broker.policy, Verb.RECEIVE, topic=topic, group=group)

    def _decode_receipts(self, call: Call, texts: list[str]) -> Sequence[Receipt | None]:
        """Decode the receipts of a request, after checking the caller.

        None for a text that is no receipt of this group. Raises Forbidden and OutOfRange.
        """
        topic, group, policy = call.path["topic"], parse_group(call), self._broker.policy
        policy.allow(call.caller, Verb.RECEIVE, topic=topic, group=group)
        policy.check_group(group)
        if not 1 <= len(texts) <= limits.POP_ROWS_MAX:
            raise OutOfRange(f"{len(texts)} receipts: 1 to {limits.POP_ROWS_MAX} in one request")
        return self._handles.decode_all(texts, group, topic)


class _DisconnectWatch:
    """Cancels the task of a request that waits, when its client disconnects.

    `has_cancelled` is True from then on. `begin` is called only before a wait, so a request that does not wait has no
    cost.
    """

    def __init__(self, call: Call) -> None:
        self._exchange, self._task = call.exchange, asyncio.current_task()
        self.has_cancelled = False

    def begin(self) -> None:
        """Watch from now on. May be called again."""
        self._exchange.on_disconnect = self._cancel
        if self._exchange.disconnected:
            self._cancel()

    def end(self) -> None:
        """Stop watching."""
        self._exchange.on_disconnect = None

    def _cancel(self) -> None:
        if self._task is not None:
            self.has_cancelled = True
            self._task.cancel()


def _receipts_answer(results: list[Answered]) -> Answer:
    return Answer(200, AnsweredMany(results))


# ---- live tails, as server-sent events -----------------------------------------------------------------------


class Events:
    """Serves the live tails of topics. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {"/v1/topics/{topic}/events": {"GET": self._open_stream}}

    async def _open_stream(self, call: Call) -> Stream:
        """Start a live tail, from the header Last-Event-ID on if there is one, else with new messages."""
        topic, tags = call.path["topic"], call.query.get("tag", "")
        last_event_id = call.headers.get("last-event-id")
        last_offsets = answers_codec.parse_event_id(last_event_id) if last_event_id else None
        # Check the request before the first byte is sent, so that a refusal has its own status.
        offsets = self._broker.live_tail.begin(topic, tags, last_offsets, call.caller)
        return Stream(self._chunks(call, topic, tags, offsets), answers_codec.EVENTS)

    async def _chunks(
        self, call: Call, topic: str, tags: str, offsets: Offsets
    ) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a live tail: its start, events, and a comment after KEEP_ALIVE_S without events."""
        read_tail = partial(
            self._broker.live_tail.read, topic, tags, encode=answers_codec.encode_events, caller=call.caller
        )
        yield answers_codec.stream_start(offsets)
        while True:
            try:
                result = await read_tail(offsets, KEEP_ALIVE_S)
            except TimeballError:
                # The topic was deleted, or the account lost its permission. The client reconnects, and that request is
                # refused.
                return
            if result is None:
                yield answers_codec.KEEP_ALIVE
                continue
            data, offsets = result
            if data:
                yield data
