"""Structs for the JSON answers, built from the results of the broker's verbs. No I/O.

Times are given twice, as text and as a number, and bodies as text or base64. The OpenAPI document is made from the same
structs, so it always agrees with the answers. Empty fields are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from timeball.edges.http.codec import body_fields, format_time
from timeball.model.answers import (
    Campaign,
    DeadLetterPage,
    DeadLetterRow,
    GroupPlace,
    GroupState,
    MessagePlace,
    Verdict,
)
from timeball.monitoring.replica_groups import ReplicaGroup


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

    `body` has at most the first 64 KiB.
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


class Places(msgspec.Struct):
    """The messages with an id, the newest first."""

    id: str
    messages: list[Place]


class Granted(msgspec.Struct, omit_defaults=True):
    """A reschedule or cancel that was carried out: `verdict` is rescheduled or cancelled."""

    id: str
    seq: int | None
    verdict: str
    at: str | None = None
    due: str | None = None
    due_ms: int | None = None


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


class Dealt(msgspec.Struct):
    """A dead letter of the request, and its outcome: resent, deleted or not_found."""

    dead_letter: str
    verdict: str


class DealtMany(msgspec.Struct):
    """The number of dead letters that were resent or deleted, and the outcome of each one in the request."""

    count: int
    results: list[Dealt]


class CampaignShown(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A campaign, and its state since the time `since`: planned, running, paused, cancelled or finished.

    `groups`: in a cluster, the groups that each store a part of its messages.
    """

    campaign: str
    state: str
    since_ms: int
    since: str
    planned_ms: int
    planned: str
    planned_seq: int
    rows: int
    ranges: list[tuple[int, int]] | None = None
    held_from_ms: int | None = None
    held_from: str | None = None
    cancelled: int | None = None
    repeated: bool | None = None
    count: int | None = None
    shift_ms: int | None = None
    groups: list[str] = []


class Campaigns(msgspec.Struct):
    """Campaigns, without their ranges."""

    campaigns: list[CampaignShown]


class Jobs(msgspec.Struct, omit_defaults=True):
    """Reports of the pipeline's jobs, as the jobs wrote them, and the report of the last audit, if there was one."""

    jobs: list[dict[str, Any]]
    audit: dict[str, Any] | None = None


class TopicSize(msgspec.Struct):
    """A topic, and the current number of its queues."""

    topic: str
    queues: int


class TopicDeleted(msgspec.Struct):
    """A topic that was deleted.

    `unread`: messages that consumer groups had not read. `dead_letters`: the dead letters in the topic, if it held
    those of a group. `pending`: pending messages of the topic, which create it again when they are due. Without
    `pending` they are too many to count.
    """

    topic: str
    unread: int
    dead_letters: int
    pending: int | None = None
    verdict: str = "deleted"


class SubscriptionDeleted(msgspec.Struct):
    """A push subscription that was deleted."""

    name: str
    verdict: str = "deleted"


class Health(msgspec.Struct):
    """The status "live" or "ready"."""

    status: str


class Leads(msgspec.Struct):
    """The leader of a cluster group, and the role of this node. Only the leader answers with status 200."""

    group: str
    leader: str
    role: str


class ReplicaGroups(msgspec.Struct):
    """The groups of the cluster, ordered by name."""

    groups: list[ReplicaGroup]


def show_message(message: MessagePlace) -> Place:
    """Build the answer that shows the state and location of a message."""
    place = Place(
        state=message.state, seq=message.seq, topic=message.topic, queue_id=message.queue_id,
        queue_offset=message.queue_offset, at_ms=message.at_ms, due_ms=message.due_ms,
        at=_format_optional_time(message.at_ms), due=_format_optional_time(message.due_ms),
        groups=[_show_group(group) for group in message.groups], by=message.by, reason=message.reason,
    )  # fmt: skip
    content = message.content
    if content is None:
        return place
    body = body_fields(content.body, content.size_bytes)
    return msgspec.structs.replace(
        place, keys=content.keys, properties=content.properties, tag=content.tag, **body
    )


def show_verdict(verdict: Verdict) -> Granted:
    """Build the answer to a reschedule or cancel that was carried out."""
    return Granted(
        verdict.subject,
        verdict.seq,
        verdict.verdict,
        _format_optional_time(verdict.at_ms),
        _format_optional_time(verdict.due_ms),
        verdict.due_ms,
    )


def show_dead_letters(page: DeadLetterPage) -> DeadLetters:
    """Build the answer that shows a page of dead letters."""
    return DeadLetters([_show_dead_letter(row) for row in page.dead_letters], page.next_page)


def show_outcomes(handles: Sequence[str], was_found: Sequence[bool], count: int, verdict: str) -> DealtMany:
    """Build the answer to a resend or delete of `count` dead letters.

    `was_found` has for each handle whether the dead letter existed. `verdict` is the outcome of those that did.
    """
    pairs = zip(handles, was_found, strict=True)
    return DealtMany(
        count, [Dealt(handle, verdict if is_found else "not_found") for handle, is_found in pairs]
    )


def show_campaign(campaign: Campaign) -> CampaignShown:
    """Build the answer that shows a campaign."""
    fields = msgspec.structs.asdict(campaign)
    return CampaignShown(
        **fields, since=format_time(campaign.since_ms), planned=format_time(campaign.planned_ms),
        held_from=_format_optional_time(campaign.held_from_ms),
    )  # fmt: skip


def _show_dead_letter(row: DeadLetterRow) -> DeadLetter:
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(row).items()
        if name not in ("body", "size_bytes")
    }
    return DeadLetter(**fields, died=format_time(row.died_ms), **body_fields(row.body, row.size_bytes))


def _show_group(group: GroupPlace) -> GroupAt:
    return GroupAt(
        group.group, group.state, group.attempts, _format_optional_time(group.until_ms), group.until_ms
    )


def _format_optional_time(time_ms: int | None) -> str | None:
    return None if time_ms is None else format_time(time_ms)
