"""What happened, counted from both ends: what was asked for against what the consumer received."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.table import Table

from timeball.cli.demo.day import DayRun


@dataclass(frozen=True)
class Outcome:
    """The figures of the demo. Lateness in milliseconds, from due to stored in the queue."""

    scheduled: int
    cancelled: int
    released: int
    early: int
    lost: int
    duplicates: int
    released_though_cancelled: int
    lateness_p50_ms: float
    lateness_p99_ms: float
    lateness_max_ms: float
    received_p99_ms: float

    @property
    def faultless(self) -> bool:
        """Nothing early, lost, doubled, or released after it was cancelled."""
        return not (self.early or self.lost or self.duplicates or self.released_though_cancelled)


def lateness_ms(run: DayRun) -> npt.NDArray[np.int64]:
    """Stored minus due of each message received."""
    return np.asarray(run.arrivals.store_ms, dtype=np.int64) - np.asarray(run.arrivals.due_ms, dtype=np.int64)


def judge(run: DayRun) -> Outcome:
    """Compare the day as scheduled with the day as received."""
    ids = set(run.flights.id.to_pylist())
    cancelled = set(run.flights.select(run.flights.cancelled).id.to_pylist())
    received = set(run.arrivals.ids)
    late = lateness_ms(run)
    seen = np.asarray(run.arrivals.seen_ms, dtype=np.int64) - np.asarray(run.arrivals.due_ms, dtype=np.int64)
    none = len(late) == 0
    return Outcome(
        scheduled=len(ids),
        cancelled=run.verdicts["cancelled"],
        released=len(received),
        early=int((late < 0).sum() + (seen < 0).sum()),
        lost=len(ids - cancelled - received),
        duplicates=len(run.arrivals.ids) - len(received),
        released_though_cancelled=len(received & cancelled),
        lateness_p50_ms=0.0 if none else float(np.quantile(late, 0.5)),
        lateness_p99_ms=0.0 if none else float(np.quantile(late, 0.99)),
        lateness_max_ms=0.0 if none else float(late.max()),
        received_p99_ms=0.0 if none else float(np.quantile(seen, 0.99)),
    )


def outcome_table(outcome: Outcome, waiting: int, ram_bytes: float, audit_text: str) -> Table:
    """The short table at the end."""
    table = Table(title="What happened", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    counts = ("scheduled", "cancelled", "released", "early", "lost", "duplicates")
    for name in counts:
        value = getattr(outcome, name)
        bad = name in ("early", "lost", "duplicates") and value
        table.add_row(name, f"[red]{value:,}[/red]" if bad else f"{value:,}")
    if outcome.released_though_cancelled:
        table.add_row("released though cancelled", f"[red]{outcome.released_though_cancelled:,}[/red]")
    worst = (
        f"{outcome.lateness_p50_ms:.0f} / {outcome.lateness_p99_ms:.0f} / {outcome.lateness_max_ms:.0f} ms"
    )
    table.add_row("lateness p50 / p99 / max", worst)
    table.add_row("at the consumer, p99", f"{outcome.received_p99_ms:.0f} ms")
    table.add_row("still waiting", f"{waiting:,}")
    table.add_row("RAM per waiting promise", f"{ram_bytes:.1f} bytes")
    table.add_row("audit on Spark", audit_text)
    return table
