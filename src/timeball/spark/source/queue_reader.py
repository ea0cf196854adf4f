"""Read a topic as a batch or as a stream: the rows of its queues, by offset, as consumers see them.

A partition is a range of offsets of one queue. Within a partition, rows keep their queue's order. Between queues there
is no order, as in every consumer group. A read changes no consumer group's offsets and takes no message from a
consumer.

The stream's offset has an offset for each queue: {"0": 100, "1": 250}. In a cluster it has the queues of each group:
{"g1": {"0": 100}, "g2": {"0": 7}}. There, the first form counts for the group of the named node.

A micro-batch reads at most `max_rows_per_batch` rows, from each queue in proportion to its lag. A queue that the topic
gains while the query runs is read from its first row. If a queue ends before its offset in the checkpoint, it belongs
to another topic of the same name, and the read is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from timeball.io.clock import Clock
from timeball.model.errors import NotFound, OutOfRange, SetupError
from timeball.spark.endpoint import Endpoint, Group, after_rows, read_groups, retrying_read
from timeball.spark.source.log_reader import apply_options, piece_rows
from timeball.spark.source.options import Offsets, ReadOptions, divide_rows, split_range
from timeball.spark.source.spark_api import Offset, PacedStream, check_groups_exist

KeptOffsets = dict[int, tuple[int, int]]  # queue -> (first kept offset, next offset)
GroupQueue = tuple[str, int]  # (group, queue)
GROUPS_EVERY_NS = 1_000_000_000  # a stream reads the list of groups at most once in this time


@dataclass
class QueuePart(InputPartition):
    """Rows from_offset <= offset < to_offset of one queue of a group."""

    queue_id: int
    from_offset: int
    to_offset: int
    group: Group | None = None


def kept_offsets_by_group(
    brokers: Sequence[tuple[Group, Endpoint]], options: ReadOptions
) -> dict[str, KeptOffsets]:
    """Read {group: kept offsets of the queues to read}, for the groups that have the topic.

    Raises NotFound if no group has it.
    """
    offsets_by_group: dict[str, KeptOffsets] = {}
    missing: NotFound | None = None
    for group, broker in brokers:
        try:
            offsets_by_group[group.name] = kept_offsets(broker, options)
        except NotFound as error:
            missing = error
    if missing is not None and not offsets_by_group:
        raise missing
    return offsets_by_group


def kept_offsets(endpoint: Endpoint, options: ReadOptions) -> KeptOffsets:
    """Read the kept offsets of the queues to read.

    Raises NotFound, which names the option, for a topic or queue that does not exist.
    """
    topic = options.topic or ""
    try:
        offsets_by_queue = endpoint.queues(topic)
    except NotFound as error:
        raise NotFound(
            f"option topic={topic!r}: {error}; a topic begins with create_topic or its first message"
        ) from error
    if options.queue_id is None:
        return offsets_by_queue
    if options.queue_id not in offsets_by_queue:
        raise NotFound(
            f"option queue_id={options.queue_id}: the topic {topic!r} has the queues 0 to {len(offsets_by_queue) - 1}"
        )
    return {options.queue_id: offsets_by_queue[options.queue_id]}


def offsets_at(name: str, position: int | str | Offsets, kept: KeptOffsets) -> Offsets:
    """Resolve an option to an offset in each queue.

    `name`: from_offset or to_offset. `position`: its value: a name, an offset, or an offset for some queues. `kept`:
    the queues to read. Raises NotFound for a queue that is not read, and OutOfRange for an offset that the queue does
    not have.
    """
    if isinstance(position, dict):
        for queue in position:
            if queue not in kept:
                raise NotFound(
                    f"option {name}: there is no queue {queue} among those to read: {sorted(kept)}"
                )
    resolved: Offsets = {}
    for queue, (first, end) in kept.items():
        offset = position.get(queue, default_position(name)) if isinstance(position, dict) else position
        if isinstance(offset, str):
            offset = {"first": first, "latest": end}[offset]
        if not first <= offset <= end:
            raise OutOfRange(
                f"option {name}: offset {offset} of queue {queue}, which keeps {first} to {end}; "
                "an offset can be given for each queue: 0=100,1=250"
            )
        resolved[queue] = offset
    return resolved


def default_position(name: str) -> str:
    """Choose the position of queues that the option `name` does not list, so that they are read completely."""
    return "first" if name == "from_offset" else "latest"


def check_offsets(topic: str, begin: Mapping[int, int], kept: KeptOffsets) -> None:
    """Raise OutOfRange if retention has removed rows of the micro-batch. Fewer rows would look complete.

    `begin`: queue -> first offset of the micro-batch.
    """
    for queue, offset in begin.items():
        if queue in kept and offset < kept[queue][0]:
            raise OutOfRange(
                f"queue {queue} of {topic!r}: retention has removed the rows below offset {kept[queue][0]}, and "
                f"{offset} is the next to read; start at 'first'"
            )


def check_one_group(options: ReadOptions, groups: int) -> None:
    """Raise SetupError for offsets in a read of several groups, because each group has its own queues.

    `groups`: the number of groups.
    """
    for name in ("from_offset", "to_offset"):
        if groups > 1 and not isinstance(getattr(options, name), str):
            raise SetupError(
                f"option {name}: each of the {groups} groups has its own queues; name one: group"
            )


def queue_parts(
    begin: Mapping[GroupQueue, int],
    end: Mapping[GroupQueue, int],
    options: ReadOptions,
    groups: Sequence[Group],
) -> list[QueuePart]:
    """Cut the offsets begin <= offset < end of each queue into the pieces that tasks read.

    A queue that is not in `begin` starts at offset 0.
    """
    total = sum(max(0, end[group_queue] - begin.get(group_queue, 0)) for group_queue in end)
    rows = piece_rows(total, options)
    return [
        QueuePart(queue, *piece, group)
        for group in groups
        for name, queue in sorted(end)
        if name == group.name
        for piece in split_range(begin.get((name, queue), 0), end[name, queue], rows)
    ]


def read_queue_part(options: ReadOptions, part: QueuePart) -> Iterator[pa.RecordBatch]:
    """Read one piece, in a task: the requested rows, with the requested columns."""
    with Endpoint(options.endpoint if part.group is None else part.group.endpoint) as endpoint:
        topic = options.topic or ""

        def read(begin: int) -> Iterator[pa.RecordBatch]:
            return endpoint.read_queue(topic, part.queue_id, begin, part.to_offset)

        for batch in retrying_read(endpoint, read, part.from_offset, after_rows):
            if batch.num_rows:
                yield apply_options(batch, options, part.group)


class QueueReader(DataSourceReader):
    """A batch read of a topic. Without to_offset it ends at the queues' ends when Spark plans the read."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the read on the driver: resolve the offsets of each queue and cut the queues into pieces."""
        options = self.options
        groups = read_groups(options.endpoint)
        check_one_group(options, len(groups))
        with ExitStack() as connections:
            brokers = [(group, connections.enter_context(Endpoint(group.endpoint))) for group in groups]
            kept_by_group = kept_offsets_by_group(brokers, options)
        begin: dict[GroupQueue, int] = {}
        end: dict[GroupQueue, int] = {}
        for name, kept in kept_by_group.items():
            low = offsets_at("from_offset", options.from_offset, kept)
            high = offsets_at("to_offset", options.to_offset, kept)
            for queue in kept:
                begin[name, queue], end[name, queue] = low[queue], high[queue]
        return queue_parts(begin, end, options, groups)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one piece, in a task."""
        if isinstance(partition, QueuePart):
            yield from read_queue_part(self.options, partition)


# ---- as a stream ----------------------------------------------------------------------------------------------


class QueueStream(PacedStream):
    """A topic as a stream."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        super().__init__(options, clock)
        self._final_offsets: dict[GroupQueue, int] | None = None
        self._latest_offsets: dict[GroupQueue, int] | None = None
        self._groups: list[Group] = []
        self._groups_read_ns = 0

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Choose the start of a new query: from_offset, by default the first rows that retention has kept."""
        groups, kept_by_group = self._read_kept_offsets()
        check_one_group(self.options, len(groups))
        position = self.options.from_offset
        return encode_offsets(
            flatten_offsets(
                {name: offsets_at("from_offset", position, kept) for name, kept in kept_by_group.items()}
            )
        )

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Choose the end of the next micro-batch.

        Returns `start` if there are too few rows: Spark then starts no micro-batch. Raises SetupError if `start` is
        after the end of a queue.
        """
        groups, kept_by_group = self._read_kept_offsets()
        begin = decode_offsets(start, groups)
        self._check_within_queues(begin, kept_by_group)
        self._latest_offsets = ends_of(kept_by_group)
        ends = self._latest_offsets if self._final_offsets is None else self._final_offsets
        lags = {group_queue: max(0, end - begin.get(group_queue, 0)) for group_queue, end in ends.items()}
        rows_max, total = self.rows_max(limit), sum(lags.values())
        rows = total if rows_max is None else min(total, rows_max)
        if not rows or (self._final_offsets is None and not self.is_worth_a_batch(rows)):
            return start
        self.begin_batch()
        shares = divide_rows(lags, rows)
        return encode_offsets(
            {
                group_queue: begin.get(group_queue, 0) + shares.get(group_queue, 0)
                for group_queue in {*begin, *lags}
            }
        )

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the query stop at the current ends of the queues."""
        self._final_offsets = ends_of(self._read_kept_offsets()[1])

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """Report the ends of the queues at the last check. Spark computes the query's lag from them."""
        return None if self._latest_offsets is None else encode_offsets(self._latest_offsets)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Cut a micro-batch into pieces for tasks. Raises OutOfRange when retention has removed some of its rows."""
        groups, kept_by_group = self._read_kept_offsets()
        begin, stop = decode_offsets(start, groups), decode_offsets(end, groups)
        ends = {
            group_queue: offset for group_queue, offset in stop.items() if offset > begin.get(group_queue, 0)
        }
        for group in groups:
            low = {queue: begin.get((name, queue), 0) for name, queue in ends if name == group.name}
            check_offsets(self.options.topic or "", low, kept_by_group.get(group.name, {}))
        return queue_parts(begin, ends, self.options, groups)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one piece, in a task."""
        if isinstance(partition, QueuePart):
            yield from read_queue_part(self.options, partition)

    def _read_kept_offsets(self) -> tuple[list[Group], dict[str, KeptOffsets]]:
        """Read the current groups, and the kept offsets of the topic in each group that has it."""
        now_ns = self._clock.monotonic_ns()
        # Reading the groups every time would double the number of calls. A new group can wait for a second.
        if not self._groups or now_ns - self._groups_read_ns >= GROUPS_EVERY_NS:
            self._groups, self._groups_read_ns = self.groups(), now_ns
        groups = self._groups
        return groups, kept_offsets_by_group(
            [(group, self.broker(group.endpoint)) for group in groups], self.options
        )

    def _check_within_queues(
        self, begin: Mapping[GroupQueue, int], kept_by_group: Mapping[str, KeptOffsets]
    ) -> None:
        """Raise SetupError for an offset beyond the end of its queue: the checkpoint then belongs to another topic."""
        for (name, queue), offset in begin.items():
            end = kept_by_group.get(name, {}).get(queue, (0, 0))[1]
            if offset > end:
                raise SetupError(
                    f"the checkpoint stands at offset {offset} of queue {queue} but {self.options.topic!r} ends there "
                    f"at {end}: it belongs to another topic; remove the checkpoint folder of this query"
                )


