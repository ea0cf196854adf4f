"""From Timeball into Kafka: each visible message becomes one committed record, at its due time.

    pull (a long poll) -> begin -> the records, and the position after them -> commit

Record and position are in Kafka together or not at all, so a crash leaves no half. The next process begins with
`init_transactions`, which ends the transaction of the earlier process and fences that process. Then it reads the
position. All messages that are visible when a transaction ends go into the next one. The only interval is the few
milliseconds that Kafka needs to end a transaction.

A record that Kafka refuses permanently ends its transaction: it is too large for its topic, or its topic may not be
written. The bridge finds its message by halving the batch, and the message takes the next of four ways:

    1  the record, to its topic
    2  a dead letter: the record with Kafka's reason, to the dead letter topic
    3  a dead letter without the value, and a line in a local file
    4  a line in a local file

A record whose refusal is certain (`topic_limits`) takes the next way at once. Kafka reports some other errors for the
record, and others only for the transaction. If the transaction has a single record, the bridge blames the record when
the error comes twice and a transaction without the record succeeds.

Each failed transaction costs its producer: the next transaction would fail for missing sequence numbers, or for a state
that only `init_transactions` ends.
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
from timeball.edges.kafka.options import BridgeOptions, Counts, Topics
from timeball.edges.kafka.records import Envelope, Headers, Place, Rules
from timeball.edges.kafka.undeliverable import Undeliverable, UndeliverableFile
from timeball.edges.kafka.waiting import WaitingQueue
from timeball.io.clock import Clock
from timeball.model.errors import OutOfRange, SetupError

# Kafka's limits for writes to a topic, which the bridge asks for before it writes a record.
#
# A record that Kafka refuses ends its whole transaction, and costs a new producer. So the bridge does not write a
# record that is certain to be refused, because its topic may not be written or its bytes exceed the topic's limit. If
# Kafka does not report the limits (an old version, or no permission to ask), the record is tried.

KEPT_MS = 10_000  # after this time a limit is asked for again
WAIT_S = 0.5  # no message is delivered meanwhile
SIZE = "max.message.bytes"


class Limit(NamedTuple):
    """The limits of one topic. `size_bytes` limits a record batch. None if Kafka did not report it."""

    may_write: bool = True
    size_bytes: int | None = None


class TopicLimits:
    """Stores the limits of topics, and renews them every few seconds. Belongs to one thread."""

    def __init__(self, admin: AdminClient, clock: Clock, *, is_compressed: bool) -> None:
        self._admin, self._clock, self._is_compressed = admin, clock, is_compressed
        self._known: dict[str, Limit] = {}
        # by topic: when its limits are asked for again, by the boot clock
        self._until_ms: dict[str, int] = {}
        self._is_answered = True  # False after a request without an answer in time, until the next answer

    def refusal(self, topic: str, size_bytes: int) -> str | None:
        """Find the reason for which Kafka would refuse a record of this size. None if Kafka may accept it.

        Call `look` before, which asks for the limits.
        """
        limit = self._known.get(topic, Limit())
        if not limit.may_write:
            return "Kafka: the bridge may not write to this topic"
        # `size_bytes` only counts key, value and headers. A record batch has a few more bytes, and a compressed one
        # fewer.
        if limit.size_bytes is not None and size_bytes > limit.size_bytes and not self._is_compressed:
            return f"Kafka: {size_bytes} bytes; the topic takes at most {limit.size_bytes} ({SIZE})"
        return None

    def look(self, topics: Iterable[str]) -> None:
        """Ask Kafka for the limits of those topics whose limits are unknown or too old.

        Waits up to WAIT_S for the answers. A later answer counts from then on. After a request without an answer,
        further requests do not wait.
        """
        now_ms = self._clock.boot_ms()
        wanted = {topic for topic in topics if self._until_ms.get(topic, 0) <= now_ms}
        if not wanted:
            return
        self._until_ms |= dict.fromkeys(wanted, now_ms + KEPT_MS)
        asked = [*self._ask_operations(wanted), *self._ask_sizes(wanted)]
        if self._is_answered:
            self._is_answered = not wait(asked, timeout=WAIT_S).not_done

    def _ask_operations(self, topics: Collection[str]) -> Iterator[Future[Any]]:
        asked = self._admin.describe_topics(
            TopicCollection(list(topics)), include_authorized_operations=True, request_timeout=TIMEOUT_S
        )
        for topic, answer in asked.items():
            answer.add_done_callback(partial(self._note_operations, topic))
            yield answer

    def _ask_sizes(self, topics: Collection[str]) -> Iterator[Future[Any]]:
        wanted = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        for resource, answer in self._admin.describe_configs(wanted, request_timeout=TIMEOUT_S).items():
            answer.add_done_callback(partial(self._note_size, resource.name))
            yield answer

    # Threads of Kafka's client call these. Each call replaces one entry, so a reader sees the old entry or the new one.

    def _note_operations(self, topic: str, answer: Future[Any]) -> None:
        self._is_answered = True
        if answer.exception() is None and (allowed := answer.result().authorized_operations):
            may_write = AclOperation.WRITE in allowed or AclOperation.ALL in allowed
            self._known[topic] = self._known.get(topic, Limit())._replace(may_write=may_write)

    def _note_size(self, topic: str, answer: Future[Any]) -> None:
        self._is_answered = True
        if answer.exception() is None and (found := answer.result().get(SIZE)) is not None:
            self._known[topic] = self._known.get(topic, Limit())._replace(size_bytes=int(found.value))


logger = logging.getLogger(__name__)

ROWS_MAX = 2_000  # in one transaction
WAIT_MS = 1_000  # of one long poll
INIT_S, ABORT_S = 30.0, 10.0
COMMIT_S = 1.0  # after this time without an answer, the bridge looks for topics that were deleted meanwhile
FAILED_WAIT_S = 0.2  # after a failed transaction, unless a record was to blame
# Kafka answers a commit before it has written the end markers to each partition. If the next transaction begins
# earlier, Kafka asks its client to retry, and the client waits 20 ms.
MARKS_S = 0.004
ABORT_MARKS_S = 0.02  # the same after an abort, where the client would wait 500 ms
IDLE_MS = 10_000  # after this time without messages, an idle bridge writes its position
ANY_PARTITION = -1  # RD_KAFKA_PARTITION_UA
STRANGE = "not a record of Kafka: the bridge's topic is for the bridge alone"
# Errors that Kafka repeats at each try. Those of size concern one record, the others all records of its topic.
OF_SIZE = frozenset(
    {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.RECORD_LIST_TOO_LARGE}
)  # fmt: skip
OF_A_TOPIC = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION, KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION,
    }
)  # fmt: skip
LASTING = OF_SIZE | OF_A_TOPIC | {KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION}
# a topic's limit or permission may change, so a record is tried again after this time
REFUSAL_KEPT_MS = 10_000
FIRST_WAY, SECOND_WAY, WAY_WITHOUT_VALUE, LAST_WAY = range(1, 5)
FILED = "the value is in the bridge's file of undeliverable records"
# These mean that another process has taken over. Any other fatal error is one of Kafka or the set-up.
FENCED = frozenset(
    {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
)  # fmt: skip


class TopicDeleted(KafkaException):
    """A topic was deleted while a transaction with a record for it was being committed."""


class Outgoing(NamedTuple):
    """A record to be written: of a message, or of its dead letter. `id` is that of the message.

    `begin_ms` is the time from which its lateness counts: the due time, or the acceptance if that was later.
    """

    id: str
    envelope: Envelope
    value: bytes | None
    due_ms: int | None
    begin_ms: int | None
    is_dead: bool

    @property
    def size_bytes(self) -> int:
        """The approximate size of the record in Kafka."""
        headers = sum(len(name) + len(value or b"") for name, value in self.envelope.headers)
        return len(self.value or b"") + len(self.envelope.key or b"") + headers


class Refusal(NamedTuple):
    """A refusal that holds for records of a topic with at least `size_bytes`, until `until_ms` of the boot clock."""

    size_bytes: int
    reason: str
    until_ms: int


class Delivery:
    """Writes the visible messages of one queue. Belongs to one thread. After an error, a new object replaces it."""

    def __init__(self, options: BridgeOptions, queue: WaitingQueue, counts: Counts, clock: Clock) -> None:
        self._options, self._queue, self._counts, self._clock = options, queue, counts, clock
        self._producer = self._new_producer()
        self._topics = Topics(lambda **asked: self._producer.list_topics(**asked), clock)
        is_compressed = options.client.get("compression.type", "none") != "none"
        self._limits = TopicLimits(
            AdminClient(options.client_properties()), clock, is_compressed=is_compressed
        )
        self._offset = 0
        self._committed_ns = 0  # when the last commit was answered, by the monotonic clock
        self._rows_max = ROWS_MAX
        self._file = UndeliverableFile(options.undeliverable, counts)
        self._rules = Rules(options.own, options.out, options.dead, options.position_topic, self._topics.has)
        self._told: KafkaError | None = None  # Kafka's error for the only record of a transaction
        # The reasons for which the message at `_offset` could not take its first ways, one for each way.
        self._reasons: list[str] = []
        self._refusals: dict[str, Refusal] = {}  # by topic, so that the next record need not fail too
        self._filed: set[str] = set()  # ids whose lines are in the file while the position is not committed
        self._tried: Outgoing | None = None  # the only record of a transaction
        self._failed_alone = -1  # the offset of the last message that failed as the only record

    def _new_producer(self) -> Producer:
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
        """End the transaction of an earlier process with this name, and find the position. Raises SetupError."""
        options = self._options
        self._file.check()
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
            # Write a position before the first record, so that a missing position always means that it was lost.
            self._write([], 0, stop)
        elif found > span.max:
            raise SetupError(
                f"--name {options.name}: {found} messages were delivered, and Timeball's topic {self._queue.topic!r} "
                f"has had {span.max}: this is another data folder, or an older copy; choose another --name"
            )
        self._offset = found or 0

    def run(self, stop: threading.Event) -> None:
        """Deliver until `stop` is set.

        After KafkaException and Unavailable, start again with a new object. SetupError means that the bridge was
        fenced.
        """
        failures, wrote_ms = 0, self._clock.wall_ms()
        while not stop.is_set():
            rows = self._pull()
            is_idle = not rows.num_rows
            if is_idle and self._clock.wall_ms() - wrote_ms < IDLE_MS:
                continue
            try:
                if is_idle:
                    # An idle bridge writes its position too, so that it learns when another one has taken over.
                    self._write([], self._offset, stop)
                else:
                    self._deliver(rows, stop)
                failures, wrote_ms = 0, self._clock.wall_ms()
            except TopicDeleted as error:
                # The next transaction knows that the topic does not exist, and writes dead letters.
                self._begin_anew(error, stop)
            except KafkaException as error:
                self._begin_anew(error, stop)
                failures += 1
                is_of_a_record = self._narrow(error.args[0], rows.num_rows, failures, stop)
                if not is_of_a_record and stop.wait(FAILED_WAIT_S):
                    return

    def _narrow(self, error: KafkaError, rows: int, failures: int, stop: threading.Event) -> bool:
        """Draw conclusions from a failed transaction of `rows` rows.

        True if a record is to blame, so that waiting does not help.
        """
        told, self._told = self._told, None
        # The first failure without a permanent reason may be temporary, for example if a Kafka broker restarts.
        is_permanent = told is not None or error.code() in LASTING
        if rows > 1:
            self._rows_max = max(1, rows // 2) if is_permanent or failures > 1 else ROWS_MAX
            return is_permanent
        is_again, self._failed_alone = self._failed_alone == self._offset, self._offset
        if rows and (is_permanent or is_again) and (told is not None or self._is_well(stop)):
            reason = f"Kafka: {(told or error).str()}"
            self._reasons.append(reason)
            self._remember((told or error).code(), reason)
            return True
        return False

    def _is_well(self, stop: threading.Event) -> bool:
        """Return whether Kafka accepts a transaction with only the position."""
        try:
            self._write([], self._offset, stop)
            return True
        except KafkaException as error:
            self._begin_anew(error, stop)
            return False

    def _remember(self, code: int, reason: str) -> None:
        """Store a refusal, so that the next records for the same topic do not fail for the same reason."""
        if (one := self._tried) is None or code not in OF_SIZE | OF_A_TOPIC:
            return
        until_ms = self._clock.boot_ms() + REFUSAL_KEPT_MS
        size_bytes = one.size_bytes if code in OF_SIZE else 0
        self._refusals[one.envelope.topic] = Refusal(size_bytes, reason, until_ms)

    def _pull(self) -> pa.RecordBatch:
        try:
            # A message that was refused is tried alone.
            rows = 1 if self._reasons else self._rows_max
            return self._queue.pull(self._offset, rows, WAIT_MS)
        except OutOfRange:
            first = self._queue.span().min
            logger.error("messages let go before they were delivered messages=%d", first - self._offset)
            self._counts.lost += max(0, first - self._offset)
            self._offset = first
            self._reasons.clear()
            return self._queue.pull(self._offset, self._rows_max, 0)

    # ---- one transaction --------------------------------------------------------------------------------

    def _deliver(self, rows: pa.RecordBatch, stop: threading.Event) -> None:
        names = ("unique_key", "body", "properties", "due_ms", "accepted_ms")
        columns = [rows.column(name).to_pylist() for name in names]
        messages = [self._outgoing(*values) for values in zip(*columns, strict=True)]
        self._limits.look({one.envelope.topic for one in messages})
        found = [self._way(one) for one in messages]
        written = [one for one in found if one is not None]
        self._tried = found[0] if len(found) == 1 else None
        end = self._offset + rows.num_rows
        self._write(written, end, stop)
        now_ms, counts = self._clock.wall_ms(), self._counts
        self._offset = end
        self._reasons.clear()
        self._rows_max = min(ROWS_MAX, 2 * self._rows_max)
        counts.delivered += len(written)
        self._filed.clear()
        counts.transactions += 1
        counts.undeliverable += sum(one.is_dead for one in written)
        first_ms = min((one.begin_ms for one in written if one.begin_ms is not None), default=now_ms)
        counts.late_ms = max(counts.late_ms, now_ms - first_ms)

    def _write(self, found: list[Outgoing], position: int, stop: threading.Event) -> None:
        """Write records and the position after them in one transaction."""
        alone = len(found) == 1
        # The pull took a part of this time, or all of it.
        if (left_s := MARKS_S - (self._clock.monotonic_ns() - self._committed_ns) / 1e9) > 0:
            stop.wait(left_s)
        self._producer.begin_transaction()
        for one in found:
            envelope = one.envelope
            partition = envelope.partition
            # Keep the partition if the topic has it. Otherwise Kafka's Java clients' rule chooses one by the key.
            if partition is not None and partition >= self._topics.partitions(envelope.topic):
                partition = None
            self._produce(envelope.topic, one.value, envelope.key, partition, envelope.headers, alone)
        self._produce(
            self._options.position_topic, msgspec.json.encode(Position(position)), KEY, 0, [], False
        )
        # Not the topic of dead letters: without it they go to the local file, which takes a refusal by Kafka.
        self._commit({one.envelope.topic for one in found} - {self._options.dead}, stop)

    def _produce(
        self, topic: str, value: bytes | None, key: bytes | None, partition: int | None, headers: Headers, alone: bool
    ) -> None:  # fmt: skip
        chosen = ANY_PARTITION if partition is None else partition
        # Only the report about a single record is needed: a callback for each record costs as much as the record.
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
        # A record that is discarded with its transaction is reported as well, with an error code of the client itself.
        if error is not None and error.code() in LASTING:
            self._told = error

    def _commit(self, topics: set[str], stop: threading.Event) -> None:
        """Commit the transaction with records of these topics."""
        while True:
            try:
                self._producer.commit_transaction(COMMIT_S)
                self._committed_ns = self._clock.monotonic_ns()
                return
            except KafkaException as error:
                # Without an answer the transaction may be committed. Repeating the request, or the next process's first
                # one, finds out.
                if not error.args[0].retriable() or stop.is_set():
                    raise
                # The client asks Kafka for a deleted topic until its records time out. All other records would wait.
                if gone := self._topics.gone(topics):
                    reason = f"topic {gone[0]!r} was deleted during the transaction"
                    raise TopicDeleted(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, reason)) from error

    def _begin_anew(self, error: KafkaException, stop: threading.Event) -> None:
        """End a failed transaction, and make a new producer. Raises SetupError if fenced, and KafkaException."""
        cause = error.args[0]
        if cause.fatal() and cause.code() in FENCED:
            # The bridge does not restart here: two bridges with one name would fence each other for ever.
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
        if stop.wait(ABORT_MARKS_S):
            return
        self._producer = self._new_producer()
        self._producer.init_transactions(INIT_S)
        if not is_aborted:
            self._offset = read_position(self._options) or 0

    def _abort(self, stop: threading.Event) -> bool:
        """Abort the transaction. False if it may still be open: then `init_transactions` ends it."""
        while True:
            try:
                self._producer.abort_transaction(ABORT_S)
                return True
            except KafkaException as failure:
                if failure.args[0].fatal() and failure.args[0].code() in FENCED:
                    raise SetupError(
                        f"--name {self._options.name}: another bridge of this name has begun ({failure.args[0].str()})"
                    ) from failure
                if not failure.args[0].retriable() or stop.is_set():
                    return False

    # ---- from a message ---------------------------------------------------------------------------------

    def _outgoing(
        self,
        name: str | None,
        body: bytes,
        properties: str | None,
        due_ms: int | None,
        accepted_ms: int | None,
    ) -> Outgoing:
        begin_ms = None if due_ms is None else max(due_ms, accepted_ms or 0)
        envelope, id = records.envelope_of(properties), name or ""
        if envelope is None:
            # Another client of Timeball sent this message, so its destination is unknown.
            return self._dead(
                Outgoing(id, Envelope("", None, None, []), body, due_ms, begin_ms, False), STRANGE
            )
        one = Outgoing(
            id, envelope, None if envelope.is_null else body, due_ms, begin_ms,
            envelope.topic == self._options.dead,
        )  # fmt: skip
        refusal = self._rules.refusal(envelope.topic)
        # Kafka may not list the topic of dead letters yet, which the bridge has just made.
        if refusal is None and not one.is_dead and not self._topics.has(envelope.topic):
            refusal = f"Kafka has no topic {envelope.topic[:100]!r}"
        return one if refusal is None else self._dead(one, refusal)

    def _way(self, one: Outgoing) -> Outgoing | None:
        """Make the record of the first way that is open for a message. None for the last way, which has no record."""
        reasons, begin = list(self._reasons), SECOND_WAY if one.is_dead else FIRST_WAY
        while (number := begin + len(reasons)) < LAST_WAY:
            way = self._record(one, number, reasons)
            if (reason := self._known_refusal(way)) is None:
                if number == WAY_WITHOUT_VALUE:
                    self._file_away(one, reasons)
                return way
            reasons.append(reason)
        self._file_away(one, reasons)
        return None

    def _known_refusal(self, one: Outgoing) -> str | None:
        """Find the reason for which Kafka will refuse a record, if it is known before the record is written."""
        known, topic = self._refusals.get(one.envelope.topic), one.envelope.topic
        if (
            known is not None
            and one.size_bytes >= known.size_bytes
            and known.until_ms > self._clock.boot_ms()
        ):
            return known.reason
        if one.is_dead:  # the limits of the other records' topics were asked for together
            self._limits.look((topic,))
        return self._limits.refusal(topic, one.size_bytes)

    def _record(self, one: Outgoing, number: int, reasons: list[str]) -> Outgoing:
        """Make the record of the way `number`, after the earlier ways were refused for `reasons`."""
        if number == FIRST_WAY or not reasons:
            return one
        if number == SECOND_WAY:
            return self._dead(one, reasons[-1])
        value = None if one.value is None else b""
        return self._dead(one._replace(value=value), f"{'; '.join(reasons)}; {FILED}")

    def _file_away(self, one: Outgoing, reasons: list[str]) -> None:
        """Write a message to the local file, unless an earlier, failed transaction has written it already."""
        if one.id in self._filed:
            return
        place, envelope = self._place(one), one.envelope
        line = Undeliverable(
            id=one.id, reason="; ".join(reasons), to=envelope.topic, topic=place.topic, partition=place.partition,
            offset=place.offset, due_ms=one.due_ms, key=envelope.key, value=one.value, headers=envelope.headers,
        )  # fmt: skip
        self._file.add(line)
        self._filed.add(one.id)

    def _dead(self, one: Outgoing, reason: str) -> Outgoing:
        headers = [pair for pair in one.envelope.headers if pair[0] not in records.REASONS]
        headers += records.reasons(self._place(one), reason)
        envelope = Envelope(self._options.dead, None, one.envelope.key, headers, one.value is None)
        return one._replace(envelope=envelope, is_dead=True)

    def _place(self, one: Outgoing) -> Place:
        """Find the location of the record that a message was made of, or else of the message itself."""
        try:
            return Place.of(one.id)
        except ValueError:
            return Place(self._queue.topic, 0, self._offset)


# The position of a bridge: the next offset of Timeball's queue, stored as a record in Kafka.
#
# It is the last record of each transaction, in a separate topic of the bridge. So records and position are committed or
# aborted together. A transaction could also commit the offset of a consumer group. But Kafka forgets that offset when
# the group has committed none for a week (`offsets.retention.minutes`), and a compacted topic keeps the last record of
# a key.

TIMEOUT_S = 10.0
KEY = b"position"
# The last position is at the end, except for aborted transactions and the markers at the ends of transactions.
BACK, BACK_MORE = 1_000, 16
CONFIG = {"cleanup.policy": "compact", "segment.bytes": str(16 * 1024 * 1024)}


class Position(msgspec.Struct, frozen=True):
    """The next offset of Timeball's queue to deliver."""

    offset: int


