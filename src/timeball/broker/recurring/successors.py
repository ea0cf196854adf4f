"""The rows that continue schedules. The frame that ends an occurrence contains them.

    a release         Delivery      RELEASE rows, then these rows
    a cancel, a move  revoking/     CANCEL or MOVED rows, then these rows
    a command         admin/        CANCEL rows of replaced occurrences, then these rows

These rows are the successor of each occurrence (SCHEDULED) and the progress of its schedule (META). A frame is in the
log as a whole or not at all. So an active schedule has exactly one pending occurrence, also after a crash.

Everything here follows from the META values and the time, so each leader of a cluster appends the same rows. No method
appends or waits: callers decide, append and call `keep` without an await in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pyarrow as pa

from timeball.broker.recurring.kept_results import kept
from timeball.broker.recurring.rule import Occurrence, Rule
from timeball.broker.registry.meta import Change
from timeball.broker.registry.schedules import (
    OCCURRENCE,
    SCHEDULE,
    SCHEDULED_MS,
    Entry,
    Progress,
    ScheduleFacts,
    Schedules,
    State,
)
from timeball.log.row_encoder import build
from timeball.model import limits
from timeball.model.message import (
    CANCEL_REASON,
    Int64Array,
    LogRow,
    cancel_row,
    encode_properties,
    scheduled_row,
)
from timeball.schedule.backlog import Backlog, Bools

logger = logging.getLogger(__name__)

MISSED = "missed"  # the reason in the CANCEL row of an occurrence that is not delivered
_NONE_MISSED = np.empty(0, np.bool_)

# ---- which occurrence is next --------------------------------------------------------------------------------


# Schedules with equal rules are due at the same times, so most calls for them are answered from here.
@kept
def first_after(rule: str, after_ms: int) -> Occurrence | None:
    """Find the first occurrence of a rule later than `after_ms`. None if there is none. Raises InvalidDelay."""
    return next(iter(Rule.from_text(rule).after(after_ms)), None)


def last_until(rule: str, after_ms: int, until_ms: int) -> Occurrence | None:
    """Find the last occurrence later than `after_ms` and not later than `until_ms`. None if there is none."""
    # A rule can only be asked forwards. Find a time shortly before the last occurrence in steps that grow, then halve
    # the rest.
    width_ms = limits.SECOND_MS
    while True:
        low_ms = max(after_ms, until_ms - width_ms)
        last = first_after(rule, low_ms)
        if last is not None and last.due_ms <= until_ms:
            break
        if low_ms == after_ms:
            return None
        width_ms *= 4
    low_ms, high_ms = last.due_ms, until_ms
    while low_ms < high_ms:
        middle_ms = (low_ms + high_ms) // 2
        found = first_after(rule, middle_ms)
        if found is not None and found.due_ms <= until_ms:
            last, low_ms = found, found.due_ms
        else:
            high_ms = middle_ms
    return last


def last_times(rule: str, after_ms: int, until_ms: int, number: int) -> list[Occurrence]:
    """Find the last occurrences later than `after_ms` and not later than `until_ms`, the newest first."""
    found = list[Occurrence]()
    while len(found) < number and (occurrence := last_until(rule, after_ms, until_ms)) is not None:
        found.append(occurrence)
        until_ms = occurrence.due_ms - 1
    return found


def choose(facts: ScheduleFacts, after_ms: int, now_ms: int) -> Occurrence | None:
    """Choose the next occurrence to deliver, later than `after_ms`. None if the rule has ended.

    It differs from the next one of the rule if that was missed. Then the catch-up of the schedule decides. Raises
    InvalidDelay.
    """
    rule = facts.rule_text
    first = first_after(rule, after_ms)
    # In whole seconds, so that schedules with equal rules share the cached results.
    missed_ms = (now_ms - limits.SCHEDULE_MISSED_MS) // limits.SECOND_MS * limits.SECOND_MS
    if first is None or first.due_ms > missed_ms:
        return first
    oldest_ms = missed_ms - facts.catch_up_within_ms  # older ones are not delivered
    if facts.catch_up == "all":
        return first if first.due_ms > oldest_ms else first_after(rule, oldest_ms)
    current = first_after(rule, missed_ms)
    # An occurrence that is due now replaces the missed ones.
    if facts.catch_up == "none" or (current is not None and current.due_ms <= now_ms):
        return current
    return last_until(rule, max(after_ms, oldest_ms), missed_ms) or current


# ---- what follows the end of an occurrence -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Next:
    """The next state of a schedule, and the occurrence that will be pending.

    `progress` still lacks the number of that occurrence. `is_put`: the facts are new, too.
    """

    name: str
    facts: ScheduleFacts
    before: Progress | None
    progress: Progress
    occurrence: Occurrence | None = None
    is_put: bool = False


def following(
    name: str,
    facts: ScheduleFacts,
    before: Progress | None,
    after_ms: int,
    now_ms: int,
    *,
    is_put: bool = False,
) -> Next:
    """Compute what follows `after_ms` in an active schedule. If its rule cannot be evaluated, it has failed."""
    occurrence, state, error = None, State.ENDED, ""
    try:
        occurrence = choose(facts, after_ms, now_ms)
        if occurrence is not None and occurrence.due_ms > now_ms + limits.DELAY_MS_MAX:
            raise ValueError("the next occurrence is more than ten years ahead")
    # A rule is a user's text, and its zone may leave the time zone database. All other messages must be released.
    except Exception as failure:
        if not is_put:  # a put is refused with this reason
            logger.exception("schedule failed name=%s", name)
        occurrence, state, error = None, State.FAILED, str(failure)[:200]
    last = before or Progress(State.ACTIVE, after_ms)
    # The number of the next occurrence is known when its row is appended.
    progress = msgspec.structs.replace(
        last, state=state if occurrence is None else State.ACTIVE, after_ms=after_ms, number=0, due_ms=0, at_ms=0,
        error=error,
    )  # fmt: skip
    return Next(name, facts, before, progress, occurrence, is_put)


def after_hand_out(name: str, facts: ScheduleFacts, before: Progress, now_ms: int) -> tuple[Next, bool]:
    """Compute what follows the pending occurrence of a schedule, which is due. The flag says that it was missed."""
    due_ms = before.due_ms
    after = following(name, facts, before, due_ms, now_ms)
    # Nearly all occurrences are released within milliseconds, and then the rule is not asked again.
    if now_ms - due_ms > limits.SCHEDULE_MISSED_MS and _is_replaced(facts, due_ms, now_ms):
        return after, True
    progress = msgspec.structs.replace(
        after.progress, runs=before.runs + 1, last_due_ms=due_ms, last_ms=now_ms
    )
    return replace(after, progress=progress), False


def _is_replaced(facts: ScheduleFacts, due_ms: int, now_ms: int) -> bool:
    """Check whether a missed occurrence is not delivered: its schedule delivers a later one, or none."""
    try:
        # The occurrence itself is later than this time, so it is chosen unless another one takes its place.
        chosen = choose(facts, due_ms - 1, now_ms)
    except Exception:
        return False  # the schedule has failed, and this is its last occurrence
    return chosen is None or chosen.due_ms != due_ms


def occurrence_id(name: str, due_ms: int) -> str:
    """Build the message id of an occurrence. The name of a schedule contains no dot."""
    return f"{name}.{due_ms}"


def occurrence_properties(name: str, facts: ScheduleFacts, due_ms: int, local: str) -> str:
    """Build the properties of an occurrence as the log stores them."""
    return encode_properties(
        {**facts.properties, SCHEDULE: name, OCCURRENCE: local, SCHEDULED_MS: str(due_ms)}
    )


def cancel_row_of(
    name: str, facts: ScheduleFacts, progress: Progress, now_ms: int, reason: str = ""
) -> LogRow:
    """Build the CANCEL row of the pending occurrence of a schedule, as values of LOG_SCHEMA."""
    return cancel_row(
        topic=facts.topic, source_seq=progress.number, due_seq=progress.number, due_ms=progress.due_ms,
        store_ms=now_ms, keys=facts.keys, unique_key=occurrence_id(name, progress.due_ms),
        properties=encode_properties({CANCEL_REASON: reason}) if reason else None, accepted_ms=progress.at_ms,
    )  # fmt: skip


class Continuation:
    """The rows that a frame contains beside those that end occurrences.

    `missed` is a mask of the handed-out messages that are cancelled in place of their release.
    """

    def __init__(
        self,
        build: Callable[[int], tuple[pa.RecordBatch, Change]],
        missed: Bools = _NONE_MISSED,
    ) -> None:
        self._build, self.missed = build, missed
        self._change: Change | None = None

    def rows(self, first_seq: int) -> pa.RecordBatch:
        """Build the rows (LOG_SCHEMA), of which the first one gets the number `first_seq`."""
        rows, self._change = self._build(first_seq)
        return rows

    def keep(self) -> None:
        """Change the schedules in memory. Call it after the append of `rows`, which may be refused."""
        assert self._change is not None, "the rows are built first"
        self._change.keep()


class Successors:
    """Computes the successors of occurrences. Belongs to the event loop."""

    def __init__(self, schedules: Schedules, backlog: Backlog, host: str) -> None:
        self._schedules, self._backlog, self._host = schedules, backlog, host
        self.occurrences = schedules.occurrences  # number of each pending occurrence -> name of its schedule

    def has_any(self, numbers: Sequence[int]) -> bool:
        """Check whether any of these messages is the pending occurrence of a schedule."""
        return not self.occurrences.keys().isdisjoint(numbers)

    def after_release(
        self, numbers: Int64Array, now_ms: int, is_cancelled: Bools, is_expired: Bools
    ) -> Continuation:
        """Continue the schedules of those of these messages that are occurrences. The messages are due and handed out.

        `is_cancelled` marks those that the caller cancels, `is_expired` those that are no runs of their schedules.
        Cancel also those in `missed` instead of releasing them.
        """
        missed, nexts = np.zeros(len(numbers), np.bool_), list[Next]()
        for index, number in enumerate(numbers.tolist() if self.occurrences else ()):
            if (name := self.occurrences.get(number)) is None:
                continue
            facts, before = self._schedules.get(name)
            if is_cancelled[index]:
                nexts.append(following(name, facts, before, before.due_ms, now_ms))
                continue
            after, missed[index] = after_hand_out(name, facts, before, now_ms)
            if is_expired[index]:
                after = following(name, facts, before, before.due_ms, now_ms)
            nexts.append(after)
        return self.continuation(nexts, now_ms, missed)

    def after_end(self, numbers: Sequence[int], now_ms: int) -> Continuation | None:
        """Continue the schedules whose pending occurrences are among these messages, which a request ends or moves.

        None if none of them is an occurrence.
        """
        nexts = []
        for name in [self.occurrences[number] for number in numbers if number in self.occurrences]:
            facts, before = self._schedules.get(name)
            nexts.append(following(name, facts, before, before.due_ms, now_ms))
        return self.continuation(nexts, now_ms) if nexts else None

    def continuation(self, nexts: Sequence[Next], now_ms: int, missed: Bools = _NONE_MISSED) -> Continuation:
        """Prepare the rows for the next states of some schedules."""
        return Continuation(lambda first_seq: self._build(nexts, first_seq, now_ms), missed)

    def _build(self, nexts: Sequence[Next], first_seq: int, now_ms: int) -> tuple[pa.RecordBatch, Change]:
        """Build the SCHEDULED rows of the next occurrences and the META rows of their schedules."""
        rows, entries = list[LogRow](), list[Entry]()
        for after in nexts:
            progress, occurrence = after.progress, after.occurrence
            # The SCHEDULED rows come first, so their numbers follow from their order.
            if occurrence is not None:
                progress = msgspec.structs.replace(
                    progress, number=first_seq + len(rows), due_ms=occurrence.due_ms, at_ms=now_ms
                )
                rows.append(self._scheduled_row(after.name, after.facts, occurrence, now_ms))
            entries.append(Entry(after.name, after.before, progress, after.facts if after.is_put else None))
        change = self._schedules.changed(entries)
        if not rows:
            return change.rows, change
        # No check of the backlog's capacity, because a schedule must not end when a slot of the wheel is full.
        scheduled_rows = self._backlog.encode_for_log(build(rows).batch, now_ms)
        return pa.concat_batches([scheduled_rows, change.rows]), change

    def _scheduled_row(self, name: str, facts: ScheduleFacts, occurrence: Occurrence, now_ms: int) -> LogRow:
        return scheduled_row(
            topic=facts.topic, queue_id=-1, tag=facts.tag, keys=facts.keys,
            unique_key=occurrence_id(name, occurrence.due_ms), body=facts.body,
            properties=occurrence_properties(name, facts, occurrence.due_ms, occurrence.local), born_ms=now_ms,
            born_host=self._host, store_ms=now_ms, store_host=self._host, flag=0, sys_flag=0, reconsume_times=0,
            due_ms=occurrence.due_ms,
        )  # fmt: skip
