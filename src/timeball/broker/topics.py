"""Topics and their queues: which exist, and which offset the next visible row of each queue gets.

A queue's offset is given out when the row is appended and its index entry is written when the row is durable;
both happen in log order on the event loop, so offsets are dense and an entry never names a row that may vanish.

A name is checked against RocketMQ's pattern and never becomes a path: folders are numbered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.errors import InvalidMessage, NotFound, OverLimit
from timeball.files import Files
from timeball.log.queue_index import FOLDER as QUEUES
from timeball.log.queue_index import QueueIndex
from timeball.message import Int64Array, byte_lengths

NAME = "topics.json"
# RocketMQ's stored record without topic, body and properties (version 1, IPv4 hosts).
STORED_OVERHEAD_BYTES = 91


class TopicFacts(msgspec.Struct, frozen=True):
    """What is saved of a topic."""

    number: int
    queues: int


@dataclass(slots=True)
class Queue:
    """One queue: its index, and the offset the next appended row will have."""

    index: QueueIndex
    next_offset: int


@dataclass(slots=True)
class Topic:
    """One topic; `turn` goes round its queues for rows that leave the choice to us."""

    name: str
    number: int
    queues: list[Queue] = field(default_factory=list)
    turn: int = 0

    @property
    def read_queues(self) -> int:
        """How many of its queues consumers read."""
        return len(self.queues)

    @property
    def write_queues(self) -> int:
        """How many of its queues producers write to."""
        return len(self.queues)

    @property
    def perm(self) -> int:
        """RocketMQ's permission bits: read 4, write 2."""
        return 6


@dataclass(slots=True)
class Placement:
    """Where the visible rows of one append go: written into the queues' indexes once they are durable."""

    queue_id: Int64Array
    queue_offset: Int64Array
    groups: list[tuple[Topic, int, Int64Array]]  # topic, queue, row numbers in order
    sizes: Int64Array
    tags: Int64Array

    def index(self, first_seq: int, row_seqs: Int64Array | None = None) -> None:
        """Write the entries; `row_seqs` when the rows do not simply follow `first_seq`."""
        for topic, queue_id, rows in self.groups:
            seqs = first_seq + rows if row_seqs is None else row_seqs[rows]
            topic.queues[queue_id].index.append(seqs, self.sizes[rows], self.tags[rows])

    def topics(self) -> set[str]:
        """Names of the topics that got something."""
        return {topic.name for topic, _, _ in self.groups}


