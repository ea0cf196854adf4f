"""`timeball pending`: how much waits, and when it falls due.

Counts are taken by the reader of tables, not by the broker: what waits in the pending table is read from its
Parquet files, the log's tail over Flight, both as of one answer of `status`, so that a compaction in between
can neither hide a promise nor count it twice. A promise due after the broker's "now" cannot have been
released; those due earlier are counted as being delivered. A promise that was written again lies in several rows
of the tail, of which retention may have let the first ones go: it is counted once, by its own number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from timeball.cli.connection import connect
from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption
from timeball.cli.output import bars, print_json, print_line
from timeball.errors import SetupError

if TYPE_CHECKING:
    from timeball.client import Timeball
    from timeball.message import Int64Array

BARS_MAX = 48


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
    """Promises by hour of their instant. Keys are hours since 1970, values are counts."""

    now_ms: int
    hours: dict[int, int] = field(default_factory=dict)
    tail_rows: int = 0
    table_rows: int = 0
    level_rows: int = 0  # of RocketMQ's delay levels; these stay in the log until they are due

    def add(self, due_ms: Int64Array) -> int:
        """Count the rows due after now, and return how many these are."""
        import numpy as np

        hours, counts = np.unique(due_ms[due_ms > self.now_ms] // 3_600_000, return_counts=True)
        for hour, count in zip(hours.tolist(), counts.tolist(), strict=True):
            self.hours[hour] = self.hours.get(hour, 0) + count
        return int(counts.sum())

    def by(self, unit: Unit) -> dict[str, int]:
        """Counts by label in time order; AUTO takes the finest unit that gives at most BARS_MAX bars."""
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
    """Show how many messages wait, by the hour (day, month) they are due, in UTC.

    Reads the pending table from where the broker keeps it, so it runs where that folder can be read.

    \b
    Examples:
      timeball pending
      timeball pending --by day
      timeball pending --by hour --json | jq .due
    """
    with connect(endpoint) as ball:
        found = count_waiting(ball)
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


def count_waiting(ball: Timeball) -> Waiting:
    """All promises due after the broker's now that nobody has cancelled."""
    import numpy as np

    from timeball.message import Kind

    status = ball.status()
    durable = status["log"]["durable_seq"]
    watermark = max(status["watermark"], status["log"]["first_seq"])
    found = Waiting(now_ms=status["now_ms"])
    cancelled = _seqs(ball.read_log(status["log"]["first_seq"], durable, kinds=[Kind.CANCEL]), "source_seq")
    due_ms, seq = _promises(ball.read_log(watermark, durable, kinds=[Kind.PROMISE, Kind.MOVED]))
    found.tail_rows = found.add(due_ms[~np.isin(seq, cancelled)])
    for rows in ball.read_log(status["log"]["first_seq"], durable, kinds=[Kind.LEVEL_PROMISE]):
        found.level_rows += found.add(_due_of_kept(rows, cancelled))
    for rows in _table_rows(status["table"], found.now_ms):
        found.table_rows += found.add(_due_of_kept(rows, cancelled))
    return found


def _promises(batches: Iterable[Any]) -> tuple[Int64Array, Int64Array]:
    """(due_ms, seq) of the promises in PROMISE and MOVED rows, each once."""
    import numpy as np

    from timeball.message import Kind

    due_ms, seq = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for rows in batches:
        own, source = (rows.column(name).to_numpy(zero_copy_only=False) for name in ("seq", "source_seq"))
        is_moved = rows.column("kind").to_numpy() == Kind.MOVED
        seq.append(np.where(is_moved, source, own).astype(np.int64))
        due_ms.append(rows.column("due_ms").to_numpy())
    numbers, first = np.unique(np.concatenate(seq), return_index=True)
    return np.concatenate(due_ms)[first], numbers


def _seqs(batches: Any, column: str) -> Int64Array:
    import numpy as np

    found = [rows.column(column).to_numpy(zero_copy_only=False) for rows in batches]
    return np.unique(np.concatenate(found)).astype(np.int64) if found else np.empty(0, np.int64)


def _due_of_kept(rows: Any, cancelled: Int64Array) -> Int64Array:
    import numpy as np

    due = np.asarray(rows.column("due_ms").to_numpy(zero_copy_only=False), dtype=np.int64)
    if len(cancelled) == 0:
        return due
    kept: Int64Array = due[~np.isin(rows.column("seq").to_numpy(zero_copy_only=False), cancelled)]
    return kept


def _table_rows(table: dict[str, Any], now_ms: int) -> Iterator[Any]:
    """Batches of (seq, due_ms) due after now from the pending table, as it stood at the given version."""
    import pyarrow.dataset as ds
    from deltalake import DeltaTable

    uri, version = table["uri"], table["version"]
    if version < 0 or ("://" not in uri and not (Path(uri) / "_delta_log").is_dir()):
        if version > 0:
            raise SetupError(
                f"cannot read the pending table at {uri}: run this where the broker's data folder is"
            )
        return
    files = [uri.removeprefix("file://") for uri in DeltaTable(uri, version=version).file_uris()]
    if files:
        rows = ds.dataset(files, format="parquet")
        yield from rows.to_batches(columns=["seq", "due_ms"], filter=ds.field("due_ms") > now_ms)
