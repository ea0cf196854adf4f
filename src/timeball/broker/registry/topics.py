"""All topics and their queues, the offset that the next message of each queue gets, and the entries of the queue index.

A row gets its offset when it is appended, and its index entry when it is durable. Both happen in log order on the event
loop. So offsets have no gaps, and no index entry names a row that may disappear in a crash.

The topic's filter type determines the `tag` of an entry (broker/filters/tags.py). It can change only while the topic is
empty, because one queue cannot contain both kinds of entries.

A topic needs no file and no descriptor: the entries of all queues share their files (log/queue_index.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args, overload

import msgspec
import numpy as np
import pyarrow as pa

from timeball.broker.filters.tags import tag_hash, tag_mask
from timeball.broker.registry.meta import MetaLog
from timeball.broker.registry.rates import Rates, Stat, of_dead_letter
from timeball.io.files import Files
from timeball.log.format import ENTRY
from timeball.log.queue_index import Lengths, Part, QueueIndex, QueueIndexes
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.errors import Corrupt, InvalidName, NotFound, OutOfRange, OverLimit, RequestError
from timeball.model.message import (
    DLQ_PREFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    Int64Array,
    Kind,
    alike,
    codes_of,
    filled,
    stored_sizes,
)
from timeball.model.send_options import EXPIRED_PREFIX, ON_PENDING_VALUES

logger = logging.getLogger(__name__)


READ, WRITE, INHERIT = 4, 2, 1  # the bits of RocketMQ's PermName

# RocketMQ's TopicAttributes, with the values that have a meaning here, and those of Timeball.
MESSAGE_TYPE, ON_PENDING, MAX_PER_SECOND = "message.type", "timeball.on.pending", "timeball.max.per.second"
PRIORITY_TYPE = "PRIORITY"
ATTRIBUTES: dict[str, frozenset[str]] = {
    MESSAGE_TYPE: frozenset({"UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED"}),
    "queue.type": frozenset({"SimpleCQ"}),
    "cleanup.policy": frozenset({"DELETE"}),
    ON_PENDING: frozenset(ON_PENDING_VALUES),  # of sends with a unique key
    MAX_PER_SECOND: frozenset({f"1 to {limits.TOPIC_RATE_MAX}"}),  # a number, see `parse_rate`
}


class TopicConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The configuration that an operator chose. None as a number of queues means all queues of the topic."""

    read_queues: int | None = None
    write_queues: int | None = None
    perm: int = READ | WRITE
    order: bool = False
    sys_flag: int = 0
    attributes: dict[str, str] = {}


def parse_rate(text: str | None) -> int | None:
    """Parse a value of MAX_PER_SECOND. None for None, and for a text that is not allowed."""
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 6:
        return None
    return int(text) if 1 <= int(text) <= limits.TOPIC_RATE_MAX else None


def check_config(config: TopicConfig) -> None:
    """Raise OutOfRange or RequestError if a topic cannot have this configuration."""
    for name, queues in (("readQueueNums", config.read_queues), ("writeQueueNums", config.write_queues)):
        if queues is not None and not 0 <= queues <= limits.QUEUES_PER_TOPIC_MAX:
            raise OutOfRange(f"{name} {queues}: between 0 and {limits.QUEUES_PER_TOPIC_MAX}")
    # One of the numbers may be 0. With both at 0, the topic would have no queue at all.
    if max(config.read_queues or 0, config.write_queues or 0) == 0 and config.read_queues is not None:
        raise OutOfRange("readQueueNums and writeQueueNums are 0: one of them at least is 1")
    if not 0 <= config.perm <= READ | WRITE | INHERIT:
        raise RequestError(f"perm {config.perm}: 2 is write, 4 is read, 6 is both")
    if not 0 <= config.sys_flag <= 3:
        raise RequestError(f"topicSysFlag {config.sys_flag}: between 0 and 3")


def raise_queues(config: TopicConfig, queues: int) -> TopicConfig:
    """Build the configuration with at least `queues` read and write queues. None (all queues) stays None."""
    return msgspec.structs.replace(
        config,
        read_queues=None if config.read_queues is None else max(queues, config.read_queues),
        write_queues=None if config.write_queues is None else max(queues, config.write_queues),
    )


