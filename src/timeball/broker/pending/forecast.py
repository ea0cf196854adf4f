"""Counts of the messages that are due in each second, minute, hour or day, by topic.

All callers share one count. It covers all topics, and the answer leaves out those that the caller may not see. A count
is reused for `FRESH_S`, or for ten times as long as it took. So any number of dashboards costs at most a tenth of the
background thread. The window of a count extends a little beyond the request, because the next request begins later.

Counting reads only due times and topics from the table. It reads nothing of a row group that is within one bucket and
has one topic. It reads numbers only where a settled scheduled message may be among the rows. Scheduled messages held by
a paused campaign are not due and not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.broker.pending.log_tail import Codes, TopicCodes, scan
from timeball.broker.pending.pages import Counted, Unit
from timeball.broker.pending.snapshot import Snapshot, Snapshots, is_shown
from timeball.broker.policy import Policy
from timeball.broker.tables.memory import give_back
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.errors import OutOfRange, OverLimit
from timeball.model.message import Int64Array
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile

UNITS: dict[Unit, int] = {
    "second": limits.SECOND_MS, "minute": limits.MINUTE_MS, "hour": limits.HOUR_MS, "day": limits.DAY_MS
}  # fmt: skip
# The length of a window without an end: five minutes, two hours, two days, two months.
_DEFAULT_BUCKETS: dict[Unit, int] = {"second": 300, "minute": 120, "hour": 48, "day": 60}
# How far a count's window extends beyond the request.
_SPARE_MS = 60_000
FRESH_S, TIMES_ITS_COST = 2.0, 10.0
COUNTS_MAX = 16  # windows kept for reuse
PAIRS_MAX = 1_000_000  # pairs of a topic and a bucket with messages in one count: 16 bytes each, three times


@dataclass(frozen=True, slots=True)
class _Count:
    """A count of all topics. A pair is the topic's code times the number of buckets, plus the bucket. Pairs ascend."""

    width_ms: int
    from_ms: int
    to_ms: int
    counted_ms: int  # time of the snapshot, not of the answer
    until_s: float  # on the loop's clock: reused until then
    pairs: Int64Array
    due: Int64Array

    @property
    def buckets(self) -> int:
        return (self.to_ms - self.from_ms) // self.width_ms

    def covers(self, width_ms: int, from_ms: int, to_ms: int, now_s: float) -> bool:
        """Return whether the count covers this window and is still fresh."""
        is_within = self.from_ms <= from_ms and to_ms <= self.to_ms
        return self.width_ms == width_ms and is_within and now_s < self.until_s


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
    ) -> None:
        self._policy, self._snapshots = policy, snapshots
        self._clock, self._reader, self._background = clock, reader, background
        self._codes = TopicCodes()
        self._counts: list[_Count] = []
        self._counting = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self.counts = 0  # number of counts made so far

    async def counted(
        self,
        by: Unit,
        from_ms: int | None = None,
        to_ms: int | None = None,
        topic: str | None = None,
        caller: Caller = ANONYMOUS,
    ) -> Counted:
        """Count the messages of a window, for the topics that the caller may see.

        The window is widened to whole buckets. Without `from_ms` it begins now, and without `to_ms` it has a default
        length. Raise Forbidden, NotFound, OutOfRange, OverLimit.
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
        count = self._fresh(width_ms, from_ms, to_ms)
        if count is None:
            # In a separate task: callers that wait for this count must not lose it when the first caller disconnects.
            count = await asyncio.shield(self._loop.create_task(self._shared(width_ms, from_ms, to_ms)))
        found = self._answer(count, by, from_ms, to_ms, topic, caller)
        # After the count: a topic that was deleted may still have pending messages.
        self._policy.check_known(topic, has_messages=bool(found.topics))
        return found

    def _fresh(self, width_ms: int, from_ms: int, to_ms: int) -> _Count | None:
        now_s = self._loop.time()
        return next((each for each in self._counts if each.covers(width_ms, from_ms, to_ms, now_s)), None)

    async def _shared(self, width_ms: int, from_ms: int, to_ms: int) -> _Count:
        async with self._counting:
            # Another caller may have counted while this one was waiting for the lock.
            found = self._fresh(width_ms, from_ms, to_ms)
            if found is not None:
                return found
            # The windows of dashboards begin now, so the next one ends later than this one.
            to_ms += max(width_ms, _SPARE_MS - _SPARE_MS % width_ms)
            begun_s = self._loop.time()
            async with self._snapshots.taken() as snapshot:
                window = Window(from_ms, to_ms, width_ms)
                counting = Counting(
                    snapshot, self._codes, window, reader=self._reader, open_file=self._snapshots.open_file
                )
                pairs, due = await in_thread(self._background, counting.run)
            self.counts += 1
            now_s = self._loop.time()
            # Measured from the end of the count, so that a slow count is not repeated at once.
            until_s = now_s + max(FRESH_S, TIMES_ITS_COST * (now_s - begun_s))
            count = _Count(width_ms, from_ms, to_ms, snapshot.now_ms, until_s, pairs, due)
            # The newest count comes first, so `_fresh` prefers it.
            kept = [each for each in self._counts if now_s < each.until_s]
            self._counts = [count, *kept[: COUNTS_MAX - 1]]
            return count

    def _answer(
        self, count: _Count, by: Unit, from_ms: int, to_ms: int, topic: str | None, caller: Caller
    ) -> Counted:
        code, bucket = count.pairs // count.buckets, count.pairs % count.buckets
        begin, end = ((ms - count.from_ms) // count.width_ms for ms in (from_ms, to_ms))
        inside = (bucket >= begin) & (bucket < end)
        topics = {}
        for each in np.unique(code[inside]).tolist():
            name = self._codes.names[each]
            if is_shown(name, topic) and self._policy.allows(caller, Verb.LOOK, topic=name):
                topics[name] = each
        inside &= np.isin(code, np.array(list(topics.values()), np.int64))
        # Only over the visible topics: messages of other topics are in neither sum.
        by_bucket = np.bincount(bucket[inside], count.due[inside]).astype(np.int64)
        by_topic = np.bincount(code[inside], count.due[inside]).astype(np.int64)
        return Counted(
            by, from_ms, to_ms, count.counted_ms,
            [(count.from_ms + at * count.width_ms, int(by_bucket[at])) for at in np.flatnonzero(by_bucket).tolist()],
            {name: int(by_topic[each]) for name, each in sorted(topics.items())},
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Window:
    """A time range that is divided into buckets of equal width."""

    from_ms: int
    to_ms: int
    width_ms: int

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return (self.to_ms - self.from_ms) // self.width_ms


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
        self._due: list[Int64Array] = []
        self._size = 0
        # Sorted once, because each row group is searched in it.
        self._settled_due = np.sort(snapshot.settled.due_ms)

    def run(self) -> tuple[Int64Array, Int64Array]:
        """Return pairs of topic and bucket, ascending, and the number of messages due in each. Raise OverLimit."""
        self._count_log(self._reader)
        window = self._window
        for entry in self._snapshot.entries:
            # Other files have no pending scheduled message in the window.
            if self._snapshot.first_ms(entry) < window.to_ms and entry.max_due_ms >= window.from_ms:
                self._count_file(self._open_file(entry))
        # Decoded data counts as the broker's memory until the allocators return it to the system.
        found = self._joined()
        give_back()
        return found

    # -- the log -------------------------------------------------------------------------------------------------

    def _count_log(self, reader: LogReader) -> None:
        begin = max(self._snapshot.from_seq, reader.first_seq)
        again = []
        for rows in scan(reader, self._snapshot, begin, self._codes):
            # A scheduled message is counted at the row that set its due time. If that row has left the log, or was
            # compacted into the table, the rows that write the scheduled message again are counted instead, once for
            # each scheduled message.
            is_first = rows.row_seq == rows.seq
            first_kept = np.where(rows.is_level, begin, max(begin, self._snapshot.watermark))
            if others := rows.part(~is_first & (rows.seq < first_kept)):
                again.append(others)
            self._add_waiting(rows.due_ms[is_first], rows.seq[is_first], rows.topic[is_first])
        if again:
            rows = type(again[0]).joined(again).sorted()
            self._add_waiting(rows.due_ms, rows.seq, rows.topic)

    # -- the table -----------------------------------------------------------------------------------------------

    def _count_file(self, file: DataFile) -> None:
        window = self._window
        for group in file.groups_between((window.from_ms, 0), (window.to_ms, 0)):
            low_ms, high_ms = int(file.group_min_ms[group]), int(file.group_max_ms[group])
            # Older files have no statistics of topics, so their columns are read.
            span = file.group_topics(group)
            if self._may_be_settled(low_ms, high_ms):
                rows = file.read_group(group, ["due_ms", "seq", "topic"])
                due_ms, seq = (rows.column(name).to_numpy() for name in ("due_ms", "seq"))
                self._add_waiting(due_ms, seq, self._encode(rows))
            elif span is not None and span[0] == span[1]:
                code = int(self._codes.encode(pa.array([span[0]]))[0])
                bucket, is_within = self._bucket(low_ms), low_ms >= window.from_ms and high_ms < window.to_ms
                if is_within and bucket == self._bucket(high_ms):
                    self._add(np.array([code * window.buckets + bucket]), np.array([file.group_rows(group)]))
                else:
                    self._add_sorted(file.read_group(group, ["due_ms"]).column("due_ms").to_numpy(), code)
            else:
                rows = file.read_group(group, ["due_ms", "topic"])
                self._add_rows(rows.column("due_ms").to_numpy(), self._encode(rows))

    def _may_be_settled(self, low_ms: int, high_ms: int) -> bool:
        """Return whether a scheduled message due in this span may be settled or held."""
        snapshot = self._snapshot
        if low_ms < snapshot.settled.before_ms or len(snapshot.holds):
            return True
        begin, end = np.searchsorted(self._settled_due, [low_ms, high_ms + 1])
        return bool(end > begin)

    def _encode(self, rows: pa.Table) -> Codes:
        return self._codes.encode(rows.column("topic").combine_chunks())

    # -- sums ----------------------------------------------------------------------------------------------------

    def _bucket(self, due_ms: int) -> int:
        return (due_ms - self._window.from_ms) // self._window.width_ms

    def _add_waiting(self, due_ms: Int64Array, seq: Int64Array, topic: Codes) -> None:
        """Add those of these scheduled messages that are pending and not held."""
        keep = (due_ms >= self._window.from_ms) & (due_ms < self._window.to_ms)
        if not keep.any():
            return
        due_ms, seq, topic = due_ms[keep], seq[keep], topic[keep]
        # Checked only for the rows in the window, because these checks are the expensive part.
        keep = self._snapshot.waits(due_ms, seq) & ~self._snapshot.holds.contains(due_ms, seq)
        self._add_rows(due_ms[keep], topic[keep])

    def _add_rows(self, due_ms: Int64Array, topic: Codes) -> None:
        window = self._window
        inside = (due_ms >= window.from_ms) & (due_ms < window.to_ms)
        if not inside.all():
            due_ms, topic = due_ms[inside], topic[inside]
        pairs = topic.astype(np.int64) * window.buckets + (due_ms - window.from_ms) // window.width_ms
        self._add(*np.unique(pairs, return_counts=True))

    def _add_sorted(self, due_ms: Int64Array, code: int) -> None:
        """Add rows of one topic, sorted by due time: each bucket is a range of them."""
        window = self._window
        low, high = (min(max(self._bucket(int(ms)), 0), window.buckets - 1) for ms in (due_ms[0], due_ms[-1]))
        buckets = np.arange(low, high + 2)
        ends = np.searchsorted(due_ms, window.from_ms + buckets * window.width_ms)
        due = np.diff(ends)
        some = np.flatnonzero(due)
        self._add(code * window.buckets + buckets[some], due[some])

    def _add(self, pairs: Int64Array, due: Int64Array) -> None:
        self._pairs.append(pairs)
        self._due.append(due.astype(np.int64))
        # The bound is on pairs and not on messages: ten million messages of one minute are one pair.
        self._size += len(pairs)
        # Joining is a sort, so it is done only when the pairs have doubled.
        if self._size > 2 * PAIRS_MAX:
            joined = self._joined()
            if len(joined[0]) > PAIRS_MAX:
                raise OverLimit(
                    f"more than {PAIRS_MAX} topics with a bucket each: ask for longer buckets, or a shorter window"
                )
            self._pairs, self._due, self._size = [joined[0]], [joined[1]], len(joined[0])

    def _joined(self) -> tuple[Int64Array, Int64Array]:
        none: Int64Array = np.empty(0, np.int64)
        pairs, where = np.unique(np.concatenate([none, *self._pairs]), return_inverse=True)
        due = np.bincount(where, np.concatenate([none, *self._due]), minlength=len(pairs))
        return pairs, due.astype(np.int64)
