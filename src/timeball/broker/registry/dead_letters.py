"""State of dead letters and of expired messages, as META rows.

dead/<group>        positions of dead letters that operators have resolved (resent or deleted):
                    {queue: [[begin, end], …]}, disjoint and ascending, end exclusive
repeated/<group>    positions of dead letters whose rows retention has removed, and the later rows that repeat them:
                    {queue: [[offset, seq, rows, bytes, died_ms], …]}, disjoint and in order
expired/<group>     counts of the messages that retention has removed before the group read them:
                    {"topics": {topic: {"rows", "at_ms", "counted_to": {queue: offset}}}, "is_deleted"}

Offsets of dead letters are those in the queues of `%DLQ%<group>`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.model import limits
from timeball.model.errors import OverLimit

Span = tuple[int, int]  # positions [begin, end)
Position = tuple[int, int]  # queue, offset


class ResolvedDeadLetters:
    """The dead letters that operators have resolved. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "dead", dict[int, list[Span]])

    def spans(self, group: str, queue: int) -> list[Span]:
        """List the resolved positions of a queue as spans, disjoint and in order."""
        return self._table.values.get(group, {}).get(queue, [])

    def open_spans(self, group: str, queue: int, begin: int, end: int) -> Iterator[Span]:
        """Yield the unresolved parts of a queue's positions [begin, end), in order."""
        for resolved_begin, resolved_end in self.spans(group, queue):
            if resolved_end <= begin:
                continue
            if resolved_begin >= end:
                break
            if resolved_begin > begin:
                yield begin, resolved_begin
            begin = resolved_end
        if begin < end:
            yield begin, end

    def build_change(self, group: str, positions: Iterable[Position], min_offsets: dict[int, int]) -> Change:
        """Build the row that marks more positions as resolved. Raises OverLimit for too many spans.

        `min_offsets`: the first offset of each queue that the log still contains. Earlier spans are forgotten.
        """
        # Copied: if the append is refused, the state in memory must not change.
        by_queue: dict[int, list[Span]] = {
            queue: [span for span in spans if span[1] > min_offsets.get(queue, 0)]
            for queue, spans in self._table.values.get(group, {}).items()
        }
        for queue, offset in positions:
            by_queue.setdefault(queue, []).append((offset, offset + 1))
        merged = {queue: join_spans(spans) for queue, spans in by_queue.items()}
        # Bounded, because each change writes all spans of the group, and a snapshot repeats them.
        if sum(map(len, merged.values())) > limits.DEAD_LETTER_SPANS_MAX:
            raise OverLimit(
                f"group {group!r} has more than {limits.DEAD_LETTER_SPANS_MAX} gaps among its dead letters: resend or "
                "delete the oldest ones first"
            )
        return self._table.build_change([(group, {queue: spans for queue, spans in merged.items() if spans})])

    def forget(self, group: str) -> None:
        """Forget a group whose dead letters have been deleted with their topic."""
        if group in self._table.values:
            self._table.put([(group, None)])


class Run(NamedTuple):
    """Consecutive dead letters. The row `seq` + i repeats the dead letter at `offset` + i."""

    offset: int  # of the first dead letter in its queue
    seq: int  # of the first row that repeats them
    rows: int  # number of dead letters
    size_bytes: int
    died_ms: int  # time of the last of them

    @property
    def end(self) -> int:
        """The offset after the last dead letter."""
        return self.offset + self.rows


class GroupRun(NamedTuple):
    """A run with its group and queue."""

    group: str
    queue: int
    run: Run


Runs = dict[int, list[Run]]  # by queue


