"""What happened, counted from both ends: what was asked for against what the consumer received."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.table import Table

from timeball.cli.demo.day import DayRun


@dataclass(frozen=True)
class Outcome:
    """The figures of the demo. Lateness in milliseconds, from due to stored in the queue.

    `too_late` counts cancels that the broker refused because the message was out already: no fault, but shown.
    """

    scheduled: int
    cancelled: int
    released: int
    early: int
    lost: int
    duplicates: int
    released_though_cancelled: int
    too_late: int
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
    cancelled = run.said("cancelled")
    received = set(run.arrivals.ids)
    late = lateness_ms(run)
    seen = np.asarray(run.arrivals.seen_ms, dtype=np.int64) - np.asarray(run.arrivals.due_ms, dtype=np.int64)
    none = len(late) == 0
    return Outcome(
        scheduled=len(ids),
        cancelled=len(cancelled),
        released=len(received),
        early=int((late < 0).sum() + (seen < 0).sum()),
        lost=len(ids - cancelled - received),
        duplicates=len(run.arrivals.ids) - len(received),
        released_though_cancelled=len(received & cancelled),
        too_late=len(run.said("released")),
        lateness_p50_ms=0.0 if none else float(np.quantile(late, 0.5)),
        lateness_p99_ms=0.0 if none else float(np.quantile(late, 0.99)),
        lateness_max_ms=0.0 if none else float(late.max()),
        received_p99_ms=0.0 if none else float(np.quantile(seen, 0.99)),
    )


def outcome_table(outcome: Outcome, waiting: int, ram_bytes: float, audit_text: str) -> Table:
    """The short table at the end."""
    # With each schedule the same is measured: what comes from Spark waits in the pending table.
    table = Table(title="What happened", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name in ("scheduled", "cancelled", "released"):
        table.add_row(name, f"{getattr(outcome, name):,}")
    if outcome.too_late:
        table.add_row("cancels too late", f"[yellow]{outcome.too_late:,}[/yellow]")
    for name in ("early", "lost", "duplicates"):
        table.add_row(name, _fault(getattr(outcome, name)))
    if outcome.released_though_cancelled:
        table.add_row("released though cancelled", _fault(outcome.released_though_cancelled))
    lateness = (outcome.lateness_p50_ms, outcome.lateness_p99_ms, outcome.lateness_max_ms)
    table.add_row("lateness p50 / p99 / max", " / ".join(f"{value:.0f}" for value in lateness) + " ms")
    table.add_row("at the consumer, p99", f"{outcome.received_p99_ms:.0f} ms")
    table.add_row("still waiting", f"{waiting:,}")
    table.add_row(
        "RAM per promise in the table", f"{ram_bytes:.1f} bytes" if ram_bytes >= 1 else "less than 1 byte"
    )
    table.add_row("audit on Spark", audit_text)
    return table


def _fault(count: int) -> str:
    return f"[red]{count:,}[/red]" if count else "0"
