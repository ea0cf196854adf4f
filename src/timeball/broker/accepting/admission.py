"""Admission: validate sends from outside, complete their rows, and classify each row as immediate or scheduled.

A refusal raises an error that names the field and the first bad row. The admission refuses all values that a stock
RocketMQ broker refuses, and due times that are negative, not a number or too far away. A message with a bad due time is
never delivered at once, as RocketMQ #10872 did. A batch is accepted as a whole or not at all. policy.py decides which
topics the caller may use.

A due time in the past is allowed, and the message is due at once: the caller's clock may be slow, and a replay is
legitimate.

Three paths give the same rows (`tests/broker/accepting/test_small_batch.py` and
`tests/edges/remoting/codec/test_send_frames.py` check this):

    columns    `admit`: any batch. Only this path raises errors, so each error has one source
    rows       `are_plain`, then `log_rows`: at most ROWS_MAX rows that break no rule
    in C       `SendRuns`: any number of rows that an edge has parsed in C. Costs a tenth of the other paths
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.registry.queue_offsets import QueueOffsets
from timeball.broker.registry.topics import Topic
from timeball.log.row_encoder import Build, EncodedRows, stored_size
from timeball.model import limits, rules
from timeball.model.errors import InvalidDelay, InvalidMessage, OverLimit
from timeball.model.message import (
    LOG_SCHEMA,
    SCHEDULE_TOPIC,
    SEND_COLUMNS,
    SEND_NAMES,
    Int64Array,
    Kind,
    LogRow,
    SendBatch,
    SendRow,
    build_rows,
    int64,
    message_row,
    repeated,
    scheduled_row,
)
from timeball.schedule.backlog import Backlog
from timeball.schedule.delay_levels import LevelTable, with_level_properties


def as_columns(sends: ParsedSends) -> pa.RecordBatch:
    """Convert sends to a batch of SEND_COLUMNS. Raises pa.ArrowInvalid for values out of range."""
    batch = as_batch(sends)
    return batch_of(batch) if isinstance(batch, list) else batch


def batch_of(rows: Sequence[SendRow]) -> pa.RecordBatch:
    """Convert at least one row to a batch of SEND_COLUMNS, without the columns that are all null.

    Raises pa.ArrowInvalid for values out of range.
    """
    columns = {}
    for name, values in zip(SEND_NAMES, zip(*rows, strict=True), strict=True):
        column_type, first = SEND_COLUMNS[name], values[0]
        # Two thirds of the columns usually have the same value in all rows. Counting equal values is several times
        # cheaper than converting them.
        if values.count(first) < len(values) or (len(values) == 1 and first is not None):
            columns[name] = pa.array(values, column_type)
        elif first is not None:
            columns[name] = repeated(first, column_type, len(values))
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def admit(
    batch: pa.RecordBatch, *, now_ms: int, delay_ms_max: int, host: str, table: LevelTable
) -> tuple[pa.RecordBatch, Int64Array | None]:
    """Check a batch of SEND_COLUMNS and build its LOG_SCHEMA rows. Also return the delay level of each row (0: none).

    MESSAGE rows are visible at once, SCHEDULED rows are due later. `delay_ms_max` is the longest delay from `now_ms`
    on. The levels are None if no row has one. Rows with a level still have their own topic and queue: call
    `into_level_queues` next. Raises InvalidMessage, InvalidDelay and OverLimit.
    """
    # Check counts and sizes first: all later checks have a cost per row.
    count = batch.num_rows
    if not 0 < count <= limits.ROWS_PER_REQUEST_MAX:
        raise OverLimit(f"{count} rows in one request; between 1 and {limits.ROWS_PER_REQUEST_MAX}: split it")
    if batch.get_total_buffer_size() > limits.REQUEST_BYTES_MAX:
        _check_size(batch.nbytes)  # the buffers may belong to a larger batch of which this is a slice
    columns, was_cast = _cast_columns(batch)
    if was_cast:
        # Check the size again after the casts: a dictionary with one body and a thousand references to it is now
        # expanded. The log would also refuse the frame, but only after its rows had received queue offsets.
        _check_size(sum(column.nbytes for column in columns.values()))
    # After the casts and the size check: the rules assume the types and read every byte of the texts.
    due = _due_times(columns, count, now_ms, delay_ms_max)
    delay = columns.get("delay_ms")
    rules.check_columns(columns)
    # After the due times: a row with both a due time and a delay level is an error.
    level = _delay_levels(columns, due, table)
    kind: npt.NDArray[np.int8] | int = int(Kind.MESSAGE)
    if level is not None or due.null_count < count:
        kind = np.where(np.asarray(due.is_valid()), np.int8(Kind.SCHEDULED), np.int8(Kind.MESSAGE))
        if level is not None:
            # Also for levels of 0 ms: these messages pass through their level's queue like all others.
            kind[level > 0] = Kind.SCHEDULED
            level_due_ms = np.where(level > 0, table.delay_ms(np.maximum(level, 1)) + now_ms, 0)
            due = pc.coalesce(due, pa.array(level_due_ms, mask=level == 0))
    rows = build_rows(
        count,
        kind=kind,
        topic=columns["topic"],
        queue_id=_column_or_default(columns, "queue_id", -1),
        tag=columns.get("tag"),
        keys=columns.get("keys"),
        unique_key=columns.get("unique_key"),
        body=columns["body"],
        properties=columns.get("properties"),
        born_ms=_column_or_default(columns, "born_ms", now_ms),
        born_host=_column_or_default(columns, "born_host", host),
        store_ms=now_ms,
        store_host=host,
        flag=_column_or_default(columns, "flag", 0),
        sys_flag=_column_or_default(columns, "sys_flag", 0),
        reconsume_times=_column_or_default(columns, "reconsume_times", 0),
        due_ms=due,
        # Marks the row as due after a duration (durations.py).
        accepted_ms=None
        if delay is None
        else pa.array(np.full(count, now_ms), mask=np.asarray(delay.is_null())),
    )
    return rows, level


def into_level_queues(rows: pa.RecordBatch, level: Int64Array) -> pa.RecordBatch:
    """Move admitted rows with a delay level to the schedule topic, into the queue of their level.

    Raises InvalidMessage if the properties that a level adds make a text too long.
    """
    has_level = level > 0
    topic, queue_id, properties = (rows.column(name) for name in ("topic", "queue_id", "properties"))
    level_mask = pa.array(has_level)
    # This may refuse properties that become too long, so it runs before any offset is assigned.
    new_properties = with_level_properties(
        properties.filter(level_mask), level[has_level], topic.filter(level_mask), queue_id.filter(level_mask)
    )
    changed = {
        "topic": pc.if_else(level_mask, SCHEDULE_TOPIC, topic),
        "queue_id": pa.array(np.where(has_level, level - 1, queue_id.to_numpy()).astype(np.int32)),
        # The offset is set when the row is appended. Until then, 0 marks the row as one of a delay level.
        "queue_offset": pa.array(np.zeros(len(level), np.int64), mask=~has_level),
        "properties": pc.replace_with_mask(properties, level_mask, new_properties),
    }
    columns = [changed.get(name, rows.column(name)) for name in LOG_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=LOG_SCHEMA)


def check_capacity(backlog: Backlog, rows: pa.RecordBatch) -> None:
    """Raise OverLimit if the backlog has no capacity for the scheduled messages among admitted rows."""
    is_scheduled = _is_in_backlog(rows)
    if is_scheduled.any():
        backlog.check_capacity(int64(rows.column("due_ms").filter(pa.array(is_scheduled))))


def encode_for_backlog(backlog: Backlog, rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
    """Let the backlog add its own properties to the scheduled messages among admitted rows.

    Only for backlogs other than the hour log, which stores rows unchanged.
    """
    is_scheduled = _is_in_backlog(rows)
    if not is_scheduled.any():
        return rows
    if is_scheduled.all():
        return backlog.encode_for_log(rows, now_ms)
    scheduled_rows = rows.filter(pa.array(is_scheduled))
    encoded = backlog.encode_for_log(scheduled_rows, now_ms)
    if encoded is scheduled_rows:
        return rows
    properties = pc.replace_with_mask(
        rows.column("properties"), pa.array(is_scheduled), encoded.column("properties")
    )
    properties_index = LOG_SCHEMA.get_field_index("properties")
    return rows.set_column(properties_index, LOG_SCHEMA.field(properties_index), properties)


def _is_in_backlog(rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Compute a mask of the scheduled messages among these rows, without messages of delay levels (`DelayLevels`)."""
    is_scheduled = rows.column("kind").to_numpy() == Kind.SCHEDULED
    return np.asarray(is_scheduled & np.asarray(rows.column("queue_offset").is_null()))


