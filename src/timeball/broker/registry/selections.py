"""Selections: bulk operations on all pending messages that meet a condition. Each is one META row.

    selection/<id>    SelectionFacts

No row names the messages of a selection. Whoever reads pending messages evaluates the condition (`Selected`), so a
selection of ten million messages is as small as one of ten, and every reader sees it at once.

The meaning is a fold over the events "accept S" and "undo S", in the order of the log, for each message:

    accept S    a message that is pending, is not cancelled by a selection, and meets the condition of S with its
                present due time and topic, belongs to S. S then changes its due time, topic, hold or end (`_apply`)
    undo S      the message no longer belongs to S. The other selections to which it belongs apply in their order

So a message has a *base*, the due time and the version that its sender gave it, and a *state*, the result of the fold.
A message belongs to a selection only if its base version is older than the selection. So later messages are not
covered, and a reschedule by id ends the effect of earlier selections. Numbers that were reserved for a bulk attach when
the selection was accepted are excluded, because their messages came later (`absent`). Redeliveries to a consumer group
are never covered.

The schedule does not know selections. When a message is due in the schedule, the delivery evaluates its state: it is
released, it gets a CANCEL row, or it gets a *wake-up*: a MOVED row with the time at which the state is evaluated next
(accepting/delivery.py). For a message whose state makes it due earlier than the schedule knows, `Wakers` of the package
pending write a wake-up. A wake-up is a new version for the schedule, but the message keeps its base (`Woken`), so a
wake-up never changes a state.

The resume of a campaign changes due times under the same version. Before it, the campaign's messages with a cancel get
CANCEL rows, and other selections stop covering them (admin/campaign_changes.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.filters.compiler import SQL92, compile_filter
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.model import limits
from timeball.model.errors import NotFound, OverLimit
from timeball.model.http_api import Action
from timeball.model.message import (
    CANCEL_REASON,
    CANCELLED_BY,
    DLQ_PREFIX,
    PROPERTY_END,
    PROPERTY_NAME_END,
    RETRY_PREFIX,
    Int64Array,
    encode_properties,
)
from timeball.table.attachment import within

Bools = npt.NDArray[np.bool_]
Ranges = list[tuple[int, int]]

# Names in a condition that stand for other values than properties. Every filter also knows `TAGS`, `KEYS`, `UNIQ_KEY`.
OWN_NAMES = ("due_ms", "topic", "keys", "tag", "campaign")
# The columns of a message that a condition may read, beside due time, number and topic.
CONDITION_COLUMNS = ["keys", "tag", "unique_key", "properties"]
FIRST_MS, LAST_MS = -(1 << 62), 1 << 62


class SelectionFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a selection's META row. Times in ms since 1970."""

    action: Action = "cancel"
    shift_ms: int = 0  # shift: the due time is so much later. Negative: earlier, and not before `at_ms`
    to_topic: str = ""  # move: the topic of the release
    seq: int  # of this row, when the selection was accepted. It covers older versions only
    at_ms: int  # when it was accepted
    by: str = ""  # the account that requested it
    where: str = ""  # an SQL-92 condition; empty: every message
    topics: list[str] = []  # empty: every topic
    from_ms: int = FIRST_MS  # messages due in [from_ms, to_ms)
    to_ms: int = LAST_MS
    # Ranges (first_seq, rows) of numbers that it does not cover: those that were reserved for a bulk attach when it was
    # accepted, and, unless it cancels, those of campaigns that were paused then or resumed since.
    absent: Ranges = []
    campaigns: dict[str, Ranges] = {}  # the ranges of all campaigns, if the condition asks for `campaign`
    # The covered messages, None until they are counted, and their due times before. `last_due_ms` is -1 for none.
    count: int | None = None
    first_due_ms: int = -1
    last_due_ms: int = -1
    until_ms: int = -1  # a cancel: its messages are settled when the schedule is beyond it and `last_due_ms`
    is_settled: bool = False  # all messages are settled
    undone_seq: int = 0  # of the row that has undone it, or 0
    undone_ms: int = 0

    @property
    def is_undone(self) -> bool:
        """True if the selection was undone."""
        return self.undone_seq > 0

    def is_over(self, settled_before_ms: int) -> bool:
        """Check whether all covered messages are settled. All messages due before `settled_before_ms` are."""
        is_counted_cancel = self.action == "cancel" and self.count is not None
        return self.is_settled or (
            is_counted_cancel and max(self.last_due_ms, self.until_ms) < settled_before_ms
        )

    def reason_properties(self, name: str) -> str:
        """Build the properties of the CANCEL rows of its messages."""
        properties = {CANCEL_REASON: reason_of(name)}
        return encode_properties(properties | {CANCELLED_BY: self.by} if self.by else properties)


