"""Read the log as a batch or as a stream: rows from_seq <= seq < to_seq in even partitions, fetched over Flight.

    read=log      the rows; the broker filters kinds and columns, the task filters the topic in Arrow
    read=events   the events of scheduled messages in these rows (log_events.py)
    read=ranges   (from_seq, to_seq) of each partition, for writers that fetch the rows themselves

A range that retention has removed, or that is not durable yet, is refused, because fewer rows would look complete.

When the broker restarts during a read, the read resumes after the last row (endpoint.retrying_read).

The stream's offset has a sequence number for each group of a cluster: {"g1": 17, "g2": 4}. For a broker that is in no
cluster it is {"seq": 17}. If that broker later joins a cluster, {"seq": 17} is the offset of the group of the named
node. A group that is not in an offset is read from its first row.

A micro-batch starts when there are `min_rows_per_batch` new rows, or `few_rows` new rows after `max_trigger_delay_ms`.
Until then `latestOffset` returns the start offset, and Spark starts no micro-batch. Without this rule, a query that
itself appends to the log would trigger itself for ever. Compaction is an example: it appends one TABLE row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from timeball.io.clock import Clock
from timeball.model.answers import Status
from timeball.model.errors import OutOfRange, SetupError
from timeball.model.message import READ_SCHEMA
from timeball.spark.endpoint import GROUP, Endpoint, Group, after_last_seq, group_statuses, retrying_read
from timeball.spark.log_events import read_events
from timeball.spark.source.options import (
    GROUP_FIELD,
    SINGLE_GROUP_KEY,
    ReadOptions,
    divide_rows,
    encode_offset,
    split_range,
)
from timeball.spark.source.spark_api import Offset, PacedStream, check_groups_exist, select_topic


@dataclass
class LogPart(InputPartition):
    """Rows from_seq <= seq < to_seq of a group. Without a group: of the endpoint in the options."""

    from_seq: int
    to_seq: int
    group: Group | None = None


def piece_rows(rows: int, options: ReadOptions) -> int:
    """Compute the rows per task of a read of `rows` rows, from rows_per_partition and min_partitions."""
    return max(1, min(options.rows_per_partition, -(-rows // options.min_partitions)))


def log_parts(
    begin: int, end: int, options: ReadOptions, group: Group | None = None, total: int | None = None
) -> list[LogPart]:
    """Cut the rows begin <= seq < end into the pieces that tasks read.

    `total`: the rows of the whole read, if this range is only a part of it (one group of several).
    """
    rows = piece_rows(end - begin if total is None else total, options)
    return [LogPart(*piece, group) for piece in split_range(begin, end, rows)]


def start_seq(position: int | str | None, status: Status, default: str) -> int:
    """Resolve a position to a sequence number. `position`: a number, one of options.STARTS, or None for `default`."""
    seq_by_name = {
        "first": status.log.first_seq,
        "latest": status.log.durable_seq,
        "watermark": status.watermark,
    }
    resolved = default if position is None else position
    return seq_by_name[resolved] if isinstance(resolved, str) else resolved


def check_kept(from_seq: int, to_seq: int, status: Status) -> None:
    """Raise OutOfRange for a range that retention has removed, or that is not durable yet."""
    if from_seq < status.log.first_seq:
        raise OutOfRange(
            f"from_seq {from_seq}: retention has removed rows below {status.log.first_seq}; start at 'first'"
        )
    if to_seq > status.log.durable_seq:
        raise OutOfRange(f"to_seq {to_seq}: the log ends at {status.log.durable_seq}")


def read_part(options: ReadOptions, part: LogPart) -> Iterator[pa.RecordBatch]:
    """Read one piece, in a task: the requested rows, with the requested columns."""
    if options.read == "ranges":
        row = pa.record_batch({"from_seq": [part.from_seq], "to_seq": [part.to_seq]})
        yield select(row, options, part.group)
        return
    if options.read == "events":
        with Endpoint(options.endpoint if part.group is None else part.group.endpoint) as endpoint:
            for batch in read_events(endpoint, part.from_seq, part.to_seq):
                yield select(batch, options, part.group)
        return
    with Endpoint(options.endpoint if part.group is None else part.group.endpoint) as endpoint:
        columns = columns_to_fetch(options)

        def read(begin: int) -> Iterator[pa.RecordBatch]:
            return endpoint.read_log(
                begin, part.to_seq, options.kinds, columns=columns, placed=options.placed
            )

        for batch in retrying_read(endpoint, read, part.from_seq, after_last_seq):
            selected = select_topic(batch, options.topic)
            if selected.num_rows:
                yield apply_options(selected, options, part.group)


def columns_to_fetch(options: ReadOptions) -> list[str] | None:
    """List the columns to fetch: the requested columns, and those that the options use. None means all columns."""
    if options.columns is None:
        return None
    names = {"seq", *options.columns} | ({"topic"} if options.topic is not None else set())
    if options.body_kinds is not None and "body" in names:
        names.add("kind")
    return [name for name in READ_SCHEMA.names if name in names]


def apply_options(batch: pa.RecordBatch, options: ReadOptions, group: Group | None = None) -> pa.RecordBatch:
    """Apply the options `body_kinds` and `columns` in Arrow, before the rows are copied into the JVM."""
    if options.body_kinds is not None and (options.columns is None or "body" in options.columns):
        with_body = pc.is_in(batch.column("kind"), pa.array(options.body_kinds, pa.int8()))
        body = pc.if_else(with_body, batch.column("body"), pa.scalar(None, pa.binary()))
        batch = batch.set_column(batch.schema.get_field_index("body"), "body", body)
    return select(batch, options, group)


def select(batch: pa.RecordBatch, options: ReadOptions, group: Group | None) -> pa.RecordBatch:
    """Select the requested columns, and fill the column `group` with the group's name."""
    if options.columns is None:
        return batch
    if GROUP in options.columns:
        name = pa.scalar(group.name or None if group is not None else None, GROUP_FIELD.type)
        batch = batch.append_column(GROUP_FIELD, pa.repeat(name, batch.num_rows))
    return batch.select(list(options.columns))