def apply_attribute_changes(current: dict[str, str], changes: str) -> dict[str, str]:
    """Apply changes such as "+message.type=DELAY,-queue.type" to a copy. Raises RequestError for an invalid change."""
    # A copy: a later change in the same text may be refused, and then the topic must not change.
    result = dict(current)
    for change in filter(None, (part.strip() for part in changes.split(","))):
        sign, (name, equals, value) = change[0], change[1:].partition("=")
        allowed = ATTRIBUTES.get(name)
        if sign not in "+-" or (sign == "+") != bool(equals):
            raise RequestError(f"attribute {change[:80]!r}: +name=value sets one, -name takes it away")
        if allowed is None:
            raise RequestError(f"unsupported attribute {name[:80]!r}: there are {', '.join(ATTRIBUTES)}")
        if sign == "-":
            result.pop(name, None)
        elif parse_rate(value) if name == MAX_PER_SECOND else value in allowed:
            result[name] = value
        else:
            raise RequestError(f"attribute {name}={value[:80]!r}: it is one of {', '.join(sorted(allowed))}")
    return result


FilterType = Literal["SINGLE_TAG", "MULTI_TAG"]  # RocketMQ's topicFilterType


class TopicFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of a topic's META row."""

    queues: int
    filter_type: FilterType = "SINGLE_TAG"
    config: TopicConfig = TopicConfig()
    deleted: bool = False
    # Rows with lower sequence numbers were deleted with the topic.
    emptied_before_seq: int = 0
    made_by: str = ""  # the account that first named the topic; "" while access is not controlled


@dataclass(slots=True)
class Queue:
    """One queue: its index, and the offset of the next message that is appended."""

    index: QueueIndex
    # Larger than the index while rows are not durable yet.
    next_offset: int


class Queues(Sequence[Queue]):
    """The queues of a topic, created at their first use."""

    __slots__ = ("_count", "_created", "_indexes", "_topic")

    def __init__(self, indexes: QueueIndexes, topic: str, count: int) -> None:
        self._indexes, self._topic, self._count = indexes, topic, count
        self._created: dict[int, Queue] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Queue: ...
    @overload
    def __getitem__(self, index: slice) -> list[Queue]: ...
    def __getitem__(self, index: int | slice) -> Queue | list[Queue]:
        if isinstance(index, slice):
            return [self[queue_id] for queue_id in range(self._count)[index]]
        # Created at the first use: a topic with a thousand queues, three of them in use, costs three.
        queue = self._created.get(index)
        if queue is None:
            if not 0 <= index < self._count:
                raise IndexError(f"queue {index} of {self._count}")
            queue_index = self._indexes.queue(self._topic, index)
            queue = self._created[index] = Queue(queue_index, queue_index.end_offset)
        return queue

    def widen(self, count: int) -> None:
        """Increase the number of queues to at least `count`."""
        # Never fewer, because a hidden queue may still contain messages.
        self._count = max(self._count, count)


class Topic:
    """One topic. `turn` is the next queue (round robin) for messages without a queue.

    A deleted topic is kept for its offsets. If a new topic of this name began at offset 0 again, a checkpoint or a
    consumer could mistake its messages for the old ones. Rows before `emptied_before_seq` were deleted with the topic.
    """

    __slots__ = (
        "config", "deleted", "emptied_before_seq", "filter_type", "made_by", "name", "queues", "read_queues", "turn",
        "write_queues",
    )  # fmt: skip

    def __init__(self, name: str, queues: Queues, facts: TopicFacts) -> None:
        self.name, self.queues, self.turn = name, queues, 0
        self.restore(facts)

    def restore(self, facts: TopicFacts) -> None:
        """Set the state to `facts`. The number of queues never shrinks."""
        self.configure(facts.config, facts.queues)
        self.filter_type: FilterType = facts.filter_type
        self.deleted, self.made_by = facts.deleted, facts.made_by
        self.emptied_before_seq = facts.emptied_before_seq

    def configure(self, config: TopicConfig, queues: int = 0) -> None:
        """Set the configuration that an operator chose, with at least `queues` queues."""
        self.queues.widen(queues)
        self.config, count = config, len(self.queues)
        # Only this number of queues, the first ones, is visible to consumers and producers.
        self.read_queues = count if config.read_queues is None else config.read_queues
        self.write_queues = count if config.write_queues is None else config.write_queues

    def facts(self) -> TopicFacts:
        """Build the stored form of the topic."""
        return TopicFacts(
            len(self.queues),
            self.filter_type,
            self.config,
            self.deleted,
            self.emptied_before_seq,
            self.made_by,
        )

    @property
    def perm(self) -> int:
        """RocketMQ's permission bits: read 4, write 2."""
        return self.config.perm

    @property
    def max_per_second(self) -> int | None:
        """The limit of messages that become visible in a second. None without a limit."""
        return None if self.deleted else parse_rate(self.config.attributes.get(MAX_PER_SECOND))