def reason_of(name: str) -> str:
    """Build the reason that a cancelled message shows."""
    return f"selection {name}"


class Described(NamedTuple):
    """Messages as a condition sees them, as parallel columns."""

    due_ms: Int64Array  # not shifted by a step of the clock
    seq: Int64Array  # the version
    number: Int64Array  # of the message
    topic: pa.Array  # string, the real topic of messages in a delay level
    rows: pa.RecordBatch | None  # CONDITION_COLUMNS. None if no condition reads them


# ---- one selection, compiled ---------------------------------------------------------------------------------


class _Condition:
    """The condition of a selection. Immutable, any thread."""

    def __init__(self, facts: SelectionFacts) -> None:
        self.facts = facts
        self._filter = compile_filter(facts.where, SQL92) if facts.where else None
        # A superset: such a text may also be a part of another name or of a string.
        self._names = [name for name in OWN_NAMES if name in facts.where]
        self._topics = pa.array(facts.topics, pa.string())

    @property
    def reads_rows(self) -> bool:
        """True if the condition needs more than due time, number and topic."""
        return self._filter is not None

    def bounds(self, due_ms: Int64Array | None, seq: Int64Array) -> Bools:
        """Compute a mask of the messages within the bounds of due time and version. `due_ms` None: of version alone."""
        # Arrays only: this runs for each row group, and most messages are outside.
        facts = self.facts
        inside = seq < facts.seq
        if due_ms is not None:
            inside &= (due_ms >= facts.from_ms) & (due_ms < facts.to_ms)
        if facts.absent and inside.any():
            inside &= ~within(seq, facts.absent)
        return np.asarray(inside)

    def has_effect(self, states: States) -> Bools:
        """Compute a mask of the messages that the selection changes: a hold is neither repeated nor ended twice."""
        if self.facts.action in ("pause", "resume"):
            return np.asarray((states.holder < 0) == (self.facts.action == "pause"))
        return np.ones(len(states.owner), np.bool_)

    def matches(self, messages: Described) -> Bools:
        """Compute a mask of the messages, all within the bounds, that meet the condition."""
        mask = np.ones(len(messages.seq), np.bool_)
        if self.facts.to_topic:
            mask = np.asarray(pc.not_equal(messages.topic, self.facts.to_topic))
        # First, because it costs less than the condition.
        if len(self._topics):
            mask = mask & np.asarray(pc.is_in(messages.topic, value_set=self._topics))
        if self._filter is None or not mask.any():
            return mask
        return mask & np.asarray(self._filter.exact(self._as_properties(messages)))

    def _as_properties(self, messages: Described) -> pa.RecordBatch:
        """Build rows for the filter, which reads properties only: add the values of OWN_NAMES as properties."""
        rows = messages.rows
        assert rows is not None
        values = {
            "due_ms": lambda: pc.cast(pa.array(messages.due_ms), pa.string()),
            "topic": lambda: messages.topic,
            "keys": lambda: _text(rows.column("keys")),
            "tag": lambda: _text(rows.column("tag")),
            "campaign": lambda: _campaigns_of(messages.number, self.facts.campaigns),
        }
        return with_names(rows, {name: values[name] for name in self._names})


