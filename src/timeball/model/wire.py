"""The requests of the Flight protocol, shared by the server, the client and the pipeline.

The types contain the bounds of the fields. The server checks them when it decodes a request (edges/flight/codec.py). A
client can build a request that breaks a bound, and the broker refuses it. Bodies are JSON. Times are milliseconds since
1970 UTC.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from timeball.model import limits
from timeball.model.answers import CampaignChange

INT64_MAX = 2**63 - 1
QUEUE_ID_MAX = limits.QUEUES_PER_TOPIC_MAX - 1
COALESCE_ROWS = 65_536
KINDS_MAX = 16
COLUMNS_MAX = 22  # all columns of READ_SCHEMA
CAMPAIGN_GROUPS_MAX = 256

TICKET_BYTES_MAX = 64 * 1024  # a pull of 1,024 queues needs about 30 KiB
BODY_BYTES_MAX = 64 * 1024
CANCEL_BODY_BYTES_MAX = 4 * 1024 * 1024  # of 10,000 ranges
ATTACH_BODY_BYTES_MAX = 4 * 1024 * 1024  # 10,000 files of about 400 bytes

SEND_PATH = [b"send"]  # the descriptor paths of the exchanges
SOURCE_PATH = [b"source"]
RELEASE_PATH = [b"release"]
END_OF_STREAM = b"end"  # metadata without a batch: the client of an exchange sends no more batches

Int64 = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Rows = Annotated[int, Meta(ge=1, le=2**40)]
QueueId = Annotated[int, Meta(ge=0, le=QUEUE_ID_MAX)]
Topic = Annotated[str, Meta(min_length=1, max_length=limits.OWN_TOPIC_BYTES_MAX)]
Column = Annotated[str, Meta(min_length=1, max_length=32)]
KindNumber = Annotated[int, Meta(ge=0, le=127)]
Offsets = Annotated[dict[QueueId, Int64], Meta(max_length=limits.QUEUES_PER_TOPIC_MAX)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all requests decoded from outside."""


# ---- actions --------------------------------------------------------------------------------------------


class Nothing(Request, frozen=True):
    """An action without arguments: status, compact."""


class Queues(Request, frozen=True):
    """queues: read the range of kept offsets of each queue of a topic."""

    topic: Topic


SourceName = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,200}$")]
Partition = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positions = Annotated[dict[Partition, Int64], Meta(max_length=limits.SOURCE_PARTITIONS_MAX)]


class SourcePositions(Request, frozen=True):
    """source_positions: read the positions up to which a source has been sent, by partition."""

    source: SourceName


class SendKey(Request, frozen=True):
    """The idempotency key of a batch, and the name of this attempt to send it.

    `if_settled`: what to do if the batch was sent before and is no longer pending: "keep" it, or "send" it again.
    """

    idempotency_key: str
    attempt: str = ""
    if_settled: Literal["keep", "send"] = "keep"


class SourceStep(Request, frozen=True):
    """The positions of a batch in its source: in each partition, records with begin <= position < end."""

    source: SourceName
    begin: Positions
    end: Positions


class CancelRange(Request, frozen=True):
    """cancel_range: cancel the pending messages of a bulk job in these ranges of numbers, (first_seq, rows)."""

    ranges: Annotated[list[tuple[Int64, Rows]], Meta(min_length=1, max_length=limits.ATTACH_FILES_MAX)]
    reason: Annotated[str, Meta(max_length=limits.CANCEL_REASON_CHARACTERS_MAX)] = ""


ClusterGroupName = Annotated[str, Meta(min_length=1, max_length=64)]
CampaignId = Annotated[str, Meta(min_length=1, max_length=100)]


class Campaigns(Request, frozen=True):
    """campaigns: read one campaign with its ranges, or list all campaigns."""

    campaign: CampaignId | None = None


class ChangeCampaign(Request, frozen=True):
    """campaign: plan a campaign, pause it, resume it with or without a shift, or cancel it.

    For a plan: the number of `rows`, and the time `at_ms` at which it was valid, by default now. `groups`: the groups
    of the cluster over which the campaign is spread, which a later attempt reads back.
    """

    campaign: CampaignId
    change: CampaignChange
    rows: Int64 = 0
    at_ms: Int64 | None = None
    shift: bool = False
    groups: Annotated[list[ClusterGroupName], Meta(max_length=CAMPAIGN_GROUPS_MAX)] = []


class Drain(Request, frozen=True):
    """drain: hand over all pending messages of this group to another group of the cluster, or report the progress."""

    heir: ClusterGroupName
    dry_run: bool = False


class Starts(Request, frozen=True):
    """starts: list the starts of the broker whose first row is in [from_seq, to_seq)."""

    from_seq: Int64 = 0
    to_seq: Int64 = INT64_MAX


class Occurrences(Request, frozen=True):
    """occurrences: count the occurrences of recurring schedules that are no messages yet, by topic and interval."""

    from_ms: Int64
    to_ms: Int64
    width_ms: Annotated[int, Meta(ge=limits.SECOND_MS, le=limits.DAY_MS)]


class Schedules(Request, frozen=True):
    """schedules: list recurring schedules whose names come after `page`."""

    page: Annotated[str, Meta(max_length=limits.GROUP_BYTES_MAX)] = ""


class Selections(Request, frozen=True):
    """selections: list the bulk operations, with all that decides which messages they cover."""


class Reserve(Request, frozen=True):
    """reserve: reserve this many sequence numbers."""

    rows: Rows


class Lease(Request, frozen=True):
    """compactor: let another process compact for this time, instead of the broker."""

    lease_ms: Annotated[int, Meta(ge=0, le=limits.DAY_MS)]


class DispatcherLease(Request, frozen=True):
    """dispatcher: announce that a dispatcher sends due messages for this time. 0 means that it has stopped."""

    lease_ms: Annotated[int, Meta(ge=0, le=limits.DAY_MS)]


# ---- tickets --------------------------------------------------------------------------------------------


class ReadLog(Request, frozen=True, tag_field="read", tag="log"):
    """Rows of the log with from_seq <= seq < to_seq, of these kinds only. `columns` of READ_SCHEMA, or all.

    `placed`: only rows with a queue position (true), or only rows without one (false).
    """

    from_seq: Int64
    to_seq: Int64
    kinds: Annotated[list[KindNumber], Meta(max_length=KINDS_MAX)] | None = None
    coalesce_rows: Annotated[int, Meta(ge=1, le=limits.FRAME_ROWS_MAX)] = COALESCE_ROWS
    columns: Annotated[list[Column], Meta(min_length=1, max_length=COLUMNS_MAX)] | None = None
    placed: bool | None = None


class ReadQueue(Request, frozen=True, tag_field="read", tag="queue"):
    """Visible rows of one queue from an offset on."""

    topic: Topic
    queue_id: QueueId
    offset: Int64
    rows: Annotated[int, Meta(ge=1, le=limits.PULL_ROWS_MAX)]


class Pull(Request, frozen=True, tag_field="read", tag="pull"):
    """Visible rows of several queues. Waits for the first one."""

    topic: Topic
    offsets: Annotated[dict[QueueId, Int64], Meta(min_length=1, max_length=limits.QUEUES_PER_TOPIC_MAX)]
    rows: Annotated[int, Meta(ge=1, le=limits.PULL_ROWS_MAX)]
    wait_ms: Annotated[int, Meta(ge=0, le=limits.PULL_WAIT_MS_MAX)] = 0


Ticket = ReadLog | ReadQueue | Pull