def check_one_log(options: ReadOptions, groups: int) -> None:
    """Raise SetupError for row numbers in a read of several groups, because each group has its own numbers.

    `groups`: the number of groups.
    """
    given_options = [
        name
        for name, value in (("from_seq", options.from_seq), ("to_seq", options.to_seq))
        if isinstance(value, int)
    ]
    if groups > 1 and given_options:
        raise SetupError(
            f"option {given_options[0]}: each of the {groups} groups has numbers of its own; name one: group"
        )


class LogReader(DataSourceReader):
    """A batch read of from_seq <= seq < to_seq. Without to_seq it ends at the durable end when Spark plans the read."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the read on the driver: check the range of each group and cut it into pieces.

        Raises OutOfRange for a range that is not in the kept log, and SetupError.
        """
        options = self.options
        statuses = group_statuses(options.endpoint)
        check_one_log(options, len(statuses))
        spans: list[tuple[Group, int, int]] = []
        for group, status in statuses:
            begin = start_seq(options.from_seq, status, "first")
            end = status.log.durable_seq if options.to_seq is None else options.to_seq
            check_kept(begin, end, status)
            spans.append((group, begin, end))
        total = sum(max(0, end - begin) for _, begin, end in spans)
        return [part for group, low, high in spans for part in log_parts(low, high, options, group, total)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one piece, in a task."""
        # If the plan has no partitions, Spark still calls this once, with None.
        return read_part(self.options, partition) if isinstance(partition, LogPart) else iter(())


# ---- as a stream ----------------------------------------------------------------------------------------------

Seqs = dict[str, int]  # group -> row


class LogStream(PacedStream):
    """The log (read=log), or ranges of it (read=ranges), as a stream."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        super().__init__(options, clock)
        self._final_seqs: Seqs | None = None
        self._latest_seqs: Seqs | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Choose the start of a new query: from_seq, by default the first row that retention has kept."""
        statuses = self.statuses()
        check_one_log(self.options, len(statuses))
        return encode_offset(
            {group.name: start_seq(self.options.from_seq, status, "first") for group, status in statuses}
        )

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Choose the end of the next micro-batch.

        Returns `start` if there are too few rows: Spark then starts no micro-batch. Raises SetupError if `start` is
        after the end of a log.
        """
        statuses = self.statuses()
        begin = decode_offset(start, statuses)
        self._latest_seqs = durable_seqs(statuses)
        check_within_log(begin, self._latest_seqs)
        ends = self._latest_seqs
        if (
            self._final_seqs is not None
        ):  # with availableNow, groups that were added since then wait for the next run
            final = self._final_seqs
            ends = {name: max(begin[name], min(end, final.get(name, 0))) for name, end in ends.items()}
        lags = {name: end - begin[name] for name, end in ends.items()}
        total, rows_max = sum(lags.values()), self.rows_max(limit)
        rows = total if rows_max is None else min(total, rows_max)
        if not rows or (self._final_seqs is None and not self.is_worth_a_batch(rows)):
            return start
        self.begin_batch()
        shares = divide_rows(lags, rows)
        return encode_offset({name: begin[name] + shares[name] for name in begin})

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the query stop at the current durable end of each log."""
        self._final_seqs = durable_seqs(self.statuses())

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """Report the ends of the logs at the last check. Spark computes the query's lag from them."""
        return None if self._latest_seqs is None else encode_offset(self._latest_seqs)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Cut a micro-batch into pieces for tasks. Raises OutOfRange when retention has removed some of its rows."""
        statuses = self.statuses()
        begin = decode_offset(start, statuses)
        ends = {name: seq for name, seq in decode_offset(end, statuses).items() if begin[name] < seq}
        total = sum(seq - begin[name] for name, seq in ends.items())
        parts = []
        for group, status in statuses:
            if group.name in ends:
                span = begin[group.name], ends[group.name]
                check_kept(*span, status)
                parts += log_parts(*span, self.options, group, total)
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one piece, in a task."""
        return read_part(self.options, partition) if isinstance(partition, LogPart) else iter(())


def check_within_log(begin: Seqs, durable: Seqs) -> None:
    """Raise SetupError for an offset beyond the end of a log, because the checkpoint then belongs to another log."""
    for name, seq in begin.items():
        if durable[name] < seq:
            log_name = f"the log of group {name}" if name else "the broker's log"
            raise SetupError(
                f"the checkpoint stands at row {seq} but {log_name} ends at {durable[name]}: it belongs to another "
                "log; remove the checkpoint folder of this query"
            )


def durable_seqs(statuses: Sequence[tuple[Group, Status]]) -> Seqs:
    """Get the durable end of each group's log."""
    return {group.name: status.log.durable_seq for group, status in statuses}


def decode_offset(offset: Offset, statuses: Sequence[tuple[Group, Status]]) -> Seqs:
    """Decode an offset to a row number for each group. A group that is not in the offset starts at its first row.

    If the broker was in no cluster when the offset was stored, it counts for the group of the named node, which is
    first in `statuses`. Raises SetupError if the offset has a group that no longer exists.
    """
    status_by_group = {group.name: status for group, status in statuses}
    if set(offset) == {SINGLE_GROUP_KEY} and SINGLE_GROUP_KEY not in status_by_group:
        offset = {statuses[0][0].name: offset[SINGLE_GROUP_KEY]}
    check_groups_exist(offset, status_by_group)
    return {name: int(offset.get(name, status.log.first_seq)) for name, status in status_by_group.items()}