__all__ = ["FilterType", "Placement", "Queue", "Topic", "Topics", "check_name", "check_topic"]


@dataclass(slots=True)
class Placement:
    """The queues and offsets of the visible rows of one append. `index` adds them to the queue indexes later."""

    # One element for each row:
    queue_id: Int64Array
    queue_offset: Int64Array
    groups: list[tuple[Topic, int, Int64Array]]  # topic, queue, and the indexes of its rows (ascending)
    # One element for each row:
    sizes: Int64Array  # bytes as RocketMQ stores each message, because its clients limit responses by these
    tags: Int64Array  # the tag fields of the index entries, by each topic's filter type
    dead: list[str]  # for each dead letter the key of its counter

    def index(self, first_seq: int, row_seqs: Int64Array | None = None) -> None:
        """Add the rows to the queue indexes.

        `row_seqs`: the rows' sequence numbers. None: they are consecutive from `first_seq`.
        """
        for topic, queue_id, rows in self.groups:
            seqs = first_seq + rows if row_seqs is None else row_seqs[rows]
            topic.queues[queue_id].index.append(seqs, self.sizes[rows], self.tags[rows])

    def count(self, rates: Rates, *, released: bool = False) -> list[tuple[str, int]]:
        """Count the rows and bytes in the statistics of their topics.

        `released`: also as released scheduled messages. Returns the queues that got rows, as (topic, queue id).
        """
        for topic, _, rows in self.groups:
            rates.count_arrived(topic.name, len(rows), int(self.sizes[rows].sum()))
            if released:
                rates.add(Stat.RELEASED_NUMS, topic.name, len(rows))
        rates.add_each(Stat.DEAD_NUMS, self.dead)
        return [(topic.name, queue_id) for topic, queue_id, _ in self.groups]


