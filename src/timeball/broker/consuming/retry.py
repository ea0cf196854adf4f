"""Consumer retry: the destination of a message that a consumer could not process. Decisions only, nothing is sent here.

    handed back, n times before   level      topic
    n < the maximum               3 + n      %RETRY%<group>      10 s, 30 s, 1 m … 2 h with RocketMQ's levels
    n >= the maximum              at once    %DLQ%<group>        an operator must look at it
    level asked for > 0           that one   %RETRY%<group>      n counts all the same
    level asked for < 0           at once    %DLQ%<group>

A message keeps its properties, also those of earlier delays. None of these may take effect again: a dead letter that
inherits DELAY arrives hours later (RocketMQ #2722), and a retry must have the level in the table above. Therefore these
properties are removed, only in this module, and DELAY is set to the new level.
"""

from __future__ import annotations

from dataclasses import dataclass

from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX, RETRY_TOPIC

FIRST_LEVEL = 3
INT_MAX = (1 << 31) - 1  # orderly clients send it for "unlimited"

ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
WAIT = "WAIT"
DELAY = "DELAY"

# The properties of earlier delays and of their destinations.
SPENT = frozenset(
    {
        DELAY, "REAL_TOPIC", "REAL_QID", "TIMER_DELAY_LEVEL", "TIMER_DELAY_SEC", "TIMER_DELAY_MS",
        "TIMER_DELIVER_MS", "TIMER_OUT_MS", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES",
        "TIMING-LIST",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Next:
    """The next copy of a message. `delay_level` 0: visible at once."""

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
    """Return the group of a retry topic."""
    return topic.removeprefix(RETRY_PREFIX)


def hand_back(
    group: str,
    *,
    topic: str,
    properties: dict[str, str],
    reconsume_times: int,
    message_id: str,
    delay_level: int,
    times_max: int,
) -> Next:
    """Decide on the next copy of a message of `topic` that `group` hands back. `message_id`: of its last copy."""
    times = _int(reconsume_times)
    # Without the old delay. The level decided below is set last.
    kept = _with_level(properties, 0)
    kept.setdefault(RETRY_TOPIC, topic)
    # Set once, so that consumers see the id of the first message even after several attempts.
    kept.setdefault(ORIGIN_MESSAGE_ID, message_id)
    # RocketMQ's property: the copy need not wait for a replica.
    kept[WAIT] = "false"
    again = min(times + 1, INT_MAX)
    if times >= times_max or delay_level < 0:
        return Next(dead_letter_topic(group), kept, 0, again)
    level = _int(delay_level or FIRST_LEVEL + times)
    return Next(retry_topic(group), _with_level(kept, level), level, again)


def resend(
    group: str,
    *,
    properties: dict[str, str],
    delay_level: int,
    reconsume_times: int,
    times_max: int,
    in_order: bool,
) -> Next:
    """Decide on the next copy of a message that a client itself sends to its group's retry topic.

    Such a client has counted the attempt already, so the maximum is still a retry and only a larger number is not. An
    orderly consumer (`in_order`) retries locally and sends only messages that it has given up.
    """
    # The client's numbers may be any 32-bit integers, also negative ones.
    times, level = _int(reconsume_times), _int(delay_level)
    if in_order or times > times_max:
        return Next(dead_letter_topic(group), _with_level(properties, 0), 0, times)
    return Next(retry_topic(group), _with_level(properties, level), level, times)


def _int(number: int) -> int:
    """Limit a client's number to the range of its column."""
    return min(max(0, number), INT_MAX)


def _with_level(properties: dict[str, str], level: int) -> dict[str, str]:
    kept = {name: value for name, value in properties.items() if name not in SPENT}
    if level:
        kept[DELAY] = str(level)
    return kept
