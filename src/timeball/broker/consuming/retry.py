"""Consumer retry: where a message goes that a consumer could not handle. Decisions only; nothing is sent here.

    handed back, n times before   level      topic
    n < the maximum               3 + n      %RETRY%<group>      10 s, 30 s, 1 m … 2 h with RocketMQ's levels
    n >= the maximum              at once    %DLQ%<group>        an operator must look at it
    level asked for > 0           that one   %RETRY%<group>      n counts all the same
    level asked for < 0           at once    %DLQ%<group>

A message keeps its properties on its way, so what once delayed it travels along. None of it may act again: a
dead letter that inherits DELAY arrives hours later (RocketMQ #2722), and a retry has the level that stands
above and no other. So those names are taken off, here and nowhere else, and DELAY says what is decided.
"""

from __future__ import annotations

from dataclasses import dataclass

from timeball.message import DLQ_PREFIX, RETRY_PREFIX, RETRY_TOPIC

FIRST_LEVEL = 3
INT_MAX = (1 << 31) - 1  # orderly clients send it for "without end"

ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
WAIT = "WAIT"
DELAY = "DELAY"

# What has delayed the message before, and where it was to go then.
SPENT = frozenset(
    {
        DELAY, "REAL_TOPIC", "REAL_QID", "TIMER_DELAY_LEVEL", "TIMER_DELAY_SEC", "TIMER_DELAY_MS",
        "TIMER_DELIVER_MS", "TIMER_OUT_MS", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES",
        "TIMING-LIST",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Next:
    """The message's next copy. `delay_level` 0: visible at once."""

    topic: str
    properties: dict[str, str]
    delay_level: int
    reconsume_times: int

    @property
    def is_dead_letter(self) -> bool:
        """Return whether it goes to the dead letters, which no consumer gets by itself."""
        return self.topic.startswith(DLQ_PREFIX)


def retry_topic(group: str) -> str:
    """Return the topic that every consumer of `group` also listens to."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """Return the topic for messages that `group` has given up."""
    return DLQ_PREFIX + group


def group_of(topic: str) -> str:
    """Return the group whose retry topic this is."""
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
    """Return the next copy of a message of `topic` that `group` hands back; `message_id` names the copy it had."""
    times = _int(reconsume_times)
    # Without the delay that is spent; the level decided below is set last.
    kept = _with_level(properties, 0)
    kept.setdefault(RETRY_TOPIC, topic)
    # Set once: after several attempts consumers still see the id of the first message.
    kept.setdefault(ORIGIN_MESSAGE_ID, message_id)
    # RocketMQ's: the copy need not wait for a replica.
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
    """Return the next copy of a message that a client sends to its group's retry topic by itself.

    Such a client has counted up already, so what equals the maximum is the last try and not beyond it. An orderly
    consumer (`in_order`) tries again on its own and sends only what it has given up.
    """
    # A client's numbers, which may be any of 32 bits and below nought.
    times, level = _int(reconsume_times), _int(delay_level)
    if in_order or times > times_max:
        return Next(dead_letter_topic(group), _with_level(properties, 0), 0, times)
    return Next(retry_topic(group), _with_level(properties, level), level, times)


def _int(number: int) -> int:
    """Return a client's number, held within its column."""
    return min(max(0, number), INT_MAX)


def _with_level(properties: dict[str, str], level: int) -> dict[str, str]:
    kept = {name: value for name, value in properties.items() if name not in SPENT}
    if level:
        kept[DELAY] = str(level)
    return kept
