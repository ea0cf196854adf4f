"""State of dead letters as META rows. The rows contain positions in the queues of `%DLQ%<group>`.

dead/<group>        positions that operators have resolved:
                    {queue: [[begin, end], …]}, disjoint and in order, end exclusive
repeated/<group>    positions whose rows retention has removed, and the later rows that repeat them:
                    {queue: [[offset, seq, rows, bytes, died_ms], …]}, disjoint and in order
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.model import limits
from timeball.model.errors import OverLimit

Span = tuple[int, int]  # positions [begin, end)
Position = tuple[int, int]  # queue, offset


class ResolvedDeadLetters:
    """Positions that no longer need an operator. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, "dead", dict[int, list[Span]])

    def spans(self, group: str, queue: int) -> list[Span]:
        """Return the resolved positions of a queue."""
        return self._kept.values.get(group, {}).get(queue, [])

    def open_spans(self, group: str, queue: int, begin: int, end: int) -> Iterator[Span]:
        """Yield the open spans among a queue's positions [begin, end), in order."""
        for done_begin, done_end in self.spans(group, queue):  # disjoint and in order
            if done_end <= begin:
                continue
            if done_begin >= end:
                break
            if done_begin > begin:
                yield begin, done_begin
            begin = done_end
        if begin < end:
            yield begin, end

    def changed(self, group: str, positions: Iterable[Position], kept_from: dict[int, int]) -> Change:
        """Build the row that marks these positions as resolved too. Raise OverLimit.

        `kept_from`: the first position of each queue that the log still contains. Earlier spans are forgotten.
        """
        # Copied: if the append is refused, the state in memory must not change.
        by_queue: dict[int, list[Span]] = {
            queue: [span for span in spans if span[1] > kept_from.get(queue, 0)]
            for queue, spans in self._kept.values.get(group, {}).items()
        }
        for queue, offset in positions:
            by_queue.setdefault(queue, []).append((offset, offset + 1))
        found = {queue: joined(spans) for queue, spans in by_queue.items()}
        # Bounded, because each change writes all spans of the group, and a snapshot repeats them.
        if sum(map(len, found.values())) > limits.DEAD_LETTER_SPANS_MAX:
            raise OverLimit(
                f"group {group!r} has more than {limits.DEAD_LETTER_SPANS_MAX} gaps among its dead letters: resend or "
                "delete the oldest ones first"
            )
        return self._kept.changed([(group, {queue: spans for queue, spans in found.items() if spans})])

    def forget(self, group: str) -> None:
        """Forget a group whose dead letters have been deleted with their topic."""
        if group in self._kept.values:
            self._kept.put([(group, None)])


class Run(NamedTuple):
    """Dead letters `offset`, `offset` + 1, … that the rows `seq`, `seq` + 1, … repeat."""

    offset: int  # of the first one in its queue
    seq: int  # of the first row that repeats them
    rows: int  # both offsets and sequence numbers are consecutive
    size_bytes: int
    died_ms: int  # time of the last of them

    @property
    def end(self) -> int:
        """The offset after the last of them."""
        return self.offset + self.rows


Runs = dict[int, list[Run]]  # by queue


class RepeatedDeadLetters:
    """The rows that repeat dead letters which retention has removed. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, "repeated", Runs)

    def runs(self, group: str, queue: int) -> list[Run]:
        """Return the repeated dead letters of a queue, in order."""
        return self._kept.values.get(group, {}).get(queue, [])

    def queues(self, group: str) -> Iterable[int]:
        """Return the queues with repeated dead letters."""
        return self._kept.values.get(group, {})

    def find_seq(self, group: str, queue: int, offset: int) -> int | None:
        """Find the row that repeats a dead letter, or None if there is none."""
        # Runs are disjoint and in order, so only the last one that begins at or before the offset can contain it.
        runs = self.runs(group, queue)
        at = bisect_right(runs, offset, key=lambda run: run.offset) - 1
        return runs[at].seq + offset - runs[at].offset if at >= 0 and offset < runs[at].end else None

    @property
    def size_bytes(self) -> int:
        """The size of all repeated dead letters, in bytes."""
        return sum(run.size_bytes for _, _, run in self._all())

    def by_age(self) -> list[tuple[str, int, Run]]:
        """List all runs with their groups and queues, in the order of `died_ms`."""
        return sorted(self._all(), key=lambda one: one[2].died_ms)

    def _all(self) -> Iterator[tuple[str, int, Run]]:
        for group, queues in self._kept.values.items():
            for queue, runs in queues.items():
                for run in runs:
                    yield group, queue, run

    def changed(
        self,
        dropped: Mapping[str, Iterable[Position]],
        added: Iterable[tuple[str, int, Run]] = (),
    ) -> Change:
        """Build the rows that drop these positions of each group and add these runs."""
        found: dict[str, Runs] = {}
        for group, positions in dropped.items():
            found[group] = self._without(group, positions)
        for group, queue, run in added:
            # A group may have both dropped positions and added runs.
            runs = found.setdefault(group, self._without(group, ()))
            runs[queue] = sorted([*runs.get(queue, []), run])
        return self._kept.changed(
            [
                # Without any run left, the group's key is deleted.
                (group, {q: runs for q, runs in queues.items() if runs} or None)
                for group, queues in found.items()
            ]
        )

    def forget(self, group: str) -> None:
        """Forget a group whose dead letters have been deleted with their topic."""
        if group in self._kept.values:
            self._kept.put([(group, None)])

    def _without(self, group: str, positions: Iterable[Position]) -> Runs:
        # Copied: if the append is refused, the state in memory must not change.
        found = {queue: list(runs) for queue, runs in self._kept.values.get(group, {}).items()}
        spans: dict[int, list[Span]] = {}
        for queue, offset in positions:
            spans.setdefault(queue, []).append((offset, offset + 1))
        for queue, of_queue in spans.items():
            if queue in found:
                gone = joined(of_queue)
                found[queue] = [
                    _part(run, *span) for run in found[queue] for span in left_of((run.offset, run.end), gone)
                ]
        return found


def left_of(span: Span, done: Iterable[Span]) -> Iterator[Span]:
    """Yield the parts of a span that are not in `done`, whose spans are disjoint and in order."""
    begin, end = span
    # The empty span at the end yields the part after the last span.
    for low, high in [*done, (end, end)]:
        if begin < min(low, end):
            yield begin, min(low, end)
        begin = max(begin, high)


def _part(run: Run, begin: int, end: int) -> Run:
    # The sizes of single messages are not known, so each counts as an average one.
    size_bytes = run.size_bytes * (end - begin) // run.rows
    return Run(begin, run.seq + begin - run.offset, end - begin, size_bytes, run.died_ms)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Merge positions into disjoint spans in order.

    >>> joined([(4, 5), (1, 2), (2, 3)])
    [(1, 3), (4, 5)]
    """
    found: list[Span] = []
    # Adjacent spans are merged: resends go through a queue in order, so they leave a single span.
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
