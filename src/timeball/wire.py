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
from timeball.answers import (
    EXISTS as EXISTS,
)
from timeball.answers import (
    HANDED as HANDED,
)
from timeball.answers import (
    UNAVAILABLE as UNAVAILABLE,
)
from timeball.answers import (
    VERDICTS as VERDICTS,
)
from timeball.answers import (
    Attached as Attached,
)
from timeball.answers import (
    Campaign as Campaign,
)
from timeball.answers import (
    ClusterGroup as ClusterGroup,
)
from timeball.answers import (
    Conflict as Conflict,
)
from timeball.answers import (
    Content as Content,
)
from timeball.answers import (
    DeadLetterPage as DeadLetterPage,
)
from timeball.answers import (
    DeadLetterRow as DeadLetterRow,
)
from timeball.answers import (
    Drained as Drained,
)
from timeball.answers import (
    GroupPage as GroupPage,
)
from timeball.answers import (
    GroupPlace as GroupPlace,
)
from timeball.answers import (
    GroupState as GroupState,
)
from timeball.answers import (
    LogStatus as LogStatus,
)
from timeball.answers import (
    MessagePlace as MessagePlace,
)
from timeball.answers import (
    QueueRange as QueueRange,
)
from timeball.answers import (
    RangesCancelled as RangesCancelled,
)
from timeball.answers import (
    ReleaseAck as ReleaseAck,
)
from timeball.answers import (
    ReleaseAnswer as ReleaseAnswer,
)
from timeball.answers import (
    Resolved as Resolved,
)
from timeball.answers import (
    SendAck as SendAck,
)
from timeball.answers import (
    SendAnswer as SendAnswer,
)
from timeball.answers import (
    SendRefusal as SendRefusal,
)
from timeball.answers import (
    SentState as SentState,
)
from timeball.answers import (
    Start as Start,
)
from timeball.answers import (
    Status as Status,
)
from timeball.answers import (
    TableStatus as TableStatus,
)
from timeball.answers import (
    TopicState as TopicState,
)
from timeball.answers import (
    Verdict as Verdict,
)
from timeball.message import READ_SCHEMA

INT64_MAX = 2**63 - 1
QUEUE_ID_MAX = limits.QUEUES_PER_TOPIC_MAX - 1
COALESCE_ROWS = 65_536
KINDS_MAX = 16
CAMPAIGN_GROUPS_MAX = 256

TICKET_BYTES_MAX = 64 * 1024  # a pull that names 1,024 queues needs about 30 KiB
BODY_BYTES_MAX = 64 * 1024
CANCEL_BODY_BYTES_MAX = 4 * 1024 * 1024  # 10,000 ids of 255 bytes
ATTACH_BODY_BYTES_MAX = 4 * 1024 * 1024  # 10,000 files of about 400 bytes

RECEIPT_CHARACTERS_MAX = 64
RECEIPT = "receipt"  # the column of a receive that the log has not
RECEIVED_SCHEMA = READ_SCHEMA.append(pa.field(RECEIPT, pa.string(), nullable=False))

SEND_PATH = [b"send"]  # the descriptor paths of the exchanges
SOURCE_PATH = [b"source"]
RELEASE_PATH = [b"release"]
END_OF_STREAM = b"end"  # metadata without a batch: the client of an exchange sends no more

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
FilterText = Annotated[str, Meta(max_length=limits.FILTER_BYTES_MAX)]
Handle = Annotated[str, Meta(min_length=3, max_length=limits.DEAD_LETTER_HANDLE_CHARACTERS_MAX)]
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


SourceName = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,200}$")]
Partition = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positions = Annotated[dict[Partition, Int64], Meta(max_length=limits.SOURCE_PARTITIONS_MAX)]


class SourcePositions(Request, frozen=True):
    """source_positions: how far a source has been sent, by partition."""

    source: SourceName


class SendKey(Request, frozen=True):
    """Beside a batch: its idempotency key, and the name of this attempt to send it.

    `if_settled`: when it was sent before and does not wait any more, "keep" it so, or "send" it anew.
    """

    idempotency_key: str
    attempt: str = ""
    if_settled: Literal["keep", "send"] = "keep"


