"""Requests and answers of the HTTP API as the client's calls have them. No I/O.

`ACTIONS` has for each verb the request to make of its body, and the conversion of the answer's bytes to the answer of
the verb.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from msgspec import UNSET

from timeball.client.attempts import Lost, refusal
from timeball.client.http_connection import Reply, Request
from timeball.client.rows import Outgoing
from timeball.model import http_api, limits, wire
from timeball.model.answers import (
    EXISTS,
    Content,
    DeadLetterPage,
    DeadLetterRow,
    GroupPage,
    GroupPlace,
    GroupState,
    MessagePlace,
    QueueRange,
    Resolved,
    SendAck,
    SentState,
    Verdict,
)
from timeball.model.errors import InvalidMessage, InvalidName, TimeballError
from timeball.model.values import decode_properties, shown

JSON, NDJSON = (("content-type", "application/json"),), (("content-type", "application/x-ndjson"),)
REQUEST_BYTES_MAX = 2 * limits.BODY_BYTES_MAX  # the broker's limit

T = TypeVar("T")

encode = msgspec.json.encode


def path(*names: str, **query: str | int | None) -> str:
    """Build a target below /v1 from names and the parameters of the query that are given.

    Raises InvalidName for a topic or group that cannot be in a path, which no broker accepts either.
    """
    if len(names) > 1 and names[0] in ("topics", "groups") and not limits.NAME.fullmatch(names[1]):
        raise InvalidName(f"{names[0][:-1]} {shown(names[1])}: letters, digits, % | _ and -")
    target = "/v1/" + "/".join(quote(name, safe="") for name in names)
    given = {name: value for name, value in query.items() if value is not None}
    return f"{target}?{urlencode(given, quote_via=quote)}" if given else target


# ---- errors ---------------------------------------------------------------------------------------------------


class Problem(msgspec.Struct):
    """A problem document: the code and the text of an error."""

    code: str
    detail: str = ""


_PROBLEM = msgspec.json.Decoder(Problem)


def error_of(reply: Reply, endpoint: str) -> TimeballError:
    """Build the error of an answer with a status of an error."""
    try:
        problem = _PROBLEM.decode(reply.body)
    except msgspec.MsgspecError:
        text = f"{endpoint} answered with status {reply.status}, and not as a broker would"
        # Perhaps a proxy or a broken broker, which may have carried out the call.
        return Lost(text) if reply.status >= 500 else TimeballError(text)
    return refusal(problem.code, problem.detail)


def decoded(decode: Callable[[bytes], T], data: bytes, endpoint: str, *, is_read: bool) -> T:
    """Decode an answer. For other bytes than a broker's, raises Lost, or TimeballError if the call `is_read` only."""
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
        text = f"{endpoint} answered with success, but not as a broker would: {error}"
        raise (TimeballError(text) if is_read else Lost(text)) from error


# ---- sends ----------------------------------------------------------------------------------------------------


class SentRows(NamedTuple):
    """A decoded answer to a send. `past_rows` and `past_ms` are those of SendSummary.

    `due_ms` is the due time of the first message, which the broker counts from when it read the request.
    """

    ack: SendAck
    past_rows: int
    past_ms: int
    due_ms: int | None


_SENT, _SENT_MANY = msgspec.json.Decoder(http_api.Sent), msgspec.json.Decoder(http_api.SentMany)


