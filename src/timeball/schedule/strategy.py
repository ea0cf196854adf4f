"""The contract of a schedule: what every design of waiting must do, in column batches, never single messages.

    admit      these promises are durable: keep them until they are due or cancelled
    due        hand out what is due, in (due_ms, seq) order; each promise once, never before its instant
    released   what was handed out is in the log now
    moving     these must be written again to go on waiting: a wheel's roll, a cascade's hop
    moved      they stand in the log again, here
    next_due_ms  sleep until then (None: until something is admitted)
    cancel     settle it here and now: true for those that were waiting and are not any more

All methods run on the event loop, in the order in which the log gives out sequence numbers; that order decides
every race, so that a promise handed out cannot be cancelled and a cancelled one is never handed out. What needs
the disk runs in a reader thread behind the strategy's back and shows only in `next_due_ms`.

A promise is known by its instant and the number of its first row, for ever. Written again it waits on, may be
cancelled meanwhile, and is written no third time before `moved` has said where it stands.

How a strategy is built, given files, and what it saves for a restart is its own affair: the composition root knows
which it chose.

The contract suite (tests/schedule/contract.py) holds for all strategies: never early, never lost, never twice,
order, cancel at any moment, restart anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.files import File
from timeball.message import Int64Array
from timeball.schedule.places import Placed


@dataclass(frozen=True, slots=True)
class Settled:
    """Which promises are settled: these pairs, and all that are due before `before_ms` and below `before_seq`.

    Except, of the latter, those of the ranges `late` = (first_seq, rows): numbers that were set aside before
    `before_seq` and whose promises came after it, by a bulk attach. Of them only the pairs are settled.
    """

    before_ms: int
    due_ms: Int64Array
    seq: Int64Array
    before_seq: int = 1 << 62
    late: tuple[tuple[int, int], ...] = ()

    def may_wait(self, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these sequence numbers, due before `before_ms`, may be of promises that are not settled."""
        waits = np.asarray(seq >= self.before_seq)
        for first_seq, rows in self.late:
            waits |= (seq >= first_seq) & (seq < first_seq + rows)
        return waits

    def may_touch(self, min_seq: int, max_seq: int) -> bool:
        """Whether `may_wait` can be true of any number in [min_seq, max_seq]."""
        late = any(min_seq < first_seq + rows and max_seq >= first_seq for first_seq, rows in self.late)
        return late or max_seq >= self.before_seq


class Strategy(Protocol):
    """See the module's docstring. Batches are in `message.READ_SCHEMA`; instants are the scheduler clock's ms."""

    def admit(self, promises: pa.RecordBatch) -> None:
        """Keep these durable promises."""

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        """Up to `limit` promises with due_ms <= now_ms, sorted by (due_ms, seq), now in flight; None when none."""

    def released(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """The release records of these promises, handed out before, are durable."""

    def moving(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        """Up to `limit` promises to be written again, as their new rows are to say; None when none.

        They keep their numbers and the time they were accepted at (`store_ms`).
        """

    def moved(self, seq: Int64Array, at_seq: Int64Array) -> None:
        """Promises handed out by `moving`, in that order, perhaps in parts, are durable as these rows."""

    def next_due_ms(self) -> int | None:
        """When `due` will next have something, or the schedule wants to be called to load more."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Stop waiting for these; true where the promise was waiting until now."""

    def was_cancelled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these, known to wait no more, were cancelled, as far as anybody still remembers."""

    def statistics(self) -> dict[str, int]:
        """Counts for people, by name."""


class Keeper(Strategy, Protocol):
    """A strategy that keeps what waits in files of its own, in place of the pending table.

    Its files are caches: what a checkpoint did not sync is not believed.
    """

    def refuse(self, due_ms: Int64Array) -> None:
        """Raise OverLimit when promises for these instants, not yet in the log, would be too many."""

    def dress(self, promises: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        """LOG_SCHEMA promises as they are to stand in the log."""

    @property
    def settled_before_ms(self) -> int:
        """Every durable promise kept here and due before this instant is settled, durably."""

    @property
    def first_needed_seq(self) -> int | None:
        """The oldest row of the log in which a promise that waits lies; retention must leave it."""

    def restore(self, state: msgspec.Struct | None, settled: Settled, waiting: Placed, now_ms: int) -> None:
        """Recovery, with what `state` had returned, and the promises that came, or moved, since; blocking.

        Without a state `waiting` is all that waits. What is settled is known to the shared `Settling` already.
        """

    def state(self) -> msgspec.Struct:
        """What a restart needs besides the files, for the checkpoint."""

    def take_dirty(self) -> list[tuple[str, list[File]]]:
        """(folder, files) written since the last call: to be synced before `state` is saved."""

    def unsynced(self) -> None:
        """What `take_dirty` gave out was not synced."""

    async def close(self) -> None:
        """Wait for the reader thread, and let go of the files."""
