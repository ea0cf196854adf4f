"""The simplest strategy that writes again what waits, in a dictionary; and wrong ones that the contract must catch.

Not a design anybody could run: it is the other end of the contract, so that `World` and its model are tested for
moves without a wheel or a cascade. Whatever has lain for a quarter of the time that was left then, and for
`ROLL_MS` at least, is written again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tests.schedule.stage import Restart
from tests.schedule.world import World

from timeball.errors import TimeballError
from timeball.log.reader import LogReader
from timeball.message import Int64Array, Kind, int64
from timeball.schedule.places import Placed, take_promises
from timeball.schedule.settling import Settling
from timeball.schedule.strategy import Settled, Strategy
from timeball.table.attachment import Attachment
from timeball.table.data_file import DataFile

ROLL_MS = 20_000
FAR_MS = 1 << 62


@dataclass(frozen=True)
class Place:
    """Where a promise lies, and since when."""

    due_ms: int
    at: int
    since_ms: int

    @property
    def roll_ms(self) -> int:
        """When to write it again."""
        return self.since_ms + max(ROLL_MS, (self.due_ms - self.since_ms) // 4)


class Roller:
    """See the module; implements `strategy.Strategy`."""

    def __init__(
        self,
        reader: LogReader,
        settling: Settling,
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._reader, self._settling = reader, settling
        self._on_change, self._on_failure = on_change, on_failure
        self.waiting: dict[int, Place] = {}
        self.handed_out: dict[int, Place] = {}
        self.on_the_move: deque[list[int]] = deque()

    def admit(self, promises: pa.RecordBatch) -> None:
        columns = (int64(promises.column(name)).tolist() for name in ("seq", "due_ms", "store_ms"))
        self.waiting |= {seq: Place(due, seq, now_ms) for seq, due, now_ms in zip(*columns, strict=True)}
        self._on_change()

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        below_ms = min(now_ms + 1, self._first_on_the_move_ms())
        pairs = ((self.waiting[seq].due_ms, seq) for seq in self._lying())
        due = sorted(pair for pair in pairs if pair[0] < below_ms)[:limit]
        rows = self._rows([seq for _, seq in due])
        if rows is not None:
            self.handed_out |= {seq: self.waiting.pop(seq) for _, seq in due}
            self._settling.hand_out(int64(rows.column("due_ms")), int64(rows.column("seq")))
        return rows

    def released(self, due_ms: Int64Array, seq: Int64Array) -> None:
        self._settling.released(due_ms, seq)
        for released in seq.tolist():
            del self.handed_out[released]

    def moving(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        ripe = [seq for seq in self._lying() if now_ms >= self.waiting[seq].roll_ms][:limit]
        rows = self._rows(ripe)
        if rows is not None:
            self.on_the_move.append(ripe)
            self.waiting |= {seq: replace(self.waiting[seq], since_ms=now_ms) for seq in ripe}
        return rows

    def moved(self, seq: Int64Array, at_seq: Int64Array) -> None:
        batch = self.on_the_move[0]
        assert batch[: len(seq)] == seq.tolist(), "moves become durable in the order in which they were taken"
        del batch[: len(seq)]
        if not batch:
            self.on_the_move.popleft()
        for moved, at in zip(seq.tolist(), at_seq.tolist(), strict=True):
            if moved in self.waiting:
                self.waiting[moved] = replace(self.waiting[moved], at=at)
        self._on_change()

    def next_due_ms(self) -> int | None:
        first_ms = self._first_on_the_move_ms()
        lying = [self.waiting[seq] for seq in self._lying()]
        calls = [place.roll_ms for place in lying]
        calls += [place.due_ms for place in lying if place.due_ms < first_ms]
        return min(calls, default=None)

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        answers = self._settling.cancel(due_ms, seq)
        for cancelled in seq[answers].tolist():
            del self.waiting[cancelled]
        self._on_change()
        return answers

    def was_cancelled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        return self._settling.was_cancelled(due_ms, seq)

    def statistics(self) -> dict[str, int]:
        return {"waiting_rows": len(self.waiting)}

    @property
    def settled_before_ms(self) -> int:
        """All that waits or is in flight is due later."""
        in_flight_ms = self._settling.first_in_flight_ms
        dues = [place.due_ms for place in self.waiting.values()]
        return min([*dues, FAR_MS if in_flight_ms is None else in_flight_ms])

    @property
    def first_needed_seq(self) -> int | None:
        """The oldest place of what waits, or will wait again after a restart."""
        return min((place.at for place in self.state().values()), default=None)

    def state(self) -> dict[int, Place]:
        """All that is not settled: what is handed out waits again after a restart."""
        return self.waiting | self.handed_out

    def restore(self, state: dict[int, Place], since: Placed) -> None:
        """What waited at the checkpoint and is not settled since, and what came or was written again since."""
        open_ = {
            seq: place
            for seq, place in state.items()
            if not self._settling.is_settled(np.array([place.due_ms]), np.array([seq]))[0]
        }
        for due, seq, at in zip(since.due_ms.tolist(), since.seq.tolist(), since.at.tolist(), strict=True):
            open_[seq] = Place(due, at, self._written_ms(at))
        self.waiting = open_

    def _written_ms(self, at: int) -> int:
        return int(self._reader.take(np.array([at])).column("store_ms")[0].as_py())

    def _lying(self) -> list[int]:
        moving = {seq for batch in self.on_the_move for seq in batch}
        return [seq for seq in self.waiting if seq not in moving]

    def _first_on_the_move_ms(self) -> int:
        moving = (seq for batch in self.on_the_move for seq in batch if seq in self.waiting)
        return min((self.waiting[seq].due_ms for seq in moving), default=FAR_MS)

    def _rows(self, seqs: list[int]) -> pa.RecordBatch | None:
        """Bodies, in this order."""
        if not seqs:
            return None
        at = np.array([self.waiting[seq].at for seq in seqs])
        try:
            rows = take_promises(self._reader, np.sort(at))
        except TimeballError as error:
            self._on_failure(error)
            return None
        return rows.take(pa.array(np.argsort(np.argsort(at))))


class RollerRig:
    """`Roller`, or a subclass of it that is wrong."""

    name = "roller"
    has_table = False
    kind = Kind.PROMISE

    def __init__(self, strategy: type[Roller] = Roller) -> None:
        self._class = strategy
        self.settling = Settling()

    def start(self, world: World, restart: Restart) -> Roller:
        self.settling = Settling()
        self.settling.restore(restart.settled)
        strategy = self._class(world.reader, self.settling, world.wake, world.failures.append)
        state = restart.state or {}
        assert isinstance(state, dict)
        strategy.restore(state, restart.since)
        return strategy

    def dress(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows

    def kept(self, rows: pa.RecordBatch, first_seq: int) -> None:
        pass

    def state(self, strategy: Strategy) -> object:
        assert isinstance(strategy, Roller)
        return strategy.state()

    def settled(self, strategy: Strategy) -> Settled:
        return self.settling.settled()

    def is_busy(self, strategy: Strategy) -> bool:
        return False

    def settled_before_ms(self, strategy: Strategy) -> int:
        assert isinstance(strategy, Roller)
        return strategy.settled_before_ms

    def rows_in_memory(self, strategy: Strategy) -> int:
        assert isinstance(strategy, Roller)
        return len(strategy.waiting)

    def first_needed_seq(self, strategy: Strategy) -> int | None:
        assert isinstance(strategy, Roller)
        return strategy.first_needed_seq

    async def ready_to_cancel(self, strategy: Strategy) -> None:
        pass

    async def attach(self, strategy: Strategy, attachment: Attachment) -> None:
        raise AssertionError("there is no table")

    def live_files(self, strategy: Strategy) -> list[DataFile]:
        return []


# -- negative controls: each breaks one promise of the contract ------------------------------------------------


class HandsOutOnTheMove(Roller):
    """Does not wait for `moved`."""

    def _lying(self) -> list[int]:
        return list(self.waiting)

    def moving(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return None if self.on_the_move else super().moving(now_ms, limit)

    def _first_on_the_move_ms(self) -> int:
        return FAR_MS


class MovesAgain(Roller):
    """Writes a second row while the first is on its way."""

    def moving(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        again = [seq for batch in self.on_the_move for seq in batch if seq in self.waiting]
        return self._rows(again[:1]) or super().moving(now_ms, limit)


class MovesTheCancelled(Roller):
    """Writes again what nobody waits for."""

    _cancelled: tuple[int, Place] | None = None

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        before = dict(self.waiting)
        answers = super().cancel(due_ms, seq)
        if answers.any():
            cancelled = int(seq[answers][0])
            self._cancelled = (cancelled, before[cancelled])
        return answers

    def moving(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        if self._cancelled is None:
            return super().moving(now_ms, limit)
        (seq, place), self._cancelled = self._cancelled, None
        self.waiting[seq] = place
        rows = self._rows([seq])
        del self.waiting[seq]
        return rows


class MovesRows(Roller):
    """Gives out rows of the log as they are, not the promises in them."""

    def _rows(self, seqs: list[int]) -> pa.RecordBatch | None:
        rows = super()._rows(seqs)
        if rows is None or all(self.waiting[seq].at == seq for seq in seqs):
            return rows
        stored = pa.array([self._written_ms(self.waiting[seq].at) for seq in seqs])
        return rows.set_column(rows.schema.get_field_index("store_ms"), rows.schema.field("store_ms"), stored)


class LosesBodiesOnTheMove(Roller):
    """Writes something else again."""

    def moving(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        rows = super().moving(now_ms, limit)
        if rows is None:
            return None
        nothing = pa.array([b""] * rows.num_rows)
        return rows.set_column(rows.schema.get_field_index("body"), rows.schema.field("body"), nothing)


class LetsGoTooMuch(Roller):
    """Says that the log is needed from the newest place on, not from the oldest."""

    @property
    def first_needed_seq(self) -> int | None:
        return max((place.at for place in self.state().values()), default=None)


class ForgetsThemAtARestart(Roller):
    """Saves only what lies still."""

    def state(self) -> dict[int, Place]:
        return self.handed_out | {seq: self.waiting[seq] for seq in self._lying()}


class TakesEachRowForAPromise(Roller):
    """After a restart what was written again waits twice."""

    def restore(self, state: dict[int, Place], since: Placed) -> None:
        super().restore(state, since)
        twice = zip(since.due_ms.tolist(), since.at.tolist(), strict=True)
        self.waiting |= {at: Place(due, at, self._written_ms(at)) for due, at in twice}


class SleepsOnTheMove(Roller):
    """Nobody is woken when a move is done."""

    def moved(self, seq: Int64Array, at_seq: Int64Array) -> None:
        wake, self._on_change = self._on_change, lambda: None
        super().moved(seq, at_seq)
        self._on_change: Callable[[], None] = wake


class TurnsOnTheMove(Roller):
    """Wants to be called at once for what is on the move."""

    def next_due_ms(self) -> int | None:
        return 0 if any(self.on_the_move) else super().next_due_ms()


class NeverGoesBack(Roller):
    """What was once the time stays it."""

    _latest_ms = 0

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self._latest_ms = max(self._latest_ms, now_ms)
        return super().due(self._latest_ms, limit)


class WaitsForTheClock(Roller):
    """Does nothing until the clock is where it was before it was set back."""

    _latest_ms = 0

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self._latest_ms = max(self._latest_ms, now_ms)
        return super().due(now_ms, limit) if now_ms >= self._latest_ms else None

    def next_due_ms(self) -> int | None:
        upcoming = super().next_due_ms()
        return None if upcoming is None else max(upcoming, self._latest_ms)


class MovesTooMuch(Roller):
    """Writes more again than it was asked for."""

    def moving(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return super().moving(now_ms, limit + 1)
