"""JSON of the Flight edge: actions, tickets and acknowledgements as typed values. Does no I/O.

All JSON from clients is decoded here, once, after its number of bytes was checked. It becomes structs of wire.py, which
have a bound for every number and length. A wrong type, an unknown field, a number beyond 64 bits or too many items is a
typed error that names the field. Decoding costs no more than reading the bytes.

Invariant: the results of `decode_action` and `decode_ticket` satisfy every bound of `wire.py`, so the server checks
nothing again.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from typing import Any, TypeVar

import msgspec

from timeball.edges.http2.frames import literal
from timeball.edges.shared.error_codes import sentence
from timeball.model import wire
from timeball.model.errors import InvalidMessage, NotFound, OverLimit, RequestError, TimeballError
from timeball.model.message import READ_SCHEMA
from timeball.model.rules import with_valid_fields
from timeball.table import attachment

# ---- actions --------------------------------------------------------------------------------------------

ACTIONS: dict[str, tuple[type[wire.Request] | None, int, str]] = {
    # verb: (type of the body, its largest size in bytes, description). attach has a separate decoder
    "status": (wire.Nothing, wire.BODY_BYTES_MAX, "what the broker holds, and how late it is"),
    "create_topic": (wire.CreateTopic, wire.BODY_BYTES_MAX, "make a topic with so many queues"),
    "topics": (wire.Nothing, wire.BODY_BYTES_MAX, "all topics and their queues"),
    "queues": (wire.Queues, wire.BODY_BYTES_MAX, "first and next offset of each queue of a topic"),
    "offsets": (wire.GetOffsets, wire.BODY_BYTES_MAX, "how far a group has come in a topic"),
    "commit": (wire.Commit, wire.BODY_BYTES_MAX, "remember how far a group has come"),
    "source_positions": (
        wire.SourcePositions,
        wire.BODY_BYTES_MAX,
        "how far a source of batches has been sent",
    ),
    "ack": (wire.Acknowledge, wire.CANCEL_BODY_BYTES_MAX, "messages of a group are dealt with"),
    "change_invisible_time": (
        wire.ChangeInvisibleTime,
        wire.CANCEL_BODY_BYTES_MAX,
        "messages of a group come again sooner or later",
    ),
    "dead_letter": (wire.DeadLetter, wire.CANCEL_BODY_BYTES_MAX, "a group gives messages up"),
    "get": (wire.Get, wire.BODY_BYTES_MAX, "where a message is: waiting, visible, cancelled"),
    "cancel": (wire.Cancel, wire.CANCEL_BODY_BYTES_MAX, "do not deliver these scheduled messages"),
    "reschedule": (
        wire.Reschedule,
        wire.CANCEL_BODY_BYTES_MAX,
        "deliver these scheduled messages at another instant",
    ),
    "cancel_range": (wire.CancelRange, wire.CANCEL_BODY_BYTES_MAX, "do not keep what waits of a bulk job"),
    "groups": (wire.Groups, wire.BODY_BYTES_MAX, "consumer groups: how far behind, what they hold"),
    "dead_letters": (wire.DeadLetters, wire.BODY_BYTES_MAX, "messages that a group has given up"),
    "resend_dead_letters": (
        wire.ResolveDeadLetters,
        wire.BODY_BYTES_MAX,
        "send them to the group again",
    ),
    "delete_dead_letters": (wire.ResolveDeadLetters, wire.BODY_BYTES_MAX, "put them aside for good"),
    "drain": (wire.Drain, wire.BODY_BYTES_MAX, "hand over all that waits to another group of the cluster"),
    "campaigns": (wire.Campaigns, wire.BODY_BYTES_MAX, "bulk writes as objects, and how each was left"),
    "campaign": (wire.ChangeCampaign, wire.BODY_BYTES_MAX, "plan, pause, resume or cancel a bulk write"),
    "starts": (wire.Starts, wire.BODY_BYTES_MAX, "when the log was taken up again after a stop"),
    "reserve": (wire.Reserve, wire.BODY_BYTES_MAX, "set aside sequence numbers for a later attach"),
    "attach": (None, wire.ATTACH_BODY_BYTES_MAX, "make files part of the pending table, all or none"),
    "compact": (wire.Nothing, wire.BODY_BYTES_MAX, "move the log's tail to the pending table now"),
    "compactor": (wire.Lease, wire.BODY_BYTES_MAX, "an outside compactor is at work"),
    "dispatcher": (
        wire.DispatcherLease,
        wire.BODY_BYTES_MAX,
        "a dispatcher outside brings due messages in files",
    ),
}

LARGE_OF_ADMINS = ("attach", "cancel_range")  # their bodies may have more than BODY_BYTES_MAX

ActionRequest = wire.Request | attachment.Attachment


def body_bytes_max(verb: str) -> int:
    """Look up the largest size of this action's body, in bytes. Raises NotFound for an unknown verb."""
    if verb not in ACTIONS:
        raise NotFound(f"no action {_short(verb)!r}; there are: {', '.join(ACTIONS)}")
    return ACTIONS[verb][1]


