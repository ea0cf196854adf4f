"""What each path does: a request's parameters to a verb of the broker, and its result to an answer.

Receipts are sealed texts (receipt_handles.py), as over gRPC and Flight: leases are kept in the log, so that a message
which is received and never answered survives a crash and comes again.
"""

from __future__ import annotations

import asyncio
import os
from hashlib import blake2b
from typing import Any

from timeball import limits
from timeball.access import Verb
from timeball.broker.appender import Accepted
from timeball.broker.consuming.requests import AnyReceipt, Received, ReceiveRequest
from timeball.broker.ingress import Piece, settle
from timeball.broker.revoking.find_message import MessagePlace
from timeball.broker.service import Broker
from timeball.errors import InvalidMessage, InvalidReceipt, OutOfRange, Unavailable
from timeball.monitoring.metrics import CONTENT_TYPE, Metrics
from timeball.protocols.http import codec
from timeball.protocols.http.codec import Answered, AnsweredMany
from timeball.protocols.http.requests import Answer, Call, Gone, Handler, problem
from timeball.protocols.receipt_handles import ReceiptHandles
from timeball.wire import Verdict

SMALL_BYTES = 64 * 1024  # decoded on the loop; more in a thread
LEASE_MS = 60_000
# Of a cancel or a move: what it was too late for, as a status. A verdict that is not here was granted.
_TOO_LATE = {"not_found": 404, "released": 409, "already_cancelled": 409, "expired": 410}
_WORDS = {
    "not_found": "no scheduled message has this id",
    "released": "too late: it is in its queue",
    "already_cancelled": "it was cancelled before",
    "expired": "it waits no more; what became of it is older than what the broker keeps",
}


class _Piece(Piece, gc=False):
    accepted: Any  # a future of Accepted


class _Derived(codec.IdSource):
    """Ids of a send that may be repeated: the same for the same key, account and topic."""

    def __init__(self, *parts: str) -> None:
        self._parts = "\n".join(parts).encode()

    def id_of(self, at: int) -> str:
        return blake2b(self._parts + b"\n%d" % at, digest_size=16).hexdigest()


class _Fresh(codec.IdSource):
    def id_of(self, at: int) -> str:
        return os.urandom(16).hex()