class RepeatedDeadLetters:
    """The rows that repeat dead letters which retention has removed. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "repeated", Runs)

    def runs(self, group: str, queue: int) -> list[Run]:
        """List the repeated dead letters of a queue, in order."""
        return self._table.values.get(group, {}).get(queue, [])

    def queues(self, group: str) -> Iterable[int]:
        """List the queues with repeated dead letters."""
        return self._table.values.get(group, {})

    def find_seq(self, group: str, queue: int, offset: int) -> int | None:
        """Find the row (seq) that repeats a dead letter, or None if there is none."""
        # Runs are disjoint and in order, so only the last one that begins at or before the offset can contain it.
        runs = self.runs(group, queue)
        index = bisect_right(runs, offset, key=lambda run: run.offset) - 1
        return (
            runs[index].seq + offset - runs[index].offset if index >= 0 and offset < runs[index].end else None
        )

    @property
    def size_bytes(self) -> int:
        """The size of all repeated dead letters, in bytes."""
        return sum(run.size_bytes for _, _, run in self._all())

    def by_age(self) -> list[GroupRun]:
        """List all runs, in the order of `died_ms`."""
        return sorted(self._all(), key=lambda entry: entry.run.died_ms)

    def _all(self) -> Iterator[GroupRun]:
        """Yield the runs of all groups and queues."""
        for group, queues in self._table.values.items():
            for queue, runs in queues.items():
                for run in runs:
                    yield GroupRun(group, queue, run)

    def build_change(
        self,
        dropped: Mapping[str, Iterable[Position]],
        added: Iterable[tuple[str, int, Run]] = (),
    ) -> Change:
        """Build the rows that drop these positions of each group, and then add these runs as (group, queue, run)."""
        new_runs: dict[str, Runs] = {}
        for group, positions in dropped.items():
            new_runs[group] = self._without(group, positions)
        for group, queue, run in added:
            # A group may have dropped positions as well as added runs.
            runs = new_runs.setdefault(group, self._without(group, ()))
            runs[queue] = sorted([*runs.get(queue, []), run])
        return self._table.build_change(
            [
                # Without any run left, the group's key is deleted.
                (group, {queue: runs for queue, runs in queues.items() if runs} or None)
                for group, queues in new_runs.items()
            ]
        )

    def forget(self, group: str) -> None:
        """Forget a group whose dead letters have been deleted with their topic."""
        if group in self._table.values:
            self._table.put([(group, None)])

    def _without(self, group: str, positions: Iterable[Position]) -> Runs:
        """Build a group's runs without these positions. A run with a gap becomes several runs."""
        # Copied: if the append is refused, the state in memory must not change.
        remaining = {queue: list(runs) for queue, runs in self._table.values.get(group, {}).items()}
        spans: dict[int, list[Span]] = {}
        for queue, offset in positions:
            spans.setdefault(queue, []).append((offset, offset + 1))
        for queue, queue_spans in spans.items():
            if queue in remaining:
                dropped_spans = join_spans(queue_spans)
                remaining[queue] = [
                    _slice_run(run, *span)
                    for run in remaining[queue]
                    for span in subtract_spans((run.offset, run.end), dropped_spans)
                ]
        return remaining


def subtract_spans(span: Span, removed: Iterable[Span]) -> Iterator[Span]:
    """Yield the parts of a span that are not in `removed`, whose spans are disjoint and in order."""
    begin, end = span
    # The empty span at the end yields the part after the last span.
    for removed_begin, removed_end in [*removed, (end, end)]:
        if begin < min(removed_begin, end):
            yield begin, min(removed_begin, end)
        begin = max(begin, removed_end)


def _slice_run(run: Run, begin: int, end: int) -> Run:
    """Build the part of a run with the offsets [begin, end)."""
    # The sizes of single messages are unknown, so each counts with the average size.
    size_bytes = run.size_bytes * (end - begin) // run.rows
    return Run(begin, run.seq + begin - run.offset, end - begin, size_bytes, run.died_ms)


def join_spans(spans: Iterable[Span]) -> list[Span]:
    """Merge spans, in any order, into disjoint spans in order. Adjacent spans are merged, too.

    >>> join_spans([(4, 5), (1, 2), (2, 3)])
    [(1, 3), (4, 5)]
    """
    merged: list[Span] = []
    # Resends go through a queue in order, so they leave a single span.
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


