"""From Timeball into Kafka: each message that is visible becomes one committed record, at its instant.

    pull (a long poll) -> begin -> the records, and the position behind them -> commit

Record and position are in Kafka together or not at all, so a crash leaves no half. The next process begins with
`init_transactions`, which ends the transaction of the one before and fences that process, and then reads the position.
All that is visible when a transaction ends goes with the next one: there is no interval but the few milliseconds that
Kafka needs to end a transaction.

A record that Kafka refuses for good, as too large for its topic, ends its transaction. Its message is then found by
halves, and delivered to the dead letter topic, with Kafka's reason.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, NamedTuple, cast

import msgspec
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from timeball.clock import Clock
from timeball.errors import OutOfRange, SetupError
from timeball.kafka import records
from timeball.kafka.counts import Counts
from timeball.kafka.options import BridgeOptions
from timeball.kafka.position import KEY, Position, make_topics, read_position
from timeball.kafka.records import Envelope, Headers, Place
from timeball.kafka.topics import Topics
from timeball.kafka.waiting import WaitingQueue

logger = logging.getLogger(__name__)

ROWS_MAX = 2_000  # of a transaction
WAIT_MS = 1_000
INIT_S, COMMIT_S = 30.0, 10.0
FAILED_WAIT_S = 0.2
# Kafka answers a commit before it has marked the end in each partition. A transaction that begins earlier is told to
# come again, and its client does so after 20 ms.
MARKS_S = 0.004
IDLE_MS = 10_000
ANY_PARTITION = -1  # RD_KAFKA_PARTITION_UA
STRANGE = "not a record of Kafka: the bridge's topic is for the bridge alone"
# Of one record, and for good: to try again gives the same answer.
OF_A_RECORD = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION,
        KafkaError.POLICY_VIOLATION,
    }
)  # fmt: skip


class Outgoing(NamedTuple):
    """A record to be written, a message's or its dead letter; `id` is the message's."""

    id: str
    envelope: Envelope
    value: bytes | None
    due_ms: int | None
    is_dead: bool


class Delivery:
    """Writes what is visible of one queue. Belongs to one thread; one that has raised is replaced by a new one."""

    def __init__(self, options: BridgeOptions, queue: WaitingQueue, counts: Counts, clock: Clock) -> None:
        self._options, self._queue, self._counts, self._clock = options, queue, counts, clock
        properties = options.client_properties(
            transactional_id=f"timeball.{options.name}", acks="all", linger_ms=0, partitioner="murmur2_random",
            message_max_bytes=16 * 1024 * 1024, queue_buffering_max_messages=100_000, message_timeout_ms=60_000,
            transaction_timeout_ms=60_000,
        )  # fmt: skip
        self._producer = Producer(properties, logger=logger)
        self._topics = Topics(self._producer.list_topics, clock)
        self._offset = 0
        self._committed_ns = 0  # when the last commit was answered, by the monotonic clock
        self._rows_max = ROWS_MAX
        self._refusal: KafkaError | None = None  # of the only record of a transaction

    def open(self, stop: threading.Event) -> None:
        """End what another process of this name has begun, and learn where to go on; raise SetupError."""
        options = self._options
        own = (options.position_topic, options.dead)
        make_topics(options, {name: 1 for name in own if self._topics.has(name)})
        if options.out is not None and not self._topics.has(options.out):
            raise SetupError(f"--out {options.out}: Kafka has no such topic; make it, or name another")
        self._producer.init_transactions(INIT_S)
        found, span = read_position(options), self._queue.span()
        if found is None:
            if span.max:
                raise SetupError(
                    f"--position-topic {options.position_topic}: has no position of {options.name!r}, and Timeball's "
                    f"topic {self._queue.topic!r} is used already: restore the topic, or choose another --name"
                )
            # Before the first record is taken, so that a position that is not there is always one that was lost.
            self._write([], 0, stop)
        elif found > span.max:
            raise SetupError(
                f"--name {options.name}: {found} messages were delivered, and Timeball's topic {self._queue.topic!r} "
                f"has had {span.max}: this is another data folder, or an older copy; choose another --name"
            )
        self._offset = found or 0

    def run(self, stop: threading.Event) -> None:
        """Deliver until `stop` is set. Raises KafkaException, Unavailable: begin anew; SetupError when fenced."""
        failures, wrote_ms = 0, self._clock.wall_ms()
        while not stop.is_set():
            rows = self._pull()
            is_idle = not rows.num_rows
            if is_idle and self._clock.wall_ms() - wrote_ms < IDLE_MS:
                continue
            try:
                if is_idle:
                    # So that a bridge with nothing to deliver is told when another has taken over.
                    self._write([], self._offset, stop)
                else:
                    self._deliver(rows, stop)
                failures, wrote_ms = 0, self._clock.wall_ms()
            except KafkaException as error:
                self._abort(error, stop)
                failures += 1
                # The first failure may have been Kafka's; behind the second, a record's own is looked for.
                self._rows_max = max(1, rows.num_rows // 2) if failures > 1 else ROWS_MAX
                if stop.wait(FAILED_WAIT_S):
                    return

    def _pull(self) -> pa.RecordBatch:
        try:
            # The one that was refused, and no other.
            rows = self._rows_max if self._refusal is None else 1
            return self._queue.pull(self._offset, rows, WAIT_MS)
        except OutOfRange:
            first = self._queue.span().min
            logger.error("messages let go before they were delivered messages=%d", first - self._offset)
            self._counts.lost += max(0, first - self._offset)
            self._offset = first
            return self._queue.pull(self._offset, self._rows_max, 0)

    # ---- one transaction --------------------------------------------------------------------------------

    def _deliver(self, rows: pa.RecordBatch, stop: threading.Event) -> None:
        names = ("unique_key", "body", "properties", "due_ms")
        columns = [rows.column(name).to_pylist() for name in names]
        found = [self._outgoing(*values) for values in zip(*columns, strict=True)]
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            found = [self._refused(found[0], f"Kafka: {refusal.str()}")]
        end = self._offset + rows.num_rows
        self._write(found, end, stop)
        now_ms, counts = self._clock.wall_ms(), self._counts
        self._offset = end
        self._rows_max = min(ROWS_MAX, 2 * self._rows_max)
        counts.delivered += len(found)
        counts.transactions += 1
        counts.undeliverable += sum(one.is_dead for one in found)
        first_due_ms = min((one.due_ms for one in found if one.due_ms is not None), default=now_ms)
        counts.late_ms = max(counts.late_ms, now_ms - first_due_ms)

    def _write(self, found: list[Outgoing], position: int, stop: threading.Event) -> None:
        """Write records and the position behind them, all or none."""
        alone = len(found) == 1
        # The pull has taken a part of it, or all.
        if (left_s := MARKS_S - (self._clock.monotonic_ns() - self._committed_ns) / 1e9) > 0:
            stop.wait(left_s)
        self._producer.begin_transaction()
        for one in found:
            envelope = one.envelope
            partition = envelope.partition
            # Kept where the topic has it; elsewhere Kafka's own rule by the key, that of its Java clients.
            if partition is not None and partition >= self._topics.partitions(envelope.topic):
                partition = None
            self._produce(envelope.topic, one.value, envelope.key, partition, envelope.headers, alone)
        self._produce(
            self._options.position_topic, msgspec.json.encode(Position(position)), KEY, 0, [], False
        )
        self._commit(stop)

    def _produce(
        self, topic: str, value: bytes | None, key: bytes | None, partition: int | None, headers: Headers, alone: bool
    ) -> None:  # fmt: skip
        chosen = ANY_PARTITION if partition is None else partition
        # Only of a record that is alone its own refusal is wanted: a call for each costs as much as the record.
        told = self._note if alone else None
        while True:
            try:
                self._producer.produce(topic, value, key, chosen, told, headers=cast("Any", headers))
                return
            except BufferError:
                self._producer.poll(0.01)
            except KafkaException as error:
                if alone:
                    self._note(error.args[0], None)
                raise

    def _note(self, error: KafkaError | None, message: Message | None) -> None:
        if error is not None and error.code() in OF_A_RECORD:
            self._refusal = error

    def _commit(self, stop: threading.Event) -> None:
        while True:
            try:
                self._producer.commit_transaction(COMMIT_S)
                self._committed_ns = self._clock.monotonic_ns()
                return
            except KafkaException as error:
                # Without an answer it may be committed: only asking again tells, or the next process's first request.
                if not error.args[0].retriable() or stop.is_set():
                    raise

    def _abort(self, error: KafkaException, stop: threading.Event) -> None:
        """End a transaction that has failed; raise what makes a new producer necessary."""
        cause = error.args[0]
        if cause.fatal():
            # Not begun anew here: two bridges of one name would fence each other for ever.
            raise SetupError(
                f"--name {self._options.name}: another bridge of this name has begun, or this one stood still for "
                f"a minute ({cause.str()})"
            ) from error
        logger.warning("transaction failed reason=%s", cause.str())
        while True:
            try:
                self._producer.abort_transaction(COMMIT_S)
                self._producer.poll(0)  # reports of what was written are of no use any more
                return
            except KafkaException as failure:
                if not failure.args[0].retriable() or stop.is_set():
                    raise

    # ---- from a message ---------------------------------------------------------------------------------

    def _outgoing(
        self, name: str | None, body: bytes, properties: str | None, due_ms: int | None
    ) -> Outgoing:
        envelope, id = records.envelope_of(properties), name or ""
        if envelope is None:
            # Of another client of Timeball's: what it is for is not known.
            return self._dead(Outgoing(id, Envelope("", None, None, []), body, due_ms, False), STRANGE)
        value = None if envelope.is_null else body
        return Outgoing(id, envelope, value, due_ms, envelope.topic == self._options.dead)

    def _refused(self, one: Outgoing, reason: str) -> Outgoing:
        if not one.is_dead:
            return self._dead(one, reason)
        # A dead letter that is refused, too, goes without its value: the record is still in the topic of --in.
        return self._dead(one._replace(value=b""), f"{reason}; {records.LEFT}")

    def _dead(self, one: Outgoing, reason: str) -> Outgoing:
        try:
            place = Place.of(one.id)
        except ValueError:
            place = Place(self._queue.topic, 0, self._offset)
        headers = [pair for pair in one.envelope.headers if pair[0] not in records.REASONS]
        headers += records.reasons(place, reason)
        envelope = Envelope(self._options.dead, None, one.envelope.key, headers, one.value is None)
        return one._replace(envelope=envelope, is_dead=True)
