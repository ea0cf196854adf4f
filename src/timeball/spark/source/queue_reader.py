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
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from timeball.io.clock import Clock
from timeball.model.errors import NotFound, OutOfRange, SetupError
from timeball.spark.endpoint import Endpoint, behind_rows, read_groups, retrying_read
from timeball.spark.groups import Group
from timeball.spark.source.log_reader import piece_rows, shape
from timeball.spark.source.option_values import Offsets
from timeball.spark.source.options import ReadOptions
from timeball.spark.source.pacing import share, split_range
from timeball.spark.source.pushdown import OPEN, Wanted, bounds, wanted
from timeball.spark.source.spark_api import Filter, ReadLimit
from timeball.spark.source.streams import Offset, PacedStream, check_known

if TYPE_CHECKING:
    from collections.abc import Iterable

Kept = dict[int, tuple[int, int]]  # queue -> (first kept offset, next offset)
Place = tuple[str, int]  # (group, queue)
GROUPS_EVERY_NS = 1_000_000_000  # a stream reads the list of groups at most once in this time


@dataclass
class QueuePart(InputPartition):
    """Rows from_offset <= offset < to_offset of one queue of a group."""

    queue_id: int
    from_offset: int
    to_offset: int
    group: Group | None = None


def kept_in_groups(brokers: Sequence[tuple[Group, Endpoint]], options: ReadOptions) -> dict[str, Kept]:
    """Return {group: kept offsets of the queues to read}, for the groups that have the topic.

    Raises NotFound if no group has it.
    """
    found: dict[str, Kept] = {}
    missing: NotFound | None = None
    for group, broker in brokers:
        try:
            found[group.name] = kept_offsets(broker, options)
        except NotFound as error:
            missing = error
    if missing is not None and not found:
        raise missing
    return found


def kept_offsets(endpoint: Endpoint, options: ReadOptions) -> Kept:
    """Return the kept offsets of the queues to read.

    Raises NotFound, which names the option, for a topic or queue that does not exist.
    """
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
    """Resolve the option `name` to an offset in each queue.

    Raises NotFound for a queue that is not read, and OutOfRange for an offset that the queue does not have.
    """
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
    """Return the position of queues that an option does not list: they are read completely."""
    return "first" if name == "from_offset" else "latest"


def check_offsets(topic: str, begin: Mapping[int, int], kept: Kept) -> None:
    """Raise OutOfRange if retention has removed rows of the micro-batch, because fewer rows would look complete."""
    for queue, offset in begin.items():
        if queue in kept and offset < kept[queue][0]:
            raise OutOfRange(
                f"queue {queue} of {topic!r}: retention has removed the rows below offset {kept[queue][0]}, and "
                f"{offset} is the next to read; start at 'first'"
            )


def check_one_group(options: ReadOptions, groups: int) -> None:
    """Refuse offsets in a read of several groups, because each group has its own queues. Raises SetupError."""
    for name in ("from_offset", "to_offset"):
        if groups > 1 and not isinstance(getattr(options, name), str):
            raise SetupError(
                f"option {name}: each of the {groups} groups has its own queues; name one: group"
            )


def queue_parts(
    begin: Mapping[Place, int], end: Mapping[Place, int], options: ReadOptions, groups: Sequence[Group]
) -> list[QueuePart]:
    """Cut all queues into the pieces that tasks read. A queue that is not in `begin` starts at offset 0."""
    total = sum(max(0, end[place] - begin.get(place, 0)) for place in end)
    rows = piece_rows(total, options)
    return [
        QueuePart(queue, *piece, group)
        for group in groups
        for name, queue in sorted(end)
        if name == group.name
        for piece in split_range(begin.get((name, queue), 0), end[name, queue], rows)
    ]


def read_queue_part(options: ReadOptions, part: QueuePart, rows: Wanted) -> Iterator[pa.RecordBatch]:
    """Read one piece: the requested rows, with the requested columns."""
    with Endpoint(options.endpoint if part.group is None else part.group.endpoint) as endpoint:
        topic = options.topic or ""

        def read(begin: int) -> Iterator[pa.RecordBatch]:
            return endpoint.read_queue(topic, part.queue_id, begin, part.to_offset)

        for batch in retrying_read(endpoint, read, part.from_offset, behind_rows):
            kept = rows.keep(batch)
            if kept.num_rows:
                yield shape(kept, options, part.group)


class QueueReader(DataSourceReader):
    """A batch read of a topic. Without to_offset it ends at the queues' ends when Spark plans the read."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.rows = Wanted()
        self.queue = self.offset = OPEN

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Narrow queues, offsets and rows. Returns every filter, so that Spark applies them again."""
        self.queue, self.offset = bounds(filters, "queue_id"), bounds(filters, "queue_offset")
        self.rows = wanted(("seq", "due_ms"), None, filters)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the read on the driver: resolve the offsets of each queue and cut the queues into pieces."""
        options = self.options
        groups = read_groups(options.endpoint)
        check_one_group(options, len(groups))
        with ExitStack() as opened:
            brokers = [(group, opened.enter_context(Endpoint(group.endpoint))) for group in groups]
            found = kept_in_groups(brokers, options)
        begin: dict[Place, int] = {}
        end: dict[Place, int] = {}
        for name, kept in found.items():
            low = offsets_at("from_offset", options.from_offset, kept)
            high = offsets_at("to_offset", options.to_offset, kept)
            for queue in kept:
                if self.queue.may_hold(queue, queue):
                    begin[name, queue], end[name, queue] = self.offset.clip(low[queue], high[queue])
        return queue_parts(begin, end, options, groups)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one piece, in a task."""
        if isinstance(partition, QueuePart):
            yield from read_queue_part(self.options, partition, self.rows)


