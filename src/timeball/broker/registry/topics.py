"""Topics and their queues: which exist, and which offset the next visible row of each queue gets.

A queue's offset is given out when the row is appended and its index entry is written when the row is durable;
both happen in log order on the event loop, so offsets are dense and an entry never names a row that may vanish.

An entry's `tag` is what the topic's filter type says (broker/filters/tags.py). It is settled while the topic is
empty: one queue cannot hold two sorts of entries.

A topic costs no file and no descriptor: the entries of all queues share their files (log/queue_index.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec
import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker import queue_entries
from timeball.broker.rates import Rates, Stat, of_dead_letter
from timeball.broker.registry.meta import MetaLog
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
from timeball.errors import Corrupt, InvalidName, NotFound, OverLimit, RequestError
from timeball.files import Files
from timeball.log.queue_index import Lengths, QueueIndexes
from timeball.log.reader import LogReader
from timeball.message import DLQ_PREFIX, RETRY_PREFIX, Int64Array, alike, codes_of, filled, stored_sizes

logger = logging.getLogger(__name__)

__all__ = ["FilterType", "Placement", "Queue", "Topic", "Topics", "check_name", "check_topic"]


@dataclass(slots=True)
class Placement:
    """The places of the visible rows of one append: written into the queues' indexes once they are durable."""

    queue_id: Int64Array
    queue_offset: Int64Array
    groups: list[tuple[Topic, int, Int64Array]]  # topic, queue, row numbers in order
    sizes: Int64Array  # as RocketMQ would store each message: its clients bound answers by these
    tags: Int64Array
    dead: list[str]  # a counter's key for each dead letter

    def index(self, first_seq: int, row_seqs: Int64Array | None = None) -> None:
        """Write the entries; `row_seqs` when the rows do not simply follow `first_seq`."""
        for topic, queue_id, rows in self.groups:
            seqs = first_seq + rows if row_seqs is None else row_seqs[rows]
            topic.queues[queue_id].index.append(seqs, self.sizes[rows], self.tags[rows])

    def count(self, rates: Rates, *, released: bool = False) -> None:
        """Count what came into each topic; `released`: as scheduled messages, too."""
        for topic, _, rows in self.groups:
            rates.put(topic.name, len(rows), int(self.sizes[rows].sum()))
            if released:
                rates.add(Stat.RELEASED_NUMS, topic.name, len(rows))
        rates.add_each(Stat.DEAD_NUMS, self.dead)

    def queues(self) -> list[tuple[str, int]]:
        """Return the queues that got rows: topic and number."""
        return [(topic.name, queue_id) for topic, queue_id, _ in self.groups]