def with_names(rows: pa.RecordBatch, values: Mapping[str, Callable[[], pa.Array]]) -> pa.RecordBatch:
    """Build CONDITION_COLUMNS for a filter from rows with these columns, and add values as further properties.

    `values`: for each name of a property a function that builds its column (string, null: no property).
    """
    columns = {name: _text(rows.column(name)) for name in CONDITION_COLUMNS}
    parts = [pc.fill_null(columns["properties"], "")]
    for name, value in values.items():
        # The last of equal names counts, so these come after the properties of the message.
        entry = pc.binary_join_element_wise(name, value(), PROPERTY_NAME_END)
        parts.append(pc.fill_null(entry, ""))
    if len(parts) > 1:
        columns["properties"] = pc.binary_join_element_wise(*parts, PROPERTY_END)
    return pa.RecordBatch.from_pydict(columns)


def _text(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Convert a column of text, also a dictionary or one in chunks, to an array of strings."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return column if column.type == pa.string() else column.cast(pa.string())


def _campaigns_of(number: Int64Array, campaigns: Mapping[str, Ranges]) -> pa.Array:
    """Find the campaign of each message by its number. Null for messages of none."""
    entries = sorted(
        (first_seq, first_seq + rows, name)
        for name, ranges in campaigns.items()
        for first_seq, rows in ranges
    )
    if not entries:
        return pa.nulls(len(number), pa.string())
    first_seqs, end_seqs, names = zip(*entries, strict=True)
    # The ranges are disjoint, so only the last one that begins at or before a number can contain it.
    index = np.searchsorted(np.array(first_seqs, np.int64), number, side="right") - 1
    is_outside = (index < 0) | (number >= np.array(end_seqs, np.int64)[index])
    return pa.array(names).take(pa.array(index, mask=is_outside))


# ---- all selections ------------------------------------------------------------------------------------------


class States(NamedTuple):
    """The states of pending messages, as parallel columns. A selection is an index of `Selected.names`, -1 for none."""

    owner: Int64Array  # the selection that has cancelled the message
    holder: Int64Array  # the selection that holds the message: it is not released
    mover: Int64Array  # the selection that has moved the message to another topic
    due_ms: Int64Array
    is_changed: Bools  # the message belongs to a selection that is not undone

    def part(self, index: Int64Array | Bools | slice) -> States:
        """Select some of the messages."""
        return States(
            self.owner[index],
            self.holder[index],
            self.mover[index],
            self.due_ms[index],
            self.is_changed[index],
        )

    def among(self, due_ms: Int64Array, index: Int64Array) -> States:
        """Build the states of all messages due at `due_ms`: these states at the positions `index`, others unchanged."""
        states = _unchanged(due_ms)
        for column, part in zip(states, self, strict=True):
            column[index] = part
        return states


class Covered(NamedTuple):
    """The messages of one selection among others, as parallel columns."""

    is_member: Bools
    before: States  # when the selection was accepted
    after: States  # immediately after its acceptance


# Wake-ups in a run, 2 MB. The event loop copies a run in a few milliseconds.
WOKEN_ROWS_MAX = 65_536


class _WokenRun(NamedTuple):
    """Wake-ups by version. Those of the next run have later versions."""

    # Columns: version (ascending), due_ms and version of the base, due_ms of the wake-up. The rest is free space.
    rows: Int64Array
    used_rows: int
    first: int  # the versions are in [first, last]
    last: int
    first_ms: int  # the wake-ups are due in [first_ms, last_ms]
    last_ms: int
    half_ms: int | None  # half of them are due at this time or before, None: not computed yet
    earlier_ms: int  # how much earlier than its base one of them may be

    @classmethod
    def of(cls, rows: Int64Array, used_rows: int) -> _WokenRun:
        """Build a run of the first `used_rows` rows (at least one) of an array of four columns."""
        version, base_ms, _, due_ms = rows[:, :used_rows]
        return cls(
            rows, used_rows, int(version[0]), int(version[-1]), int(due_ms.min()), int(due_ms.max()), half_ms=None,
            earlier_ms=int((base_ms - due_ms).max(initial=0)),
        )  # fmt: skip

    @property
    def columns(self) -> Int64Array:
        """The four columns of the wake-ups, without the free space."""
        return self.rows[:, : self.used_rows]

    def added(self, columns: Int64Array) -> _WokenRun:
        """Build a run with further rows, in the free space or a larger array. Readers of this run do not see them."""
        end = self.used_rows + columns.shape[1]
        rows = self.rows
        if end > rows.shape[1]:
            rows = np.empty((4, max(1_024, min(2 * end, WOKEN_ROWS_MAX))), np.int64)
            rows[:, : self.used_rows] = self.columns
        rows[:, self.used_rows : end] = columns
        new = _WokenRun.of(columns, columns.shape[1])
        return _WokenRun(
            rows, end, self.first, new.last, min(self.first_ms, new.first_ms), max(self.last_ms, new.last_ms),
            half_ms=None, earlier_ms=max(self.earlier_ms, new.earlier_ms),
        )  # fmt: skip

    def with_half(self) -> _WokenRun:
        """Build the run with its `half_ms`."""
        middle = (self.used_rows - 1) // 2
        return self._replace(half_ms=int(np.partition(self.rows[3, : self.used_rows], middle)[middle]))

    def without(self, due_ms: int) -> _WokenRun:
        """Build the run without the wake-ups that are due before `due_ms`. One must remain."""
        is_later = self.rows[3, : self.used_rows] >= due_ms
        columns = np.stack([column[is_later] for column in self.columns])
        return _WokenRun.of(columns, columns.shape[1])


class Woken:
    """The bases of messages with a wake-up, by the version of the wake-up. 32 bytes each.

    This is a cache of log and checkpoint. It is changed on the event loop, and read by any thread. A wake-up that is
    settled may stay for a while: a run is copied only when half of its wake-ups are settled.
    """

    def __init__(self) -> None:
        # Replaced as a whole, so that another thread always reads columns that belong together.
        self._runs: tuple[_WokenRun, ...] = ()
        self.earlier_ms = 0  # how much earlier than its base one of them may be

    def __len__(self) -> int:
        return sum(run.used_rows for run in self._runs)

    def add(
        self, version: Int64Array, base_ms: Int64Array, base_version: Int64Array, due_ms: Int64Array
    ) -> None:
        """Add wake-ups: their versions (ascending, larger than all others), their bases, and their due times."""
        for begin in range(0, len(version), WOKEN_ROWS_MAX):
            part = slice(begin, begin + WOKEN_ROWS_MAX)
            columns = np.stack([version[part], base_ms[part], base_version[part], due_ms[part]])
            if self._runs and self._runs[-1].used_rows + columns.shape[1] <= WOKEN_ROWS_MAX:
                self._replace_runs([*self._runs[:-1], self._runs[-1].added(columns)])
            else:
                self._replace_runs([*self._runs, _WokenRun.of(columns, columns.shape[1])])

    def bases(self, due_ms: Int64Array, seq: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Find the due times and versions of the bases of these messages.

        `due_ms` and `seq` are the due times and versions that the schedule knows. They are the base of a message
        without a wake-up.
        """
        runs = self._runs
        if not runs or not len(seq) or int(seq.max()) < runs[0].first:
            return due_ms, seq
        base_ms, base_version, low, high = due_ms, seq, int(seq.min()), int(seq.max())
        for run in runs:
            if run.first <= high and run.last >= low:
                version = run.rows[0, : run.used_rows]
                index = np.minimum(np.searchsorted(version, seq), run.used_rows - 1)
                is_woken = version[index] == seq
                base_ms = np.where(is_woken, run.rows[1, index], base_ms)
                base_version = np.where(is_woken, run.rows[2, index], base_version)
        return base_ms, base_version

    def forget_before(self, due_ms: int) -> None:
        """Remove wake-ups that are due before `due_ms`: these versions are settled.

        Some of them stay until later calls. If all are settled, none stays.
        """
        runs, copied_rows = list[_WokenRun](), 0
        for run in self._runs:
            if run.last_ms < due_ms:
                continue  # all of its wake-ups are settled
            # Copy the run without its settled wake-ups if at least half are settled. A call holds the event loop, so
            # the next calls do what remains.
            if run.first_ms < due_ms and copied_rows < WOKEN_ROWS_MAX:
                if run.half_ms is None:
                    copied_rows += run.used_rows
                    run = run.with_half()
                assert run.half_ms is not None
                if run.half_ms < due_ms:
                    copied_rows += run.used_rows
                    run = run.without(due_ms)
            # Join small runs, because each costs a search in `bases`.
            if runs and runs[-1].used_rows + run.used_rows <= WOKEN_ROWS_MAX // 2:
                copied_rows += run.used_rows
                run = runs.pop().added(run.columns)
            runs.append(run)
        self._replace_runs(runs)

    def copied(self) -> list[Int64Array]:
        """List the columns of all wake-ups as of now, by version, in parts that later changes do not affect."""
        # Later rows are written after these, and runs are replaced as a whole.
        return [run.columns for run in self._runs]

    def _replace_runs(self, runs: list[_WokenRun]) -> None:
        """Replace all runs at once, and compute `earlier_ms` from them."""
        self._runs = tuple(runs)
        self.earlier_ms = max((run.earlier_ms for run in runs), default=0)


class Selected:
    """The selections that may apply to pending messages at one time. Any thread. Only `woken` changes."""

    def __init__(
        self,
        facts_by_name: Mapping[str, SelectionFacts],
        woken: Woken | None = None,
        keep: str | None = None,
    ) -> None:
        """Combine selections. Includes the one named `keep`, even if it has no effect any more."""
        # The order of the log decides which selections a message belongs to.
        ordered = sorted(facts_by_name.items(), key=lambda entry: entry[1].seq)
        accepted_seqs = [facts.seq for _, facts in ordered]
        # A selection that was undone before another one was accepted has no effect any more.
        ordered = [
            (name, facts)
            for name, facts in ordered
            if not facts.is_undone
            or name == keep
            or any(facts.seq < seq < facts.undone_seq for seq in accepted_seqs)
        ]
        self.names = [name for name, _ in ordered]
        self.woken = Woken() if woken is None else woken
        self._conditions = [_Condition(facts) for _, facts in ordered]
        events = [(facts.seq, index, False) for index, (_, facts) in enumerate(ordered)]
        events += [
            (facts.undone_seq, index, True) for index, (_, facts) in enumerate(ordered) if facts.is_undone
        ]
        # (index of the selection, whether it is undone) in the order of the log.
        self._events = [(index, is_undo) for _, index, is_undo in sorted(events)]
        # Versions from this number on belong to no selection, unless they are wake-ups.
        self.end_seq = max((facts.seq for _, facts in ordered), default=0)
        actions = {facts.action for _, facts in ordered}
        self.only_cancels = actions <= {"cancel"}
        self._keeps_due = actions <= {"cancel", "move", "pause", "resume"}
        shifts_ms = [facts.shift_ms for _, facts in ordered]
        self._shifted_later_ms = sum(max(0, shift_ms) for shift_ms in shifts_ms)
        self.shifted_earlier_ms = -sum(min(0, shift_ms) for shift_ms in shifts_ms)

    @property
    def is_empty(self) -> bool:
        """True if every message has the state that the schedule knows, the usual case."""
        return not self._conditions and not len(self.woken)

    @property
    def later_ms(self) -> int:
        """How much later than in the schedule a message may be due."""
        return self._shifted_later_ms + self.woken.earlier_ms

    @property
    def earlier_ms(self) -> int:
        """How much earlier than in the schedule a message may be due."""
        return self.shifted_earlier_ms if self.only_shifts else LAST_MS

    @property
    def wakes(self) -> bool:
        """True if a message may be due earlier than in the schedule."""
        return bool(len(self.woken)) or any(
            facts.action in ("release", "resume") or facts.shift_ms < 0 for facts in self.facts
        )

    @property
    def only_shifts(self) -> bool:
        """True if no message has or needs a wake-up for another reason than a shift."""
        return not len(self.woken) and {facts.action for facts in self.facts} <= {"cancel", "shift", "move"}

    @cached_property
    def reads_rows(self) -> bool:
        """True if a condition needs more than due time, number and topic."""
        return any(condition.reads_rows for condition in self._conditions)

    @cached_property
    def moves_to(self) -> frozenset[str]:
        """The topics to which the selections may have moved messages."""
        return frozenset(facts.to_topic for facts in self.facts if facts.to_topic)

    @cached_property
    def facts(self) -> list[SelectionFacts]:
        """The facts of the selections, parallel to `names`."""
        return [condition.facts for condition in self._conditions]

    def may_change(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        """Compute a mask of the messages whose state may differ from the schedule's. Reads no row.

        `due_ms` and `seq` are the due times and versions that the schedule knows.
        """
        mask = np.zeros(len(seq), np.bool_)
        if not len(seq):
            return mask
        base_ms, base_version = self.woken.bases(due_ms, seq)
        # Wake-ups, also if the selections that caused them are undone.
        mask |= base_version != seq
        if int(base_version.min()) < self.end_seq:
            for condition in self._conditions:
                # A selection sees the due times that earlier selections have changed.
                mask |= condition.bounds(base_ms if self._keeps_due else None, base_version)
        return mask

    def states(self, messages: Described) -> States:
        """Compute the state of each pending message."""
        return self._fold(messages, None)[0]

    def covered(self, messages: Described, name: str) -> tuple[States, Covered]:
        """Compute the states, and the messages that belong to the selection `name`, undone or not."""
        states, covered = self._fold(messages, self.names.index(name))
        assert covered is not None
        return states, covered

    def topics(self, topic: pa.Array, mover: Int64Array) -> pa.Array:
        """Replace the topics of moved messages (`States.mover`) by those to which they were moved."""
        for index in np.unique(mover[mover >= 0]).tolist():
            topic = pc.if_else(pa.array(mover == index), self.facts[index].to_topic, topic)
        return topic

    def _fold(self, messages: Described, watched: int | None) -> tuple[States, Covered | None]:
        """Apply the events in the order of the log, as the module describes.

        `watched`: the index of the selection whose messages are returned, None for none.
        """
        base_ms, base_version = self.woken.bases(messages.due_ms, messages.seq)
        count = len(base_version)
        # The producer's message has been delivered, and a cancel of the copy would lose it for its group.
        is_redelivery = pc.or_(
            pc.starts_with(messages.topic, RETRY_PREFIX), pc.starts_with(messages.topic, DLQ_PREFIX)
        )
        is_free = ~np.asarray(is_redelivery.to_numpy(zero_copy_only=False), np.bool_)
        states, covered = _unchanged(base_ms), None
        # Selection -> the indexes of its messages, in the order of the log, without undone selections.
        members = dict[int, Int64Array]()
        for index, is_undo in self._events:
            if is_undo:
                # Apply the remaining selections again. Their messages stay the same.
                if len(members.pop(index)):
                    states = _unchanged(base_ms)
                    for other, rows in members.items():
                        _apply(states, other, self.facts[other], rows)
                continue
            condition, before = self._conditions[index], states
            if index == watched:
                before = states.part(np.arange(count))
            # The condition is evaluated only for messages that the selection can get.
            is_possible = is_free & (states.owner < 0) & condition.bounds(states.due_ms, base_version)
            is_possible &= condition.has_effect(states)
            chosen = np.flatnonzero(is_possible)
            if len(chosen):
                topic = self.topics(messages.topic, states.mover)
                present = messages._replace(due_ms=states.due_ms, topic=topic)
                chosen = chosen[condition.matches(part_of(present, chosen))]
            members[index] = chosen
            _apply(states, index, condition.facts, chosen)
            if index == watched:
                is_member = np.zeros(count, np.bool_)
                is_member[chosen] = True
                covered = Covered(is_member, before, states.part(np.arange(count)))
        return states, covered


def _unchanged(due_ms: Int64Array) -> States:
    """Build the states of messages due at `due_ms` that belong to no selection."""
    owner, holder, mover = (np.full(len(due_ms), -1, np.int64) for _ in range(3))
    return States(owner, holder, mover, due_ms.copy(), np.zeros(len(due_ms), np.bool_))


def _apply(states: States, index: int, facts: SelectionFacts, rows: Int64Array) -> None:
    """Change the states of the messages of one selection, in place. `rows` are the indexes of the messages."""
    states.is_changed[rows] = True
    due_ms = states.due_ms[rows]
    if facts.action == "cancel":
        states.owner[rows] = index
    elif facts.action == "shift":
        # Not before the acceptance. A held message may have been due before.
        first_ms = np.minimum(due_ms, facts.at_ms) if facts.shift_ms < 0 else FIRST_MS
        states.due_ms[rows] = np.maximum(due_ms + facts.shift_ms, first_ms)
    elif facts.action == "pause":
        states.holder[rows] = index
    elif facts.action == "resume":
        states.holder[rows] = -1
    elif facts.action == "release":
        states.holder[rows] = -1
        states.due_ms[rows] = np.minimum(due_ms, facts.at_ms)
    else:
        states.mover[rows] = index


def part_of(messages: Described, index: Int64Array) -> Described:
    """Select some of the messages by their ascending indexes."""
    if len(index) == len(messages.seq):
        return messages
    positions = pa.array(index)
    return Described(
        messages.due_ms[index], messages.seq[index], messages.number[index], messages.topic.take(positions),
        None if messages.rows is None else messages.rows.take(positions),
    )  # fmt: skip


NOTHING_SELECTED = Selected({})


class Selections:
    """All selections by id. Belongs to the event loop, except `selected`, which is an immutable object."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "selection", SelectionFacts)
        self.values: Mapping[str, SelectionFacts] = self._table.values  # by id. Always the same dict
        self.woken = Woken()
        self._selected: Selected | None = None
        self._over: frozenset[str] = frozenset()  # the ids of selections whose messages are all settled
        # By id, since the start: messages that were counted as pending, and CANCEL rows.
        self._counted: dict[str, int] = {}
        self._ended: Counter[str] = Counter()
        self.epoch = 0  # grows with each event that changes states
        self.has_changed = asyncio.Event()  # set by each of them
        # By id, since the start: when the last of its messages was due in the schedule, at the last count. Later events
        # may have changed these times for the selections in `_outdated`.
        self._last_ms: dict[str, int] = {}
        self._outdated: set[str] = set()

    @property
    def selected(self) -> Selected:
        """The selections that may apply to pending messages now. The same object until one of them changes."""
        if self._selected is None:
            self._selected = Selected(self.selected_facts(), self.woken)
        return self._selected

    def selected_facts(self, also: str | None = None) -> dict[str, SelectionFacts]:
        """List the selections that may apply to pending messages, and the one named `also`, by id."""
        values = self._table.values.items()
        return {name: facts for name, facts in values if name not in self._over or name == also}

    @property
    def pending_rows(self) -> int:
        """The number of messages that selections have cancelled and that have no CANCEL row yet, as far as counted.

        They get it at their due time.
        """
        return sum(
            max(0, rows - self._ended[name])
            for name, rows in self._counted.items()
            if name in self.active and self._table.values[name].action == "cancel"
        )

    @property
    def active(self) -> list[str]:
        """The ids of the selections that have effect: neither undone nor over."""
        return [
            name
            for name, facts in self._table.values.items()
            if not facts.is_undone and name not in self._over
        ]

    def all(self) -> dict[str, SelectionFacts]:
        """List all selections by id, the newest last."""
        return dict(sorted(self._table.values.items(), key=lambda entry: entry[1].seq))

    def get(self, name: str) -> SelectionFacts:
        """Find a selection. Raises NotFound."""
        facts = self._table.values.get(name)
        if facts is None:
            raise NotFound(f"no selection {name[:80]!r}")
        return facts

    def is_over(self, name: str) -> bool:
        """Check whether all messages of this selection are settled."""
        return name in self._over

    def put(self, name: str, facts: SelectionFacts) -> None:
        """Append a selection, or its new state.

        If there are too many selections, deletes the oldest one that is over. Raises OverLimit if none is over.
        """
        changes: list[tuple[str, SelectionFacts | None]] = [(name, facts)]
        # Without its row, the messages of a selection that is not over would be pending again.
        if name not in self._table.values and len(self._table.values) >= limits.SELECTIONS_MAX:
            oldest = next((selection for selection in self.all() if selection in self._over), None)
            if oldest is None:
                raise OverLimit(f"{limits.SELECTIONS_MAX} selections whose messages are not all due yet")
            changes.append((oldest, None))
        before = self._table.values.get(name)
        if before is None or before.undone_seq != facts.undone_seq or before.absent != facts.absent:
            self._outdated.update(self._last_ms)
            self.epoch += 1
            self.has_changed.set()
        self._table.put(changes)
        self._selected = None

    def exclude(self, ranges: Ranges) -> None:
        """Remove the messages of these ranges (first_seq, rows) from all selections that do not cancel."""
        for name, facts in self.selected_facts().items():
            new_ranges = [number_range for number_range in ranges if number_range not in facts.absent]
            if facts.action != "cancel" and new_ranges:
                self.put(name, msgspec.structs.replace(facts, absent=[*facts.absent, *new_ranges]))

    def record_count(self, name: str, rows: int, last_ms: int) -> None:
        """Record a count: the messages of a selection that are pending or have become due since the start.

        The last pending one is due in the schedule at `last_ms`, -1 for none.
        """
        self._counted[name], self._last_ms[name] = rows, last_ms
        self._outdated.discard(name)

    def is_settled(self, name: str, settled_before_ms: int) -> bool:
        """Check whether all messages of a selection are settled by now, according to the last count."""
        return name not in self._outdated and self._last_ms.get(name, LAST_MS) < settled_before_ms

    def ended_rows(self, name: str) -> int:
        """The number of CANCEL rows for messages of a selection since the start."""
        return self._ended[name]

    def needs_count(self, name: str, settled_before_ms: int) -> bool:
        """Check whether the messages of a selection were not counted since the start, or must be counted again."""
        if name not in self._counted:
            return True
        # An outdated count is repeated only if the selection may be over, because a count reads all pending messages.
        last_ms = self._last_ms[name]
        return name in self._outdated and (last_ms < settled_before_ms or last_ms == LAST_MS)

    def forget_counts(self) -> None:
        """Forget the counts of all selections, so that they are repeated: other requests have cancelled messages."""
        self._counted.clear()

    def ended(self, name: str, rows: int) -> None:
        """Record that `rows` messages of a selection got CANCEL rows."""
        self._ended[name] += rows

    def mark_over(self, settled_before_ms: int) -> None:
        """Mark as over each selection whose messages are all settled. It no longer applies to pending messages.

        All messages due before `settled_before_ms` are settled.
        """
        over_names = frozenset(
            name for name, facts in self._table.values.items() if facts.is_over(settled_before_ms)
        )
        if over_names != self._over:
            self._over, self._selected = over_names, None


@dataclass(frozen=True, slots=True)
class Survey:
    """The pending messages of a selection. `samples` are the first of them, as (due_ms, topic, id, keys).

    `hours` has the start of each hour from or to which messages move, and its pending messages before and after.
    `last_ms`: when the last message is due in the schedule, LAST_MS if one is held, -1 if there are none.
    """

    count: int
    first_due_ms: int
    last_due_ms: int
    samples: Sequence[tuple[int, str, str | None, str | None]]
    hours: Sequence[tuple[int, int, int]]
    last_ms: int