class Handlers:
    """The handlers, by path and method. Belongs to the event loop."""

    def __init__(self, broker: Broker, metrics: Metrics) -> None:
        self._metrics = metrics
        self._broker, self._handles = broker, ReceiptHandles(broker.parts.receipt_secret.get)
        self._is_durable = broker.parts.settings.durability == "sync"
        topic = "/v1/topics/{topic}"
        self.paths: dict[str, dict[str, Handler]] = {
            "/metrics": {"GET": self._measure},
            "/v1/topics": {"GET": self._topics},
            f"{topic}/messages": {"GET": self._receive, "POST": self._send},
            f"{topic}/ack": {"POST": self._ack},
            f"{topic}/nack": {"POST": self._nack},
            f"{topic}/extend": {"POST": self._extend},
            "/v1/messages/{id:path}": {"GET": self._look, "PATCH": self._move, "DELETE": self._cancel},
        }
        self.open_paths: dict[str, dict[str, Handler]] = {
            "/health/live": {"GET": self._live},
            "/health/ready": {"GET": self._ready},
        }

    # -- sends ---------------------------------------------------------------------------------------------------

    async def _send(self, call: Call) -> Answer:
        topic, key = call.path["topic"], call.headers.get("idempotency-key")
        # What a client may not send is not read.
        self._broker.policy.destination(topic, call.caller)
        # Only with a header that no page of another site may send without being asked: a browser on this machine would
        # carry its messages here.
        is_event, kind = "ce-specversion" in call.headers, ""
        if not is_event:
            kind = codec.check_type(call.headers.get("content-type", ""), codec.JSON, codec.NDJSON)
        data = await call.body()
        now_ms = self._broker.parts.clock.now_ms() if key is None else None
        ids = _Fresh() if key is None else _Derived(call.caller.name, topic, key)
        if is_event:
            messages = codec.cloud_event(topic, call.headers, data, ids, now_ms)
        elif len(data) <= SMALL_BYTES:
            messages = codec.columns(topic, kind, data, ids, now_ms)
        else:
            messages = await asyncio.to_thread(codec.columns, topic, kind, data, ids, now_ms)
        accepted: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        rows = messages.batch.num_rows
        piece = _Piece(self, messages.batch, rows, messages.batch.nbytes, 0, call.caller, accepted)
        if key is None:
            self._broker.sends.put(piece)
        else:
            self._broker.keyed_sends.put(piece, key)
        first_seq, store_ms = await accepted
        sent = codec.sent(messages, first_seq, store_ms, durable=self._is_durable)
        return Answer(201, sent, size_bytes=200 * rows)

    def answer(self, pieces: list[_Piece], accepted: Accepted) -> None:
        """Tell each request where its messages stand (an Edge of broker/ingress.py)."""
        for piece in pieces:
            settle(piece.accepted, (accepted.first_seq + piece.first_row, accepted.store_ms))

    def refuse(self, pieces: list[_Piece], error: BaseException) -> None:
        """Tell each request why its messages were not taken."""
        for piece in pieces:
            settle(piece.accepted, error)

    # -- groups --------------------------------------------------------------------------------------------------

    async def _receive(self, call: Call) -> Answer:
        topic, group, query = call.path["topic"], _group(call), call.query
        subscription = self._broker.consuming.join(group, topic, call.caller)
        wait_ms = codec.span_ms(query.get("wait", "0"))
        if wait_ms > limits.PULL_WAIT_MS_MAX:
            raise OutOfRange(f"wait of {wait_ms} ms: at most {limits.PULL_WAIT_MS_MAX}")
        most = query.get("max", "32")
        if not (most.isdecimal() and len(most) < 9 and 1 <= int(most) <= limits.POP_ROWS_MAX):
            raise OutOfRange(f"max={most[:20]}: 1 to {limits.POP_ROWS_MAX}")
        request = ReceiveRequest(
            group,
            topic,
            rows=int(most),
            invisible_ms=codec.lease_ms(query.get("lease", str(LEASE_MS))),
            in_order=subscription.group.consume_message_orderly,
            in_log=True,
        )
        received = await self._received(call, request, wait_ms)
        handles = [self._handles.encode(receipt) for receipt in received.receipts]
        size_bytes = received.rows.nbytes if handles else 0
        return Answer(200, codec.leased(received.rows, topic, handles), size_bytes=size_bytes)

    async def _received(self, call: Call, request: ReceiveRequest, wait_ms: int) -> Received:
        """Return what the engine hands out; give it back when the client has gone meanwhile."""
        receiving = asyncio.ensure_future(self._broker.consuming.receive(request, wait_ms))
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

    async def _ack(self, call: Call) -> Answer:
        request: codec.Answering = await _read(call, codec.Answering)
        receipts = self._receipts(call, request.receipts)
        known = [receipt for receipt in receipts if receipt is not None]
        valid = iter(await self._broker.consuming.acknowledge(known))
        return _answered(
            [
                Answered(text, receipt is not None and next(valid))
                for text, receipt in zip(request.receipts, receipts, strict=True)
            ]
        )

    async def _nack(self, call: Call) -> Answer:
        request: codec.GivingBack = await _read(call, codec.GivingBack)
        after_ms = None if request.delay is None else codec.span_ms(request.delay)
        return await self._change(call, request.receipts, after_ms, counts=True)

    async def _extend(self, call: Call) -> Answer:
        request: codec.Extending = await _read(call, codec.Extending)
        return await self._change(call, request.receipts, codec.lease_ms(request.lease), counts=True)

    async def _change(
        self, call: Call, texts: list[str], invisible_ms: int | None, *, counts: bool
    ) -> Answer:
        receipts, change = self._receipts(call, texts), self._broker.consuming.change_invisible_time

        async def changed(text: str, receipt: AnyReceipt | None) -> Answered:
            to = None if receipt is None else await change(receipt, invisible_ms, counts=counts)
            return Answered(text, False) if to is None else Answered(self._handles.encode(to), True)

        return _answered(list(await asyncio.gather(*map(changed, texts, receipts))))

    def _receipts(self, call: Call, texts: list[str]) -> list[AnyReceipt | None]:
        """Return the receipts of these texts, None for one that is none of this group and topic."""
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

    # -- scheduled messages ----------------------------------------------------------------------------------------

    async def _look(self, call: Call) -> Answer:
        found = await self._broker.find(call.path["id"], call.query.get("topic"), call.caller)
        if not found:
            return problem(404, "not_found", "no message has this id, or what became of it is no longer kept")
        return Answer(200, {"id": call.path["id"], "messages": [_place(one) for one in found]})

    async def _move(self, call: Call) -> Answer:
        request: codec.Moving = await _read(call, codec.Moving)
        if (request.deliver_at is None) == (request.delay is None):
            raise InvalidMessage("give one of deliver_at and delay")
        due_ms, delay_ms = codec.when(request.deliver_at, request.delay)
        return _verdict(
            await self._broker.reschedule(
                ids=[call.path["id"]], topic=call.query.get("topic"), caller=call.caller,
                due_ms=due_ms, delay_ms=delay_ms,
            )
        )  # fmt: skip

    async def _cancel(self, call: Call) -> Answer:
        topic = call.query.get("topic")
        return _verdict(await self._broker.cancel(ids=[call.path["id"]], topic=topic, caller=call.caller))

    # -- people ----------------------------------------------------------------------------------------------------

    async def _topics(self, call: Call) -> Answer:
        topics = self._broker.topics(call.caller)
        return Answer(200, {"topics": [{"topic": name, **facts} for name, facts in sorted(topics.items())]})

    async def _measure(self, call: Call) -> Answer:
        self._broker.policy.allow(call.caller, Verb.LOOK)
        return Answer(200, await self._metrics.text(), media_type=CONTENT_TYPE)

    async def _live(self, call: Call) -> Answer:
        return Answer(200, {"status": "live"})

    async def _ready(self, call: Call) -> Answer:
        writer = self._broker.parts.writer
        if writer.failed is not None:
            raise Unavailable("the log has stopped: see the broker's log")
        if writer.no_room:
            raise Unavailable("disk full: free some space, the broker goes on by itself")
        return Answer(200, {"status": "ready"})


