"""Read a topic: the rows of its queues, by offset, as consumers see them.

A partition is a range of offsets of one queue. Rows keep their queue's order within a partition; there is no order
between queues, as in every consumer group. Reading moves no group's offsets and takes no message from a consumer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from timeball.errors import NotFound, OutOfRange
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.source.log_reader import piece_rows, shape, split_range
from timeball.pipeline.source.option_values import Offsets
from timeball.pipeline.source.options import ReadOptions
from timeball.pipeline.source.pushdown import OPEN, Wanted, bounds, wanted
from timeball.pipeline.source.retrying_read import behind_rows, retrying_read
from timeball.pipeline.source.spark_api import Filter

if TYPE_CHECKING:
    from collections.abc import Iterable

Kept = dict[int, tuple[int, int]]  # queue -> (first offset kept, next offset)


@dataclass
class QueuePart(InputPartition):
    """Rows from_offset <= offset < to_offset of one queue."""

    queue_id: int
    from_offset: int
    to_offset: int


def kept_offsets(endpoint: Endpoint, options: ReadOptions) -> Kept:
    """Return what the queues to be read hold; NotFound names the option when there is no such topic or queue."""
    topic = options.topic or ""
    try:
        kept = endpoint.queues(topic)
    except NotFound as error:
        raise NotFound(
            f"option topic={topic!r}: {error}; a topic begins with create_topic or its first message"
        ) from error
    if options.queue_id is None:
        return kept
    if options.queue_id not in kept:
        raise NotFound(
            f"option queue_id={options.queue_id}: the topic {topic!r} has the queues 0 to {len(kept) - 1}"
        )
    return {options.queue_id: kept[options.queue_id]}


def offsets_at(name: str, position: int | str | Offsets, kept: Kept) -> Offsets:
    """Return the offset that an option names in each queue; OutOfRange where that is not kept."""
    if isinstance(position, dict):
        for queue in position:
            if queue not in kept:
                raise NotFound(
                    f"option {name}: there is no queue {queue} among those to read: {sorted(kept)}"
                )
    found: Offsets = {}
    for queue, (first, end) in kept.items():
        named = position.get(queue, name_of_rest(name)) if isinstance(position, dict) else position
        offset = {"first": first, "latest": end}[named] if isinstance(named, str) else named
        if not first <= offset <= end:
            raise OutOfRange(
                f"option {name}: offset {offset} of queue {queue}, which keeps {first} to {end}; "
                "an offset can be given for each queue: 0=100,1=250"
            )
        found[queue] = offset
    return found


def name_of_rest(name: str) -> str:
    """Return where queues stand that an option does not name: all of them is read."""
    return "first" if name == "from_offset" else "latest"


def check_offsets(topic: str, begin: Mapping[int, int], kept: Kept) -> None:
    """Refuse offsets that retention has taken since: fewer rows would look like all."""
    for queue, offset in begin.items():
        if queue in kept and offset < kept[queue][0]:
            raise OutOfRange(
                f"queue {queue} of {topic!r}: retention has removed the rows below offset {kept[queue][0]}, and "
                f"{offset} is the next to read; start at 'first'"
            )


def queue_parts(begin: Mapping[int, int], end: Mapping[int, int], options: ReadOptions) -> list[QueuePart]:
    """Return the pieces of all queues that tasks read."""
    total = sum(max(0, end[queue] - begin.get(queue, 0)) for queue in end)
    rows = piece_rows(total, options)
    return [
        QueuePart(queue, *piece)
        for queue in sorted(end)
        for piece in split_range(begin.get(queue, 0), end[queue], rows)
    ]


def read_queue_part(options: ReadOptions, part: QueuePart, rows: Wanted) -> Iterator[pa.RecordBatch]:
    """Read the rows of one piece that are wanted, in the columns asked for."""
    with Endpoint(options.endpoint) as endpoint:
        topic = options.topic or ""

        def read(begin: int) -> Iterator[pa.RecordBatch]:
            return endpoint.read_queue(topic, part.queue_id, begin, part.to_offset)

        for batch in retrying_read(endpoint, read, part.from_offset, behind_rows):
            kept = rows.keep(batch)
            if kept.num_rows:
                yield shape(kept, options)


class QueueReader(DataSourceReader):
    """A batch read of a topic; without to_offset, of all that stands in its queues when the read is planned."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.rows = Wanted()
        self.queue = self.offset = OPEN

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Narrow queues, offsets and rows; every filter is returned, so Spark applies them as well."""
        self.queue, self.offset = bounds(filters, "queue_id"), bounds(filters, "queue_offset")
        self.rows = wanted(("seq", "due_ms"), None, filters)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """See DataSourceReader."""
        options = self.options
        with Endpoint(options.endpoint) as endpoint:
            kept = kept_offsets(endpoint, options)
        begin = offsets_at("from_offset", options.from_offset, kept)
        end = offsets_at("to_offset", options.to_offset, kept)
        cut = {q: self.offset.clip(begin[q], end[q]) for q in kept if self.queue.may_hold(q, q)}
        return queue_parts(
            {q: low for q, (low, _) in cut.items()}, {q: high for q, (_, high) in cut.items()}, options
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """See DataSourceReader."""
        if isinstance(partition, QueuePart):
            yield from read_queue_part(self.options, partition, self.rows)
