"""Reads without leases: by offset from several queues, through a filter, by time, and as a live tail.

A pull with a filter has two steps. The tag hashes in the queue's index exclude most messages without reading them
(`candidates`). The rows of the remaining messages are read for the exact decision (`decide`). The answer contains the
offset up to which the queue was searched, so a consumer of a rare tag advances with every pull. One pull searches a
limited number of index entries.

A live tail (`LiveTail`) reads the messages of a topic as they become visible, without a consumer group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.waiters import Waiters
from timeball.broker.filters import TAG, Filter, compile_filter
from timeball.broker.policy import Policy
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.registry.topics import Topic
from timeball.io.threads import in_thread
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.access import Caller
from timeball.model.errors import NotFound, OutOfRange
from timeball.model.message import Int64Array


def find_seqs(topic: Topic, offsets: dict[int, int], rows: int) -> Int64Array:
    """Find the sequence numbers of up to `rows` visible rows of a topic, with equal shares for its queues.

    `offsets`: for each queue to read, the offset of its first row. Raises NotFound for a queue that the topic does not
    have, OutOfRange for an offset that the queue does not have.
    """
    rows = min(rows, limits.PULL_ROWS_MAX)
    open_offsets = {queue: offset for queue, offset in offsets.items() if _has_rows(topic, queue, offset)}
    chunks = []
    while open_offsets and rows > 0:
        # Equal shares, round after round, so that a full queue does not displace the others from the answer.
        share = max(1, rows // len(open_offsets))
        for queue, offset in sorted(open_offsets.items()):
            # Index entries only: the rows are read afterwards, all together and in another thread.
            entries = topic.queues[queue].index.read(offset, min(share, rows))
            chunks.append(entries["seq"].astype(np.int64))
            rows -= len(entries)
            # A queue without more rows leaves its share of the next round to the others.
            if len(entries) < share or rows == 0:
                del open_offsets[queue]
            else:
                open_offsets[queue] = offset + len(entries)
            if rows == 0:
                break
    return np.concatenate(chunks) if chunks else np.empty(0, np.int64)


def _has_rows(topic: Topic, queue: int, offset: int) -> bool:
    """Check whether a queue has rows from an offset on. Raises NotFound, OutOfRange."""
    if not 0 <= queue < len(topic.queues):
        raise NotFound(f"topic {topic.name!r} has no queue {queue}; it has {len(topic.queues)}")
    index = topic.queues[queue].index
    if not index.min_offset <= offset <= index.max_offset:
        raise OutOfRange(
            f"queue {queue} of {topic.name!r} keeps offsets {index.min_offset} to {index.max_offset}, not {offset}"
        )
    return offset < index.max_offset


def read(reader: LogReader, seqs: Int64Array) -> pa.RecordBatch:
    """Read as many of these rows as fit into one answer, but at least one (reader thread)."""
    rows = reader.read_rows(seqs)
    while rows.num_rows > 1 and rows.nbytes > limits.PULL_BYTES_MAX:
        # Halve the rows: their sizes differ, and adding up sizes costs more than the few rounds here.
        rows = rows.slice(0, rows.num_rows // 2)
    return rows


SCAN_ROWS_MAX = 16_384  # index entries searched by one pull: 320 KB
READ_ROWS_MAX = 1_024  # rows read by one pull for a filter that the index does not help


@dataclass(frozen=True, slots=True)
class FilteredPull:
    """Selected messages of a queue, as parallel arrays."""

    seqs: Int64Array
    offsets: Int64Array
    next_offset: int  # the messages before it were searched
    rows: int  # `decide` keeps at most this many


def candidates(
    index: QueueIndex, offset: int, rows: int, wanted: Filter, *, bytes_max: int = 1 << 62
) -> FilteredPull:
    """Select messages from `offset` on that may match the filter, by the index. Raises OutOfRange.

    These are up to `rows` messages. For a filter that the index does not help, they are up to READ_ROWS_MAX if that is
    more, because most of them may not match. Their sizes add up to at most `bytes_max`, unless the first message alone
    is larger.
    """
    # With a filter, search a limited range that is larger than `rows`, because most messages may not match.
    entries = index.read(offset, rows if wanted.matches_all else SCAN_ROWS_MAX)
    seqs, end = entries["seq"].astype(np.int64), offset + len(entries)
    if wanted.matches_all and entries["size"].sum(dtype=np.int64) <= bytes_max:
        return FilteredPull(seqs, np.arange(offset, end), end, rows)
    matches = np.arange(len(seqs)) if wanted.matches_all else np.flatnonzero(wanted.candidates(entries))
    rows_read = rows if wanted.uses_index else max(rows, READ_ROWS_MAX)
    end_bytes = np.cumsum(entries["size"][matches[:rows_read]], dtype=np.int64)
    # At least one, otherwise a message larger than the limit could never be pulled.
    fitting = max(1, int(np.searchsorted(end_bytes, bytes_max, side="right")))
    if len(matches) > fitting:
        matches = matches[:fitting]
        return FilteredPull(seqs[matches], offset + matches, offset + int(matches[-1]) + 1, rows)
    return FilteredPull(seqs[matches], offset + matches, end, rows)


def decide(selection: FilteredPull, reader: LogReader, wanted: Filter) -> FilteredPull:
    """Read the candidates, and keep the first `selection.rows` of them that match the filter (reader thread)."""
    if wanted.matches_all or not len(selection.seqs):
        return selection
    keep = np.flatnonzero(wanted.exact(reader.read_rows(selection.seqs)))
    next_offset = selection.next_offset
    if len(keep) > selection.rows:
        next_offset = int(selection.offsets[keep[selection.rows]])
        keep = keep[: selection.rows]
    return FilteredPull(selection.seqs[keep], selection.offsets[keep], next_offset, selection.rows)


# ---- by time -----------------------------------------------------------------------------------------------
# A bisection over a queue, whose store times grow except where the clock was set back. Even then it ends at a valid
# position. It reads one row in each step: about 17 for 100,000 messages.


def offset_at(reader: LogReader, index: QueueIndex, time_ms: int, upper: bool = False) -> int:
    """Find the first offset stored at or after `time_ms`, or the queue's end (reader thread).

    With `upper`, find the last offset stored at or before `time_ms`, or the queue's first offset if there is none, as
    RocketMQ's boundary UPPER does.
    """
    low, high = index.min_offset, index.max_offset
    while low < high:
        middle = (low + high) // 2
        # Read from the row, because index entries do not contain the store time.
        store_ms = _store_ms(reader, index, middle)
        if store_ms < time_ms or (upper and store_ms == time_ms):
            low = middle + 1
        else:
            high = middle
    # With `upper`, `low` is now the first offset stored after `time_ms`.
    return max(index.min_offset, low - 1) if upper else low


def earliest_ms(reader: LogReader, index: QueueIndex) -> int:
    """Find the store time of the queue's first message in ms, or -1 if the queue is empty (reader thread)."""
    return _store_ms(reader, index, index.min_offset) if index.min_offset < index.max_offset else -1


