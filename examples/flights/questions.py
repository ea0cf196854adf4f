"""What the demo asks DuckDB, of the running broker and its table: the busiest minutes, and what became of each message.

The answers are those of the commands `forecast` and `sql`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from timeball.spark.views.duckdb_session import SqlSession
from timeball.spark.views.forecast import report

PEAKS = 3
QUERY = """
    select topic, state, count(*) as messages, min(due) as first_due, max(due) as last_due,
           max(lateness_ms) as most_late_ms
    from scheduled group by topic, state order by topic, state
"""


@dataclass(frozen=True)
class Ahead:
    """What falls due when. `busiest`: (instant, rows in that minute), the fullest minutes."""

    rows: int
    busiest: list[tuple[str, int]]

    def sentence(self) -> str:
        """One line."""
        instant, rows = self.busiest[0]
        return f"{self.rows:,} scheduled messages ahead; the busiest minute is {instant} with {rows:,}"


def look_ahead(endpoint: str) -> Ahead:
    """Count what waits by the second it is due."""
    with SqlSession(endpoint, upcoming=True, bodies=False) as session:
        found = report(session.due_load(), peaks=PEAKS)
    busiest = [
        (f"{datetime.fromtimestamp(peak.at_ms / 1_000, UTC):%-d %B %Y %H:%M} UTC", peak.minute_rows)
        for peak in found.peaks
    ]
    return Ahead(found.rows, busiest)


def ask(endpoint: str) -> list[dict[str, Any]]:
    """Return the rows of QUERY."""
    with SqlSession(endpoint) as session:
        rows: list[dict[str, Any]] = session.run(QUERY).rows.read_all().to_pylist()
    return [{**row, **{k: row[k].isoformat() for k in ("first_due", "last_due")}} for row in rows]


def answer_table(rows: list[dict[str, Any]]) -> Table:
    """The answer for people."""
    table = Table(title="timeball sql: what became of every scheduled message", title_justify="left")
    for name in ("topic", "state"):
        table.add_column(name)
    for name in ("messages", "most late"):
        table.add_column(name, justify="right")
    for row in rows:
        late = row["most_late_ms"]
        table.add_row(
            row["topic"], row["state"], f"{row['messages']:,}", "" if late is None else f"{late:,} ms"
        )
    return table