# ---- messages that expired before a group read them ----------------------------------------------------------
# The row is appended before the messages are removed. After a crash between the two, retention examines the same
# messages again, and `counted_to` shows which of them have been counted. Dead letters are counted under the topic
# `%DLQ%<group>`.


class ExpiredTopic(msgspec.Struct, frozen=True, omit_defaults=True):
    """The expired messages of one topic: their number, the time of the last expiry, and the offsets counted so far."""

    rows: int
    at_ms: int  # of the last expiry
    counted_to: dict[int, int] = {}


class ExpiredFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The expired messages of a group, by topic. `is_deleted`: an operator deleted the group, but kept its offsets."""

    topics: dict[str, ExpiredTopic] = {}
    is_deleted: bool = False


class Expiry(NamedTuple):
    """Messages that expire now. `counted_to` contains, by queue, the offset after the last of them."""

    group: str
    topic: str
    rows: int
    counted_to: Mapping[int, int]  # only queues with messages that expire now


class ExpiredMessages:
    """Counts of expired messages. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "expired", ExpiredFacts)

    def groups(self) -> dict[str, ExpiredFacts]:
        """List all groups that lost messages, by name. The result is read-only."""
        return self._table.values

    def topics(self, group: str) -> dict[str, ExpiredTopic]:
        """List the topics in which a group lost messages, by name. The result is read-only."""
        facts = self._table.values.get(group)
        return {} if facts is None else facts.topics

    def counted_to(self, group: str, topic: str) -> dict[int, int]:
        """Find, by queue, the offset up to which the expired messages of a group have been counted."""
        expired_topic = self.topics(group).get(topic)
        return {} if expired_topic is None else expired_topic.counted_to

    def is_deleted(self, group: str) -> bool:
        """Check whether an operator deleted this group but kept its offsets."""
        facts = self._table.values.get(group)
        return facts is not None and facts.is_deleted

    def build_change(self, expiries: Iterable[Expiry], now_ms: int) -> Change:
        """Build the rows that count these messages, for a frame with other rows."""
        return self._table.build_change(self._updated_values(expiries, now_ms))

    def add(self, expiries: Iterable[Expiry], now_ms: int) -> None:
        """Append the rows that count these messages, in a frame of their own."""
        self._table.put(self._updated_values(expiries, now_ms))

    def note_deleted(self, group: str, *, keeps_offsets: bool) -> None:
        """Forget the counts of a group that an operator has deleted. With `keeps_offsets`, mark it as deleted."""
        # The mark makes retention ignore the kept offsets until the group is created again.
        if keeps_offsets or group in self._table.values:
            self._table.put([(group, ExpiredFacts(is_deleted=True) if keeps_offsets else None)])

    def _updated_values(
        self, expiries: Iterable[Expiry], now_ms: int
    ) -> list[tuple[str, ExpiredFacts | None]]:
        """Build the new value of each group, by name: the counts so far plus these messages."""
        changed: dict[str, dict[str, ExpiredTopic]] = {}
        for group, topic, rows, counted_to in expiries:
            # A copy, because a refused append must not change the state in memory.
            topics = changed.setdefault(group, dict(self.topics(group)))
            before = topics.get(topic, ExpiredTopic(0, 0))
            # Offsets never decrease: a topic that is deleted and created again continues with the next offset.
            topics[topic] = ExpiredTopic(before.rows + rows, now_ms, {**before.counted_to, **counted_to})
        return [
            (group, ExpiredFacts(_drop_oldest(topics), self.is_deleted(group)))
            for group, topics in changed.items()
        ]


def _drop_oldest(topics: dict[str, ExpiredTopic]) -> dict[str, ExpiredTopic]:
    """Drop the oldest counts beyond the limit, because each change writes all topics of the group."""
    # Sorted by the time of the last change, oldest first.
    names = sorted(topics, key=lambda name: topics[name].at_ms)
    return {name: topics[name] for name in names[-limits.EXPIRED_TOPICS_MAX :]}