class Topics:
    """All topics. Belongs to the event loop."""

    def __init__(self, files: Files, meta: MetaLog, *, queues_per_topic: int) -> None:
        self._files, self._meta = files, meta
        self._queues_per_topic = queues_per_topic
        # Deleted ones too, for their offsets and for the bound on their number.
        self._topics: dict[str, Topic] = {}
        self.indexes = QueueIndexes(files)  # of all topics: one set of files (decision 0026)
        self.made_by: dict[str, int] = {}  # account -> topics it has made, deleted ones too
        self.version = 0  # counts changes since the start, for tools that ask whether anything is new
        self._has_index = False  # no queue is opened before the index is, which knows what is in it
        meta.register("topic", self)

    def restore(self, name: str, value: bytes) -> None:
        """Recovery: take what the log says of a topic."""
        facts = msgspec.json.decode(value, type=TopicFacts)
        topic = self._topics.get(name)
        if topic is None:
            topic = self._add(name, facts)
        else:
            topic.restore(facts)
        if self._has_index:
            _empty(topic)

    def load(self, reader: LogReader, lengths: Lengths, next_seq: int) -> None:
        """Recovery: what the queues of the topics restored so far hold of the rows below `next_seq`.

        The files of the index say it, and where they end, the log does. `lengths`: the (min_offset, max_offset) of
        each queue that the checkpoint vouches for. Files that say something else are of no use: then all comes from
        the log. Raises Corrupt when that has fewer rows, too.
        """
        # Set before the load: a damaged file may be met by the first read.
        self.indexes.rebuild = lambda begin, end: queue_entries.rebuild(
            reader, begin, end, self._is_multi_tag
        )
        try:
            covered_seq = self.indexes.load(reader.first_seq, next_seq)
            queue_entries.check(reader, list(self.indexes.used()))
            self._fill(reader, covered_seq, lengths, next_seq)
        except Corrupt as error:
            logger.warning("all queues built again from the log reason=%s", error)
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
                    index.start_at(high)  # retention has let all its rows go
                # The checkpoint vouches for these entries: fewer means that files and log are of different states.
                if index.max_offset != high:
                    found = f"queue {at} of {name!r} ends at offset {index.max_offset}"
                    raise Corrupt(f"{found}, but the checkpoint knows of {high}")
                index.min_offset = max(index.min_offset, low)
                # The checkpoint's end, also of a queue whose rows are all gone: offsets are never given out twice.
                queue.next_offset = high
        for topic in self._topics.values():
            _empty(topic)
        self._has_index = True

    def _known(self, name: str, queue_id: int) -> Queue:
        """Return a queue that has had messages; raises Corrupt when the log knows no such topic."""
        topic = self._made(name)
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
        """Return the topic; raises NotFound."""
        topic = self.find_topic(name)
        if topic is None:
            raise NotFound(f"topic {name[: limits.OWN_TOPIC_BYTES_MAX]!r} does not exist")
        return topic

    def find_topic(self, name: str) -> Topic | None:
        """Return the topic, if it exists."""
        topic = self._topics.get(name)
        return None if topic is None or topic.deleted else topic

    def all(self) -> list[Topic]:
        """Return all topics."""
        return [topic for topic in self._topics.values() if not topic.deleted]

    def configure(
        self,
        name: str,
        config: TopicConfig,
        *,
        filter_type: FilterType | None = None,
        made_by: str = "",
    ) -> Topic:
        """Make a topic or change one; raises RequestError, OutOfRange, OverLimit, changing nothing."""
        check_config(config)
        queues = max(config.read_queues or 0, config.write_queues or 0)
        topic = self.ensure(name, queues or self._queues_per_topic, filter_type=filter_type, made_by=made_by)
        if topic.config != config:
            topic.configure(config)
            self._changed(topic)
        return topic

    def delete(self, name: str, next_seq: int) -> bool:
        """Hide a topic and forget its messages, the rows before `next_seq`; false when there is none."""
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
        """Return the topic, created or widened when needed; raises InvalidName, OverLimit. Permission: policy.py.

        `made_by`: the account for which a new one is made, "" for the broker itself.
        `filter_type` None: as it is, SINGLE_TAG for a new one. Another one than a topic with messages has is refused
        (RequestError).
        """
        if filter_type is not None and filter_type not in get_args(FilterType):
            raise RequestError(f"filter type {filter_type[:80]!r}: it is {' or '.join(get_args(FilterType))}")
        topic = self._topics.get(name)
        if topic is None or topic.deleted:
            check_topic(name)
        if topic is None:
            # Deleted ones count too: they are kept for their offsets.
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
            # The index of its messages holds hashes or masks; another type would read them as the other.
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

        They have been accepted: a topic that is missing by now is made.
        """
        codes, names = codes_of(rows.column("topic"))
        queue_id = filled(rows.column("queue_id"), -1).to_numpy().astype(np.int64)
        topics = [self.find_topic(name) or self.ensure(name) for name in names]
        # One topic a batch is usual, and then nothing is sorted.
        for of_topic in alike(codes) if len(topics) > 1 else [None]:
            self._choose(topics[0 if of_topic is None else int(codes[of_topic[0]])], queue_id, of_topic)
        queue_offset = np.empty(len(queue_id), dtype=np.int64)
        groups = []
        for code, at, group in queue_entries.by_queue(codes, queue_id):
            queue = topics[code].queues[at]
            queue_offset[group] = queue.next_offset + np.arange(len(group))
            # Given out before the rows are durable, like sequence numbers: an append that fails stops the log.
            queue.next_offset += len(group)
            groups.append((topics[code], at, group))
        tags = queue_entries.index_tags(
            rows, codes, names, [topic.filter_type == "MULTI_TAG" for topic in topics]
        )
        return Placement(queue_id, queue_offset, groups, stored_sizes(rows), tags, _dead(rows, groups))

    def replay(self, rows: pa.RecordBatch, seqs: Int64Array) -> None:
        """Recovery: index visible rows of the log again; those a queue has already are skipped."""
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
                # Retention has removed the rows before: the queue begins with the first one that is left.
                index.start_at(int(offset[mine[0]]))
            # The index may know rows behind the checkpoint already: its files go as far as they were written.
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
        self.indexes.seal_if_large(int(seqs[-1]) + 1)

    def forget(self, first_seq: int) -> None:
        """Forget entries of rows before `first_seq`, which retention has let go. Blocking."""
        for name in self.indexes.forget(first_seq):
            self._files.remove(name)

    def _choose(self, topic: Topic, queue_id: Int64Array, rows: Int64Array | None) -> None:
        mine = queue_id if rows is None else queue_id[rows]
        free = mine < 0
        if free.any():
            count = int(free.sum())
            # Arrow's memory may not be written to, and the caller still needs its own column.
            mine = mine.copy() if rows is None else mine
            width = topic.write_queues or len(topic.queues)
            mine[free] = (topic.turn + np.arange(count)) % width
            # Goes on where the last batch ended, so that single sends go round the queues too.
            topic.turn = (topic.turn + count) % width
        # A queue that has been taken away since the promise was made must not lose it.
        mine = mine % len(topic.queues)
        queue_id[slice(None) if rows is None else rows] = mine

    def _add(self, name: str, facts: TopicFacts) -> Topic:
        queues = Queues(self.indexes, name, facts.queues)
        topic = self._topics[name] = Topic(name, queues, facts)
        self.made_by[facts.made_by] = self.made_by.get(facts.made_by, 0) + 1
        return topic

    def _revive(self, topic: Topic, queues: int) -> None:
        """Make a topic of a deleted one's name: no old message shows, and offsets go on from where they were."""
        topic.deleted = False
        topic.configure(TopicConfig(queues, queues), queues)
        _empty(topic)
        self._changed(topic)

    def _set_visible_queues(self, topic: Topic, queues: int) -> None:
        """Use at least so many queues of a topic, ones that were hidden before among them."""
        shown = at_least(topic.config, queues)
        if queues > len(topic.queues) or shown != topic.config:
            topic.configure(shown, queues)
            self._changed(topic)

    def _changed(self, topic: Topic) -> None:
        """Write the topic to the log, ahead of any message that is appended from now on."""
        self._meta.put([(f"topic/{topic.name}", topic.facts())])
        self.version += 1