class Topics:
    """All topics. Belongs to the event loop."""

    def __init__(self, files: Files, *, queues_per_topic: int, auto_create: bool) -> None:
        self._files = files
        self._queues_per_topic, self._auto_create = queues_per_topic, auto_create
        self._topics: dict[str, Topic] = {}
        self._tag_hashes: dict[str, int] = {}
        self.dirty = False

    def load(self, lengths: dict[str, dict[int, tuple[int, int]]]) -> None:
        """Recovery: known topics, their queues cut to the (min_offset, max_offset) the checkpoint vouches for."""
        facts: dict[str, TopicFacts] = {}
        if self._files.exists(NAME):
            facts = msgspec.json.decode(bytes(self._files.map_readonly(NAME)), type=dict[str, TopicFacts])
        for name, fact in facts.items():
            self._add(name, fact.number, fact.queues, lengths.get(name, {}))

    def save(self) -> bytes | None:
        """The file's new content when something has changed; the caller writes it, off the loop."""
        if not self.dirty:
            return None
        self.dirty = False
        return msgspec.json.encode(
            {t.name: TopicFacts(t.number, len(t.queues)) for t in self._topics.values()}
        )

    def unsaved(self) -> None:
        """What `save` gave out was not written."""
        self.dirty = True

    def get(self, name: str) -> Topic:
        """The topic; raises NotFound."""
        topic = self._topics.get(name)
        if topic is None:
            raise NotFound(f"topic {name!r} does not exist")
        return topic

    def find(self, name: str) -> Topic | None:
        """The topic, if it exists."""
        return self._topics.get(name)

    def all(self) -> list[Topic]:
        """All topics."""
        return list(self._topics.values())

    def ensure(self, name: str, queues: int | None = None) -> Topic:
        """The topic, created or widened when needed; raises NotFound when that is not allowed."""
        topic = self._topics.get(name)
        if topic is None:
            check_name(name, limits.TOPIC_BYTES_MAX, "topic")
            if queues is None and not self._auto_create:
                raise NotFound(
                    f"topic {name!r} does not exist; create it, or start with --auto-create-topics"
                )
            if len(self._topics) >= limits.TOPICS_MAX:
                raise OverLimit(f"{limits.TOPICS_MAX} topics exist; delete some first")
            number = 1 + max((t.number for t in self._topics.values()), default=0)
            topic = self._add(name, number, queues or self._queues_per_topic, {})
            self.dirty = True
        elif queues is not None and queues > len(topic.queues):
            self._widen(topic, queues, {})
            self.dirty = True
        return topic

    def place(self, rows: pa.RecordBatch) -> Placement:
        """Choose queues for rows of LOG_SCHEMA that are about to become visible, and give out their offsets."""
        codes, names = codes_of(rows.column("topic"))
        queue_id = np.array(
            rows.column("queue_id").fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64
        )
        topics = [self.ensure(name) for name in names]
        for code, topic in enumerate(topics):
            self._choose(topic, queue_id, np.flatnonzero(codes == code) if len(topics) > 1 else None)
        placed = codes * limits.QUEUES_PER_TOPIC_MAX + queue_id
        order = np.argsort(placed, kind="stable")
        cuts = np.flatnonzero(np.diff(placed[order])) + 1
        queue_offset = np.empty(len(placed), dtype=np.int64)
        groups = []
        for group in np.split(order, cuts):
            topic, at = topics[int(codes[group[0]])], int(queue_id[group[0]])
            queue = topic.queues[at]
            queue_offset[group] = queue.next_offset + np.arange(len(group))
            queue.next_offset += len(group)
            groups.append((topic, at, group))
        return Placement(
            queue_id, queue_offset, groups, stored_sizes(rows), self.tag_hashes(rows.column("tag"))
        )

    def replay(self, rows: pa.RecordBatch, seqs: Int64Array) -> None:
        """Recovery: index visible rows of the log again; those a queue has already are skipped."""
        codes, names = codes_of(rows.column("topic"))
        queue_id, offset = (rows.column(c).to_numpy().astype(np.int64) for c in ("queue_id", "queue_offset"))
        sizes, tags = stored_sizes(rows), self.tag_hashes(rows.column("tag"))
        for code, name in enumerate(names):
            topic = self.ensure(name, self._queues_per_topic)
            of_topic = np.flatnonzero(codes == code)
            self._widen(topic, int(queue_id[of_topic].max()) + 1, {})
            for at in np.unique(queue_id[of_topic]).tolist():
                queue = topic.queues[at]
                mine = of_topic[queue_id[of_topic] == at]
                if queue.index.max_offset == 0 and offset[mine[0]] > 0:
                    queue.index.start_at(int(offset[mine[0]]))
                mine = mine[offset[mine] >= queue.index.max_offset]
                if len(mine):
                    assert int(offset[mine[0]]) == queue.index.max_offset, (name, at)
                    queue.index.append(seqs[mine], sizes[mine], tags[mine])
                queue.next_offset = queue.index.max_offset

    def tag_hashes(self, tags: pa.Array) -> Int64Array:
        """Java's String.hashCode of each tag; 0 where there is none, as in RocketMQ."""
        if tags.null_count == len(tags):
            return np.zeros(len(tags), dtype=np.int64)
        codes, names = codes_of(tags.fill_null(""))
        if len(self._tag_hashes) > limits.TOPICS_MAX:
            self._tag_hashes.clear()  # a cache of a pure function; hostile tags must not fill the memory
        hashes = [self._tag_hashes.setdefault(name, java_hash(name)) for name in names]
        return np.array(hashes, dtype=np.int64)[codes]

    def lengths(self) -> dict[str, dict[int, tuple[int, int]]]:
        """(min_offset, max_offset) of every queue that has entries, for the checkpoint."""
        found: dict[str, dict[int, tuple[int, int]]] = {}
        for topic in self._topics.values():
            used = {
                i: (q.index.min_offset, q.index.max_offset)
                for i, q in enumerate(topic.queues)
                if q.index.max_offset
            }
            if used:
                found[topic.name] = used
        return found

    def indexes(self) -> list[QueueIndex]:
        """Every queue's index."""
        return [queue.index for topic in self._topics.values() for queue in topic.queues]

    def _choose(self, topic: Topic, queue_id: Int64Array, rows: Int64Array | None) -> None:
        mine = queue_id if rows is None else queue_id[rows]
        free = mine < 0
        if free.any():
            count = int(free.sum())
            mine = mine.copy() if rows is None else mine
            mine[free] = (topic.turn + np.arange(count)) % len(topic.queues)
            topic.turn = (topic.turn + count) % len(topic.queues)
        # A queue that has been taken away since the promise was made must not lose it.
        mine = mine % len(topic.queues)
        queue_id[slice(None) if rows is None else rows] = mine

    def _add(self, name: str, number: int, queues: int, lengths: dict[int, tuple[int, int]]) -> Topic:
        topic = self._topics[name] = Topic(name, number)
        self._widen(topic, queues, lengths)
        return topic

    def _widen(self, topic: Topic, queues: int, lengths: dict[int, tuple[int, int]]) -> None:
        for at in range(len(topic.queues), queues):
            low, high = lengths.get(at, (0, 0))
            index = QueueIndex(self._files, f"{QUEUES}/{topic.number}/{at}", min_offset=low, max_offset=high)
            topic.queues.append(Queue(index, high))


def check_name(name: str, bytes_max: int, what: str) -> None:
    """Raise InvalidMessage unless `name` is one that RocketMQ's clients and our folders can live with."""
    if not name or len(name) > bytes_max or not limits.NAME.fullmatch(name):
        raise InvalidMessage(f"{what} {name[:80]!r}: 1 to {bytes_max} of the characters % | a-z A-Z 0-9 _ -")


def codes_of(column: pa.Array) -> tuple[Int64Array, list[str]]:
    """Each row's number in the list of distinct values, and that list."""
    encoded = column.dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def stored_sizes(rows: pa.RecordBatch) -> Int64Array:
    """Bytes of each message as RocketMQ would store it."""
    total = np.full(rows.num_rows, STORED_OVERHEAD_BYTES, dtype=np.int64)
    for name in ("topic", "body", "properties"):
        total += byte_lengths(rows.column(name))
    return total


def java_hash(text: str) -> int:
    """Java's String.hashCode: 31-polynomial over UTF-16 units, as a signed 32-bit number."""
    value = 0
    data = text.encode("utf-16-be")
    for high, low in zip(data[::2], data[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
