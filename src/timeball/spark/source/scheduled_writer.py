"""`df.write.format("timeball")`: write rows as files of the pending table, and schedule them by one attach.

Tasks write files. The driver attaches all of them in one record of the broker's log. So either every row of the
DataFrame becomes a scheduled message or none does, however often a task or the whole job is repeated. No row is visible
before the attach. The files of a dead task belong to no table.

    task     collect up to CHUNK_ROWS / CHUNK_BYTES -> check -> sort by due -> reserve numbers -> cut and write files
    driver   commit: one attach of all files and number ranges (job "bulk", job_id, epoch, digest)

The broker recognises a repeated write by its name. The name of a batch write is the option `job_id`, by default random.
The name of a stream is the query id in its checkpoint. Batch ids start at 0 in each new checkpoint, so no other name
could distinguish a repeated micro-batch from a new one. The broker also compares the digest of the rows, and refuses
other rows under a known name.

After it has tried an attach, this module never deletes the files: if only the answer was lost, the files belong to the
table. The broker deletes the files of a refused attach later, like all files that belong to no table.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from timeball.model import limits, rules
from timeball.model.errors import InvalidMessage, OverLimit, SetupError
from timeball.spark.endpoint import Endpoint
from timeball.spark.source import scheduled_columns
from timeball.spark.source.options import WriteOptions
from timeball.spark.source.spark_api import DataSourceStreamArrowWriter
from timeball.spark.table_store import Store, chunks
from timeball.table.attachment import ANY_ROWS, Attachment, FileEntry

LOG = logging.getLogger("timeball.spark")
QUERY_ID = "sql.streaming.queryId"  # a property that Spark sets for each task of a stream


@dataclass
class Written(WriterCommitMessage):
    """A task's message to the driver: the files that it wrote, and the sequence numbers in them."""

    files: list[FileEntry] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)  # (first_seq, rows)
    rows: int = 0
    dropped: int = 0
    input_rows: int = 0  # rows + dropped
    checksum: int = 0  # of all input rows; 0 if the write has no name under which it could be repeated
    query_id: str | None = None  # of the stream; None in a batch write


class ScheduledTask:
    """Writes the Arrow batches of one task to files."""

    def __init__(self, options: WriteOptions, *, with_checksum: bool = True) -> None:
        self.options = options
        self.with_checksum = with_checksum  # true if the write may be repeated under its name

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Write all rows of one partition. On failure, the task's files are deleted again."""
        written = Written(query_id=query_id())
        with Endpoint(self.options.endpoint) as endpoint:
            store = Store(self.options.table_uri or endpoint.status().table.uri)
            try:
                for rows in chunks(batches):
                    self._write_chunk(rows, endpoint, store, written)
            except BaseException:  # also for an interrupt, which would leave unused files
                store.remove(entry.path for entry in written.files)
                raise
        return written

    def _write_chunk(self, rows: pa.Table, endpoint: Endpoint, store: Store, written: Written) -> None:
        """Check, sort and number the rows of a chunk, write them to files, and add these to `written`."""
        now_ms = endpoint.status().now_ms
        raw_rows, rows = rows, scheduled_columns.to_table_columns(rows, now_ms)
        written.input_rows += rows.num_rows
        if self.with_checksum:
            written.checksum += scheduled_columns.checksum(rows)
        broken = scheduled_columns.first_broken(raw_rows, rows, now_ms, as_stored=self.options.as_stored)
        invalid_count = int(np.count_nonzero(broken >= 0))
        if invalid_count:
            if self.options.on_invalid == "fail":
                raise InvalidMessage(invalid_rows_message(rows, broken))
            LOG.warning("rows dropped rows=%d reason=%s", invalid_count, invalid_rows_message(rows, broken))
            written.dropped += invalid_count
            rows = rows.filter(pa.array(broken < 0)).combine_chunks()
        if rows.num_rows == 0:
            return
        rows = rows.take(pa.array(scheduled_columns.due_order(rows)))
        first_seq = endpoint.reserve(rows.num_rows)
        rows = scheduled_columns.numbered(scheduled_columns.with_unique_keys(rows), first_seq)
        written.files.extend(store.put_rows(rows, now_ms))
        written.ranges.append((first_seq, rows.num_rows))
        written.rows += rows.num_rows


