"""Looking ahead and back, as its owner would: a campaign that is called off, a forecast, a question in SQL.

None of it needs the demo's Spark but the campaign's own write. What is shown is what the commands `campaign cancel`,
`forecast` and `sql` would show; it is all read from the running broker and its table.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from timeball.errors import SetupError

CAMPAIGN = "newsletter"
PEAKS = 3
QUERY = """
    select topic, state, count(*) as promises, min(due) as first_due, max(due) as last_due,
           max(lateness_ms) as most_late_ms
    from promises group by topic, state order by topic, state
"""


@dataclass(frozen=True)
class CalledOff:
    """A campaign's end: what its cancel said."""

    rows: int
    cancelled: int
    released: int


@dataclass(frozen=True)
class Ahead:
    """What falls due when. `busiest`: (instant, rows in that minute), the fullest minutes."""

    rows: int
    busiest: list[tuple[str, int]]

    def sentence(self) -> str:
        """One line."""
        instant, rows = self.busiest[0]
        return f"{self.rows:,} promises ahead; the busiest minute is {instant} with {rows:,}"


def call_off(endpoint: str) -> CalledOff:
    """End the campaign as one object."""
    from timeball.pipeline.endpoint import Endpoint
    from timeball.pipeline.jobs.campaign import Campaign

    with Endpoint(endpoint) as broker:
        ended = Campaign(broker, CAMPAIGN).cancel()
    return CalledOff(ended.rows, ended.cancelled, ended.released)


def look_ahead(endpoint: str) -> Ahead:
    """The due load of all that waits."""
    from timeball.pipeline.endpoint import Endpoint
    from timeball.pipeline.views.forecast import gather, report
    from timeball.pipeline.views.snapshot import Snapshot

    with Endpoint(endpoint) as broker:
        found = report(gather(Snapshot.take(broker, upcoming=True)), peaks=PEAKS)
    busiest = [
        (f"{datetime.fromtimestamp(peak.at_ms / 1_000, UTC):%-d %B %Y %H:%M} UTC", peak.minute_rows)
        for peak in found.peaks
    ]
    return Ahead(found.rows, busiest)


def ask(endpoint: str) -> list[dict[str, Any]]:
    """The rows of QUERY; SetupError without DuckDB."""
    from timeball.pipeline.views.duckdb_session import SqlSession

    try:
        with SqlSession(endpoint) as session:
            rows: list[dict[str, Any]] = session.run(QUERY).rows.read_all().to_pylist()
    except SetupError as error:
        raise SetupError(f"{error}; pip install 'timeball[demo]' has all that the demo needs") from error
    return [{**row, **{k: row[k].isoformat() for k in ("first_due", "last_due")}} for row in rows]


def answer_table(rows: list[dict[str, Any]]) -> Table:
    """The answer for people."""
    table = Table(title="timeball sql: what became of every promise", title_justify="left")
    for name in ("topic", "state"):
        table.add_column(name)
    for name in ("promises", "most late"):
        table.add_column(name, justify="right")
    for row in rows:
        late = row["most_late_ms"]
        table.add_row(
            row["topic"], row["state"], f"{row['promises']:,}", "" if late is None else f"{late:,} ms"
        )
    return table
