"""The operations on recurring schedules: put, pause, resume, run, delete, and queries.

Each change is one frame, which also cancels the pending occurrence that it replaces. Accounts need no right of their
own for schedules: who may send to the topic of the template may put, resume and run, and who may cancel messages of
this topic may pause and delete. These rights are checked with each command, and not when an occurrence is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.policy import Policy
from timeball.broker.recurring.rule import Occurrence, Rule
from timeball.broker.recurring.successors import (
    Continuation,
    Next,
    Successors,
    build_cancel_row,
    choose,
    first_after,
    following,
    is_costly,
    last_times,
    occurrence_id,
    occurrence_properties,
)
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.registry.schedules import (
    SCHEDULE,
    SCHEDULED_MS,
    Entry,
    Progress,
    Schedule,
    ScheduleFacts,
    Schedules,
    State,
)
from timeball.broker.registry.selections import Selections
from timeball.broker.registry.zones import Zones, zone_of_rule
from timeball.broker.revoking.scheduled_lookup import is_on_its_way_back
from timeball.io.clock import SchedulerClock
from timeball.log.row_encoder import rows_of
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.answers import MessagePlace
from timeball.model.errors import Forbidden, InvalidDelay, NotFound, OutOfRange
from timeball.model.message import encode_properties, send_row
from timeball.schedule.scheduler import Scheduler

HISTORY_ROWS = 10
FIRST_TIME_MS = -1  # before the first possible time of a rule, in 1970
# A page ends here, so that a list holds the event loop for a few milliseconds.
NAMES_PER_PAGE_MAX = 1_000  # names that are examined; the caller may see only a few of them
SHOWN_PER_PAGE_MAX = 100
PAGE_BYTES_MAX = 512 * 1024  # of rules and bodies
NO_TIME_TEXT = "has no time later than now"

Outcome = Literal["created", "replaced", "unchanged"]


class Shown(NamedTuple):
    """A schedule as its users see it. `next_local` is the local time of the pending occurrence, or "".

    Without `may_read` the caller may not see the body.
    """

    name: str
    facts: ScheduleFacts
    progress: Progress
    next_local: str
    may_read: bool


class Page(NamedTuple):
    """A page of schedules by name, and where the next page begins. None for the last page."""

    schedules: list[Shown]
    next_page: str | None


class Past(NamedTuple):
    """A past time of a rule, and the messages of this occurrence that the broker knows: none if it was missed."""

    occurrence: Occurrence
    message_id: str
    places: list[MessagePlace]


class ScheduleChanges:
    """The operations on schedules. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        appender: Appender,
        successors: Successors,
        find: Callable[[str, str | None, Caller], Awaitable[list[MessagePlace]]],
        *,
        clock: SchedulerClock,
        log: CommitLog,
        schedules: Schedules,
        selections: Selections,
        zones: Zones,
        scheduler: Scheduler,
        rates: Rates,
    ) -> None:
        """Create the operations. `find` finds the messages with an id (Broker.find)."""
        self._policy, self._appender, self._successors, self._find = policy, appender, successors, find
        self._clock, self._log, self._schedules, self._zones = clock, log, schedules, zones
        self._selections, self._scheduler, self._rates = selections, scheduler, rates

    # -- queries -------------------------------------------------------------------------------------------------

    async def get(self, name: str, caller: Caller) -> Shown:
        """Describe a schedule. Raises Forbidden, and NotFound, also if the caller may not look at its topic."""
        return await self._show(name, *self._find_visible(name, caller), caller)

    def _find_visible(self, name: str, caller: Caller) -> Schedule:
        """Find a schedule. Raises as `get`."""
        self._policy.allow_somewhere(caller, Verb.LOOK)
        schedule = self._schedules.get(name)
        if not self._policy.allows(caller, Verb.LOOK, topic=schedule.facts.topic):
            # The same error in both cases, so it does not reveal names.
            raise NotFound(f"no schedule {name!r}")
        return schedule

    async def page(self, rows: int, after: str, topic: str | None, caller: Caller) -> Page:
        """List up to `rows` schedules whose names come after `after`, in order: all, or the schedules of `topic`.

        A page may have fewer schedules although another page follows. Raises Forbidden.
        """
        self._policy.allow_somewhere(caller, Verb.LOOK)
        listed, size_bytes = list[Shown](), 0
        rows = min(rows, SHOWN_PER_PAGE_MAX)
        for index, name in enumerate(
            list(islice(self._schedules.names_after(after), NAMES_PER_PAGE_MAX + 1))
        ):
            if len(listed) == rows or index == NAMES_PER_PAGE_MAX or size_bytes >= PAGE_BYTES_MAX:
                return Page(listed, after)
            after = name
            if (schedule := self._schedules.find(name)) is None:
                continue  # deleted meanwhile
            facts, progress = schedule
            # Also of schedules that the page does not show, because each is decoded.
            size_bytes += len(facts.body) + len(facts.rule)
            if topic in (None, facts.topic) and self._policy.allows(caller, Verb.LOOK, topic=facts.topic):
                listed.append(await self._show(name, facts, progress, caller))
        return Page(listed, None)

    async def preview(
        self, rule: Mapping[str, object], after_ms: int | None, number: int, caller: Caller
    ) -> list[Occurrence]:
        """Compute the next `number` times of a rule after `after_ms` (None: now), without storing the rule.

        Raises Forbidden, InvalidDelay and OutOfRange.
        """
        self._policy.allow_somewhere(caller, Verb.LOOK)
        if not 1 <= number <= limits.SCHEDULE_PREVIEW_MAX:
            raise OutOfRange(f"{number} occurrences: 1 to {limits.SCHEDULE_PREVIEW_MAX}")
        begin_ms = self._clock.now_ms() if after_ms is None else after_ms
        # In a thread, because a rule with few days a year searches far ahead.
        return await asyncio.to_thread(lambda: Rule.parse(rule).after(begin_ms, number))

    async def history(self, name: str, caller: Caller) -> list[Past]:
        """List the last HISTORY_ROWS times of a schedule's rule, the newest first, with the states of their messages.

        The messages may be in any topic at which the caller may look. Raises NotFound, Forbidden.
        """
        facts = self._find_visible(name, caller).facts
        past = list[Past]()
        # In a thread, because each step backwards asks the rule some tens of times.
        times = await asyncio.to_thread(
            last_times, facts.rule_text, FIRST_TIME_MS, self._clock.now_ms(), HISTORY_ROWS
        )
        # None, any topic: the topic of the schedule may have changed since, or a selection may have moved the message.
        # Messages in retry topics are found only if the topic is named.
        topic = facts.topic if is_on_its_way_back(facts.topic) else None
        for occurrence in times:
            # The id follows from the time, so the log needs no index of the occurrences of a schedule.
            message_id = occurrence_id(name, occurrence.due_ms)
            places = await self._find(message_id, topic, caller)
            past.append(Past(occurrence, message_id, [place for place in places if _may_be_of(name, place)]))
        return past

    # -- changes -------------------------------------------------------------------------------------------------

    async def put(self, name: str, facts: ScheduleFacts, caller: Caller) -> tuple[Shown, Outcome]:
        """Create or replace a schedule. With equal content nothing changes, so several programs may put it at once.

        A replaced schedule stays paused, and with an equal rule it keeps its next time, or stays ended. Durable on
        return. Raises InvalidName, InvalidMessage, InvalidDelay, OutOfRange, OverLimit, and the errors of a send.
        """
        self._policy.allow(caller, Verb.SEND, topic=facts.topic)
        # Repeat until no other request and no release has changed the schedule between the look-up and the decision.
        while True:
            existing = await self._find_durable(name)
            if existing is not None:
                if not self._policy.allows(caller, Verb.LOOK, topic=existing.facts.topic):
                    raise Forbidden(f"schedule {name!r} exists for another topic, which you may not see")
                self._policy.allow(caller, Verb.CANCEL, topic=existing.facts.topic)
                if existing.facts == facts and existing.progress.state != State.FAILED:
                    await self._log.writer.flushed()  # the first copy of the request may not be durable yet
                    return await self._show(name, *existing, caller), "unchanged"
            self._schedules.check_new(name, facts, None if existing is None else existing.facts)
            self._check_template(name, facts)
            now_ms = self._clock.now_ms()
            # An occurrence that a selection has cancelled, held or moved stays pending, and the new facts are for the
            # next one. With another rule, topic or keys it is replaced: its later rows are built from the facts.
            stays = (
                existing is not None
                and _keeps_occurrence(existing.facts, facts)
                and await self._find_selected(name, *existing)
            )
            if existing is not None and stays:
                next_state = Next(name, facts, existing.progress, is_put=True)
            else:
                next_state = await self._choose_first(name, facts, existing, now_ms)
            # Another request or a release may have changed the schedule meanwhile.
            if self._schedules.find(name) == existing:
                break
        # A new rule without a next time is probably a mistake. A rule that is put again may have ended meanwhile.
        has_ended = (
            existing is not None and existing.facts.rule == facts.rule and not next_state.progress.error
        )
        if next_state.occurrence is None and not (has_ended or stays):
            raise InvalidDelay(f"rule: {next_state.progress.error or NO_TIME_TEXT}")
        if existing is not None and existing.progress.state == State.PAUSED:
            paused = msgspec.structs.replace(next_state.progress, state=State.PAUSED)
            next_state = Next(name, facts, paused, is_put=True)
        # Last, because it may create the topic.
        self._policy.ensure_topics([facts.topic], caller)
        self._zones.use(zone_of_rule(facts.rule))
        await self._append(next_state, now_ms, None if stays else existing)
        # Another request may have changed or deleted it meanwhile.
        current = self._schedules.find(name) or Schedule(facts, next_state.progress)
        return await self._show(name, *current, caller), "created" if existing is None else "replaced"

    async def pause(self, name: str, caller: Caller) -> Shown:
        """Cancel the pending occurrence, and append no other until the schedule is resumed. Durable on return.

        A schedule that is not active stays as it is. Raises NotFound, Forbidden, OverLimit.
        """
        while True:
            facts, progress = await self._get_durable(name, caller, Verb.CANCEL)
            if progress.state != State.ACTIVE:
                break
            selected = await self._find_selected(name, facts, progress)
            # The occurrence itself is the first one that a resume may choose, unless a selection has cancelled it.
            after_ms = progress.due_ms - (selected is None or selected.state != "cancelled")
            if self._schedules.find(name) == (facts, progress):
                paused = Progress(
                    State.PAUSED, after_ms, runs=progress.runs, last_due_ms=progress.last_due_ms,
                    last_ms=progress.last_ms, last_queue=progress.last_queue, last_offset=progress.last_offset,
                )  # fmt: skip
                await self._append(Next(name, facts, paused), self._clock.now_ms(), Schedule(facts, progress))
                break
        return await self.get(name, caller)

    async def resume(self, name: str, caller: Caller) -> Shown:
        """Continue a paused or failed schedule. Its `catch_up` decides about the times that have passed meanwhile.

        Any other schedule stays as it is. Durable on return. Raises NotFound, Forbidden, OverLimit.
        """
        while True:
            facts, progress = await self._get_durable(name, caller, Verb.SEND)
            if progress.state not in (State.PAUSED, State.FAILED):
                break
            now_ms = self._clock.now_ms()
            await self._compute_in_thread(facts, progress.after_ms, now_ms)
            # Checked after the await: otherwise two resumes at the same time would append two occurrences.
            if self._schedules.find(name) == (facts, progress):
                self._policy.ensure_topics([facts.topic], caller)
                await self._append(following(name, facts, progress, progress.after_ms, now_ms), now_ms)
                break
        return await self.get(name, caller)

    async def delete(self, name: str, caller: Caller) -> None:
        """Delete a schedule, and cancel its pending occurrence. Durable on return.

        Raises NotFound, Forbidden, OverLimit.
        """
        facts, progress = await self._get_durable(name, caller, Verb.CANCEL)
        # The same frame as the CANCEL row: a deleted schedule must not leave its occurrence behind.
        change = self._schedules.build_change([Entry(name, None)])
        await self._append_rows(
            name,
            Continuation(lambda *_: (change.rows, change.apply)),
            self._clock.now_ms(),
            Schedule(facts, progress),
        )

    async def run(self, name: str, caller: Caller) -> str:
        """Send a message of the template now. The pending occurrence stays. Returns the id of the message.

        Durable on return. Raises NotFound, Forbidden, and the errors of a send.
        """
        facts = self._find_visible(name, caller).facts
        self._policy.allow(caller, Verb.SEND, topic=facts.topic)
        # The number of the next row, because several messages may be sent in one millisecond.
        message_id = f"{name}.run-{self._log.writer.next_seq}"
        properties = {**facts.properties, SCHEDULE: name, SCHEDULED_MS: str(self._clock.now_ms())}
        row = send_row(
            topic=facts.topic, body=facts.body, tag=facts.tag, keys=facts.keys, unique_key=message_id,
            properties=encode_properties(properties),
        )  # fmt: skip
        await self._appender.send([row], caller)[1]
        return message_id

    # -- inside --------------------------------------------------------------------------------------------------

    async def _choose_first(
        self, name: str, facts: ScheduleFacts, existing: Schedule | None, now_ms: int
    ) -> Next:
        """Choose the first occurrence of a schedule that is put. `existing`: the schedule that it replaces."""
        progress = None if existing is None else existing.progress
        if (
            existing is not None and existing.facts.topic != facts.topic
        ):  # the last position is of another topic
            progress = msgspec.structs.replace(existing.progress, last_queue=-1, last_offset=-1)
        # An equal rule continues, so that a change of the body neither skips nor repeats an occurrence.
        continues = existing is not None and existing.facts.rule == facts.rule
        after_ms = progress.after_ms if progress is not None and continues else now_ms
        while True:
            await self._compute_in_thread(facts, after_ms, now_ms)
            next_state = following(name, facts, progress, after_ms, now_ms, is_put=True)
            if continues or next_state.occurrence is None:
                return next_state
            # An earlier schedule with this name may have an occurrence of this time that was rescheduled. Then take the
            # next time, because both messages would have the same id.
            after_ms = next_state.occurrence.due_ms
            places = await self._find(occurrence_id(name, after_ms), facts.topic, ANONYMOUS)
            own_number = 0 if progress is None else progress.number
            if not any(place.state in ("waiting", "visible") and place.seq != own_number for place in places):
                return next_state

    async def _find_selected(
        self, name: str, facts: ScheduleFacts, progress: Progress
    ) -> MessagePlace | None:
        """Find the pending occurrence if a selection has cancelled, held, shifted or moved it. None otherwise."""
        if not progress.number or self._selections.selected.is_empty:
            return None
        for place in await self._find(occurrence_id(name, progress.due_ms), facts.topic, ANONYMOUS):
            is_unchanged = (place.state, place.due_ms, place.topic) == (
                "waiting",
                progress.due_ms,
                facts.topic,
            )
            # A held message is unchanged but has a reason.
            is_selected = place.state != "visible" and (not is_unchanged or bool(place.reason))
            if place.seq == progress.number and is_selected:
                return place
        return None

    async def _compute_in_thread(self, facts: ScheduleFacts, after_ms: int, now_ms: int) -> None:
        """Compute the next occurrence of a costly rule in a thread, so that the event loop finds it in the cache."""
        if is_costly(facts.rule_text):
            with suppress(Exception):  # the event loop computes it again, and raises the error
                await asyncio.to_thread(choose, facts, after_ms, now_ms)

    async def _show(self, name: str, facts: ScheduleFacts, progress: Progress, caller: Caller) -> Shown:
        """Build the description of a schedule for a caller."""
        next_local = ""
        if progress.number:
            rule, before_ms = facts.rule_text, progress.due_ms - 1
            with suppress(InvalidDelay):  # the time zone database no longer has its zone
                if is_costly(rule):
                    occurrence = await asyncio.to_thread(first_after, rule, before_ms)
                else:
                    occurrence = first_after(rule, before_ms)
                next_local = "" if occurrence is None else occurrence.local
        may_read = self._policy.allows(caller, Verb.RECEIVE, topic=facts.topic)
        return Shown(name, facts, progress, next_local, may_read)

    async def _find_durable(self, name: str) -> Schedule | None:
        """Find a schedule, and wait until its pending occurrence is durable. None if there is no schedule.

        So the scheduler knows the occurrence, and can cancel it.
        """
        # Found again after each wait, because the schedule may have changed meanwhile.
        while (schedule := self._schedules.find(name)) is not None:
            if schedule.progress.number < self._log.reader.next_seq:
                break
            await self._log.writer.flushed()
        return schedule

    async def _get_durable(self, name: str, caller: Caller, verb: Verb) -> Schedule:
        """Find a schedule as `_find_durable`, for a caller with the permission `verb`. Raises NotFound, Forbidden."""
        self._find_visible(name, caller)  # raises NotFound
        schedule = await self._find_durable(name)
        if schedule is None:
            raise NotFound(f"no schedule {name!r}")
        self._policy.allow(caller, verb, topic=schedule.facts.topic)
        return schedule

    def _check_template(self, name: str, facts: ScheduleFacts) -> None:
        """Raise InvalidMessage or OverLimit if a send would refuse an occurrence of this template."""
        # With the latest possible time, which gives the longest id and the longest properties.
        properties = occurrence_properties(name, facts, limits.INSTANT_MS_MAX, "9999-12-31T23:59:59+00:00")
        row = send_row(
            topic=facts.topic, body=facts.body, tag=facts.tag, keys=facts.keys,
            unique_key=occurrence_id(name, limits.INSTANT_MS_MAX), properties=properties,
        )  # fmt: skip
        self._appender.admit([row])

    async def _append(self, next_state: Next, now_ms: int, replaced: Schedule | None = None) -> None:
        """Append the next state of a schedule, and cancel the occurrence of the `replaced` state. Durable on return."""
        await self._append_rows(
            next_state.name, self._successors.continuation([next_state], now_ms), now_ms, replaced
        )

    async def _append_rows(
        self,
        name: str,
        continuation: Continuation,
        now_ms: int,
        replaced: Schedule | None,
    ) -> None:
        """Append the rows of `continuation`, and cancel the occurrence of the `replaced` state. Durable on return."""
        self._log.writer.check_admission()
        # No await until the append: the scheduler decides about the cancel now.
        parts = list[pa.RecordBatch]()
        if replaced is not None and replaced.progress.number:
            facts, progress = replaced
            was_pending = self._scheduler.cancel(np.array([progress.due_ms]), np.array([progress.number]))
            if was_pending[0]:
                parts.append(rows_of([build_cancel_row(name, facts, progress, now_ms)]))
                self._rates.add(Stat.CANCELLED_NUMS, facts.topic, 1)
        parts.append(continuation.rows(self._log.writer.next_seq + len(parts)))
        durable = self._appender.append(pa.concat_batches(parts)).durable
        continuation.apply()
        await durable


def _keeps_occurrence(existing: ScheduleFacts, facts: ScheduleFacts) -> bool:
    """Check whether a pending occurrence of `existing` may stay if the schedule gets new facts."""
    return (existing.rule, existing.topic, existing.keys) == (facts.rule, facts.topic, facts.keys)


def _may_be_of(name: str, place: MessagePlace) -> bool:
    """Check whether a message with the id of an occurrence may be of this schedule. Any client may send this id."""
    # The content is unknown if the message has ended, or the caller may not receive from its topic.
    return place.content is None or place.content.properties.get(SCHEDULE) == name