async def _read(call: Call, kind: type[Any]) -> Any:
    codec.check_type(call.headers.get("content-type", ""), codec.JSON)
    return codec.decode(kind, await call.body())


def _group(call: Call) -> str:
    group = call.query.get("group")
    if not group:
        raise InvalidMessage("group: name the consumer group, as in ?group=workers")
    return group


def _answered(results: list[Answered]) -> Answer:
    return Answer(200, AnsweredMany(results))


def _verdict(verdicts: list[Verdict]) -> Answer:
    """Return the answer to a cancel or a move: that of the first of the messages with this id."""
    first = verdicts[0]
    facts: dict[str, Any] = {"verdict": first.verdict}
    if first.at_ms is not None:
        facts["at"] = codec.instant_text(first.at_ms)
    if first.verdict in _TOO_LATE:
        return problem(_TOO_LATE[first.verdict], first.verdict, _WORDS[first.verdict], **facts)
    if first.due_ms is not None:
        facts |= {"due": codec.instant_text(first.due_ms), "due_ms": first.due_ms}
    return Answer(200, {"id": first.subject, "seq": first.seq, **facts})


def _place(found: MessagePlace) -> dict[str, Any]:
    """Return where a message is, with its instants as texts too."""
    place = {name: value for name, value in found._asdict().items() if value is not None}
    for name in ("due_ms", "at_ms"):
        if name in place:
            place[name.removesuffix("_ms")] = codec.instant_text(place[name])
    return place