def _dead(rows: pa.RecordBatch, groups: Sequence[tuple[Topic, int, Int64Array]]) -> list[str]:
    """Return a counter's key for each dead letter among rows of LOG_SCHEMA that have their queues."""
    found = []
    for topic, _, at in groups:
        if topic.name.startswith(DLQ_PREFIX):
            texts = rows.column("properties").take(pa.array(at)).to_pylist()
            found += [of_dead_letter(topic.name, text) for text in texts]
    return found


def _empty(topic: Topic) -> None:
    """Hide the rows of a deleted topic. Their files stay, and retention removes them with their stretch of the log."""
    for queue in topic.queues if topic.emptied_before_seq else ():
        queue.index.hide(topic.emptied_before_seq)


def check_topic(name: str) -> None:
    """Raise InvalidName unless a topic may be called so; a retry topic may be longer than a user's."""
    is_own = name.startswith(RETRY_PREFIX)
    check_name(name, limits.OWN_TOPIC_BYTES_MAX if is_own else limits.TOPIC_BYTES_MAX, "topic")


def check_name(name: str, bytes_max: int, what: str) -> None:
    """Raise InvalidName unless `name` is one that RocketMQ's clients and our folders can live with."""
    if not name or len(name) > bytes_max or not limits.NAME.fullmatch(name):
        raise InvalidName(f"{what} {name[:80]!r}: 1 to {bytes_max} of the characters % | a-z A-Z 0-9 _ -")
