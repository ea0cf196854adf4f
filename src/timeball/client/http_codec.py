"""Requests of the HTTP API, and the conversion of their answers to the results of the client's methods. No I/O.

The JSON has the structs of model/http_api.py. An `Operation` is the request of one method and the conversion of its
answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar
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
    GroupPlace,
    GroupState,
    MessagePlace,
    QueueRange,
    Resolved,
    SendAck,
    SentState,
    Verdict,
)
from timeball.model.errors import (
    AlreadyPending,
    InvalidMessage,
    InvalidName,
    NotFound,
    OutOfRange,
    TimeballError,
)
from timeball.model.send_options import OnPending
from timeball.model.values import decode_properties, shown

JSON, NDJSON = (("content-type", "application/json"),), (("content-type", "application/x-ndjson"),)
REQUEST_BYTES_MAX = 2 * limits.BODY_BYTES_MAX  # the broker's limit

T = TypeVar("T")

encode = msgspec.json.encode


def path(*names: str, **query: str | int | None) -> str:
    """Build a target below /v1 from the names in its path and the parameters of its query. Parameters may be None.

    Raises InvalidName for a topic or a group with a character that no broker accepts.
    """
    if len(names) > 1 and names[0] in ("topics", "groups") and not limits.NAME.fullmatch(names[1]):
        raise InvalidName(f"{names[0][:-1]} {shown(names[1])}: letters, digits, % | _ and -")
    target = "/v1/" + "/".join(quote(name, safe="") for name in names)
    parameters = {name: value for name, value in query.items() if value is not None}
    return f"{target}?{urlencode(parameters, quote_via=quote)}" if parameters else target


def listed(argument: str, texts: Iterable[str]) -> list[str]:
    """List the texts of an argument. Raises InvalidMessage for a str, because its letters would count as texts."""
    if isinstance(texts, str):
        raise InvalidMessage(f"{argument}={shown(texts)}: give a list, as in {argument}=[{shown(texts)}]")
    return [*texts]


# ---- errors ---------------------------------------------------------------------------------------------------


class Problem(msgspec.Struct):
    """A problem document: the code and the text of an error."""

    code: str
    detail: str = ""
    # Of the pending message of an AlreadyPending.
    id: str = ""
    seq: int = 0
    due_ms: int = 0


_PROBLEM = msgspec.json.Decoder(Problem)


def error_of(reply: Reply, endpoint: str) -> TimeballError:
    """Build the error of an answer whose status is 400 or more. `endpoint`: for the text."""
    try:
        problem = _PROBLEM.decode(reply.body)
    except msgspec.MsgspecError:
        text = f"{endpoint} answered with status {reply.status}, and not as a broker would"
        # Perhaps a proxy or a broken broker, which may have carried out the call.
        return Lost(text) if reply.status >= 500 else TimeballError(text)
    if problem.code == AlreadyPending.code:
        return AlreadyPending(problem.detail, id=problem.id, seq=problem.seq, due_ms=problem.due_ms)
    return refusal(problem.code, problem.detail)


def decode_answer(decode: Callable[[bytes], T], data: bytes, endpoint: str, *, is_read: bool) -> T:
    """Decode the body of an answer with success by `decode`.

    If it is not a broker's, raises TimeballError for a call that reads (`is_read`). For any other call raises Lost,
    because the broker may have carried it out.
    """
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
        text = f"{endpoint} answered with success, but not as a broker would: {error}"
        raise (TimeballError(text) if is_read else Lost(text)) from error


# ---- sends ----------------------------------------------------------------------------------------------------


class SentRows(NamedTuple):
    """A decoded answer to a send."""

    ack: SendAck
    past_rows: int  # how many messages were past due when the broker accepted them
    past_ms: int  # by how much at most; 0 for none
    # The fields below are of the first message.
    due_ms: int | None  # None if it is not scheduled; the broker computes it when it reads the request
    id: str
    replaced: http_api.Replaced | None  # the message that it replaced, for a send of one with a unique key


_SENT, _SENT_MANY = msgspec.json.Decoder(http_api.Sent), msgspec.json.Decoder(http_api.SentMany)


def send_request(
    messages: Sequence[Outgoing], key: wire.SendKey | None, context: Iterable[tuple[str, str]]
) -> Request:
    """Build the request that sends messages to the topic of the first one.

    `key`: the idempotency key, which the broker receives in headers. `context`: the headers of a trace. Raises
    InvalidMessage for a body that is too large, and for a text that is not Unicode.
    """
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
    if len(body) > REQUEST_BYTES_MAX:  # in JSON, each control character of a text has six bytes
        body = _encode_messages(messages, as_text=False)
    content_type = JSON if len(messages) == 1 else NDJSON
    return Request("POST", path("topics", messages[0].topic, "messages"), body, (*content_type, *headers))


def _encode_messages(messages: Sequence[Outgoing], *, as_text: bool) -> bytes:
    """Encode each message as a line of JSON. A body is base64, or with `as_text` a text if it is UTF-8.

    Raises InvalidMessage for half of a surrogate pair in a text.
    """
    try:
        return b"\n".join([encode(_to_json(message, as_text)) for message in messages])
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"tag, keys, properties and message_id are text: {error}") from error


def _to_json(message: Outgoing, as_text: bool) -> http_api.Message:
    """Build the JSON struct of a message, with its body as `_encode_messages` describes."""
    text, base64 = None, message.body if not as_text else None
    if as_text:
        try:
            text = message.body.decode()
        except UnicodeDecodeError:
            base64 = message.body
    return http_api.Message(
        id=message.id, body=text, base64=base64, keys=message.keys.split(" ") if message.keys else [],
        tag=message.tag, properties=decode_properties(message.properties or ""),
        at=message.local[0] if message.local else UNSET if message.due_ms is None else message.due_ms,
        after=UNSET if message.delay_ms is None else f"{message.delay_ms}ms",
        zone=message.local[1] if message.local else UNSET,
        **message.options,
    )  # fmt: skip


def decode_sent(data: bytes, rows: int) -> SentRows:
    """Decode the answer to a send of `rows` messages. Raises MsgspecError, and IndexError for no messages."""
    if rows == 1:
        sent = _SENT.decode(data)
        messages, store_ms = [sent], sent.store_ms
    else:
        answer = _SENT_MANY.decode(data)
        messages, store_ms = answer.messages, answer.store_ms
    first = messages[0]
    states = []
    # An idempotency key belongs to the whole send, so either all of its messages existed or none.
    if first.outcome == EXISTS:
        states = [SentState(message.state or "", message.due_ms) for message in messages]
    past_ms = [message.past_ms for message in messages if message.past_ms]
    ack = SendAck(first.seq, len(messages), store_ms, first.outcome or "created", states)
    return SentRows(ack, len(past_ms), max(past_ms, default=0), first.due_ms, first.id, first.replaced)


# ---- received messages ----------------------------------------------------------------------------------------


class Received(http_api.Leased):
    """A received message in JSON, as a ReceivedRow (messages.py). `Leased` documents the fields."""

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
    """Convert RFC 3339 text to milliseconds since 1970."""
    return round(datetime.fromisoformat(time).timestamp() * 1000)


class LeaseRequest(NamedTuple):
    """A request to lease up to `rows` messages for `lease_ms`. The broker waits up to `wait_ms` for the first one.

    `start`: where a new group begins, "earliest" or "latest". `tag` or `sql`: only messages that match. Two empty texts
    select all messages.
    """

    topic: str
    group: str
    rows: int
    wait_ms: int
    lease_ms: int
    start: str = "earliest"
    tag: str = ""
    sql: str = ""


def receive_target(request: LeaseRequest, credit: int | None = None) -> str:
    """Build the target of one receive, or with a `credit` that of a stream, which has no `rows` and no `wait_ms`."""
    return path(
        "topics", request.topic, "receive" if credit is None else "stream",
        group=request.group, credit=credit, lease=f"{request.lease_ms}ms",
        max=request.rows if credit is None else None,
        wait=f"{request.wait_ms}ms" if credit is None else None,
        start=request.start if request.start != "earliest" else None, tag=request.tag or None,
        sql=request.sql or None,
    )  # fmt: skip


def decode_received(data: bytes) -> list[Received]:
    """Decode the answer to a receive."""
    return _RECEIVED_MANY.decode(data).messages


def decode_lines(data: bytes) -> list[Received]:
    """Decode whole lines of a stream. Empty lines, which keep the connection alive, are skipped."""
    return [_RECEIVED.decode(line) for line in data.split(b"\n") if line]


# ---- operations -----------------------------------------------------------------------------------------------


Page: TypeAlias = tuple[list[T], str | None]  # rows of a list, and the name after which the next page begins


class Operation(NamedTuple, Generic[T]):
    """A request, the conversion of the body of its answer, and whether it is safe to repeat."""

    request: Request
    decode: Callable[[bytes], T]
    is_repeatable: bool = False


def _read(target: str, decode: Callable[[bytes], T]) -> Operation[T]:
    return Operation(Request("GET", target), decode, is_repeatable=True)


def _post(target: str, body: object, decode: Callable[[bytes], T]) -> Operation[T]:
    return Operation(Request("POST", target, encode(body), JSON), decode)


def read_status() -> Operation[dict[str, Any]]:
    """Read the broker's status. docs/flight.md describes the fields."""
    return _read(path("broker"), msgspec.json.Decoder(dict[str, Any]).decode)


