"""Live tail: read the messages of a topic as they become visible, without a consumer group and without leases.

Readers at the same position share one read. With a thousand live tails of one topic, each message still costs one read
of the log and one encoding. A position is an offset for each queue, and never moves back. Messages that retention
removes before a reader reaches them are skipped.
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
# Encodes the rows of a read and its first offsets as bytes, for all readers at this position.
Encode = Callable[[pa.RecordBatch, Offsets], bytes]
_Read = asyncio.Future[tuple[bytes, Offsets]]


class LiveTail:
    """Reads for all live tails. Belongs to the event loop."""

    def __init__(
        self, policy: Policy, waiters: Waiters, *, reader: LogReader, reader_thread: Executor, rates: Rates
    ) -> None:
        self._policy, self._waiters = policy, waiters
        self._reader, self._reader_thread, self._rates = reader, reader_thread, rates
        self._reading: dict[tuple[str, Offsets, str], _Read] = {}
        self.reads = 0  # number of reads so far

    def begin(self, name: str, tags: str, offsets: Sequence[int] | None, caller: Caller) -> Offsets:
        """Find the position to read from: the topic's end, or `offsets` clamped to the offsets that still exist.

        Raises NotFound, Forbidden, InvalidFilter.
        """
        topic = self._policy.readable(name, caller)
        self._filter(topic, tags)
        given = [] if offsets is None else list(offsets[: len(topic.queues)])
        indexes = [queue.index for queue in topic.queues]
        if offsets is None:
            return tuple(index.max_offset for index in indexes)
        # A queue that was added since is read from its begin. If the topic was deleted and created again, its offsets
        # continue, and the reader begins at the new `min_offset`.
        given += [0] * (len(indexes) - len(given))
        return tuple(
            min(max(offset, index.min_offset), index.max_offset)
            for offset, index in zip(given, indexes, strict=True)
        )

    async def read(
        self, name: str, tags: str, offsets: Offsets, wait_s: float, encode: Encode, caller: Caller
    ) -> tuple[bytes, Offsets] | None:
        """Read the messages after a position, and return the encoded bytes and the next position.

        The result is None if no message arrives within `wait_s`. The bytes are empty if no message that was read
        matches.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while True:
            # Checked in each turn, because the topic may have been deleted or the account changed.
            topic = self._policy.readable(name, caller)
            at = self.begin(name, tags, offsets, caller)
            # No await between this check and the wait: a message that arrived between them would wake no reader.
            if any(offset < queue.index.max_offset for offset, queue in zip(at, topic.queues, strict=True)):
                return await self._shared(topic, tags, at, encode)
            left_s = until_s - loop.time()
            if left_s <= 0 or not await self._waiters.wait(name, left_s):
                return None

    async def _shared(
        self, topic: Topic, tags: str, offsets: Offsets, encode: Encode
    ) -> tuple[bytes, Offsets]:
        # One commit wakes all readers at one position, and they request the same read in one turn of the loop.
        key = topic.name, offsets, tags
        reading = self._reading.get(key)
        if reading is None:
            reading = asyncio.ensure_future(self._read(topic, tags, offsets, encode))
            self._reading[key] = reading
            reading.add_done_callback(lambda _: self._reading.pop(key, None))
        # Shielded, so that a reader that disconnects does not cancel the read of the others.
        return await asyncio.shield(reading)

    async def _read(self, topic: Topic, tags: str, offsets: Offsets, encode: Encode) -> tuple[bytes, Offsets]:
        wanted = self._filter(topic, tags)
        self.reads += 1
        # Equal shares for each queue, so that a long queue does not block the others.
        behind = [q for q, queue in enumerate(topic.queues) if offsets[q] < queue.index.max_offset]
        rows = max(1, ROWS_MAX // len(behind))
        found = [
            candidates(topic.queues[q].index, offsets[q], rows, wanted, bytes_max=BYTES_MAX // len(behind))
            for q in behind
        ]
        following = list(offsets)
        # The next offset also skips messages that the filter excludes, so a reader of a rare tag advances.
        for q, selection in zip(behind, found, strict=True):
            following[q] = selection.next_offset

        # Encode in the reader thread: encoding 1 MiB of JSON on the loop takes as long as a hundred releases.
        def work() -> bytes:
            seqs = np.concatenate([self._decide(selection, wanted) for selection in found])
            return encode(self._reader.read_rows(np.sort(seqs)), offsets) if len(seqs) else b""

        data = await in_thread(self._reader_thread, work)
        self._rates.add(Stat.BROKER_GET_NUMS, "", sum(len(selection.seqs) for selection in found))
        return data, tuple(following)

    def _decide(self, selection: FilteredPull, wanted: Filter) -> np.typing.NDArray[np.int64]:
        return decide(selection, self._reader, wanted).seqs

    @staticmethod
    def _filter(topic: Topic, tags: str) -> Filter:
        return compile_filter(tags, TAG, bit_mask=topic.filter_type == "MULTI_TAG")
