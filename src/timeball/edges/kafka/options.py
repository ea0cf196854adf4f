"""A bridge's settings, its counts, and its access to topics: those of Kafka, and its own in Timeball.

BridgeOptions   the settings: topics, Kafka's brokers, and the properties of Kafka's client
Counts          the counts since the start, for the status lines
Topics          Kafka's topics and their numbers of partitions
BridgeQueue     the bridge's topic in Timeball
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from timeball.client.calls import Calls
from timeball.client.http_calls import HttpCalls
from timeball.client.http_codec import cancel, create_topic, read_queues
from timeball.io.clock import Clock
from timeball.model import limits, wire
from timeball.model.answers import QueueRange
from timeball.model.errors import SetupError

# ---- settings ------------------------------------------------------------------------------------------------

NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
# A record's id contains topic, partition and offset, and has at most 255 bytes in Timeball.
TOPIC_CHARACTERS_MAX = 200
# Exactly-once delivery depends on these properties, so a properties file may not set them.
FIXED_PROPERTIES = frozenset(
    {
        "acks", "allow.auto.create.topics", "auto.offset.reset", "bootstrap.servers", "enable.auto.commit",
        "enable.idempotence", "enable.partition.eof", "group.id", "isolation.level", "partitioner",
        "transactional.id",
    }
)  # fmt: skip


Value = str | int | float | bool  # the value of a property of Kafka's client


@dataclass(frozen=True)
class BridgeOptions:
    """The settings of one bridge.

    bootstrap       addresses of Kafka's brokers
    own             the Kafka topic that the bridge reads (`--in`)
    out             the destination topic of records that name none
    dead            the dead letter topic
    name            the bridge's name, which is also its consumer group in Kafka
    position_topic  the Kafka topic that holds the bridge's position in Timeball
    undeliverable   the file for records that Kafka accepts neither unchanged nor as dead letters
    start           where a new bridge begins to read: earliest or latest
    client          properties of Kafka's client, for TLS and accounts
    """

    bootstrap: str
    own: str
    out: str | None
    dead: str
    name: str
    position_topic: str
    undeliverable: Path
    start: str = "earliest"
    client: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise SetupError for invalid settings."""
        if not NAME.fullmatch(self.name):
            raise SetupError(f"--name {self.name}: 1 to 100 letters, digits, dots, dashes and underscores")
        if len(self.own) > TOPIC_CHARACTERS_MAX:
            raise SetupError(f"--in {self.own}: at most {TOPIC_CHARACTERS_MAX} characters")
        if self.start not in ("earliest", "latest"):
            raise SetupError(f"--from {self.start}: earliest or latest")
        if self.out == self.own:
            raise SetupError(f"--out {self.out}: the topic of --in; records would go round for ever")
        if self.out == self.position_topic:
            raise SetupError(
                f"--out {self.out}: the topic of --position-topic; it is for the bridge's position alone"
            )
        if self.dead in (self.own, self.position_topic):
            raise SetupError(f"--dead {self.dead}: a topic of its own, not that of --in or --position-topic")
        if fixed_properties := sorted(FIXED_PROPERTIES & self.client.keys()):
            raise SetupError(
                f"--kafka-config: {', '.join(fixed_properties)} cannot be chosen: exactly-once delivery depends on it"
            )

    @property
    def topic(self) -> str:
        """The topic in Timeball of this bridge's pending messages. Topics there contain no dots."""
        return "kafka-" + self.name.replace(".", "_")

    def client_properties(self, **overrides: Value) -> dict[str, Value]:
        """Build the properties of a Kafka client. `overrides` win; their names have underscores instead of dots."""
        override_properties = {name.replace("_", "."): value for name, value in overrides.items()}
        return {
            "bootstrap.servers": self.bootstrap,
            "allow.auto.create.topics": False,
            # A broker that restarts is back within seconds, and the client's default is ten.
            "reconnect.backoff.max.ms": 1_000,
            **self.client,
            **override_properties,
        }


def read_properties(text: str, file_name: str) -> dict[str, str]:
    """Parse a properties file: a line `name=value` each, and comments that begin with `#`. Raises SetupError."""
    properties = {}
    for line_number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = line.partition("=")
        if not separator or not name.strip():
            raise SetupError(f"--kafka-config {file_name}: line {line_number} is not name=value")
        properties[name.strip()] = value.strip()
    return properties


# ---- counts --------------------------------------------------------------------------------------------------