# ---- messages by id and key -----------------------------------------------------------------------------------


def get(id: str, topic: str | None) -> Operation[MessagePlace]:
    """Find the newest message with an id, in one topic if it is named. `decode` raises NotFound if there is none."""

    def decode(data: bytes) -> MessagePlace:
        messages = msgspec.json.decode(data, type=http_api.Places).messages
        if not messages:
            raise NotFound(f"no message with the id {id!r} is known here")
        return _place(messages[0])

    return _read(path("messages", id, topic=topic), decode)


def _place(place: http_api.Place) -> MessagePlace:
    """Convert the state of a message from JSON. Its content is None if the broker has left it out."""
    content = None
    if place.size_bytes is not None:
        body = _body(place.body, place.base64)
        content = Content(body, place.size_bytes, place.tag, place.keys or [], place.properties or {})
    return MessagePlace(
        place.state, place.seq, place.topic, place.queue_id, place.queue_offset, place.at_ms, place.due_ms, content,
        [GroupPlace(in_group.group, in_group.state, in_group.attempts, in_group.until_ms) for in_group in place.groups],
        place.by, place.reason,
    )  # fmt: skip


def cancel(ids: list[str], keys: list[str]) -> Operation[list[Verdict]]:
    """Cancel the messages with these ids, or with these keys."""
    return _post(path("cancel"), http_api.CancellingMany(ids, keys), _verdicts)


