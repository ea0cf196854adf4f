"""Check, place and build small batches of sends row by row, and convert them to columns once.

Nearly every commit has only a few rows. The path for columns (admission.py, `Topics.place`) makes a hundred calls of
Arrow and numpy. Each call takes some microseconds even for one row. Up to ROWS_MAX rows cost less one by one.

A batch that is not *plain* takes the path for columns: it has a delay level, a column of another type, or a row that
breaks a rule. Only that path raises errors, so each error has one source. `tests/broker/accepting/test_small_batch.py`
checks that both paths give the same rows.

An edge that parses sends in C also encodes their rows in C, for any number of rows: `SendRuns`. This costs a tenth of
either path, and gives the same rows (`tests/edges/remoting/codec/test_send_frames.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from timeball.broker.registry.queue_offsets import FewPlaces
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
    """The limit for the bytes of all bodies.

    With their texts, they stay far below the limits of a request and a frame.
    """
    return limits.REQUEST_BYTES_MAX // 64


def rows_in(batch: pa.RecordBatch) -> list[SendRow] | None:
    """Convert a small batch of columns to rows.

    None for a batch with many rows, or with columns that admission would cast or refuse.
    """
    count, schema = batch.num_rows, batch.schema
    if not 0 < count <= ROWS_MAX or batch.get_total_buffer_size() > _bytes_max():
        return None
    given = dict(zip(schema.names, batch.columns, strict=True))
    # Fewer entries mean duplicate names.
    if len(given) < len(schema) or any(column.type != _TYPES.get(name) for name, column in given.items()):
        return None
    nothing = [None] * count
    return list(
        zip(*(given[name].to_pylist() if name in given else nothing for name in SEND_NAMES), strict=True)
    )


def are_plain(rows: Sequence[SendRow], now_ms: int, delay_ms_max: int, *, may_wait: bool) -> bool:
    """Check whether these rows obey all rules of admission.py and have no delay level.

    Without `may_wait`, a row with a due time is not plain either, because its backlog may refuse it or change its row.
    """
    if len(rows) > ROWS_MAX:
        return False
    last_ms, total_bytes = now_ms + delay_ms_max, 0
    for topic, body, tag, keys, unique_key, properties, queue_id, *_, due_ms, level in rows:
        if topic is None or body is None or level:
            return False
        if due_ms is not None and not (may_wait and 0 <= due_ms <= last_ms):
            return False
        if queue_id is not None and not rules.ANY_QUEUE <= queue_id < limits.QUEUES_PER_TOPIC_MAX:
            return False
        total_bytes += len(body)
        # Nearly all texts are short and printable. This test avoids a loop over the five texts. A printable text does
        # not contain the characters that separate properties.
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
    """Rows in their stored form, their queue offsets, and the positions of the scheduled ones."""

    rows: EncodedRows
    places: FewPlaces | None  # None if all rows are scheduled messages
    scheduled: list[int]  # positions of the scheduled messages in `rows`
    scheduled_bytes: int  # the size of the scheduled messages as RocketMQ would store them


class SendRuns(Protocol):
    """Sends in the form in which their edge has read them. The edge has checked their texts and bodies."""

    @property
    def topics(self) -> set[str]:
        """The names of their topics."""

    def __len__(self) -> int: ...

    def batch(self) -> SendBatch:
        """Convert the sends to rows or columns, for the other paths."""

    def log_rows(
        self, topics: Mapping[str, Topic], now_ms: int, last_ms: int, host: str
    ) -> SmallBatch | None:
        """Do the work of the function `log_rows`. None if a send is not plain, or is due after `last_ms`."""


Sends: TypeAlias = SendBatch | SendRuns


def as_batch(sends: Sends) -> SendBatch:
    """Convert sends to rows or columns."""
    return sends if isinstance(sends, list | pa.RecordBatch) else sends.batch()


def log_rows(
    rows: Sequence[SendRow], topics: Mapping[str, Topic], now_ms: int, host: str, build: Build
) -> SmallBatch:
    """Build plain rows and choose their queue offsets. `FewPlaces.give_out` must assign the offsets afterwards.

    Raises Arrow's errors for bad values: a number out of its column's range, or half a surrogate pair.
    """
    places: FewPlaces | None = None
    built: list[LogRow] = []
    scheduled, scheduled_bytes = [], 0
    for at, send in enumerate(rows):
        (
            topic, body, tag, keys, unique_key, properties, queue_id, born_ms, born_host, flag, sys_flag,
            reconsume_times, due_ms, _,
        ) = send  # fmt: skip
        queue_id = -1 if queue_id is None else queue_id
        size_bytes = stored_size(topic, body, properties)
        born_ms = now_ms if born_ms is None else born_ms
        born_host = host if born_host is None else born_host
        # A scheduled message gets its offset when it is due: until then it must not use up an offset of its topic.
        if due_ms is not None:
            scheduled.append(at)
            scheduled_bytes += size_bytes
            row = scheduled_row(
                topic=topic, queue_id=queue_id, tag=tag, keys=keys, unique_key=unique_key, body=body,
                properties=properties, born_ms=born_ms, born_host=born_host, store_ms=now_ms, store_host=host,
                flag=flag or 0, sys_flag=sys_flag or 0, reconsume_times=reconsume_times or 0, due_ms=due_ms,
            )  # fmt: skip
        else:
            places = places or FewPlaces()
            queue_id, offset = places.choose(topics[topic], at, queue_id, size_bytes, tag, properties)
            row = message_row(
                topic=topic, queue_id=queue_id, queue_offset=offset, tag=tag, keys=keys, unique_key=unique_key,
                body=body, properties=properties, born_ms=born_ms, born_host=born_host, store_ms=now_ms,
                store_host=host, flag=flag or 0, sys_flag=sys_flag or 0, reconsume_times=reconsume_times or 0,
            )  # fmt: skip
        built.append(row)
    return SmallBatch(build(built), places, scheduled, scheduled_bytes)
