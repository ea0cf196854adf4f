"""Read a topic, at once or as a stream: the rows of its queues, by offset, as consumers see them.

A partition is a range of offsets of one queue. Rows keep their queue's order within a partition; there is no order
between queues, as in every consumer group. Reading moves no group's offsets and takes no message from a consumer.

An offset of the stream is an offset in each of its queues, {"0": 100, "1": 250}. A micro-batch reads at most
`max_rows_per_batch` rows, from each queue in proportion to its lag. A queue that the topic gains while the query runs
is read from its first row. A queue that is shorter than the checkpoint says belongs to another topic of the same name,
and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from timeball.errors import NotFound, OutOfRange
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.source.log_reader import behind_rows, piece_rows, retrying_read, shape, split_range
from timeball.pipeline.source.option_values import Offsets
from timeball.pipeline.source.options import ReadOptions
from timeball.pipeline.source.pushdown import OPEN, Wanted, bounds, wanted
from timeball.pipeline.source.spark_api import Filter

if TYPE_CHECKING:
    from collections.abc import Iterable


from timeball.clock import Clock
from timeball.errors import SetupError
from timeball.pipeline.source.log_reader import Offset, PacedStream
from timeball.pipeline.source.spark_api import ReadLimit

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


# ---- as a stream ----------------------------------------------------------------------------------------------


class QueueStream(PacedStream):
    """A topic as a stream."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        super().__init__(options, clock)
        self._final: dict[int, int] | None = None
        self._latest: dict[int, int] | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return where a new query starts: from_offset, by default the first rows that are kept."""
        return to_json(offsets_at("from_offset", self.options.from_offset, self._kept()))

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return the end of the next micro-batch; `start` itself when it should not take place."""
        begin, kept = from_json(start), self._kept()
        self._check_same(begin, kept)
        self._latest = {queue: end for queue, (_, end) in kept.items()}
        ends = self._latest if self._final is None else self._final
        lag = {queue: max(0, end - begin.get(queue, 0)) for queue, end in ends.items()}
        rows_max, total = self.rows_max(limit), sum(lag.values())
        rows = total if rows_max is None else min(total, rows_max)
        if not rows or (self._final is None and not self.worth(rows)):
            return start
        self.begin_batch()
        taken = share(lag, rows)
        return to_json({queue: begin.get(queue, 0) + taken.get(queue, 0) for queue in {*begin, *lag}})

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Stop at what stands in the queues now."""
        self._final = {queue: end for queue, (_, end) in self._kept().items()}

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """End of the queues when last asked: how far the query lags."""
        return None if self._latest is None else to_json(self._latest)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """See DataSourceStreamReader."""
        begin, stop = from_json(start), from_json(end)
        moved = {queue: offset for queue, offset in stop.items() if offset > begin.get(queue, 0)}
        check_offsets(self.options.topic or "", {q: begin.get(q, 0) for q in moved}, self._kept())
        return queue_parts(begin, moved, self.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """See DataSourceStreamReader."""
        if isinstance(partition, QueuePart):
            yield from read_queue_part(self.options, partition, Wanted())

    def _kept(self) -> Kept:
        return kept_offsets(self.broker(), self.options)

    def _check_same(self, begin: Mapping[int, int], kept: Kept) -> None:
        for queue, offset in begin.items():
            end = kept[queue][1] if queue in kept else 0
            if offset > end:
                raise SetupError(
                    f"the checkpoint stands at offset {offset} of queue {queue} but {self.options.topic!r} ends there "
                    f"at {end}: it belongs to another topic; remove the checkpoint folder of this query"
                )


def share(lag: Mapping[int, int], rows: int) -> dict[int, int]:
    """Share `rows` rows out among the queues, in proportion to their lag; all that are there when these are fewer."""
    total = sum(lag.values())
    if total <= rows:
        return dict(lag)
    taken, given, seen = {}, 0, 0
    for queue in sorted(lag):
        seen += lag[queue]
        taken[queue] = rows * seen // total - given
        given += taken[queue]
    return taken


def to_json(offsets: Mapping[int, int]) -> Offset:
    """Encode in the order of the queues, so that equal offsets are equal texts."""
    return {str(queue): offsets[queue] for queue in sorted(offsets)}


def from_json(offset: Offset) -> dict[int, int]:
    """Decode what `to_json` encoded."""
    return {int(queue): int(value) for queue, value in offset.items()}
