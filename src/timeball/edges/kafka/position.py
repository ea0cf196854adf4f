"""The position of a bridge: the next offset of Timeball's queue, stored as a record in Kafka.

It is the last record of each transaction, in a separate topic of the bridge. So records and position are committed or
aborted together. A transaction could also commit the offset of a consumer group. But Kafka forgets that offset when the
group has committed none for a week (`offsets.retention.minutes`), and a compacted topic keeps the last record of a key.
"""

from __future__ import annotations

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from timeball.edges.kafka.options import BridgeOptions
from timeball.model.errors import SetupError

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
