"""Count the messages that are due in each second, minute, hour or day, by topic.

All callers share the counts. A count covers all topics, and an answer leaves out the topics that the caller may not
see. A count is reused for `FRESH_S`, or for ten times as long as it took. So the dashboards together use at most a
tenth of the background thread. The window of a count extends a little beyond the request, because the next request
begins later.

Counting reads due times and topics from the table, but nothing of a row group that is within one bucket and has one
topic. It reads message numbers only where some rows may be settled, and other columns only where rows may belong to a
selection. Messages that a paused campaign or a selection holds are not due and not counted.

Occurrences of recurring schedules that are no messages yet are counted separately (recurring_load.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.broker.pending.recurring_load import RecurringCounting, TopicsOfTexts, Window
from timeball.broker.pending.snapshot import (
    Codes,
    DescribedPart,
    Logged,
    Snapshot,
    Snapshots,
    TopicCodes,
    described_in_group,
    described_in_log,
    is_shown,
    scan,
    view_of,
)
from timeball.broker.policy import Policy
from timeball.broker.registry.schedule_columns import Planned
from timeball.broker.registry.schedules import Schedules
from timeball.broker.registry.selections import LAST_MS, Selected, Selections
from timeball.broker.tables.memory import give_back
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.answers import BucketUnit, DueCounts, RecurringCounts
from timeball.model.errors import OutOfRange, OverLimit, Unavailable
from timeball.model.message import Int64Array
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile

UNITS: dict[BucketUnit, int] = {
    "second": limits.SECOND_MS, "minute": limits.MINUTE_MS, "hour": limits.HOUR_MS, "day": limits.DAY_MS
}  # fmt: skip
# The default length of a window, in buckets: five minutes, two hours, two days, two months.
_DEFAULT_BUCKETS: dict[BucketUnit, int] = {"second": 300, "minute": 120, "hour": 48, "day": 60}
_SPARE_MS = 60_000  # how far a count's window extends beyond the request
FRESH_S, TIMES_ITS_COST = 2.0, 10.0  # how long a count is reused: the longer of both
COUNTS_MAX = 16  # windows kept for reuse
PAIRS_MAX = 1_000_000  # pairs of a topic and a bucket with messages in one count: 16 bytes each, three times


@dataclass(frozen=True, slots=True)
class _Count:
    """The number of due messages for each topic and bucket with messages.

    `pairs` and `due` are parallel columns, sorted by pair. A pair encodes a topic and a bucket as one number: the
    topic's code times the number of buckets, plus the bucket.
    """

    width_ms: int
    from_ms: int
    to_ms: int
    counted_ms: int  # time of the snapshot, not of the answer
    until_s: float  # on the loop's clock: reused until then
    selected: Selected  # reused until a selection changes
    pairs: Int64Array
    due: Int64Array  # number of messages of each pair
    recurring: RecurringCounting | None  # None: occurrences were not requested

    @property
    def buckets(self) -> int:
        return (self.to_ms - self.from_ms) // self.width_ms

    def covers(self, window: Window, now_s: float, selected: Selected, *, recurring: bool) -> bool:
        """Check whether the count has this bucket width, contains the window, and may still be reused.

        With `recurring` it must also have the occurrences.
        """
        is_within = self.from_ms <= window.from_ms and window.to_ms <= self.to_ms
        is_fresh = now_s < self.until_s and self.selected is selected
        has_all = self.recurring is not None or not recurring
        return self.width_ms == window.width_ms and is_within and is_fresh and has_all


class Forecast:
    """Counts of the messages that are due. Belongs to the event loop. The background thread reads log and table."""

    def __init__(
        self,
        policy: Policy,
        snapshots: Snapshots,
        *,
        clock: SchedulerClock,
        reader: LogReader,
        background: Executor,
        selections: Selections,
        schedules: Schedules,
    ) -> None:
        self._policy, self._snapshots, self._selections = policy, snapshots, selections
        self._clock, self._reader, self._background = clock, reader, background
        self._schedules, self._codes = schedules, TopicCodes()
        self._topics_of_texts = TopicsOfTexts(self._codes)
        self._counts: list[_Count] = []
        self._counting = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self.counts = 0  # number of counts made so far

    async def counted(
        self,
        by: BucketUnit,
        from_ms: int | None = None,
        to_ms: int | None = None,
        topic: str | None = None,
        caller: Caller = ANONYMOUS,
        *,
        recurring: bool = False,
    ) -> DueCounts:
        """Count the messages due in [from_ms, to_ms), for the topics that the caller may see, or only for `topic`.

        The window is widened to whole buckets. Without `from_ms` it begins now, and without `to_ms` it has a default
        length. With `recurring`, occurrences that are no messages yet are counted too. Raises Forbidden, NotFound,
        OutOfRange, OverLimit, and Unavailable if retention removed rows twice during the count.
        """
        self._policy.allow(caller, Verb.LOOK, topic=topic)
        width_ms = UNITS[by]
        from_ms = self._clock.now_ms() if from_ms is None else from_ms
        from_ms -= from_ms % width_ms
        to_ms = from_ms + _DEFAULT_BUCKETS[by] * width_ms if to_ms is None else to_ms
        to_ms += -to_ms % width_ms
        if not from_ms < to_ms <= from_ms + limits.FORECAST_BUCKETS_MAX * width_ms:
            raise OutOfRange(
                f"a window of {(to_ms - from_ms) // width_ms} buckets: 1 to {limits.FORECAST_BUCKETS_MAX}"
            )
        window = Window(from_ms, to_ms, width_ms)
        count = self._find_fresh(window, recurring=recurring)
        if count is None:
            # A separate task, because other callers wait for this count too. It continues when the first caller
            # disconnects.
            counting = self._count_once(window, recurring=recurring)
            count = await asyncio.shield(self._loop.create_task(counting))
        answer = self._build_answer(count, by, from_ms, to_ms, topic, caller)
        # After the count: a topic that was deleted may still have pending messages.
        self._policy.check_known(topic, has_messages=bool(answer.topics))
        return answer

    async def recurring(self, from_ms: int, to_ms: int, width_ms: int, caller: Caller) -> RecurringCounts:
        """Count the occurrences in [from_ms, to_ms) that are no messages yet, for the topics that the caller may see.

        The window is widened to whole buckets. Raises Forbidden, OutOfRange.
        """
        self._policy.allow(caller, Verb.LOOK)
        if not from_ms < to_ms <= limits.INSTANT_MS_MAX:
            raise OutOfRange(
                f"a window from {from_ms} to {to_ms}: an end after its begin, before the year 10000"
            )
        window = Window(from_ms - from_ms % width_ms, to_ms + -to_ms % width_ms, width_ms)
        async with self._counting:
            counting = await self._count_recurring(self._schedules.planned(), window)
        codes, buckets = counting.pairs // window.buckets, counting.pairs % window.buckets
        topics = {}
        for code in np.unique(codes).tolist():
            if self._policy.allows(caller, Verb.LOOK, topic=self._codes.names[code]):
                at_ms = window.from_ms + buckets[codes == code] * window.width_ms
                topics[self._codes.names[code]] = at_ms.tolist(), counting.due[codes == code].tolist()
        return RecurringCounts(counting.to_ms, topics)

    async def _count_recurring(self, planned: Planned, window: Window) -> RecurringCounting:
        """Count the occurrences of these schedules in the background thread, in steps."""
        counting = RecurringCounting(planned, window, self._topics_of_texts)
        steps = counting.steps()
        while await in_thread(self._background, next, steps, False):
            pass
        return counting

    def _find_fresh(self, window: Window, *, recurring: bool) -> _Count | None:
        """Find a count that may be reused for this window."""
        now_s, selected = self._loop.time(), self._selections.selected
        counts = (
            count for count in self._counts if count.covers(window, now_s, selected, recurring=recurring)
        )
        return next(counts, None)

    async def _count_once(self, window: Window, *, recurring: bool) -> _Count:
        """Count a window that is a little longer than the requested one. Only one count runs at a time."""
        async with self._counting:
            # Another caller may have counted while this one was waiting for the lock.
            fresh = self._find_fresh(window, recurring=recurring)
            if fresh is not None:
                return fresh
            # Windows of dashboards begin now. With spare time at the end, this count also covers the next window.
            width_ms, from_ms = window.width_ms, window.from_ms
            to_ms = window.to_ms + max(width_ms, _SPARE_MS - _SPARE_MS % width_ms)
            window = Window(from_ms, to_ms, width_ms)
            start_s = self._loop.time()
            snapshot, planned, (pairs, due_counts) = await self._count_window(window, recurring=recurring)
            recurring_counting = None if planned is None else await self._count_recurring(planned, window)
            self.counts += 1
            now_s = self._loop.time()
            # Measured from the end of the count, so that a slow count is not repeated at once.
            until_s = now_s + max(FRESH_S, TIMES_ITS_COST * (now_s - start_s))
            count = _Count(
                width_ms, from_ms, to_ms, snapshot.now_ms, until_s, snapshot.selected, pairs, due_counts,
                recurring_counting,
            )  # fmt: skip
            # The newest count comes first, so `_find_fresh` prefers it.
            fresh_counts = [earlier for earlier in self._counts if now_s < earlier.until_s]
            self._counts = [count, *fresh_counts[: COUNTS_MAX - 1]]
            return count

    async def _count_window(
        self, window: Window, *, recurring: bool
    ) -> tuple[Snapshot, Planned | None, tuple[Int64Array, Int64Array]]:
        """Count the messages of a snapshot.

        Returns the snapshot, the schedules of the same moment (None without `recurring`), and the result of
        `Counting.run`.
        Raises Unavailable if retention removed rows twice during the count.
        """
        for _ in range(2):
            async with self._snapshots.taken() as snapshot:
                # Of the same moment, so that an occurrence that becomes a message meanwhile is counted once.
                planned = self._schedules.planned() if recurring else None
                counting = Counting(
                    snapshot, self._codes, window, reader=self._reader, open_file=self._snapshots.open_file
                )
                try:
                    return snapshot, planned, await in_thread(self._background, counting.run)
                except OutOfRange:
                    # A row that a selection's condition needs is gone, so its message is settled or in a file.
                    continue
        raise Unavailable("retention removed rows twice during the count; ask again")

    def _build_answer(
        self, count: _Count, by: BucketUnit, from_ms: int, to_ms: int, topic: str | None, caller: Caller
    ) -> DueCounts:
        """Build the answer for a window within a count."""
        window, recurring = Window(from_ms, to_ms, count.width_ms), count.recurring
        occurrences: tuple[list[tuple[int, int]], dict[str, int]] = [], {}
        if recurring is not None:
            occurrences = self._sums(count, recurring.pairs, recurring.due, window, topic, caller)
        return DueCounts(
            by, from_ms, to_ms, count.counted_ms,
            *self._sums(count, count.pairs, count.due, window, topic, caller), *occurrences,
            to_ms if recurring is None else min(to_ms, max(from_ms, recurring.to_ms)),
        )  # fmt: skip

    def _sums(
        self,
        count: _Count,
        pairs: Int64Array,
        due: Int64Array,
        window: Window,
        topic: str | None,
        caller: Caller,
    ) -> tuple[list[tuple[int, int]], dict[str, int]]:
        """Sum the counts of a window by bucket (start in ms, number) and by topic, without empty buckets and topics.

        Only topics that the caller may see are included. `pairs` and `due` are the columns of `count`.
        """
        topic_codes, buckets = pairs // count.buckets, pairs % count.buckets
        begin, end = ((ms - count.from_ms) // count.width_ms for ms in (window.from_ms, window.to_ms))
        is_counted = (buckets >= begin) & (buckets < end)
        code_by_name = {}
        for code in np.unique(topic_codes[is_counted]).tolist():
            name = self._codes.names[code]
            if is_shown(name, topic) and self._policy.allows(caller, Verb.LOOK, topic=name):
                code_by_name[name] = code
        is_counted &= np.isin(topic_codes, np.array(list(code_by_name.values()), np.int64))
        # Only over the visible topics: messages of other topics are in neither sum.
        by_bucket = np.bincount(buckets[is_counted], due[is_counted]).astype(np.int64)
        by_topic = np.bincount(topic_codes[is_counted], due[is_counted]).astype(np.int64)
        buckets_from_ms = [
            (count.from_ms + bucket * count.width_ms, int(by_bucket[bucket]))
            for bucket in np.flatnonzero(by_bucket).tolist()
        ]
        return buckets_from_ms, {name: int(by_topic[code]) for name, code in sorted(code_by_name.items())}


class Counting:
    """One count over the log and the table of a snapshot. Belongs to the background thread."""

    def __init__(
        self,
        snapshot: Snapshot,
        codes: TopicCodes,
        window: Window,
        *,
        reader: LogReader,
        open_file: Callable[[FileEntry], DataFile],
    ) -> None:
        self._snapshot, self._codes, self._window = snapshot, codes, window
        self._reader, self._open_file = reader, open_file
        self._pairs: list[Int64Array] = []
        self._due_counts: list[Int64Array] = []
        self._pair_count = 0
        # Sorted once, because each row group is searched in it.
        self._settled_due = np.sort(snapshot.settled.due_ms)
        # Messages outside of the window may be due in it, because selections have changed their due times.
        self._read_from_ms = window.from_ms - snapshot.selected.later_ms
        self._read_to_ms = min(window.to_ms + snapshot.selected.earlier_ms, LAST_MS)

    def run(self) -> tuple[Int64Array, Int64Array]:
        """Count log and table. Returns the pairs of topic and bucket, ascending, and the number of messages of each.

        Raises OverLimit if there are too many pairs, OutOfRange if retention has removed a row that is needed.
        """
        self._count_log(self._reader)
        for entry in self._snapshot.entries:
            # Other files have no pending scheduled message in the window.
            if self._snapshot.first_ms(entry) < self._read_to_ms and entry.max_due_ms >= self._read_from_ms:
                self._count_file(self._open_file(entry))
        # Freed memory counts as the broker's until the allocators return it to the system.
        result = self._merge_pairs()
        give_back()
        return result

    # -- the log -------------------------------------------------------------------------------------------------

    def _count_log(self, reader: LogReader) -> None:
        """Count the messages of the log, each once, although it may have several rows."""
        begin_seq = max(self._snapshot.from_seq, reader.first_seq)
        rewritten_parts = []
        for rows in scan(reader, self._snapshot, begin_seq, self._codes):
            # A message is counted at the row that set its due time, its version. If that row has left the log, or was
            # compacted into the table, the message is counted at the last of its other rows.
            is_version = rows.row_seq == rows.seq
            first_version = np.where(rows.is_level, begin_seq, max(begin_seq, self._snapshot.watermark))
            if rewritten := rows.part(~is_version & (rows.seq < first_version)):
                rewritten_parts.append(rewritten)
            self._add_logged(rows.part(is_version))
        if rewritten_parts:
            self._add_logged(Logged.joined(rewritten_parts).sorted())

    def _add_logged(self, rows: Logged) -> None:
        """Add the pending messages among these messages of the log."""
        selected = self._snapshot.selected
        if not selected.is_empty:
            rows = rows.part(self._snapshot.are_pending(rows.due_ms, rows.seq))
            parts = described_in_log(selected, self._reader, rows, self._codes.names)
            self._add_changed(parts, rows.due_ms, rows.seq, rows.topic)
            return
        self._add_pending(rows.due_ms, rows.seq, rows.topic)

    def _add_changed(
        self, parts: Iterator[DescribedPart], due_ms: Int64Array, seq: Int64Array, topics: Codes
    ) -> None:
        """Add pending messages with the due times and topics that selections have given them.

        `parts` describe the messages that a selection may have changed.
        """
        view = view_of(self._snapshot.selected, parts, due_ms, topics, self._codes)
        is_counted = ~(view.is_cancelled | view.is_held | self._snapshot.holds.contains(due_ms, seq))
        self._add_rows(view.due_ms[is_counted], view.topic[is_counted])

    # -- the table -----------------------------------------------------------------------------------------------

    def _count_file(self, file: DataFile) -> None:
        """Count the messages of a data file. Reads as few columns of each row group as possible."""
        window, is_selected = self._window, not self._snapshot.selected.is_empty
        for group in file.groups_between((self._read_from_ms, 0), (self._read_to_ms, 0)):
            first_ms, last_ms = int(file.group_min_ms[group]), int(file.group_max_ms[group])
            topic_range = file.group_topics(group)
            # Some rows may not be pending, so each is checked.
            if is_selected or self._may_be_settled(first_ms, last_ms):
                rows = file.read_group(group, ["due_ms", "seq", "topic"])
                due_ms, seq = (rows.column(name).to_numpy() for name in ("due_ms", "seq"))
                topics = self._encode_topics(rows)
                if not is_selected:
                    self._add_pending(due_ms, seq, topics)
                    continue
                row = np.flatnonzero(self._snapshot.are_pending(due_ms, seq))
                due_ms, seq = due_ms[row], seq[row]
                parts = described_in_group(self._snapshot.selected, file, group, row, due_ms, seq)
                self._add_changed(parts, due_ms, seq, topics[row])
            # All rows have one topic. Without statistics, which older files lack, this is not known.
            elif topic_range is not None and topic_range[0] == topic_range[1]:
                code = int(self._codes.encode(pa.array([topic_range[0]]))[0])
                first_bucket, is_in_window = (
                    self._bucket_of(first_ms),
                    first_ms >= window.from_ms and last_ms < window.to_ms,
                )
                if is_in_window and first_bucket == self._bucket_of(last_ms):
                    self._add(
                        np.array([code * window.buckets + first_bucket]), np.array([file.group_rows(group)])
                    )
                else:
                    self._add_sorted(file.read_group(group, ["due_ms"]).column("due_ms").to_numpy(), code)
            else:
                rows = file.read_group(group, ["due_ms", "topic"])
                self._add_rows(rows.column("due_ms").to_numpy(), self._encode_topics(rows))

    def _may_be_settled(self, first_ms: int, last_ms: int) -> bool:
        """Check whether a scheduled message due in [first_ms, last_ms] may be settled or held."""
        snapshot = self._snapshot
        if first_ms < snapshot.settled.before_ms or len(snapshot.holds):
            return True
        begin, end = np.searchsorted(self._settled_due, [first_ms, last_ms + 1])
        return bool(end > begin)

    def _encode_topics(self, rows: pa.Table) -> Codes:
        return self._codes.encode(rows.column("topic").combine_chunks())

    # -- sums ----------------------------------------------------------------------------------------------------

    def _bucket_of(self, due_ms: int) -> int:
        return (due_ms - self._window.from_ms) // self._window.width_ms

    def _add_pending(self, due_ms: Int64Array, seq: Int64Array, topics: Codes) -> None:
        """Add the messages in the window that are pending and not held. The arguments are parallel columns."""
        is_counted = (due_ms >= self._window.from_ms) & (due_ms < self._window.to_ms)
        if not is_counted.any():
            return
        due_ms, seq, topics = due_ms[is_counted], seq[is_counted], topics[is_counted]
        # Checked only for the rows in the window, because these checks are the expensive part.
        is_counted = self._snapshot.are_pending(due_ms, seq) & ~self._snapshot.holds.contains(due_ms, seq)
        self._add_rows(due_ms[is_counted], topics[is_counted])

    def _add_rows(self, due_ms: Int64Array, topics: Codes) -> None:
        """Add messages that are to be counted (parallel columns). Messages outside the window are ignored."""
        window = self._window
        in_window = (due_ms >= window.from_ms) & (due_ms < window.to_ms)
        if not in_window.all():
            due_ms, topics = due_ms[in_window], topics[in_window]
        pairs = topics.astype(np.int64) * window.buckets + (due_ms - window.from_ms) // window.width_ms
        self._add(*np.unique(pairs, return_counts=True))

    def _add_sorted(self, due_ms: Int64Array, code: int) -> None:
        """Add messages of one topic, sorted by due time.

        Each bucket is a range of them, so a search per bucket suffices.
        """
        window = self._window
        first_bucket, last_bucket = (
            min(max(self._bucket_of(int(ms)), 0), window.buckets - 1) for ms in (due_ms[0], due_ms[-1])
        )
        buckets = np.arange(first_bucket, last_bucket + 2)
        bucket_starts = np.searchsorted(due_ms, window.from_ms + buckets * window.width_ms)
        bucket_counts = np.diff(bucket_starts)
        non_empty = np.flatnonzero(bucket_counts)
        self._add(code * window.buckets + buckets[non_empty], bucket_counts[non_empty])

    def _add(self, pairs: Int64Array, counts: Int64Array) -> None:
        """Add the number of messages of each pair. Raises OverLimit if there are too many pairs."""
        self._pairs.append(pairs)
        self._due_counts.append(counts.astype(np.int64))
        # The memory depends on the pairs, not on the messages: ten million messages of one minute are one pair.
        self._pair_count += len(pairs)
        # A merge sorts all pairs, so it runs only when their number has doubled.
        if self._pair_count > 2 * PAIRS_MAX:
            merged = self._merge_pairs()
            if len(merged[0]) > PAIRS_MAX:
                raise OverLimit(
                    f"more than {PAIRS_MAX} pairs of topic and bucket: ask for longer buckets, or a shorter window"
                )
            self._pairs, self._due_counts, self._pair_count = [merged[0]], [merged[1]], len(merged[0])

    def _merge_pairs(self) -> tuple[Int64Array, Int64Array]:
        """Sort the pairs and sum the numbers of equal pairs."""
        empty: Int64Array = np.empty(0, np.int64)
        pairs, pair_index = np.unique(np.concatenate([empty, *self._pairs]), return_inverse=True)
        counts = np.bincount(pair_index, np.concatenate([empty, *self._due_counts]), minlength=len(pairs))
        return pairs, counts.astype(np.int64)
