"""`df.write.format("timeball")`: check rows, write them to files of the pending table, and schedule them by one attach.

Tasks write files. The driver attaches all of them in one record of the broker's log. So either every row of the
DataFrame becomes a scheduled message or none does, however often a task or the whole job is repeated. No row is visible
before the attach. The files of a dead task belong to no table.

    task     collect up to CHUNK_ROWS / CHUNK_BYTES -> check -> sort by due -> reserve numbers -> cut and write files
    driver   commit: one attach of all files and number ranges (job "bulk", job_id, epoch, digest)

The columns of the DataFrame are:

    topic     string             required
    body      binary or string   required
    due_ms    bigint             or  due  timestamp (without either column all rows are due at once)
    tag unique_key               string (a row without unique_key gets 32 random hexadecimal characters)
    keys                         string for one key a row, array<string> for several
    properties                   string in RocketMQ's form, or map<string,string>
    queue_id                     int (a queue is chosen at release when it is left out)
    flag sys_flag                int, as RocketMQ's clients set them (0)

The broker recognises a repeated write by its name. The name of a batch write is the option `job_id`, by default random.
The name of a stream is the query id in its checkpoint. Batch ids start at 0 in each new checkpoint, so no other name
could distinguish a repeated micro-batch from a new one. The broker also compares the digest of the rows, and refuses
other rows under a known name.

After an attach was tried, the files are never deleted here. If only the answer was lost, they belong to the table. The
broker deletes the files of a refused attach later, like all files that belong to no table.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from timeball.model import limits, rules
from timeball.model.errors import InvalidMessage, OverLimit, SetupError
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END, TABLE_SCHEMA, Int64Array, int64
from timeball.spark.endpoint import Endpoint
from timeball.spark.source.options import WriteOptions
from timeball.spark.table_store import Store, chunks
from timeball.table.attachment import ANY_ROWS, Attachment, FileEntry

LOG = logging.getLogger("timeball.spark")
QUERY_ID = "sql.streaming.queryId"  # a property that Spark sets for each task of a stream


# ---- in a task: write the rows to files -----------------------------------------------------------------------


@dataclass
class TaskResult(WriterCommitMessage):
    """A task's message to the driver: the files that the task wrote, and the sequence numbers in them."""

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

    def write(self, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        """Write all rows of one partition. On failure, deletes the task's files.

        `batches`: rows in the columns of the DataFrame. Raises InvalidMessage for an invalid row, unless invalid rows
        are dropped.
        """
        written = TaskResult(query_id=query_id())
        with Endpoint(self.options.endpoint) as endpoint:
            store = Store(self.options.table_uri or endpoint.status().table.uri)
            try:
                for rows in chunks(batches):
                    self._write_chunk(rows, endpoint, store, written)
            except BaseException:  # also for an interrupt, which would leave unused files
                store.remove(entry.path for entry in written.files)
                raise
        return written

    def _write_chunk(self, rows: pa.Table, endpoint: Endpoint, store: Store, written: TaskResult) -> None:
        """Check, sort and number the rows of a chunk, write them to files, and add the files to `written`."""
        now_ms = endpoint.status().now_ms
        raw_rows, rows = rows, to_table_columns(rows, now_ms)
        written.input_rows += rows.num_rows
        if self.with_checksum:
            written.checksum += checksum(rows)
        broken = find_broken_rules(raw_rows, rows, now_ms, as_stored=self.options.as_stored)
        invalid_count = int(np.count_nonzero(broken >= 0))
        if invalid_count:
            if self.options.on_invalid == "fail":
                raise InvalidMessage(invalid_rows_message(rows, broken))
            LOG.warning("rows dropped rows=%d reason=%s", invalid_count, invalid_rows_message(rows, broken))
            written.dropped += invalid_count
            rows = rows.filter(pa.array(broken < 0)).combine_chunks()
        if rows.num_rows == 0:
            return
        rows = rows.take(pa.array(due_order(rows)))
        first_seq = endpoint.reserve(rows.num_rows)
        rows = numbered(with_unique_keys(rows), first_seq)
        written.files.extend(store.put_rows(rows, now_ms))
        written.ranges.append((first_seq, rows.num_rows))
        written.rows += rows.num_rows


def query_id() -> str | None:
    """Read the query id of the task's stream. Returns None in a batch. A checkpoint keeps the query id."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(QUERY_ID)


def invalid_rows_message(rows: pa.Table, broken: np.ndarray) -> str:
    """Build the error message for rows that break a rule: how many there are, and the first one.

    `broken`: the result of `find_broken_rules`.
    """
    invalid = np.flatnonzero(broken >= 0)
    first = int(invalid[0])
    topic, rule = rows.column("topic")[first].as_py(), rules.RULES[broken[first]]
    value = f" {rules.shown(rows.column(rule.column)[first].as_py())}" if rule.shape == "form" else ""
    return (
        f"{len(invalid)} of {rows.num_rows} rows are invalid; the first (row {first} of its task, topic {topic!r}):"
        f"{value} {rule.text}; option on_invalid=drop leaves such rows out"
    )


# ---- on the driver: attach the files, or delete them ----------------------------------------------------------


def attach_all(
    messages: Sequence[WriterCommitMessage | None],
    options: WriteOptions,
    job_id: str,
    epoch: int,
    *,
    with_checksum: bool = True,
) -> None:
    """Attach the files of all tasks to the pending table, in one step.

    `messages`: the results of the tasks. `job_id`, `epoch`: by them the broker recognises a repeat. `with_checksum`:
    send the digest of the rows. For too many files, deletes them and raises OverLimit, because no attach was tried.
    """
    task_results = [message for message in messages if isinstance(message, TaskResult)]
    files = [entry for result in task_results for entry in result.files]
    rows = sum(result.rows for result in task_results)
    dropped = sum(result.dropped for result in task_results)
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
        job_id, options.job_id or "", epoch, rows, dropped, len(files), attached.version,
        str(attached.repeated).lower(),
    )  # fmt: skip


def digest(task_results: Sequence[TaskResult], options: WriteOptions) -> str:
    """Build the digest of a write: the number of input rows and their checksum. With on_repeat=skip: any rows match."""
    if options.on_repeat == "skip":
        return ANY_ROWS
    total = sum(result.checksum for result in task_results) & (1 << 64) - 1
    return f"{sum(result.input_rows for result in task_results)} rows {total:016x}"


def remove_written(messages: Sequence[WriterCommitMessage | None], options: WriteOptions) -> None:
    """Delete the files of the successful tasks after another task has failed, whose message is None.

    If the messages of all tasks are present, a commit was tried. Then the files must stay, because they may belong to
    the table.
    """
    if all(message is not None for message in messages):
        return
    files = [entry for message in messages if isinstance(message, TaskResult) for entry in message.files]
    if files:
        with Endpoint(options.endpoint) as endpoint:
            Store(options.table_uri or endpoint.status().table.uri).remove(entry.path for entry in files)


# ---- the sinks of batches and streams -------------------------------------------------------------------------


class ScheduledWriter(DataSourceArrowWriter):
    """The sink of a batch write: `write` runs in tasks, `commit` and `abort` on the driver."""

    def __init__(self, schema: StructType, options: WriteOptions) -> None:
        """Check the columns of the DataFrame. Raises the errors of `check_columns`."""
        check_columns(schema)
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
        check_columns(schema)
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
        for query in {message.query_id for message in messages if isinstance(message, TaskResult)}:
            attach_all(messages, self.options, f"stream-{query}", batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Delete the tasks' files, unless a commit was tried."""
        remove_written(messages, self.options)


# ---- convert the columns of a DataFrame to those of the pending table -----------------------------------------
# All functions from here on are pure functions on columns. None of them needs a Spark session.

_SPARK_TYPES: dict[str, tuple[str, ...]] = {
    "topic": ("string",),
    "body": ("binary", "string"),
    "tag": ("string",),
    "keys": ("string", "array<string>"),
    "unique_key": ("string",),
    "properties": ("string", "map<string,string>"),
    "queue_id": ("int", "smallint", "tinyint", "bigint"),
    "flag": ("int",),
    "sys_flag": ("int",),
    "due_ms": ("bigint", "int"),
    "due": ("timestamp",),
}
_CHECKSUM_COLUMNS = ("topic", "tag", "keys", "unique_key", "properties", "queue_id", "flag", "sys_flag")
_COLUMN_SEPARATOR = pa.scalar(b"\x1f", pa.large_binary())  # separates the columns of a row in its checksum
CHECKSUM_ROWS = 65_536  # rows whose columns are joined at a time, because joining copies their bodies
# A queue number above the queues of every topic, so it is invalid. It fits into each type of queue_id except tinyint.
_QUEUES_END = 32_767
_TEXT_COLUMNS = ("topic", "tag", "unique_key")


def check_columns(schema: StructType) -> None:
    """Check names and types of a DataFrame's columns. Raises InvalidMessage, which names the column."""
    names = schema.fieldNames()
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidMessage(f"column {', '.join(repeated)}: there twice; drop or rename one of them")
    for column in schema.fields:
        types = _SPARK_TYPES.get(column.name)
        if types is None:
            raise InvalidMessage(f"column {column.name}: unknown; there are {', '.join(_SPARK_TYPES)}")
        if column.dataType.simpleString() not in types:
            hint = "; a timestamp without time zone names no instant" if column.name == "due" else ""
            raise InvalidMessage(
                f"column {column.name}: {column.dataType.simpleString()}, wanted {' or '.join(types)}{hint}"
            )
    for name in ("topic", "body"):
        if name not in names:
            raise InvalidMessage(f"column {name} is missing; a message has a topic and a body")
    if "due_ms" in names and "due" in names:
        raise InvalidMessage("columns due_ms and due: give one of them")


def to_table_columns(rows: pa.Table, now_ms: int) -> pa.Table:
    """Convert the input to TABLE_SCHEMA, with `seq` null. Does not check the values.

    `now_ms` becomes `born_ms` and `accepted_ms` of all rows. It is also `due_ms` if the input has neither `due_ms`
    nor `due`.
    """
    count = rows.num_rows
    given = {name: rows.column(name).combine_chunks() for name in rows.column_names}
    columns: dict[str, pa.Array] = {name: given[name] for name in _TEXT_COLUMNS if name in given}
    columns["body"] = given["body"].cast(pa.binary())
    columns["due_ms"] = _due_ms(given, count, now_ms)
    if "properties" in given:
        columns["properties"] = _properties(given["properties"])
    if "keys" in given:
        columns["keys"] = _keys(given["keys"])
    queue = given.get("queue_id", pa.nulls(count, pa.int32())).fill_null(rules.ANY_QUEUE)
    # The column may be bigint. Clamp it to -2..32,767, so that the cast cannot overflow. Both ends are invalid
    # queues, which the check finds later.
    columns["queue_id"] = pc.min_element_wise(pc.max_element_wise(queue, -2), _QUEUES_END).cast(pa.int32())
    for name in ("born_ms", "accepted_ms"):
        columns[name] = pa.repeat(pa.scalar(now_ms, pa.int64()), count)
    for name in ("flag", "sys_flag", "reconsume_times"):
        zeros = pa.repeat(pa.scalar(0, pa.int32()), count)
        columns[name] = given[name].fill_null(0) if name in given else zeros
    return pa.Table.from_arrays(
        [
            columns[field.name].cast(field.type) if field.name in columns else pa.nulls(count, field.type)
            for field in TABLE_SCHEMA
        ],
        schema=TABLE_SCHEMA,
    )


def _due_ms(columns: dict[str, pa.Array], count: int, now_ms: int) -> pa.Array:
    """Convert the column `due_ms` or `due` to ms since 1970. Without either, all rows are due at `now_ms`."""
    if "due_ms" in columns:
        due = columns["due_ms"].cast(pa.int64())
    elif "due" in columns:
        # Spark's timestamps count microseconds. Round up to the next millisecond, so that no message is early.
        due_us = columns["due"].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        numbers = int64(due_us.fill_null(0))
        due = pa.array(numbers // 1000 + (numbers % 1000 > 0), mask=np.asarray(due_us.is_null()))
    else:
        due = pa.repeat(pa.scalar(now_ms, pa.int64()), count)
    return due


def _keys(column: pa.Array) -> pa.Array:
    """Join a list of keys with blanks, as in the log."""
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    # Arrow joins only lists whose entries may be null, but Spark declares the entries of `array(…)` as not null.
    return pc.binary_join(column.cast(pa.list_(pa.string())), " ") if is_list else column


def _properties(column: pa.Array) -> pa.Array:
    """Convert a map of properties to one text, as in the log."""
    if not pa.types.is_map(column.type):
        return column
    entries = pc.binary_join_element_wise(
        column.keys.cast(pa.string()), column.items.cast(pa.string()).fill_null(""), PROPERTY_NAME_END
    )
    terminated = pc.binary_join_element_wise(entries, "", PROPERTY_END)
    lists = pa.ListArray.from_arrays(column.offsets, terminated)
    return pc.if_else(column.is_valid(), pc.binary_join(lists, ""), pa.scalar(None, pa.string()))


# ---- check, sort and complete rows ----------------------------------------------------------------------------


def with_unique_keys(rows: pa.Table) -> pa.Table:
    """Replace each unique_key that is null or empty by a random one."""
    column = rows.column("unique_key").combine_chunks()
    if column.null_count == 0 and not pc.any(pc.equal(column, "")).as_py():
        return rows
    is_missing = pc.or_(column.is_null(), pc.fill_null(pc.equal(column, ""), True))
    filled = pc.if_else(is_missing, random_unique_keys(len(column)), column)
    return rows.set_column(
        rows.schema.get_field_index("unique_key"), TABLE_SCHEMA.field("unique_key"), filled
    )


def random_unique_keys(count: int) -> pa.Array:
    """Generate `count` strings of 32 hexadecimal characters from the system's random source."""
    text = os.urandom(16 * count).hex().encode("ascii")
    offsets = np.arange(0, 32 * (count + 1), 32, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text)])


