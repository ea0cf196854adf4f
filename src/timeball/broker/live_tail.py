"""A topic as it becomes visible: a read that belongs to no group, leases nothing, and waits for what comes.

Readers that stand at one position share one read: of a thousand live tails of a topic each message costs one look into
the log, and one encoding. Their position is an offset for each queue; it never goes back. What retention has let go
before a reader came to it is passed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from timeball.access import Caller
from timeball.broker.components import Components, in_thread
from timeball.broker.consuming.pull import FilteredPull, candidates, decide
from timeball.broker.filters import TAG, compile_filter
from timeball.broker.filters.tags import Filter
from timeball.broker.policy import Policy
from timeball.broker.rates import Stat
from timeball.broker.registry.topics import Topic
from timeball.broker.waiters import Waiters

ROWS_MAX, BYTES_MAX = 256, 1024 * 1024  # of one read; of a single message more

Offsets = tuple[int, ...]
# What a read found and where it began, to bytes for all readers of this position.
Encode = Callable[[pa.RecordBatch, Offsets], bytes]
_Read = asyncio.Future[tuple[bytes, Offsets]]


class LiveTail:
    """Reads for all live tails. Belongs to the event loop."""

    def __init__(self, parts: Components, policy: Policy, waiters: Waiters) -> None:
        self._parts, self._policy, self._waiters = parts, policy, waiters
        self._reading: dict[tuple[str, Offsets, str], _Read] = {}
        self.reads = 0  # made so far

    def begin(self, name: str, tags: str, offsets: Sequence[int] | None, caller: Caller) -> Offsets:
        """Return a position to read from: the topic's end, or the one given, as far as it is kept.

        Raise NotFound, Forbidden, InvalidFilter.
        """
        topic = self._policy.readable(name, caller)
        self._filter(topic, tags)
        given = [] if offsets is None else list(offsets[: len(topic.queues)])
        indexes = [queue.index for queue in topic.queues]
        if offsets is None:
            return tuple(index.max_offset for index in indexes)
        # A queue that was added meanwhile is new to the reader; a topic that was made anew begins again.
        given += [0] * (len(indexes) - len(given))
        return tuple(
            min(max(offset, index.min_offset), index.max_offset)
            for offset, index in zip(given, indexes, strict=True)
        )

    async def read(
        self, name: str, tags: str, offsets: Offsets, wait_s: float, encode: Encode, caller: Caller
    ) -> tuple[bytes, Offsets] | None:
        """Return what comes behind a position, and the next one; None when nothing has come within `wait_s`.

        Without bytes when nothing that was looked at matches.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while True:
            # Asked again in each turn: the topic may have been deleted, or the account changed, meanwhile.
            topic = self._policy.readable(name, caller)
            at = self.begin(name, tags, offsets, caller)
            # No pause between this look and the wait: what comes in between would wake no reader.
            if any(offset < queue.index.max_offset for offset, queue in zip(at, topic.queues, strict=True)):
                return await self._shared(topic, tags, at, encode)
            left_s = until_s - loop.time()
            if left_s <= 0 or not await self._waiters.wait(name, left_s):
                return None

    async def _shared(
        self, topic: Topic, tags: str, offsets: Offsets, encode: Encode
    ) -> tuple[bytes, Offsets]:
        # All that wait at one position are woken by one commit, and ask for the same read in one turn of the loop.
        key = topic.name, offsets, tags
        reading = self._reading.get(key)
        if reading is None:
            reading = asyncio.ensure_future(self._read(topic, tags, offsets, encode))
            self._reading[key] = reading
            reading.add_done_callback(lambda _: self._reading.pop(key, None))
        # Shielded: a reader that goes away takes nothing from the others.
        return await asyncio.shield(reading)

    async def _read(self, topic: Topic, tags: str, offsets: Offsets, encode: Encode) -> tuple[bytes, Offsets]:
        wanted = self._filter(topic, tags)
        self.reads += 1
        # Equal shares: a full queue must not keep the others out.
        behind = [q for q, queue in enumerate(topic.queues) if offsets[q] < queue.index.max_offset]
        rows = max(1, ROWS_MAX // len(behind))
        found = [
            candidates(topic.queues[q].index, offsets[q], rows, wanted, bytes_max=BYTES_MAX // len(behind))
            for q in behind
        ]
        following = list(offsets)
        # Also past what the filter has left out, so that a rare tag moves on.
        for q, selection in zip(behind, found, strict=True):
            following[q] = selection.next_offset

        # Encoded in the same thread: JSON of a mebibyte takes the loop as long as a hundred releases.
        def work() -> bytes:
            seqs = np.concatenate([self._decide(selection, wanted) for selection in found])
            return encode(self._parts.reader.read_rows(np.sort(seqs)), offsets) if len(seqs) else b""

        data = await in_thread(self._parts.reader_thread, work)
        self._parts.rates.add(Stat.BROKER_GET_NUMS, "", sum(len(selection.seqs) for selection in found))
        return data, tuple(following)

    def _decide(self, selection: FilteredPull, wanted: Filter) -> np.typing.NDArray[np.int64]:
        return decide(selection, self._parts.reader, wanted).seqs

    @staticmethod
    def _filter(topic: Topic, tags: str) -> Filter:
        return compile_filter(tags, TAG, bit_mask=topic.filter_type == "MULTI_TAG")
