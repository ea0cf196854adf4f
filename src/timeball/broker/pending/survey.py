"""Survey the pending messages of a selection: how many, the first and the last, samples, and the load by hour.

Due times are those that the messages had when the selection was accepted, before its effect.

A survey walks through log and table of a snapshot once, part by part. Pages and counts of other callers need the same
thread, and so they wait for one part only. A dry run surveys a selection that does not exist. Each accepted selection
is surveyed once after it was accepted, and once after each start.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from timeball.broker.pending.snapshot import (
    DescribedPart,
    Logged,
    Snapshot,
    Snapshots,
    TopicCodes,
    described_in_group,
    described_in_log,
    scan,
)
from timeball.broker.registry.selections import LAST_MS, Selected, States, Survey
from timeball.broker.tables.memory import give_back
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.answers import FIRST_POSITION, LAST_POSITION
from timeball.model.errors import OutOfRange, Unavailable
from timeball.model.message import Int64Array

SAMPLES, HOURS = 10, 100  # the most samples and hours in the result, the earliest ones
PART_ROWS = 65_536
_SAMPLE_COLUMNS = ["topic", "unique_key", "keys"]

# Builds the selections of a survey, given the end of the log (a sequence number), and names the selection to survey.
Plan = Callable[[int], tuple[Selected, str]]
Sample = tuple[int, int, str, str | None, str | None]  # due_ms, version, topic, id, keys
# Reads messages of a part as samples. Arguments: their ascending indexes in the part, and the due times to show.
_Read = Callable[[Int64Array, Int64Array], list[Sample]]


class _Part(NamedTuple):
    """Pending messages of a walk."""

    due_ms: Int64Array
    described: Iterator[DescribedPart]  # the messages that a selection may have changed
    read: _Read


class Surveys:
    """Counts the messages of selections. Belongs to the event loop."""

    def __init__(self, snapshots: Snapshots, *, reader: LogReader, background: Executor) -> None:
        self._snapshots, self._reader, self._background = snapshots, reader, background

    async def survey(self, plan: Plan, on_snapshot: Callable[[], None] = lambda: None) -> Survey:
        """Survey the messages that are pending now.

        Calls `on_snapshot` at the moment to which the result refers, perhaps twice. Raises Unavailable if retention
        removed rows twice during the walk.
        """
        for _ in range(2):
            async with self._snapshots.taken() as snapshot:
                on_snapshot()
                selected, name = plan(snapshot.to_seq)
                walk = _Walk(snapshot, selected, name, self._reader, self._snapshots)
                try:
                    steps = walk.steps()
                    while await in_thread(self._background, next, steps, False):
                        pass
                    return walk.result()
                except OutOfRange:
                    continue  # retention has removed a row, so its message is settled or in a file
        raise Unavailable("retention removed rows twice during the count; ask again")


@dataclass(slots=True)
class _Walk:
    """One walk through a snapshot. Belongs to the background thread."""

    snapshot: Snapshot
    selected: Selected
    name: str
    reader: LogReader
    snapshots: Snapshots
    codes: TopicCodes = field(default_factory=TopicCodes)
    # Of the messages of the selection: their number, the first and the last due time before its effect, the last time
    # at which a message may be settled, and the earliest messages. Times are -1 without messages.
    count: int = 0
    first_ms: int = -1
    last_ms: int = -1
    until_ms: int = -1
    samples: list[Sample] = field(default_factory=list)
    # By hour: all messages that are due before and after the effect of the selection, and the messages of the selection
    # in both.
    before: Counter[int] = field(default_factory=Counter)
    after: Counter[int] = field(default_factory=Counter)
    covered: Counter[int] = field(default_factory=Counter)

    def steps(self) -> Iterator[bool]:
        """Walk through log and table. Yields True after each part."""
        for part in chain(self._in_log(), self._in_files()):
            if part is not None:
                self._add(*part)
            yield True
        give_back()

    def result(self) -> Survey:
        """Build the result after all steps. It has the hours in which messages of the selection are due."""
        hours = [
            (hour * limits.HOUR_MS, self.before[hour], self.after[hour])
            for hour in sorted(self.covered)[:HOURS]
        ]
        samples = [(due_ms, topic, key, keys) for due_ms, _, topic, key, keys in self.samples]
        return Survey(self.count, self.first_ms, self.last_ms, samples, hours, self.until_ms)

    def _add(self, due_ms: Int64Array, described_parts: Iterator[DescribedPart], read: _Read) -> None:
        """Count the messages of a part."""
        # Counted by hours, so that memory does not grow with the messages.
        is_unchanged = np.ones(len(due_ms), np.bool_)
        for index, described in described_parts:
            is_unchanged[index] = False
            states, (is_member, before, after) = self.selected.covered(described, self.name)
            _count_hours(self.before, _released_ms(before))
            _count_hours(self.after, _released_ms(after))
            if is_member.any():
                for state in (before, after):
                    _count_hours(self.covered, _released_ms(state.part(is_member)))
                self._add_members(
                    index[is_member], described.due_ms[is_member], states.part(is_member),
                    before.due_ms[is_member], read,
                )  # fmt: skip
        for counter in (self.before, self.after):
            _count_hours(counter, due_ms[is_unchanged])

    def _add_members(
        self, row: Int64Array, due_ms: Int64Array, states: States, before_ms: Int64Array, read: _Read
    ) -> None:
        """Count messages of the selection, and keep the earliest messages as samples.

        `row` contains their indexes in the part, `due_ms` their due times in the schedule, `before_ms` their due times
        before the effect of the selection, and `states` their present states.
        """
        self.count += len(row)
        first_ms, last_ms = int(before_ms.min()), int(before_ms.max())
        self.first_ms = first_ms if self.first_ms < 0 else min(self.first_ms, first_ms)
        self.last_ms = max(self.last_ms, last_ms)
        # A held message may be settled at any time.
        until_ms = LAST_MS if (states.holder >= 0).any() else int(np.maximum(due_ms, states.due_ms).max())
        self.until_ms = max(self.until_ms, until_ms)
        if len(self.samples) < SAMPLES or first_ms <= self.samples[-1][0]:
            earliest = np.sort(np.argsort(before_ms, kind="stable")[:SAMPLES])
            candidates = read(row[earliest], before_ms[earliest])
            self.samples = heapq.nsmallest(SAMPLES, [*self.samples, *candidates])

    def _in_log(self) -> Iterator[_Part | None]:
        """Yield the messages of the log, and None between the parts of the read."""
        snapshot, parts = self.snapshot, list[Logged]()
        for rows in scan(self.reader, snapshot, max(snapshot.from_seq, self.reader.first_seq), self.codes):
            is_in_log = (rows.row_seq >= snapshot.watermark) | rows.is_level
            parts.append(rows.part(is_in_log & snapshot.are_pending(rows.due_ms, rows.seq)))
            yield None
        if not parts:
            return
        # A message that was written again has several rows. `sorted` keeps the last one.
        rows = Logged.joined(parts).sorted()

        def read(part: Logged, index: Int64Array, due_ms: Int64Array) -> list[Sample]:
            """Read messages of a part as samples (`_Read`)."""
            chosen = part.part(index)
            columns = self.reader.read_rows(chosen.row_seq, ["unique_key", "keys"])
            topics = [self.codes.names[code] for code in chosen.topic.tolist()]
            texts = topics, columns.column("unique_key").to_pylist(), columns.column("keys").to_pylist()
            return list(zip(due_ms.tolist(), chosen.seq.tolist(), *texts, strict=True))

        for begin in range(0, len(rows), PART_ROWS):
            part = rows.part(slice(begin, begin + PART_ROWS))
            described_parts = described_in_log(self.selected, self.reader, part, self.codes.names)
            yield _Part(part.due_ms, described_parts, partial(read, part))

    def _in_files(self) -> Iterator[_Part]:
        """Yield the messages of the table, row group by row group."""
        for entry in self.snapshot.entries:
            file = self.snapshots.open_file(entry)
            for group in file.groups_between(FIRST_POSITION, LAST_POSITION):
                columns = file.read_group(group, ["due_ms", "seq"])
                due_ms, seq = (columns.column(name).to_numpy() for name in ("due_ms", "seq"))
                row = np.flatnonzero(self.snapshot.are_pending(due_ms, seq))
                due_ms, seq = due_ms[row], seq[row]

                def read(
                    index: Int64Array,
                    due_ms: Int64Array,
                    group: int = group,
                    row: Int64Array = row,
                    seq: Int64Array = seq,
                ) -> list[Sample]:
                    """Read messages of the row group as samples (`_Read`)."""
                    rows = file.read_group_rows(group, row[index], _SAMPLE_COLUMNS)  # noqa: B023  # called at once
                    texts = (rows.column(name).to_pylist() for name in _SAMPLE_COLUMNS)
                    return list(zip(due_ms.tolist(), seq[index].tolist(), *texts, strict=True))

                described_parts = described_in_group(self.selected, file, group, row, due_ms, seq)
                yield _Part(due_ms, described_parts, read)


def _released_ms(states: States) -> Int64Array:
    """List the due times of the messages that are neither cancelled nor held."""
    return states.due_ms[(states.owner < 0) & (states.holder < 0)]


def _count_hours(counter: Counter[int], due_ms: Int64Array) -> None:
    """Add the number of messages that are due in each hour (since 1970) to `counter`."""
    for hour, rows in zip(*np.unique(due_ms // limits.HOUR_MS, return_counts=True), strict=True):
        counter[int(hour)] += int(rows)