class Counts(msgspec.Struct):
    """Each number is changed by a single thread, or under a lock. Readers may see a slightly older value.

    taken         records of Kafka that are in Timeball's log, including the `dead` ones that became dead letters
    cancelled     messages that records with the header `cancel` have cancelled
    delivered     records committed in Kafka, including the `undeliverable` ones that became dead letters
    filed         records in the local file, because Kafka accepts no complete dead letter of them
    transactions  committed Kafka transactions with records
    lost          messages or offsets that retention removed before the bridge reached them
    behind        records of the topic of --in that are not in Timeball's log yet
    late_ms       the largest lateness of a commit since the last status line
    """

    taken: int = 0
    dead: int = 0
    cancelled: int = 0
    delivered: int = 0
    undeliverable: int = 0
    filed: int = 0
    transactions: int = 0
    lost: int = 0
    behind: int = 0
    late_ms: int = 0


# ---- Kafka's topics, cached for a few seconds ----------------------------------------------------------------

TOPICS_KEPT_MS = 10_000
UNKNOWN_TOPIC_RETRY_MS = 1_000  # the shortest time between two requests for names that are not in the cache
TIMEOUT_S = 10.0


class Topics:
    """Caches which topics exist. `list_topics` is that method of any Kafka client. Belongs to one thread."""

    def __init__(self, list_topics: Callable[..., Any], clock: Clock) -> None:
        self._list_topics, self._clock = list_topics, clock
        self._partition_counts: dict[str, int] = {}  # the number of partitions, by topic
        self._fetched_ms: int | None = None

    def partitions(self, name: str) -> int:
        """Look up the number of a topic's partitions, 0 if the topic does not exist. May ask Kafka."""
        now_ms = self._clock.monotonic_ns() // 1_000_000
        age_ms = TOPICS_KEPT_MS if self._fetched_ms is None else now_ms - self._fetched_ms
        if age_ms >= TOPICS_KEPT_MS or (
            name not in self._partition_counts and age_ms >= UNKNOWN_TOPIC_RETRY_MS
        ):
            topics = self._list_topics(timeout=TIMEOUT_S).topics
            self._partition_counts = {
                topic.topic: len(topic.partitions) for topic in topics.values() if topic.error is None
            }
            self._fetched_ms = now_ms
        return self._partition_counts.get(name, 0)

    def deleted(self, names: Iterable[str]) -> list[str]:
        """List the topics in `names` that no longer exist. Asks Kafka without using the cache."""
        self._fetched_ms = None
        return [name for name in names if not self.has(name)]

    def has(self, name: str) -> bool:
        """True if the topic exists."""
        return self.partitions(name) > 0


# ---- the bridge's topic in Timeball --------------------------------------------------------------------------
# Its single queue receives the bridge's messages at their due times. One queue is enough, because a queue of Timeball
# has no rate limit. With one queue, the position is a single number.

QUEUE = 0


class BridgeQueue:
    """Accesses the bridge's topic in Timeball. Any thread may call it.

    A call is repeated for a while if Timeball cannot be reached, then it raises Unavailable.
    """

    def __init__(self, operations: HttpCalls, columns: Calls, topic: str) -> None:
        self._operations, self._columns, self.topic = operations, columns, topic

    def ensure(self) -> None:
        """Create the topic in Timeball unless it exists. Raises SetupError if it has more than one queue."""
        self._operations.run(create_topic(self.topic, 1))
        queues = self._queues()
        if len(queues) != 1:
            raise SetupError(
                f"--name: Timeball's topic {self.topic!r} has {len(queues)} queues, a bridge's one: choose another name"
            )

    def span(self) -> QueueRange:
        """Ask for the offset of the first stored message (`min`) and the next offset to be assigned (`max`)."""
        return self._queues()[QUEUE]

    def pull(self, offset: int, rows: int, wait_ms: int) -> pa.RecordBatch:
        """Read at most `rows` visible messages from `offset` on. Waits up to `wait_ms` for the first one.

        Raises OutOfRange if `offset` is before the first stored message or after the end of the queue.
        """
        ticket = wire.Pull(topic=self.topic, offsets={QUEUE: offset}, rows=rows, wait_ms=wait_ms)
        return self._columns.rows(ticket)

    def cancel(self, keys: Sequence[str]) -> int:
        """Cancel all pending messages with these keys. Returns the number of cancelled messages."""
        cancelled_count = 0
        for start in range(0, len(keys), limits.CANCELS_PER_REQUEST_MAX):
            chunk = [*keys[start : start + limits.CANCELS_PER_REQUEST_MAX]]
            verdicts = self._operations.run(cancel([], chunk))
            cancelled_count += sum(verdict.verdict == "cancelled" for verdict in verdicts)
        return cancelled_count

    def _queues(self) -> dict[int, QueueRange]:
        return self._operations.run(read_queues(self.topic))