def flatten_offsets(offsets: Mapping[str, Mapping[int, int]]) -> dict[GroupQueue, int]:
    """Flatten {group: {queue: offset}} to {(group, queue): offset}."""
    return {(name, queue): offset for name, queues in offsets.items() for queue, offset in queues.items()}


def ends_of(kept_by_group: Mapping[str, KeptOffsets]) -> dict[GroupQueue, int]:
    """Get the end of each queue."""
    return flatten_offsets(
        {name: {queue: end for queue, (_, end) in kept.items()} for name, kept in kept_by_group.items()}
    )


def encode_offsets(offsets: Mapping[GroupQueue, int]) -> Offset:
    """Encode offsets as an offset of the stream, in order, so that equal offsets have equal texts."""
    by_group: dict[str, dict[str, int]] = {}
    for name, queue in sorted(offsets):
        by_group.setdefault(name, {})[str(queue)] = offsets[name, queue]
    return by_group.get("", {}) if set(by_group) <= {""} else by_group


def decode_offsets(offset: Offset, groups: Sequence[Group]) -> dict[GroupQueue, int]:
    """Decode an offset of the stream to offsets by group and queue.

    If the broker was in no cluster when the offset was stored, it counts for the group of the named node, which is
    first in `groups`. Raises SetupError if the offset has a group that no longer exists.
    """
    if all(isinstance(value, int) for value in offset.values()):
        offset = {groups[0].name: offset}
    check_groups_exist(offset, [group.name for group in groups])
    return {
        (name, int(queue)): int(value) for name, queues in offset.items() for queue, value in queues.items()
    }
