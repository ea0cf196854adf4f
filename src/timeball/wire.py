"""The wire, once: what the Flight edge is asked and answers, as the server, the client and the pipeline know it.

A request that is decoded with these types satisfies every bound below (protocols/flight/codec.py decodes); one that a
client makes is not checked until the broker decodes it. Bodies are JSON; instants are milliseconds since 1970 UTC.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pyarrow as pa
from msgspec import Meta

from timeball import limits
from timeball.message import READ_SCHEMA

INT64_MAX = 2**63 - 1
QUEUE_ID_MAX = limits.QUEUES_PER_TOPIC_MAX - 1
COALESCE_ROWS = 65_536
KINDS_MAX = 16

TICKET_BYTES_MAX = 64 * 1024  # a pull that names 1,024 queues needs about 30 KiB
BODY_BYTES_MAX = 64 * 1024
CANCEL_BODY_BYTES_MAX = 4 * 1024 * 1024  # 10,000 ids of 255 bytes
ATTACH_BODY_BYTES_MAX = 4 * 1024 * 1024  # 10,000 files of about 400 bytes

RECEIPT_CHARACTERS_MAX = 64
RECEIPT = "receipt"  # the column of a receive that the log has not
RECEIVED_SCHEMA = READ_SCHEMA.append(pa.field(RECEIPT, pa.string(), nullable=False))

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
ReceiptText = Annotated[str, Meta(min_length=1, max_length=RECEIPT_CHARACTERS_MAX)]
Receipts = Annotated[list[ReceiptText], Meta(max_length=limits.CANCELS_PER_REQUEST_MAX)]
FewReceipts = Annotated[list[ReceiptText], Meta(max_length=limits.POP_ROWS_MAX)]  # each is written once more


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything decoded from outside."""


# ---- actions --------------------------------------------------------------------------------------------


class Nothing(Request, frozen=True):
    """A verb without arguments: status, topics, compact."""


class CreateTopic(Request, frozen=True):
    """create_topic; an existing topic keeps its queues or gains some."""

    topic: Topic
    queues: Annotated[int, Meta(ge=1, le=limits.QUEUES_PER_TOPIC_MAX)]


class Queues(Request, frozen=True):
    """queues: the offsets kept of each queue of a topic."""

    topic: Topic


class GetOffsets(Request, frozen=True):
    """offsets: how far a group has come in a topic."""

    group: Group
    topic: Topic


class Commit(Request, frozen=True):
    """commit: a group has come so far."""

    group: Group
    topic: Topic
    offsets: Offsets


class Acknowledge(Request, frozen=True):
    """ack: these messages are dealt with."""

    group: Group
    topic: Topic
    receipts: Receipts


class ChangeInvisibleTime(Request, frozen=True):
    """change_invisible_time: leases end so far from now; null: after as long as the group's retry policy says.

    The receipts stay valid. Without `counts` the lease is no attempt.
    """

    group: Group
    topic: Topic
    receipts: FewReceipts
    invisible_ms: Annotated[int, Meta(ge=0, le=limits.INVISIBLE_MS_MAX)] | None = None
    counts: bool = True


class DeadLetter(Request, frozen=True):
    """dead_letter: the group gives these messages up."""

    group: Group
    topic: Topic
    receipts: FewReceipts


class Cancel(Request, frozen=True):
    """cancel: exactly one of the three lists names what shall not be kept."""

    ids: Keys = []
    keys: Keys = []
    seqs: Seqs = []


class Reschedule(Request, frozen=True):
    """reschedule: exactly one of the three lists names what shall be moved, exactly one of the two says when."""

    ids: Keys = []
    keys: Keys = []
    seqs: Seqs = []
    due_ms: Int64 | None = None
    delay_ms: Int64 | None = None


class CancelRange(Request, frozen=True):
    """cancel_range: end what waits of a bulk job's numbers, (first_seq, rows)."""

    ranges: Annotated[list[tuple[Int64, Rows]], Meta(min_length=1, max_length=limits.ATTACH_FILES_MAX)]
    reason: Annotated[str, Meta(max_length=limits.CANCEL_REASON_CHARACTERS_MAX)] = ""


CampaignChange = Literal["plan", "pause", "resume", "cancel"]
CampaignId = Annotated[str, Meta(min_length=1, max_length=100)]


class Campaigns(Request, frozen=True):
    """campaigns: one of them with its ranges, or all."""

    campaign: CampaignId | None = None


class ChangeCampaign(Request, frozen=True):
    """campaign: plan one, pause it, resume it with or without a shift, or cancel it.

    Of a plan: `rows`, and the instant as of which these are valid, now by default.
    """

    campaign: CampaignId
    change: CampaignChange
    rows: Int64 = 0
    at_ms: Int64 | None = None
    shift: bool = False


class Starts(Request, frozen=True):
    """starts: when the log was taken up again, of the starts whose first row lies in [from_seq, to_seq)."""

    from_seq: Int64 = 0
    to_seq: Int64 = INT64_MAX


class Reserve(Request, frozen=True):
    """reserve: set aside this many sequence numbers."""

    rows: Rows


class Lease(Request, frozen=True):
    """compactor: someone else compacts for so long."""

    lease_ms: Annotated[int, Meta(ge=0, le=limits.DAY_MS)]


class DispatcherLease(Request, frozen=True):
    """dispatcher: a dispatcher brings due promises for so long; 0: it has stopped."""

    lease_ms: Annotated[int, Meta(ge=0, le=limits.DAY_MS)]


# ---- tickets --------------------------------------------------------------------------------------------


