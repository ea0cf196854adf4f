"""Retention and unread messages: choose the old segments to keep for them, and report messages that expire unread.

A segment that is older than the retention is kept while it contains a message that a consumer group with a stored
offset has not read. Two settings limit this: the age of the segment (`unread_retention_ms`), and the bytes of all such
segments, including dead letters (`kept_bytes`). The log is a sequence of segments without gaps, so one unread message
keeps its segment and all later ones. Unread messages are not repeated as dead letters are (dead_letters.py). A group
that was down over a long weekend may have millions of unread messages, and their copies would take more disk than the
segments.

Messages that expire unread are counted by group and topic (registry/expired.py), and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from timeball.broker.registry.expired import Expiry
from timeball.broker.registry.rates import shares
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topic import Topic
from timeball.io.clock import SchedulerClock
from timeball.log.queue_index import QueueIndex
from timeball.log.segment import Segment
from timeball.model.config import Settings

logger = logging.getLogger(__name__)

LOGGED_MAX = 100  # log lines per pass; one more line sums up the rest


class _Unread(NamedTuple):
    """The oldest row that a group has not read."""

    seq: int
    group: str
    topic: str


_NO_ROW = 1 << 62  # a number beyond all rows


class Retention:
    """Decides about unread messages. Belongs to the event loop."""

    def __init__(self, *, settings: Settings, clock: SchedulerClock, tables: Tables) -> None:
        self._settings, self._clock, self._tables = settings, clock, tables
        self._told: tuple[str, str, int] | None = (
            None  # the group, topic and segment of the last log line, so that it is not repeated
        )

    async def may_go(self, old: list[Segment]) -> list[Segment]:
        """Select from the oldest segments, which retention may remove, those that no unread message keeps."""
        # Segments that are too old go first, so that the search below begins after them.
        at = self._forced(old, None)
        unread = await self._oldest_unread(old[at].first_seq, old[-1].next_seq) if at < len(old) else None
        if unread is None:
            return old
        first = _holding(old, unread.seq)
        if (at := self._forced(old[first:], self._bytes_max()) + first) > first:
            # Some segments go unread because of `kept_bytes`. Search again after them.
            unread = await self._oldest_unread(old[at].first_seq, old[-1].next_seq) if at < len(old) else None
            if unread is None:
                return old
            first = _holding(old, unread.seq)
        self._tell_kept(unread, old[first:])
        return old[:first]

    async def count_expired(self, before_seq: int) -> None:
        """Count, by group and topic, the unread messages that retention will remove, and log them.

        These are the messages in rows before `before_seq`. Does not wait for the sync of the counts.
        """
        found = list[Expiry]()
        table, ends = self._tables.offsets.table, dict[tuple[str, int], tuple[int, int]]()
        async for groups in shares(table):
            for group in groups:
                for name, offsets in table.get(group, {}).items():
                    topic = self._tables.topics.find_topic(name)
                    if topic is not None:
                        found += self._expiry(group, topic, offsets, before_seq, ends)
        # Most passes remove no unread messages, and write no row.
        if found:
            self._tables.expired.add(found, self._clock.now_ms())
            log_expired(found)

    # -- inside --------------------------------------------------------------------------------------------------

    def _bytes_max(self) -> int | None:
        """Compute the bytes of segments that may be kept for unread messages. None: no limit."""
        bytes_max = self._settings.kept_bytes
        return max(0, bytes_max - self._tables.repeated_dead_letters.size_bytes) if bytes_max else None

    def _forced(self, old: Sequence[Segment], bytes_max: int | None) -> int:
        """Count the segments that go regardless of their content. With `bytes_max` None, only their age decides."""
        settings = self._settings
        stale_ms = self._clock.now_ms() - settings.unread_retention_ms
        count = next((at for at, one in enumerate(old) if one.newest_append_ms > stale_ms), len(old))
        left_bytes = sum(segment.end for segment in old[count:])
        # Remove the oldest segments until the rest fits.
        while bytes_max is not None and count < len(old) and left_bytes > bytes_max:
            left_bytes -= old[count].end
            count += 1
        return count

    async def _oldest_unread(self, from_seq: int, to_seq: int) -> _Unread | None:
        """Find the oldest row in [from_seq, to_seq) that a group has not read."""
        found: _Unread | None = None
        table = self._tables.offsets.table
        async for groups in shares(table):
            for group in groups:
                # A deleted group's offsets stay in case it is created again, but keep no messages until then.
                if self._is_deleted(group):
                    continue
                for name, offsets in list(table.get(group, {}).items()):
                    topic = self._tables.topics.find_topic(name)
                    seq = _NO_ROW if topic is None else _first_unread(topic, offsets, from_seq)
                    if seq < to_seq and (found is None or seq < found.seq):
                        found = _Unread(seq, group, name)
        return found

    def _is_deleted(self, group: str) -> bool:
        # A deleted group may have been created again.
        return self._tables.expired.is_deleted(group) and self._tables.groups.find_group(group) is None

    def _expiry(
        self,
        group: str,
        topic: Topic,
        offsets: dict[int, int],
        before_seq: int,
        ends: dict[tuple[str, int], tuple[int, int]],
    ) -> list[Expiry]:
        """Count the messages of a topic that a group loses. `ends` caches the offset ranges before the row by queue."""
        counted_to, rows, new = self._tables.expired.counted_to(group, topic.name), 0, dict[int, int]()
        for queue, offset in offsets.items():
            # Offsets of queues that the topic no longer has stay stored.
            if queue >= len(topic.queues):
                continue
            if (key := (topic.name, queue)) not in ends:
                index = topic.queues[queue].index
                ends[key] = index.min_offset, index.first_at(before_seq)
            begin, end = ends[key]
            # After a crash between count and removal, messages that were counted exist again. `counted_to` prevents a
            # second count.
            lost = end - max(offset, begin, counted_to.get(queue, 0))
            if lost > 0:
                rows += lost
                new[queue] = end
        return [Expiry(group, topic.name, rows, new)] if rows else []

    def _tell_kept(self, unread: _Unread, kept: Sequence[Segment]) -> None:
        told = unread.group, unread.topic, kept[0].ordinal
        # Log once per segment, because the pass runs every minute.
        if told != self._told:
            self._told = told
            size_bytes = sum(segment.end for segment in kept)
            logger.warning(
                "log kept beyond the retention for unread messages group=%s topic=%s bytes=%d",
                unread.group, unread.topic, size_bytes,
            )  # fmt: skip


def log_expired(found: Sequence[Expiry], *, dead: bool = False) -> None:
    """Log messages or dead letters that groups have lost, with at most LOGGED_MAX + 1 lines."""
    # One line per group and topic could be a hundred thousand lines.
    rest = found[LOGGED_MAX:]
    for group, topic, rows, _ in found[:LOGGED_MAX]:
        if dead:
            logger.warning("dead letters expired group=%s rows=%d", group, rows)
        else:
            logger.warning("unread messages expired group=%s topic=%s rows=%d", group, topic, rows)
    if rest:
        logger.warning("more messages expired groups=%d rows=%d", len(rest), sum(one.rows for one in rest))


def unread(topic: Topic, offsets: dict[int, int]) -> int:
    """Count the messages of a topic after these offsets. Offsets of queues that no longer exist count as none."""
    return sum(
        max(0, index.max_offset - max(offset, index.min_offset))
        for queue, offset in offsets.items()
        if queue < len(topic.queues)
        for index in (topic.queues[queue].index,)
    )


def _holding(old: Sequence[Segment], seq: int) -> int:
    """Find the position of the segment that contains a row."""
    return next(at for at, segment in enumerate(old) if seq < segment.next_seq)


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
    at = index.first_at(from_seq, offset)
    return int(index.read(at, 1)["seq"][0]) if at < index.max_offset else _NO_ROW