class Topics:
    """All topics. Belongs to the event loop."""

    def __init__(self, files: Files, meta: MetaLog, *, queues_per_topic: int) -> None:
        self._files, self._meta = files, meta
        self._queues_per_topic = queues_per_topic
        # Includes deleted topics: their offsets must continue, and they count for the maximum number.
        self._topics: dict[str, Topic] = {}
        self.indexes = QueueIndexes(files)  # of all topics, in one set of files (decision 0026)
        self.made_by: dict[str, int] = {}  # account -> number of topics it has created, deleted ones included
        self.version = 0  # counts changes since the start, so that tools can see whether anything is new
        self.on_change: Callable[[Topic], None] = lambda topic: None  # after the row of the change
        # Before the index is loaded, no queue may be opened, because its entries are missing.
        self._is_index_loaded = False
        meta.register("topic", self)

    def restore(self, name: str, value: bytes) -> None:
        """Recovery: apply a topic's value from the log."""
        facts = msgspec.json.decode(value, type=TopicFacts)
        topic = self._topics.get(name)
        if topic is None:
            topic = self._add_topic(name, facts)
        else:
            topic.restore(facts)
        # Before `load`, queues must not be opened. `_fill` does this later.
        if self._is_index_loaded:
            _hide_deleted(topic)

    def load(self, reader: LogReader, lengths: Lengths, next_seq: int) -> None:
        """Recovery: fill the queues of the topics restored so far with the rows below `next_seq`.

        The entries come from the index files, and after their end from the log. `lengths` contains the (min_offset,
        max_offset) of each queue that the checkpoint guarantees. If the files contradict it, they are discarded and all
        entries are built from the log. Raises Corrupt if the log also lacks rows of these queues.
        """
        # Set before the load, because its first read may find a damaged file.
        self.indexes.rebuild = lambda begin, end: rebuild_entries(reader, begin, end, self._is_multi_tag)
        try:
            covered_seq = self.indexes.load(reader.first_seq, next_seq)
            check_index_ends(reader, list(self.indexes.used()))
            self._fill(reader, covered_seq, lengths, next_seq)
        except Corrupt as error:
            logger.warning("all queue indexes rebuilt from the log reason=%s", error)
            # Discard all entries, because it is unknown which are right.
            self.indexes.clear(reader.first_seq)
            self._fill(reader, reader.first_seq, lengths, next_seq)

    def _fill(self, reader: LogReader, begin_seq: int, lengths: Lengths, end_seq: int) -> None:
        """Index the rows [begin_seq, end_seq) of the log, and compare the queues with `lengths`. Raises Corrupt."""
        for index in self.indexes.used():
            self._find_used_queue(index.topic, index.queue_id)
        for rows in reader.coalesced(begin_seq, end_seq, None, BATCH_ROWS, placed=True):
            self.replay(rows.drop_columns(["seq"]), rows.column("seq").to_numpy())
        for name, queues in lengths.items():
            for queue_id, (min_offset, max_offset) in queues.items():
                queue = self._find_used_queue(name, queue_id)
                index = queue.index
                if index.min_offset == index.end_offset < max_offset:
                    index.start_at(max_offset)  # retention has removed all rows of the queue
                # The checkpoint guarantees these entries. If some are missing, files and log do not belong together.
                if index.end_offset != max_offset:
                    actual = f"queue {queue_id} of {name!r} ends at offset {index.end_offset}"
                    raise Corrupt(f"{actual}, but the checkpoint knows of {max_offset}")
                index.min_offset = max(index.min_offset, min_offset)
                # Also for a queue whose rows were all removed, so that no offset is used twice.
                queue.next_offset = max_offset
        for topic in self._topics.values():
            _hide_deleted(topic)
        self._is_index_loaded = True

    def _find_used_queue(self, name: str, queue_id: int) -> Queue:
        """Find a queue that has index entries, and set its next offset. Raises Corrupt if the log lacks its topic."""
        topic = self._find_existing(name)
        # The topic has at least this queue, because the queue has entries.
        topic.configure(topic.config, queue_id + 1)
        topic.queues[queue_id].next_offset = topic.queues[queue_id].index.end_offset
        return topic.queues[queue_id]

    def _find_existing(self, name: str) -> Topic:
        """Find a topic, also a deleted one, whose rows are in the log. Raises Corrupt if no row creates the topic."""
        topic = self._topics.get(name)
        if topic is None:
            raise Corrupt(
                f"no row of the log creates topic {name!r}, which has messages: restore it from a copy"
            )
        return topic

    def _is_multi_tag(self, name: str) -> bool:
        topic = self._topics.get(name)
        return topic is not None and topic.filter_type == "MULTI_TAG"

    def get(self, name: str) -> Topic:
        """Find a topic. Raises NotFound if it does not exist or was deleted."""
        topic = self.find_topic(name)
        if topic is None:
            raise NotFound(f"topic {name[: limits.OWN_TOPIC_BYTES_MAX]!r} does not exist")
        return topic

    def find_topic(self, name: str) -> Topic | None:
        """Find a topic, or None if it does not exist or was deleted."""
        topic = self._topics.get(name)
        return None if topic is None or topic.deleted else topic

    def all(self) -> list[Topic]:
        """List all topics that are not deleted."""
        return [topic for topic in self._topics.values() if not topic.deleted]

    def configure(
        self,
        name: str,
        config: TopicConfig,
        *,
        filter_type: FilterType | None = None,
        made_by: str = "",
    ) -> Topic:
        """Create a topic or change its configuration. `filter_type` and `made_by`: as for `ensure`.

        Raises OutOfRange for an invalid number of queues, and the errors of `ensure`. An error changes nothing.
        """
        check_config(config)
        # The topic needs the larger number of queues, even if readers or writers see fewer.
        queues = max(config.read_queues or 0, config.write_queues or 0)
        topic = self.ensure(name, queues or self._queues_per_topic, filter_type=filter_type, made_by=made_by)
        if topic.config != config:
            topic.configure(config)
            self._append_state(topic)
        return topic

    def set_attribute(self, topic: Topic, name: str, value: str | None) -> None:
        """Set one of ATTRIBUTES of a topic. None removes it."""
        # Not `configure`, which would give the topic the default number of queues.
        attributes = {key: text for key, text in topic.config.attributes.items() if key != name}
        if value is not None:
            attributes[name] = value
        if attributes != topic.config.attributes:
            topic.configure(msgspec.structs.replace(topic.config, attributes=attributes))
            self._append_state(topic)

    def delete(self, name: str, next_seq: int) -> bool:
        """Mark a topic as deleted and hide its messages, the rows before `next_seq`.

        False if there is no such topic.
        """
        topic = self.find_topic(name)
        if topic is None:
            return False
        topic.deleted, topic.emptied_before_seq = True, next_seq
        _hide_deleted(topic)
        self._append_state(topic)
        return True

    def ensure(
        self,
        name: str,
        queues: int | None = None,
        *,
        filter_type: FilterType | None = None,
        made_by: str = "",
    ) -> Topic:
        """Find a topic. Create it if needed, and give it at least `queues` queues.

        The caller checks the permission (policy.py). `queues` None: the default number for a new topic. `made_by`: the
        account for which a new topic is created, "" for the broker itself. `filter_type` None: unchanged, or SINGLE_TAG
        for a new topic. Raises RequestError for an invalid type, or another one than that of a topic with messages.
        Raises InvalidName, OverLimit.
        """
        if filter_type is not None and filter_type not in get_args(FilterType):
            raise RequestError(f"filter type {filter_type[:80]!r}: it is {' or '.join(get_args(FilterType))}")
        topic = self._topics.get(name)
        if topic is None or topic.deleted:
            check_topic(name)
        if topic is None:
            # Deleted topics count, because they are kept for their offsets.
            if len(self._topics) >= limits.TOPICS_MAX:
                raise OverLimit(
                    f"{limits.TOPICS_MAX} topics exist or have existed; start with another folder"
                )
            new_type = filter_type or "SINGLE_TAG"
            facts = TopicFacts(queues or self._queues_per_topic, new_type, made_by=made_by)
            topic = self._add_topic(name, facts)
            self._append_state(topic)
            return topic
        if topic.deleted:
            self._revive(topic, queues or self._queues_per_topic)
        if filter_type not in (None, topic.filter_type):
            # Index entries contain a hash or a mask by the type, and one must not be read as the other.
            if any(queue.next_offset > queue.index.min_offset for queue in topic.queues):
                raise RequestError(
                    f"topic {name!r} has messages: its filter type stays {topic.filter_type}; make another topic"
                )
            topic.filter_type = filter_type
            self._append_state(topic)
        if queues is not None and queues > min(topic.read_queues, topic.write_queues):
            self._set_visible_queues(topic, queues)
        return topic

    def place(self, rows: pa.RecordBatch) -> Placement:
        """Choose queues and offsets for rows of LOG_SCHEMA that are about to become visible. Reserves the offsets.

        The rows have been accepted, so a topic that was deleted meanwhile is created again.
        """
        codes, names = codes_of(rows.column("topic"))
        queue_ids = filled(rows.column("queue_id"), -1).to_numpy().astype(np.int64)
        topics = [self.find_topic(name) or self.ensure(name) for name in names]
        # A batch with one topic, the usual case, needs no sort.
        for topic_rows in alike(codes) if len(topics) > 1 else [None]:
            self._choose_queues(
                topics[0 if topic_rows is None else int(codes[topic_rows[0]])], queue_ids, topic_rows
            )
        queue_offsets = np.empty(len(queue_ids), dtype=np.int64)
        groups = []
        for code, queue_number, queue_rows in by_queue(codes, queue_ids):
            queue = topics[code].queues[queue_number]
            queue_offsets[queue_rows] = queue.next_offset + np.arange(len(queue_rows))
            # Assigned before the rows are durable, like sequence numbers. A failed append stops the log, so no gap
            # arises.
            queue.next_offset += len(queue_rows)
            groups.append((topics[code], queue_number, queue_rows))
        tags = index_tags(rows, codes, names, [topic.filter_type == "MULTI_TAG" for topic in topics])
        return Placement(
            queue_ids, queue_offsets, groups, stored_sizes(rows), tags, _dead_letter_keys(rows, groups)
        )

    def replay(self, rows: pa.RecordBatch, seqs: Int64Array) -> None:
        """Recovery: add visible rows of the log, with the numbers `seqs`, to the queue indexes.

        Skips rows that an index already has. Raises Corrupt if rows of a queue are missing before them.
        """
        codes, names = codes_of(rows.column("topic"))
        queue_ids, offsets = (
            rows.column(name).to_numpy().astype(np.int64) for name in ("queue_id", "queue_offset")
        )
        topics = [self._find_existing(name) for name in names]
        tags = index_tags(rows, codes, names, [topic.filter_type == "MULTI_TAG" for topic in topics])
        sizes = stored_sizes(rows)
        for code, topic in enumerate(topics):
            topic_queue_ids = queue_ids[codes == code] if len(topics) > 1 else queue_ids
            topic.configure(topic.config, int(topic_queue_ids.max()) + 1)
        for code, queue_number, queue_rows in by_queue(codes, queue_ids):
            queue = topics[code].queues[queue_number]
            index = queue.index
            if index.min_offset == index.end_offset < offsets[queue_rows[0]]:
                # Retention has removed the earlier rows, so the queue begins with the first remaining one.
                index.start_at(int(offsets[queue_rows[0]]))
            # The index may already contain rows after the checkpoint, up to the end of its files.
            if int(offsets[queue_rows[0]]) < index.end_offset:
                queue_rows = queue_rows[offsets[queue_rows] >= index.end_offset]
            if len(queue_rows):
                if int(offsets[queue_rows[0]]) != index.end_offset:
                    raise Corrupt(
                        f"queue {queue_number} of {topics[code].name!r} has no entry for offset {index.end_offset}"
                    )
                index.append(seqs[queue_rows], sizes[queue_rows], tags[queue_rows])
            queue.next_offset = index.end_offset
        for topic in topics:
            _hide_deleted(topic)
        # The open part of the index is in memory, and recovery may add many rows.
        self.indexes.seal_if_large(int(seqs[-1]) + 1)

    def forget(self, first_seq: int) -> None:
        """Delete index files with only rows before `first_seq`, which retention has removed. Blocks on the disk."""
        for name in self.indexes.forget(first_seq):
            self._files.remove(name)

    def _choose_queues(self, topic: Topic, queue_ids: Int64Array, rows: Int64Array | None) -> None:
        """Set the final queues of a topic's rows in `queue_ids`, in place. -1 there means: any queue.

        `rows`: the indexes of the topic's rows, None for all rows.
        """
        chosen = queue_ids if rows is None else queue_ids[rows]
        has_no_queue = chosen < 0
        if has_no_queue.any():
            count = int(has_no_queue.sum())
            # Arrow's memory is read-only, and the caller still needs its own column.
            chosen = chosen.copy() if rows is None else chosen
            queue_count = topic.write_queues or len(topic.queues)
            chosen[has_no_queue] = (topic.turn + np.arange(count)) % queue_count
            # The next batch continues here, so that single sends also use all queues in turn.
            topic.turn = (topic.turn + count) % queue_count
        # A scheduled message may name a queue that the topic does not have (any more). It must not be lost.
        chosen = chosen % len(topic.queues)
        queue_ids[slice(None) if rows is None else rows] = chosen

    def _add_topic(self, name: str, facts: TopicFacts) -> Topic:
        """Create a topic in memory."""
        queues = Queues(self.indexes, name, facts.queues)
        topic = self._topics[name] = Topic(name, queues, facts)
        self.made_by[facts.made_by] = self.made_by.get(facts.made_by, 0) + 1
        return topic

    def _revive(self, topic: Topic, queues: int) -> None:
        """Create a deleted topic again, with `queues` queues. Old messages stay hidden, and the offsets continue."""
        topic.deleted = False
        topic.configure(TopicConfig(queues, queues), queues)
        _hide_deleted(topic)
        self._append_state(topic)

    def _set_visible_queues(self, topic: Topic, queues: int) -> None:
        """Show at least `queues` queues of a topic, including ones that were hidden."""
        config = raise_queues(topic.config, queues)
        if queues > len(topic.queues) or config != topic.config:
            topic.configure(config, queues)
            self._append_state(topic)

    def _append_state(self, topic: Topic) -> None:
        """Append the topic's state to the log. It precedes all messages that are appended from now on."""
        self._meta.put([(f"topic/{topic.name}", topic.facts())])
        self.version += 1
        self.on_change(topic)


