"""Requests for recurring schedules and time zones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from timeball.broker.admin.schedule_changes import Past, Shown
from timeball.broker.recurring.rule import Occurrence, Rule
from timeball.broker.recurring.successors import occurrence_id
from timeball.broker.registry.schedules import ScheduleFacts, State
from timeball.broker.registry.zones import ZoneFacts
from timeball.broker.service import Broker
from timeball.edges.http.codec import Answer, format_time, text_or_bytes
from timeball.edges.http.requests import Call, Paths, check_no_body, parse_count, read_request
from timeball.edges.http.send_codec import template_fields
from timeball.model import limits, time_parsing
from timeball.model.access import Verb
from timeball.model.http_api import (
    History,
    Message,
    NextOccurrence,
    PastOccurrence,
    Previewing,
    Schedule,
    ScheduleDeleted,
    SchedulePage,
    SchedulePut,
    ScheduleRun,
    Time,
    Times,
    ZoneInUse,
    ZoneMoved,
    ZonesInUse,
    ZoneUpdated,
)

PAGE_ROWS = 100


class Schedules:
    """Serves the paths of recurring schedules. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._schedules, self._policy, self._zones = broker.schedules, broker.policy, broker.zone_updates
        path = "/v1/schedules/{name}"
        self.paths: Paths = {
            "/v1/schedules": {"GET": self._list},
            path: {"GET": self._get, "PUT": self._put, "DELETE": self._delete},
            f"{path}/pause": {"POST": self._pause},
            f"{path}/resume": {"POST": self._resume},
            f"{path}/run": {"POST": self._run},
            f"{path}/history": {"GET": self._get_history},
            "/v1/preview": {"POST": self._preview},
            "/v1/zones": {"GET": self._get_zones},
        }

    async def _list(self, call: Call) -> Answer:
        """Show a page of schedules, of one topic or of all."""
        rows = parse_count(call, "max", PAGE_ROWS, limits.LISTED_ROWS_MAX)
        page = await self._schedules.page(
            rows, call.query.get("page", ""), call.query.get("topic"), call.caller
        )
        size_bytes = sum(len(shown.facts.body) for shown in page.schedules)
        answer = SchedulePage([show_schedule(shown) for shown in page.schedules], page.next_page)
        return Answer(200, answer, size_bytes=size_bytes)

    async def _get(self, call: Call) -> Answer:
        return Answer(200, show_schedule(await self._schedules.get(call.path["name"], call.caller)))

    async def _put(self, call: Call) -> Answer:
        """Create or replace a schedule. A new one is answered with 201."""
        # The topic is in the body, which is not read from callers who may send to no topic.
        self._policy.allow_somewhere(call.caller, Verb.SEND)
        request: SchedulePut = await read_request(call, SchedulePut, self._policy, Verb.LOOK)
        # In a thread, as for a preview: a rule with `count` computes all its times.
        facts = await asyncio.to_thread(to_facts, request)
        shown, outcome = await self._schedules.put(call.path["name"], facts, call.caller)
        return Answer(201 if outcome == "created" else 200, show_schedule(shown, outcome))

    async def _delete(self, call: Call) -> Answer:
        await self._schedules.delete(call.path["name"], call.caller)
        return Answer(200, ScheduleDeleted(call.path["name"]))

    async def _pause(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.LOOK)
        return Answer(200, show_schedule(await self._schedules.pause(call.path["name"], call.caller)))

    async def _resume(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.LOOK)
        return Answer(200, show_schedule(await self._schedules.resume(call.path["name"], call.caller)))

    async def _run(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.LOOK)
        name = call.path["name"]
        return Answer(201, ScheduleRun(name, await self._schedules.run(name, call.caller)))

    async def _get_history(self, call: Call) -> Answer:
        name = call.path["name"]
        return Answer(200, show_history(name, await self._schedules.history(name, call.caller)))

    async def _preview(self, call: Call) -> Answer:
        """Show the next times of a rule, without a schedule."""
        self._policy.allow_somewhere(call.caller, Verb.LOOK)
        request: Previewing = await read_request(call, Previewing, self._policy, Verb.LOOK)
        times = await self._schedules.preview(
            request.rule, preview_after_ms(request), request.count, call.caller
        )
        return Answer(200, show_times(times))

    async def _get_zones(self, call: Call) -> Answer:
        return Answer(200, show_zones(self._zones.facts(call.caller)))


# ---- schedules and time zones as JSON ------------------------------------------------------------------------

_STATES = {State.ACTIVE: "active", State.PAUSED: "paused", State.ENDED: "ended", State.FAILED: "failed"}
_UNITS = (
    ("d", limits.DAY_MS), ("h", limits.HOUR_MS), ("m", limits.MINUTE_MS), ("s", limits.SECOND_MS), ("ms", 1),
)  # fmt: skip


