"""Requests and answers of the HTTP API that both the edge and the Python client use: the structs of their JSON. No I/O.

A request refuses an unknown field. An answer ignores unknown fields, so a client accepts the answers of newer brokers.
Times are given twice in answers, as text and as a number (milliseconds since 1970 UTC), and bodies as text or base64.
Empty fields are left out. The OpenAPI document is made from the same structs, so it always agrees with them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from timeball.model.answers import GroupState, QueueRange
from timeball.model.send_options import OnExpiry, OnPending, Spread
from timeball.model.values import CatchUp, Overlap

At = int | str

# ---- sends ---------------------------------------------------------------------------------------------------


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A message to send: exactly one of body, json and base64, and at most one of at and after.

    With `zone`, `at` is a local time without an offset.

    With `unique_key`, the message is sent alone, and `on_pending` decides if another one with this key is pending. A
    message that would be released after `expires_at`, or longer than `expires_in` after its due time, expires. With
    `window`, the broker chooses the due time: from the given one on, and at most this much later.
    """

    body: str | None = None
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    base64: bytes | None = None
    id: str | None = None
    key: str | None = None
    keys: list[str] = []
    tag: str | None = None
    properties: dict[str, str] = {}
    at: At | msgspec.UnsetType = msgspec.UNSET
    after: str | msgspec.UnsetType = msgspec.UNSET
    zone: str | msgspec.UnsetType = msgspec.UNSET
    unique_key: str | None = None
    on_pending: OnPending | None = None
    expires_at: At | msgspec.UnsetType = msgspec.UNSET
    expires_in: str | msgspec.UnsetType = msgspec.UNSET
    on_expiry: OnExpiry | None = None
    window: str | msgspec.UnsetType = msgspec.UNSET
    spread: Spread | None = None


class Replaced(msgspec.Struct, frozen=True):
    """The pending message that a send with the same unique key has replaced."""

    id: str
    seq: int
    due: str
    due_ms: int


class Sent(msgspec.Struct, omit_defaults=True):
    """The answer to one accepted message. Without `due`, the message is already in its queue.

    With an idempotency key, `outcome` is "created", or "exists" if the message was sent before. For a message that was
    sent before, `state` and `due` are its current state and due time. `past_ms` is the time by which `due` had passed
    when the message was accepted. `store_ms` is the time of acceptance, if this is the whole answer.

    With a unique key, `outcome` is "created", "replaced", or "kept". The kept message was pending before: the answer is
    its id, number and due time.
    """

    id: str
    seq: int
    durable: bool
    due: str | None = None
    due_ms: int | None = None
    outcome: str | None = None
    state: str | None = None
    past_ms: int = 0
    store_ms: int = 0
    replaced: Replaced | None = None


class SentMany(msgspec.Struct):
    """The answers to many messages, in their order. `store_ms` is the time of acceptance."""

    messages: list[Sent]
    store_ms: int


# ---- received messages, and their receipts -------------------------------------------------------------------


class Leased(msgspec.Struct, omit_defaults=True):
    """A message leased to a group, and its receipt. `base64` holds a body that is not UTF-8.

    `scheduled_seq` is the `seq` of the row that scheduled the message: of its send, or of the last nack with a delay.
    """

    receipt: str
    topic: str
    attempt: int
    seq: int
    queue: int
    offset: int
    released: str
    id: str | None = None
    text: str | None = msgspec.field(default=None, name="body")
    base64: bytes | None = None
    tag: str | None = None
    keys: list[str] = []
    properties: dict[str, str] = {}
    due: str | None = None
    lateness_ms: int | None = None
    scheduled_seq: int | None = None


class LeasedMany(msgspec.Struct):
    """The messages of a receive. The list may be empty."""

    messages: list[Leased]


