"""Retention and unread messages: keep old segments for unread messages, and report messages that expire unread.

A segment that is older than the retention is kept while it contains a message that a consumer group with a stored
offset has not read. Two settings limit this: `unread_retention_ms`, the age of the segment, and `kept_bytes`, the bytes
of all kept segments and repeated dead letters. The log is a sequence of segments without gaps, so one unread message
keeps its segment and all later ones. Dead letters are repeated at the end of the log (dead_letters.py), unread messages
are not. A group that was down over a long weekend may have millions of unread messages, and their copies would take
more disk space than the segments.

Messages that expire unread are counted by group and topic (registry/dead_letters.py), and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from timeball.broker.registry.dead_letters import Expiry
from timeball.broker.registry.rates import shares
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topics import Topic
from timeball.io.clock import SchedulerClock
from timeball.log.queue_index import QueueIndex
from timeball.log.segment import Segment
from timeball.model.config import Settings

logger = logging.getLogger(__name__)

LOGGED_MAX = 100  # log lines per pass; one more line sums up all others


class _Unread(NamedTuple):
    """The oldest row that a group has not read."""

    seq: int
    group: str
    topic: str


_NO_ROW = 1 << 62  # a number beyond all rows


class Retention:
    """Decides which old segments may be removed, by the unread messages in them. Belongs to the event loop."""

    def __init__(self, *, settings: Settings, clock: SchedulerClock, tables: Tables) -> None:
        self._settings, self._clock, self._tables = settings, clock, tables
        # The group, topic and segment of the last log line, so that it is not repeated.
        self._last_reported: tuple[str, str, int] | None = None

    async def select_removable(self, segments: list[Segment], stale_count: int) -> list[Segment]:
        """Select the segments that no unread message keeps. Returns the first ones of `segments`.

        `segments` are the oldest ones of the log, all older than the retention. The first `stale_count` of them are
        also older than `unread_retention_ms`, so they are always selected.
        """
        unread = (
            await self._oldest_unread(segments[stale_count].first_seq, segments[-1].next_seq)
            if stale_count < len(segments)
            else None
        )
        if unread is None:
            return segments
        first_kept = _segment_index(segments, unread.seq)
        forced = first_kept + self._count_excess(segments[first_kept:], self._bytes_max())
        if forced > first_kept:
            # The segments before `forced` are removed in spite of unread messages, because of `kept_bytes`. So search
            # for the oldest unread message after them.
            unread = (
                await self._oldest_unread(segments[forced].first_seq, segments[-1].next_seq)
                if forced < len(segments)
                else None
            )
            if unread is None:
                return segments
            first_kept = _segment_index(segments, unread.seq)
        self._report_kept(unread, segments[first_kept:])
        return segments[:first_kept]

    async def count_expired(self, before_seq: int) -> None:
        """Count the unread messages in rows before `before_seq`, which retention will remove, by group and topic.

        Appends the counts to the log without waiting for the disk, and writes log lines.
        """
        expiries = list[Expiry]()
        offsets_by_group, lost_ranges = self._tables.offsets.table, dict[tuple[str, int], tuple[int, int]]()
        async for groups in shares(offsets_by_group):
            for group in groups:
                for name, offsets in offsets_by_group.get(group, {}).items():
                    topic = self._tables.topics.find_topic(name)
                    if topic is not None:
                        expiries += self._count_lost(group, topic, offsets, before_seq, lost_ranges)
        # Most passes remove no unread messages, and write no row.
        if expiries:
            self._tables.expired.add(expiries, self._clock.now_ms())
            log_expired(expiries)

    # -- segments --------------------------------------------------------------------------------------------------

    def _bytes_max(self) -> int | None:
        """Compute how many bytes of segments may be kept for unread messages. None: no limit."""
        bytes_max = self._settings.kept_bytes
        return max(0, bytes_max - self._tables.repeated_dead_letters.size_bytes) if bytes_max else None

    def _count_excess(self, segments: Sequence[Segment], bytes_max: int | None) -> int:
        """Count the oldest segments to remove so that the others have at most `bytes_max` bytes. None: no limit."""
        count, left_bytes = 0, sum(segment.end for segment in segments)
        while bytes_max is not None and count < len(segments) and left_bytes > bytes_max:
            left_bytes -= segments[count].end
            count += 1
        return count

    async def _oldest_unread(self, from_seq: int, to_seq: int) -> _Unread | None:
        """Find the oldest row in [from_seq, to_seq) that any group has not read. None if there is none."""
        oldest: _Unread | None = None
        offsets_by_group = self._tables.offsets.table
        async for groups in shares(offsets_by_group):
            for group in groups:
                # A deleted group's offsets stay in case it is created again, but keep no messages until then.
                if self._is_deleted(group):
                    continue
                for name, offsets in list(offsets_by_group.get(group, {}).items()):
                    topic = self._tables.topics.find_topic(name)
                    seq = _NO_ROW if topic is None else _first_unread(topic, offsets, from_seq)
                    if seq < to_seq and (oldest is None or seq < oldest.seq):
                        oldest = _Unread(seq, group, name)
        return oldest

    def _is_deleted(self, group: str) -> bool:
        """Check whether an operator has deleted a group, and it was not created again."""
        return self._tables.expired.is_deleted(group) and self._tables.groups.find_group(group) is None

    def _count_lost(
        self,
        group: str,
        topic: Topic,
        offsets: dict[int, int],
        before_seq: int,
        lost_ranges: dict[tuple[str, int], tuple[int, int]],
    ) -> list[Expiry]:
        """Count the messages of a topic that a group with these offsets (by queue) loses. Returns one Expiry, or none.

        `lost_ranges` caches the offsets [begin, end) of the rows before `before_seq`, by topic and queue.
        """
        counted_to = self._tables.expired.counted_to(group, topic.name)
        rows, counted_ends = 0, dict[int, int]()
        for queue, offset in offsets.items():
            # Offsets of queues that the topic no longer has stay stored.
            if queue >= len(topic.queues):
                continue
            if (key := (topic.name, queue)) not in lost_ranges:
                index = topic.queues[queue].index
                lost_ranges[key] = index.min_offset, index.first_offset_from_seq(before_seq, hidden=True)
            begin, end = lost_ranges[key]
            # After a crash between count and removal, messages that were counted exist again. `counted_to` prevents a
            # second count.
            lost = end - max(offset, begin, counted_to.get(queue, 0))
            if lost > 0:
                rows += lost
                counted_ends[queue] = end
        return [Expiry(group, topic.name, rows, counted_ends)] if rows else []

    def _report_kept(self, unread: _Unread, kept_segments: Sequence[Segment]) -> None:
        """Log that these segments are kept for an unread message."""
        reported = unread.group, unread.topic, kept_segments[0].ordinal
        # Once per segment, because retention runs every minute.
        if reported != self._last_reported:
            self._last_reported = reported
            size_bytes = sum(segment.end for segment in kept_segments)
            logger.warning(
                "log kept beyond the retention for unread messages group=%s topic=%s bytes=%d",
                unread.group, unread.topic, size_bytes,
            )  # fmt: skip


def log_expired(expiries: Sequence[Expiry], *, are_dead_letters: bool = False) -> None:
    """Log messages or dead letters that groups have lost, with at most LOGGED_MAX + 1 lines."""
    # One line per group and topic could be a hundred thousand lines.
    more_expiries = expiries[LOGGED_MAX:]
    for group, topic, rows, _ in expiries[:LOGGED_MAX]:
        if are_dead_letters:
            logger.warning("dead letters expired group=%s rows=%d", group, rows)
        else:
            logger.warning("unread messages expired group=%s topic=%s rows=%d", group, topic, rows)
    if more_expiries:
        rows = sum(expiry.rows for expiry in more_expiries)
        logger.warning("more messages expired groups=%d rows=%d", len(more_expiries), rows)


def count_unread(topic: Topic, offsets: dict[int, int]) -> int:
    """Count the messages of a topic from these offsets (by queue) on. Queues that no longer exist are ignored."""
    return sum(
        max(0, index.end_offset - max(offset, index.min_offset))
        for queue, offset in offsets.items()
        if queue < len(topic.queues)
        for index in (topic.queues[queue].index,)
    )


def _segment_index(segments: Sequence[Segment], seq: int) -> int:
    """Find the index of the segment that contains a row."""
    return next(index for index, segment in enumerate(segments) if seq < segment.next_seq)


def _first_unread(topic: Topic, offsets: dict[int, int], from_seq: int) -> int:
    """Find the oldest unread row at or after `from_seq`, according to these offsets. _NO_ROW if there is none."""
    return min(
        (
            _seq_at(topic.queues[queue].index, offset, from_seq)
            for queue, offset in offsets.items()
            if queue < len(topic.queues)
        ),
        default=_NO_ROW,
    )


def _seq_at(index: QueueIndex, offset: int, from_seq: int) -> int:
    """Find the number of the first row of a queue from `offset` and from `from_seq` on. _NO_ROW if there is none."""
    first_offset = index.first_offset_from_seq(from_seq, offset, hidden=True)
    if first_offset >= index.end_offset:
        return _NO_ROW
    return int(index.read(first_offset, 1, hidden=True)["seq"][0])