def decode_action(verb: str, body: bytes) -> ActionRequest:
    """Decode the body of an action. An empty body means `{}`. Raises NotFound, OverLimit and RequestError."""
    check_size(f"the body of action {_short(verb)}", len(body), body_bytes_max(verb))
    kind = ACTIONS[verb][0]
    if kind is None:
        return attachment.decode(body)
    request: Any = _decode(body or b"{}", kind, f"the body of action {verb}")
    if isinstance(request, wire.Cancel | wire.Reschedule):
        _check_names(verb, request)
    if isinstance(request, wire.Reschedule) and (request.due_ms is None) == (request.delay_ms is None):
        raise RequestError("reschedule: say when by due_ms or delay_ms, one of them")
    return request  # type: ignore[no-any-return]  # a struct of ACTIONS


def _check_names(verb: str, request: wire.Cancel | wire.Reschedule) -> None:
    named = [name for name in ("ids", "keys", "seqs") if getattr(request, name)]
    if len(named) != 1:
        raise RequestError(
            f"{verb}: name the messages by ids, keys or seqs, one of them; got {named or 'none'}"
        )


# ---- tickets --------------------------------------------------------------------------------------------


def decode_ticket(data: bytes) -> wire.Ticket:
    """Decode the ticket of a DoGet. Raises OverLimit and RequestError."""
    check_size("a ticket", len(data), wire.TICKET_BYTES_MAX)
    ticket: wire.Ticket = _decode(data, wire.Ticket, "the ticket")
    if isinstance(ticket, wire.Receive) and ticket.tag and ticket.sql:
        raise RequestError("the ticket: filter by tag or by sql, one of them")
    if isinstance(ticket, wire.ReadLog) and ticket.to_seq < ticket.from_seq:
        raise RequestError(f"the ticket: to_seq {ticket.to_seq} lies before from_seq {ticket.from_seq}")
    if isinstance(ticket, wire.ReadLog) and ticket.columns is not None:
        for name in ticket.columns:
            if name not in READ_SCHEMA.names or ticket.columns.count(name) > 1:
                raise RequestError(f"the ticket: columns: {name!r} is no column of the log, or there twice")
    return ticket


# ---- answers --------------------------------------------------------------------------------------------

_encoder = msgspec.json.Encoder()
_IO_ERROR = "5"  # Arrow's StatusCode, which its clients read as a FlightServerError
_DETAIL = "Failed"


def metadata_text(metadata: memoryview) -> str:
    """Decode the text that accompanies a batch, "" if there is none. Raises InvalidMessage."""
    try:
        return str(metadata, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidMessage("the metadata of a batch is JSON, and must be UTF-8") from error


def send_key(metadata: str) -> wire.SendKey:
    """Decode the idempotency key of a batch. Raises InvalidMessage, OverLimit and RequestError."""
    check_size("the metadata of a batch", len(metadata), wire.BODY_BYTES_MAX)
    key: wire.SendKey = _decode(metadata.encode(), wire.SendKey, "the metadata of a batch")
    return key


def source_step(metadata: str) -> wire.SourceStep:
    """Decode the positions of a source's batch. Raises InvalidMessage, OverLimit and RequestError."""
    check_size("the metadata of a batch", len(metadata), wire.BODY_BYTES_MAX)
    step: wire.SourceStep = _decode(metadata.encode(), wire.SourceStep, "the metadata of a batch")
    if step.begin.keys() != step.end.keys() or any(end < step.begin[at] for at, end in step.end.items()):
        raise RequestError("the metadata of a batch: each partition has a begin, and an end behind it")
    return step


def encode(answer: object) -> bytes:
    """Encode an answer as JSON: a struct, or a dict or list of plain values."""
    return _encoder.encode(answer)


def encode_refusal(error: BaseException) -> bytes:
    """Encode the refusal of one batch."""
    return _encoder.encode(wire.SendRefusal(_code(error), sentence(error)))


def details(error: BaseException) -> str:
    """Build the text of the gRPC status UNKNOWN, with which a failed call ends."""
    return f"{sentence(error)}. Detail: {_DETAIL}"


def trailers(error: BaseException) -> bytes:
    """Encode the four trailers that carry an error to the client, as Arrow's own server writes them."""
    return b"".join(
        (
            literal("grpc-status-details-bin", _binary(_code(error))),
            literal("x-arrow-status", _IO_ERROR),
            literal("x-arrow-status-detail-bin", _binary(_DETAIL)),
            literal("x-arrow-status-message-bin", _binary(sentence(error))),
        )
    )


def _binary(text: str) -> str:
    """Encode the value of a header whose name ends with -bin."""
    return b64encode(text.encode()).decode()


def _code(error: BaseException) -> str:
    return error.code if isinstance(error, TimeballError) else TimeballError.code


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


# ---- decoding -------------------------------------------------------------------------------------------

T = TypeVar("T")


def check_size(what: str, size_bytes: int, size_bytes_max: int) -> None:
    """Raise OverLimit if there are too many bytes, before any are copied or parsed."""
    if size_bytes > size_bytes_max:
        raise OverLimit(f"{what} has {size_bytes} bytes; at most {size_bytes_max}")


@cache  # there are few types, and building a decoder takes longer than decoding
def _decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decode(data: bytes, kind: Any, what: str) -> Any:
    try:
        return _decoder_of(kind).decode(data)
    except msgspec.ValidationError as error:
        raise RequestError(f"{what}: {with_valid_fields(str(error), kind)}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
        raise InvalidMessage(f"{what} is not JSON: {error}") from error
