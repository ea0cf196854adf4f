"""All topics and their queues, and the offset that the next visible row of each queue gets.

The offset is given out when the row is appended, and its index entry is written when the row is durable. Both happen in
log order on the event loop. So offsets have no gaps, and no entry names a row that may disappear in a crash.

The topic's filter type determines the `tag` of an entry (broker/filters/tags.py). It can change only while the topic is
empty, because one queue cannot contain both kinds of entries.

A topic needs no file and no descriptor: the entries of all queues share their files (log/queue_index.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec
import numpy as np
import pyarrow as pa

from timeball.broker.registry import queue_entries
from timeball.broker.registry.meta import MetaLog
from timeball.broker.registry.rates import Rates, Stat, of_dead_letter
from timeball.broker.registry.topic import (
    FilterType,
    Queue,
    Queues,
    Topic,
    TopicConfig,
    TopicFacts,
    at_least,
    check_config,
)
from timeball.io.files import Files
from timeball.log.queue_index import Lengths, QueueIndexes
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.errors import Corrupt, InvalidName, NotFound, OverLimit, RequestError
from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX, Int64Array, alike, codes_of, filled, stored_sizes

logger = logging.getLogger(__name__)

__all__ = ["FilterType", "Placement", "Queue", "Topic", "Topics", "check_name", "check_topic"]


@dataclass(slots=True)
class Placement:
    """The positions of one append's visible rows, for the indexes of their queues once the rows are durable."""

    queue_id: Int64Array  # one element for each row, as in `queue_offset`
    queue_offset: Int64Array
    groups: list[tuple[Topic, int, Int64Array]]  # topic, queue, row numbers in order
    sizes: Int64Array  # as RocketMQ would store each message, because its clients limit answers by these
    tags: Int64Array  # of the index entries, by the filter type of each topic
    dead: list[str]  # the key of a counter for each dead letter

    def index(self, first_seq: int, row_seqs: Int64Array | None = None) -> None:
        """Write the index entries. `row_seqs`: for sequence numbers that are not consecutive from `first_seq` on."""
        for topic, queue_id, rows in self.groups:
            seqs = first_seq + rows if row_seqs is None else row_seqs[rows]
            topic.queues[queue_id].index.append(seqs, self.sizes[rows], self.tags[rows])

    def count(self, rates: Rates, *, released: bool = False) -> None:
        """Count the rows and bytes for each topic. `released`: count them as released scheduled messages, too."""
        for topic, _, rows in self.groups:
            rates.put(topic.name, len(rows), int(self.sizes[rows].sum()))
            if released:
                rates.add(Stat.RELEASED_NUMS, topic.name, len(rows))
        rates.add_each(Stat.DEAD_NUMS, self.dead)

    def queues(self) -> list[tuple[str, int]]:
        """Return the queues that got rows, as topic and number."""
        return [(topic.name, queue_id) for topic, queue_id, _ in self.groups]