class SourceStep(Request, frozen=True):
    """Of which records of a source a batch is made: of each partition those from `begin` on, up to `end`."""

    source: SourceName
    begin: Positions
    end: Positions


class Acknowledge(Request, frozen=True):
    """ack: these messages are dealt with."""

    group: Group
    topic: Topic
    receipts: Receipts


class ChangeInvisibleTime(Request, frozen=True):
    """change_invisible_time: leases end so far from now; null: after as long as the group's retry policy says.

    The receipts stay valid. Without `counts` the lease is no attempt. `nack`: the messages are given back
    for `reason`.
    """

    group: Group
    topic: Topic
    receipts: FewReceipts
    invisible_ms: Annotated[int, Meta(ge=0, le=limits.INVISIBLE_MS_MAX)] | None = None
    counts: bool = True
    nack: bool = False
    reason: str = ""


class DeadLetter(Request, frozen=True):
    """dead_letter: the group gives these messages up, for `reason`."""

    group: Group
    topic: Topic
    receipts: FewReceipts
    reason: str = ""


class Get(Request, frozen=True):
    """get: where the messages with an id are; `topic`: only those sent to it."""

    id: Key
    topic: Topic | None = None


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
ClusterGroupName = Annotated[str, Meta(min_length=1, max_length=64)]
CampaignId = Annotated[str, Meta(min_length=1, max_length=100)]


class Campaigns(Request, frozen=True):
    """campaigns: one of them with its ranges, or all."""

    campaign: CampaignId | None = None


class ChangeCampaign(Request, frozen=True):
    """campaign: plan one, pause it, resume it with or without a shift, or cancel it.

    Of a plan: `rows`, and the instant as of which these are valid, now by default; `groups`: those of the cluster over
    which the campaign is spread, for a later try.
    """

    campaign: CampaignId
    change: CampaignChange
    rows: Int64 = 0
    at_ms: Int64 | None = None
    shift: bool = False
    groups: Annotated[list[ClusterGroupName], Meta(max_length=CAMPAIGN_GROUPS_MAX)] = []


class Drain(Request, frozen=True):
    """drain: hand over all that waits in this group of a cluster to another one, or say how far that is."""

    heir: ClusterGroupName
    dry_run: bool = False


class Groups(Request, frozen=True):
    """groups: lags, leases and dead letters of one group; or of all by name, behind the one that `after` names."""

    group: Group | None = None
    rows: Annotated[int, Meta(ge=1, le=limits.LISTED_ROWS_MAX)] = limits.LISTED_ROWS_MAX
    after: Group | None = None


class DeadLetters(Request, frozen=True):
    """dead_letters: those of a group that are left, behind the one that `after` names."""

    group: Group
    rows: Annotated[int, Meta(ge=1, le=limits.DEAD_LETTERS_PER_REQUEST_MAX)] = 100
    after: Handle | None = None


class ResolveDeadLetters(Request, frozen=True):
    """resend_dead_letters, delete_dead_letters: these, or all that are left."""

    group: Group
    dead_letters: Annotated[list[Handle], Meta(max_length=limits.DEAD_LETTERS_PER_REQUEST_MAX)] | None = None


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

    `latest`: a group that has no offsets yet begins at the ends of the queues. `tag` or `sql`: only messages that
    match; the group has passed the others by.
    """

    topic: Topic
    group: Group
    rows: Annotated[int, Meta(ge=1, le=limits.POP_ROWS_MAX)]
    wait_ms: Annotated[int, Meta(ge=0, le=limits.PULL_WAIT_MS_MAX)] = 0
    invisible_ms: Annotated[int, Meta(ge=1, le=limits.INVISIBLE_MS_MAX)] = limits.MINUTE_MS
    latest: bool = False
    tag: FilterText = ""
    sql: FilterText = ""


Ticket = ReadLog | ReadQueue | Pull | Receive