def _dead_letter_keys(rows: pa.RecordBatch, groups: Sequence[tuple[Topic, int, Int64Array]]) -> list[str]:
    """List the key of a counter for each dead letter among rows of LOG_SCHEMA. `groups`: as in `Placement`."""
    keys = []
    for topic, _, positions in groups:
        if topic.name.startswith(DLQ_PREFIX):
            texts = rows.column("properties").take(pa.array(positions)).to_pylist()
            keys += [of_dead_letter(topic.name, text) for text in texts]
    return keys


def _hide_deleted(topic: Topic) -> None:
    """Hide the messages that were deleted with the topic. Their index entries stay until retention removes the rows."""
    for queue in topic.queues if topic.emptied_before_seq else ():
        queue.index.hide(topic.emptied_before_seq)


def check_topic(name: str) -> None:
    """Raise InvalidName unless a topic may have this name. A name that contains another topic's name may be longer."""
    has_other = name.startswith((RETRY_PREFIX, EXPIRED_PREFIX))
    check_name(name, limits.OWN_TOPIC_BYTES_MAX if has_other else limits.TOPIC_BYTES_MAX, "topic")


def check_name(name: str, bytes_max: int, what: str) -> None:
    """Raise InvalidName unless RocketMQ's clients and the data folder can handle this name."""
    if not name or len(name) > bytes_max or not limits.NAME.fullmatch(name):
        raise InvalidName(f"{what} {name[:80]!r}: 1 to {bytes_max} of the characters % | a-z A-Z 0-9 _ -")