def query_id() -> str | None:
    """Read the query id of the task's stream. Returns None in a batch. A checkpoint keeps the query id."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(QUERY_ID)


def invalid_rows_message(rows: pa.Table, broken: np.ndarray) -> str:
    """Build the error message for rows that break a rule: how many there are, and the first of them."""
    invalid = np.flatnonzero(broken >= 0)
    first = int(invalid[0])
    topic, rule = rows.column("topic")[first].as_py(), rules.RULES[broken[first]]
    value = f" {rules.shown(rows.column(rule.column)[first].as_py())}" if rule.shape == "form" else ""
    return (
        f"{len(invalid)} of {rows.num_rows} rows are invalid; the first (row {first} of its task, topic {topic!r}):"
        f"{value} {rule.text}; option on_invalid=drop leaves such rows out"
    )


def attach_all(
    messages: Sequence[WriterCommitMessage | None],
    options: WriteOptions,
    job_id: str,
    epoch: int,
    *,
    with_checksum: bool = True,
) -> None:
    """Attach the files of all tasks to the pending table, in one step. `with_checksum`: send the digest of the rows.

    Raises OverLimit for too many files, and deletes them, because no attach was tried.
    """
    task_results = [message for message in messages if isinstance(message, Written)]
    files = [entry for result in task_results for entry in result.files]
    rows, dropped = (
        sum(result.rows for result in task_results),
        sum(result.dropped for result in task_results),
    )
    if not files:
        LOG.info("nothing to write job=bulk id=%s rows=0 dropped=%d", job_id, dropped)
        return
    with Endpoint(options.endpoint) as endpoint:
        if len(files) > limits.ATTACH_FILES_MAX:
            Store(options.table_uri or endpoint.status().table.uri).remove(entry.path for entry in files)
            raise OverLimit(
                f"{len(files)} files in one write, at most {limits.ATTACH_FILES_MAX}: order the DataFrame first "
                "(df.repartitionByRange('due_ms')), so that each task writes few hours"
            )
        ranges = [seq_range for result in task_results for seq_range in result.ranges]
        attached = endpoint.attach(
            Attachment(
                job="bulk",
                job_id=job_id,
                epoch=epoch,
                files=files,
                ranges=ranges,
                digest=digest(task_results, options) if with_checksum else "",
            )
        )
    LOG.info(
        "rows attached job=bulk id=%s name=%s epoch=%d rows=%d dropped=%d files=%d version=%d repeated=%s",
        *(
            job_id,
            options.job_id or "",
            epoch,
            rows,
            dropped,
            len(files),
            attached.version,
            str(attached.repeated).lower(),
        ),
    )


def digest(task_results: Sequence[Written], options: WriteOptions) -> str:
    """Build the digest of a write: the number of rows and their checksum. With on_repeat=skip it matches any rows."""
    if options.on_repeat == "skip":
        return ANY_ROWS
    checksum = sum(result.checksum for result in task_results) & (1 << 64) - 1
    return f"{sum(result.input_rows for result in task_results)} rows {checksum:016x}"


def remove_written(messages: Sequence[WriterCommitMessage | None], options: WriteOptions) -> None:
    """Delete the files of the other tasks after one task has failed.

    If the messages of all tasks are present, a commit was tried, and the files must stay.
    """
    if all(message is not None for message in messages):
        return
    files = [entry for message in messages if isinstance(message, Written) for entry in message.files]
    if files:
        with Endpoint(options.endpoint) as endpoint:
            Store(options.table_uri or endpoint.status().table.uri).remove(entry.path for entry in files)


class ScheduledWriter(DataSourceArrowWriter):
    """The sink of a batch write: `write` runs in tasks, `commit` and `abort` on the driver."""

    def __init__(self, schema: StructType, options: WriteOptions) -> None:
        scheduled_columns.check_columns(schema)
        self.options = options
        # Chosen once, on the driver. Tasks and commit use copies of this object, so all have the same name.
        self.job_id = options.job_id or f"bulk-{uuid.uuid4().hex}"
        self.named = options.job_id is not None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task to files."""
        return ScheduledTask(self.options, with_checksum=self.named).write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Attach the files of all tasks."""
        attach_all(messages, self.options, self.job_id, self.options.epoch, with_checksum=self.named)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the tasks' files, unless a commit was tried."""
        remove_written(messages, self.options)


class ScheduledStreamWriter(DataSourceStreamArrowWriter):
    """The sink of a stream: each micro-batch is one attach, with Spark's batch id as its epoch."""

    def __init__(self, schema: StructType, options: WriteOptions) -> None:
        scheduled_columns.check_columns(schema)
        if options.epoch:
            raise SetupError("option epoch: not for a stream, whose micro-batches Spark numbers")
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task to files. Raises SetupError if Spark does not supply the query id."""
        if query_id() is None:
            raise SetupError(
                f"Spark gives this task no {QUERY_ID}: write with foreachBatch, job_id and epoch"
            )
        return ScheduledTask(self.options).write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Attach the files of all tasks of a micro-batch."""
        for query in {message.query_id for message in messages if isinstance(message, Written)}:
            attach_all(messages, self.options, f"stream-{query}", batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Delete the tasks' files, unless a commit was tried."""
        remove_written(messages, self.options)
