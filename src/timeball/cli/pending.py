"""`timeball pending`: count the pending messages by due time.

The SQL that counts runs in this process, not in the broker. It reads the pending table from its Parquet files, and the
log's tail over Flight, both of one version (spark/views/snapshot.py). A scheduled message that is due after the
broker's "now" cannot have been released. Those due earlier count as being delivered.
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
class Waiting:
    """Pending messages by the hour of their due time. Keys are hours since 1970, values are counts."""

    now_ms: int
    hours: dict[int, int] = field(default_factory=dict)
    tail_rows: int = 0
    table_rows: int = 0
    level_rows: int = 0  # for RocketMQ's delay levels, which stay in the log until they are due

    def by(self, unit: Unit) -> dict[str, int]:
        """Count by label, in time order. AUTO takes the finest unit that gives at most BARS_MAX bars."""
        import numpy as np

        if unit is Unit.AUTO:
            grouped = (self.by(each) for each in _NUMPY_UNIT)
            return next((found for found in grouped if len(found) <= BARS_MAX), self.by(Unit.YEAR))
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
        found = count_waiting(endpoint)
    groups = found.by(by)
    total = sum(groups.values())
    if as_json:
        print_json(
            {
                "now_ms": found.now_ms,
                "waiting": total,
                "tail_rows": found.tail_rows,
                "table_rows": found.table_rows,
                "level_rows": found.level_rows,
                "due": groups,
            }
        )
        return
    for line in bars(groups):
        print_line(line)
    where = f"{found.tail_rows:,} in the log's tail, {found.table_rows:,} in the pending table"
    if found.level_rows:
        where += f", {found.level_rows:,} for delay levels"
    print_line(f"{total:,} waiting: {where}" if total else "nothing waits")


def count_waiting(endpoint: str) -> Waiting:
    """Count all scheduled messages that are due after the broker's "now" and not cancelled."""
    from timeball.spark.views.duckdb_session import SqlSession

    with SqlSession(endpoint, upcoming=True, bodies=False) as session:
        found = Waiting(now_ms=session.version.now_ms)
        for row in session.run(BY_HOUR).rows.read_all().to_pylist():
            found.hours[row["hour"]] = found.hours.get(row["hour"], 0) + row["messages"]
            name = f"{row['place']}_rows"
            setattr(found, name, getattr(found, name) + row["messages"])
    return found
