"""Read the log: rows from_seq <= seq < to_seq in even partitions, which the tasks fetch over Flight.

    read=log      the rows; the broker filters kinds and columns, the task filters topics and instants in Arrow
    read=ranges   (from_seq, to_seq) of each partition: pointers, for writers that fetch the rows themselves

A read resumes where it broke off when the broker restarts meanwhile. A range that retention has removed, or that is not
durable yet, is refused: a shorter answer would look like a whole one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition

from timeball.errors import OutOfRange
from timeball.message import READ_SCHEMA
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.source.options import ReadOptions
from timeball.pipeline.source.pushdown import OPEN, Wanted, bounds, kinds, wanted
from timeball.pipeline.source.retrying_read import behind_last_seq, retrying_read
from timeball.pipeline.source.spark_api import Filter
from timeball.wire import Status

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class LogPart(InputPartition):
    """Rows from_seq <= seq < to_seq."""

    from_seq: int
    to_seq: int


def split_range(begin: int, end: int, rows: int) -> list[tuple[int, int]]:
    """Cut a range into even pieces of at most `rows` each; none for an empty range."""
    span = max(0, end - begin)
    pieces = -(-span // rows)
    cuts = [begin + span * i // pieces for i in range(pieces + 1)] if pieces else []
    return list(itertools.pairwise(cuts))


def piece_rows(rows: int, options: ReadOptions) -> int:
    """Return how many of `rows` rows a task gets: no more than rows_per_partition, and less for min_partitions."""
    return max(1, min(options.rows_per_partition, -(-rows // options.min_partitions)))


def log_parts(begin: int, end: int, options: ReadOptions) -> list[LogPart]:
    """Return the pieces of begin <= seq < end that tasks read."""
    return [LogPart(*piece) for piece in split_range(begin, end, piece_rows(end - begin, options))]


def start_seq(position: int | str | None, status: Status, otherwise: str) -> int:
    """Return the sequence number an option names."""
    named = {
        "first": status.log.first_seq,
        "latest": status.log.durable_seq,
        "watermark": status.watermark,
    }
    chosen = otherwise if position is None else position
    return named[chosen] if isinstance(chosen, str) else chosen


def check_kept(from_seq: int, to_seq: int, status: Status) -> None:
    """Refuse a range the broker no longer, or not yet, has."""
    if from_seq < status.log.first_seq:
        raise OutOfRange(
            f"from_seq {from_seq}: retention has removed rows below {status.log.first_seq}; start at 'first'"
        )
    if to_seq > status.log.durable_seq:
        raise OutOfRange(f"to_seq {to_seq}: the log ends at {status.log.durable_seq}")


def read_part(options: ReadOptions, part: LogPart, rows: Wanted) -> Iterator[pa.RecordBatch]:
    """Read the rows of one piece that are wanted, in the columns asked for."""
    if options.read == "ranges":
        row = pa.record_batch({"from_seq": [part.from_seq], "to_seq": [part.to_seq]})
        yield row if options.columns is None else row.select(list(options.columns))
        return
    with Endpoint(options.endpoint) as endpoint:
        columns = needed(options, rows)

        def read(begin: int) -> Iterator[pa.RecordBatch]:
            return endpoint.read_log(
                begin, part.to_seq, options.kinds, columns=columns, placed=options.placed
            )

        for batch in retrying_read(endpoint, read, part.from_seq, behind_last_seq):
            kept = rows.keep(batch)
            if kept.num_rows:
                yield shape(kept, options)


def needed(options: ReadOptions, rows: Wanted) -> list[str] | None:
    """Return the columns that must travel: those asked for, and those by which rows are filtered. None for all."""
    if options.columns is None:
        return None
    names = {"seq", *options.columns, *rows.columns}
    if options.body_kinds is not None and "body" in names:
        names.add("kind")
    return [name for name in READ_SCHEMA.names if name in names]


def shape(batch: pa.RecordBatch, options: ReadOptions) -> pa.RecordBatch:
    """Apply `body_kinds` and `columns`: what the JVM need not see stays out of it."""
    if options.body_kinds is not None and (options.columns is None or "body" in options.columns):
        with_body = pc.is_in(batch.column("kind"), pa.array(options.body_kinds, pa.int8()))
        body = pc.if_else(with_body, batch.column("body"), pa.scalar(None, pa.binary()))
        batch = batch.set_column(batch.schema.get_field_index("body"), "body", body)
    return batch if options.columns is None else batch.select(list(options.columns))


class LogReader(DataSourceReader):
    """A batch read of [from_seq, to_seq); without to_seq, of all that is durable when the read is planned."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.seqs = OPEN
        self.rows = Wanted() if options.read == "ranges" else wanted((), options.topic, [])

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Narrow the range, the kinds and the rows; every filter is returned, so Spark applies them as well."""
        if self.options.read == "log":
            self.seqs = bounds(filters, "seq")
            self.rows = wanted(("due_ms",), self.options.topic, filters)
            self.options = msgspec.structs.replace(self.options, kinds=kinds(self.options.kinds, filters))
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """See DataSourceReader."""
        options = self.options
        with Endpoint(options.endpoint) as endpoint:
            status = endpoint.status()
        begin = start_seq(options.from_seq, status, "first")
        end = status.log.durable_seq if options.to_seq is None else options.to_seq
        check_kept(begin, end, status)
        begin, end = self.seqs.clip(begin, end)
        if options.kinds == ():
            return []
        return log_parts(begin, end, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """See DataSourceReader."""
        # Planned without partitions, Spark asks once all the same, for None.
        return read_part(self.options, partition, self.rows) if isinstance(partition, LogPart) else iter(())