def send_request(
    messages: Sequence[Outgoing], key: wire.SendKey | None, context: Iterable[tuple[str, str]]
) -> Request:
    """Build the request that sends messages to the topic of the first. `context` are the headers of a trace."""
    headers = [*context]
    if key is not None:
        headers += [
            ("idempotency-key", quote(key.idempotency_key, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}")),
            ("idempotency-attempt", key.attempt),
            ("idempotency-if-settled", key.if_settled),
        ]
    for message in messages:
        if len(message.body) > limits.BODY_BYTES_MAX:
            raise InvalidMessage(f"body: more than {limits.BODY_BYTES_MAX} bytes")
    body = _encode_messages(messages, as_text=True)
    if len(body) > REQUEST_BYTES_MAX:  # control characters in a text have six bytes each
        body = _encode_messages(messages, as_text=False)
    content_type = JSON if len(messages) == 1 else NDJSON
    return Request("POST", path("topics", messages[0].topic, "messages"), body, (*content_type, *headers))


def _encode_messages(messages: Sequence[Outgoing], *, as_text: bool) -> bytes:
    """Encode one message in a line. Bodies are texts where they can be, or base64."""
    return b"\n".join([encode(_to_json(message, as_text)) for message in messages])


def _to_json(message: Outgoing, as_text: bool) -> http_api.Message:
    text, not_text = None, None
    try:
        text = message.body.decode() if as_text else None
    except UnicodeDecodeError:
        pass
    if text is None:
        not_text = message.body
    return http_api.Message(
        id=message.id, body=text, base64=not_text, keys=message.keys.split(" ") if message.keys else [],
        tag=message.tag, properties=decode_properties(message.properties or ""),
        at=UNSET if message.due_ms is None else message.due_ms,
        after=UNSET if message.delay_ms is None else f"{message.delay_ms}ms",
    )  # fmt: skip


def decode_sent(data: bytes, rows: int) -> SentRows:
    """Decode the answer to a send of `rows` messages."""
    if rows == 1:
        sent = _SENT.decode(data)
        messages, store_ms = [sent], sent.store_ms
    else:
        answer = _SENT_MANY.decode(data)
        messages, store_ms = answer.messages, answer.store_ms
    first = messages[0]
    states = []
    if first.outcome == EXISTS:
        states = [SentState(message.state or "", message.due_ms) for message in messages]
    past = [message.past_ms for message in messages if message.past_ms]
    ack = SendAck(first.seq, len(messages), store_ms, first.outcome or "created", states)
    return SentRows(ack, len(past), max(past, default=0), first.due_ms)


# ---- received messages ----------------------------------------------------------------------------------------


class Received(http_api.Leased):
    """A received message. A ReceivedRow: see `Leased` of messages.py for its fields."""

    @property
    def body(self) -> bytes:
        return _body(self.text, self.base64)

    @property
    def queue_id(self) -> int:
        return self.queue

    @property
    def queue_offset(self) -> int:
        return self.offset

    @property
    def born_ms(self) -> int | None:
        return None

    @property
    def store_ms(self) -> int:
        return _to_ms(self.released)

    @property
    def due_ms(self) -> int | None:
        return None if self.due is None else _to_ms(self.due)

    @property
    def attempts(self) -> int:
        return self.attempt - 1


class _ReceivedMany(msgspec.Struct):
    messages: list[Received]


_RECEIVED, _RECEIVED_MANY = msgspec.json.Decoder(Received), msgspec.json.Decoder(_ReceivedMany)


def _body(text: str | None, base64: bytes | None) -> bytes:
    return (base64 or b"") if text is None else text.encode()


def _to_ms(time: str) -> int:
    return round(datetime.fromisoformat(time).timestamp() * 1000)


def receive_target(request: wire.Receive, credit: int | None = None) -> str:
    """Build the target of a receive, or with a `credit` that of a stream."""
    return path(
        "topics", request.topic, "receive" if credit is None else "stream",
        group=request.group, credit=credit, lease=f"{request.invisible_ms}ms",
        max=request.rows if credit is None else None,
        wait=f"{request.wait_ms}ms" if credit is None else None,
        start="latest" if request.latest else None, tag=request.tag or None, sql=request.sql or None,
    )  # fmt: skip


def decode_received(data: bytes) -> list[Received]:
    """Decode the answer to a receive."""
    return _RECEIVED_MANY.decode(data).messages


def decode_lines(data: bytes) -> list[Received]:
    """Decode whole lines of a stream. Empty lines keep the connection alive."""
    return [_RECEIVED.decode(line) for line in data.split(b"\n") if line]


# ---- actions --------------------------------------------------------------------------------------------------


class Action(NamedTuple):
    """A request, and the conversion of the body of its answer."""

    request: Request
    decode: Callable[[bytes], Any]


def _post(target: str, body: object) -> Request:
    return Request("POST", target, encode(body), JSON)


def _get(body: wire.Get) -> Action:
    def decode(data: bytes) -> dict[str, list[MessagePlace]]:
        return {
            "messages": [_place(place) for place in msgspec.json.decode(data, type=http_api.Places).messages]
        }

    return Action(Request("GET", path("messages", body.id, topic=body.topic)), decode)


def _place(place: http_api.Place) -> MessagePlace:
    content = None
    if place.size_bytes is not None:
        content = Content(
            _body(place.body, place.base64),
            place.size_bytes,
            place.tag,
            place.keys or [],
            place.properties or {},
        )
    return MessagePlace(
        place.state, place.seq, place.topic, place.queue_id, place.queue_offset, place.at_ms, place.due_ms, content,
        [GroupPlace(each.group, each.state, each.attempts, each.until_ms) for each in place.groups], place.by,
        place.reason,
    )  # fmt: skip


def _settle(verb: str) -> Callable[[wire.Cancel | wire.Reschedule], Action]:
    def decode(data: bytes) -> dict[str, list[Verdict]]:
        verdicts = msgspec.json.decode(data, type=http_api.SettledMany).verdicts
        return {
            "verdicts": [
                Verdict(each.id, each.verdict, each.seq, each.at_ms, each.due_ms) for each in verdicts
            ]
        }

    def build(body: wire.Cancel | wire.Reschedule) -> Action:
        request: object = http_api.CancellingMany(body.ids, body.keys)
        if isinstance(body, wire.Reschedule):
            request = http_api.ReschedulingMany(
                body.ids, body.keys,
                UNSET if body.due_ms is None else body.due_ms,
                UNSET if body.delay_ms is None else f"{body.delay_ms}ms",
            )  # fmt: skip
        return Action(_post(path(verb), request), decode)

    return build


def _answered(data: bytes) -> list[http_api.Answered]:
    return msgspec.json.decode(data, type=http_api.AnsweredMany).results


def _valid(data: bytes) -> dict[str, list[bool]]:
    return {"valid": [each.valid for each in _answered(data)]}


def _acknowledge(body: wire.Acknowledge) -> Action:
    target = path("topics", body.topic, "ack", group=body.group)
    return Action(_post(target, http_api.Answering(body.receipts)), _valid)


def _dead_letter(body: wire.DeadLetter) -> Action:
    target = path("topics", body.topic, "dead-letter", group=body.group)
    return Action(_post(target, http_api.GivingUp(body.receipts, body.reason)), _valid)


def _change(body: wire.ChangeInvisibleTime) -> Action:
    """A nack, or an extension. A lease that ends at once without a nack is given back."""
    lease = None if body.invisible_ms is None else f"{body.invisible_ms}ms"
    request: object
    if body.nack:
        verb, after = "nack", UNSET if lease is None else lease
        request = http_api.GivingBack(body.receipts, after, body.reason, body.counts)
    else:
        verb, request = "extend", http_api.Extending(body.receipts, lease or "0", body.counts)

    def decode(data: bytes) -> dict[str, list[str | None]]:
        return {"receipts": [each.receipt if each.valid else None for each in _answered(data)]}

    return Action(_post(path("topics", body.topic, verb, group=body.group), request), decode)


def _groups(body: wire.Groups) -> Action:
    if body.group is not None:
        return Action(
            Request("GET", path("groups", body.group)),
            lambda data: GroupPage([msgspec.json.decode(data, type=GroupState)]),
        )
    target = path("groups", max=body.rows, page=body.after)
    return Action(Request("GET", target), lambda data: msgspec.json.decode(data, type=GroupPage))


def _list_dead_letters(body: wire.DeadLetters) -> Action:
    def decode(data: bytes) -> DeadLetterPage:
        page = msgspec.json.decode(data, type=http_api.DeadLetters)
        rows = [
            DeadLetterRow(
                dead_letter=each.dead_letter, id=each.id, topic=each.topic, died_ms=each.died_ms,
                attempts=each.attempts, body=_body(each.body, each.base64), size_bytes=each.size_bytes,
                tag=each.tag, keys=each.keys, properties=each.properties, reason=each.reason,
            )
            for each in page.dead_letters
        ]  # fmt: skip
        return DeadLetterPage(rows, page.next_page)

    return Action(
        Request("GET", path("groups", body.group, "dead-letters", max=body.rows, page=body.after)), decode
    )


def _resolve(verb: str) -> Callable[[wire.ResolveDeadLetters], Action]:
    def decode(data: bytes) -> Resolved:
        dealt = msgspec.json.decode(data, type=http_api.DealtMany)
        return Resolved(dealt.count, [each.verdict != "not_found" for each in dealt.results])

    def build(body: wire.ResolveDeadLetters) -> Action:
        request = http_api.Resolving(body.dead_letters, body.dead_letters is None)
        return Action(_post(path("groups", body.group, "dead-letters", verb), request), decode)

    return build


def _create_topic(body: wire.CreateTopic) -> Action:
    request = Request("PUT", path("topics", body.topic), encode(http_api.TopicMade(body.queues)), JSON)
    return Action(request, msgspec.json.decode)


def _topics(_: object) -> Action:
    def decode(data: bytes) -> dict[str, dict[str, dict[str, int]]]:
        topics = msgspec.json.decode(data, type=http_api.Topics).topics
        return {"topics": {each.topic: {"queues": each.queues} for each in topics}}

    return Action(Request("GET", path("topics")), decode)


def _queues(body: wire.Queues) -> Action:
    def decode(data: bytes) -> dict[str, dict[int, QueueRange]]:
        return {"queues": msgspec.json.decode(data, type=http_api.TopicQueues).queues}

    return Action(Request("GET", path("topics", body.topic)), decode)


def _read_offsets(body: wire.GetOffsets) -> Action:
    def decode(data: bytes) -> dict[str, dict[int, int]]:
        return {"offsets": msgspec.json.decode(data, type=http_api.GroupOffsets).offsets}

    return Action(Request("GET", path("topics", body.topic, "offsets", group=body.group)), decode)


def _commit(body: wire.Commit) -> Action:
    target = path("topics", body.topic, "offsets", group=body.group)
    return Action(
        Request("PUT", target, encode(http_api.Committing(body.offsets)), JSON), msgspec.json.decode
    )


ACTIONS: dict[str, Callable[[Any], Action]] = {
    "ack": _acknowledge,
    "cancel": _settle("cancel"),
    "change_invisible_time": _change,
    "commit": _commit,
    "create_topic": _create_topic,
    "dead_letter": _dead_letter,
    "dead_letters": _list_dead_letters,
    "delete_dead_letters": _resolve("delete"),
    "get": _get,
    "groups": _groups,
    "offsets": _read_offsets,
    "queues": _queues,
    "reschedule": _settle("reschedule"),
    "resend_dead_letters": _resolve("resend"),
    "status": lambda _: Action(Request("GET", path("broker")), msgspec.json.decode),
    "topics": _topics,
}
