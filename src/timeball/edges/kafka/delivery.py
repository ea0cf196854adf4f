"""Writes messages from Timeball to Kafka, each as one committed record at its due time, and stores the position.

    pull (a long poll) -> begin -> the records, and the position after them -> commit

A transaction contains records and the position after them, so a crash cannot separate them. The next process begins
with `init_transactions`, which ends the transaction of the earlier process and fences that process. Then it reads the
position: the next offset of Timeball's queue. All messages that are visible when a transaction ends go into the next
one. Between two transactions lie only the few milliseconds that Kafka needs to end the first one.

A record that Kafka refuses permanently ends its transaction: it is too large for its topic, or its topic may not be
written. The bridge finds its message by halving the batch. The message is then written in the next of four forms:

    1  the record, to its topic
    2  a dead letter: the record with Kafka's reason, to the dead letter topic
    3  a dead letter without the value, and a line in a local file
    4  a line in a local file

If a refusal is certain before the write (`TopicLimits`), the message is written in its next form at once. Some errors
of Kafka name the record. Others name only the transaction: such an error counts as one of the record if the transaction
had no other record, the error has occurred twice, and a transaction without the record succeeds.

The producer of a failed transaction cannot begin another one, which would fail for missing sequence numbers, or for a
state that only `init_transactions` ends. So a new producer replaces it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
import pyarrow as pa
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, ResourceType
from confluent_kafka.cimpl import NewTopic

from timeball.edges.kafka import records
from timeball.edges.kafka.options import BridgeOptions, BridgeQueue, Counts, Topics
from timeball.edges.kafka.records import (
    Envelope,
    Headers,
    RecordLocation,
    TopicRules,
    Undeliverable,
    UndeliverableFile,
)
from timeball.io.clock import Clock
from timeball.model import limits
from timeball.model.answers import QueueRange
from timeball.model.bodies import readable_body
from timeball.model.errors import OutOfRange, SetupError

logger = logging.getLogger(__name__)

# ---- limits of Kafka's topics --------------------------------------------------------------------------------
# The limits of a topic are its largest record batch, and whether the bridge may write to it. A record that Kafka
# refuses ends its whole transaction, and requires a new producer. So the bridge asks for the limits before it writes,
# and writes no record that exceeds them. If Kafka does not report the limits (an old version, or no permission to ask),
# the bridge tries to write the record.

LIMITS_KEPT_MS = 10_000  # after this time Kafka is asked for a limit again
LIMITS_WAIT_S = 0.5  # for the answers; no message is delivered meanwhile
SIZE_LIMIT = "max.message.bytes"


class TopicLimit(NamedTuple):
    """The limits of one topic. `size_bytes` is the largest record batch, None if Kafka did not report it."""

    may_write: bool = True
    size_bytes: int | None = None


class TopicLimits:
    """Caches the limits of topics for LIMITS_KEPT_MS. Belongs to one thread."""

    def __init__(self, admin: AdminClient, clock: Clock, *, is_compressed: bool) -> None:
        """`is_compressed`: Kafka's client compresses the records, so their size in Kafka is not known before."""
        self._admin, self._clock, self._is_compressed = admin, clock, is_compressed
        self._limits_by_topic: dict[str, TopicLimit] = {}
        # By topic: when Kafka is asked for its limits again, by the boot clock.
        self._fresh_until_ms: dict[str, int] = {}
        # False after a request without an answer within LIMITS_WAIT_S, until the next answer
        self._is_responsive = True

    def refusal(self, topic: str, size_bytes: int) -> str | None:
        """Explain why Kafka would refuse a record of this size. None if Kafka may accept it.

        Uses the limits that `refresh` has asked for.
        """
        limit = self._limits_by_topic.get(topic, TopicLimit())
        if not limit.may_write:
            return "Kafka: the bridge may not write to this topic"
        # `size_bytes` only counts key, value and headers. A record batch has a few more bytes. A compressed batch may
        # have fewer, so its size decides nothing.
        if limit.size_bytes is not None and size_bytes > limit.size_bytes and not self._is_compressed:
            return f"Kafka: {size_bytes} bytes; the topic takes at most {limit.size_bytes} ({SIZE_LIMIT})"
        return None

    def refresh(self, topics: Iterable[str]) -> None:
        """Ask Kafka for the limits of the topics whose limits are unknown or older than LIMITS_KEPT_MS.

        Waits up to LIMITS_WAIT_S for the answers. A later answer is used from then on. After a request without an
        answer in time, further requests do not wait until Kafka answers again.
        """
        now_ms = self._clock.boot_ms()
        stale_topics = {topic for topic in topics if self._fresh_until_ms.get(topic, 0) <= now_ms}
        if not stale_topics:
            return
        self._fresh_until_ms |= dict.fromkeys(stale_topics, now_ms + LIMITS_KEPT_MS)
        answers = [*self._ask_operations(stale_topics), *self._ask_sizes(stale_topics)]
        if self._is_responsive:
            self._is_responsive = not wait(answers, timeout=LIMITS_WAIT_S).not_done

    def _ask_operations(self, topics: Collection[str]) -> Iterator[Future[Any]]:
        """Ask whether the bridge may write to the topics. Yields the pending answers."""
        answers = self._admin.describe_topics(
            TopicCollection(list(topics)), include_authorized_operations=True, request_timeout=KAFKA_TIMEOUT_S
        )
        for topic, answer in answers.items():
            answer.add_done_callback(partial(self._note_operations, topic))
            yield answer

    def _ask_sizes(self, topics: Collection[str]) -> Iterator[Future[Any]]:
        """Ask for the largest record batch of the topics. Yields the pending answers."""
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        for resource, answer in self._admin.describe_configs(
            resources, request_timeout=KAFKA_TIMEOUT_S
        ).items():
            answer.add_done_callback(partial(self._note_size, resource.name))
            yield answer

    # Threads of Kafka's client call these two methods. Each call replaces one entry, so a reader sees the old or the
    # new entry.

    def _note_operations(self, topic: str, answer: Future[Any]) -> None:
        """Store whether the bridge may write to a topic. An answer without it, or an error, changes nothing."""
        self._is_responsive = True
        if answer.exception() is None and (allowed := answer.result().authorized_operations):
            may_write = AclOperation.WRITE in allowed or AclOperation.ALL in allowed
            self._limits_by_topic[topic] = self._limits_by_topic.get(topic, TopicLimit())._replace(
                may_write=may_write
            )

    def _note_size(self, topic: str, answer: Future[Any]) -> None:
        """Store the largest record batch of a topic. An answer without it, or an error, changes nothing."""
        self._is_responsive = True
        if answer.exception() is None and (setting := answer.result().get(SIZE_LIMIT)) is not None:
            self._limits_by_topic[topic] = self._limits_by_topic.get(topic, TopicLimit())._replace(
                size_bytes=int(setting.value)
            )


