"""The rows that continue schedules. The frame that ends an occurrence contains them.

    event             code          rows of the frame
    a release         Delivery      RELEASE rows, then these rows
    a cancel, a move  revoking/     CANCEL or MOVED rows, then these rows
    a command         admin/        CANCEL rows of replaced occurrences, then these rows

These rows are the successor of each occurrence (SCHEDULED) and the progress of its schedule (META). A frame is in the
log as a whole or not at all. So an active schedule has exactly one pending occurrence, also after a crash.

The next occurrence follows from the META values and the time, so each leader of a cluster appends the same rows. No
method appends or waits: a caller decides which messages end, appends the rows, and calls `Continuation.apply`, without
an await in between.

A schedule may skip an occurrence while a group has not finished the previous one. This is decided when it is due, from
the positions that the group has acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.recurring.kept_results import cached
from timeball.broker.recurring.rule import Occurrence, Rule
from timeball.broker.registry.schedules import (
    OCCURRENCE,
    SCHEDULE,
    SCHEDULED_MS,
    Entry,
    Many,
    Progress,
    ScheduleFacts,
    Schedules,
    State,
)
from timeball.log.row_encoder import build
from timeball.model import limits
from timeball.model.message import (
    CANCEL_REASON,
    PROPERTY_END,
    PROPERTY_NAME_END,
    Int64Array,
    Kind,
    LogRow,
    build_rows,
    cancel_row,
    encode_properties,
    scheduled_row,
)
from timeball.schedule.backlog import Backlog, Bools

logger = logging.getLogger(__name__)

# Reasons in the CANCEL row of an occurrence that is due, but not delivered.
MISSED, OVERLAP = "missed", "overlap"

COSTLY_CHARACTERS = 256  # a longer rule counts as costly
# Occurrences in a part (`Successors.parts`): a rule that was not evaluated before takes 0.1 ms or more.
OCCURRENCES_AT_ONCE = 16
FEW_ROWS = 64  # for more rows, columns cost less

_SCHEDULE = f"{SCHEDULE}{PROPERTY_NAME_END}"
_OCCURRENCE = f"{PROPERTY_END}{OCCURRENCE}{PROPERTY_NAME_END}"
_SCHEDULED_MS = f"{PROPERTY_END}{SCHEDULED_MS}{PROPERTY_NAME_END}"

# Checks whether a group has finished the message at a position: group, topic, queue, offset.
HasFinished = Callable[[str, str, int, int], bool]
# The queue and the offset of each message of a hand-out, if it is released.
Positions = tuple[Int64Array, Int64Array]

# ---- the next occurrence -------------------------------------------------------------------------------------


def is_costly(rule: str) -> bool:
    """Check whether a rule may take milliseconds to parse and to evaluate: many dates, or rare days of RFC 5545.

    Its next times are computed in a thread before they are needed.
    """
    return len(rule) > COSTLY_CHARACTERS or rule.startswith('{"rrule"')


# Schedules with equal rules are due at the same times, so most calls for them are answered from here.
@cached(long_results=limits.RULES_KEPT)
def first_after(rule: str, after_ms: int) -> Occurrence | None:
    """Find the first occurrence of a rule later than `after_ms`. None if there is none. Raises InvalidDelay."""
    return next(iter(Rule.from_text(rule).after(after_ms)), None)


def compute(rule: str, after_ms: int) -> None:
    """Fill the cache of `first_after` for `after_ms`. Raises nothing."""
    with suppress(Exception):  # the next call of `first_after` raises it again
        first_after(rule, after_ms)


def last_until(rule: str, after_ms: int, until_ms: int) -> Occurrence | None:
    """Find the last occurrence later than `after_ms` and not later than `until_ms`. None if there is none.

    Raises InvalidDelay.
    """
    # A rule can only be searched forwards. Go back from `until_ms` in growing steps until there is an occurrence, then
    # search for a later one by halving.
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
        later = first_after(rule, middle_ms)
        if later is not None and later.due_ms <= until_ms:
            last, low_ms = later, later.due_ms
        else:
            high_ms = middle_ms
    return last


def last_times(rule: str, after_ms: int, until_ms: int, number: int) -> list[Occurrence]:
    """Find the last occurrences in the range of `last_until`, at most `number`, newest first. Raises InvalidDelay."""
    occurrences = list[Occurrence]()
    while len(occurrences) < number and (last := last_until(rule, after_ms, until_ms)) is not None:
        occurrences.append(last)
        until_ms = last.due_ms - 1
    return occurrences


def choose(facts: ScheduleFacts, after_ms: int, now_ms: int) -> Occurrence | None:
    """Choose the next occurrence to deliver, later than `after_ms`. None if the rule has ended.

    It differs from the next occurrence of the rule if that was missed (due SCHEDULE_MISSED_MS ago or earlier). Then
    `facts.catch_up` decides: "all" delivers the missed occurrences within `catch_up_within_ms` one by one, "none"
    delivers none of them, and any other value delivers the last of them. Raises InvalidDelay.
    """
    rule = facts.rule_text
    first = first_after(rule, after_ms)
    # In whole seconds, so that schedules with equal rules share the cached results.
    missed_ms = (now_ms - limits.SCHEDULE_MISSED_MS) // limits.SECOND_MS * limits.SECOND_MS
    if first is None or first.due_ms > missed_ms:
        return first
    oldest_ms = missed_ms - facts.catch_up_within_ms  # older occurrences are not delivered
    if facts.catch_up == "all":
        return first if first.due_ms > oldest_ms else first_after(rule, oldest_ms)
    current = first_after(rule, missed_ms)
    # An occurrence that is due now replaces the missed occurrences.
    if facts.catch_up == "none" or (current is not None and current.due_ms <= now_ms):
        return current
    return last_until(rule, max(after_ms, oldest_ms), missed_ms) or current


# ---- the state of a schedule after the end of an occurrence --------------------------------------------------


class Next(NamedTuple):
    """The next state of a schedule, and the occurrence that will be pending."""

    name: str
    facts: ScheduleFacts
    progress: Progress  # without the number and the times of `occurrence`, which `_build` adds
    occurrence: Occurrence | None = None  # None: the schedule is not active any more
    is_put: bool = False  # the facts are new, and must be stored
    slot: int | None = None  # the slot of the schedule in memory, if it is known
    release_index: int = -1  # the index of its released occurrence in the hand-out, or -1


class Decision(NamedTuple):
    """The occurrence that follows another one, or the state of a schedule that has none any more."""

    occurrence: Occurrence | None
    state: State
    error: str = ""  # why the schedule has failed
    is_missed: bool = False  # the preceding occurrence, which is due, is not delivered


def decide(facts: ScheduleFacts, after_ms: int, now_ms: int) -> Decision:
    """Decide which occurrence of an active schedule follows `after_ms`.

    If the rule cannot be evaluated, or its next occurrence is too far ahead, the state is FAILED. Raises nothing.
    """
    try:
        occurrence = choose(facts, after_ms, now_ms)
        if occurrence is not None and occurrence.due_ms > now_ms + limits.DELAY_MS_MAX:
            raise ValueError("the next occurrence is more than ten years ahead")
    # A rule is a user's text, and its zone may be removed from the time zone database. An error must not keep other
    # messages from their release.
    except Exception as failure:
        return Decision(None, State.FAILED, str(failure)[:200] or repr(failure)[:200])
    return Decision(occurrence, State.ENDED if occurrence is None else State.ACTIVE)


def following(
    name: str,
    facts: ScheduleFacts,
    old_progress: Progress | None,
    after_ms: int,
    now_ms: int,
    *,
    is_put: bool = False,
) -> Next:
    """Build the state of an active schedule after `after_ms`, by `decide`. A failure is logged.

    `old_progress`: the progress so far, whose counts stay. None for a new schedule. `is_put`: `facts` are new.
    """
    decision = decide(facts, after_ms, now_ms)
    if decision.error and not is_put:  # a put is refused with this reason
        logger.error("schedule failed name=%s error=%s", name, decision.error)
    last = old_progress or Progress(State.ACTIVE, after_ms)
    # The number of the next occurrence is known when its row is appended.
    progress = msgspec.structs.replace(
        last, state=decision.state, after_ms=after_ms, number=0, due_ms=0, at_ms=0, error=decision.error
    )
    return Next(name, facts, progress, decision.occurrence, is_put)


def decide_hand_out(facts: ScheduleFacts, due_ms: int, now_ms: int) -> Decision:
    """Decide what follows the occurrence at `due_ms`, which is handed out now, and whether it was missed itself."""
    decision = decide(facts, due_ms, now_ms)
    # Nearly all occurrences are released within milliseconds, and their rule is not evaluated again.
    is_missed = now_ms - due_ms > limits.SCHEDULE_MISSED_MS and _is_replaced(facts, due_ms, now_ms)
    return decision._replace(is_missed=is_missed)


def _is_replaced(facts: ScheduleFacts, due_ms: int, now_ms: int) -> bool:
    """Check whether a schedule delivers a later occurrence, or none, in place of the missed one at `due_ms`."""
    try:
        # `choose` considers the missed occurrence, too, because it is later than this time.
        chosen = choose(facts, due_ms - 1, now_ms)
    except Exception:
        return False  # the rule has failed, so this is the last occurrence
    return chosen is None or chosen.due_ms != due_ms


def occurrence_id(name: str, due_ms: int) -> str:
    """Build the message id of an occurrence. The name of a schedule contains no dot."""
    return f"{name}.{due_ms}"


def occurrence_properties(name: str, facts: ScheduleFacts, due_ms: int, local: str) -> str:
    """Build the properties of an occurrence as the log stores them. `local`: as in `Occurrence`."""
    # One text, because many schedules may be due at once, and these values need no check.
    own = f"{_SCHEDULE}{name}{_OCCURRENCE}{local}{_SCHEDULED_MS}{due_ms}{PROPERTY_END}"
    return encode_properties(facts.properties) + own if facts.properties else own


def build_cancel_row(
    name: str, facts: ScheduleFacts, progress: Progress, now_ms: int, reason: str = ""
) -> LogRow:
    """Build the CANCEL row of the pending occurrence of a schedule, as values of LOG_SCHEMA."""
    return cancel_row(
        topic=facts.topic, source_seq=progress.number, due_seq=progress.number, due_ms=progress.due_ms,
        store_ms=now_ms, keys=facts.keys, unique_key=occurrence_id(name, progress.due_ms),
        properties=encode_properties({CANCEL_REASON: reason}) if reason else None, accepted_ms=progress.at_ms,
    )  # fmt: skip


class Continuation:
    """The rows that continue schedules, in the frame that ends occurrences."""

    def __init__(
        self,
        build: Callable[[int, Positions | None], tuple[pa.RecordBatch, Callable[[], None]]],
        cancelled: dict[int, str] | None = None,
        occurrences: int = 1,
    ) -> None:
        """Store how to build the rows.

        `build`: returns the result of `rows`, and a call that changes the schedules in memory. `cancelled`: the reasons
        of occurrences that are cancelled instead of released, by their index in the hand-out. `occurrences`: the number
        of schedules that continue.
        """
        self._build, self.cancelled, self.occurrences = build, cancelled or {}, occurrences
        self._apply: Callable[[], None] | None = None

    def rows(self, first_seq: int, positions: Positions | None = None) -> pa.RecordBatch:
        """Build the rows (LOG_SCHEMA). The first one will have the sequence number `first_seq`.

        `positions`: the queues and offsets of the messages of a hand-out. None for a request or a command.
        """
        rows, self._apply = self._build(first_seq, positions)
        return rows

    def apply(self) -> None:
        """Change the schedules in memory. Call it after the append of `rows`, which may be refused."""
        assert self._apply is not None, "the rows are built first"
        self._apply()


class _Plain(NamedTuple):
    """Schedules that release their pending occurrence and have a next one, without a special case (`_split_plain`)."""

    schedules: Many
    code: Int64Array  # for each schedule: the index of its next occurrence in `nexts`
    nexts: list[Occurrence]


_NO_OCCURRENCE = Occurrence(0, "")


def _compute_ahead(rule: str, due_ms: int) -> None:
    """Let a thread compute the occurrence after `due_ms`, if the rule is costly.

    `first_after` then finds it in its cache at the release.
    """
    if is_costly(rule):
        asyncio.get_running_loop().run_in_executor(None, compute, rule, due_ms)


class Successors:
    """Computes the successors of occurrences. Belongs to the event loop."""

    def __init__(
        self,
        schedules: Schedules,
        backlog: Backlog,
        host: str,
        has_finished: HasFinished,
    ) -> None:
        """`backlog` encodes scheduled messages for the log. `host`: the node, stored in the rows."""
        self._schedules, self._backlog, self._host = schedules, backlog, host
        self._has_finished = has_finished
        self.occurrences = schedules.occurrences  # the pending occurrences by number

    def has_any(self, numbers: Int64Array | Sequence[int]) -> bool:
        """Check whether any of these messages is the pending occurrence of a schedule."""
        return self.occurrences.has_any(numbers)

    def parts(self, numbers: Int64Array | Sequence[int]) -> list[slice]:
        """Divide messages into parts with at most OCCURRENCES_AT_ONCE occurrences of schedules.

        The caller lets other tasks run between two parts, because the rule of each occurrence must be evaluated.
        """
        starts = [0]
        if self.has_any(numbers):
            indexes = np.flatnonzero(self.occurrences.slots(np.asarray(numbers, np.int64)) >= 0)
            starts += indexes[OCCURRENCES_AT_ONCE::OCCURRENCES_AT_ONCE].tolist()
        return [slice(start, end) for start, end in pairwise([*starts, len(numbers)])]

    def after_release(
        self, numbers: Int64Array, now_ms: int, is_cancelled: Bools, is_expired: Bools
    ) -> Continuation:
        """Continue the schedules whose occurrences are among these messages, which are due and handed out.

        `is_cancelled` marks messages that the caller cancels, `is_expired` messages that it releases too late to count
        as runs. The caller must also cancel the messages in `cancelled` of the result, instead of releasing them.
        """
        # One call for all messages: a look-up for each would take as long as everything else.
        slots = self.occurrences.slots(numbers)
        indexes = np.flatnonzero(slots >= 0)
        plain = None
        if len(indexes) > FEW_ROWS:
            plain, indexes = self._split_plain(slots, indexes, now_ms, is_cancelled | is_expired)
        cancelled, nexts = dict[int, str](), list[Next]()
        decisions = dict[tuple[int, int], Decision]()  # of all schedules with equal rules, by plan and time
        schedules = zip(
            indexes.tolist(), slots[indexes].tolist(), self._schedules.at(slots[indexes]), strict=True
        )
        for index, slot, (name, facts, old_progress, plan) in schedules:
            due_ms = old_progress.due_ms
            # A cancel applies to one occurrence only, so the schedule goes on.
            if is_cancelled[index]:
                nexts.append(following(name, facts, old_progress, due_ms, now_ms))
                continue
            decision = decisions.get((plan, due_ms))
            if decision is None:
                decision = decisions[plan, due_ms] = decide_hand_out(facts, due_ms, now_ms)
            occurrence, state, error, is_missed = decision
            # An expired message is no run, so the next occurrence may still overlap with the last run.
            if is_expired[index] and not is_missed:
                nexts.append(following(name, facts, old_progress, due_ms, now_ms))
                continue
            if error:
                logger.error("schedule failed name=%s error=%s", name, error)
            # A missed occurrence is not checked for an overlap. The occurrence that replaces it is checked.
            if is_missed or self._overlaps(facts, old_progress):
                cancelled[index] = MISSED if is_missed else OVERLAP
                progress = Progress(
                    state, due_ms, runs=old_progress.runs, last_due_ms=old_progress.last_due_ms,
                    last_ms=old_progress.last_ms,
                    error=error, last_queue=old_progress.last_queue, last_offset=old_progress.last_offset,
                )  # fmt: skip
                nexts.append(Next(name, facts, progress, occurrence, slot=slot))
                continue
            progress = Progress(
                state, due_ms, runs=old_progress.runs + 1, last_due_ms=due_ms, last_ms=now_ms, error=error
            )
            nexts.append(Next(name, facts, progress, occurrence, slot=slot, release_index=index))
        if plain is None:
            return self.continuation(nexts, now_ms, cancelled)

        def build(first_seq: int, positions: Positions | None) -> tuple[pa.RecordBatch, Callable[[], None]]:
            """Build the rows of `nexts`, then the rows of `plain`."""
            if not nexts:
                return self._build_plain(plain, first_seq, now_ms)
            rows, apply = self._build(nexts, first_seq, positions, now_ms)
            plain_rows, apply_plain = self._build_plain(plain, first_seq + rows.num_rows, now_ms)

            def apply_all() -> None:
                apply()
                apply_plain()

            return pa.concat_batches([rows, plain_rows]), apply_all

        return Continuation(build, cancelled, len(nexts) + len(plain.schedules.slots))

    def _split_plain(
        self, slots: Int64Array, indexes: Int64Array, now_ms: int, is_ended: Bools
    ) -> tuple[_Plain | None, Int64Array]:
        """Select the schedules that can be continued as columns, as nearly all can.

        Returns them (None if there are none), and the indexes of the other occurrences.

        A schedule can if it has no group, its occurrence is released, and it has a next one. `slots` and
        `is_ended` (cancelled or expired) have a value for each message, `indexes` are the indexes of the occurrences.
        """
        schedules = self._schedules.many_at(slots[indexes])
        codes, codes_by_rule = list[int](), dict[tuple[int, int], int]()
        nexts, is_plain_rule = list[Occurrence](), list[bool]()
        # Decided once for all schedules with equal rules, by plan and time.
        for at, rule in enumerate(zip(schedules.plan, schedules.due_ms.tolist(), strict=True)):
            if (code_of_rule := codes_by_rule.get(rule)) is None:
                code_of_rule = codes_by_rule[rule] = len(nexts)
                plan, due_ms = rule
                facts = self._schedules.facts_of(plan, schedules.templates[at])
                decision = decide_hand_out(facts, due_ms, now_ms)
                is_plain_rule.append(not (facts.group or decision.is_missed or decision.occurrence is None))
                nexts.append(decision.occurrence or _NO_OCCURRENCE)
                if is_plain_rule[-1]:
                    _compute_ahead(facts.rule_text, nexts[-1].due_ms)
            codes.append(code_of_rule)
        code = np.array(codes, np.int64)
        is_plain = np.array(is_plain_rule)[code] & ~is_ended[indexes]
        is_plain &= ~self._schedules.has_rest(schedules.slots)
        if not is_plain.any():
            return None, indexes
        if is_plain.all():
            return _Plain(schedules, code, nexts), indexes[:0]
        chosen = np.flatnonzero(is_plain)
        return _Plain(schedules.at(chosen), code[chosen], nexts), indexes[~is_plain]

    def _build_plain(
        self, plain: _Plain, first_seq: int, now_ms: int
    ) -> tuple[pa.RecordBatch, Callable[[], None]]:
        """Build the same rows as `_build`, as columns.

        Returns them, and the call that changes the schedules in memory.
        """
        schedules, names = plain.schedules, pa.array(plain.schedules.names)
        due_ms = np.array([each.due_ms for each in plain.nexts])[plain.code]
        local = pa.array([each.local for each in plain.nexts]).take(pa.array(plain.code))
        due_text, templates = pc.cast(pa.array(due_ms), pa.string()), schedules.templates
        # As in `occurrence_properties`.
        begin = [
            encode_properties(each.properties) + _SCHEDULE if each.properties else _SCHEDULE
            for each in templates
        ]
        properties = pc.binary_join_element_wise(
            pa.array(begin), names, _OCCURRENCE, local, _SCHEDULED_MS, due_text, PROPERTY_END, ""
        )
        scheduled_rows = build_rows(
            len(templates), kind=int(Kind.SCHEDULED), topic=[each.topic for each in templates],
            tag=[each.tag for each in templates], keys=[each.keys for each in templates],
            unique_key=pc.binary_join_element_wise(names, due_text, "."), body=[each.body for each in templates],
            properties=properties, due_ms=due_ms, **self._shared(now_ms),
        )  # fmt: skip
        progress_rows, apply = self._schedules.released(schedules, due_ms, first_seq, now_ms)
        return pa.concat_batches([self._backlog.encode_for_log(scheduled_rows, now_ms), progress_rows]), apply

    def after_end(self, numbers: Sequence[int], now_ms: int) -> Continuation | None:
        """Continue the schedules whose pending occurrences are among these messages, which a request cancels or moves.

        None if none of them is an occurrence.
        """
        slots = self.occurrences.slots(np.array(numbers, np.int64))
        nexts = [
            following(name, facts, old_progress, old_progress.due_ms, now_ms)
            for name, facts, old_progress, _ in self._schedules.at(slots[slots >= 0])
        ]
        return self.continuation(nexts, now_ms) if nexts else None

    def continuation(
        self, nexts: Sequence[Next], now_ms: int, cancelled: dict[int, str] | None = None
    ) -> Continuation:
        """Prepare the rows for the next states of schedules. `cancelled`: as in `Continuation`."""
        return Continuation(
            lambda first_seq, positions: self._build(nexts, first_seq, positions, now_ms),
            cancelled,
            len(nexts),
        )

    def _overlaps(self, facts: ScheduleFacts, old_progress: Progress) -> bool:
        """Check whether the group of a schedule has not finished its previous occurrence. False without a group."""
        # The first run of a schedule overlaps with nothing.
        if not facts.group or old_progress.last_queue < 0:
            return False
        return not self._has_finished(
            facts.group, facts.topic, old_progress.last_queue, old_progress.last_offset
        )

    def _build(
        self, nexts: Sequence[Next], first_seq: int, positions: Positions | None, now_ms: int
    ) -> tuple[pa.RecordBatch, Callable[[], None]]:
        """Build the SCHEDULED rows of the next occurrences, then the META rows of their schedules.

        Returns the rows (LOG_SCHEMA), and the call that changes the schedules in memory.
        """
        scheduled, entries, last = list[tuple[str, ScheduleFacts, Occurrence]](), list[Entry](), None
        for name, facts, progress, occurrence, is_put, slot, release_index in nexts:
            # The SCHEDULED rows come first, so their numbers follow from their order.
            if occurrence is not None:
                progress = msgspec.structs.replace(
                    progress, number=first_seq + len(scheduled), due_ms=occurrence.due_ms, at_ms=now_ms
                )
                scheduled.append((name, facts, occurrence))
                # `first_after` keeps the result for the next release. Schedules with equal rules share one occurrence
                # object, so one computation is enough for neighbours.
                if occurrence is not last:
                    _compute_ahead(facts.rule_text, occurrence.due_ms)
                last = occurrence
            # The position is stored only for a schedule with a group, because it makes the META row longer.
            if facts.group and release_index >= 0 and positions is not None:
                queues, offsets = positions
                progress = msgspec.structs.replace(
                    progress, last_queue=int(queues[release_index]), last_offset=int(offsets[release_index])
                )
            entries.append(Entry(name, progress, facts if is_put else None, slot))
        change = self._schedules.build_change(entries)
        if not scheduled:
            return change.rows, change.apply
        # No check of the backlog's capacity, because a schedule must not end when a slot of the wheel is full.
        scheduled_rows = self._backlog.encode_for_log(self._scheduled_rows(scheduled, now_ms), now_ms)
        return pa.concat_batches([scheduled_rows, change.rows]), change.apply

    def _shared(self, now_ms: int) -> dict[str, Any]:
        """Build the values that all occurrences share, by column."""
        return {
            "queue_id": -1, "born_ms": now_ms, "born_host": self._host, "store_ms": now_ms, "store_host": self._host,
            "flag": 0, "sys_flag": 0, "reconsume_times": 0,
        }  # fmt: skip

    def _scheduled_rows(
        self, scheduled: Sequence[tuple[str, ScheduleFacts, Occurrence]], now_ms: int
    ) -> pa.RecordBatch:
        """Build the SCHEDULED rows (LOG_SCHEMA) of occurrences.

        `scheduled`: schedule, facts and occurrence of each row.
        """
        columns = {
            "topic": [facts.topic for _, facts, _ in scheduled],
            "tag": [facts.tag for _, facts, _ in scheduled],
            "keys": [facts.keys for _, facts, _ in scheduled],
            "unique_key": [occurrence_id(name, occurrence.due_ms) for name, _, occurrence in scheduled],
            "body": [facts.body for _, facts, _ in scheduled],
            "properties": [
                occurrence_properties(name, facts, occurrence.due_ms, occurrence.local)
                for name, facts, occurrence in scheduled
            ],
            "due_ms": [occurrence.due_ms for _, _, occurrence in scheduled],
        }
        shared = self._shared(now_ms)
        if len(scheduled) > FEW_ROWS:
            return build_rows(len(scheduled), kind=int(Kind.SCHEDULED), **columns, **shared)
        # As columns, one row would take as long as sixty.
        rows: list[LogRow] = [
            scheduled_row(**dict(zip(columns, values, strict=True)), **shared)
            for values in zip(*columns.values(), strict=True)
        ]
        return build(rows).batch