def reschedule(
    ids: list[str], keys: list[str], due_ms: int | None, delay_ms: int | None
) -> Operation[list[Verdict]]:
    """Move the messages with these ids, or with these keys, to exactly one of `due_ms` and `delay_ms`."""
    at = UNSET if due_ms is None else due_ms
    after = UNSET if delay_ms is None else f"{delay_ms}ms"
    return _post(path("reschedule"), http_api.ReschedulingMany(ids, keys, at, after), _verdicts)


def _verdicts(data: bytes) -> list[Verdict]:
    """Decode the verdicts of a cancel or a reschedule, in the order of the request."""
    verdicts = msgspec.json.decode(data, type=http_api.SettledMany).verdicts
    return [
        Verdict(verdict.id, verdict.verdict, verdict.seq, verdict.at_ms, verdict.due_ms)
        for verdict in verdicts
    ]


# ---- answers for leased messages ------------------------------------------------------------------------------


def acknowledge(topic: str, group: str, receipts: list[str]) -> Operation[list[str | None]]:
    """Acknowledge messages. The answer has each receipt, or None for a lease that had ended."""
    return _post(path("topics", topic, "ack", group=group), http_api.Answering(receipts), _valid_receipts)


def nack(
    topic: str, group: str, receipts: list[str], after_ms: int | None, reason: str, *, counts: bool
) -> Operation[list[str | None]]:
    """Give messages back as failed attempts. The answer has the new receipts, as for `acknowledge`.

    `after_ms`: the delay until the next delivery, or None for that of the retry policy.
    """
    after = UNSET if after_ms is None else f"{after_ms}ms"
    body = http_api.GivingBack(receipts, after, reason, counts)
    return _post(path("topics", topic, "nack", group=group), body, _valid_receipts)


def extend(
    topic: str, group: str, receipts: list[str], lease_ms: int, *, counts: bool
) -> Operation[list[str | None]]:
    """Make leases end `lease_ms` from now. The answer has the new receipts, as for `acknowledge`."""
    body = http_api.Extending(receipts, f"{lease_ms}ms", counts)
    return _post(path("topics", topic, "extend", group=group), body, _valid_receipts)


def dead_letter(topic: str, group: str, receipts: list[str], reason: str) -> Operation[list[str | None]]:
    """Move messages to the dead letters of the group. The answer is that of `acknowledge`."""
    target = path("topics", topic, "dead-letter", group=group)
    return _post(target, http_api.GivingUp(receipts, reason), _valid_receipts)


def _valid_receipts(data: bytes) -> list[str | None]:
    results = msgspec.json.decode(data, type=http_api.AnsweredMany).results
    return [result.receipt if result.valid else None for result in results]


# ---- topics, groups and dead letters --------------------------------------------------------------------------


