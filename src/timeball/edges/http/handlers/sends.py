"""Sends over HTTP, requests about single scheduled messages, and queries for pending messages.

The messages of a send go to the broker's batcher. The answer has their positions in the log.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

from timeball.broker.accepting.appender import Accepted, Sent
from timeball.broker.accepting.ingress import Piece, settle
from timeball.broker.pending.window_loads import DeliveryWindow
from timeball.broker.service import Broker
from timeball.edges.http import answers_codec, codec, send_codec
from timeball.edges.http.codec import Answer, problem
from timeball.edges.http.requests import Call, DirectHandler, Paths, Respond, read_request
from timeball.edges.http.send_codec import DecodedSend
from timeball.edges.shared.error_codes import Refused
from timeball.io.threads import in_slices
from timeball.model import http_api, limits
from timeball.model.access import Verb
from timeball.model.answers import CREATED, EXISTS, KEPT, UNAVAILABLE, Verdict
from timeball.model.errors import InvalidMessage, OutOfRange
from timeball.model.send_options import last_offset_ms
from timeball.model.trace_context import context_from_headers, with_contexts
from timeball.model.values import size_bytes

# ---- sends ---------------------------------------------------------------------------------------------------

# up to this size a body is decoded on the event loop, and larger ones in a thread
INLINE_DECODE_BYTES_MAX = 64 * 1024
_IDS_PER_BLOCK = 64  # drawn by one system call
ANSWER_ROW_BYTES = 200  # about, of the answer to one message


class _Send(NamedTuple):
    """A request to send, whose headers are checked and whose body is not decoded yet."""

    topic: str
    key: str | None  # its idempotency key
    attempt: str  # the header Idempotency-Attempt
    sends_anew: bool  # send again if the messages of an earlier send with this key are settled
    may_use_rows: bool  # see send_codec.decode_messages
    decode: Callable[..., DecodedSend]  # body, ids, now_ms, keeps_delays, may_use_rows


class _Piece(Piece, gc=False):
    """The messages of one request in a batch of sends."""

    decoded: Any  # DecodedSend
    has_key: bool
    respond: Any  # Respond


class _DerivedIds(send_codec.IdSource):
    """Ids for a send with an idempotency key: the same account, topic and key always get the same ids."""

    def __init__(self, *scope: str) -> None:
        self._scope = "\n".join(scope).encode()

    def id_of(self, index: int) -> str:
        return blake2b(self._scope + b"\n%d" % index, digest_size=16).hexdigest()


class _RandomIds(send_codec.IdSource):
    """Random ids. They are drawn in blocks, because the system call is the most expensive step."""

    def __init__(self) -> None:
        self._unused_ids: list[str] = []

    def id_of(self, index: int) -> str:
        """Make a random id of 32 hexadecimal characters. The index of the message is not needed."""
        # Threads that decode large requests call this too. Each step on the list is atomic in the interpreter.
        try:
            return self._unused_ids.pop()
        except IndexError:
            digits = os.urandom(16 * _IDS_PER_BLOCK).hex()
            ids = [digits[begin : begin + 32] for begin in range(0, len(digits), 32)]
            self._unused_ids.extend(ids[1:])
            return ids[0]


_RANDOM_IDS = _RandomIds()


class Sends:
    """Serves sends. An Edge of broker/accepting/ingress.py. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._is_durable = broker, broker.settings.durability == "sync"
        self._tasks: set[asyncio.Task[None]] = set()
        self.paths: Paths = {"/v1/topics/{topic}/messages": {"POST": DirectHandler(self._begin, self._send)}}

    def _begin(self, call: Call, respond: Respond) -> bool:
        """Begin to send the messages of a request. Returns False if its body is missing or large, and `_send` must run.

        Raises the errors of `_check`, of the decoding, and of `_put`.
        """
        send = self._check(call)
        if len(call.exchange.body) > INLINE_DECODE_BYTES_MAX:
            return False
        data = call.take_body()
        if data is None:
            return False
        self._put(call, send, self._decode(call, send, data), respond)
        return True

    async def _send(self, call: Call) -> Answer:
        """Send the messages of a request. The answer contains their ids and sequence numbers."""
        send = self._check(call)
        data = await call.read_body()
        if len(data) <= INLINE_DECODE_BYTES_MAX:
            decoded = self._decode(call, send, data)
        else:
            decoded = await asyncio.to_thread(self._decode, call, send, data)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._put(call, send, decoded, partial(settle, answer))
        return await answer

    def _check(self, call: Call) -> _Send:
        """Check the headers of a request, and whether its caller may send to the topic.

        Raises InvalidMessage, InvalidName, Refused (415), Unauthorized, Forbidden and NotFound.
        """
        topic, key = call.path["topic"], call.headers.get("idempotency-key")
        attempt = call.headers.get("idempotency-attempt", "")
        if_settled = call.headers.get("idempotency-if-settled", "")
        if if_settled not in ("", "keep", "send"):
            raise InvalidMessage(f"idempotency-if-settled: {if_settled[:80]!r}; 'keep' or 'send'")
        if key is None and (attempt or if_settled):
            raise InvalidMessage("name the send by the header idempotency-key, too")
        # If the client may not send to the topic, the body is not read.
        policy = self._broker.policy
        policy.allow(call.caller, Verb.SEND, topic=topic)
        # A drained cluster group accepts no new send, but answers a repeated send.
        accepts_only_repeats = key is not None and policy.closed
        topic_entry = None if accepts_only_repeats else policy.find_destination(topic, call.caller)
        # Each send needs a header that no page of another site may send without a preflight request. Otherwise a
        # browser on this machine could be made to send that site's messages.
        if "ce-specversion" in call.headers:
            decode = partial(send_codec.decode_cloud_event, topic, call.headers)
        elif send_codec.is_raw(call.headers):
            decode = partial(send_codec.decode_raw, topic, call.headers)
        else:
            media_type = _media_type(call.headers.get("content-type", ""))
            decode = partial(send_codec.decode_messages, topic, media_type)
        # Rows are only for messages that the broker accepts without a further decision. Columns are needed if the topic
        # must be created first.
        may_use_rows = topic_entry is not None
        return _Send(topic, key, attempt, if_settled == "send", may_use_rows, decode)

    def _decode(self, call: Call, send: _Send, data: bytes) -> DecodedSend:
        """Decode the body of a request, and add the trace context of its headers to the messages."""
        now_ms = self._broker.clock.now_ms()
        ids = _RANDOM_IDS if send.key is None else _DerivedIds(call.caller.name, send.topic, send.key)
        decoded = send.decode(data, ids, now_ms, send.key is not None, may_use_rows=send.may_use_rows)
        if trace_context := context_from_headers(call.headers):
            rows = with_contexts(decoded.rows, [trace_context] * decoded.row_count)
            decoded = decoded._replace(rows=rows)
        return decoded

    def _put(self, call: Call, send: _Send, decoded: DecodedSend, respond: Respond) -> None:
        """Give messages to the broker. `respond` receives the answer when the broker has accepted them.

        Raises InvalidMessage.
        """
        if decoded.level_windows_ms:
            if send.key is not None:
                raise InvalidMessage(
                    "spread level and an idempotency key: use the spread even, which repeats its choice"
                )
            # The loop holds only weak references to tasks.
            self._tasks.add(task := asyncio.ensure_future(self._put_level(call, send, decoded, respond)))
            task.add_done_callback(self._tasks.discard)
            return
        self._put_now(call, send, decoded, respond)

    async def _put_level(self, call: Call, send: _Send, decoded: DecodedSend, respond: Respond) -> None:
        """Choose the due times of messages in level windows, and give the messages to the broker."""
        try:
            begins_ms = send_codec.begins_of_windows(decoded, self._broker.clock.now_ms())
            windows = [
                DeliveryWindow(begin_ms, begin_ms + last_offset_ms(decoded.level_windows_ms[index]))
                for index, begin_ms in begins_ms.items()
            ]
            chosen_ms = await self._broker.window_loads.choose(windows)
            due_times_ms = dict(zip(begins_ms, chosen_ms, strict=True))
            self._put_now(call, send, send_codec.with_due_times(decoded, due_times_ms), respond)
        except Exception as error:  # any error: the client waits for an answer
            respond(error)

    def _put_now(self, call: Call, send: _Send, decoded: DecodedSend, respond: Respond) -> None:
        """Give messages with final due times to the broker."""
        # `_check` has checked the topic of rows. For columns and keys, the broker checks the caller again.
        caller = None if isinstance(decoded.rows, list) and send.key is None else call.caller
        piece = _Piece(
            self, decoded.rows, decoded.row_count, decoded.size_bytes, 0, caller, decoded, send.key is not None,
            respond,
        )  # fmt: skip
        if send.key is not None:
            self._broker.keyed_sends.put(
                piece, send.key, send.attempt, anew=send.sends_anew, unique=decoded.unique
            )
        elif decoded.unique is not None:
            self._broker.unique_sends.put(piece, decoded.unique, call.caller)
        else:
            self._broker.sends.put(piece)

    def answer(self, pieces: list[_Piece], accepted: Accepted) -> None:
        """Answer the requests whose messages the broker has accepted, with the positions of the messages."""
        for piece in pieces:
            decoded, repeated = piece.decoded, accepted.sent
            if piece.has_key and repeated is None:
                repeated = Sent(CREATED, [])
            answer = send_codec.build_answer(
                decoded, accepted.first_seq + piece.first_row, accepted.store_ms,
                None if repeated is None else (repeated.outcome, repeated.states),
                durable=self._is_durable, pending=None if repeated is None else repeated.pending,
            )  # fmt: skip
            answer_rows = 1 if decoded.ids_and_times is None else decoded.row_count
            status = 200 if repeated and repeated.outcome in (EXISTS, KEPT) else 201
            piece.respond(Answer(status, answer, size_bytes=ANSWER_ROW_BYTES * answer_rows))

    def refuse(self, pieces: list[_Piece], error: BaseException) -> None:
        """Complete the requests with the error that refused their messages."""
        for piece in pieces:
            piece.respond(error)


