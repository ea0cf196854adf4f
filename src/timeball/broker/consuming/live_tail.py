"""Live tail: read the messages of a topic as they become visible, without a consumer group and without leases.

A reader's position is an offset for each queue, and never moves back. Readers at the same position share one read. With
a thousand live tails of one topic, each message still costs one read of the log and one encoding. Messages that
retention removes before a reader reaches them are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.waiters import Waiters
from timeball.broker.consuming.pull import FilteredPull, candidates, decide
from timeball.broker.filters import TAG, compile_filter
from timeball.broker.filters.tags import Filter
from timeball.broker.policy import Policy
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.registry.topics import Topic
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model.access import Caller

ROWS_MAX, BYTES_MAX = 256, 1024 * 1024  # limits of one read; a single message may be larger

Offsets = tuple[int, ...]
# Encodes the rows of a read, and the offsets at which it began, for all readers at this position.
Encode = Callable[[pa.RecordBatch, Offsets], bytes]
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
        """Find the position from which to read: the end of the topic, or `offsets` limited to those that exist.

        Raises NotFound, Forbidden, InvalidFilter.
        """
        topic = self._policy.readable(name, caller)
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

        None if no message arrives within `wait_s` seconds. The bytes are empty if no message matches the tags.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while True:
            # Checked in each round, because the topic may have been deleted or the account changed.
            topic = self._policy.readable(name, caller)
            position = self.begin(name, tags, offsets, caller)
            # No await between this check and the wait: a message that arrived between them would wake no reader.
            if any(
                offset < queue.index.max_offset for offset, queue in zip(position, topic.queues, strict=True)
            ):
                return await self._read_shared(topic, tags, position, encode)
            left_s = until_s - loop.time()
            if left_s <= 0 or not await self._waiters.wait(name, left_s):
                return None

    async def _read_shared(
        self, topic: Topic, tags: str, offsets: Offsets, encode: Encode
    ) -> tuple[bytes, Offsets]:
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
        def read_and_encode() -> bytes:
            seqs = np.concatenate([self._matching_seqs(selection, tag_filter) for selection in selections])
            return encode(self._reader.read_rows(np.sort(seqs)), offsets) if len(seqs) else b""

        data = await in_thread(self._reader_thread, read_and_encode)
        self._rates.add(Stat.BROKER_GET_NUMS, "", sum(len(selection.seqs) for selection in selections))
        return data, tuple(next_offsets)

    def _matching_seqs(self, selection: FilteredPull, tag_filter: Filter) -> np.typing.NDArray[np.int64]:
        return decide(selection, self._reader, tag_filter).seqs

    @staticmethod
    def _filter(topic: Topic, tags: str) -> Filter:
        return compile_filter(tags, TAG, bit_mask=topic.filter_type == "MULTI_TAG")
