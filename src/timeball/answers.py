"""What Flight's answers say: JSON, with instants in milliseconds since 1970 UTC. wire.py has them all."""

from __future__ import annotations

import msgspec

CREATED, EXISTS = "created", "exists"


class SentState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The current state of a message that was sent before under the same idempotency key.

    waiting      until `due_ms`, which a reschedule may have changed
    visible      it is in its queue, or was; `due_ms`: its last due time, if it had one
    cancelled    it will not be delivered
    expired      it does not wait, and the log does not keep its end any more
    handed       it waits in another group of the cluster: look it up by its id
    unavailable  it is on its way from one group of the cluster to another
    """

    state: str
    due_ms: int | None = None

    @property
    def is_settled(self) -> bool:
        """True if it does not wait, and never will again."""
        return self.state in ("visible", "cancelled", "expired")


class SendAck(msgspec.Struct, frozen=True, omit_defaults=True):
    """A batch is on disk: rows have first_seq, first_seq + 1, …

    `outcome`: "created" by this send, or "exists": sent before under the same idempotency key. Of a send that is
    repeated `first_seq`, `rows` and `store_ms` are those of the first, and `states` the current states of its messages;
    its outcome is "created" when it names the attempt of the first.
    """

    first_seq: int
    rows: int
    store_ms: int
    outcome: str = CREATED
    states: list[SentState] = []


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
    outcome: str = CREATED
    states: list[SentState] = []
    error: str | None = None
    text: str = ""


class ReleaseAnswer(msgspec.Struct, frozen=True):
    """The same for a batch that was brought: rows released by it, durably, and rows left; or an error's code."""

    released: int = 0
    left: int = 0
    error: str = ""
    text: str = ""


UNAVAILABLE = "unavailable"
HANDED = "handed"
VERDICTS = (
    "cancelled", "rescheduled", "already_cancelled", "released", "expired", "not_found", UNAVAILABLE, HANDED,
)  # fmt: skip


class Verdict(msgspec.Struct, frozen=True):
    """The outcome of a cancel or a move. `at_ms`: when it happened, as far as known.

    cancelled           it will not be delivered
    rescheduled         it will be delivered at `due_ms`
    already_cancelled   an earlier request ended it: it was not going to be delivered
    released            too late: it is in its queue
    expired             it waits no more; what became of it is older than what the broker keeps
    not_found           no promise is known by this name
    unavailable         a group of the cluster did not answer, and may have promises of this name: ask again. Also
                        while the promise is on its way from one group to another
    handed              of a number: it waits in another group, under another number. Name it by id or key
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


class Content(msgspec.Struct, frozen=True):
    """The content of a message. `body` has its first SHOWN_BODY_BYTES_MAX bytes of `size_bytes`."""

    body: bytes
    size_bytes: int
    tag: str | None
    keys: list[str]
    properties: dict[str, str]


class GroupPlace(msgspec.Struct, frozen=True):
    """A group and its state with a visible message.

    waiting    to be handed out: the first time, or again, not before `until_ms` if that is there
    leased     a member has it, until `until_ms`
    done       acknowledged; or passed by, as a reader by offset does, or a filter
    dead       given up: a dead letter, or dealt with as one

    `attempts`: how often it was handed out, as the group counts; 0 where that is not known.
    """

    group: str
    state: str
    attempts: int = 0
    until_ms: int | None = None


class MessagePlace(msgspec.Struct, frozen=True):
    """The place of the message that was sent as `seq`.

    waiting      until `due_ms`
    visible      in `queue_id` at `queue_offset` since `at_ms`; its instant was `due_ms`, if it had one
    cancelled    at `at_ms`, as far as that is known
    expired      it waits no more; what became of it is older than what the log keeps

    content    of one that waits or is visible, for a caller who may receive from its topic
    groups     of one that is visible, those that the caller may consume as
    by         the account that has cancelled it; `reason`: why, as far as that was said
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


class TopicState(msgspec.Struct, frozen=True):
    """How far a group is in a topic: messages behind its stored offsets, and those that its members hold.

    `expired`: messages that retention, or the deletion of the topic, removed before the group read them.
    """

    topic: str
    lag: int
    in_flight: int
    expired: int = 0


class Conflict(msgspec.Struct, frozen=True):
    """Members of a group want different messages of a topic, so each loses some that another member has taken.

    `wanted`: their filters. With the topic "" the members subscribe to different topics, and `wanted` lists these.
    """

    topic: str
    wanted: list[str]


class GroupState(msgspec.Struct, frozen=True):
    """A consumer group: the sums of its topics, its dead letters that are left, and how often it tries a message."""

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


class GroupPage(msgspec.Struct, frozen=True):
    """Some groups, by name, and the name behind which the next ones stand, if there are more."""

    groups: list[GroupState]
    next_page: str | None = None


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a group has given up. `body` has its first SHOWN_BODY_BYTES_MAX bytes of `size_bytes`."""

    dead_letter: str  # its handle
    id: str | None
    topic: str  # that the group consumes
    died_ms: int
    attempts: int
    body: bytes
    size_bytes: int
    tag: str | None
    keys: list[str]
    properties: dict[str, str]
    reason: str | None = None  # the last one that a consumer gave for a nack, or for giving it up


class DeadLetterPage(msgspec.Struct, frozen=True):
    """Some dead letters, and the handle behind which the next ones stand, if there are more."""

    dead_letters: list[DeadLetterRow]
    next_page: str | None = None


class Resolved(msgspec.Struct, frozen=True):
    """How many dead letters a resend or a delete dealt with; of those that were named, whether each was there."""

    rows: int
    found: list[bool]


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
    ended. `count`: promises that this call has resumed or cancelled; `repeated`: it was in that state before. `groups`:
    of a cluster those that have a part of it each, as its plan says.
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
    """How far a group has handed over what waits in it, to its heir.

    `moved`: messages that the heir has confirmed; `moving`: on their way; `waiting`: still here, those due within a
    minute among them, which stay. `is_done`: the last look has found none to hand over. `problem`: why it does not go
    on; empty when it does.
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
    """The pending table: where it is and its current version; then of one in an object store.

    Its version is -1 while it is behind the log, since the store did not answer.
    """

    uri: str
    version: int
    foreign_commits: int = 0  # of other programs since the start; the table was corrected behind each
    last_foreign_commit: str = ""
    lost_files: int = 0  # that the log names and that are gone
    lost_rows: int = 0  # of these, settled ones among them
    problem: str = ""  # why the store's last answer was none
    cached_bytes: int = 0
    missing_files: int = 0  # due within the hour, and not in the data folder


class ClusterGroup(msgspec.Struct, frozen=True):
    """One group of a cluster: the Flight addresses (host:port) of the nodes that keep it, the leader's first."""

    group: str
    addresses: list[str]


class Status(msgspec.Struct, frozen=True):
    """The fields of the broker's status that programs need; docs/flight.md names them all.

    `group`: which one of its cluster the broker leads, and `groups`: all there are. A broker that belongs to no cluster
    has neither; None: it leads, and has not read yet which others there are.
    """

    now_ms: int
    log: LogStatus
    table: TableStatus
    watermark: int
    settled_before_ms: int
    strategy: str = "hour_log"  # who keeps promises
    group: str = ""
    groups: list[ClusterGroup] | None = []
