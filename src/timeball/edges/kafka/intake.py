"""From Kafka into Timeball: each record of the topic becomes one message, however often it is read.

    read -> messages -> Timeball's log, with the next position in the same frame -> offsets of Kafka's consumer group

Reading continues at the position in Timeball's log, and not at that of Kafka's consumer group. So a record whose answer
was lost is not taken twice. If another process has continued meanwhile, the log refuses this one, which then reads the
positions again.

While a batch is being written to the log, the next one is read and converted to messages. It is sent after the answer
to the earlier batch.

A record with the header `cancel` cancels the pending messages with its key. All cancels of a batch are carried out
before the batch is sent, and after the answer to the earlier batch. Messages that are cancelled in their own batch are
never sent, and later messages are not in the log yet. So a cancel that is repeated after a crash does not cancel a
message that came later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, cast

import pyarrow as pa
from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from timeball.client.source import Source
from timeball.edges.kafka import records
from timeball.edges.kafka.options import BridgeOptions, Counts, Topics
from timeball.edges.kafka.records import Record, Rules, Waiting
from timeball.edges.kafka.undeliverable import Undeliverable, UndeliverableFile
from timeball.edges.kafka.waiting import WaitingQueue
from timeball.io.clock import Clock
from timeball.model import limits
from timeball.model.errors import (
    Conflict,
    Forbidden,
    NotFound,
    OverLimit,
    RequestError,
    SetupError,
    Unauthorized,
)

logger = logging.getLogger(__name__)

BATCH_ROWS = 2_000  # the most records of one read
BATCH_BYTES = 2 * 1024 * 1024  # together with the other columns, half of the limit of a batch
POLL_S = 0.5  # for the first record
LINGER_S = 0.01  # records that arrive this soon share a batch, because each batch costs the broker a commit
FAR_LINGER_S = 0.05  # the same while the next record is due later than SOON_MS from now
SOON_MS = 500
LOOK_MS = 10_000  # between looks for partitions that were added
COMMIT_MS = 1_000  # between commits to Kafka's consumer group
TIMEOUT_S = 10.0  # of a request to Kafka
FULL_WAIT_S = 1.0  # while Timeball accepts no more

SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("body", pa.binary()),
        ("keys", pa.string()),
        ("unique_key", pa.string()),
        ("properties", pa.string()),
        ("born_ms", pa.int64()),
        ("due_ms", pa.int64()),
    ]
)

Item = tuple[Record, Waiting | None]  # a record, and the message made of it, if any
# These refusals concern every message of this bridge, so it is no use to send a message alone.
OF_THE_BRIDGE = (Conflict, Unauthorized, Forbidden, NotFound)


class End(NamedTuple):
    """The end of a partition when it was read: no record lies between `after`, the last one's offset + 1, and `end`.

    The offsets between them belong to aborted transactions and to the markers at the ends of transactions.
    """

    after: int
    end: int


class Intake:
    """Reads one topic. Belongs to one thread, and sends in another one.

    After an error it is replaced by a new object.
    """

    def __init__(
        self, options: BridgeOptions, queue: WaitingQueue, source: Source, counts: Counts, clock: Clock
    ) -> None:
        self._options, self._queue, self._source = options, queue, source
        self._counts, self._clock = counts, clock
        properties = options.client_properties(
            group_id=options.name, enable_auto_commit=False, auto_offset_reset="error",
            isolation_level="read_committed", fetch_wait_max_ms=100, queued_max_messages_kbytes=32 * 1024,
            enable_partition_eof=True,
        )  # fmt: skip
        self._consumer = Consumer(properties, logger=logger)
        self._topics = Topics(self._consumer.list_topics, clock)
        self._rules = Rules(options.own, options.out, options.dead, options.position_topic, self._topics.has)
        self._file = UndeliverableFile(options.undeliverable, counts)
        # The position of each partition in the log. The sending thread moves these, and partitions are added while it
        # is idle.
        self._stands: dict[int, int] = {}
        self._read: dict[int, int] = {}  # by partition: the offset after the last record that was read
        self._ends: dict[int, End] = {}  # by partition
        self._sender, self._sending = ThreadPoolExecutor(1, "kafka-send"), Future[None]()
        self._sending.set_result(None)
        self._committed: dict[int, int] = {}  # by partition: the offset that Kafka's consumer group has
        self._looked_ms = self._told_ms = 0
        self._linger_s = LINGER_S  # depends on the due times of the previous batch

    def run(self, stop: threading.Event) -> None:
        """Take records until `stop` is set.

        After Conflict, Unavailable and KafkaException, start again with a new object. SetupError needs an operator.
        """
        try:
            self._begin()
            while not stop.is_set():
                found = list(self._poll())
                if found:
                    self._take(found, stop)
                else:
                    self._sending.result()
                self._now_and_then()
            self._sending.result()
        finally:
            self._sender.shutdown()
            self._consumer.close()
            self._source.close()

    # ---- reading ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start reading each partition at its position in the log."""
        topic, count = self._options.own, self._topics.partitions(self._options.own)
        if not count:
            raise SetupError(f"--in {topic}: Kafka has no such topic; make it, or name another")
        known = self._source.positions()
        # If a partition is added to a known topic, all its records are read.
        start = "earliest" if known else self._options.start
        begins = [self._begin_of(partition, known.get(partition), start) for partition in range(count)]
        self._stands = {partition: known.get(partition, at) for partition, at in enumerate(begins)}
        self._read = dict(self._stands)
        # Store the start before the first record: a bridge that begins at the end must not skip records that arrive
        # meanwhile.
        if added := {partition: at for partition, at in self._stands.items() if partition not in known}:
            self._source.send(self._batch([]), added, added)
        self._consumer.assign([TopicPartition(topic, partition, at) for partition, at in enumerate(begins)])
        self._looked_ms = self._clock.wall_ms()

    def _begin_of(self, partition: int, stands: int | None, start: str) -> int:
        topic = self._options.own
        low, high = self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=TIMEOUT_S)
        if stands is None:
            return int(low if start == "earliest" else high)
        if stands > high:
            raise SetupError(
                f"--name {self._options.name}: the log stands at offset {stands} of {topic}/{partition}, which ends at "
                f"{high}: the topic was made anew or has lost records; choose another --name to read it from the start"
            )
        if stands < low:
            logger.error(
                "records let go before they were taken topic=%s partition=%d offsets=%d",
                topic,
                partition,
                low - stands,
            )
            self._counts.lost += low - stands
        return max(stands, int(low))

    def _poll(self) -> Iterator[Record]:
        """Yield the next records. Waits for the first one, and a moment for others."""
        first = self._consumer.poll(POLL_S)
        if first is None:
            return
        for message in (first, *self._consumer.consume(BATCH_ROWS - 1, self._linger_s)):
            if (error := message.error()) is None:
                record = self._record(message)
                self._read[record.partition] = record.offset + 1
                yield record
            elif error.code() == KafkaError._PARTITION_EOF:
                partition = message.partition() or 0
                self._ends[partition] = End(self._read[partition], message.offset() or 0)
            else:
                raise KafkaException(error)

    def _record(self, message: Message) -> Record:
        at_ms = message.timestamp()[1]
        return Record(
            message.topic() or "", message.partition() or 0, message.offset() or 0, message.key(), message.value(),
            cast("records.Headers", message.headers() or []), at_ms if at_ms > 0 else self._clock.wall_ms(),
        )  # fmt: skip

    # ---- taking -----------------------------------------------------------------------------------------

    def _take(self, found: Sequence[Record], stop: threading.Event) -> None:
        items = self._messages(found)
        self._sending.result()
        self._sending = self._sender.submit(self._send_all, items, stop)

    def _send_all(self, items: Sequence[Item], stop: threading.Event) -> None:
        for piece in pieces(items):
            self._send(piece, stop)

    def _messages(self, found: Sequence[Record]) -> list[Item]:
        """Convert records to messages, and carry out the cancels among them."""
        now_ms = self._clock.wall_ms()
        first_ms = now_ms + limits.DELAY_MS_MAX
        items: list[Item] = []
        by_key: dict[str, list[int]] = {}  # key -> the indexes of its messages in `items`
        cancels: set[str] = set()
        for record in found:
            if not records.is_cancel(record):
                message = self._message(record, now_ms)
                first_ms = min(first_ms, message.due_ms or now_ms)
                if message.keys:
                    by_key.setdefault(message.keys, []).append(len(items))
            elif record.key is None:
                message = records.dead_letter(record, self._options.dead, "a cancel without a key")
            else:
                cancels.add(name := records.key_name(record.topic, record.key))
                for at in by_key.pop(name, ()):
                    items[at] = items[at][0], None
                    self._counts.cancelled += 1
                message = None
            items.append((record, message))
        self._linger_s = FAR_LINGER_S if first_ms > now_ms + SOON_MS and not cancels else LINGER_S
        if cancels:
            self._sending.result()
            self._counts.cancelled += self._queue.cancel(sorted(cancels))
        return items

    def _message(self, record: Record, now_ms: int) -> Waiting:
        try:
            return records.message_of(record, self._rules, now_ms)
        # A record contains any bytes, and must not block the records after it.
        except Exception as error:
            logger.exception("record not understood place=%s", record.place.id)
            return records.dead_letter(record._replace(key=None, headers=[]), self._options.dead, repr(error))

    def _send(self, items: Sequence[Item], stop: threading.Event) -> None:
        """Send the messages of these records. Does nothing after a stop.

        A message that Timeball refuses becomes a dead letter.
        """
        # After a stop the earlier batch may be unsent, and the position after this batch would skip the records of that
        # one.
        if stop.is_set():
            return
        end = {record.partition: record.offset + 1 for record, _ in items}
        begin = {partition: self._stands[partition] for partition in end}
        messages = [message for _, message in items if message is not None]
        while True:
            try:
                self._source.send(self._batch(messages), begin, end)
                break
            except OverLimit as error:  # the disk is full or slow, and the records stay in Kafka meanwhile
                logger.warning("Timeball takes no more now reason=%s", error)
                if stop.wait(FULL_WAIT_S):
                    return
            except OF_THE_BRIDGE:
                raise
            except RequestError as error:
                self._send_apart(items, error, stop)
                return
        self._stands |= end
        self._counts.taken += len(items)
        self._counts.dead += sum(message.is_dead for message in messages)

    def _send_apart(self, items: Sequence[Item], error: RequestError, stop: threading.Event) -> None:
        if len(items) > 1:
            middle = len(items) // 2
            self._send(items[:middle], stop)
            self._send(items[middle:], stop)
            return
        ((record, message),) = items
        if message is None:
            raise error  # the position alone was refused, which is not the fault of the record
        reason = f"Timeball: {error}"
        if not message.is_dead:
            self._send([(record, records.dead_letter(record, self._options.dead, reason))], stop)
            return
        self._file_away(record, reason)
        self._send([(record, None)], stop)

    def _file_away(self, record: Record, reason: str) -> None:
        """Write a record to the local file, because Timeball does not accept its dead letter either."""
        self._file.add(
            Undeliverable(
                id=record.place.id, reason=reason, to=self._options.dead, topic=record.topic,
                partition=record.partition, offset=record.offset, due_ms=None, key=record.key, value=record.value,
                headers=record.headers,
            )
        )  # fmt: skip

    def _batch(self, messages: Sequence[Waiting]) -> pa.RecordBatch:
        names = ("id", "body", "keys", "properties", "born_ms", "due_ms")
        found = {name: [getattr(message, name) for message in messages] for name in names}
        columns = {**found, "unique_key": found["id"], "topic": [self._queue.topic] * len(messages)}
        arrays = [pa.array(columns[field.name], field.type) for field in SCHEMA]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    # ---- beside it --------------------------------------------------------------------------------------

    def _now_and_then(self) -> None:
        """Commit the offsets of Kafka's consumer group, which its tools show, and look for new partitions."""
        now_ms, topic = self._clock.wall_ms(), self._options.own
        if now_ms - self._told_ms >= COMMIT_MS:
            self._told_ms = now_ms
            changed = {at: offset for at, offset in self._stands.items() if self._committed.get(at) != offset}
            if changed:
                self._consumer.commit(
                    offsets=[TopicPartition(topic, at, offset) for at, offset in changed.items()]
                )
                self._committed |= changed
            self._counts.behind = sum(self._behind(at, offset) for at, offset in self._stands.items())
        if now_ms - self._looked_ms >= LOOK_MS:
            self._looked_ms = now_ms
            if self._topics.partitions(topic) > len(self._stands):
                self._sending.result()
                self._begin()

    def _behind(self, partition: int, stands: int) -> int:
        known = self._consumer.get_watermark_offsets(
            TopicPartition(self._options.own, partition), cached=True
        )
        if known is None or known[1] == OFFSET_INVALID:
            return 0
        end = self._ends.get(partition)
        passed = end.end if end is not None and stands >= end.after else stands
        return max(0, known[1] - passed)


def pieces(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield the items in parts of at most BATCH_BYTES, or of one item."""
    begin = size_bytes = 0
    for at, (_, message) in enumerate(items):
        more = 0 if message is None else records.size_bytes(message)
        if size_bytes + more > BATCH_BYTES and at > begin:
            yield items[begin:at]
            begin, size_bytes = at, 0
        size_bytes += more
    if begin < len(items):
        yield items[begin:]
