"""RocketMQ's system topics: clients may not create or delete them, and may not send to most of them.

A client that could write to the schedule topic or to the topic of half messages could forge scheduled messages and
transactions. The names and the error messages are RocketMQ's. A refused send is answered with NO_PERMISSION, a refused
attempt to create or delete a topic with INVALID_PARAMETER. Only the name decides, so topics that Timeball does not have
are refused as well (`rmq_sys_wheel_timer`).
"""

from __future__ import annotations

from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX, SCHEDULE_TOPIC

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANS_CHECK_MAX_TIME_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST_TOPIC = "SELF_TEST_TOPIC"
OFFSET_MOVED_EVENT = "OFFSET_MOVED_EVENT"
SYSTEM_PREFIX = "rmq_sys_"

AUTO_CREATE_TOPIC = "TBW102"  # a producer asks for its route before it writes to a topic that does not exist
BENCHMARK_TOPIC = "BenchmarkTest"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"  # RocketMQ's clients write their traces to it

_NOT_WRITABLE = frozenset(
    {
        SCHEDULE_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC, SELF_TEST_TOPIC,
        OFFSET_MOVED_EVENT,
    }
)  # fmt: skip
_SYSTEM = _NOT_WRITABLE | {AUTO_CREATE_TOPIC, BENCHMARK_TOPIC, TRACE_TOPIC}
SYSTEM_TOPICS = tuple(sorted(_SYSTEM))  # tools leave these out of lists


# Topics that rules.py refuses for scheduled messages. Retry and dead letter topics belong to them, because only
# RocketMQ's own clients write to these, as a part of their retries.
NOT_SCHEDULED = tuple(sorted(_NOT_WRITABLE))
NOT_SCHEDULED_PREFIXES = (SYSTEM_PREFIX, RETRY_PREFIX, DLQ_PREFIX)


def reply_topic(cluster_name: str) -> str:
    """Build the name of the topic to which clients send replies to requests."""
    return f"{cluster_name}_REPLY_TOPIC"


def forbidden(topic: str) -> str | None:
    """Explain why no client may send to this topic (answer NO_PERMISSION). None if clients may."""
    if topic in _NOT_WRITABLE or topic.startswith(SYSTEM_PREFIX):
        # RocketMQ's exact text, which its tools and clients show or compare.
        return f"Sending message to topic[{topic}] is forbidden."
    return None


def conflict(topic: str) -> str | None:
    """Explain why no client may create or delete this topic (answer INVALID_PARAMETER). None if clients may."""
    if topic in _SYSTEM or topic.startswith(SYSTEM_PREFIX):
        return f"The topic[{topic}] is conflict with system topic."
    return None