def _media_type(content_type: str) -> str:
    """Find the media type of a send that is neither an event nor a raw body. Raises Refused (415)."""
    try:
        return codec.check_content_type(content_type, codec.JSON, codec.NDJSON, send_codec.ARROW)
    except Refused as error:
        # curl sends this type by default.
        raise Refused(415, f"{error}; for a body as it is, add the header timeball-raw: true") from error


# ---- single scheduled messages: look up, cancel and reschedule -----------------------------------------------

# the status for each verdict of a cancel or reschedule that was not carried out; all other verdicts mean success
_REFUSAL_STATUSES = {
    "not_found": 404, "released": 409, "already_cancelled": 409, "expired": 410, UNAVAILABLE: 503,
}  # fmt: skip
_REFUSAL_TEXTS = {
    "not_found": "no scheduled message has this id",
    "released": "too late: it is in its queue",
    "already_cancelled": "it was cancelled before",
    "expired": "it is no longer pending, and the broker no longer keeps its outcome",
    UNAVAILABLE: "a group of the cluster did not answer; ask again",
}


class Scheduled:
    """Serves the path of a single message, and those for several ids or keys. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {
            "/v1/messages/{id:path}": {"GET": self._get, "PATCH": self._reschedule, "DELETE": self._cancel},
            "/v1/cancel": {"POST": self._cancel_many},
            "/v1/reschedule": {"POST": self._reschedule_many},
        }

    async def _get(self, call: Call) -> Answer:
        """Show the messages with an id, the newest first. Other tasks run while many messages are encoded."""
        messages = await self._broker.find(call.path["id"], call.query.get("topic"), call.caller)
        if not messages:
            return problem(
                404, "not_found", "no message has this id, or the broker no longer keeps its outcome"
            )
        shown = messages[: limits.FOUND_MESSAGES_MAX]
        parts = [
            codec.encode([answers_codec.show_message(message) for message in part])[1:-1]
            async for part in in_slices(shown)
        ]
        data = b'{"id":%b,"messages":[%b]%b}' % (
            codec.encode(call.path["id"]),
            b",".join(parts),
            b',"messages_cut":true' if len(shown) < len(messages) else b"",
        )
        return Answer(200, data, size_bytes=len(data))

    async def _reschedule(self, call: Call) -> Answer:
        """Change the due time of the messages with the id in the path. The answer has the first verdict.

        Raises InvalidMessage unless the request names one time, and the errors of `read_request`.
        """
        request: codec.Moving = await read_request(call, codec.Moving, self._broker.policy, Verb.LOOK)
        due_ms, delay_ms = codec.due_and_delay_ms(request.at, request.after)
        if due_ms is None and delay_ms is None:
            raise InvalidMessage("give one of at and after")
        return _build_verdict_answer(
            await self._broker.reschedule(
                ids=[call.path["id"]], topic=call.query.get("topic"), caller=call.caller,
                due_ms=due_ms, delay_ms=delay_ms,
            )
        )  # fmt: skip

    async def _cancel(self, call: Call) -> Answer:
        """Cancel the messages with the id in the path, in all topics or in that of the query."""
        topic = call.query.get("topic")
        return _build_verdict_answer(
            await self._broker.cancel(ids=[call.path["id"]], topic=topic, caller=call.caller)
        )

    async def _cancel_many(self, call: Call) -> Answer:
        """Cancel the messages with these ids, or with these keys. The answer has the verdict of each message.

        Raises InvalidMessage, OutOfRange and the errors of `read_request`.
        """
        # Verb.LOOK: `Broker.cancel` hides the messages that the caller may not cancel. So does `Broker.reschedule`.
        request: http_api.CancellingMany = await read_request(
            call, http_api.CancellingMany, self._broker.policy, Verb.LOOK
        )
        _check_names(request.ids, request.keys)
        return await build_verdicts_answer(
            await self._broker.cancel(ids=request.ids, keys=request.keys, caller=call.caller)
        )

    async def _reschedule_many(self, call: Call) -> Answer:
        """Change the due time of the messages with these ids or keys. Answers and raises as `_cancel_many`."""
        request: http_api.ReschedulingMany = await read_request(
            call, http_api.ReschedulingMany, self._broker.policy, Verb.LOOK
        )
        _check_names(request.ids, request.keys)
        due_ms, delay_ms = codec.due_and_delay_ms(request.at, request.after)
        if due_ms is None and delay_ms is None:
            raise InvalidMessage("give one of at and after")
        return await build_verdicts_answer(
            await self._broker.reschedule(
                ids=request.ids, keys=request.keys, due_ms=due_ms, delay_ms=delay_ms, caller=call.caller
            )
        )


def _check_names(ids: list[str], keys: list[str]) -> None:
    """Raise InvalidMessage unless a request names messages either by ids or by keys, and OutOfRange for too many."""
    if bool(ids) == bool(keys):
        raise InvalidMessage("name the messages by ids or by keys")
    if len(ids) + len(keys) > limits.CANCELS_PER_REQUEST_MAX:
        raise OutOfRange(
            f"{len(ids) + len(keys)} names: at most {limits.CANCELS_PER_REQUEST_MAX} in a request"
        )
    for name in (*ids, *keys):
        if not 0 < size_bytes(name) <= limits.UNIQUE_KEY_BYTES_MAX:
            raise InvalidMessage(f"an id or key has 1 to {limits.UNIQUE_KEY_BYTES_MAX} bytes")


async def build_verdicts_answer(verdicts: list[Verdict]) -> Answer:
    """Build the answer to a cancel or reschedule of several messages.

    It is encoded in slices, because it may have a million verdicts.
    """
    parts = [codec.encode(answers_codec.show_verdicts(part))[1:-1] async for part in in_slices(verdicts)]
    data = b'{"verdicts":[%b]}' % b",".join(parts)
    return Answer(200, data, size_bytes=len(data))


def _build_verdict_answer(verdicts: list[Verdict]) -> Answer:
    """Build the answer to a cancel or reschedule from its first verdict. A refusal is a problem document."""
    verdict = verdicts[0]
    if verdict.verdict not in _REFUSAL_STATUSES:
        return Answer(200, answers_codec.show_verdict(verdict))
    members: dict[str, Any] = {"verdict": verdict.verdict}
    if verdict.at_ms is not None:
        members["at"] = codec.format_time(verdict.at_ms)
    return problem(
        _REFUSAL_STATUSES[verdict.verdict], verdict.verdict, _REFUSAL_TEXTS[verdict.verdict], **members
    )


# ---- pending messages: pages, and forecasts of how many are due when -----------------------------------------


class PendingMessages:
    """Serves the queries for pending messages. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {"/v1/messages": {"GET": self._list}, "/v1/forecast": {"GET": self._forecast}}

    async def _list(self, call: Call) -> Answer:
        page = await self._broker.listing.page(answers_codec.parse_page_query(call.query), call.caller)
        return Answer(200, answers_codec.page_answer(page))

    async def _forecast(self, call: Call) -> Answer:
        """Count the due messages by bucket and topic, and the later times of recurring schedules."""
        query, (from_ms, to_ms) = call.query, answers_codec.parse_window(call.query)
        unit = answers_codec.parse_unit(query.get("by", "hour"))
        counted = await self._broker.forecast.counted(
            unit, from_ms, to_ms, query.get("topic"), call.caller, recurring=True
        )
        return Answer(200, answers_codec.forecast_answer(counted))
