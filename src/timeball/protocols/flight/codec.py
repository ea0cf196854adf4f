"""JSON of the Flight edge: actions, tickets and acknowledgements as typed values. Does no I/O.

Everything a stranger can write is decoded here, once, into the structs of wire.py with a bound on every number and
length, after the number of bytes was checked. A wrong type, an unknown field, a number beyond 64 bits or too
many items is a typed error that names the field; it costs no more than reading the bytes.

Invariant: what leaves `decode_action` and `decode_ticket` satisfies every bound of `wire.py`, so that the server
behind it checks nothing again.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from timeball import wire
from timeball.errors import InvalidMessage, NotFound, OverLimit, RequestError, TimeballError
from timeball.message import READ_SCHEMA
from timeball.protocols.error_codes import sentence
from timeball.table import attachment

# ---- actions --------------------------------------------------------------------------------------------

ACTIONS: dict[str, tuple[type[wire.Request] | None, int, str]] = {
    # verb: (body, its bytes at most, what it does); attach has its own decoder
    "status": (wire.Nothing, wire.BODY_BYTES_MAX, "what the broker holds, and how late it is"),
    "create_topic": (wire.CreateTopic, wire.BODY_BYTES_MAX, "make a topic with so many queues"),
    "topics": (wire.Nothing, wire.BODY_BYTES_MAX, "all topics and their queues"),
    "queues": (wire.Queues, wire.BODY_BYTES_MAX, "first and next offset of each queue of a topic"),
    "offsets": (wire.GetOffsets, wire.BODY_BYTES_MAX, "how far a group has come in a topic"),
    "commit": (wire.Commit, wire.BODY_BYTES_MAX, "remember how far a group has come"),
    "ack": (wire.Acknowledge, wire.CANCEL_BODY_BYTES_MAX, "messages of a group are dealt with"),
    "change_invisible_time": (
        wire.ChangeInvisibleTime,
        wire.CANCEL_BODY_BYTES_MAX,
        "messages of a group come again sooner or later",
    ),
    "dead_letter": (wire.DeadLetter, wire.CANCEL_BODY_BYTES_MAX, "a group gives messages up"),
    "cancel": (wire.Cancel, wire.CANCEL_BODY_BYTES_MAX, "do not keep these promises"),
    "reschedule": (wire.Reschedule, wire.CANCEL_BODY_BYTES_MAX, "keep these promises at another instant"),
    "cancel_range": (wire.CancelRange, wire.CANCEL_BODY_BYTES_MAX, "do not keep what waits of a bulk job"),
    "starts": (wire.Starts, wire.BODY_BYTES_MAX, "when the log was taken up again after a stop"),
    "reserve": (wire.Reserve, wire.BODY_BYTES_MAX, "set aside sequence numbers for a later attach"),
    "attach": (None, wire.ATTACH_BODY_BYTES_MAX, "make files part of the pending table, all or none"),
    "compact": (wire.Nothing, wire.BODY_BYTES_MAX, "move the log's tail to the pending table now"),
    "compactor": (wire.Lease, wire.BODY_BYTES_MAX, "an outside compactor is at work"),
    "dispatcher": (wire.DispatcherLease, wire.BODY_BYTES_MAX, "somebody outside brings what is due in files"),
}

ActionRequest = (
    wire.Nothing
    | wire.CreateTopic
    | wire.Queues
    | wire.GetOffsets
    | wire.Commit
    | wire.Acknowledge
    | wire.ChangeInvisibleTime
    | wire.DeadLetter
    | wire.Cancel
    | wire.Reschedule
    | wire.CancelRange
    | wire.Starts
    | wire.Reserve
    | wire.Lease
    | wire.DispatcherLease
    | attachment.Attachment
)


def body_bytes_max(verb: str) -> int:
    """How long the body of this action may be; NotFound for a verb we do not have."""
    if verb not in ACTIONS:
        raise NotFound(f"no action {_short(verb)!r}; there are: {', '.join(ACTIONS)}")
    return ACTIONS[verb][1]


def decode_action(verb: str, body: bytes) -> ActionRequest:
    """The request in an action's body; an empty body means `{}`. Raises NotFound, OverLimit, RequestError."""
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
            f"{verb}: name the promises by ids, keys or seqs, one of them; got {named or 'none'}"
        )


# ---- tickets --------------------------------------------------------------------------------------------


def decode_ticket(data: bytes) -> wire.Ticket:
    """What a do_get asks for. Raises OverLimit, RequestError."""
    check_size("a ticket", len(data), wire.TICKET_BYTES_MAX)
    ticket: wire.Ticket = _decode(data, wire.Ticket, "the ticket")
    if isinstance(ticket, wire.ReadLog) and ticket.to_seq < ticket.from_seq:
        raise RequestError(f"the ticket: to_seq {ticket.to_seq} lies before from_seq {ticket.from_seq}")
    if isinstance(ticket, wire.ReadLog) and ticket.columns is not None:
        for name in ticket.columns:
            if name not in READ_SCHEMA.names or ticket.columns.count(name) > 1:
                raise RequestError(f"the ticket: columns: {name!r} is no column of the log, or there twice")
    return ticket


# ---- answers --------------------------------------------------------------------------------------------

_encoder = msgspec.json.Encoder()


def encode(answer: object) -> bytes:
    """JSON of an answer: a struct, or a dict or list of plain values."""
    return _encoder.encode(answer)


def encode_refusal(error: TimeballError) -> bytes:
    """The refusal of one batch."""
    return _encoder.encode(wire.SendRefusal(error.code, sentence(error)))


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


# ---- decoding -------------------------------------------------------------------------------------------

T = TypeVar("T")


def check_size(what: str, size_bytes: int, size_bytes_max: int) -> None:
    """Refuse before anything is copied or parsed."""
    if size_bytes > size_bytes_max:
        raise OverLimit(f"{what} has {size_bytes} bytes; at most {size_bytes_max}")


def _decode(data: bytes, kind: Any, what: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{what}: {error}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
        raise InvalidMessage(f"{what} is not JSON: {error}") from error
