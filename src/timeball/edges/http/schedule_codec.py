"""Recurring schedules as JSON. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from timeball.broker.admin.schedule_changes import Past, Shown
from timeball.broker.recurring.rule import Occurrence, Rule
from timeball.broker.recurring.successors import occurrence_id
from timeball.broker.registry.schedules import CatchUp, ScheduleFacts, State
from timeball.edges.http.codec import format_time, text_or_bytes
from timeball.edges.http.send_codec import template_fields
from timeball.model import limits, time_parsing
from timeball.model.http_api import At, Message

StateName = Literal["active", "paused", "ended", "failed"]
_STATES: dict[State, StateName] = {
    State.ACTIVE: "active", State.PAUSED: "paused", State.ENDED: "ended", State.FAILED: "failed",
}  # fmt: skip
_UNITS = (
    ("d", limits.DAY_MS), ("h", limits.HOUR_MS), ("m", limits.MINUTE_MS), ("s", limits.SECOND_MS), ("ms", 1),
)  # fmt: skip
PastState = Literal["visible", "waiting", "cancelled", "expired", "unknown"]


class SchedulePut(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A schedule to create or to replace: its rule, and the message of each occurrence, as for a send.

    `rule` is described in docs/recurring.md. `catch_up` decides about missed occurrences.
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

    def to_facts(self) -> ScheduleFacts:
        """Convert the request to the broker's type. Raises InvalidMessage and InvalidDelay."""
        body, tag, keys = template_fields(
            Message(
                body=self.body, json=self.json, base64=self.base64, key=self.key, keys=self.keys, tag=self.tag,
                properties=self.properties,
            )
        )  # fmt: skip
        return ScheduleFacts(
            rule=msgspec.Raw(Rule.parse(self.rule).text.encode()),
            topic=self.topic,
            body=body,
            tag=tag,
            keys=keys,
            properties=self.properties,
            catch_up=self.catch_up,
            catch_up_within_ms=time_parsing.delay_ms(self.catch_up_within, "catch_up_within"),
        )


class NextOccurrence(msgspec.Struct):
    """The pending occurrence: its message id, its time, and this time in the zone of the rule."""

    id: str
    due: str
    due_ms: int
    local: str


class ScheduleShown(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A schedule and its progress. `runs`: releases so far. `last`: time of the last one, `last_due`: its due time.

    `outcome` is only in the answer to a put: created, replaced or unchanged.
    """

    name: str
    state: StateName
    topic: str
    rule: dict[str, Any]
    body: str | None = None
    base64: bytes | None = None
    tag: str | None = None
    keys: list[str] = []
    properties: dict[str, str] = {}
    catch_up: CatchUp
    catch_up_within: str
    next: NextOccurrence | None = None
    runs: int
    last_due: str | None = None
    last: str | None = None
    error: str | None = None
    outcome: str | None = None


class SchedulesShown(msgspec.Struct):
    """A page of schedules, ordered by name. `next_page` is null on the last page."""

    schedules: list[ScheduleShown]
    next_page: str | None


class ScheduleDeleted(msgspec.Struct):
    """A schedule that was deleted."""

    name: str
    verdict: str = "deleted"


class ScheduleRun(msgspec.Struct):
    """The id of the message that a schedule has sent at once."""

    name: str
    id: str


class Previewing(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A rule whose next times are wanted: `count` times later than `from` (default: now)."""

    rule: dict[str, Any]
    start: At | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="from")
    count: int = 10

    @property
    def after_ms(self) -> int | None:
        """The time in ms after which the first occurrence is. None for now. Raises InvalidDelay."""
        return None if self.start is msgspec.UNSET else time_parsing.due_ms(self.start)


class Time(msgspec.Struct):
    """A time of a rule, and the same time in the zone of the rule."""

    due: str
    due_ms: int
    local: str


class Times(msgspec.Struct):
    """Times of a rule. Fewer than requested if the rule ends."""

    times: list[Time]


class PastOccurrence(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A past time of a rule, and what became of its message.

    `state` is unknown if there is no such message: the occurrence was missed, or the log no longer has it.
    """

    id: str
    due: str
    due_ms: int
    local: str
    state: PastState
    at: str | None = None
    reason: str | None = None


class History(msgspec.Struct):
    """The last times of a schedule's rule, the newest first."""

    name: str
    occurrences: list[PastOccurrence]


def show_schedule(shown: Shown, outcome: str | None = None) -> ScheduleShown:
    """Build the answer that shows a schedule."""
    name, facts, progress, local, may_read = shown
    pending = None
    if progress.number:
        due_ms = progress.due_ms
        pending = NextOccurrence(occurrence_id(name, due_ms), format_time(due_ms), due_ms, local)
    body, not_utf8 = text_or_bytes(facts.body) if may_read else (None, None)
    has_run = progress.runs > 0
    return ScheduleShown(
        name=name, state=_STATES[progress.state], topic=facts.topic, rule=msgspec.json.decode(facts.rule),
        body=body, base64=not_utf8, tag=facts.tag, keys=(facts.keys or "").split(), properties=facts.properties,
        catch_up=facts.catch_up, catch_up_within=_duration_text(facts.catch_up_within_ms), next=pending,
        runs=progress.runs, last_due=format_time(progress.last_due_ms) if has_run else None,
        last=format_time(progress.last_ms) if has_run else None, error=progress.error or None, outcome=outcome,
    )  # fmt: skip


def show_times(occurrences: Sequence[Occurrence]) -> Times:
    """Build the answer to a preview."""
    return Times([Time(format_time(each.due_ms), each.due_ms, each.local) for each in occurrences])


def show_history(name: str, past: Sequence[Past]) -> History:
    """Build the answer with the last occurrences of a schedule."""
    shown = []
    for occurrence, message_id, places in past:
        newest = places[0] if places else None
        state: PastState = "unknown"
        if newest is not None and newest.state in ("visible", "waiting", "cancelled", "expired"):
            state = newest.state  # type: ignore[assignment]
        shown.append(
            PastOccurrence(
                id=message_id, due=format_time(occurrence.due_ms), due_ms=occurrence.due_ms,
                local=occurrence.local, state=state,
                at=None if newest is None or newest.at_ms is None else format_time(newest.at_ms),
                reason=None if newest is None else newest.reason,
            )
        )  # fmt: skip
    return History(name, shown)


def _duration_text(duration_ms: int) -> str:
    unit, unit_ms = next(unit for unit in _UNITS if duration_ms % unit[1] == 0)
    return f"{duration_ms // unit_ms}{unit}"