# ---- index entries from rows ---------------------------------------------------------------------------------
# These functions serve messages that become visible, recovery, and the rebuild of a damaged index file.

# Rows per batch. Frames may be small, and to replay them one by one would cost seconds per million rows.
BATCH_ROWS = 65_536
COLUMNS = ("seq", "kind", "topic", "queue_id", "queue_offset", "tag", "body", "properties", "due_ms")
# Rows in the queue of a delay level. MOVED: a half message that was committed with a level.
_LEVEL_KINDS = (int(Kind.SCHEDULED), int(Kind.MOVED))
CHECKED_QUEUES = 64  # queues that are checked when an index is loaded; takes some milliseconds


def index_tags(
    rows: pa.RecordBatch, codes: Int64Array, names: Sequence[str], multi_tag: Sequence[bool]
) -> Int64Array:
    """Compute the tag field of the index entry of each row.

    `names` are the topics, `codes` the index of each row's topic, and `multi_tag` whether its field is a mask.

    For a scheduled message in the queue of a delay level, the field is the due time in ms. The scan of that queue reads
    only the entries.
    """
    tags = _tag_values(rows.column("tag"), codes, multi_tag)
    if SCHEDULE_TOPIC not in names:
        return tags
    # Clients may have sent messages to this topic before the name was reserved. These have no due time.
    in_level_queue = (codes == names.index(SCHEDULE_TOPIC)) & np.isin(
        rows.column("kind").to_numpy(), _LEVEL_KINDS
    )
    return np.where(in_level_queue, rows.column("due_ms").fill_null(0).to_numpy(), tags)


