"""Results of the operations of the broker. Times are in milliseconds since 1970 UTC. Flight sends them as JSON.

The last section has the pages and counts of pending messages, which the HTTP edge converts to JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

# The outcomes of a send: EXISTS with an idempotency key, the last two with a unique key.
CREATED, EXISTS, KEPT, REPLACED = "created", "exists", "kept", "replaced"


class SentState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The current state of a message that was sent before under the same idempotency key.

    waiting      pending until `due_ms`, which a reschedule may have changed
    visible      it is or was in its queue; `due_ms`: its last due time, if it had one
    cancelled    it will not be delivered
    expired      it is not pending, and the log no longer contains its outcome
    handed       it is pending in another group of the cluster: look it up by its id
    unavailable  it is on its way from one group of the cluster to another
    """

    state: str
    due_ms: int | None = None

    @property
    def is_settled(self) -> bool:
        """True if the message is not pending and never will be again."""
        return self.state in ("visible", "cancelled", "expired")


class UniqueMessage(msgspec.Struct, frozen=True):
    """A message that was pending when a send with the same unique key kept or replaced it."""

    id: str
    seq: int
    due_ms: int


class SendAck(msgspec.Struct, frozen=True, omit_defaults=True):
    """The acknowledgement of a batch, which is on disk. Its rows have consecutive numbers from `first_seq` on.

    `outcome` is "created" if this send wrote the batch, or "exists" if a batch was sent before under the same
    idempotency key. In the second case `first_seq`, `rows` and `store_ms` are those of the first send, and `states` are
    the current states of its messages. A repeated send that names the attempt of the first send also gets "created".
    """

    first_seq: int
    rows: int
    store_ms: int
    outcome: str = CREATED
    states: list[SentState] = []


class ReleaseAck(msgspec.Struct, frozen=True):
    """The answer to a batch of releases from a dispatcher.

    The broker released `released` rows, durably, and did not release the `left` other rows.
    """

    released: int
    left: int


class SendRefusal(msgspec.Struct, frozen=True):
    """A batch was refused as a whole. The stream continues."""

    error: str
    text: str


class SendAnswer(msgspec.Struct, frozen=True):
    """An acknowledgement or a refusal, as the sender of a batch decodes it. It is a refusal if `error` is set."""

    first_seq: int = -1
    rows: int = 0
    store_ms: int = 0
    outcome: str = CREATED
    states: list[SentState] = []
    error: str | None = None
    text: str = ""


class ReleaseAnswer(msgspec.Struct, frozen=True):
    """A ReleaseAck, or an error code and text, as a dispatcher decodes the answer to its batch."""

    released: int = 0
    left: int = 0
    error: str = ""
    text: str = ""