def _check_size(size_bytes: int) -> None:
    """Raise OverLimit for a request of too many bytes."""
    if size_bytes > limits.REQUEST_BYTES_MAX:
        raise OverLimit(f"{size_bytes} bytes in one request; at most {limits.REQUEST_BYTES_MAX}: split it")


def _cast_columns(batch: pa.RecordBatch) -> tuple[dict[str, pa.Array], bool]:
    """Cast the columns of a batch to their stored types. Columns that are all null are left out.

    Returns the columns by name, and whether any column was cast. Raises InvalidMessage.
    """
    columns, was_cast = {}, False
    for name in batch.schema.names:
        stored_type = SEND_COLUMNS.get(name)
        if stored_type is None:
            raise InvalidMessage(f"column {name!r} is not one of {', '.join(SEND_COLUMNS)}")
        column = batch.column(name)
        if column.type != stored_type:
            column, was_cast = _cast(name, column, stored_type), True
        if column.null_count < len(column) or name in ("topic", "body"):
            columns[name] = column
    for name in ("topic", "body"):
        if name not in columns:
            raise InvalidMessage(f"column {name!r} is missing")
        if columns[name].null_count:
            raise InvalidMessage(
                f"column {name!r} has no value in row {_first_true(columns[name].is_null())}"
            )
    return columns, was_cast