def _tag_values(tags: pa.Array, codes: Int64Array, multi_tag: Sequence[bool]) -> Int64Array:
    """Compute the hash of each tag, or its mask in a MULTI_TAG topic. 0 without a tag.

    `codes` and `multi_tag`: as for `index_tags`.
    """
    if tags.null_count == len(tags):
        return np.zeros(len(tags), dtype=np.int64)
    # Hash each distinct tag once: a batch of ten thousand rows has only a few.
    text_index, texts = codes_of(filled(tags, ""))
    values = np.array([tag_hash(text) for text in texts], dtype=np.int64)[text_index]
    multi_tag_codes = np.flatnonzero(multi_tag)
    if len(multi_tag_codes):
        # Computed for all rows, because a batch may mix topics of both types.
        masks = np.array([tag_mask(text) for text in texts], dtype=np.int64)[text_index]
        values = np.where(np.isin(codes, multi_tag_codes), masks, values)
    return values


def by_queue(codes: Int64Array, queue_id: Int64Array) -> Iterator[tuple[int, int, Int64Array]]:
    """Yield (topic code, queue, indexes of its rows) for each queue, with the indexes in ascending order.

    `codes` and `queue_id` have one element for each row.
    """
    # Combine topic and queue into one number, so that one sort finds the rows of each queue.
    for rows in alike(codes * limits.QUEUES_PER_TOPIC_MAX + queue_id):
        yield int(codes[rows[0]]), int(queue_id[rows[0]]), rows


