"""What `designs` compares: the strategies, how a broker is told to use each, and what became of its scheduled messages.

`delay_levels` is beside the keeper of instants in every broker; its column sends scheduled messages of a level, where
the others send instants. Levels come over RocketMQ's wire only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.model.config import Settings
from timeball.model.limits import DELAY_MS_MAX
from timeball.model.message import Int64Array, Kind
from timeball.schedule.delay_levels import LevelTable

HOUR_MS = 3_600_000
SMALL_WHEEL_MS = HOUR_MS  # a ring of 1 ms slots takes 4 GB at its usual reach: too much for a test
LEVELS_MS = [int(ms) for ms in LevelTable.parse(Settings().delay_levels).durations_ms]


@dataclass(frozen=True)
class Design:
    """One column: a strategy and its precision. `by_level`: what waits has a level and no instant."""

    name: str
    schedule: str
    precision_ms: int = 1_000
    by_level: bool = False

    def settings(self, small: bool) -> dict[str, object]:
        """As `config.Settings` takes them."""
        chosen: dict[str, object] = {"strategy": self.schedule, "timer_precision_ms": self.precision_ms}
        if small and self.precision_ms == 1:
            chosen["timer_wheel_ms"] = SMALL_WHEEL_MS
        return chosen

    def reach_ms(self, small: bool) -> int:
        """Longest delay worth trying: a thousand rolls of the small ring would say nothing, slowly."""
        return SMALL_WHEEL_MS if small and self.precision_ms == 1 else DELAY_MS_MAX

    def options(self, small: bool) -> list[str]:
        """As `timeball serve` takes them."""
        pairs = [("--" + name.replace("_", "-"), str(value)) for name, value in self.settings(small).items()]
        return [word for pair in pairs for word in pair]


DESIGNS = [
    Design("hour_log", "hour_log"),
    Design("timer_wheel 1 s", "timer_wheel"),
    Design("timer_wheel 1 ms", "timer_wheel", precision_ms=1),
    Design("level_cascade", "level_cascade"),
    Design("delay_levels", "hour_log", by_level=True),
]


def level_of(delay_ms: int) -> int | None:
    """The level that waits so long, counted from 1; None when no level does."""
    return LEVELS_MS.index(delay_ms) + 1 if delay_ms in LEVELS_MS else None


@dataclass
class Ledger:
    """What was promised and what was released, as the log says; columns of all rows."""

    seq: Int64Array
    due_ms: Int64Array
    released_seq: Int64Array
    released_due_ms: Int64Array
    released_ms: Int64Array  # stamps of the release records
    moved_rows: int = 0  # scheduled messages written again

    @classmethod
    def of(cls, batches: Iterable[pa.RecordBatch]) -> Ledger:
        """From READ_SCHEMA rows of the log."""
        promised: list[tuple[Int64Array, ...]] = []
        released: list[tuple[Int64Array, ...]] = []
        moved_rows = 0
        for batch in batches:
            kinds = batch.column("kind").to_numpy()
            later = kinds == Kind.SCHEDULED
            promised.append(_columns(batch, later, ("seq", "due_ms")))
            moved_rows += int((kinds == Kind.MOVED).sum())
            released.append(_columns(batch, kinds == Kind.RELEASE, ("source_seq", "due_ms", "store_ms")))
        seq, due_ms = _joined(promised, 2)
        released_seq, released_due_ms, released_ms = _joined(released, 3)
        return cls(seq, due_ms, released_seq, released_due_ms, released_ms, moved_rows)

    @property
    def late_ms(self) -> Int64Array:
        """Of each release: its stamp minus its instant."""
        return self.released_ms - self.released_due_ms


@dataclass
class Tally:
    """Over all the work of one strategy: kept once, early, and what is wrong."""

    kept_once: int = 0
    wrong: int = 0  # missing, doubled, never promised, or with another instant than was promised
    early: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, what: str, ledger: Ledger, promised: int, due_before_ms: int) -> None:
        """So many were accepted; all due before this instant should have been released, once, and not early."""
        expected = ledger.due_ms < due_before_ms
        kept = np.isin(ledger.seq, ledger.released_seq)
        order = np.argsort(ledger.seq)
        at = order[np.searchsorted(ledger.seq, ledger.released_seq, sorter=order).clip(max=len(order) - 1)]
        known = (ledger.seq[at] == ledger.released_seq) & (ledger.due_ms[at] == ledger.released_due_ms)
        missing = int((expected & ~kept).sum()) + abs(promised - len(ledger.seq))
        doubled = len(ledger.released_seq) - len(np.unique(ledger.released_seq))
        alien, early = int((~known).sum()), int((ledger.late_ms < 0).sum())
        self.kept_once += int(kept.sum())
        self.wrong += missing + doubled + alien
        self.early += early
        if missing + doubled + alien + early:
            self.notes.append(f"{what}: {missing} missing, {doubled} doubled, {alien} alien, {early} early")


def _columns(
    batch: pa.RecordBatch, chosen: npt.NDArray[np.bool_], names: tuple[str, ...]
) -> tuple[Int64Array, ...]:
    rows = batch.select(names).filter(pa.array(chosen))
    return tuple(np.asarray(column, dtype=np.int64) for column in rows.columns)


def _joined(parts: list[tuple[Int64Array, ...]], width: int) -> list[Int64Array]:
    return [
        np.concatenate([part[at] for part in parts] or [np.empty(0, dtype=np.int64)]) for at in range(width)
    ]