# ---- as a stream ----------------------------------------------------------------------------------------------


class QueueStream(PacedStream):
    """A topic as a stream."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        super().__init__(options, clock)
        self._final: dict[Place, int] | None = None
        self._latest: dict[Place, int] | None = None
        self._groups: list[Group] = []
        self._looked_ns = 0

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the start of a new query: from_offset, by default the first rows that retention has kept."""
        groups, found = self._kept()
        check_one_group(self.options, len(groups))
        position = self.options.from_offset
        return to_json(
            flat({name: offsets_at("from_offset", position, kept) for name, kept in found.items()})
        )

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return the end of the next micro-batch, or `start` when there should be none."""
        groups, found = self._kept()
        begin = from_json(start, groups)
        self._check_same(begin, found)
        self._latest = ends_of(found)
        ends = self._latest if self._final is None else self._final
        lag = {place: max(0, end - begin.get(place, 0)) for place, end in ends.items()}
        rows_max, total = self.rows_max(limit), sum(lag.values())
        rows = total if rows_max is None else min(total, rows_max)
        if not rows or (self._final is None and not self.worth(rows)):
            return start
        self.begin_batch()
        taken = share(lag, rows)
        return to_json({place: begin.get(place, 0) + taken.get(place, 0) for place in {*begin, *lag}})

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the query stop at the current ends of the queues."""
        self._final = ends_of(self._kept()[1])

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """Return the ends of the queues at the last check. Spark shows the query's lag from them."""
        return None if self._latest is None else to_json(self._latest)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Cut a micro-batch into pieces. Raises OutOfRange when retention has removed a part of it."""
        groups, found = self._kept()
        begin, stop = from_json(start, groups), from_json(end, groups)
        moved = {place: offset for place, offset in stop.items() if offset > begin.get(place, 0)}
        for group in groups:
            low = {queue: begin.get((name, queue), 0) for name, queue in moved if name == group.name}
            check_offsets(self.options.topic or "", low, found.get(group.name, {}))
        return queue_parts(begin, moved, self.options, groups)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one piece, in a task."""
        if isinstance(partition, QueuePart):
            yield from read_queue_part(self.options, partition, Wanted())

    def _kept(self) -> tuple[list[Group], dict[str, Kept]]:
        """Return the current groups, and the kept offsets of the topic in each group that has it."""
        now_ns = self._clock.monotonic_ns()
        # Reading the groups each time would double the calls. A new group can wait for a second.
        if not self._groups or now_ns - self._looked_ns >= GROUPS_EVERY_NS:
            self._groups, self._looked_ns = self.groups(), now_ns
        groups = self._groups
        return groups, kept_in_groups(
            [(group, self.broker(group.endpoint)) for group in groups], self.options
        )

    def _check_same(self, begin: Mapping[Place, int], found: Mapping[str, Kept]) -> None:
        for (name, queue), offset in begin.items():
            end = found.get(name, {}).get(queue, (0, 0))[1]
            if offset > end:
                raise SetupError(
                    f"the checkpoint stands at offset {offset} of queue {queue} but {self.options.topic!r} ends there "
                    f"at {end}: it belongs to another topic; remove the checkpoint folder of this query"
                )


def flat(offsets: Mapping[str, Mapping[int, int]]) -> dict[Place, int]:
    """Flatten {group: {queue: offset}} to {(group, queue): offset}."""
    return {(name, queue): offset for name, queues in offsets.items() for queue, offset in queues.items()}


def ends_of(found: Mapping[str, Kept]) -> dict[Place, int]:
    """Return the end of each queue."""
    return flat({name: {queue: end for queue, (_, end) in kept.items()} for name, kept in found.items()})


def to_json(offsets: Mapping[Place, int]) -> Offset:
    """Encode an offset, with groups and queues in order, so that equal offsets have equal texts."""
    found: dict[str, dict[str, int]] = {}
    for name, queue in sorted(offsets):
        found.setdefault(name, {})[str(queue)] = offsets[name, queue]
    return found.get("", {}) if set(found) <= {""} else found


def from_json(offset: Offset, groups: Sequence[Group]) -> dict[Place, int]:
    """Decode an offset to offsets by group and queue.

    An offset from before the broker joined a cluster is that of the named node's group, which is first in `groups`.
    Raises SetupError if the offset has a group that no longer exists.
    """
    if all(isinstance(value, int) for value in offset.values()):
        offset = {groups[0].name: offset}
    check_known(offset, [group.name for group in groups])
    return {
        (name, int(queue)): int(value) for name, queues in offset.items() for queue, value in queues.items()
    }
