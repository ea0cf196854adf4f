"""A topic as a stream: an offset is an offset in each of its queues, {"0": 100, "1": 250}.

A micro-batch reads at most `max_rows_per_batch` rows, from each queue in proportion to its lag. A queue that the topic
gains while the query runs is read from its first row. A queue that is shorter than the checkpoint says belongs to
another topic of the same name, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from timeball.clock import Clock
from timeball.errors import SetupError
from timeball.pipeline.source.log_stream import BrokerStream, Offset
from timeball.pipeline.source.options import ReadOptions
from timeball.pipeline.source.pushdown import Wanted
from timeball.pipeline.source.queue_reader import (
    Kept,
    QueuePart,
    check_offsets,
    kept_offsets,
    offsets_at,
    queue_parts,
    read_queue_part,
)
from timeball.pipeline.source.spark_api import ReadLimit


class QueueStream(BrokerStream):
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