UNAVAILABLE = "unavailable"
HANDED = "handed"
VERDICTS = (
    "cancelled", "rescheduled", "already_cancelled", "released", "expired", "not_found", UNAVAILABLE, HANDED,
)  # fmt: skip


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a cancel or a move. `at_ms`: when it happened, if known.

    cancelled           it will not be delivered
    rescheduled         it will be delivered at `due_ms`
    already_cancelled   an earlier request cancelled it
    released            too late: it is in its queue
    expired             it is not pending; its outcome is older than the broker's records
    not_found           there is no such scheduled message
    unavailable         repeat the request: a group of the cluster that may have the message did not answer, or the
                        message is on its way from one group to another
    handed              only for a sequence number: the message is pending in another group under another number, so
                        name it by id or key
    """

    subject: str
    verdict: str
    seq: int | None = None
    at_ms: int | None = None
    due_ms: int | None = None

    @property
    def cancelled(self) -> bool:
        """True if the message will certainly not be delivered."""
        return self.verdict in ("cancelled", "already_cancelled")


class Content(msgspec.Struct, frozen=True):
    """The content of a message. `body` contains the first SHOWN_BODY_BYTES_MAX bytes of `size_bytes`."""

    body: bytes
    size_bytes: int
    tag: str | None
    keys: list[str]
    properties: dict[str, str]


class GroupPlace(msgspec.Struct, frozen=True):
    """The state of a visible message in a group.

        waiting    to be delivered for the first time or again, not before `until_ms` if set
        leased     a consumer has it until `until_ms`
        done       acknowledged; or skipped, by a reader by offset or by a filter
        dead       given up: a dead letter, or a resolved one

    `attempts`: the number of deliveries that the group has counted, or 0 if unknown.
    """

    group: str
    state: str
    attempts: int = 0
    until_ms: int | None = None


class MessagePlace(msgspec.Struct, frozen=True):
    """The location of the message that was sent as `seq`.

    States:

    waiting      pending until `due_ms`
    visible      in `queue_id` at `queue_offset` since `at_ms`; its due time was `due_ms`, if it had one
    cancelled    at `at_ms`, if known
    expired      it is not pending; its outcome is older than the log

    Fields that some states have:

    content    set for a waiting or visible message, if the caller may receive from its topic
    groups     set for a visible message: its state in each group as which the caller may consume
    by         the account that cancelled the message
    reason     the reason that this account gave, if any, or the selection that holds a waiting message

    With `content_cut`, the content is left out because newer messages of the answer have many bytes.
    """

    state: str
    seq: int
    topic: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    at_ms: int | None = None
    due_ms: int | None = None
    content: Content | None = None
    groups: list[GroupPlace] = []
    by: str | None = None
    reason: str | None = None
    content_cut: bool = False


class TopicState(msgspec.Struct, frozen=True):
    """The progress of a group in a topic.

    `lag`: messages after its stored offsets. `in_flight`: messages leased by its consumers. `expired`: messages that
    retention or the deletion of the topic removed before the group read them.
    """

    topic: str
    lag: int
    in_flight: int
    expired: int = 0


class Conflict(msgspec.Struct, frozen=True):
    """A conflict in a group: its consumers subscribe to a topic with different filters.

    Each consumer then misses messages that another consumer has taken and skipped. `wanted` lists the filters. If the
    topic is "", the consumers subscribe to different topics, and `wanted` lists the topics.
    """

    topic: str
    wanted: list[str]


class GroupState(msgspec.Struct, frozen=True):
    """A consumer group: the sums of its topics, its unresolved dead letters, and its maximum number of attempts.

    Its members may hold `max_per_key` messages with the same key. None for no limit.
    """

    group: str
    lag: int
    in_flight: int
    dead_letters: int
    attempts_max: int
    in_order: bool
    enabled: bool
    topics: list[TopicState]
    expired: int = 0
    expired_dead_letters: int = 0
    conflicts: list[Conflict] = []
    max_per_key: int | None = None


class GroupPage(msgspec.Struct, frozen=True):
    """Some groups, by name. `next_page` is the name after which the next page begins, if there are more."""

    groups: list[GroupState]
    next_page: str | None = None


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a group gave up. `body` contains the first SHOWN_BODY_BYTES_MAX bytes of `size_bytes`."""

    dead_letter: str  # the handle of this dead letter
    id: str | None
    topic: str  # the topic that the group consumes
    died_ms: int
    attempts: int
    body: bytes
    size_bytes: int
    tag: str | None
    keys: list[str]
    properties: dict[str, str]
    # The last reason that a consumer gave for a negative acknowledgement, or for giving it up.
    reason: str | None = None


class DeadLetterPage(msgspec.Struct, frozen=True):
    """Some dead letters. `next_page` is the handle after which the next page begins, if there are more."""

    dead_letters: list[DeadLetterRow]
    next_page: str | None = None


class Resolved(msgspec.Struct, frozen=True):
    """The number of dead letters that a resend or delete resolved, and for each handle of the request whether it did.

    `found` is false for a dead letter that does not exist, or was resolved before.
    """

    rows: int
    found: list[bool]


class RangesCancelled(msgspec.Struct, frozen=True):
    """The result of cancelling ranges with `rows` sequence numbers in all.

    `cancelled`: messages that this call cancelled. `settled`: messages that were settled before, or whose release was
    under way. `already_cancelled`: the settled messages that are known to have been cancelled. If an answer is lost,
    repeat the call: the result is then the sum of `cancelled` and `already_cancelled`. The broker remembers a cancelled
    message until its due time has passed.
    """

    rows: int
    cancelled: int
    already_cancelled: int
    settled: int


CampaignChange = Literal["plan", "pause", "resume", "cancel"]


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a campaign, and the effect of the call that returned it.

    `state`: planned, running, paused, cancelled or finished. `ranges`: (first_seq, rows), omitted in a list of all
    campaigns. `held_from_ms`: messages due at this time or later are paused. `cancelled`: messages cancelled with the
    campaign. `count`: messages that this call resumed or cancelled. `repeated`: the campaign was in this state before
    the call. `groups`: the groups of the cluster over which the campaign's plan spreads it.
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
    groups: list[str] = []


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a drain: `group` hands over its pending messages to another group, `heir`.

    `moved`: messages that the other group has confirmed. `moving`: messages on their way. `waiting`: messages still in
    this group, including those due within a minute, which stay. `is_done`: the last check found no message to hand
    over. `problem`: the reason why the drain does not proceed, or "".
    """

    group: str
    heir: str
    since_ms: int
    moved: int
    moving: int
    waiting: int
    is_done: bool = False
    problem: str = ""


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """The table version and watermark after an attach. `repeated`: the broker already had this attach."""

    version: int
    watermark: int
    seq: int
    repeated: bool = False


class QueueRange(msgspec.Struct, frozen=True):
    """A queue keeps the offsets min <= offset < max."""

    min: int
    max: int


class Start(msgspec.Struct, frozen=True):
    """A start of the broker: the number of its first row, and the times of that row's frame and of the frame before."""

    first_seq: int
    at_ms: int
    before_ms: int