class Answering(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts to acknowledge."""

    receipts: list[str]


class GivingBack(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts of failed attempts. Without `after`, the group's retry policy decides when they are delivered again.

    `after` may be as long as the delay of a send, or at most 12 h in a group that consumes in order.
    With `counts` false, no attempt is counted, for messages that no handler has seen.
    """

    receipts: list[str]
    after: str | msgspec.UnsetType = msgspec.UNSET
    reason: str = ""
    counts: bool = True


class GivingUp(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts of messages to move to the group's dead letters."""

    receipts: list[str]
    reason: str = ""


class Extending(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts of leases that shall last for the duration `lease` from now on. 0 gives the messages back.

    With `counts` false, a lease that ends without an answer counts no attempt.
    """

    receipts: list[str]
    lease: str
    counts: bool = True


class Answered(msgspec.Struct):
    """A receipt, and whether its lease was still valid. The next request for this message must use this receipt."""

    receipt: str
    valid: bool


class AnsweredMany(msgspec.Struct):
    """The results for the receipts of a request, in the same order."""

    results: list[Answered]


# ---- messages by id and key ----------------------------------------------------------------------------------


class GroupAt(msgspec.Struct, omit_defaults=True):
    """A consumer group, and the state of a message in it: waiting, leased, done or dead.

    `attempts` is left out if their number is not known.
    """

    group: str
    state: str
    attempts: int = 0
    until: str | None = None
    until_ms: int | None = None


class Place(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The state of a message (waiting, visible, cancelled or expired) and its location.

    `body` has at most the first 64 KiB. With `content_cut`, the content is left out: that of newer messages has 4 MiB.
    """

    state: str
    seq: int
    topic: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    at_ms: int | None = None
    due_ms: int | None = None
    keys: list[str] | None = None
    properties: dict[str, str] | None = None
    tag: str | None = None
    size_bytes: int | None = None
    body: str | None = None
    base64: bytes | None = None
    body_cut: bool = False
    at: str | None = None
    due: str | None = None
    groups: list[GroupAt] = []
    by: str | None = None
    reason: str | None = None
    content_cut: bool = False


class Places(msgspec.Struct, omit_defaults=True):
    """The messages with an id, the newest first. With `messages_cut` there are more than these 1,000."""

    id: str
    messages: list[Place]
    messages_cut: bool = False


class CancellingMany(msgspec.Struct, forbid_unknown_fields=True):
    """Scheduled messages to cancel: those with these ids, or those with these keys."""

    ids: list[str] = []
    keys: list[str] = []


class ReschedulingMany(msgspec.Struct, forbid_unknown_fields=True):
    """Scheduled messages to reschedule, as for CancellingMany, to exactly one of `at` and `after`."""

    ids: list[str] = []
    keys: list[str] = []
    at: At | msgspec.UnsetType = msgspec.UNSET
    after: str | msgspec.UnsetType = msgspec.UNSET


class Settled(msgspec.Struct, omit_defaults=True):
    """The outcome for one message of a cancel or reschedule of several. `verdict`: see docs/cancel.md."""

    id: str
    verdict: str
    seq: int | None = None
    at: str | None = None
    at_ms: int | None = None
    due: str | None = None
    due_ms: int | None = None


class SettledMany(msgspec.Struct):
    """The outcomes of a cancel or reschedule: one for each id, or one for each message that has a key."""

    verdicts: list[Settled]


# ---- topics, groups and dead letters -------------------------------------------------------------------------


class Topic(msgspec.Struct):
    """A topic: the number of its queues, and of the visible messages that they keep."""

    topic: str
    queues: int
    messages: int


class Topics(msgspec.Struct):
    """Topics, ordered by name."""

    topics: list[Topic]


class TopicMade(msgspec.Struct, forbid_unknown_fields=True):
    """A topic to create. An existing topic keeps its queues or gains some.

    Without `queues`, the broker's setting applies. `on_pending` is the rule for sends with a unique key that name none.
    At most `max_per_second` messages of the topic become visible in a second, 0 for no limit.
    """

    queues: int | None = None
    on_pending: OnPending | None = None
    max_per_second: int | None = None


class TopicQueues(msgspec.Struct, omit_defaults=True):
    """A topic, and the offsets that each of its queues keeps, by its number.

    `held` is the number of messages that wait for `max_per_second`, and are not among these offsets yet.
    """

    topic: str
    queues: dict[int, QueueRange]
    max_per_second: int | None = None
    held: int = 0


class Committing(msgspec.Struct, forbid_unknown_fields=True):
    """The next offset of each queue, by its number, at which a group goes on."""

    offsets: dict[int, int]


class GroupLimits(msgspec.Struct, forbid_unknown_fields=True):
    """How many messages with the same key the members of a group may hold at a time. 0 for no limit."""

    max_per_key: int


class GroupOffsets(msgspec.Struct):
    """The next offset of each queue at which a group goes on. Queues without one are left out."""

    group: str
    topic: str
    offsets: dict[int, int]


class Groups(msgspec.Struct, omit_defaults=True):
    """Consumer groups by name. `next_page`, as ?page=, leads to the next ones; the last page has none."""

    groups: list[GroupState]
    next_page: str | None = None


class DeadLetter(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A dead letter of a group. `dead_letter` is its handle. `body` has at most the first 64 KiB."""

    dead_letter: str
    id: str | None = None
    topic: str
    died_ms: int
    attempts: int
    tag: str | None = None
    keys: list[str]
    properties: dict[str, str]
    reason: str | None = None
    died: str
    size_bytes: int
    body: str | None = None
    base64: bytes | None = None
    body_cut: bool = False


class DeadLetters(msgspec.Struct, omit_defaults=True):
    """Dead letters of a group. `next_page`, as ?page=, leads to the next ones; the last page has none."""

    dead_letters: list[DeadLetter]
    next_page: str | None = None


class Resolving(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Dead letters to resend or to delete: those in `dead_letters`, or all of the group.

    A resend delivers the first one after `after`, and then `rate` in a second. Without these, it delivers all at once.
    With `where`, it resends all that meet this SQL condition. `where` and `dead_letters` exclude each other.
    """

    dead_letters: list[str] | None = None
    all: bool = False
    after: str | None = None
    rate: float | None = None
    where: str = ""


class Dealt(msgspec.Struct):
    """A dead letter of the request, and its outcome: resent, deleted or not_found."""

    dead_letter: str
    verdict: str


class DealtMany(msgspec.Struct):
    """The number of dead letters that were resent or deleted, and the outcome of each one in the request."""

    count: int
    results: list[Dealt]


# ---- selections ----------------------------------------------------------------------------------------------


Action = Literal["cancel", "shift", "pause", "resume", "release", "move"]


class Selecting(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The pending messages to select: those that meet the condition `where` (SQL-92), of these topics, due in a window.

    At least one of the four is needed. Without `topics` only an administrator may select. `shift` is a duration, as in
    "2h" or "-30m", for the action shift alone, and `to_topic` the topic for move alone.
    """

    action: Action
    shift: str | msgspec.UnsetType = msgspec.UNSET
    to_topic: str = ""
    where: str = ""
    topics: list[str] = []
    start: At | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="from")
    to: At | msgspec.UnsetType = msgspec.UNSET


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A selection. `state` is active, undone or over (all of its messages have ended).

    `count`, `first_due` and `last_due` describe the covered messages before its effect. They follow within seconds
    after the acceptance.
    """

    id: str
    action: Action
    state: str
    shift_ms: int = 0
    to_topic: str | None = None
    accepted: str
    accepted_ms: int
    by: str | None = None
    where: str | None = None
    topics: list[str] = []
    start: str | None = msgspec.field(default=None, name="from")
    to: str | None = None
    count: int | None = None
    first_due: str | None = None
    last_due: str | None = None
    undone: str | None = None


class SelectionList(msgspec.Struct, frozen=True):
    """Selections, the newest last."""

    selections: list[Selection]


class SelectedMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pending message that a selection would cover."""

    topic: str
    due: str
    due_ms: int
    id: str | None = None
    keys: list[str] = []


class HourLoad(msgspec.Struct, frozen=True):
    """The messages that are due in an hour (UTC), before and after the selection."""

    hour: str
    before: int
    after: int


class DryRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """The messages that a selection would cover now: their number, the first and last due time, up to ten of them.

    `load` has the first hundred hours with such messages.
    """

    count: int
    first_due: str | None = None
    last_due: str | None = None
    samples: list[SelectedMessage] = []
    load: list[HourLoad] = []


# ---- recurring schedules -------------------------------------------------------------------------------------


class SchedulePut(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A schedule to create or to replace: its rule, and the message of each occurrence, as for a send.

    `rule` is described in docs/recurring.md. `catch_up` decides about missed occurrences. With `overlap` skip, an
    occurrence is left out while `group` has not finished the previous one.
    """

    rule: dict[str, Any]
    topic: str
    body: str | None = None
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    base64: bytes | None = None
    key: str | None = None
    keys: list[str] = []
    tag: str | None = None
    properties: dict[str, str] = {}
    catch_up: CatchUp = "latest"
    catch_up_within: str = "1d"
    overlap: Overlap = "allow"
    group: str = ""


class NextOccurrence(msgspec.Struct, frozen=True):
    """The pending occurrence: its message id, its time, and this time in the zone of the rule."""

    id: str
    due: str
    due_ms: int
    local: str


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule and its progress. `runs`: releases so far. `last`: time of the last one, `last_due`: its due time.

    `state` is active, paused, ended or failed. `outcome` is only in the answer to a put: created, replaced or
    unchanged.
    """

    name: str
    state: str
    topic: str
    rule: dict[str, Any]
    body: str | None = None
    base64: bytes | None = None
    tag: str | None = None
    keys: list[str] = []
    properties: dict[str, str] = {}
    catch_up: str
    catch_up_within: str
    overlap: str = "allow"
    group: str = ""
    next: NextOccurrence | None = None
    runs: int
    last_due: str | None = None
    last: str | None = None
    error: str | None = None
    outcome: str | None = None


class SchedulePage(msgspec.Struct, frozen=True):
    """A page of schedules, ordered by name. `next_page` is null on the last page."""

    schedules: list[Schedule]
    next_page: str | None


class ScheduleDeleted(msgspec.Struct, frozen=True):
    """A schedule that was deleted."""

    name: str
    verdict: str = "deleted"


class ScheduleRun(msgspec.Struct, frozen=True):
    """The id of the message that a schedule has sent at once."""

    name: str
    id: str


class Previewing(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A rule whose next times are wanted: `count` times later than `from` (default: now)."""

    rule: dict[str, Any]
    start: At | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="from")
    count: int = 10


class Time(msgspec.Struct, frozen=True):
    """A time of a rule, and the same time in the zone of the rule."""

    due: str
    due_ms: int
    local: str


class Times(msgspec.Struct, frozen=True):
    """Times of a rule. Fewer than requested if the rule ends."""

    times: list[Time]


class PastOccurrence(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A past time of a rule, and the state of its message: visible, waiting, cancelled, expired or unknown.

    It is unknown if there is no such message: the occurrence was missed, or the log no longer has it.
    """

    id: str
    due: str
    due_ms: int
    local: str
    state: str
    at: str | None = None
    reason: str | None = None


class History(msgspec.Struct, frozen=True):
    """The last times of a schedule's rule, the newest first."""

    name: str
    occurrences: list[PastOccurrence]


# ---- time zones ----------------------------------------------------------------------------------------------


class ZoneInUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A time zone in use. No message with a local time in it is due later than `latest`, which is rounded up."""

    zone: str
    latest: str | None = None


class ZoneMoved(msgspec.Struct, frozen=True, kw_only=True):
    """Messages and schedules that an update moved by the same distance. `before`, `after`: due times of the first."""

    zone: str
    messages: int
    schedules: int
    before: str
    before_ms: int
    after: str
    after_ms: int


class ZoneUpdated(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An update of the rules: `tzdata` replaced `former`, which is left out if it is not known."""

    tzdata: str
    former: str | None = None
    at: str
    at_ms: int
    moved: list[ZoneMoved]


class ZonesInUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The version of tzdata, the zones in use, and the last update."""

    tzdata: str
    zones: list[ZoneInUse]
    update: ZoneUpdated | None = None
