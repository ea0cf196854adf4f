"""What has been near and is not any more: the clock was set back, or this machine's is behind the one before it.

The horizon moves back with the clock. Otherwise all that is promised until the clock has caught up, a year perhaps,
would lie below it, and be held in memory. What the wheel holds above the new horizon keeps its body and is *parked*,
outside of the wheel, until the horizon comes to it again: no more than one gather had brought.

Up to the *highest* horizon there was, the files of the table have been looked through: they are not looked into
again below it. But a file that comes now, from the tail or from other files, may bring both what was promised
since and what has been seen. What a gather finds below the highest is asked whether it still waits, and whether it
is parked, or left to a dispatcher: sent once is sent.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.message import Int64Array
from timeball.schedule.hour_log.placement import FIRST, NEVER
from timeball.schedule.settling import Settling
from timeball.schedule.wheel import Run, SecondWheel
from timeball.table.data_file import Position, search

Bools = npt.NDArray[np.bool_]


class Parking:
    """See the module. `len` counts promises parked."""

    def __init__(self, settling: Settling, elsewhere: Callable[[Int64Array, Int64Array], Bools]) -> None:
        """`elsewhere` says which pairs are known and neither here nor settled."""
        self._settling, self._parked, self._elsewhere = settling, SecondWheel(), elsewhere
        self.highest: Position = FIRST  # that the horizon has been at

    def __len__(self) -> int:
        return len(self._parked)

    def next_due_ms(self) -> int | None:
        """The earliest instant parked."""
        return self._parked.next_due_ms()

    def park(self, wheel: SecondWheel, horizon: Position, was: Position) -> None:
        """The horizon moves back from `was`: the wheel keeps what lies before it."""
        self.highest = max(self.highest, was)
        run = wheel.take_due(NEVER, len(wheel))
        if run is not None:
            cut = search(run.due, run.seq, horizon)
            wheel.add_run(run.part(0, cut))
            self._parked.add_run(run.part(cut, len(run.due)))

    def unpark(self, wheel: SecondWheel, horizon: Position) -> None:
        """The horizon has come to here: what lies before it is near again."""
        run = self._parked.take_due(horizon, len(self._parked))
        if run is not None:
            wheel.add_run(run)

    def not_seen(self, run: Run, low: Position) -> Run:
        """Of what a gather found from `low` on, the promises that are neither settled nor elsewhere."""
        keep = self.unseen(run.due, run.seq, low)
        return run if keep.all() else Run(run.due[keep], run.seq[keep], run.rows.filter(pa.array(keep)))

    def unseen(self, due_ms: Int64Array, seq: Int64Array, low: Position) -> Bools:
        """As `not_seen`, of pairs."""
        if low >= self.highest:
            return np.ones(len(seq), np.bool_)
        parked = self._parked.contains(due_ms, seq)
        return self._settling.waits(due_ms, seq) & ~parked & ~self._elsewhere(due_ms, seq)
