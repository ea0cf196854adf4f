"""Sends over HTTP: the messages of a request go to the broker's batcher. The answer has their positions in the log."""

from __future__ import annotations

import asyncio
import os
from hashlib import blake2b
from typing import Any, NamedTuple

from timeball.broker.accepting.appender import Accepted, Sent
from timeball.broker.accepting.ingress import Piece, settle
from timeball.broker.service import Broker
from timeball.edges.http import codec, send_codec
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Paths
from timeball.edges.shared.error_codes import Refused
from timeball.model.access import Verb
from timeball.model.answers import CREATED, EXISTS
from timeball.model.errors import InvalidMessage
from timeball.model.trace_context import of_headers, with_contexts

SMALL_BYTES = 64 * 1024  # up to this size a body is decoded on the event loop, and larger ones in a thread
_IDS_AT_ONCE = 64  # of one system call


class _Stood(NamedTuple):
    """The position of messages in the log. `sent` is set for messages that were sent before."""

    first_seq: int
    store_ms: int
    sent: Sent | None


class _Piece(Piece, gc=False):
    accepted: Any  # a future of _Stood


class _Derived(send_codec.IdSource):
    """Ids for a send that may be repeated: the same ids for the same key, account and topic."""

    def __init__(self, *parts: str) -> None:
        self._parts = "\n".join(parts).encode()

    def id_of(self, at: int) -> str:
        return blake2b(self._parts + b"\n%d" % at, digest_size=16).hexdigest()


class _Fresh(send_codec.IdSource):
    """Random ids. They are drawn in blocks, because a system call costs more than the rest of making an id."""

    def __init__(self) -> None:
        self._ready: list[str] = []

    def id_of(self, at: int) -> str:
        # Threads that decode large requests call this too. Each step is atomic in the interpreter.
        try:
            return self._ready.pop()
        except IndexError:
            digits = os.urandom(16 * _IDS_AT_ONCE).hex()
            ids = [digits[begin : begin + 32] for begin in range(0, len(digits), 32)]
            self._ready.extend(ids[1:])
            return ids[0]


_FRESH = _Fresh()


class Sends:
    """Serves sends. An Edge of broker/accepting/ingress.py. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._is_durable = broker, broker.settings.durability == "sync"
        self.paths: Paths = {"/v1/topics/{topic}/messages": {"POST": self._send}}

    async def _send(self, call: Call) -> Answer:
        """Send the messages of a request. The answer contains their positions in the log."""
        topic, key = call.path["topic"], call.headers.get("idempotency-key")
        attempt, if_settled = (
            call.headers.get(f"idempotency-{name}", "") for name in ("attempt", "if-settled")
        )
        if if_settled not in ("", "keep", "send"):
            raise InvalidMessage(f"idempotency-if-settled: {if_settled[:80]!r}; 'keep' or 'send'")
        if key is None and (attempt or if_settled):
            raise InvalidMessage("name the send by the header idempotency-key, too")
        # If the client may not send to the topic, the body is not read.
        policy = self._broker.policy
        policy.allow(call.caller, Verb.SEND, topic=topic)
        # A drained group accepts no new send, but answers a repeated one.
        is_closed = key is not None and policy.closed
        known = None if is_closed else policy.destination(topic, call.caller)
        # Each send needs a header that no page of another site may send without a preflight request. Otherwise a
        # browser on this machine could be made to send that site's messages.
        is_event, kind = "ce-specversion" in call.headers, ""
        is_raw = not is_event and send_codec.is_raw(call.headers)
        if not is_event and not is_raw:
            kind = _kind(call.headers.get("content-type", ""))
        data = await call.body()
        # Messages become columns if the broker must still decide: on a topic to create, once nothing else is wrong, or
        # on a repeated send, which has the same columns.
        is_decided = known is not None and key is None
        now_ms = self._broker.clock.now_ms() if is_decided else None
        ids = _FRESH if key is None else _Derived(call.caller.name, topic, key)
        if is_event:
            sending = send_codec.cloud_event(topic, call.headers, data, ids, now_ms)
        elif is_raw:
            sending = send_codec.raw(topic, call.headers, data, ids, now_ms)
        elif len(data) <= SMALL_BYTES:
            sending = send_codec.read(topic, kind, data, ids, now_ms)
        else:
            sending = await asyncio.to_thread(send_codec.read, topic, kind, data, ids, now_ms)
        if context := of_headers(call.headers):
            rows = with_contexts(sending.rows, [context] * sending.row_count)
            sending = sending._replace(rows=rows)
        accepted: asyncio.Future[_Stood] = asyncio.get_running_loop().create_future()
        # Rows belong to a topic that the policy has checked already. Columns may not, and are checked again.
        caller = None if isinstance(sending.rows, list) else call.caller
        piece = _Piece(self, sending.rows, sending.row_count, sending.size_bytes, 0, caller, accepted)
        if key is None:
            self._broker.sends.put(piece)
        else:
            self._broker.keyed_sends.put(piece, key, attempt, anew=if_settled == "send")
        first_seq, store_ms, repeated = await accepted
        if key is not None and repeated is None:
            repeated = Sent(CREATED, [])
        sent = send_codec.sent(sending, first_seq, store_ms, repeated, durable=self._is_durable)
        answered = 1 if sending.places is None else sending.row_count
        return Answer(
            200 if repeated and repeated.outcome == EXISTS else 201, sent, size_bytes=200 * answered
        )

    def answer(self, pieces: list[_Piece], accepted: Accepted) -> None:
        """Complete the requests with the positions of their messages (see Edge in broker/accepting/ingress.py)."""
        for piece in pieces:
            first_seq = accepted.first_seq + piece.first_row
            settle(piece.accepted, _Stood(first_seq, accepted.store_ms, accepted.sent))

    def refuse(self, pieces: list[_Piece], error: BaseException) -> None:
        """Complete the requests with the error that refused their messages."""
        for piece in pieces:
            settle(piece.accepted, error)


def _kind(content_type: str) -> str:
    """Find the media type of a send that is neither an event nor a raw body. Raises Refused (415)."""
    try:
        return codec.check_type(content_type, codec.JSON, codec.NDJSON, send_codec.ARROW)
    except Refused as error:
        # curl sends this type by default.
        raise Refused(415, f"{error}; for a body as it is, add the header timeball-raw: true") from error
