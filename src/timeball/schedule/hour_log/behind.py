"""Rows that files bring *behind* the horizon, near or late already: loaded at once, all of them.

A bulk job attaches what is due in a minute, or was an hour ago; no gather will come by there again. Until such a
load is done, its earliest instant bounds what may be called settled, and a cancel waits for it (`quiet`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

import pyarrow as pa

from timeball.message import int64
from timeball.schedule.hour_log.pending import close_far, load
from timeball.schedule.hour_log.placement import FIRST
from timeball.schedule.strategy import Settled
from timeball.schedule.wheel import SecondWheel
from timeball.table.data_file import DataFile, Position


class Behind:
    """See the module. `len` counts loads under way. Belongs to the event loop."""

    def __init__(
        self,
        reader_thread: Executor,
        wheel: SecondWheel,
        *,
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._thread, self._wheel = reader_thread, wheel
        self._on_change, self._on_failure = on_change, on_failure
        self._loads: dict[asyncio.Task[None], int] = {}  # -> earliest instant of its files

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def first_due_ms(self) -> int | None:
        """A lower bound of the earliest instant on its way into memory."""
        return min(self._loads.values(), default=None)

    async def quiet(self) -> None:
        """Return when every load is done."""
        while self._loads:
            await asyncio.wait(list(self._loads))

    def load(self, files: list[DataFile], horizon: Position, settled: Settled | None) -> None:
        """Put what these files hold before the horizon into the wheel. What `settled` covers is left out."""
        behind = [file for file in files if (file.entry.min_due_ms, file.entry.min_seq) < horizon]
        if behind:
            task = asyncio.get_running_loop().create_task(self._load(behind, horizon, settled))
            self._loads[task] = min(file.entry.min_due_ms for file in behind)

    async def _load(self, files: list[DataFile], horizon: Position, settled: Settled | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            loop = asyncio.get_running_loop()
            rows = await loop.run_in_executor(self._thread, _load_below, files, horizon)
            if rows is not None:
                if settled is not None:
                    rows = rows.filter(pa.array(settled.may_wait(int64(rows.column("seq")))))
                self._wheel.add(rows)
                self._on_change()
        except Exception as error:
            # Whatever it was, promises are not where they should be: the broker must stop and say so.
            self._on_failure(error)
        finally:
            del self._loads[task]


def _load_below(files: list[DataFile], horizon: Position) -> pa.RecordBatch | None:
    """Rows below the horizon of files that have just come (reader thread)."""
    rows = load(files, FIRST, horizon)
    close_far(files, horizon[0])
    return rows