def check_index_ends(reader: LogReader, indexes: Sequence[QueueIndex]) -> None:
    """Raise Corrupt if the oldest or newest entry of some queues does not match the row that it names.

    Files with valid checksums may belong to another log, or to an earlier state of this one, for example after a
    restore.
    """
    # A sample suffices, because another log differs almost everywhere. A start must not read each of 100,000 queues.
    step = -(-len(indexes) // CHECKED_QUEUES) or 1
    for index in indexes[::step] if reader.next_seq > reader.first_seq else ():
        for offset in {index.min_offset, index.end_offset - 1} if index.end_offset > index.min_offset else ():
            seqs = index.read(offset, 1, hidden=True)["seq"].astype(np.int64)
            if seqs[0] >= reader.first_seq:  # retention has removed older rows
                _check_row(reader, index, offset, seqs)


def _check_row(reader: LogReader, index: QueueIndex, offset: int, seqs: Int64Array) -> None:
    """Raise Corrupt unless the row `seqs[0]` is the message at an offset of this queue."""
    position = f"queue {index.queue_id} of {index.topic!r}, offset {offset}"
    try:
        rows = reader.read_rows(seqs).select(["topic", "queue_id", "queue_offset"]).to_pylist()
    except OutOfRange as error:
        raise Corrupt(f"{position}: {error}") from error
    expected = {"topic": index.topic, "queue_id": index.queue_id, "queue_offset": offset}
    # Another row has this number, so the index belongs to another log. The caller rebuilds it completely.
    if rows[0] != expected:
        raise Corrupt(f"{position} names seq {seqs[0]}, which is another row")


def rebuild_entries(
    reader: LogReader, first_seq: int, next_seq: int, is_multi_tag: Callable[[str], bool]
) -> list[Part]:
    """Build the index entries of the log's rows [first_seq, next_seq) that still exist, one part for each queue.

    Any thread.
    """
    parts_by_queue: dict[tuple[str, int], list[Part]] = {}
    # Rows that retention has removed need no entries: their offsets are below each queue's first offset.
    begin = max(first_seq, reader.first_seq)
    for rows in reader.coalesced(begin, next_seq, None, BATCH_ROWS, COLUMNS, placed=True):
        codes, names = codes_of(rows.column("topic"))
        queue_id, offset = (
            rows.column(name).to_numpy().astype(np.int64) for name in ("queue_id", "queue_offset")
        )
        entries = np.empty(rows.num_rows, ENTRY)
        entries["seq"], entries["size"] = rows.column("seq").to_numpy(), stored_sizes(rows)
        entries["tag"] = index_tags(rows, codes, names, [is_multi_tag(name) for name in names])
        for code, queue, queue_rows in by_queue(codes, queue_id):
            queue_part = Part(names[code], queue, int(offset[queue_rows[0]]), entries[queue_rows])
            parts_by_queue.setdefault((queue_part.topic, queue), []).append(queue_part)
    return [
        Part(
            topic,
            queue,
            queue_parts[0].first_offset,
            np.concatenate([queue_part.entries for queue_part in queue_parts]),
        )
        for (topic, queue), queue_parts in parts_by_queue.items()
    ]
