"""The day, counted from both ends: what was asked for against what the consumer received. A table and two pictures.

The pictures are drawn without a display. Colours can be told apart by the colour-blind and in grey.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from examples.flights.day import DayRun
from rich.table import Table


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


def outcome_table(
    outcome: Outcome, waiting: int, ram_bytes: float, audit_name: str, audit_text: str
) -> Table:
    """The short table at the end."""
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
        "RAM per scheduled message",
        f"{ram_bytes:.1f} bytes" if ram_bytes >= 1 else "less than 1 byte",
    )
    table.add_row(audit_name, audit_text)
    return table


def _fault(count: int) -> str:
    return f"[red]{count:,}[/red]" if count else "0"


BIN_MINUTES = 15
RELEASED, CANCELLED, SCHEDULED = "#0072B2", "#E69F00", "#222222"


def draw(run: DayRun, outcome: Outcome, day_name: str, folder: Path) -> list[Path]:
    """Write due-load.png and lateness.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    load, late = folder / "due-load.png", folder / "lateness.png"
    _draw_load(run, outcome, day_name, load)
    _draw_lateness(run, outcome, late)
    return [load, late]


def _draw_load(run: DayRun, outcome: Outcome, day_name: str, file: Path) -> None:
    edges = np.arange(0, 24 * 60 + 1, BIN_MINUTES)
    came = np.isin(np.array(run.flights.id.to_pylist()), np.array(run.arrivals.ids, dtype=np.str_))
    released, _ = np.histogram(run.flights.minutes[came], edges)
    cancelled, _ = np.histogram(run.flights.minutes[run.flights.cancelled], edges)
    scheduled, _ = np.histogram(run.flights.minutes, edges)
    figure, axes = _axes("Hour of the day, New York", f"Departures in {BIN_MINUTES} minutes")
    hours = edges[:-1] / 60
    width = BIN_MINUTES / 60
    axes.bar(hours, released, width, align="edge", color=RELEASED, label=f"released ({outcome.released:,})")
    label = f"cancelled before they were due ({outcome.cancelled:,})"
    axes.bar(hours, cancelled, width, bottom=released, align="edge", color=CANCELLED, hatch="//", label=label)
    label = f"scheduled ({outcome.scheduled:,})"
    axes.stairs(scheduled, edges / 60, color=SCHEDULED, linewidth=1.4, label=label)
    axes.set_xlim(0, 24)
    axes.set_xticks(range(0, 25, 3), [f"{hour:02}:00" for hour in range(0, 25, 3)])
    seconds = run.clock.length_ms / 1_000
    axes.set_title(f"{day_name}, lived in {seconds:.0f} seconds: each flight a message due at its departure")
    axes.set_ylim(0, scheduled.max() * 1.3)
    axes.legend(loc="upper right", ncols=3, frameon=False)
    _save(figure, file)


def _draw_lateness(run: DayRun, outcome: Outcome, file: Path) -> None:
    late = lateness_ms(run)
    figure, axes = _axes("Lateness in milliseconds: stored in its queue, minus due", "Messages")
    title = (
        f"How late {outcome.released:,} messages were released: the latest {outcome.lateness_max_ms:.0f} ms"
    )
    if len(late):
        top = max(10, int(np.ceil(np.quantile(late, 0.995))) + 1)
        step = max(1, round(top / 40))
        # Bars stand over their milliseconds; what lies beyond the axis is in the last one.
        edges = np.arange(min(0, int(late.min())), top + 2 * step, step) - 0.5
        shown = np.minimum(late, edges[-1] - step / 2)
        axes.hist(shown, bins=list(edges), color=RELEASED, edgecolor="white", linewidth=0.8)
        axes.set_xlim(min(-1, edges[0]), edges[-1])
        if (beyond := int((late > edges[-1]).sum())) > 0:
            title += f" ({beyond:,} beyond the axis are in the last bar)"
    for value, name, style in (
        (outcome.lateness_p50_ms, "p50", "-"),
        (outcome.lateness_p99_ms, "p99", "--"),
    ):
        axes.axvline(value, color=CANCELLED, linestyle=style, linewidth=2, label=f"{name}: {value:.0f} ms")
    axes.axvline(-0.5, color=SCHEDULED, linewidth=1, label=f"due; {outcome.early:,} came before it")
    axes.set_title(title)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
    axes.legend(loc="upper right", ncols=3, framealpha=1, edgecolor="none")
    _save(figure, file)


def _axes(x_label: str, y_label: str) -> tuple[Any, Any]:
    """An empty picture and its axes; made without pyplot, so that no display is looked for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file)
