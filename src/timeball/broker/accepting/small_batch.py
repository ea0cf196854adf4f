"""The fast path for small batches of sends: check the rows, choose queue offsets and encode them, row by row.

Nearly every commit has only a few rows. The path for columns (admission.py, `Topics.place`) makes a hundred calls of
Arrow and numpy, and each takes some microseconds even for one row. Up to ROWS_MAX rows, working row by row costs less.

A batch takes this path only if it is *plain*: no delay level, no column of another type, no row that breaks a rule.
Otherwise it takes the path for columns. Only that path raises errors, so each error has one source.
`tests/broker/accepting/test_small_batch.py` checks that both paths give the same rows.

An edge that parses sends in C also encodes their rows in C, for any number of rows: `SendRuns`. This costs a tenth of
either path, and gives the same rows (`tests/edges/remoting/codec/test_send_frames.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from timeball.broker.registry.queue_offsets import QueueOffsets
from timeball.broker.registry.topic import Topic
from timeball.log.row_encoder import Build, EncodedRows, stored_size
from timeball.model import limits, rules
from timeball.model.message import (
    SEND_COLUMNS,
    SEND_NAMES,
    LogRow,
    SendBatch,
    SendRow,
)
from timeball.model.rows import message_row, scheduled_row

ROWS_MAX = 256  # at twice as many rows both paths cost about the same

_TYPES = {name: SEND_COLUMNS[name] for name in SEND_NAMES}
_BODY_SAFE, _TAG_SAFE, _KEYS_SAFE, _UNIQUE_KEY_SAFE, _PROPERTIES_SAFE = (
    rules.SAFE_LENGTHS[name] for name in ("body", "tag", "keys", "unique_key", "properties")
)


def _bytes_max() -> int:
    """The limit for the bytes of all bodies: small enough that the limits of a request and a frame need no check."""
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
    """Check whether these rows obey all rules of admission.py and have no delay level.

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
        # the characters that separate properties. So the loop over the five texts below seldom runs.
        if (
            len(body) <= _BODY_SAFE
            and (tag is None or (len(tag) <= _TAG_SAFE and tag.isprintable()))
            and (keys is None or (len(keys) <= _KEYS_SAFE and keys.isprintable()))
            and (unique_key is None or (len(unique_key) <= _UNIQUE_KEY_SAFE and unique_key.isprintable()))
            and (properties is None or len(properties) <= _PROPERTIES_SAFE)
        ):
            continue
        for name, text in (
            ("body", body), ("tag", tag), ("keys", keys), ("unique_key", unique_key), ("properties", properties)
        ):  # fmt: skip
            if text is not None and rules.fault(name, text) is not None:
                return False
    return total_bytes <= _bytes_max()


class SmallBatch(NamedTuple):
    """Encoded rows that are ready for the log, and their queue offsets, which are chosen but not yet given out."""

    rows: EncodedRows
    places: QueueOffsets | None  # None if all rows are scheduled messages
    scheduled: list[int]  # positions of the scheduled messages in `rows`
    scheduled_bytes: int  # the size of the scheduled messages as RocketMQ would store them


class SendRuns(Protocol):
    """Sends in the form in which their edge has parsed them. The edge has checked their texts and bodies."""

    @property
    def topics(self) -> set[str]:
        """The names of their topics."""

    def __len__(self) -> int: ...

    def batch(self) -> SendBatch:
        """Convert the sends to rows or columns, for the slower paths."""

    def log_rows(
        self, topics: Mapping[str, Topic], now_ms: int, last_ms: int, host: str
    ) -> SmallBatch | None:
        """Encode the rows, like the function `log_rows`. None if a send is not plain, or is due after `last_ms`."""


ParsedSends: TypeAlias = SendBatch | SendRuns


def as_batch(sends: ParsedSends) -> SendBatch:
    """Convert sends to rows or columns."""
    return sends if isinstance(sends, list | pa.RecordBatch) else sends.batch()


def log_rows(
    rows: Sequence[SendRow], topics: Mapping[str, Topic], now_ms: int, host: str, build: Build
) -> SmallBatch:
    """Encode plain rows and choose their queue offsets. `QueueOffsets.reserve_offsets` must be called afterwards.

    Raises Arrow's errors for bad values: a number out of its column's range, or half a surrogate pair.
    """
    queue_offsets: QueueOffsets | None = None
    built: list[LogRow] = []
    scheduled, scheduled_bytes = [], 0
    for position, send in enumerate(rows):
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
            scheduled.append(position)
            scheduled_bytes += size_bytes
            row = scheduled_row(
                topic=topic, queue_id=queue_id, tag=tag, keys=keys, unique_key=unique_key, body=body,
                properties=properties, born_ms=born_ms, born_host=born_host, store_ms=now_ms, store_host=host,
                flag=flag or 0, sys_flag=sys_flag or 0, reconsume_times=reconsume_times or 0, due_ms=due_ms,
            )  # fmt: skip
        else:
            queue_offsets = queue_offsets or QueueOffsets()
            queue_id, offset = queue_offsets.choose(
                topics[topic], position, queue_id, size_bytes, tag, properties
            )
            row = message_row(
                topic=topic, queue_id=queue_id, queue_offset=offset, tag=tag, keys=keys, unique_key=unique_key,
                body=body, properties=properties, born_ms=born_ms, born_host=born_host, store_ms=now_ms,
                store_host=host, flag=flag or 0, sys_flag=sys_flag or 0, reconsume_times=reconsume_times or 0,
            )  # fmt: skip
        built.append(row)
    return SmallBatch(build(built), queue_offsets, scheduled, scheduled_bytes)
