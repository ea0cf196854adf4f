"""Selections: bulk operations on all pending messages that meet a condition. Each is one META row.

    selection/<id>    SelectionFacts

No row names the messages of a selection. Whoever reads pending messages evaluates the condition (`Selected`), so a
selection of ten million messages is as small as one of ten, and every reader sees it at once. A message that becomes
due gets its own CANCEL row instead of its release (accepting/delivery.py). From then on it is like any other cancelled
message, and an undo does not change it.

The meaning is a fold over the events "accept S" and "undo S", in the order of the log, for each message:

    accept S    a message that is pending, meets the condition of S, and belongs to no selection, belongs to S
    undo S      a message that belongs to S belongs to no selection

A message belongs to a selection only if the row that set its due time (its version) is older than the selection. So
later messages are not covered. A message of a selection cannot be rescheduled, so no message gets a newer version and
escapes. Numbers that were reserved for a bulk attach when the selection was accepted are excluded, because their
messages came later (`absent`). Redeliveries to a consumer group are never covered.

While a due time may change with the same version (the resume of a campaign), no selection may apply to the message:
its messages are cancelled by CANCEL rows before (admin/campaign_changes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.filters.compiler import SQL92, compile_filter
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.model import limits
from timeball.model.errors import NotFound, OverLimit
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

    action: Literal["cancel"] = "cancel"
    seq: int  # of this row, when the selection was accepted. It covers older versions only
    at_ms: int  # when it was accepted
    by: str = ""  # the account that requested it
    where: str = ""  # an SQL-92 condition; empty: every message
    topics: list[str] = []  # empty: every topic
    from_ms: int = FIRST_MS  # messages due in [from_ms, to_ms)
    to_ms: int = LAST_MS
    absent: Ranges = []  # (first_seq, rows): numbers that were reserved, without messages yet
    campaigns: dict[str, Ranges] = {}  # the ranges of all campaigns, if the condition asks for `campaign`
    # The covered messages, None until they are counted. `last_due_ms` is -1 if there are none.
    count: int | None = None
    first_due_ms: int = -1
    last_due_ms: int = -1
    undone_seq: int = 0  # of the row that has undone it, or 0
    undone_ms: int = 0

    @property
    def is_undone(self) -> bool:
        """True if the selection was undone."""
        return self.undone_seq > 0

    def is_over(self, settled_before_ms: int) -> bool:
        """Check whether all covered messages are settled. Messages due before `settled_before_ms` are."""
        return self.count is not None and self.last_due_ms < settled_before_ms

    def reason_properties(self, name: str) -> str:
        """Build the properties of the CANCEL rows of its messages."""
        properties = {CANCEL_REASON: reason_of(name)}
        return encode_properties(properties | {CANCELLED_BY: self.by} if self.by else properties)


def reason_of(name: str) -> str:
    """Build the reason that a cancelled message shows."""
    return f"selection {name}"


class Described(NamedTuple):
    """Messages as a condition sees them, as parallel columns. `rows` has CONDITION_COLUMNS, or is None."""

    due_ms: Int64Array  # not shifted by a step of the clock
    seq: Int64Array  # version
    number: Int64Array
    topic: pa.Array  # string, the real topic of messages in a delay level
    rows: pa.RecordBatch | None


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

    def bounds(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        """Compute a mask of the messages within the bounds of time and number."""
        # Arrays only: this runs for each row group, and most messages are outside.
        facts = self.facts
        inside = (seq < facts.seq) & (due_ms >= facts.from_ms) & (due_ms < facts.to_ms)
        if facts.absent and inside.any():
            inside &= ~within(seq, facts.absent)
        return np.asarray(inside)

    def matches(self, messages: Described) -> Bools:
        """Compute a mask of the messages, all within the bounds, that meet the condition."""
        mask = np.ones(len(messages.seq), np.bool_)
        # First, because it costs less than the condition.
        if len(self._topics):
            mask = np.asarray(pc.is_in(messages.topic, value_set=self._topics))
        if self._filter is None or not mask.any():
            return mask
        return mask & np.asarray(self._filter.exact(self._as_properties(messages)))

    def _as_properties(self, messages: Described) -> pa.RecordBatch:
        """Add the values of OWN_NAMES to the properties, which are all that a filter knows."""
        rows = messages.rows
        assert rows is not None
        columns = {name: _text(rows.column(name)) for name in CONDITION_COLUMNS}
        values = {
            "due_ms": lambda: pc.cast(pa.array(messages.due_ms), pa.string()),
            "topic": lambda: messages.topic,
            "keys": lambda: columns["keys"],
            "tag": lambda: columns["tag"],
            "campaign": lambda: _campaigns_of(messages.number, self.facts.campaigns),
        }
        parts = [pc.fill_null(columns["properties"], "")]
        for name in self._names:
            # The last of equal names counts, so these come after the properties of the message.
            entry = pc.binary_join_element_wise(name, values[name](), PROPERTY_NAME_END)
            parts.append(pc.fill_null(entry, ""))
        if len(parts) > 1:
            columns["properties"] = pc.binary_join_element_wise(*parts, PROPERTY_END)
        return pa.RecordBatch.from_pydict(columns)


def _text(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return column if column.type == pa.string() else column.cast(pa.string())


def _campaigns_of(number: Int64Array, campaigns: Mapping[str, Ranges]) -> pa.Array:
    """Find the campaign of each message by its number. Null for messages of none."""
    ranges = sorted((first, first + rows, name) for name, each in campaigns.items() for first, rows in each)
    if not ranges:
        return pa.nulls(len(number), pa.string())
    first_seq, end_seq = (np.array([entry[at] for entry in ranges], np.int64) for at in (0, 1))
    # The ranges are disjoint, so only the last one that begins at or before a number can contain it.
    index = np.searchsorted(first_seq, number, side="right") - 1
    is_outside = (index < 0) | (number >= end_seq[index])
    return pa.array([entry[2] for entry in ranges]).take(pa.array(index, mask=is_outside))


# ---- all selections ------------------------------------------------------------------------------------------


class Selected:
    """The selections that may apply to pending messages at one time. Immutable, any thread."""

    def __init__(self, facts_by_name: Mapping[str, SelectionFacts], until: str | None = None) -> None:
        """Combine selections. With `until`, only the events up to the acceptance of this one count."""
        # The order of the log decides to which of two selections a message belongs.
        ordered = sorted(facts_by_name.items(), key=lambda entry: entry[1].seq)
        end_seq = facts_by_name[until].seq if until is not None else LAST_MS
        ordered = [(name, facts) for name, facts in ordered if facts.seq <= end_seq]
        accepted = [facts.seq for _, facts in ordered]
        # A selection that was undone before another one was accepted has no effect any more.
        ordered = [
            (name, facts)
            for name, facts in ordered
            if not (0 < facts.undone_seq <= end_seq)
            or any(facts.seq < seq < facts.undone_seq for seq in accepted)
        ]
        self.names = [name for name, _ in ordered]
        self._conditions = [_Condition(facts) for _, facts in ordered]
        events = [(facts.seq, index, False) for index, (_, facts) in enumerate(ordered)]
        events += [
            (facts.undone_seq, index, True)
            for index, (_, facts) in enumerate(ordered)
            if 0 < facts.undone_seq <= end_seq
        ]
        self._events = [event[1:] for event in sorted(events)]
        # Versions from this number on belong to no selection.
        self.end_seq = max((facts.seq for _, facts in ordered), default=0)

    @property
    def is_empty(self) -> bool:
        """True if no selection may apply, the usual case."""
        return not self._conditions

    @cached_property
    def reads_rows(self) -> bool:
        """True if a condition needs more than due time, number and topic."""
        return any(condition.reads_rows for condition in self._conditions)

    @property
    def facts(self) -> list[SelectionFacts]:
        """The facts of the selections, parallel to `names`."""
        return [condition.facts for condition in self._conditions]

    def may_cover(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        """Compute a mask of the messages that are within the bounds of a selection. Cheap: no row is read."""
        mask = np.zeros(len(seq), np.bool_)
        if len(seq) and int(seq.min()) < self.end_seq:
            for condition in self._conditions:
                mask |= condition.bounds(due_ms, seq)
        return mask

    def owners(self, messages: Described) -> Int64Array:
        """Find the selection to which each pending message belongs, as an index into `names`. -1: none."""
        owner = np.full(len(messages.seq), -1, np.int64)
        # The producer's message has been delivered, and a cancel of the copy would lose it for its group.
        is_redelivery = pc.or_(
            pc.starts_with(messages.topic, RETRY_PREFIX), pc.starts_with(messages.topic, DLQ_PREFIX)
        )
        is_free = ~np.asarray(is_redelivery.to_numpy(zero_copy_only=False), np.bool_)
        for index, is_undo in self._events:
            if is_undo:
                owner[owner == index] = -1
                continue
            condition = self._conditions[index]
            # The condition is evaluated only for messages that the selection can get.
            chosen = np.flatnonzero((owner < 0) & is_free & condition.bounds(messages.due_ms, messages.seq))
            if len(chosen):
                owner[chosen[condition.matches(part_of(messages, chosen))]] = index
        return owner


def part_of(messages: Described, index: Int64Array) -> Described:
    """Select some of the messages by their ascending indexes."""
    if len(index) == len(messages.seq):
        return messages
    taken = pa.array(index)
    return Described(
        messages.due_ms[index], messages.seq[index], messages.number[index], messages.topic.take(taken),
        None if messages.rows is None else messages.rows.take(taken),
    )  # fmt: skip


NOTHING_SELECTED = Selected({})


class Selections:
    """All selections by id. Belongs to the event loop, except `selected`, which is an immutable object."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "selection", SelectionFacts)
        self.values: Mapping[str, SelectionFacts] = self._table.values  # by id. Always the same dict
        self._selected: Selected | None = None
        self._over: frozenset[str] = frozenset()  # all of their messages are settled
        # By id, since the start: messages that were counted as pending, and CANCEL rows.
        self._counted: dict[str, int] = {}
        self._ended: Counter[str] = Counter()

    @property
    def selected(self) -> Selected:
        """The selections that may apply to pending messages now. The same object until one of them changes."""
        if self._selected is None:
            live = {name: facts for name, facts in self._table.values.items() if name not in self._over}
            # Most of the time there are none, and then this object is shared.
            self._selected = Selected(live) if live else NOTHING_SELECTED
        return self._selected

    @property
    def pending_rows(self) -> int:
        """The number of messages that wait for their due time to get a CANCEL row, as far as they are counted."""
        return sum(
            max(0, rows - self._ended[name]) for name, rows in self._counted.items() if name in self.active
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

    def with_planned(self, name: str, facts: SelectionFacts) -> dict[str, SelectionFacts]:
        """Build the selections with one more, for a dry run."""
        live = {known: each for known, each in self._table.values.items() if known not in self._over}
        return {**live, name: facts}

    def put(self, name: str, facts: SelectionFacts) -> None:
        """Append a selection, or its new state. Raises OverLimit if there are too many."""
        changes: list[tuple[str, SelectionFacts | None]] = [(name, facts)]
        # Only those that are over may be forgotten: without the row, their messages would be pending again.
        if name not in self._table.values and len(self._table.values) >= limits.SELECTIONS_MAX:
            oldest = next((known for known in self.all() if known in self._over), None)
            if oldest is None:
                raise OverLimit(f"{limits.SELECTIONS_MAX} selections whose messages are not all due yet")
            changes.append((oldest, None))
        self._table.put(changes)
        self._selected = None

    def counted(self, name: str, rows: int) -> None:
        """Record how many messages of a selection were pending or had become due since the start."""
        self._counted[name] = rows

    def ended_rows(self, name: str) -> int:
        """Tell how many messages of a selection got CANCEL rows since the start."""
        return self._ended[name]

    def needs_count(self, name: str) -> bool:
        """Check whether the messages of a selection were not counted since the start."""
        return name not in self._counted

    def recount(self) -> None:
        """Count the messages of all selections again, because others have cancelled some of them."""
        self._counted.clear()

    def ended(self, name: str, rows: int) -> None:
        """Record that so many messages of a selection got CANCEL rows."""
        self._ended[name] += rows

    def mark_over(self, settled_before_ms: int) -> None:
        """Leave out selections whose messages are all settled: due before `settled_before_ms`."""
        over = frozenset(
            name for name, facts in self._table.values.items() if facts.is_over(settled_before_ms)
        )
        if over != self._over:
            self._over, self._selected = over, None


@dataclass(frozen=True, slots=True)
class Survey:
    """The pending messages of a selection. `samples` are the first of them, as (due_ms, topic, id, keys).

    `hours` has the start of each hour with covered messages, the pending messages of the hour, and the covered ones.
    """

    count: int
    first_due_ms: int
    last_due_ms: int
    samples: Sequence[tuple[int, str, str | None, str | None]]
    hours: Sequence[tuple[int, int, int]]