class Topics:
    """All topics. Belongs to the event loop."""

    def __init__(self, files: Files, meta: MetaLog, *, queues_per_topic: int) -> None:
        self._files, self._meta = files, meta
        self._queues_per_topic = queues_per_topic
        # Includes deleted ones, for their offsets and for the bound on their number.
        self._topics: dict[str, Topic] = {}
        self.indexes = QueueIndexes(files)  # of all topics, in one set of files (decision 0026)
        self.made_by: dict[str, int] = {}  # account -> number of topics it has created, deleted ones included
        self.version = 0  # counts changes since the start, so that tools can see whether anything is new
        # No queue may be opened before the index is loaded, which contains its entries.
        self._has_index = False
        meta.register("topic", self)

    def restore(self, name: str, value: bytes) -> None:
        """Recovery: apply a topic's value from the log."""
        facts = msgspec.json.decode(value, type=TopicFacts)
        topic = self._topics.get(name)
        if topic is None:
            topic = self._add(name, facts)
        else:
            topic.restore(facts)
        # Before `load`, the topic's queues must not be opened.
        if self._has_index:
            _empty(topic)

    def load(self, reader: LogReader, lengths: Lengths, next_seq: int) -> None:
        """Recovery: fill the queues of the topics restored so far with the rows below `next_seq`.

        The entries come from the index files, and after their end from the log. `lengths` contains the (min_offset,
        max_offset) of each queue that the checkpoint guarantees. If the files contradict it, they are discarded and all
        entries are built from the log. Raise Corrupt if the log has too few rows as well.
        """
        # Set before the load, because the first read may already find a damaged file.
        self.indexes.rebuild = lambda begin, end: queue_entries.rebuild(
            reader, begin, end, self._is_multi_tag
        )
        try:
            covered_seq = self.indexes.load(reader.first_seq, next_seq)
            queue_entries.check(reader, list(self.indexes.used()))
            self._fill(reader, covered_seq, lengths, next_seq)
        except Corrupt as error:
            logger.warning("all queues built again from the log reason=%s", error)
            # All entries are discarded, because it is unknown which ones are right.
            self.indexes.clear(reader.first_seq)
            self._fill(reader, reader.first_seq, lengths, next_seq)

    def _fill(self, reader: LogReader, begin: int, lengths: Lengths, end: int) -> None:
        for index in self.indexes.used():
            self._known(index.topic, index.queue_id)
        for rows in reader.coalesced(begin, end, None, queue_entries.BATCH_ROWS, placed=True):
            self.replay(rows.drop_columns(["seq"]), rows.column("seq").to_numpy())
        for name, queues in lengths.items():
            for at, (low, high) in queues.items():
                queue = self._known(name, at)
                index = queue.index
                if index.min_offset == index.max_offset < high:
                    index.start_at(high)  # retention has removed all rows of the queue
                # The checkpoint guarantees these entries. With fewer, files and log are of different states.
                if index.max_offset != high:
                    found = f"queue {at} of {name!r} ends at offset {index.max_offset}"
                    raise Corrupt(f"{found}, but the checkpoint knows of {high}")
                index.min_offset = max(index.min_offset, low)
                # The checkpoint's end also counts for a queue without rows, so that offsets are never given out twice.
                queue.next_offset = high
        for topic in self._topics.values():
            _empty(topic)
        self._has_index = True

    def _known(self, name: str, queue_id: int) -> Queue:
        """Find a queue that has had messages. Raise Corrupt if the log contains no such topic."""
        topic = self._made(name)
        # A queue with entries exists, so the topic must have it.
        topic.configure(topic.config, queue_id + 1)
        topic.queues[queue_id].next_offset = topic.queues[queue_id].index.max_offset
        return topic.queues[queue_id]

    def _made(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            raise Corrupt(
                f"no row of the log makes topic {name!r}, which has messages: restore it from a copy"
            )
        return topic

    def _is_multi_tag(self, name: str) -> bool:
        topic = self._topics.get(name)
        return topic is not None and topic.filter_type == "MULTI_TAG"

    def get(self, name: str) -> Topic:
        """Return the topic. Raise NotFound."""
        topic = self.find_topic(name)
        if topic is None:
            raise NotFound(f"topic {name[: limits.OWN_TOPIC_BYTES_MAX]!r} does not exist")
        return topic

    def find_topic(self, name: str) -> Topic | None:
        """Find the topic, or None if it does not exist or was deleted."""
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
        """Create a topic or change its configuration. Raise RequestError or OverLimit, which change nothing."""
        check_config(config)
        # The larger number must exist, even if only a part of it is shown to readers or writers.
        queues = max(config.read_queues or 0, config.write_queues or 0)
        topic = self.ensure(name, queues or self._queues_per_topic, filter_type=filter_type, made_by=made_by)
        if topic.config != config:
            topic.configure(config)
            self._changed(topic)
        return topic

    def delete(self, name: str, next_seq: int) -> bool:
        """Hide a topic and forget its messages, the rows before `next_seq`. Return False if there is no such topic."""
        topic = self.find_topic(name)
        if topic is None:
            return False
        topic.deleted, topic.emptied_before_seq = True, next_seq
        _empty(topic)
        self._changed(topic)
        return True

    def ensure(
        self,
        name: str,
        queues: int | None = None,
        *,
        filter_type: FilterType | None = None,
        made_by: str = "",
    ) -> Topic:
        """Return the topic, created or widened if needed. Raise InvalidName, OverLimit, RequestError.

        The caller checks the permission (policy.py). `made_by`: the account for which a new topic is created, "" for
        the broker itself. `filter_type` None: unchanged, and SINGLE_TAG for a new topic. A topic with messages refuses
        another type (RequestError).
        """
        if filter_type is not None and filter_type not in get_args(FilterType):
            raise RequestError(f"filter type {filter_type[:80]!r}: it is {' or '.join(get_args(FilterType))}")
        topic = self._topics.get(name)
        if topic is None or topic.deleted:
            check_topic(name)
        if topic is None:
            # Deleted ones count too, because they are kept for their offsets.
            if len(self._topics) >= limits.TOPICS_MAX:
                raise OverLimit(
                    f"{limits.TOPICS_MAX} topics exist or have existed; start with another folder"
                )
            kind = filter_type or "SINGLE_TAG"
            facts = TopicFacts(queues or self._queues_per_topic, kind, made_by=made_by)
            topic = self._add(name, facts)
            self._changed(topic)
            return topic
        if topic.deleted:
            self._revive(topic, queues or self._queues_per_topic)
        if filter_type not in (None, topic.filter_type):
            # The index of its messages contains hashes or masks, and one must not be read as the other.
            if any(queue.next_offset > queue.index.min_offset for queue in topic.queues):
                raise RequestError(
                    f"topic {name!r} has messages: its filter type stays {topic.filter_type}; make another topic"
                )
            topic.filter_type = filter_type
            self._changed(topic)
        if queues is not None and queues > min(topic.read_queues, topic.write_queues):
            self._set_visible_queues(topic, queues)
        return topic

    def place(self, rows: pa.RecordBatch) -> Placement:
        """Choose queues for rows of LOG_SCHEMA that are about to become visible, and give out their offsets.

        The rows have been accepted, so a topic that does not exist any more is created.
        """
        codes, names = codes_of(rows.column("topic"))
        queue_id = filled(rows.column("queue_id"), -1).to_numpy().astype(np.int64)
        topics = [self.find_topic(name) or self.ensure(name) for name in names]
        # Usually a batch has one topic, and then nothing is sorted.
        for of_topic in alike(codes) if len(topics) > 1 else [None]:
            self._choose(topics[0 if of_topic is None else int(codes[of_topic[0]])], queue_id, of_topic)
        queue_offset = np.empty(len(queue_id), dtype=np.int64)
        groups = []
        for code, at, group in queue_entries.by_queue(codes, queue_id):
            queue = topics[code].queues[at]
            queue_offset[group] = queue.next_offset + np.arange(len(group))
            # Given out before the rows are durable, like sequence numbers. An append that fails stops the log.
            queue.next_offset += len(group)
            groups.append((topics[code], at, group))
        tags = queue_entries.index_tags(
            rows, codes, names, [topic.filter_type == "MULTI_TAG" for topic in topics]
        )
        return Placement(queue_id, queue_offset, groups, stored_sizes(rows), tags, _dead(rows, groups))

    def replay(self, rows: pa.RecordBatch, seqs: Int64Array) -> None:
        """Recovery: index visible rows of the log again, and skip those that a queue already has."""
        codes, names = codes_of(rows.column("topic"))
        queue_id, offset = (rows.column(c).to_numpy().astype(np.int64) for c in ("queue_id", "queue_offset"))
        topics = [self._made(name) for name in names]
        tags = queue_entries.index_tags(
            rows, codes, names, [topic.filter_type == "MULTI_TAG" for topic in topics]
        )
        sizes = stored_sizes(rows)
        for of_topic in alike(codes):
            topic = topics[int(codes[of_topic[0]])]
            topic.configure(topic.config, int(queue_id[of_topic].max()) + 1)
        for code, at, mine in queue_entries.by_queue(codes, queue_id):
            queue = topics[code].queues[at]
            index = queue.index
            if index.min_offset == index.max_offset < offset[mine[0]]:
                # Retention has removed the earlier rows, so the queue begins with the first remaining one.
                index.start_at(int(offset[mine[0]]))
            # The index may already contain rows after the checkpoint, up to the end of its files.
            mine = mine[offset[mine] >= index.max_offset]
            if len(mine):
                if int(offset[mine[0]]) != index.max_offset:
                    raise Corrupt(
                        f"queue {at} of {topics[code].name!r} has no entry for offset {index.max_offset}"
                    )
                index.append(seqs[mine], sizes[mine], tags[mine])
            queue.next_offset = index.max_offset
        for topic in topics:
            _empty(topic)
        # Recovery may index many rows, and the open part of the index is in memory.
        self.indexes.seal_if_large(int(seqs[-1]) + 1)

    def forget(self, first_seq: int) -> None:
        """Forget entries of rows before `first_seq`, which retention has removed. Blocking."""
        for name in self.indexes.forget(first_seq):
            self._files.remove(name)

    def _choose(self, topic: Topic, queue_id: Int64Array, rows: Int64Array | None) -> None:
        mine = queue_id if rows is None else queue_id[rows]
        free = mine < 0
        if free.any():
            count = int(free.sum())
            # Arrow's memory is read-only, and the caller still needs its own column.
            mine = mine.copy() if rows is None else mine
            width = topic.write_queues or len(topic.queues)
            mine[free] = (topic.turn + np.arange(count)) % width
            # The next batch continues with the next queue, so that single sends also use all queues in turn.
            topic.turn = (topic.turn + count) % width
        # The number may be too high, if queues were removed after the scheduled message was made. The message must not
        # be lost.
        mine = mine % len(topic.queues)
        queue_id[slice(None) if rows is None else rows] = mine

    def _add(self, name: str, facts: TopicFacts) -> Topic:
        queues = Queues(self.indexes, name, facts.queues)
        topic = self._topics[name] = Topic(name, queues, facts)
        self.made_by[facts.made_by] = self.made_by.get(facts.made_by, 0) + 1
        return topic

    def _revive(self, topic: Topic, queues: int) -> None:
        """Create a topic with the name of a deleted one: old messages stay hidden, and the offsets continue."""
        topic.deleted = False
        topic.configure(TopicConfig(queues, queues), queues)
        _empty(topic)
        self._changed(topic)

    def _set_visible_queues(self, topic: Topic, queues: int) -> None:
        """Show at least `queues` queues of a topic, including ones that were hidden."""
        shown = at_least(topic.config, queues)
        if queues > len(topic.queues) or shown != topic.config:
            topic.configure(shown, queues)
            self._changed(topic)

    def _changed(self, topic: Topic) -> None:
        """Write the topic to the log, before any message that is appended from now on."""
        self._meta.put([(f"topic/{topic.name}", topic.facts())])
        self.version += 1


def _dead(rows: pa.RecordBatch, groups: Sequence[tuple[Topic, int, Int64Array]]) -> list[str]:
    """Return the key of a counter for each dead letter among rows of LOG_SCHEMA that have their queues."""
    found = []
    for topic, _, at in groups:
        if topic.name.startswith(DLQ_PREFIX):
            texts = rows.column("properties").take(pa.array(at)).to_pylist()
            found += [of_dead_letter(topic.name, text) for text in texts]
    return found


def _empty(topic: Topic) -> None:
    """Hide the rows of a deleted topic. Their index entries stay until retention removes this part of the log."""
    for queue in topic.queues if topic.emptied_before_seq else ():
        queue.index.hide(topic.emptied_before_seq)


def check_topic(name: str) -> None:
    """Raise InvalidName unless a topic may have this name. A retry topic's name may be longer than a user's."""
    is_own = name.startswith(RETRY_PREFIX)
    check_name(name, limits.OWN_TOPIC_BYTES_MAX if is_own else limits.TOPIC_BYTES_MAX, "topic")


def check_name(name: str, bytes_max: int, what: str) -> None:
    """Raise InvalidName unless RocketMQ's clients and the data folder can handle this name."""
    if not name or len(name) > bytes_max or not limits.NAME.fullmatch(name):
        raise InvalidName(f"{what} {name[:80]!r}: 1 to {bytes_max} of the characters % | a-z A-Z 0-9 _ -")
