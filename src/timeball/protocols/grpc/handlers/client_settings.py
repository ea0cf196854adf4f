"""What a client is told of its own settings: what it has sent, and what the broker decides.

    producer   max_body_size (a client that is told 0 can send nothing), whether message types are checked, and
               three attempts with a growing pause, which the Java client will have exponential
    consumer   how often a message is tried and after which pauses (the group's retry policy), whether the group
               consumes in order, how many messages a call asks for and how long it waits

A policy is told as the group's operator has set it: exponential, or customised with a pause for every attempt. The Node
client knows no customised one and would take its number of attempts for one; it is told an exponential one instead, of
which it needs that number only (its pauses are the broker's doing, see receipts.py).
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from timeball import limits
from timeball.broker.consuming.retry import TIMES_MAX
from timeball.broker.consuming.retry_policy import delay_ms
from timeball.broker.registry.groups import ExponentialRetry, SubscriptionGroup
from timeball.protocols.grpc._generated.definition_pb2 import (
    CustomizedBackoff,
    ExponentialBackoff,
    Language,
    RetryPolicy,
    Settings,
)

PRODUCER_ATTEMPTS = 3
RECEIVE_ROWS = 32
LONG_POLLING_S = 20
PAUSES_MAX = 64  # the last one is for all later attempts
# The pauses between a producer's own attempts.
PAUSE_MS, PAUSE_MS_MAX, PAUSE_FACTOR = 10, 1_000, 2


def answered(settings: Settings, group: SubscriptionGroup | None, *, check_types: bool) -> Settings:
    """The settings as the broker sends them back; `group`: the consumer's."""
    found = Settings()
    found.CopyFrom(settings)
    if group is None:
        found.publishing.max_body_size = limits.BODY_BYTES_MAX
        found.publishing.validate_message_type = check_types
        found.backoff_policy.CopyFrom(_exponential(PRODUCER_ATTEMPTS, PAUSE_MS, PAUSE_MS_MAX, PAUSE_FACTOR))
        return found
    found.subscription.fifo = group.consume_message_orderly
    found.subscription.receive_batch_size = RECEIVE_ROWS
    found.subscription.long_polling_timeout.CopyFrom(Duration(seconds=LONG_POLLING_S))
    found.backoff_policy.CopyFrom(
        _policy(group, exponential=settings.user_agent.language == Language.NODE_JS)
    )
    return found


def attempts_max(group: SubscriptionGroup) -> int:
    """How often a message is handed out before it is a dead letter: once, and as often as it is tried again."""
    times = group.retry_max_times
    return 1 + (times if times >= 0 else TIMES_MAX)


def duration(milliseconds: int) -> Duration:
    """The same as protobuf has it."""
    return Duration(seconds=milliseconds // 1_000, nanos=milliseconds % 1_000 * 1_000_000)


def _policy(group: SubscriptionGroup, *, exponential: bool) -> RetryPolicy:
    attempts, policy = attempts_max(group), group.group_retry_policy
    if exponential or policy.type == "EXPONENTIAL":
        chosen = policy.exponential_retry_policy or ExponentialRetry()
        return _exponential(attempts, chosen.initial, chosen.max, chosen.multiplier)
    # One for each attempt that may fail, as the broker itself would have it: clients only look them up.
    pauses = [duration(delay_ms(policy, attempt)) for attempt in range(1, min(attempts, PAUSES_MAX) + 1)]
    return RetryPolicy(max_attempts=attempts, customized_backoff=CustomizedBackoff(next=pauses))


def _exponential(attempts: int, initial_ms: int, max_ms: int, factor: int) -> RetryPolicy:
    return RetryPolicy(
        max_attempts=attempts,
        exponential_backoff=ExponentialBackoff(
            initial=duration(initial_ms), max=duration(max_ms), multiplier=factor
        ),
    )