def to_facts(request: SchedulePut) -> ScheduleFacts:
    """Convert a request to the broker's type, with its rule in normal form. Raises InvalidMessage and InvalidDelay."""
    body, tag, keys = template_fields(
        Message(
            body=request.body, json=request.json, base64=request.base64, key=request.key, keys=request.keys,
            tag=request.tag, properties=request.properties,
        )
    )  # fmt: skip
    return ScheduleFacts(
        rule=msgspec.Raw(Rule.parse(request.rule).text.encode()),
        topic=request.topic,
        body=body,
        tag=tag,
        keys=keys,
        properties=request.properties,
        catch_up=request.catch_up,
        catch_up_within_ms=time_parsing.delay_ms(request.catch_up_within, "catch_up_within"),
        overlap=request.overlap,
        group=request.group,
    )


def preview_after_ms(request: Previewing) -> int | None:
    """Parse the time (ms since 1970) after which a preview begins. None: it begins now. Raises InvalidDelay."""
    return None if request.start is msgspec.UNSET else time_parsing.due_ms(request.start, "from")


def show_schedule(shown: Shown, outcome: str | None = None) -> Schedule:
    """Build the answer that shows a schedule. `outcome` of a PUT: created, replaced or unchanged."""
    name, facts, progress, local, may_read = shown
    pending = None
    if progress.number:
        due_ms = progress.due_ms
        pending = NextOccurrence(occurrence_id(name, due_ms), format_time(due_ms), due_ms, local)
    body, not_utf8 = text_or_bytes(facts.body) if may_read else (None, None)
    has_run = progress.runs > 0
    return Schedule(
        name=name, state=_STATES[progress.state], topic=facts.topic, rule=msgspec.json.decode(facts.rule),
        body=body, base64=not_utf8, tag=facts.tag, keys=(facts.keys or "").split(), properties=facts.properties,
        catch_up=facts.catch_up, catch_up_within=_duration_text(facts.catch_up_within_ms),
        overlap=facts.overlap, group=facts.group, next=pending,
        runs=progress.runs, last_due=format_time(progress.last_due_ms) if has_run else None,
        last=format_time(progress.last_ms) if has_run else None, error=progress.error or None, outcome=outcome,
    )  # fmt: skip


def show_times(occurrences: Sequence[Occurrence]) -> Times:
    """Build the answer to a preview."""
    return Times([Time(format_time(each.due_ms), each.due_ms, each.local) for each in occurrences])


def show_history(name: str, past: Sequence[Past]) -> History:
    """Build the answer with the last occurrences of a schedule. The state of an occurrence is that of its message."""
    shown = []
    for occurrence, message_id, places in past:
        newest = places[0] if places else None  # None: the broker no longer keeps the outcome
        state = "unknown"
        if newest is not None and newest.state in ("visible", "waiting", "cancelled", "expired"):
            state = newest.state
        shown.append(
            PastOccurrence(
                id=message_id, due=format_time(occurrence.due_ms), due_ms=occurrence.due_ms,
                local=occurrence.local, state=state,
                at=None if newest is None or newest.at_ms is None else format_time(newest.at_ms),
                reason=None if newest is None else newest.reason,
            )
        )  # fmt: skip
    return History(name, shown)


def show_zones(facts: ZoneFacts) -> ZonesInUse:
    """Build the answer about the time zones in use, and the messages that the last update of tzdata has moved."""
    zones = [
        ZoneInUse(zone, format_time(use.until_ms) if use.until_ms else None)
        for zone, use in sorted(facts.zones.items())
    ]
    if (update := facts.update) is None:
        return ZonesInUse(facts.tzdata, zones)
    moved = [
        ZoneMoved(
            zone=moves.zone, messages=moves.messages, schedules=moves.schedules,
            before=format_time(moves.before_ms), before_ms=moves.before_ms, after=format_time(moves.after_ms),
            after_ms=moves.after_ms,
        )
        for moves in update.moved
    ]  # fmt: skip
    shown = ZoneUpdated(
        tzdata=update.after, former=update.before or None, at=format_time(update.at_ms), at_ms=update.at_ms,
        moved=moved,
    )  # fmt: skip
    return ZonesInUse(facts.tzdata, zones, shown)


def _duration_text(duration_ms: int) -> str:
    """Format a duration in the largest unit in which it is a whole number."""
    unit, unit_ms = next((unit, unit_ms) for unit, unit_ms in _UNITS if duration_ms % unit_ms == 0)
    return f"{duration_ms // unit_ms}{unit}"
