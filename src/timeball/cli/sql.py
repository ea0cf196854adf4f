"""`timeball sql` and `timeball pending`: query messages with DuckDB, in this process and not in the broker.

    sql       run any query on pending messages, events and past messages; print a table, CSV or JSON
    pending   count the pending messages by due time

The engine and its views are in spark/views/duckdb_session.py. It reads the Parquet files of the pending table, and the
tail of the log over Flight, both as of one version (spark/views/snapshot.py). Each answer of `sql` names its version:
on stderr for people, in the document with --json.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from timeball.cli.options import (
    DEFAULT_FLIGHT,
    FlightEndpointOption,
    JsonOption,
    addresses_of,
    advising,
    as_parameter,
    parse_size_bytes,
)
from timeball.cli.output import bars, print_json, print_line, print_note
from timeball.model.errors import SetupError

if TYPE_CHECKING:
    import pyarrow as pa

    from timeball.spark.views.snapshot import Version


# ---- timeball sql ---------------------------------------------------------------------------------------------


ROWS_SHOWN = 50
CELL_WIDTH = 60


def sql(
    query: Annotated[
        str | None, typer.Argument(help="One SELECT. Without it and --file, the views are listed.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Read the query from a file; - is stdin.")
    ] = None,
    version: Annotated[
        int | None,
        typer.Option("--version", min=0, help="As of this version of the pending table; by default now."),
    ] = None,
    table_uri: Annotated[
        str | None,
        typer.Option(
            "--table-uri",
            metavar="URI",
            help="The pending table's URI on this machine, if it differs from the broker's.",
        ),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, all rows.")] = False,
    limit_rows: Annotated[
        int, typer.Option("--limit-rows", min=1, help="Show at most so many rows as a table.")
    ] = ROWS_SHOWN,
    memory: Annotated[
        Any,
        typer.Option(
            "--memory",
            parser=as_parameter(parse_size_bytes),
            metavar="SIZE",
            help="Memory limit of the query.",
        ),
    ] = "1GiB",
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
    as_json: JsonOption = False,
) -> None:
    """Query pending messages, events and past messages with SQL.

    Views: pending, pending_table, scheduled, ledger, archive, log. Each query reads
    one consistent version. It runs on DuckDB, without Spark or Java,
    where the pending table can be read. Spark has the same views:
    timeball.spark.views.spark_views.register(spark, endpoint).

    \b
    Examples:
      timeball sql
      timeball sql "select topic, count(*), min(due) from pending group by topic"
      timeball sql "select date_trunc('hour', due) as hour, count(*) from pending group by 1 order by 1"
      timeball sql "select * from scheduled where state = 'released' order by lateness_ms desc limit 10"
      timeball sql --version 12 "select count(*) from pending"
      timeball sql --json "select event, sum(rows) as n from ledger group by event" | jq .rows
      timeball sql --csv "select seq, due, topic from pending order by due" > pending.csv
    """
    query_text = _read_query(query, file)
    if query_text is None:
        _show_views(as_json)
        return
    from timeball.spark.views.duckdb_session import SqlSession

    with advising(addresses_of(endpoint)):
        session = SqlSession(endpoint, version=version, table_uri=table_uri, memory_bytes=memory)
    with session:
        result = session.run(query_text)
        if as_json:
            _print_json(result.version, result.rows)
        elif as_csv:
            print_note(describe(result.version))
            _print_csv(result.rows)
        else:
            print_note(describe(result.version))
            _print_table(result.rows, limit_rows)


def describe(version: Version) -> str:
    """Format the version as one line."""
    moment = datetime.fromtimestamp(version.now_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return f"as of {moment.replace('+00:00', 'Z')}: {_describe_versions(version)}"


def _describe_versions(version: Version) -> str:
    """Describe the versions of the tables that a query reads, for each group if there are several."""
    if version.groups:
        return "; ".join(
            f"group {name}: {_describe_versions(group_version)}"
            for name, group_version in version.groups.items()
        )
    phrases = [f"pending table {version.table}, log to row {version.log_end}"]
    phrases += [f"ledger {version.ledger}"] if version.ledger is not None else []
    phrases += [f"archive {version.archive}"] if version.archive is not None else []
    phrases += (
        []
        if version.is_whole
        else ["without the rows of the log's tail of that time, which retention has deleted"]
    )
    return ", ".join(phrases)


def plain(value: Any) -> Any:
    """Convert a value for JSON and CSV: times as ISO 8601, bytes as text, or as hex after \\x if they are not UTF-8."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"\\x{value.hex()}"
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):  # DuckDB's type for a sum of integers
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def lines(names: list[str], rows: list[list[Any]]) -> Iterator[str]:
    """Format rows as aligned columns, with numbers to the right. A long value is cut, and ends with `…`."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(names)]
    right_aligned = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(names))]
    for row in [names, ["─" * width for width in widths], *cells]:
        padded = (
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(row, widths, right_aligned, strict=True)
        )
        yield "  ".join(padded).rstrip()


def _cell(value: Any) -> str:
    """Format a value for a cell: a null is empty, control characters become dots, and a long text is cut."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else str(value)
    text = "".join(char if char.isprintable() else "·" for char in text)
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"


