"""`timeball pending`: count the pending messages by due time.

The counting SQL runs in this process, not in the broker. It reads the Parquet files of the pending table, and the tail
of the log over Flight, both as of one version (spark/views/snapshot.py). A scheduled message that is due after the
broker's "now" cannot have been released yet. Messages due earlier are not counted, because they may be released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import typer

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect
from timeball.cli.output import bars, print_json, print_line

BARS_MAX = 48
BY_HOUR = """
    select place, cast(floor(due_ms / 3600000) as bigint) as hour, count(*) as messages
    from pending group by place, hour order by hour
"""


class Unit(StrEnum):
    """The width of a bar."""

    AUTO = "auto"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    YEAR = "year"


_NUMPY_UNIT = {Unit.HOUR: "h", Unit.DAY: "D", Unit.MONTH: "M", Unit.YEAR: "Y"}


@dataclass
class PendingCounts:
    """Pending messages by the hour of their due time. Keys are hours since 1970, values are counts."""

    now_ms: int
    hours: dict[int, int] = field(default_factory=dict)
    tail_rows: int = 0
    table_rows: int = 0
    level_rows: int = 0  # for RocketMQ's delay levels, which stay in the log until they are due

    def by(self, unit: Unit) -> dict[str, int]:
        """Add up the counts by bar label, in time order. AUTO: the finest unit that gives at most BARS_MAX bars."""
        import numpy as np

        if unit is Unit.AUTO:
            grouped = (self.by(finer_unit) for finer_unit in _NUMPY_UNIT)
            return next((counts for counts in grouped if len(counts) <= BARS_MAX), self.by(Unit.YEAR))
        labels: dict[str, int] = {}
        for hour in sorted(self.hours):
            label = str(np.datetime64(hour, "h").astype(f"datetime64[{_NUMPY_UNIT[unit]}]"))
            labels[label] = labels.get(label, 0) + self.hours[hour]
        return labels


def pending(
    by: Annotated[Unit, typer.Option("--by", help="Width of a bar; auto chooses.")] = Unit.AUTO,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Show how many messages are pending, by the hour (day, month, year) in which they are due, in UTC.

    The command reads the pending table where the broker keeps it, so run it
    where that folder can be read.

    \b
    Examples:
      timeball pending
      timeball pending --by day
      timeball pending --by hour --json | jq .due
    """
    with connect(endpoint):
        counts = count_waiting(endpoint)
    bar_counts = counts.by(by)
    total = sum(bar_counts.values())
    if as_json:
        print_json(
            {
                "now_ms": counts.now_ms,
                "waiting": total,
                "tail_rows": counts.tail_rows,
                "table_rows": counts.table_rows,
                "level_rows": counts.level_rows,
                "due": bar_counts,
            }
        )
        return
    for line in bars(bar_counts):
        print_line(line)
    breakdown = f"{counts.tail_rows:,} in the log's tail, {counts.table_rows:,} in the pending table"
    if counts.level_rows:
        breakdown += f", {counts.level_rows:,} for delay levels"
    print_line(f"{total:,} waiting: {breakdown}" if total else "nothing waits")


def count_waiting(endpoint: str) -> PendingCounts:
    """Count all scheduled messages that are due after the broker's "now" and not cancelled."""
    from timeball.spark.views.duckdb_session import SqlSession

    with SqlSession(endpoint, upcoming=True, bodies=False) as session:
        counts = PendingCounts(now_ms=session.version.now_ms)
        for row in session.run(BY_HOUR).rows.read_all().to_pylist():
            counts.hours[row["hour"]] = counts.hours.get(row["hour"], 0) + row["messages"]
            field_name = f"{row['place']}_rows"
            setattr(counts, field_name, getattr(counts, field_name) + row["messages"])
    return counts