# ---- the delivery --------------------------------------------------------------------------------------------


ROWS_MAX = 2_000  # in one transaction
WAIT_MS = 1_000  # of one long poll
INIT_S, ABORT_S = 30.0, 10.0
COMMIT_S = 1.0  # after this time without an answer to a commit, the bridge checks for deleted topics
FAILED_WAIT_S = 0.2  # the pause after a failed transaction, unless a record caused the failure
# The pause between a commit and the next transaction. Kafka answers a commit before it has written the end markers to
# each partition. If the next transaction begins earlier, Kafka asks its client to retry, and the client waits 20 ms.
END_MARKERS_S = 0.004
ABORT_MARKERS_S = 0.02  # the same after an abort, where the client would wait 500 ms
IDLE_MS = 10_000  # after this time without messages, an idle bridge writes its position
ANY_PARTITION = -1  # RD_KAFKA_PARTITION_UA
NO_ENVELOPE = "not a record of Kafka: the bridge's topic is for the bridge alone"
# Errors that Kafka repeats at each try. SIZE_ERRORS concern one record, TOPIC_ERRORS all records of its topic.
SIZE_ERRORS = frozenset(
    {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.RECORD_LIST_TOO_LARGE}
)  # fmt: skip
TOPIC_ERRORS = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION, KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION,
    }
)  # fmt: skip
PERMANENT_ERRORS = SIZE_ERRORS | TOPIC_ERRORS | {KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION}
# A refusal is forgotten after this time, because a topic's limit or permission may change.
REFUSAL_KEPT_MS = 10_000
# The four forms of a message, in the order in which they are tried (see the module docstring).
AS_IT_IS, AS_DEAD_LETTER, WITHOUT_VALUE, ONLY_IN_FILE = range(1, 5)
VALUE_IN_FILE = "the value is in the bridge's file of undeliverable records"
# These mean that another process has taken over. All other fatal errors come from Kafka or the set-up.
FENCED_ERRORS = frozenset(
    {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
)  # fmt: skip


class TopicDeleted(KafkaException):
    """A topic was deleted while a transaction with a record for it was being committed."""


class OutgoingRecord(NamedTuple):
    """A record to write to Kafka: of a message, or of its dead letter."""

    id: str  # of the message
    envelope: Envelope
    value: bytes | None
    due_ms: int | None
    begin_ms: int | None  # from here its lateness counts: the due time, or the acceptance if that was later
    is_dead: bool

    @property
    def size_bytes(self) -> int:
        """The approximate size of the record in Kafka."""
        headers = sum(len(name) + len(value or b"") for name, value in self.envelope.headers)
        return len(self.value or b"") + len(self.envelope.key or b"") + headers


class KnownRefusal(NamedTuple):
    """A refusal by Kafka that applies to all records of a topic with at least `size_bytes`.

    It is forgotten at `until_ms` of the boot clock.
    """

    size_bytes: int
    reason: str
    until_ms: int


class Delivery:
    """Writes the visible messages of one queue. Belongs to one thread. After an error, a new object replaces it."""

    def __init__(self, options: BridgeOptions, queue: BridgeQueue, counts: Counts, clock: Clock) -> None:
        self._options, self._queue, self._counts, self._clock = options, queue, counts, clock
        self._producer = self._new_producer()
        self._topics = Topics(lambda **arguments: self._producer.list_topics(**arguments), clock)
        is_compressed = options.client.get("compression.type", "none") != "none"
        self._topic_limits = TopicLimits(
            AdminClient(options.client_properties()), clock, is_compressed=is_compressed
        )
        self._offset = 0
        self._committed_ns = 0  # when Kafka answered the last commit, by the monotonic clock
        self._rows_max = ROWS_MAX
        self._file = UndeliverableFile(options.undeliverable, counts)
        self._rules = TopicRules(
            options.own, options.out, options.dead, options.position_topic, self._topics.has
        )
        self._reported_error: KafkaError | None = None  # Kafka's permanent error for `_single_record`
        # The reasons why Kafka refused the earlier forms of the message at `_offset`, one for each form.
        self._refusal_reasons: list[str] = []
        self._refusals: dict[str, KnownRefusal] = {}  # by topic, so that the next record does not fail too
        self._filed_ids: set[str] = set()  # ids of messages in the file whose position is not committed yet
        # The record of the current transaction, if it has only one.
        self._single_record: OutgoingRecord | None = None
        # The offset of the last message whose transaction had no other record, and failed.
        self._failed_alone_offset = -1

    def _new_producer(self) -> Producer:
        """Create a transactional producer. Call `init_transactions` before its first transaction."""
        options = self._options
        properties = options.client_properties(
            transactional_id=f"timeball.{options.name}", acks="all", linger_ms=0, partitioner="murmur2_random",
            message_max_bytes=16 * 1024 * 1024, queue_buffering_max_messages=100_000, transaction_timeout_ms=60_000,
            # Kafka refuses a batch larger than its topic's limit, even if each record is smaller.
            batch_size=64 * 1024,
            # A record without an answer fails well before its transaction, which can then still be aborted.
            message_timeout_ms=20_000,
            # A deleted topic is reported as unknown at once, and not after 30 s.
            topic_metadata_propagation_max_ms=1_000,
        )  # fmt: skip
        return Producer(properties, logger=logger)

    def open(self, stop: threading.Event) -> None:
        """Fence an earlier process with this name, and read the position from which to deliver.

        Creates the position topic and the dead letter topic if they are missing. Raises KafkaException, and SetupError
        if the topic of `--out` is missing, the local file cannot be written, or the position does not match
        Timeball's queue.
        """
        options = self._options
        self._file.check()
        bridge_topics = (options.position_topic, options.dead)
        make_topics(options, {name: 1 for name in bridge_topics if self._topics.has(name)})
        if options.out is not None and not self._topics.has(options.out):
            raise SetupError(f"--out {options.out}: Kafka has no such topic; create it, or name another")
        self._producer.init_transactions(INIT_S)
        position, offsets = read_position(options), self._queue.span()
        if position is None:
            if offsets.max:
                raise SetupError(
                    f"--position-topic {options.position_topic}: has no position of {options.name!r}, and Timeball's "
                    f"topic {self._queue.topic!r} is used already: restore the topic, or choose another --name"
                )
            # Write a position before the first record, so that a missing position always means that it was lost.
            self._write([], 0, stop)
        else:
            self._check_position(position, offsets)
        self._offset = position or 0

    def _check_position(self, position: int, offsets: QueueRange) -> None:
        """Raise SetupError if the position is behind the end of Timeball's queue."""
        if position > offsets.max:
            raise SetupError(
                f"--name {self._options.name}: {position} messages were delivered, and Timeball's topic "
                f"{self._queue.topic!r} has had {offsets.max}: this is another data folder, or an older copy; choose "
                "another --name"
            )

    def run(self, stop: threading.Event) -> None:
        """Deliver until `stop` is set.

        Raises SetupError if another process has fenced this bridge, or if Timeball has an older copy of its data
        folder. Also raises the errors in `bridge.RESTART_ERRORS`, after which the caller starts again with a new
        object. An error of a transaction is not raised: the transaction is repeated.
        """
        failures, committed_ms = 0, self._clock.wall_ms()
        while not stop.is_set():
            rows = self._pull()
            is_idle = not rows.num_rows
            if is_idle and self._clock.wall_ms() - committed_ms < IDLE_MS:
                continue
            try:
                if is_idle:
                    # An idle bridge writes its position too, so that it learns when another one has taken over.
                    self._write([], self._offset, stop)
                else:
                    self._deliver(rows, stop)
                failures, committed_ms = 0, self._clock.wall_ms()
            except TopicDeleted as error:
                # The next transaction knows that the topic does not exist, and writes dead letters.
                self._replace_producer(error, stop)
            except KafkaException as error:
                self._replace_producer(error, stop)
                failures += 1
                is_record_at_fault = self._assess_failure(error.args[0], rows.num_rows, failures, stop)
                if not is_record_at_fault and stop.wait(FAILED_WAIT_S):
                    return

    def _assess_failure(
        self, error: KafkaError, row_count: int, failures: int, stop: threading.Event
    ) -> bool:
        """Prepare the next attempt after a failed transaction: fewer messages, or another form of the only message.

        `row_count`: the number of messages in the transaction. `failures`: the number of failed transactions in a row.
        Returns whether a record caused the failure, so that a pause would not help.
        """
        reported_error, self._reported_error = self._reported_error, None
        # The first failure without a permanent reason may be temporary, for example if a Kafka broker restarts.
        is_permanent = reported_error is not None or error.code() in PERMANENT_ERRORS
        if row_count > 1:
            self._rows_max = max(1, row_count // 2) if is_permanent or failures > 1 else ROWS_MAX
            return is_permanent
        has_failed_before, self._failed_alone_offset = self._failed_alone_offset == self._offset, self._offset
        if (
            row_count
            and (is_permanent or has_failed_before)
            and (reported_error is not None or self._can_commit(stop))
        ):
            reason = f"Kafka: {(reported_error or error).str()}"
            self._refusal_reasons.append(reason)
            self._remember_refusal((reported_error or error).code(), reason)
            return True
        return False

    def _can_commit(self, stop: threading.Event) -> bool:
        """Check whether Kafka commits a transaction that only contains the position. If not, replace the producer."""
        try:
            self._write([], self._offset, stop)
            return True
        except KafkaException as error:
            self._replace_producer(error, stop)
            return False

    def _remember_refusal(self, code: int, reason: str) -> None:
        """Remember why Kafka refused `_single_record`, if it will also refuse later records of its topic for a while.

        An error of SIZE_ERRORS concerns the records of the same size or larger, TOPIC_ERRORS all records.
        """
        if (record := self._single_record) is None or code not in SIZE_ERRORS | TOPIC_ERRORS:
            return
        until_ms = self._clock.boot_ms() + REFUSAL_KEPT_MS
        size_bytes = record.size_bytes if code in SIZE_ERRORS else 0
        self._refusals[record.envelope.topic] = KnownRefusal(size_bytes, reason, until_ms)

    def _pull(self) -> pa.RecordBatch:
        """Wait up to WAIT_MS for the next messages, and read them. An empty batch if there are none.

        If retention has removed some messages, they are counted as lost, and the result begins after them.
        Raises SetupError if the queue ends before the position.
        """
        try:
            # A message that was refused is tried alone.
            rows_max = 1 if self._refusal_reasons else self._rows_max
            return self._queue.pull(self._offset, rows_max, WAIT_MS)
        except OutOfRange:
            offsets = self._queue.span()
            self._check_position(self._offset, offsets)
            # The queue may also have reached the position since the pull. The position never moves back.
            if (lost_count := offsets.min - self._offset) > 0:
                logger.error("messages lost to retention before they were delivered messages=%d", lost_count)
                self._counts.lost += lost_count
                self._offset = offsets.min
                self._refusal_reasons.clear()
            return self._queue.pull(self._offset, self._rows_max, 0)

    # ---- one transaction --------------------------------------------------------------------------------

    def _deliver(self, rows: pa.RecordBatch, stop: threading.Event) -> None:
        """Write messages in one transaction, each in its first form that no known refusal excludes.

        Messages at the end of `rows` are left out if they exceed PULL_BYTES_MAX. Raises KafkaException. Then `_offset`
        stays, and `_replace_producer` ends the transaction or learns that it was committed.
        """
        names = ("unique_key", "body", "properties", "due_ms", "accepted_ms", "sys_flag")
        columns = [rows.column(name).to_pylist() for name in names]
        candidates, free_bytes = list[OutgoingRecord](), limits.PULL_BYTES_MAX
        for values in zip(*columns, strict=True):
            candidates.append(self._to_record(*values))
            free_bytes -= candidates[-1].size_bytes
            # Compressed bodies may exceed the bytes, because only their compressed size was limited. The messages after
            # them wait for the next transaction.
            if free_bytes < 0:
                break
        self._topic_limits.refresh({record.envelope.topic for record in candidates})
        chosen = [self._choose_form(record) for record in candidates]
        outgoing = [record for record in chosen if record is not None]
        self._single_record = chosen[0] if len(chosen) == 1 else None
        end_offset = self._offset + len(candidates)
        self._write(outgoing, end_offset, stop)
        now_ms, counts = self._clock.wall_ms(), self._counts
        self._offset = end_offset
        self._refusal_reasons.clear()
        self._rows_max = min(ROWS_MAX, 2 * self._rows_max)
        counts.delivered += len(outgoing)
        self._filed_ids.clear()
        counts.transactions += 1
        counts.undeliverable += sum(record.is_dead for record in outgoing)
        earliest_ms = min(
            (record.begin_ms for record in outgoing if record.begin_ms is not None), default=now_ms
        )
        counts.late_ms = max(counts.late_ms, now_ms - earliest_ms)

    def _write(self, outgoing: list[OutgoingRecord], position: int, stop: threading.Event) -> None:
        """Write records and the position after them in one transaction. Raises KafkaException."""
        is_single = len(outgoing) == 1
        # The pull has used up a part of this pause, or all of it.
        if (remaining_s := END_MARKERS_S - (self._clock.monotonic_ns() - self._committed_ns) / 1e9) > 0:
            stop.wait(remaining_s)
        self._producer.begin_transaction()
        for record in outgoing:
            envelope = record.envelope
            partition = envelope.partition
            # Keep the partition if the topic has it. Otherwise the partitioner of Kafka's Java clients chooses by key.
            if partition is not None and partition >= self._topics.partitions(envelope.topic):
                partition = None
            self._produce(envelope.topic, record.value, envelope.key, partition, envelope.headers, is_single)
        self._produce(
            self._options.position_topic, msgspec.json.encode(Position(position)), POSITION_KEY, 0, [], False
        )
        # The dead letter topic is not checked for deletion. If it is missing, Kafka's refusal leads to the local file.
        self._commit({record.envelope.topic for record in outgoing} - {self._options.dead}, stop)

    def _produce(
        self, topic: str, value: bytes | None, key: bytes | None, partition: int | None, headers: Headers,
        is_single: bool,
    ) -> None:  # fmt: skip
        """Add a record to the transaction. Waits while the client's buffer is full. Raises KafkaException.

        `partition` None means that the client chooses one by the key. With `is_single`, Kafka's error for the record is
        kept in `_reported_error`.
        """
        kafka_partition = ANY_PARTITION if partition is None else partition
        # Only a report about a single record is useful. A callback for each record would cost as much as the record.
        on_report = self._note_report if is_single else None
        while True:
            try:
                self._producer.produce(
                    topic, value, key, kafka_partition, on_report, headers=cast("Any", headers)
                )
                return
            except BufferError:
                self._producer.poll(0.01)
            except KafkaException as error:
                if is_single:
                    self._note_report(error.args[0], None)
                raise

    def _note_report(self, error: KafkaError | None, message: Message | None) -> None:
        """Store a permanent error that Kafka has reported for a record. Kafka's client calls this for `on_report`."""
        # Records that are discarded with their transaction are reported too, with error codes of the client itself.
        if error is not None and error.code() in PERMANENT_ERRORS:
            self._reported_error = error

    def _commit(self, topics: set[str], stop: threading.Event) -> None:
        """Commit the transaction, which has records of `topics`.

        Raises TopicDeleted if one of the topics no longer exists, and KafkaException.
        """
        while True:
            try:
                self._producer.commit_transaction(COMMIT_S)
                self._committed_ns = self._clock.monotonic_ns()
                return
            except KafkaException as error:
                # Without an answer the transaction may be committed. A repeated request, or `init_transactions` of the
                # next process, finds out.
                if not error.args[0].retriable() or stop.is_set():
                    raise
                # For a deleted topic, the client retries until its records time out. All other records would wait.
                if deleted_topics := self._topics.deleted(topics):
                    reason = f"topic {deleted_topics[0]!r} was deleted during the transaction"
                    raise TopicDeleted(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, reason)) from error

    def _replace_producer(self, error: KafkaException, stop: threading.Event) -> None:
        """End a failed transaction, and create a new producer, unless `stop` is set.

        Reads `_offset` anew if the transaction may have been committed. Raises SetupError if another bridge has fenced
        this one, and KafkaException.
        """
        cause = error.args[0]
        if cause.fatal() and cause.code() in FENCED_ERRORS:
            # The bridge does not restart, because two bridges with one name would fence each other for ever.
            raise SetupError(
                f"--name {self._options.name}: another bridge of this name has begun, or this one stood still for "
                f"a minute ({cause.str()})"
            ) from error
        logger.warning("transaction failed reason=%s", cause.str())
        if isinstance(error, TopicDeleted):
            # The client aborts no transaction whose commit is under way. Without the purge, the end of the producer
            # would wait for the records.
            self._producer.purge()
            is_aborted = False
        else:
            is_aborted = self._abort(stop)
        if stop.wait(ABORT_MARKERS_S):
            return
        self._producer = self._new_producer()
        self._producer.init_transactions(INIT_S)
        if not is_aborted:
            self._offset = read_position(self._options) or 0

    def _abort(self, stop: threading.Event) -> bool:
        """Abort the transaction. Returns False if it may still be open: the next `init_transactions` ends it then.

        Raises SetupError if another bridge has fenced this one.
        """
        while True:
            try:
                self._producer.abort_transaction(ABORT_S)
                return True
            except KafkaException as failure:
                if failure.args[0].fatal() and failure.args[0].code() in FENCED_ERRORS:
                    raise SetupError(
                        f"--name {self._options.name}: another bridge of this name has begun ({failure.args[0].str()})"
                    ) from failure
                if not failure.args[0].retriable() or stop.is_set():
                    return False

    # ---- from a message ---------------------------------------------------------------------------------

    def _to_record(
        self,
        unique_key: str | None,
        body: bytes,
        properties: str | None,
        due_ms: int | None,
        accepted_ms: int | None,
        sys_flag: int | None,
    ) -> OutgoingRecord:
        """Build the record of a message, from the values of its row.

        It is a dead letter if the message was not made of a record, or if its topic is missing or not allowed.
        """
        begin_ms = None if due_ms is None else max(due_ms, accepted_ms or 0)
        envelope, message_id = records.envelope_of(properties), unique_key or ""
        body = readable_body(body, sys_flag)
        if envelope is None:
            # Another client of Timeball sent this message, so its destination is unknown.
            return self._dead_letter(
                OutgoingRecord(message_id, Envelope("", None, None, []), body, due_ms, begin_ms, False),
                NO_ENVELOPE,
            )
        record = OutgoingRecord(
            message_id, envelope, None if envelope.is_null else body, due_ms, begin_ms,
            envelope.topic == self._options.dead,
        )  # fmt: skip
        refusal = self._rules.refusal(envelope.topic)
        # Kafka may not list the dead letter topic yet, which the bridge has just made.
        if refusal is None and not record.is_dead and not self._topics.has(envelope.topic):
            refusal = f"Kafka has no topic {envelope.topic[:100]!r}"
        return record if refusal is None else self._dead_letter(record, refusal)

    def _choose_form(self, record: OutgoingRecord) -> OutgoingRecord | None:
        """Choose the first form of a message that no known refusal excludes, and build its record.

        `record`: its first form. Forms that Kafka has refused for this message are skipped. Writes the message to the
        local file if the form demands that. Returns None if only the local file is left. Raises SetupError if that
        file cannot be written.
        """
        reasons, first_form = list(self._refusal_reasons), AS_DEAD_LETTER if record.is_dead else AS_IT_IS
        while (form := first_form + len(reasons)) < ONLY_IN_FILE:
            candidate = self._record_for_form(record, form, reasons)
            if (reason := self._known_refusal(candidate)) is None:
                if form == WITHOUT_VALUE:
                    self._file_away(record, reasons)
                return candidate
            reasons.append(reason)
        self._file_away(record, reasons)
        return None

    def _known_refusal(self, record: OutgoingRecord) -> str | None:
        """Return the reason why Kafka will refuse a record, or None if Kafka may accept it."""
        known_refusal, topic = self._refusals.get(record.envelope.topic), record.envelope.topic
        if (
            known_refusal is not None
            and record.size_bytes >= known_refusal.size_bytes
            and known_refusal.until_ms > self._clock.boot_ms()
        ):
            return known_refusal.reason
        if record.is_dead:  # `_deliver` has asked for the limits of the other topics
            self._topic_limits.refresh((topic,))
        return self._topic_limits.refusal(topic, record.size_bytes)

    def _record_for_form(self, record: OutgoingRecord, form: int, reasons: list[str]) -> OutgoingRecord:
        """Build the record of a message in this form. `reasons` tell why the earlier forms were refused."""
        if form == AS_IT_IS or not reasons:
            return record
        if form == AS_DEAD_LETTER:
            return self._dead_letter(record, reasons[-1])
        value = None if record.value is None else b""
        return self._dead_letter(record._replace(value=value), f"{'; '.join(reasons)}; {VALUE_IN_FILE}")

    def _file_away(self, record: OutgoingRecord, reasons: list[str]) -> None:
        """Append a message to the local file, unless an earlier attempt did so, whose transaction failed.

        `reasons` tell why its forms were refused. Raises SetupError.
        """
        if record.id in self._filed_ids:
            return
        location, envelope = self._source_location(record), record.envelope
        line = Undeliverable(
            id=record.id, reason="; ".join(reasons), to=envelope.topic, topic=location.topic,
            partition=location.partition, offset=location.offset, due_ms=record.due_ms, key=envelope.key,
            value=record.value, headers=envelope.headers,
        )  # fmt: skip
        self._file.add(line)
        self._filed_ids.add(record.id)

    def _dead_letter(self, record: OutgoingRecord, reason: str) -> OutgoingRecord:
        """Build the dead letter of a record, with the reason in its headers."""
        headers = [pair for pair in record.envelope.headers if pair[0] not in records.REASONS]
        headers += records.reason_headers(self._source_location(record), reason)
        envelope = Envelope(self._options.dead, None, record.envelope.key, headers, record.value is None)
        return record._replace(envelope=envelope, is_dead=True)

    def _source_location(self, record: OutgoingRecord) -> RecordLocation:
        """Find the location of the record in Kafka of which a message was made, or else of the message in Timeball."""
        try:
            return RecordLocation.of(record.id)
        except ValueError:
            return RecordLocation(self._queue.topic, 0, self._offset)


# ---- the position of a bridge, a record in Kafka -------------------------------------------------------------
# It is the last record of each transaction, in a separate topic of the bridge. So records and position are committed or
# aborted together. A transaction could also commit the offset of a consumer group instead. But Kafka deletes that
# offset when the group has committed none for a week (`offsets.retention.minutes`). A compacted topic keeps the last
# record of each key for ever.

KAFKA_TIMEOUT_S = 10.0
POSITION_KEY = b"position"
# Only aborted transactions and markers at the ends of transactions can follow the last position. So a read begins this
# many offsets before the end, and each further read this many times as far back.
LOOK_BACK_OFFSETS, LOOK_BACK_FACTOR = 1_000, 16
POSITION_TOPIC_CONFIG = {"cleanup.policy": "compact", "segment.bytes": str(16 * 1024 * 1024)}


class Position(msgspec.Struct, frozen=True):
    """The next offset of Timeball's queue to deliver."""

    offset: int


def make_topics(options: BridgeOptions, existing: dict[str, int]) -> None:
    """Create the position topic and the dead letter topic, unless they are in `existing`. Raises SetupError."""
    configs = {options.position_topic: POSITION_TOPIC_CONFIG, options.dead: {}}
    missing = [
        NewTopic(name, 1, -1, config=config) for name, config in configs.items() if name not in existing
    ]
    if not missing:
        return
    # In a variable, because the answers are cancelled when the client is freed.
    admin = AdminClient(options.client_properties())
    for name, creation in admin.create_topics(missing).items():
        try:
            creation.result(KAFKA_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise SetupError(
                    f"Kafka does not let the bridge create topic {name!r} ({error.args[0].str()}): create it with one "
                    "partition, the topic of --position-topic also with cleanup.policy=compact"
                ) from error


def read_position(options: BridgeOptions) -> int | None:
    """Read the position of the last committed transaction. None if there is none. Raises KafkaException.

    Call this right after `init_transactions`, so that no transaction of this bridge is open.
    """
    properties = options.client_properties(
        group_id=f"timeball.{options.name}.position", enable_auto_commit=False, auto_offset_reset="earliest",
        isolation_level="read_committed", enable_partition_eof=True,
    )  # fmt: skip
    consumer = Consumer(properties)
    try:
        topic = options.position_topic
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=KAFKA_TIMEOUT_S)
        look_back = LOOK_BACK_OFFSETS
        while True:
            start_offset = max(low, high - look_back)
            position = _last_position(consumer, TopicPartition(topic, 0, start_offset))
            if position is not None or start_offset == low:
                return position
            look_back *= LOOK_BACK_FACTOR
    finally:
        consumer.close()


def _last_position(consumer: Consumer, start: TopicPartition) -> int | None:
    """Read a partition from `start` to its end, and decode the position in the last record. None without a record.

    Raises KafkaException.
    """
    consumer.assign([start])
    position = None
    while True:
        message = consumer.poll(KAFKA_TIMEOUT_S)
        if message is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"no answer from topic {start.topic!r}"))
        error = message.error()
        if error is None:
            value = message.value()
            position = msgspec.json.decode(value, type=Position).offset if value else None
        elif error.code() == KafkaError._PARTITION_EOF:
            return position
        else:
            raise KafkaException(error)