def list_topics() -> Operation[dict[str, int]]:
    """List the topics with their numbers of queues."""

    def decode(data: bytes) -> dict[str, int]:
        return {state.topic: state.queues for state in msgspec.json.decode(data, type=http_api.Topics).topics}

    return _read(path("topics"), decode)


def no_result(data: bytes) -> None:
    """Check that an answer is JSON."""
    msgspec.json.decode(data)


def create_topic(
    topic: str, queues: int | None, on_pending: OnPending | None = None, max_per_second: int | None = None
) -> Operation[None]:
    """Create a topic, or add queues to one that has fewer. http_api.TopicMade describes the other arguments."""
    settings = http_api.TopicMade(queues, on_pending, max_per_second)
    return Operation(Request("PUT", path("topics", topic), encode(settings), JSON), no_result)


def read_queues(topic: str) -> Operation[dict[int, QueueRange]]:
    """Read the offsets that each queue of a topic keeps."""
    return _read(
        path("topics", topic), lambda data: msgspec.json.decode(data, type=http_api.TopicQueues).queues
    )


def read_offsets(topic: str, group: str) -> Operation[dict[int, int]]:
    """Read the offsets that a group has committed in a topic, by queue."""
    target = path("topics", topic, "offsets", group=group)
    return _read(target, lambda data: msgspec.json.decode(data, type=http_api.GroupOffsets).offsets)


def commit_offsets(topic: str, group: str, offsets: dict[int, int]) -> Operation[None]:
    """Store these offsets of a group, by queue."""
    target = path("topics", topic, "offsets", group=group)
    request = Request("PUT", target, encode(http_api.Committing(offsets)), JSON)
    return Operation(request, no_result, is_repeatable=True)


def read_group(group: str) -> Operation[list[GroupState]]:
    """Read the lags, leases and dead letters of one group."""
    return _read(path("groups", group), lambda data: [msgspec.json.decode(data, type=GroupState)])


def limit_group(group: str, max_per_key: int) -> Operation[None]:
    """Limit the messages with the same key that members of a group may hold at a time. 0: no limit."""
    request = Request("PUT", path("groups", group), encode(http_api.GroupLimits(max_per_key)), JSON)
    return Operation(request, no_result)


def list_groups(after: str | None) -> Operation[Page[GroupState]]:
    """List a page of the groups by name, from the one that follows `after`, or from the first one."""

    def decode(data: bytes) -> Page[GroupState]:
        page = msgspec.json.decode(data, type=http_api.Groups)
        return page.groups, page.next_page

    return _read(path("groups", page=after), decode)


def list_dead_letters(group: str, rows: int, after: str | None) -> Operation[DeadLetterPage]:
    """List up to `rows` unresolved dead letters of a group. `after`: the `next_page` of the previous page, or None."""

    def decode(data: bytes) -> DeadLetterPage:
        page = msgspec.json.decode(data, type=http_api.DeadLetters)
        rows = [
            DeadLetterRow(
                dead_letter=letter.dead_letter, id=letter.id, topic=letter.topic, died_ms=letter.died_ms,
                attempts=letter.attempts, body=_body(letter.body, letter.base64), size_bytes=letter.size_bytes,
                tag=letter.tag, keys=letter.keys, properties=letter.properties, reason=letter.reason,
            )
            for letter in page.dead_letters
        ]  # fmt: skip
        return DeadLetterPage(rows, page.next_page)

    return _read(path("groups", group, "dead-letters", max=rows, page=after), decode)


def resolve_dead_letters(
    group: str,
    verb: Literal["resend", "delete"],
    handles: list[str] | None,
    after: str | None = None,
    rate: float | None = None,
    where: str = "",
) -> Operation[Resolved]:
    """Resend or delete the dead letters with these handles, or with None all of the group.

    Only for a resend: `after` is the delay until the first one, `rate` how many follow in a second, and `where` an SQL
    condition, with `handles` None. Raises OutOfRange for a `rate` that is not finite.
    """
    # JSON would encode it as null, which means no rate: all at once.
    if rate is not None and not math.isfinite(rate):
        raise OutOfRange(f"rate {rate}: {limits.RESEND_RATE_MIN} to {limits.RESEND_RATE_MAX} in a second")

    def decode(data: bytes) -> Resolved:
        dealt = msgspec.json.decode(data, type=http_api.DealtMany)
        return Resolved(dealt.count, [result.verdict != "not_found" for result in dealt.results])

    body = http_api.Resolving(handles, all=handles is None, after=after, rate=rate, where=where)
    return _post(path("groups", group, "dead-letters", verb), body, decode)
