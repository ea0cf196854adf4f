"""JSON of the Flight edge: actions, tickets and acknowledgements as typed values. Does no I/O.

Everything a stranger can write is decoded here, once, into frozen structs with bounds on every number and
length, after the number of bytes was checked. A wrong type, an unknown field, a number beyond 64 bits or too
many items is a typed error that names the field; it costs no more than reading the bytes.

Invariant: what leaves `decode_action` and `decode_ticket` satisfies every `Meta` below, so that the server
behind it checks nothing again.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from timeball import limits
from timeball.errors import InvalidMessage, NotFound, OverLimit, RequestError, TimeballError
from timeball.message import READ_SCHEMA
from timeball.table import attachment

INT64_MAX = 2**63 - 1
QUEUE_ID_MAX = limits.QUEUES_PER_TOPIC_MAX - 1
COALESCE_ROWS = 65_536
KINDS_MAX = 16
ERROR_CHARACTERS_MAX = 2_000

TICKET_BYTES_MAX = 64 * 1024  # a pull that names 1,024 queues needs about 30 KiB
BODY_BYTES_MAX = 64 * 1024
CANCEL_BODY_BYTES_MAX = 4 * 1024 * 1024  # 10,000 ids of 255 bytes
ATTACH_BODY_BYTES_MAX = 4 * 1024 * 1024  # 10,000 files of about 400 bytes

SEND_PATH = [b"send"]  # the descriptor paths of the exchanges
RELEASE_PATH = [b"release"]

Int64 = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Rows = Annotated[int, Meta(ge=1, le=2**40)]
QueueId = Annotated[int, Meta(ge=0, le=QUEUE_ID_MAX)]
Topic = Annotated[str, Meta(min_length=1, max_length=limits.OWN_TOPIC_BYTES_MAX)]
Group = Annotated[str, Meta(min_length=1, max_length=limits.GROUP_BYTES_MAX)]
Key = Annotated[str, Meta(min_length=1, max_length=limits.UNIQUE_KEY_BYTES_MAX)]
Column = Annotated[str, Meta(min_length=1, max_length=32)]
KindNumber = Annotated[int, Meta(ge=0, le=127)]
Offsets = Annotated[dict[QueueId, Int64], Meta(max_length=limits.QUEUES_PER_TOPIC_MAX)]
Keys = Annotated[list[Key], Meta(max_length=limits.CANCELS_PER_REQUEST_MAX)]
Seqs = Annotated[list[Int64], Meta(max_length=limits.CANCELS_PER_REQUEST_MAX)]


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything decoded from outside."""


# ---- actions --------------------------------------------------------------------------------------------


class Nothing(_Request, frozen=True):
    """A verb without arguments: status, topics, compact."""


class CreateTopic(_Request, frozen=True):
    """create_topic; an existing topic keeps its queues or gains some."""

    topic: Topic
    queues: Annotated[int, Meta(ge=1, le=limits.QUEUES_PER_TOPIC_MAX)]


class Queues(_Request, frozen=True):
    """queues: the offsets kept of each queue of a topic."""

    topic: Topic


class GetOffsets(_Request, frozen=True):
    """offsets: how far a group has come in a topic."""

    group: Group
    topic: Topic


class Commit(_Request, frozen=True):
    """commit: a group has come so far."""

    group: Group
    topic: Topic
    offsets: Offsets


class Cancel(_Request, frozen=True):
    """cancel: exactly one of the three lists names what shall not be kept."""

    ids: Keys = []
    keys: Keys = []
    seqs: Seqs = []


class Reschedule(_Request, frozen=True):
    """reschedule: exactly one of the three lists names what shall be moved, exactly one of the two says when."""

    ids: Keys = []
    keys: Keys = []
    seqs: Seqs = []
    due_ms: Int64 | None = None
    delay_ms: Int64 | None = None


class CancelRange(_Request, frozen=True):
    """cancel_range: end what waits of a bulk job's numbers, (first_seq, rows)."""

    ranges: Annotated[list[tuple[Int64, Rows]], Meta(min_length=1, max_length=limits.ATTACH_FILES_MAX)]
    reason: Annotated[str, Meta(max_length=limits.CANCEL_REASON_CHARACTERS_MAX)] = ""


class Starts(_Request, frozen=True):
    """starts: when the log was taken up again, of the starts whose first row lies in [from_seq, to_seq)."""

    from_seq: Int64 = 0
    to_seq: Int64 = INT64_MAX


class Reserve(_Request, frozen=True):
    """reserve: set aside this many sequence numbers."""

    rows: Rows


class Lease(_Request, frozen=True):
    """compactor: someone else compacts for so long."""

    lease_ms: Annotated[int, Meta(ge=0, le=limits.DAY_MS)]


class DispatcherLease(_Request, frozen=True):
    """dispatcher: someone else brings what is due for so long; 0: no more."""

    lease_ms: Annotated[int, Meta(ge=0, le=limits.DAY_MS)]