class ReadLog(Request, frozen=True, tag_field="read", tag="log"):
    """Rows of the log with from_seq <= seq < to_seq, of these kinds only; `columns` of READ_SCHEMA, or all.

    `placed`: only rows that have a place in a queue, or only those that have none.
    """

    from_seq: Int64
    to_seq: Int64
    kinds: Annotated[list[KindNumber], Meta(max_length=KINDS_MAX)] | None = None
    coalesce_rows: Annotated[int, Meta(ge=1, le=limits.FRAME_ROWS_MAX)] = COALESCE_ROWS
    columns: Annotated[list[Column], Meta(min_length=1, max_length=len(READ_SCHEMA))] | None = None
    placed: bool | None = None


class ReadQueue(Request, frozen=True, tag_field="read", tag="queue"):
    """Visible rows of one queue from an offset on."""

    topic: Topic
    queue_id: QueueId
    offset: Int64
    rows: Annotated[int, Meta(ge=1, le=limits.PULL_ROWS_MAX)]


class Pull(Request, frozen=True, tag_field="read", tag="pull"):
    """Visible rows of several queues; waits for the first one."""

    topic: Topic
    offsets: Annotated[dict[QueueId, Int64], Meta(min_length=1, max_length=limits.QUEUES_PER_TOPIC_MAX)]
    rows: Annotated[int, Meta(ge=1, le=limits.PULL_ROWS_MAX)]
    wait_ms: Annotated[int, Meta(ge=0, le=limits.PULL_WAIT_MS_MAX)] = 0


class Receive(Request, frozen=True, tag_field="read", tag="receive"):
    """Messages for a member of a group, leased for `invisible_ms`; waits for the first one.

    `latest`: a group that has no offsets yet begins at the ends of the queues.
    """

    topic: Topic
    group: Group
    rows: Annotated[int, Meta(ge=1, le=limits.POP_ROWS_MAX)]
    wait_ms: Annotated[int, Meta(ge=0, le=limits.PULL_WAIT_MS_MAX)] = 0
    invisible_ms: Annotated[int, Meta(ge=1, le=limits.INVISIBLE_MS_MAX)] = limits.MINUTE_MS
    latest: bool = False


Ticket = ReadLog | ReadQueue | Pull | Receive


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


class SendAnswer(msgspec.Struct, frozen=True):
    """An acknowledgement or a refusal, as who has sent a batch decodes it: `error` says which."""

    first_seq: int = -1
    rows: int = 0
    store_ms: int = 0
    error: str | None = None
    text: str = ""


class ReleaseAnswer(msgspec.Struct, frozen=True):
    """The same for a batch that was brought: rows released by it, durably, and rows left; or an error's code."""

    released: int = 0
    left: int = 0
    error: str = ""
    text: str = ""


VERDICTS = ("cancelled", "rescheduled", "already_cancelled", "released", "expired", "not_found")


class Verdict(msgspec.Struct, frozen=True):
    """The outcome of a cancel or a move. `at_ms`: when it happened, as far as known.

    cancelled           it will not be delivered
    rescheduled         it will be delivered at `due_ms`
    already_cancelled   an earlier request ended it: it was not going to be delivered
    released            too late: it is in its queue
    expired             it waits no more; what became of it is older than what the broker keeps
    not_found           no promise is known by this name
    """

    subject: str
    verdict: str
    seq: int | None = None
    at_ms: int | None = None
    due_ms: int | None = None

    @property
    def cancelled(self) -> bool:
        """Return whether the message will certainly not be delivered."""
        return self.verdict in ("cancelled", "already_cancelled")


class RangesCancelled(msgspec.Struct, frozen=True):
    """Of so many numbers: how many promises this call ended; all others were settled, or on their way, before.

    `already_cancelled`: those of the settled ones that are known to have been cancelled; a call whose answer got lost
    is asked again, and then the two make one count. They are remembered until their instant has passed.
    """

    rows: int
    cancelled: int
    already_cancelled: int
    settled: int


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """A campaign: what was decided about it, and what this call has done.

    `state`: planned, running, paused, cancelled or finished. `ranges`, (first_seq, rows), are left out of a list of
    all. `held_from_ms`: what waits and is due then or later is held. `cancelled`: promises that its cancel has
    ended. `count`: promises that this call has resumed or cancelled; `repeated`: it was in that state before.
    """

    campaign: str
    state: str
    since_ms: int
    planned_ms: int
    planned_seq: int
    rows: int
    ranges: list[tuple[int, int]] = []
    held_from_ms: int | None = None
    cancelled: int = 0
    repeated: bool = False
    count: int = 0
    shift_ms: int = 0


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """The table version and watermark after an attach; `repeated` if the broker had it already."""

    version: int
    watermark: int
    seq: int
    repeated: bool = False


class QueueRange(msgspec.Struct, frozen=True):
    """A queue keeps the offsets min <= offset < max."""

    min: int
    max: int


class Start(msgspec.Struct, frozen=True):
    """A life of the log: its first row, the instant of that row's frame, and that of the last frame before it."""

    first_seq: int
    at_ms: int
    before_ms: int


class LogStatus(msgspec.Struct, frozen=True):
    """Bounds of the log: rows with first_seq <= seq < durable_seq can be read."""

    first_seq: int
    next_seq: int
    durable_seq: int


class TableStatus(msgspec.Struct, frozen=True):
    """The pending table: where it is and its current version."""

    uri: str
    version: int


class Status(msgspec.Struct, frozen=True):
    """The fields of the broker's status that programs need; docs/flight.md names them all."""

    now_ms: int
    log: LogStatus
    table: TableStatus
    watermark: int
    settled_before_ms: int
    strategy: str = "hour_log"  # who keeps promises