def _read_query(query: str | None, file: Path | None) -> str | None:
    """Read the text of the query from the argument or from `file`. None when neither is given.

    Raises BadParameter if both are given, and SetupError for a file that cannot be read.
    """
    if file is None:
        return query
    if query is not None:
        raise typer.BadParameter("give either a query or --file", param_hint="--file")
    if str(file) == "-":
        return sys.stdin.read()
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--file {file}: {error}") from error


def _rows(reader: pa.RecordBatchReader) -> Iterator[list[Any]]:
    for batch in reader:
        for row in zip(*[column.to_pylist() for column in batch.columns], strict=True):
            yield [plain(value) for value in row]


def _print_table(reader: pa.RecordBatchReader, limit_rows: int) -> None:
    """Print at most `limit_rows` rows as aligned columns. A note says if there are more."""
    rows = list(itertools.islice(_rows(reader), limit_rows + 1))
    for line in lines(reader.schema.names, rows[:limit_rows]):
        print_line(line)
    if len(rows) > limit_rows:
        print_note(f"the first {limit_rows:,} rows; --limit-rows, --csv and --json show more")


def _print_csv(reader: pa.RecordBatchReader) -> None:
    """Print all rows as CSV, below a line with the names of the columns."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(reader.schema.names)
    writer.writerows(_rows(reader))
    sys.stdout.flush()


def _print_json(version: Version, reader: pa.RecordBatchReader) -> None:
    names = reader.schema.names
    print_json({"version": version, "rows": [dict(zip(names, row, strict=True)) for row in _rows(reader)]})


def _show_views(as_json: bool) -> None:
    """Print the views and their columns, which come from the tables' schemas alone."""
    from timeball.spark.views.duckdb_session import view_columns

    views = view_columns()
    if as_json:
        print_json({"views": views})
        return
    for view, columns in views.items():
        print_line(f"{view}: {', '.join(columns)}")


# ---- timeball pending -----------------------------------------------------------------------------------------


BARS_MAX = 48
BY_HOUR = """
    select place, cast(floor(due_ms / 3600000) as bigint) as hour, count(*) as messages
    from pending group by place, hour order by hour
"""


class BarWidth(StrEnum):
    """The width of a bar."""

    AUTO = "auto"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    YEAR = "year"


_NUMPY_UNIT = {BarWidth.HOUR: "h", BarWidth.DAY: "D", BarWidth.MONTH: "M", BarWidth.YEAR: "Y"}


@dataclass
class PendingCounts:
    """Pending messages by the hour of their due time. Keys are hours since 1970, values are counts."""

    now_ms: int
    hours: dict[int, int] = field(default_factory=dict)
    tail_rows: int = 0
    table_rows: int = 0
    level_rows: int = 0  # for RocketMQ's delay levels, which stay in the log until they are due

    def by(self, unit: BarWidth) -> dict[str, int]:
        """Add up the counts by bar label, in time order.

        AUTO: the finest unit that gives at most BARS_MAX bars, or else a year.
        """
        import numpy as np

        if unit is BarWidth.AUTO:
            grouped = (self.by(finer_unit) for finer_unit in _NUMPY_UNIT)
            return next((counts for counts in grouped if len(counts) <= BARS_MAX), self.by(BarWidth.YEAR))
        labels: dict[str, int] = {}
        for hour in sorted(self.hours):
            label = str(np.datetime64(hour, "h").astype(f"datetime64[{_NUMPY_UNIT[unit]}]"))
            labels[label] = labels.get(label, 0) + self.hours[hour]
        return labels


def pending(
    by: Annotated[BarWidth, typer.Option("--by", help="Width of a bar; auto chooses.")] = BarWidth.AUTO,
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
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
    with advising(endpoint):
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
    """Count all scheduled messages that are due after the broker's "now" and not cancelled.

    Raises Unavailable if no broker answers.
    """
    from timeball.spark.views.duckdb_session import SqlSession

    with SqlSession(endpoint, upcoming=True, bodies=False) as session:
        counts = PendingCounts(now_ms=session.version.now_ms)
        for row in session.run(BY_HOUR).rows.read_all().to_pylist():
            counts.hours[row["hour"]] = counts.hours.get(row["hour"], 0) + row["messages"]
            field_name = f"{row['place']}_rows"  # `place` is tail, table or level
            setattr(counts, field_name, getattr(counts, field_name) + row["messages"])
    return counts