def checksum(rows: pa.Table) -> int:
    """Compute the checksum of the result of `to_table_columns`: the sum of the rows' CRC-32C values, modulo 2**64.

    A sum depends neither on the order of the rows nor on their division among tasks. It does not include the due time,
    because `now() + interval 1 hour` has another value when the same write runs again.
    """
    total = 0
    for batch in rows.to_batches(CHECKSUM_ROWS):
        columns = [
            batch.column(name).cast(pa.large_string()).cast(pa.large_binary()) for name in _CHECKSUM_COLUMNS
        ]
        columns.append(batch.column("body").cast(pa.large_binary()))
        row_texts = pc.binary_join_element_wise(
            *columns, _COLUMN_SEPARATOR, null_handling="replace", null_replacement=b"\x00"
        )
        total += sum(map(google_crc32c.value, row_texts.to_pylist()))
    return total & (1 << 64) - 1


def find_broken_rules(
    raw_rows: pa.Table, rows: pa.Table, now_ms: int, *, as_stored: bool = False
) -> npt.NDArray[np.int8]:
    """Find for each row the index in rules.RULES of the first rule that it breaks, or -1. `send` has the same rules.

    `raw_rows`: the columns of the DataFrame. `rows`: the same rows as `to_table_columns` returns them, with keys and
    properties as one text each. `as_stored`: texts in `raw_rows` have the form of the log (keys separated by blanks),
    so their form is not checked.
    """
    columns = {name: rows.column(name).combine_chunks() for name in rows.column_names}
    broken = rules.first_broken(columns, rows.num_rows, now_ms)
    for name, index in rules.FORM_RULES.items():
        if name in raw_rows.column_names and not (as_stored and _is_text(raw_rows.schema.field(name).type)):
            is_bad = rules.form_faults(name, raw_rows.column(name).combine_chunks())
            broken[is_bad & ((broken < 0) | (broken > index))] = index
    return broken


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def due_order(rows: pa.Table) -> Int64Array:
    """Compute the indexes of the rows in the order of their due times. The sort is stable."""
    return np.argsort(int64(rows.column("due_ms").combine_chunks()), kind="stable").astype(np.int64)


def numbered(rows: pa.Table, first_seq: int) -> pa.Table:
    """Fill the column `seq` with consecutive numbers from `first_seq` on."""
    seqs = pa.array(np.arange(first_seq, first_seq + rows.num_rows, dtype=np.int64))
    return rows.set_column(0, TABLE_SCHEMA.field("seq"), seqs)