def make_topics(options: BridgeOptions, has: dict[str, int]) -> None:
    """Create the bridge's own topics that are missing: for its position, and for dead letters. Raises SetupError."""
    wanted = {options.position_topic: CONFIG, options.dead: {}}
    missing = [NewTopic(name, 1, -1, config=config) for name, config in wanted.items() if name not in has]
    if not missing:
        return
    # in a variable, because its answers end when it is freed
    admin = AdminClient(options.client_properties())
    for name, made in admin.create_topics(missing).items():
        try:
            made.result(TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise SetupError(
                    f"Kafka does not let the bridge make topic {name!r} ({error.args[0].str()}): make it, with one "
                    f"partition; that of --position-topic with cleanup.policy=compact"
                ) from error


def read_position(options: BridgeOptions) -> int | None:
    """Read the offset of the last committed transaction. None if there was none.

    Call this only when no transaction of this bridge is open: right after `init_transactions`, which ends earlier ones.
    """
    properties = options.client_properties(
        group_id=f"timeball.{options.name}.position", enable_auto_commit=False, auto_offset_reset="earliest",
        isolation_level="read_committed", enable_partition_eof=True,
    )  # fmt: skip
    consumer = Consumer(properties)
    try:
        topic = options.position_topic
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=TIMEOUT_S)
        back = BACK
        while True:
            begin = max(low, high - back)
            found = _last(consumer, TopicPartition(topic, 0, begin))
            if found is not None or begin == low:
                return found
            back *= BACK_MORE
    finally:
        consumer.close()


def _last(consumer: Consumer, begin: TopicPartition) -> int | None:
    """Read from `begin` to the end, and return the position in the last record."""
    consumer.assign([begin])
    found = None
    while True:
        message = consumer.poll(TIMEOUT_S)
        if message is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"no answer from topic {begin.topic!r}"))
        error = message.error()
        if error is None:
            value = message.value()
            found = msgspec.json.decode(value, type=Position).offset if value else None
        elif error.code() == KafkaError._PARTITION_EOF:
            return found
        else:
            raise KafkaException(error)
