"""Receives of a group over HTTP, and the consumer's answers to the messages.

Receipts are sealed texts (receipt_handles.py), as over gRPC and Flight. Leases are stored in the log, so a message that
was received and never answered survives a crash and is delivered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace
from starlette.datastructures import QueryParams

from timeball.broker.consuming.requests import NO_ROWS, AnyReceipt, Received, ReceiveRequest
from timeball.broker.filters import EVERYTHING, SQL92, TAG, Filter
from timeball.broker.filters.compiler import FiltersKept
from timeball.broker.registry.topics import Topic
from timeball.broker.service import Broker
from timeball.edges.http import codec
from timeball.edges.http.codec import Answered, AnsweredMany
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Gone, Paths, check_no_body, read
from timeball.edges.shared.receipt_handles import ReceiptHandles
from timeball.model import limits
from timeball.model.access import Verb
from timeball.model.errors import InvalidMessage, InvalidReceipt, OutOfRange
from timeball.model.message import RETRY_PREFIX
from timeball.model.time_parsing import delay_ms

LEASE_MS = 60_000
_TOPIC = "/v1/topics/{topic}"
FORMER = {
    f"{_TOPIC}/messages": {
        "GET": "to receive, send a POST to /v1/topics/TOPIC/receive with the same parameters. A receive leases "
        "messages, and a GET changes nothing"
    }
}


class Receives:
    """Serves receives, acknowledgements, and leases that are given back or extended. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._handles = broker, ReceiptHandles(broker.tables.receipt_secret.get)
        self._filters = FiltersKept()
        self.paths: Paths = {
            f"{_TOPIC}/receive": {"POST": self._receive},
            f"{_TOPIC}/ack": {"POST": self._ack},
            f"{_TOPIC}/nack": {"POST": self._nack},
            f"{_TOPIC}/extend": {"POST": self._extend},
            f"{_TOPIC}/dead-letter": {"POST": self._dead_letter},
        }

    async def _receive(self, call: Call) -> Answer:
        topic, group, query = call.path["topic"], _group(call), call.query
        policy = self._broker.policy
        await check_no_body(call, policy, Verb.RECEIVE, topic=topic, group=group)
        wait_ms = delay_ms(query.get("wait", "0"), "wait")
        if wait_ms > limits.PULL_WAIT_MS_MAX:
            raise OutOfRange(f"wait of {wait_ms} ms: at most {limits.PULL_WAIT_MS_MAX}")
        most = query.get("max", "32")
        if not (most.isdecimal() and len(most) < 9 and 1 <= int(most) <= limits.POP_ROWS_MAX):
            raise OutOfRange(f"max={most[:20]}: 1 to {limits.POP_ROWS_MAX}")
        self._wanted(query, topic, None)  # a filter that cannot be parsed is refused before the wait
        start_ms = codec.start_ms(query.get("start", "earliest"))
        if not (wait_ms and policy.is_awaited(topic)):
            self._broker.consuming.join(group, topic, call.caller)  # refuses a caller who may not receive
            if start_ms:
                await self._broker.begin(group, topic, start_ms, call.caller)
        request = ReceiveRequest(
            group,
            topic,
            rows=int(most),
            invisible_ms=codec.lease_ms(query.get("lease", f"{LEASE_MS}ms")),
            in_order=policy.joined(group, call.caller).consume_message_orderly,
            in_log=True,
        )
        received = await self._received(call, request, wait_ms)
        handles = [self._handles.encode(receipt) for receipt in received.receipts]
        size_bytes = received.rows.nbytes if handles else 0
        return Answer(200, codec.leased(received.rows, topic, handles), size_bytes=size_bytes)

    async def _received(self, call: Call, request: ReceiveRequest, wait_ms: int) -> Received:
        """Run a receive. If the client has disconnected meanwhile, give the messages back."""
        receiving = asyncio.ensure_future(self._hand_out(request, call.query, wait_ms))
        gone = asyncio.ensure_future(call.gone())
        try:
            await asyncio.wait((receiving, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                if receiving.done() and receiving.exception() is None:
                    self._broker.consuming.not_seen(receiving.result().receipts)
                raise Gone
            return receiving.result()
        finally:
            for task in (receiving, gone):
                task.cancel()
            await asyncio.gather(receiving, gone, return_exceptions=True)

    async def _hand_out(self, request: ReceiveRequest, query: QueryParams, wait_ms: int) -> Received:
        """Receive. If the topic does not exist, first wait for the message that creates it."""
        if wait_ms and self._broker.policy.is_awaited(request.topic):
            loop = asyncio.get_running_loop()
            deadline_s = loop.time() + wait_ms / 1_000
            if not await self._broker.waiters.wait(request.topic, wait_ms / 1_000):
                return Received(NO_ROWS, [])
            wait_ms = max(0, round(1_000 * (deadline_s - loop.time())))
        topic = self._broker.tables.topics.find_topic(request.topic)
        wanted = self._wanted(query, request.topic, topic)
        return await self._broker.consuming.receive(replace(request, wanted=wanted), wait_ms)

    def _wanted(self, query: QueryParams, name: str, topic: Topic | None) -> Filter:
        """Build the filter of a receive. Raises InvalidFilter and InvalidMessage."""
        tag, sql = query.get("tag", ""), query.get("sql", "")
        if tag and sql:
            raise InvalidMessage("tag and sql: give one of them")
        # Messages in a retry topic passed the filter when they were first handed out.
        if not (tag or sql) or name.startswith(RETRY_PREFIX):
            return EVERYTHING
        bit_mask = topic is not None and topic.filter_type == "MULTI_TAG"
        return self._filters.get(tag or sql, SQL92 if sql else TAG, bit_mask=bit_mask)

    async def _ack(self, call: Call) -> Answer:
        request: codec.Answering = await self._read(call, codec.Answering)
        receipts = self._receipts(call, request.receipts)
        known = [receipt for receipt in receipts if receipt is not None]
        valid = iter(await self._broker.consuming.acknowledge(known))
        return _answered(
            [
                Answered(text, receipt is not None and next(valid))
                for text, receipt in zip(request.receipts, receipts, strict=True)
            ]
        )

    async def _dead_letter(self, call: Call) -> Answer:
        request: codec.GivingUp = await self._read(call, codec.GivingUp)
        give_up = self._broker.consuming.dead_letter

        async def given_up(text: str, receipt: AnyReceipt | None) -> Answered:
            return Answered(text, receipt is not None and await give_up(receipt, request.reason))

        receipts = self._receipts(call, request.receipts)
        return _answered(list(await asyncio.gather(*map(given_up, request.receipts, receipts))))

    async def _nack(self, call: Call) -> Answer:
        request: codec.GivingBack = await self._read(call, codec.GivingBack)
        after_ms = None if request.after is UNSET else delay_ms(request.after)
        nack = self._broker.consuming.nack
        return await self._change(call, request.receipts, lambda one: nack(one, after_ms, request.reason))

    async def _extend(self, call: Call) -> Answer:
        request: codec.Extending = await self._read(call, codec.Extending)
        lease_ms, change = codec.lease_ms(request.lease), self._broker.consuming.change_invisible_time
        return await self._change(call, request.receipts, lambda one: change(one, lease_ms))

    async def _change(
        self, call: Call, texts: list[str], change: Callable[[AnyReceipt], Awaitable[AnyReceipt | None]]
    ) -> Answer:
        receipts = self._receipts(call, texts)

        async def changed(text: str, receipt: AnyReceipt | None) -> Answered:
            to = None if receipt is None else await change(receipt)
            return Answered(text, False) if to is None else Answered(self._handles.encode(to), True)

        return _answered(list(await asyncio.gather(*map(changed, texts, receipts))))

    async def _read(self, call: Call, kind: type[Any]) -> Any:
        topic, group = call.path["topic"], _group(call)
        return await read(call, kind, self._broker.policy, Verb.RECEIVE, topic=topic, group=group)

    def _receipts(self, call: Call, texts: list[str]) -> list[AnyReceipt | None]:
        """Decode receipts. None for a text that is not a receipt of this group and topic."""
        topic, group, policy = call.path["topic"], _group(call), self._broker.policy
        policy.allow(call.caller, Verb.RECEIVE, topic=topic, group=group)
        policy.check_group(group)
        if not 1 <= len(texts) <= limits.POP_ROWS_MAX:
            raise OutOfRange(f"{len(texts)} receipts: 1 to {limits.POP_ROWS_MAX} in one request")
        return [self._receipt(text, group, topic) for text in texts]

    def _receipt(self, text: str, group: str, topic: str) -> AnyReceipt | None:
        try:
            return self._handles.decode(text, group, topic)
        except InvalidReceipt:
            return None


def _group(call: Call) -> str:
    group = call.query.get("group")
    if not group:
        raise InvalidMessage("group: name the consumer group, as in ?group=workers")
    return group


def _answered(results: list[Answered]) -> Answer:
    return Answer(200, AnsweredMany(results))
