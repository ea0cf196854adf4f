"""Collect Python's reference cycles in short pauses.

Python collects cycles in three generations. A collection of the oldest generation visits every container of the
process and stops the event loop: 240 ms in a broker with 5,000 groups. But the state of a broker lives long and has
almost no cycles, and reference counts free the objects of a request.

So each survivor of two young collections is *frozen* (`gc.freeze`): later collections do not visit it. A pause then
visits a few thousand objects, however large the state of the broker is. Reference counts still free frozen objects. A
cycle that became garbage after its objects were frozen (for example of a closed connection) stays, so a full collection
follows while the broker is idle, or at the latest after four million new blocks of memory.

docs/decisions/0107-cycles-in-short-pauses.md has the measurements.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from typing import Any

from timeball.io.clock import SystemClock, process_cpu_ns

YOUNG_OBJECTS = 2_000  # new containers between two collections; Python's default is 700
_YOUNG_COLLECTIONS = 1  # the second generation is collected after more than this number of first ones
_NEVER = 1_000_000_000  # Python itself starts no full collection

# Growth is counted in blocks of Python's allocator. `gc.get_freeze_count` would walk all frozen objects.
IDLE_GROWTH_BLOCKS = 200_000  # worth a full collection of an idle broker
GROWTH_BLOCKS_MAX = 4_000_000  # about 300 MB, if all of it were garbage
_IDLE_CPU_SHARE = 0.02  # of one core
_FREE_MS = 2_000  # nothing may become due within this time: a full collection takes a fifth of it

logger = logging.getLogger(__name__)


class CycleCollection:
    """The collector of this process. Only processes that are a broker or a bridge start it."""

    def __init__(
        self,
        cpu_ns: Callable[[], int] = process_cpu_ns,
        monotonic_ns: Callable[[], int] = SystemClock.monotonic_ns,
    ) -> None:
        self._cpu_ns, self._monotonic_ns = cpu_ns, monotonic_ns
        self._thresholds: tuple[int, int, int] | None = None  # Python's own, while this is started
        self._blocks = 0  # allocated blocks: the minimum since the last full collection
        self._last_check = (0, 0)  # (CPU time, monotonic time) of the last check, in ns

    def start(self) -> None:
        """Freeze all current objects, and collect in short pauses from now on."""
        if self._thresholds is not None:
            return
        self._thresholds = gc.get_threshold()
        gc.callbacks.append(_freeze_survivors)
        gc.set_threshold(YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _NEVER)
        gc.freeze()
        self._blocks = sys.getallocatedblocks()
        self._last_check = self._cpu_ns(), self._monotonic_ns()

    def stop(self) -> None:
        """Collect as Python does by default."""
        if self._thresholds is not None:
            gc.set_threshold(*self._thresholds)
            gc.callbacks.remove(_freeze_survivors)
            gc.unfreeze()
            self._thresholds = None

    def collect_if_due(self, next_due_in_ms: int | None) -> bool:
        """Collect all garbage if it is worth the pause. Returns true if it did.

        `next_due_in_ms` is the time until the next message is due, or None if none is pending.
        """
        previous_cpu_ns, previous_ns = self._last_check
        cpu_ns, now_ns = self._last_check = self._cpu_ns(), self._monotonic_ns()
        if self._thresholds is None:
            return False
        blocks = sys.getallocatedblocks()
        # The minimum: otherwise garbage as large as the state that was freed meanwhile would not count as growth.
        self._blocks = min(self._blocks, blocks)
        grown_blocks = blocks - self._blocks
        is_idle = cpu_ns - previous_cpu_ns < _IDLE_CPU_SHARE * (now_ns - previous_ns) and (
            next_due_in_ms is None or next_due_in_ms > _FREE_MS
        )
        if grown_blocks < (IDLE_GROWTH_BLOCKS if is_idle else GROWTH_BLOCKS_MAX):
            return False
        self.collect()
        return True

    def collect(self) -> None:
        """Collect all garbage now."""
        now_ns = self._monotonic_ns()
        gc.unfreeze()
        garbage_objects = gc.collect()
        gc.freeze()
        self._blocks = sys.getallocatedblocks()
        logger.info(
            "collected all cycles garbage_objects=%d blocks=%d ms=%d",
            garbage_objects, self._blocks, (self._monotonic_ns() - now_ns) // 1_000_000,
        )  # fmt: skip


# The collector belongs to the process, as Python's does.
CYCLES = CycleCollection()


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    """Freeze all objects after a collection of the second generation (a callback of `gc`)."""
    if phase == "stop" and info["generation"] == 1:  # the generations are 0, 1 and 2
        gc.freeze()