def _cast(name: str, column: pa.Array, stored_type: pa.DataType) -> pa.Array:
    """Cast a column to its stored type. Raises InvalidMessage, also for a column of times or durations."""
    if pa.types.is_temporal(column.type):
        # A cast could read seconds as milliseconds, and deliver at once a message that is due next year.
        raise InvalidMessage(f"column {name!r} has type {column.type}: give milliseconds as {stored_type}")
    try:
        return column.cast(stored_type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidMessage(
            f"column {name!r} has type {column.type}, which is no {stored_type}: {error}"
        ) from error


def _due_times(columns: dict[str, pa.Array], count: int, now_ms: int, delay_ms_max: int) -> pa.Array:
    """Compute the due time of each row (ms since 1970). It is null for rows that are visible at once.

    This is the only place where a relative delay becomes an absolute time, by the broker's clock.
    Raises InvalidDelay.
    """
    due, delay = columns.get("due_ms"), columns.get("delay_ms")
    if due is not None and delay is not None:
        has_both = pc.and_(due.is_valid(), delay.is_valid())
        if pc.any(has_both).as_py():
            raise InvalidDelay(f"row {_first_true(has_both)} has both due_ms and delay_ms; give one")
    if delay is not None:
        values = delay.fill_null(0).to_numpy()
        # Check before adding: the sum of two int64 values may overflow into the past.
        rules.check_time_range("delay_ms", values, 0, delay_ms_max)
        absolute = pa.array(values + now_ms, mask=np.asarray(delay.is_null()))
        due = absolute if due is None else pc.coalesce(due, absolute)
    if due is None:
        return pa.nulls(count, pa.int64())
    rules.check_time_range("due_ms", due.fill_null(now_ms).to_numpy(), 0, now_ms + delay_ms_max)
    return due


def _delay_levels(columns: dict[str, pa.Array], due: pa.Array, table: LevelTable) -> Int64Array | None:
    """Read the delay level of each row, 0 for none. None if no row has a level. Raises InvalidDelay."""
    if "delay_level" not in columns:
        return None
    level = columns["delay_level"].fill_null(0).to_numpy().astype(np.int64)
    if not level.any():
        return None
    if (level < 0).any():
        raise InvalidDelay(f"delay_level {level.min()} of row {int(np.argmin(level))} is negative")
    has_both = (level > 0) & np.asarray(due.is_valid())
    if has_both.any():
        raise InvalidDelay(f"row {int(np.argmax(has_both))} has both a delay_level and a due time; give one")
    return table.clamp(level)


def _column_or_default(columns: dict[str, pa.Array], name: str, default: int | str) -> pa.Array | int | str:
    """Find a column, with `default` in place of its nulls. Returns `default` if the column is missing."""
    column = columns.get(name)
    if column is None:
        return default
    # An Arrow kernel costs more than all other steps of a small batch, and most columns have no nulls.
    return column.fill_null(default) if column.null_count else column


def _first_true(mask: pa.Array) -> int:
    """Find the index of the first true value."""
    return int(pc.index(mask, True).as_py())


# ---- small batches: check rows, choose queue offsets and encode them, row by row -----------------------------
# Nearly every commit has only a few rows. The path for columns (`admit`, `Topics.place`) makes a hundred calls of Arrow
# and numpy, and each takes some microseconds even for one row. Up to ROWS_MAX rows, working row by row costs less. A
# batch takes this path only if it is *plain*: no delay level, no column of another type, no row that breaks a rule.

ROWS_MAX = 256  # at twice as many rows both paths cost about the same

_TYPES = {name: SEND_COLUMNS[name] for name in SEND_NAMES}
_BODY_SAFE, _TAG_SAFE, _KEYS_SAFE, _UNIQUE_KEY_SAFE, _PROPERTIES_SAFE = (
    rules.SAFE_LENGTHS[name] for name in ("body", "tag", "keys", "unique_key", "properties")
)


def _bytes_max() -> int:
    """Compute the limit for the bytes of all bodies: so small that a request and a frame need no further check."""
    return limits.REQUEST_BYTES_MAX // 64


def rows_in(batch: pa.RecordBatch) -> list[SendRow] | None:
    """Convert a small batch of columns to rows.

    None if the batch has many rows or bytes, or columns that admission would cast or refuse.
    """
    count, schema = batch.num_rows, batch.schema
    if not 0 < count <= ROWS_MAX or batch.get_total_buffer_size() > _bytes_max():
        return None
    columns = dict(zip(schema.names, batch.columns, strict=True))
    # Fewer entries mean duplicate names.
    if len(columns) < len(schema) or any(column.type != _TYPES.get(name) for name, column in columns.items()):
        return None
    nulls = [None] * count
    return list(
        zip(*(columns[name].to_pylist() if name in columns else nulls for name in SEND_NAMES), strict=True)
    )


def are_plain(rows: Sequence[SendRow], now_ms: int, delay_ms_max: int, *, may_schedule: bool) -> bool:
    """Check whether these rows obey all rules of `admit` and have no delay level.

    Without `may_schedule`, a row with a due time is not plain either, because its backlog may refuse it or change its
    row.
    """
    if len(rows) > ROWS_MAX:
        return False
    last_ms, total_bytes = now_ms + delay_ms_max, 0
    for topic, body, tag, keys, unique_key, properties, queue_id, *_, due_ms, level in rows:
        if topic is None or body is None or level:
            return False
        if due_ms is not None and not (may_schedule and 0 <= due_ms <= last_ms):
            return False
        if queue_id is not None and not rules.ANY_QUEUE <= queue_id < limits.QUEUES_PER_TOPIC_MAX:
            return False
        total_bytes += len(body)
        # Nearly all texts are short and printable, and then no rule can be broken: a printable text does not contain
        # the characters that separate properties. So the loop over the five texts below is seldom reached.
        if (
            len(body) <= _BODY_SAFE
            and (tag is None or (len(tag) <= _TAG_SAFE and tag.isprintable()))
            and (keys is None or (len(keys) <= _KEYS_SAFE and keys.isprintable()))
            and (unique_key is None or (len(unique_key) <= _UNIQUE_KEY_SAFE and unique_key.isprintable()))
            and (properties is None or len(properties) <= _PROPERTIES_SAFE)
        ):
            continue
        for name, value in (
            ("body", body), ("tag", tag), ("keys", keys), ("unique_key", unique_key), ("properties", properties)
        ):  # fmt: skip
            if value is not None and rules.fault(name, value) is not None:
                return False
    return total_bytes <= _bytes_max()


class SmallBatch(NamedTuple):
    """Encoded rows that are ready for the log, and their queue offsets, which are chosen but not yet reserved."""

    rows: EncodedRows
    places: QueueOffsets | None  # None if all rows are scheduled messages
    scheduled: list[int]  # the indexes of the scheduled messages in `rows`
    scheduled_bytes: int  # the size of the scheduled messages as RocketMQ would store them


class SendRuns(Protocol):
    """Sends that an edge has parsed in C. It has checked their texts and bodies. `len` is the number of messages."""

    @property
    def topics(self) -> set[str]:
        """The names of the topics."""

    def __len__(self) -> int: ...

    def batch(self) -> SendBatch:
        """Convert the sends to rows or columns, for the other paths."""

    def log_rows(
        self, topics: Mapping[str, Topic], now_ms: int, last_ms: int, host: str
    ) -> SmallBatch | None:
        """Encode the rows, as the function `log_rows`. None if a send is not plain, or is due after `last_ms`.

        `topics` contains every topic of the sends.
        """


ParsedSends: TypeAlias = SendBatch | SendRuns


def as_batch(sends: ParsedSends) -> SendBatch:
    """Convert sends to rows or columns."""
    return sends if isinstance(sends, list | pa.RecordBatch) else sends.batch()


def log_rows(
    rows: Sequence[SendRow], topics: Mapping[str, Topic], now_ms: int, host: str, build: Build
) -> SmallBatch:
    """Encode plain rows (`are_plain`), and choose the queue offsets of the rows without a due time.

    `topics` contains every topic of the rows. Call `QueueOffsets.reserve_offsets` after the append. Raises Arrow's
    errors for bad values: a number out of its column's range, or half a surrogate pair.
    """
    queue_offsets: QueueOffsets | None = None
    built: list[LogRow] = []
    scheduled, scheduled_bytes = [], 0
    for index, send in enumerate(rows):
        (
            topic, body, tag, keys, unique_key, properties, queue_id, born_ms, born_host, flag, sys_flag,
            reconsume_times, due_ms, _,
        ) = send  # fmt: skip
        queue_id = -1 if queue_id is None else queue_id
        size_bytes = stored_size(topic, body, properties)
        born_ms = now_ms if born_ms is None else born_ms
        born_host = host if born_host is None else born_host
        # A scheduled message gets its offset at its release, so it uses up no offset of its topic now.
        if due_ms is not None:
            scheduled.append(index)
            scheduled_bytes += size_bytes
            row = scheduled_row(
                topic=topic, queue_id=queue_id, tag=tag, keys=keys, unique_key=unique_key, body=body,
                properties=properties, born_ms=born_ms, born_host=born_host, store_ms=now_ms, store_host=host,
                flag=flag or 0, sys_flag=sys_flag or 0, reconsume_times=reconsume_times or 0, due_ms=due_ms,
            )  # fmt: skip
        else:
            queue_offsets = queue_offsets or QueueOffsets()
            queue_id, offset = queue_offsets.choose(
                topics[topic], index, queue_id, size_bytes, tag, properties
            )
            row = message_row(
                topic=topic, queue_id=queue_id, queue_offset=offset, tag=tag, keys=keys, unique_key=unique_key,
                body=body, properties=properties, born_ms=born_ms, born_host=born_host, store_ms=now_ms,
                store_host=host, flag=flag or 0, sys_flag=sys_flag or 0, reconsume_times=reconsume_times or 0,
            )  # fmt: skip
        built.append(row)
    return SmallBatch(build(built), queue_offsets, scheduled, scheduled_bytes)
