"""Survey the pending messages of a selection: how many, the first and the last, samples, and the load by hour.

A survey walks through log and table of a snapshot once, part by part, so that pages and counts of other callers, which
need the same thread, wait for a part only. A dry run surveys a selection that
does not exist, and each accepted selection is surveyed once after it was accepted, and once after each start.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np

from timeball.broker.pending.snapshot import (
    Logged,
    Snapshot,
    Snapshots,
    TopicCodes,
    owners_in_group,
    owners_in_log,
    scan,
)
from timeball.broker.registry.selections import Selected, Survey
from timeball.broker.tables.memory import give_back
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.answers import FIRST_POSITION, LAST_POSITION
from timeball.model.errors import OutOfRange, Unavailable
from timeball.model.message import Int64Array

SAMPLES, HOURS = 10, 100  # in the result: the first ones
PART_ROWS = 65_536
_SAMPLE_COLUMNS = ["topic", "unique_key", "keys"]

# Builds the selections of a survey from the end of the log, and names the one whose messages are counted.
Plan = Callable[[int], tuple[Selected, str]]
Sample = tuple[int, int, str, str | None, str | None]  # due_ms, version, topic, id, keys
# Pending messages in the order of their due times: due times, indexes of selections, and a function that reads some.
_Part = tuple[Int64Array, Int64Array, Callable[[Int64Array], list[Sample]]]


class Surveys:
    """Counts the messages of selections. Belongs to the event loop."""

    def __init__(self, snapshots: Snapshots, *, reader: LogReader, background: Executor) -> None:
        self._snapshots, self._reader, self._background = snapshots, reader, background

    async def survey(self, plan: Plan, taken: Callable[[], None] = lambda: None) -> Survey:
        """Survey the messages that are pending now. Calls `taken` at the moment to which the result refers.

        Raises Unavailable if retention removed rows twice during the walk.
        """
        for _ in range(2):
            async with self._snapshots.taken() as snapshot:
                taken()
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
    count: int = 0
    first_ms: int = -1
    last_ms: int = -1
    samples: list[Sample] = field(default_factory=list)
    before: Counter[int] = field(default_factory=Counter)
    covered: Counter[int] = field(default_factory=Counter)

    def steps(self) -> Iterator[bool]:
        """Walk through log and table. Yields True after each part."""
        index = self.selected.names.index(self.name)
        for part in chain(self._in_log(), self._in_files()):
            if part is not None:
                self._add(*part, index)
            yield True
        give_back()

    def result(self) -> Survey:
        """Build the result, when all steps are done."""
        hours = [
            (hour * limits.HOUR_MS, self.before[hour], self.covered[hour])
            for hour in sorted(self.covered)[:HOURS]
        ]
        samples = [(due_ms, topic, key, keys) for due_ms, _, topic, key, keys in self.samples]
        return Survey(self.count, self.first_ms, self.last_ms, samples, hours)

    def _add(
        self, due_ms: Int64Array, owner: Int64Array, read: Callable[[Int64Array], list[Sample]], index: int
    ) -> None:
        # Counted by hours, so that memory does not grow with the messages.
        is_free = (owner == index) | (owner < 0)  # the messages of other selections are cancelled
        for hour, rows in zip(*np.unique(due_ms[is_free] // limits.HOUR_MS, return_counts=True), strict=True):
            self.before[int(hour)] += int(rows)
        row = np.flatnonzero(owner == index)
        if not len(row):
            return
        due_ms = due_ms[row]
        for hour, rows in zip(*np.unique(due_ms // limits.HOUR_MS, return_counts=True), strict=True):
            self.covered[int(hour)] += int(rows)
        self.count += len(row)
        first_ms, last_ms = int(due_ms.min()), int(due_ms.max())
        self.first_ms = first_ms if self.first_ms < 0 else min(self.first_ms, first_ms)
        self.last_ms = max(self.last_ms, last_ms)
        if len(self.samples) < SAMPLES or first_ms <= self.samples[-1][0]:
            # Both sources are sorted by due time, so the first rows of a part are enough.
            earliest = np.sort(row[np.argsort(due_ms, kind="stable")[:SAMPLES]])
            self.samples = heapq.nsmallest(SAMPLES, [*self.samples, *read(earliest)])

    def _in_log(self) -> Iterator[_Part | None]:
        """Yield the messages of the log, and None between the parts of the read."""
        snapshot, parts = self.snapshot, list[Logged]()
        for rows in scan(self.reader, snapshot, max(snapshot.from_seq, self.reader.first_seq), self.codes):
            is_in_log = (rows.row_seq >= snapshot.watermark) | rows.is_level
            parts.append(rows.part(is_in_log & snapshot.waits(rows.due_ms, rows.seq)))
            yield None
        if not parts:
            return
        # A message that was written again has several rows.
        rows = Logged.joined(parts).sorted()

        def read(part: Logged, index: Int64Array) -> list[Sample]:
            chosen = part.part(index)
            read = self.reader.read_rows(chosen.row_seq, ["unique_key", "keys"])
            topics = [self.codes.names[code] for code in chosen.topic.tolist()]
            names = (topics, read.column("unique_key").to_pylist(), read.column("keys").to_pylist())
            return list(zip(chosen.due_ms.tolist(), chosen.seq.tolist(), *names, strict=True))

        for begin in range(0, len(rows), PART_ROWS):
            part = rows.part(slice(begin, begin + PART_ROWS))
            owner = owners_in_log(self.selected, self.reader, part, self.codes.names)
            yield part.due_ms, owner, partial(read, part)

    def _in_files(self) -> Iterator[_Part]:
        for entry in self.snapshot.entries:
            file = self.snapshots.open_file(entry)
            for group in file.groups_between(FIRST_POSITION, LAST_POSITION):
                columns = file.read_group(group, ["due_ms", "seq"])
                due_ms, seq = (columns.column(name).to_numpy() for name in ("due_ms", "seq"))
                row = np.flatnonzero(self.snapshot.waits(due_ms, seq))
                due_ms, seq = due_ms[row], seq[row]

                def read(
                    index: Int64Array,
                    group: int = group,
                    row: Int64Array = row,
                    due_ms: Int64Array = due_ms,
                    seq: Int64Array = seq,
                ) -> list[Sample]:
                    rows = file.read_group_rows(group, row[index], _SAMPLE_COLUMNS)  # noqa: B023  # called at once
                    names = (rows.column(name).to_pylist() for name in _SAMPLE_COLUMNS)
                    return list(zip(due_ms[index].tolist(), seq[index].tolist(), *names, strict=True))

                yield due_ms, owners_in_group(self.selected, file, group, row, due_ms, seq), read
