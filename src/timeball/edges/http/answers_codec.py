"""The results of the broker's verbs as JSON: times as texts beside their numbers, bodies as text or base64. No I/O.

Handlers answer with these structs, and the OpenAPI document describes them, so the two always agree. A field without
information is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from timeball.edges.http.codec import instant_text, shown_body
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
    """A group and its state for a message: waiting, leased, done or dead.

    Without `attempts` their number is not known.
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
    """A message that a group has given up. `dead_letter` is its handle; `body` has at most the first 64 KiB."""

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
    """The number of dead letters that were resent or deleted, and the outcomes of those that the request named."""

    count: int
    results: list[Dealt]


class CampaignShown(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A bulk write and its state: planned, running, paused, cancelled or finished, since the time `since`.

    `groups`: in a cluster, the groups that each hold a part of it.
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
    """The leader of a group, and the role of the node that answers. Only the leader answers with status 200."""

    group: str
    leader: str
    role: str


class ReplicaGroups(msgspec.Struct):
    """The groups of the cluster, ordered by name."""

    groups: list[ReplicaGroup]


def place_shown(found: MessagePlace) -> Place:
    """Build the answer that shows the state and location of a message."""
    place = Place(
        state=found.state, seq=found.seq, topic=found.topic, queue_id=found.queue_id,
        queue_offset=found.queue_offset, at_ms=found.at_ms, due_ms=found.due_ms, at=_text(found.at_ms),
        due=_text(found.due_ms), groups=[_group(one) for one in found.groups], by=found.by, reason=found.reason,
    )  # fmt: skip
    content = found.content
    if content is None:
        return place
    body = shown_body(content.body, content.size_bytes)
    return msgspec.structs.replace(
        place, keys=content.keys, properties=content.properties, tag=content.tag, **body
    )


def granted(verdict: Verdict) -> Granted:
    """Build the answer to a reschedule or cancel that was carried out."""
    return Granted(
        verdict.subject,
        verdict.seq,
        verdict.verdict,
        _text(verdict.at_ms),
        _text(verdict.due_ms),
        verdict.due_ms,
    )


def dead_letters(page: DeadLetterPage) -> DeadLetters:
    """Build the answer for a page of dead letters."""
    return DeadLetters([_letter(one) for one in page.dead_letters], page.next_page)


def dealt(named: Sequence[str], found: Sequence[bool], rows: int, verdict: str) -> DealtMany:
    """Build the answer to a resend or delete.

    `found`: for each handle in `named`, whether the dead letter was there.
    """
    pairs = zip(named, found, strict=True)
    return DealtMany(rows, [Dealt(one, verdict if there else "not_found") for one, there in pairs])


def campaign_shown(found: Campaign) -> CampaignShown:
    """Build the answer that shows a campaign."""
    said = msgspec.structs.asdict(found)
    return CampaignShown(
        **said, since=instant_text(found.since_ms), planned=instant_text(found.planned_ms),
        held_from=_text(found.held_from_ms),
    )  # fmt: skip


def _letter(row: DeadLetterRow) -> DeadLetter:
    said = {
        name: value
        for name, value in msgspec.structs.asdict(row).items()
        if name not in ("body", "size_bytes")
    }
    return DeadLetter(**said, died=instant_text(row.died_ms), **shown_body(row.body, row.size_bytes))


def _group(found: GroupPlace) -> GroupAt:
    return GroupAt(found.group, found.state, found.attempts, _text(found.until_ms), found.until_ms)


def _text(instant_ms: int | None) -> str | None:
    return None if instant_ms is None else instant_text(instant_ms)
