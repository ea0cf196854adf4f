"""`df.write.format("timeball")`: write rows as files of the pending table, and make them messages by one attach.

Tasks write files. The driver attaches all of them in one record of the broker's log. So either every row of the
DataFrame becomes a scheduled message or none does, however often a task or the whole job is repeated. No row is visible
before the attach. The files of a dead task belong to no table.

    task     collect up to CHUNK_ROWS / CHUNK_BYTES -> check -> sort by due -> reserve numbers -> cut and write files
    driver   commit: one attach of all files and number ranges (job "bulk", job_id, epoch, digest)

The broker recognises a repeated write by its name. The name of a batch write is the option `job_id`, or a random one.
The name of a stream is the query id in its checkpoint: batch ids start at 0 in each new checkpoint, so no other name
could distinguish a repeated micro-batch from a new one. The broker also compares the digest of the rows, and refuses
other rows under a known name.

After it has tried an attach, this module never deletes the files: the answer may be lost, and then the files belong to
the table. The broker deletes files of a refused attach later, like all files that belong to no table.
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
    given: int = 0  # rows + dropped
    checksum: int = 0  # of all given rows; 0 if the write has no name to be repeated under
    query_id: str | None = None  # of the stream; None in a batch write


class ScheduledTask:
    """The part of a write that runs in a task: writes a stream of Arrow batches to files."""

    def __init__(self, options: WriteOptions, *, summed: bool = True) -> None:
        self.options = options
        self.summed = summed  # whether the write may be repeated under its name, and so needs a checksum

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Write all rows of one partition. On failure, the task's files are deleted again."""
        written = Written(query_id=query_id())
        with Endpoint(self.options.endpoint) as endpoint:
            store = Store(self.options.table_uri or endpoint.status().table.uri)
            try:
                for rows in chunks(batches):
                    self._write_run(rows, endpoint, store, written)
            except BaseException:  # an interrupt would leave unused files just as an error does
                store.remove(entry.path for entry in written.files)
                raise
        return written

    def _write_run(self, rows: pa.Table, endpoint: Endpoint, store: Store, written: Written) -> None:
        now_ms = endpoint.status().now_ms
        given, rows = rows, scheduled_columns.normalise(rows, now_ms)
        written.given += rows.num_rows
        if self.summed:
            written.checksum += scheduled_columns.checksum(rows)
        broken = scheduled_columns.first_broken(given, rows, now_ms, as_stored=self.options.as_stored)
        bad = int(np.count_nonzero(broken >= 0))
        if bad:
            if self.options.on_invalid == "fail":
                raise InvalidMessage(refusal(rows, broken))
            LOG.warning("rows dropped rows=%d reason=%s", bad, refusal(rows, broken))
            written.dropped += bad
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
    """Return the query id of the task's stream, or None in a batch. It stays the same as long as the checkpoint."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(QUERY_ID)


def refusal(rows: pa.Table, broken: np.ndarray) -> str:
    """Build the error message for rows that break a rule: how many there are, and the first of them."""
    bad = np.flatnonzero(broken >= 0)
    first = int(bad[0])
    topic, rule = rows.column("topic")[first].as_py(), rules.RULES[broken[first]]
    value = f" {rules.shown(rows.column(rule.column)[first].as_py())}" if rule.shape == "form" else ""
    return (
        f"{len(bad)} of {rows.num_rows} rows are invalid; the first (row {first} of its task, topic {topic!r}):{value} "
        f"{rule.text}; option on_invalid=drop leaves such rows out"
    )


def attach_all(
    messages: Sequence[WriterCommitMessage | None],
    options: WriteOptions,
    job_id: str,
    epoch: int,
    *,
    summed: bool = True,
) -> None:
    """Attach the files of all tasks to the pending table, in one step. `summed`: send the digest of the rows.

    Raises OverLimit for too many files, and then deletes them: no attach was tried.
    """
    parts = [message for message in messages if isinstance(message, Written)]
    files = [entry for part in parts for entry in part.files]
    rows, dropped = sum(part.rows for part in parts), sum(part.dropped for part in parts)
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
        ranges = [each for part in parts for each in part.ranges]
        attached = endpoint.attach(
            Attachment(
                job="bulk",
                job_id=job_id,
                epoch=epoch,
                files=files,
                ranges=ranges,
                digest=digest(parts, options) if summed else "",
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


def digest(parts: Sequence[Written], options: WriteOptions) -> str:
    """Build the digest of a write: the number of rows and their checksum. With on_repeat=skip it matches any rows."""
    if options.on_repeat == "skip":
        return ANY_ROWS
    checksum = sum(part.checksum for part in parts) & (1 << 64) - 1
    return f"{sum(part.given for part in parts)} rows {checksum:016x}"


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
        # Made once, on the driver. Tasks and commit use copies of this object, so all of them have the same name.
        self.job_id = options.job_id or f"bulk-{uuid.uuid4().hex}"
        self.named = options.job_id is not None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task to files."""
        return ScheduledTask(self.options, summed=self.named).write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Attach the files of all tasks."""
        attach_all(messages, self.options, self.job_id, self.options.epoch, summed=self.named)

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
