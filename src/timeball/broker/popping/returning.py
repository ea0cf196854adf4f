"""What is not acknowledged in time comes back: one task that sleeps until the earliest deadline.

Positions are marked before anything is awaited, so that no receipt counts while its message is on its way back, and
they are done once the copy is durable, never before. A copy that cannot be written now (the disk is full) is tried
again after `AGAIN_MS`; until then the receipt is as good as before. A message whose copy would break a rule is
handed out again itself, and holds nobody up. In order, nothing is copied: the positions
are the next to be handed out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from timeball import limits
from timeball.broker.parts import in_thread
from timeball.broker.popping import copies
from timeball.broker.popping.deadlines import Deadlines
from timeball.broker.popping.window import NO_RECEIPT, Held, Window
from timeball.broker.popping.windows import Windows
from timeball.errors import RequestError, TimeballError
from timeball.schedule.ticker import CLOCK_LOOK_MS

if TYPE_CHECKING:
    from timeball.broker.service import Broker

logger = logging.getLogger(__name__)

AGAIN_MS = 1_000
PART_ROWS, PART_BYTES = 4_096, 8 * 1024 * 1024  # read and written in one go
PARTS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Marked:
    """A position on its way back, and what its receipt was."""

    offset: int
    held: Held
    pop_ms: int


class Returning:
    """See the module. The task begins with the first deadline."""

    def __init__(self, broker: Broker, windows: Windows) -> None:
        self._broker, self._parts, self._windows = broker, broker.parts, windows
        self._deadlines = Deadlines(windows.count)
        self._wake = asyncio.Event()
        self._stretched: set[Window] = set()
        self._slots = asyncio.Semaphore(PARTS_AT_ONCE)
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def wake(self) -> None:
        """Look at the clock now."""
        self._wake.set()

    def expect(self, window: Window, offsets: list[int], pop_ms: int, deadline_ms: int) -> None:
        """These come back at `deadline_ms` unless their receipts do."""
        if self._deadlines.add(window, offsets, pop_ms, deadline_ms):
            self._wake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._ended)

    def stretched(self, window: Window) -> None:
        """The window's oldest positions hold up its stored offset: have the log keep them instead."""
        self._stretched.add(window)
        self._wake.set()

    async def close(self) -> None:
        """End the task; a copy that is being written is written."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def send_back(
        self, window: Window, offsets: list[int], *, later: bool = False, dead: bool = False
    ) -> None:
        """Copies for these, in the log when this returns: at once, when their time is over (`later`), or as dead
        letters. Raises what the broker raises, and then they are as before.
        """
        await self._copy(window, _mark(window, offsets), later=later, dead=dead)

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            now_ms = self._parts.clock.now_ms()
            jobs = [job for due in self._deadlines.due(now_ms) for job in self._expired(*due)]
            jobs += [(window, _mark(window, _oldest(window)), True) for window in self._stretched]
            self._stretched.clear()
            if jobs:
                await asyncio.gather(*(self._try_copy(*job) for job in jobs))
                continue
            next_ms = self._deadlines.next_ms()
            # A wall clock that is set forward announces nothing, so somebody has to look (see ticker.py).
            timeout = None if next_ms is None else min(max(0, next_ms - now_ms), CLOCK_LOOK_MS) / 1000
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _expired(self, window: Window, offsets: list[int]) -> Iterator[tuple[Window, list[Marked], bool]]:
        in_order = [offset for offset in offsets if window.held[offset].in_order]
        for offset in in_order:
            window.held[offset].times += 1
            window.give_back(offset)
        if in_order:
            self._broker.waiters.wake([window.topic])
        others = _mark(window, [offset for offset in offsets if offset in window.held])
        if others:
            yield window, others, False

    async def _try_copy(self, window: Window, marked: list[Marked], later: bool) -> None:
        try:
            await self._copy(window, marked, later=later)
        except RequestError as error:
            await self._apart(window, marked, later, error)
        except TimeballError as error:
            logger.warning(
                "messages come back later group=%s topic=%s messages=%d reason=%s",
                window.group,
                window.topic,
                len(marked),
                error,
            )

    async def _apart(self, window: Window, marked: list[Marked], later: bool, error: RequestError) -> None:
        """The copy of one of these breaks a rule, as properties that have grown too long do: the others come back."""
        if len(marked) == 1:
            logger.warning(
                "message not given back group=%s topic=%s offset=%d reason=%s",
                window.group,
                window.topic,
                marked[0].offset,
                error,
            )
            if not later and _held(window, marked):
                window.give_back(marked[0].offset)  # without a copy it comes again as it is, and is not lost
                self._broker.waiters.wake([window.topic])
            return
        middle = len(marked) // 2
        for half in (marked[:middle], marked[middle:]):
            offsets = _held(window, half)
            if offsets:
                await self._try_copy(window, _mark(window, offsets), later)

    async def _copy(self, window: Window, marked: list[Marked], *, later: bool, dead: bool = False) -> None:
        was_full = window.open_rows >= limits.POP_HELD_PER_QUEUE_MAX
        try:
            for part in _parts(marked):
                async with self._slots:
                    await self._copy_part(window, part, later=later, dead=dead)
                for one in part:
                    window.done(one.offset)
        finally:
            for one in marked:
                if window.held.get(one.offset) is one.held:
                    self._restore(window, one)
            self._windows.store(window)
        if was_full or dead:
            self._broker.waiters.wake([window.topic])

    def _restore(self, window: Window, one: Marked) -> None:
        held = one.held
        held.pop_ms = one.pop_ms
        held.deadline_ms = max(held.deadline_ms, self._parts.clock.now_ms() + AGAIN_MS)
        self.expect(window, [one.offset], held.pop_ms, held.deadline_ms)

    async def _copy_part(self, window: Window, part: list[Marked], *, later: bool, dead: bool) -> None:
        parts = self._parts
        # Retention has let go of some, here as in the queue; others were forgotten when somebody moved the group.
        kept = [
            one
            for one in part
            if one.held.seq >= parts.reader.first_seq and window.held.get(one.offset) is one.held
        ]
        if not kept:
            return
        seqs = np.array([one.held.seq for one in kept], dtype=np.int64)
        batch = copies.build(
            await in_thread(parts.reader_thread, parts.reader.take, seqs),
            group=window.group,
            topic=window.topic,
            pop_ms=[one.pop_ms for one in kept],
            times_max=parts.groups.times_max(window.group),
            due_ms=[one.held.deadline_ms for one in kept] if later else None,
            dead=dead,
        )
        for name in set(batch.column("topic").to_pylist()):
            parts.topics.ensure(name, 1)
        await self._broker.send_again(batch)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._parts.on_failure(error)  # nothing would come back any more, and nobody would hear of it


def _mark(window: Window, offsets: list[int]) -> list[Marked]:
    """These are on their way back: their receipts do not count."""
    marked = [Marked(o, window.held[o], window.held[o].pop_ms) for o in offsets]
    for one in marked:
        one.held.pop_ms = NO_RECEIPT
    return marked


def _held(window: Window, marked: list[Marked]) -> list[int]:
    """Those of these whose receipts count again and have not come back."""
    return [one.offset for one in marked if window.find(one.offset, one.pop_ms) is one.held]


def _oldest(window: Window) -> list[int]:
    """Positions in hand in the older half of a stretch that is too wide."""
    end = window.next_offset - limits.POP_SPAN_MAX // 2
    return [o for o, one in window.held.items() if o < end and not one.in_order and one.pop_ms != NO_RECEIPT]


def _parts(marked: list[Marked]) -> Iterator[list[Marked]]:
    part: list[Marked] = []
    size_bytes = 0
    for one in marked:
        if part and (len(part) == PART_ROWS or size_bytes + one.held.size_bytes > PART_BYTES):
            yield part
            part, size_bytes = [], 0
        part.append(one)
        size_bytes += one.held.size_bytes
    if part:
        yield part