class LogStatus(msgspec.Struct, frozen=True):
    """Bounds of the log: rows with first_seq <= seq < durable_seq can be read."""

    first_seq: int
    next_seq: int
    durable_seq: int


class TableStatus(msgspec.Struct, frozen=True):
    """The pending table: its URI and current version. The other fields are for a table in an object store.

    The version is -1 while the table is behind the log because the store did not answer.
    """

    uri: str
    version: int
    # Commits by other programs since the start of the broker. It corrected the table after each.
    foreign_commits: int = 0
    last_foreign_commit: str = ""
    lost_files: int = 0  # files that the log names but that are missing
    lost_rows: int = 0  # rows in these files, including settled ones
    problem: str = ""  # the store's last error; "" if it answered
    cached_bytes: int = 0
    missing_files: int = 0  # files with messages due within the hour that are not in the data folder


class ClusterGroup(msgspec.Struct, frozen=True):
    """One group of a cluster: the Flight addresses (host:port) of the nodes that keep it, the leader's first."""

    group: str
    addresses: list[str]


class Status(msgspec.Struct, frozen=True):
    """The fields of the broker's status that programs need (docs/flight.md lists all fields).

    `group`: the cluster group that the broker leads. `groups`: all groups of the cluster, or None while the broker has
    not read the list yet. Both are empty for a broker outside a cluster.
    """

    now_ms: int
    log: LogStatus
    table: TableStatus
    watermark: int
    settled_before_ms: int
    strategy: str = "hour_log"  # the strategy that stores scheduled messages
    group: str = ""
    groups: list[ClusterGroup] | None = []


# ---- pages and counts of pending messages ---------------------------------------------------------------------


BucketUnit = Literal["second", "minute", "hour", "day"]
PagePosition = tuple[int, int]  # (due_ms, version), as in the files of the table
FIRST_POSITION: PagePosition = (-(1 << 62), 0)
LAST_POSITION: PagePosition = (1 << 62, 0)


class PendingMessage(NamedTuple):
    """A pending message, as a page shows it. `seq` is its number, by which it may be cancelled."""

    seq: int
    topic: str
    due_ms: int
    unique_key: str | None  # the message's id
    keys: str | None
    tag: str | None
    size_bytes: int  # of the body
    campaign: str | None  # id of the campaign that attached it
    is_held: bool = False  # by a selection or a paused campaign


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for a page: messages due in [from_ms, to_ms), from the position `after` on."""

    rows: int
    topic: str | None = None
    key: str | None = None  # only messages with this key
    from_ms: int | None = None
    to_ms: int | None = None
    after: PagePosition | None = None

    @property
    def low(self) -> PagePosition:
        """The first position of the page."""
        low = FIRST_POSITION if self.from_ms is None else (self.from_ms, 0)
        return low if self.after is None else max(low, self.after)

    @property
    def high(self) -> PagePosition:
        """The end of the requested positions (exclusive)."""
        return LAST_POSITION if self.to_ms is None else (self.to_ms, 0)


class PendingPage(NamedTuple):
    """Messages in order, and the position where the next page begins, or None after the last page."""

    messages: list[PendingMessage]
    next_page: PagePosition | None


@dataclass(frozen=True, slots=True)
class DueCounts:
    """The answer of a forecast, per bucket and per topic. Empty buckets and topics are left out.

    A bucket is its begin in ms and a number. `recurring`: occurrences of recurring schedules that are no messages yet,
    up to `recurring_to_ms`. `buckets` and `topics` do not contain them.
    """

    by: BucketUnit  # the width of a bucket
    from_ms: int
    to_ms: int
    counted_ms: int  # time of the count, which may be some seconds old
    buckets: list[tuple[int, int]]
    topics: dict[str, int]
    recurring: list[tuple[int, int]]
    recurring_topics: dict[str, int]
    recurring_to_ms: int


class RecurringSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A recurring schedule and its progress. `rule`: JSON. `next_due_ms`: of the pending occurrence, if there is one.

    `runs`: messages of the rule so far. `last_due_ms`, `last_ms`: the due time and the release of the last of them.
    """

    name: str
    state: str
    topic: str
    rule: str
    zone: str
    next_due_ms: int | None
    runs: int
    last_due_ms: int | None
    last_ms: int | None
    error: str | None


class RecurringSchedules(msgspec.Struct, frozen=True):
    """A page of recurring schedules, by name. `next_page` is None on the last page."""

    schedules: list[RecurringSchedule]
    next_page: str | None


class RecurringCounts(msgspec.Struct, frozen=True):
    """The occurrences of recurring schedules that are no messages yet, by topic, counted up to `to_ms`.

    Two parallel columns for each topic: the begin of each interval that is not empty, and the number of occurrences.
    """

    to_ms: int
    topics: dict[str, tuple[list[int], list[int]]]
