"""What the demo does with Spark and DuckDB: bulk writes, a campaign called off, a forecast, SQL, the audit.

What is shown is what the commands `bulk`, `campaign cancel`, `forecast`, `sql` and `audit` would show; it is all read
from the running broker and its table.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import pyarrow as pa
from rich.table import Table

from timeball.cli.pipeline import balance
from timeball.cli.spark import open_session
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import audit, bulk
from timeball.spark.jobs.bulk import BulkReport, Columns
from timeball.spark.jobs.campaign import Campaign
from timeball.spark.views.duckdb_session import SqlSession
from timeball.spark.views.forecast import report

# Beside the pipeline's own Spark and the broker, on a machine that may have two cores.
CONF = {"spark.driver.memory": "512m"}


@dataclass(frozen=True)
class Books:
    """What the audit found."""

    summary: str
    counts: dict[str, Any]
    balanced: bool


class Spark:
    """A session for the length of a block."""

    def __init__(self, endpoint: str, log: Path) -> None:
        self._endpoint = endpoint
        self._session = open_session("local[2]", "timeball-demo", CONF, log)

    def schedule(self, messages: pa.RecordBatch, campaign: str) -> BulkReport:
        """Schedule every row of a DataFrame, or none, under a campaign's name: the command `bulk`."""
        frame = self._session.createDataFrame(pa.Table.from_batches([messages]))
        columns = Columns(due="due_ms", topic="topic", keys="keys", tag="tag", unique_key="unique_key")
        return bulk.run(self._session, frame, self._endpoint, columns=columns, campaign=campaign)

    def audit(self) -> Books:
        """Compare accepted with released + cancelled + expired + pending."""
        report = audit.run(self._session, self._endpoint)
        summary = "balances" if report.ok else f"DOES NOT BALANCE: {balance(report)}"
        return Books(summary, msgspec.to_builtins(report), report.ok)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session.stop()
        except Exception:
            # A Java that was told to end as well: what ended the block is what matters.
            if error is None:
                raise


CAMPAIGN = "newsletter"
PEAKS = 3
QUERY = """
    select topic, state, count(*) as messages, min(due) as first_due, max(due) as last_due,
           max(lateness_ms) as most_late_ms
    from scheduled group by topic, state order by topic, state
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
        return f"{self.rows:,} scheduled messages ahead; the busiest minute is {instant} with {rows:,}"


def call_off(endpoint: str) -> CalledOff:
    """End the campaign as one object."""

    with Endpoint(endpoint) as broker:
        ended = Campaign(broker, CAMPAIGN).cancel()
    return CalledOff(ended.rows, ended.cancelled, ended.released)


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