ACTIONS: dict[str, tuple[type[_Request] | None, int, str]] = {
    # verb: (body, its bytes at most, what it does); attach has its own decoder
    "status": (Nothing, BODY_BYTES_MAX, "what the broker holds, and how late it is"),
    "create_topic": (CreateTopic, BODY_BYTES_MAX, "make a topic with so many queues"),
    "topics": (Nothing, BODY_BYTES_MAX, "all topics and their queues"),
    "queues": (Queues, BODY_BYTES_MAX, "first and next offset of each queue of a topic"),
    "offsets": (GetOffsets, BODY_BYTES_MAX, "how far a group has come in a topic"),
    "commit": (Commit, BODY_BYTES_MAX, "remember how far a group has come"),
    "cancel": (Cancel, CANCEL_BODY_BYTES_MAX, "do not keep these promises"),
    "reschedule": (Reschedule, CANCEL_BODY_BYTES_MAX, "keep these promises at another instant"),
    "cancel_range": (CancelRange, CANCEL_BODY_BYTES_MAX, "do not keep what waits of a bulk job"),
    "starts": (Starts, BODY_BYTES_MAX, "when the log was taken up again after a stop"),
    "reserve": (Reserve, BODY_BYTES_MAX, "set aside sequence numbers for a later attach"),
    "attach": (None, ATTACH_BODY_BYTES_MAX, "make files part of the pending table, all or none"),
    "compact": (Nothing, BODY_BYTES_MAX, "move the log's tail to the pending table now"),
    "compactor": (Lease, BODY_BYTES_MAX, "an outside compactor is at work"),
    "dispatcher": (DispatcherLease, BODY_BYTES_MAX, "somebody outside brings what is due in files"),
}

ActionRequest = (
    Nothing
    | CreateTopic
    | Queues
    | GetOffsets
    | Commit
    | Cancel
    | Reschedule
    | CancelRange
    | Starts
    | Reserve
    | Lease
    | DispatcherLease
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
    if isinstance(request, Cancel | Reschedule):
        _check_names(verb, request)
    if isinstance(request, Reschedule) and (request.due_ms is None) == (request.delay_ms is None):
        raise RequestError("reschedule: say when by due_ms or delay_ms, one of them")
    return request  # type: ignore[no-any-return]  # a struct of ACTIONS


def _check_names(verb: str, request: Cancel | Reschedule) -> None:
    named = [name for name in ("ids", "keys", "seqs") if getattr(request, name)]
    if len(named) != 1:
        raise RequestError(
            f"{verb}: name the promises by ids, keys or seqs, one of them; got {named or 'none'}"
        )


# ---- tickets --------------------------------------------------------------------------------------------


class ReadLog(_Request, frozen=True, tag_field="read", tag="log"):
    """Rows of the log with from_seq <= seq < to_seq, of these kinds only; `columns` of READ_SCHEMA, or all."""

    from_seq: Int64
    to_seq: Int64
    kinds: Annotated[list[KindNumber], Meta(max_length=KINDS_MAX)] | None = None
    coalesce_rows: Annotated[int, Meta(ge=1, le=limits.FRAME_ROWS_MAX)] = COALESCE_ROWS
    columns: Annotated[list[Column], Meta(min_length=1, max_length=len(READ_SCHEMA))] | None = None


class ReadQueue(_Request, frozen=True, tag_field="read", tag="queue"):
    """Visible rows of one queue from an offset on."""

    topic: Topic
    queue_id: QueueId
    offset: Int64
    rows: Annotated[int, Meta(ge=1, le=limits.PULL_ROWS_MAX)]


class Pull(_Request, frozen=True, tag_field="read", tag="pull"):
    """Visible rows of several queues; waits for the first one."""

    topic: Topic
    offsets: Annotated[dict[QueueId, Int64], Meta(min_length=1, max_length=limits.QUEUES_PER_TOPIC_MAX)]
    rows: Annotated[int, Meta(ge=1, le=limits.PULL_ROWS_MAX)]
    wait_ms: Annotated[int, Meta(ge=0, le=limits.PULL_WAIT_MS_MAX)] = 0


Ticket = ReadLog | ReadQueue | Pull


def decode_ticket(data: bytes) -> Ticket:
    """What a do_get asks for. Raises OverLimit, RequestError."""
    check_size("a ticket", len(data), TICKET_BYTES_MAX)
    ticket: Ticket = _decode(data, Ticket, "the ticket")
    if isinstance(ticket, ReadLog) and ticket.to_seq < ticket.from_seq:
        raise RequestError(f"the ticket: to_seq {ticket.to_seq} lies before from_seq {ticket.from_seq}")
    if isinstance(ticket, ReadLog) and ticket.columns is not None:
        for name in ticket.columns:
            if name not in READ_SCHEMA.names or ticket.columns.count(name) > 1:
                raise RequestError(f"the ticket: columns: {name!r} is no column of the log, or there twice")
    return ticket


# ---- answers --------------------------------------------------------------------------------------------


class SendAck(msgspec.Struct, frozen=True):
    """A batch is on disk: rows have first_seq, first_seq + 1, …"""

    first_seq: int
    rows: int
    store_ms: int


class ReleaseAck(msgspec.Struct, frozen=True):
    """Of a batch that was brought, so many rows are released by it, on disk; the others were left."""

    released: int
    left: int


class SendRefusal(msgspec.Struct, frozen=True):
    """A batch was refused whole; the stream goes on."""

    error: str
    text: str


_encoder = msgspec.json.Encoder()


def encode(answer: object) -> bytes:
    """JSON of an answer: a struct, or a dict or list of plain values."""
    return _encoder.encode(answer)


def encode_refusal(error: TimeballError) -> bytes:
    """The refusal of one batch."""
    return _encoder.encode(SendRefusal(error.code, shorten(str(error))))


def shorten(text: str) -> str:
    """An error's text without control characters, and no longer than a screen."""
    clean = "".join(c if c.isprintable() else " " for c in text[:ERROR_CHARACTERS_MAX])
    return clean if len(text) <= ERROR_CHARACTERS_MAX else f"{clean} …"


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
