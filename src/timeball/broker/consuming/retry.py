"""Consumer retry: decide where a message goes that a consumer could not process. This module sends nothing.

    returned n times before       level            topic
    n < the maximum               3 + n            %RETRY%<group>      10 s, 30 s, 1 m … 2 h with RocketMQ's levels
    n >= the maximum              visible at once  %DLQ%<group>        an operator must look at it
    requested level > 0           that level       %RETRY%<group>      if n < the maximum
    requested level < 0           visible at once  %DLQ%<group>

A returned message has the properties of its earlier delays, which must not take effect again. A dead letter that
inherits DELAY would arrive hours later (RocketMQ #2722), and a retry must have the level in the table above. This
module is the only place that removes these properties (SPENT) and sets DELAY to the new level.
"""

from __future__ import annotations

from dataclasses import dataclass

from timeball.model.message import BASE, DLQ_PREFIX, RETRY_PREFIX, RETRY_TOPIC
from timeball.model.time_parsing import LOCAL_TIME

FIRST_LEVEL = 3
INT_MAX = (1 << 31) - 1  # orderly clients send it for "unlimited"

ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
WAIT = "WAIT"
DELAY = "DELAY"

# The properties of earlier delays, and of the topics and queues that they led to.
SPENT = frozenset(
    {
        DELAY, "REAL_TOPIC", "REAL_QID", "TIMER_DELAY_LEVEL", "TIMER_DELAY_SEC", "TIMER_DELAY_MS",
        "TIMER_DELIVER_MS", "TIMER_OUT_MS", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES",
        "TIMING-LIST", LOCAL_TIME, BASE,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Destination:
    """The next copy of a message, and its topic. A `delay_level` of 0 makes it visible at once."""

    topic: str
    properties: dict[str, str]
    delay_level: int
    reconsume_times: int

    @property
    def is_dead_letter(self) -> bool:
        """True if the copy goes to the dead letters, which no consumer receives automatically."""
        return self.topic.startswith(DLQ_PREFIX)


def retry_topic(group: str) -> str:
    """Name the topic that every consumer of `group` also subscribes to."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """Name the topic of messages that `group` has given up."""
    return DLQ_PREFIX + group


def group_of(topic: str) -> str:
    """Name the group of a retry topic."""
    return topic.removeprefix(RETRY_PREFIX)


def next_copy_of_returned(
    group: str,
    *,
    topic: str,
    properties: dict[str, str],
    reconsume_times: int,
    message_id: str,
    delay_level: int,
    times_max: int,
) -> Destination:
    """Decide on the next copy of a message that `group` returns, as in the table above.

    `message_id` is the id of its current copy, `reconsume_times` how often it was returned before, and `delay_level`
    the level that the client requests (0: none).
    """
    times = _clamp(reconsume_times)
    # Remove the old delay. The new level is set last.
    copy_properties = _with_level(properties, 0)
    copy_properties.setdefault(RETRY_TOPIC, topic)
    # Set once, so that consumers see the id of the first message even after several attempts.
    copy_properties.setdefault(ORIGIN_MESSAGE_ID, message_id)
    # RocketMQ's property: the copy need not wait for a replica.
    copy_properties[WAIT] = "false"
    next_times = min(times + 1, INT_MAX)
    if times >= times_max or delay_level < 0:
        return Destination(dead_letter_topic(group), copy_properties, 0, next_times)
    level = _clamp(delay_level or FIRST_LEVEL + times)
    return Destination(retry_topic(group), _with_level(copy_properties, level), level, next_times)


def resend(
    group: str,
    *,
    properties: dict[str, str],
    delay_level: int,
    reconsume_times: int,
    times_max: int,
    in_order: bool,
) -> Destination:
    """Decide on the next copy of a message that a client itself sends to its group's retry topic.

    The client has counted this attempt already, in `reconsume_times`. So a number equal to the maximum is still a
    retry, and only a larger number a dead letter. An orderly consumer (`in_order`) retries locally and sends only
    messages that it has given up.
    """
    # The client's numbers may be any 32-bit integers, also negative ones.
    times, level = _clamp(reconsume_times), _clamp(delay_level)
    if in_order or times > times_max:
        return Destination(dead_letter_topic(group), _with_level(properties, 0), 0, times)
    return Destination(retry_topic(group), _with_level(properties, level), level, times)


def _clamp(number: int) -> int:
    """Limit a client's number to the range of its column."""
    return min(max(0, number), INT_MAX)


def _with_level(properties: dict[str, str], level: int) -> dict[str, str]:
    """Copy properties without those of earlier delays, and set a delay level. 0: no delay."""
    new_properties = {name: value for name, value in properties.items() if name not in SPENT}
    if level:
        new_properties[DELAY] = str(level)
    return new_properties