def _store_ms(reader: LogReader, index: QueueIndex, offset: int) -> int:
    """Read the store time of the message at an offset in ms (reader thread)."""
    seqs = index.read(offset, 1)["seq"].astype(np.int64)
    return int(reader.read_rows(seqs).column("store_ms")[0].as_py())


# ---- live tail -----------------------------------------------------------------------------------------------
# A reader's position is an offset for each queue, and never moves back. Readers at the same position share one read.
# With a thousand live tails of one topic, each message still costs one read of the log and one encoding. Messages that
# retention removes before a reader reaches them are skipped.

ROWS_MAX, BYTES_MAX = 256, 1024 * 1024  # limits of one read; a single message may be larger

Offsets = tuple[int, ...]
# Encodes the rows of a read, and the offsets at which it began, for all readers at this position. Returns the position
# before the rows that it left out, or None for all rows.
Encode = Callable[[pa.RecordBatch, Offsets], tuple[bytes, Offsets | None]]
_Read = asyncio.Future[tuple[bytes, Offsets]]


class LiveTail:
    """Reads for all live tails. Belongs to the event loop."""

    def __init__(
        self, policy: Policy, waiters: Waiters, *, reader: LogReader, reader_thread: Executor, rates: Rates
    ) -> None:
        self._policy, self._waiters = policy, waiters
        self._reader, self._reader_thread, self._rates = reader, reader_thread, rates
        self._reads_under_way: dict[tuple[str, Offsets, str], _Read] = {}
        self.reads = 0  # number of reads so far

    def begin(self, name: str, tags: str, offsets: Sequence[int] | None, caller: Caller) -> Offsets:
        """Find the position from which to read: the ends of all queues, or `offsets`, each within its queue's range.

        Raises NotFound, Forbidden, InvalidFilter.
        """
        topic = self._policy.find_readable_topic(name, caller)
        self._filter(topic, tags)
        wanted_offsets = [] if offsets is None else list(offsets[: len(topic.queues)])
        indexes = [queue.index for queue in topic.queues]
        if offsets is None:
            return tuple(index.max_offset for index in indexes)
        # A queue that was added since is read from its beginning. If the topic was deleted and created again, its
        # offsets continue, and the reader begins at the new `min_offset`.
        wanted_offsets += [0] * (len(indexes) - len(wanted_offsets))
        return tuple(
            min(max(offset, index.min_offset), index.max_offset)
            for offset, index in zip(wanted_offsets, indexes, strict=True)
        )

    async def read(
        self, name: str, tags: str, offsets: Offsets, wait_s: float, encode: Encode, caller: Caller
    ) -> tuple[bytes, Offsets] | None:
        """Read the messages from a position on. Returns them encoded, and the next position.

        None if no message arrives within `wait_s` seconds. The bytes are empty if no message matches the tags. Raises
        as `begin`.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        while True:
            # Checked in each round, because the topic may have been deleted or the account changed.
            topic = self._policy.find_readable_topic(name, caller)
            position = self.begin(name, tags, offsets, caller)
            # No await between this check and the wait: a message that arrived between them would wake no reader.
            if any(
                offset < queue.index.max_offset for offset, queue in zip(position, topic.queues, strict=True)
            ):
                return await self._read_shared(topic, tags, position, encode)
            left_s = deadline_s - loop.time()
            if left_s <= 0 or not await self._waiters.wait(name, left_s):
                return None

    async def _read_shared(
        self, topic: Topic, tags: str, offsets: Offsets, encode: Encode
    ) -> tuple[bytes, Offsets]:
        """Read from a position, or share the read of another reader at this position. Returns as `read`."""
        # A commit wakes all readers at a position, and they request the same read in one turn of the loop.
        key = topic.name, offsets, tags
        read = self._reads_under_way.get(key)
        if read is None:
            read = asyncio.ensure_future(self._read(topic, tags, offsets, encode))
            self._reads_under_way[key] = read
            read.add_done_callback(lambda _: self._reads_under_way.pop(key, None))
        # Shielded, so that a reader that disconnects does not cancel the read of the others.
        return await asyncio.shield(read)

    async def _read(self, topic: Topic, tags: str, offsets: Offsets, encode: Encode) -> tuple[bytes, Offsets]:
        """Read and encode the next messages of all queues, within ROWS_MAX and BYTES_MAX. Returns as `read`."""
        tag_filter = self._filter(topic, tags)
        self.reads += 1
        # The same share for each queue, so that a long queue does not block the others.
        queues = [
            queue_id
            for queue_id, queue in enumerate(topic.queues)
            if offsets[queue_id] < queue.index.max_offset
        ]
        rows = max(1, ROWS_MAX // len(queues))
        selections = [
            candidates(
                topic.queues[queue_id].index,
                offsets[queue_id],
                rows,
                tag_filter,
                bytes_max=BYTES_MAX // len(queues),
            )
            for queue_id in queues
        ]
        next_offsets = list(offsets)
        # The next offset also skips messages that the filter excludes, so a reader of a rare tag advances.
        for queue_id, selection in zip(queues, selections, strict=True):
            next_offsets[queue_id] = selection.next_offset

        # Encode in the reader thread: encoding 1 MiB of JSON on the loop takes as long as a hundred releases.
        def read_and_encode() -> tuple[bytes, Offsets | None]:
            """Return as `Encode`, and (b"", None) if no message matches the tags."""
            seqs = np.concatenate([self._matching_seqs(selection, tag_filter) for selection in selections])
            return encode(self._reader.read_rows(np.sort(seqs)), offsets) if len(seqs) else (b"", None)

        data, reached_offsets = await in_thread(self._reader_thread, read_and_encode)
        self._rates.add(Stat.BROKER_GET_NUMS, "", sum(len(selection.seqs) for selection in selections))
        return data, reached_offsets or tuple(next_offsets)

    def _matching_seqs(self, selection: FilteredPull, tag_filter: Filter) -> np.typing.NDArray[np.int64]:
        """List the numbers of the selected messages that match the filter (reader thread)."""
        return decide(selection, self._reader, tag_filter).seqs

    @staticmethod
    def _filter(topic: Topic, tags: str) -> Filter:
        return compile_filter(tags, TAG, bit_mask=topic.filter_type == "MULTI_TAG")
