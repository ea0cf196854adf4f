"""Copies records from Kafka into Timeball. Each record becomes one message, even if it is read several times.

    read -> messages -> Timeball's log, with the next position in the same frame -> offsets of Kafka's consumer group

Reading continues at the position in Timeball's log, not at Kafka's consumer group offset. So a record whose answer
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import methodcaller
from typing import NamedTuple

import pyarrow as pa
from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from timeball.client.exchange import Source
from timeball.edges.kafka import records
from timeball.edges.kafka.options import BridgeOptions, BridgeQueue, Counts, Topics
from timeball.edges.kafka.records import BridgeMessage, Record, TopicRules, Undeliverable, UndeliverableFile
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
BATCH_BYTES = 2 * 1024 * 1024  # with the other columns, half of the broker's limit for a batch
POLL_S = 0.5  # the longest wait for the first record of a batch
LINGER_S = 0.01  # records that arrive this soon share a batch, because each batch costs the broker a commit
FAR_LINGER_S = 0.05  # the same while the next record is due later than SOON_MS from now
SOON_MS = 500
PARTITION_CHECK_MS = 10_000  # between checks for added partitions
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

# A record, and the message made of it. None: only its position is sent.
Item = tuple[Record, BridgeMessage | None]
# These errors concern every message of this bridge, so smaller batches would fail too.
BRIDGE_WIDE_ERRORS = (Conflict, Unauthorized, Forbidden, NotFound)


# For a name that is not UTF-8, `Message.headers` returns a list and leaves an exception set. A direct call that Python
# has specialized does not see this exception, which then ends a later and unrelated call. A call by `methodcaller` is
# always checked, and raises SystemError.
_read_headers: Callable[[Message], records.Headers | None] = methodcaller("headers")


class PartitionEnd(NamedTuple):
    """The end of a partition, when the consumer reached it.

    The offsets from `after` to `end` belong to aborted transactions and to the markers at the ends of transactions.
    """

    after: int  # the offset after the last record
    end: int  # the offset at which the partition ended


class Intake:
    """Copies the records of one topic. After an error, a new object replaces it.

    Reads in the thread that calls `run`, and sends in another thread.
    """

    def __init__(
        self, options: BridgeOptions, queue: BridgeQueue, source: Source, counts: Counts, clock: Clock
    ) -> None:
        """`queue` cancels messages, `source` sends them with their positions. `counts` is changed here."""
        self._options, self._queue, self._source = options, queue, source
        self._counts, self._clock = counts, clock
        properties = options.client_properties(
            group_id=options.name, enable_auto_commit=False, auto_offset_reset="error",
            isolation_level="read_committed", fetch_wait_max_ms=100, queued_max_messages_kbytes=32 * 1024,
            enable_partition_eof=True,
        )  # fmt: skip
        self._consumer = Consumer(properties, logger=logger)
        self._topics = Topics(self._consumer.list_topics, clock)
        self._rules = TopicRules(
            options.own, options.out, options.dead, options.position_topic, self._topics.has
        )
        self._file = UndeliverableFile(options.undeliverable, counts)
        # The position of each partition in Timeball's log. The sending thread changes these values. Partitions are only
        # added while it is idle.
        self._log_positions: dict[int, int] = {}
        self._next_offsets: dict[int, int] = {}  # by partition: the offset after the last record read
        self._partition_ends: dict[int, PartitionEnd] = {}  # by partition
        self._send_thread, self._pending_send = ThreadPoolExecutor(1, "kafka-send"), Future[None]()
        self._pending_send.set_result(None)
        self._group_offsets: dict[int, int] = {}  # by partition: the offset that Kafka's consumer group has
        self._partitions_checked_ms = self._offsets_committed_ms = 0
        self._linger_s = LINGER_S  # for the next batch; depends on the due times of the previous one

    def run(self, stop: threading.Event) -> None:
        """Copy records until `stop` is set, then close the consumer and the source.

        Raises the errors in `bridge.RESTART_ERRORS`, after which the caller starts again with a new object. Raises
        SetupError, Unauthorized, Forbidden and NotFound, which need an operator.
        """
        try:
            self._assign_partitions()
            while not stop.is_set():
                batch = list(self._poll_records())
                if batch:
                    self._accept(batch, stop)
                else:
                    self._pending_send.result()
                self._commit_and_check_partitions()
            self._pending_send.result()
        finally:
            self._send_thread.shutdown()
            self._consumer.close()
            self._source.close()

    # ---- reading ----------------------------------------------------------------------------------------

    def _assign_partitions(self) -> None:
        """Assign all partitions to the consumer, each from its position in the log. Raises SetupError."""
        topic, partition_count = self._options.own, self._topics.partitions(self._options.own)
        if not partition_count:
            raise SetupError(f"--in {topic}: Kafka has no such topic; create it, or name another")
        log_positions = self._source.positions()
        # If a partition is added to a known topic, all its records are read.
        start = "earliest" if log_positions else self._options.start
        start_offsets = [
            self._start_offset(partition, log_positions.get(partition), start)
            for partition in range(partition_count)
        ]
        self._log_positions = dict(enumerate(start_offsets))
        self._next_offsets = dict(self._log_positions)
        # Store the position of a new partition before its first record is read. Otherwise a bridge that starts at the
        # end of the topic, and restarts before it has sent a record, would skip the records that arrived meanwhile.
        # Store the position after lost records too. Otherwise they would be counted again until the next record.
        if end := {
            partition: offset
            for partition, offset in self._log_positions.items()
            if log_positions.get(partition) != offset
        }:
            begin = {partition: log_positions.get(partition, offset) for partition, offset in end.items()}
            self._source.send(self._to_batch([]), begin, end)
        self._consumer.assign(
            [TopicPartition(topic, partition, offset) for partition, offset in enumerate(start_offsets)]
        )
        self._partitions_checked_ms = self._clock.wall_ms()

    def _start_offset(self, partition: int, log_position: int | None, start: str) -> int:
        """Find the offset to read a partition from.

        `log_position` is the partition's position in the log, None for a new partition, which begins at `start`
        (earliest or latest). Raises SetupError if the partition ends before that position.
        """
        topic = self._options.own
        low, high = self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=TIMEOUT_S)
        if log_position is None:
            return int(low if start == "earliest" else high)
        if log_position > high:
            raise SetupError(
                f"--name {self._options.name}: the log continues at offset {log_position} of {topic}/{partition}, "
                f"which ends at {high}: the topic was created again or has lost records; choose another --name to "
                "read it from the start"
            )
        if log_position < low:
            logger.error(
                "records lost to retention before they were read topic=%s partition=%d offsets=%d",
                topic,
                partition,
                low - log_position,
            )
            self._counts.lost += low - log_position
        return max(log_position, int(low))

    def _poll_records(self) -> Iterator[Record]:
        """Yield the next batch of records. Waits up to POLL_S for the first one, then `_linger_s` for further records.

        Raises KafkaException.
        """
        first_message = self._consumer.poll(POLL_S)
        if first_message is None:
            return
        for message in (first_message, *self._consumer.consume(BATCH_ROWS - 1, self._linger_s)):
            if (error := message.error()) is None:
                record = self._to_record(message)
                self._next_offsets[record.partition] = record.offset + 1
                yield record
            elif error.code() == KafkaError._PARTITION_EOF:
                partition = message.partition() or 0
                self._partition_ends[partition] = PartitionEnd(
                    self._next_offsets[partition], message.offset() or 0
                )
            else:
                raise KafkaException(error)

    def _to_record(self, message: Message) -> Record:
        """Convert a message of Kafka's client to a Record. A record without a timestamp gets the current time."""
        timestamp_ms, fault = message.timestamp()[1], ""
        headers: records.Headers = []
        try:
            headers = _read_headers(message) or []
        except SystemError:  # Kafka does not check the names
            fault = "a header name is not UTF-8"
        return Record(
            message.topic() or "", message.partition() or 0, message.offset() or 0, message.key(), message.value(),
            headers, timestamp_ms if timestamp_ms > 0 else self._clock.wall_ms(), fault,
        )  # fmt: skip

    # ---- converting and sending -------------------------------------------------------------------------

    def _accept(self, batch: Sequence[Record], stop: threading.Event) -> None:
        """Convert a batch while the earlier batch is being sent, then start to send it.

        Raises the error of the earlier batch.
        """
        items = self._convert(batch)
        self._pending_send.result()
        self._pending_send = self._send_thread.submit(self._send_all, items, stop)

    def _send_all(self, items: Sequence[Item], stop: threading.Event) -> None:
        """Send the items in batches of limited size. Runs in the sending thread."""
        for batch in split_batches(items):
            self._send(batch, stop)

    def _convert(self, batch: Sequence[Record]) -> list[Item]:
        """Convert records to messages, and cancel the messages of records with the header `cancel`.

        A record that cancels has no message, and neither has a record that a later record of the batch cancels. Before
        a cancel, the earlier batch is awaited (see the module docstring). Raises the errors of the cancel.
        """
        now_ms = self._clock.wall_ms()
        earliest_due_ms = now_ms + limits.DELAY_MS_MAX
        items: list[Item] = []
        indexes_by_key: dict[str, list[int]] = {}  # key -> the indexes in `items` of the messages to send
        cancelled_keys: set[str] = set()
        for record in batch:
            if record.fault:
                message = records.dead_letter(record, self._options.dead, record.fault)
            elif not records.is_cancel(record):
                message = self._convert_record(record, now_ms)
                earliest_due_ms = min(earliest_due_ms, message.due_ms or now_ms)
                if message.keys:
                    indexes_by_key.setdefault(message.keys, []).append(len(items))
            elif record.key is None:
                message = records.dead_letter(record, self._options.dead, "a cancel without a key")
            else:
                cancelled_keys.add(key := records.timeball_key(record.topic, record.key))
                for index in indexes_by_key.pop(key, ()):
                    items[index] = items[index][0], None
                    self._counts.cancelled += 1
                message = None
            items.append((record, message))
        self._linger_s = (
            FAR_LINGER_S if earliest_due_ms > now_ms + SOON_MS and not cancelled_keys else LINGER_S
        )
        if cancelled_keys:
            self._pending_send.result()
            self._counts.cancelled += self._queue.cancel(sorted(cancelled_keys))
        return items

    def _convert_record(self, record: Record, now_ms: int) -> BridgeMessage:
        """Convert a record to a message, or to a dead letter.

        An unexpected error is logged, and gives a dead letter without key and headers.
        """
        try:
            return records.message_of(record, self._rules, now_ms)
        # A record may contain any bytes, and must not block the records after it.
        except Exception as error:
            logger.exception("record not understood place=%s", record.location.id)
            return records.dead_letter(record._replace(key=None, headers=[]), self._options.dead, repr(error))

    def _send(self, items: Sequence[Item], stop: threading.Event) -> None:
        """Send the messages of these records with the positions after them. Does nothing after a stop.

        While Timeball accepts nothing more (OverLimit), the batch is repeated. A message that Timeball refuses becomes
        a dead letter. Raises Unavailable and BRIDGE_WIDE_ERRORS.
        """
        # After a stop, an earlier batch may not have been sent. The position after this batch would skip its records.
        if stop.is_set():
            return
        end = {record.partition: record.offset + 1 for record, _ in items}
        begin = {partition: self._log_positions[partition] for partition in end}
        messages = [message for _, message in items if message is not None]
        while True:
            try:
                self._source.send(self._to_batch(messages), begin, end)
                break
            except OverLimit as error:  # the disk is full or slow, and the records stay in Kafka meanwhile
                logger.warning("Timeball takes no more now reason=%s", error)
                if stop.wait(FULL_WAIT_S):
                    return
            except BRIDGE_WIDE_ERRORS:
                raise
            except RequestError as error:
                self._send_halves(items, error, stop)
                return
        self._log_positions |= end
        self._counts.taken += len(items)
        self._counts.dead += sum(message.is_dead for message in messages)

    def _send_halves(self, items: Sequence[Item], error: RequestError, stop: threading.Event) -> None:
        """Send a refused batch in halves, until the record that Timeball refuses is alone.

        That record is sent as a dead letter. If its dead letter is refused too, it goes to the local file.
        """
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
                id=record.location.id, reason=reason, to=self._options.dead, topic=record.topic,
                partition=record.partition, offset=record.offset, due_ms=None, key=record.key, value=record.value,
                headers=record.headers,
            )
        )  # fmt: skip

    def _to_batch(self, messages: Sequence[BridgeMessage]) -> pa.RecordBatch:
        """Convert messages to a batch of SCHEMA, for the bridge's topic in Timeball."""
        names = ("id", "body", "keys", "properties", "born_ms", "due_ms")
        values = {name: [getattr(message, name) for message in messages] for name in names}
        columns = {**values, "unique_key": values["id"], "topic": [self._queue.topic] * len(messages)}
        arrays = [pa.array(columns[field.name], field.type) for field in SCHEMA]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    # ---- consumer group and new partitions --------------------------------------------------------------

    def _commit_and_check_partitions(self) -> None:
        """Commit the offsets of Kafka's consumer group, update `counts.behind`, and start to read added partitions.

        Both happen at intervals: COMMIT_MS and PARTITION_CHECK_MS. The committed offsets are only for Kafka's tools.

        Raises KafkaException and SetupError, and the error of the batch that is being sent.
        """
        now_ms, topic = self._clock.wall_ms(), self._options.own
        if now_ms - self._offsets_committed_ms >= COMMIT_MS:
            self._offsets_committed_ms = now_ms
            changed_offsets = {
                partition: offset
                for partition, offset in self._log_positions.items()
                if self._group_offsets.get(partition) != offset
            }
            if changed_offsets:
                self._consumer.commit(
                    offsets=[
                        TopicPartition(topic, partition, offset)
                        for partition, offset in changed_offsets.items()
                    ]
                )
                self._group_offsets |= changed_offsets
            self._counts.behind = sum(
                self._partition_lag(partition, offset) for partition, offset in self._log_positions.items()
            )
        if now_ms - self._partitions_checked_ms >= PARTITION_CHECK_MS:
            self._partitions_checked_ms = now_ms
            if self._topics.partitions(topic) > len(self._log_positions):
                self._pending_send.result()
                self._assign_partitions()

    def _partition_lag(self, partition: int, log_position: int) -> int:
        """Count the offsets of a partition that are not in Timeball's log yet. 0 if its end is not known."""
        watermarks = self._consumer.get_watermark_offsets(
            TopicPartition(self._options.own, partition), cached=True
        )
        if watermarks is None or watermarks[1] == OFFSET_INVALID:
            return 0
        end = self._partition_ends.get(partition)
        next_offset = end.end if end is not None and log_position >= end.after else log_position
        return max(0, watermarks[1] - next_offset)


def split_batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Split items into batches of at most BATCH_BYTES. A single larger item is a batch of its own."""
    begin = size_bytes = 0
    for index, (_, message) in enumerate(items):
        message_bytes = 0 if message is None else records.size_bytes(message)
        if size_bytes + message_bytes > BATCH_BYTES and index > begin:
            yield items[begin:index]
            begin, size_bytes = index, 0
        size_bytes += message_bytes
    if begin < len(items):
        yield items[begin:]
