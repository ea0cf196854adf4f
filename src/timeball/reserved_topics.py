"""Topics that belong to the broker: clients may read some of them and write none.

A client that could write into the schedule's topic or the half messages' topic would forge promises and
transactions. The names and the sentences are RocketMQ's; the answer's code is NO_PERMISSION for a send and
INVALID_PARAMETER for an attempt to create or delete one. A forbidden name is told from its letters alone, so
a topic that does not exist here is refused as well (`rmq_sys_wheel_timer`: our timer has no such topic).
"""

from __future__ import annotations

from timeball.message import DLQ_PREFIX, RETRY_PREFIX, SCHEDULE_TOPIC

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANS_CHECK_MAX_TIME_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST_TOPIC = "SELF_TEST_TOPIC"
OFFSET_MOVED_EVENT = "OFFSET_MOVED_EVENT"
SYSTEM_PREFIX = "rmq_sys_"

AUTO_CREATE_TOPIC = "TBW102"  # a producer asks for its route before it writes to a topic that does not exist
BENCHMARK_TOPIC = "BenchmarkTest"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"  # where clients write their traces to

_NOT_WRITABLE = frozenset(
    {
        SCHEDULE_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC, SELF_TEST_TOPIC,
        OFFSET_MOVED_EVENT,
    }
)  # fmt: skip
_SYSTEM = _NOT_WRITABLE | {AUTO_CREATE_TOPIC, BENCHMARK_TOPIC, TRACE_TOPIC}
SYSTEM_TOPICS = tuple(sorted(_SYSTEM))  # what tools leave out of lists


# Topics that only RocketMQ's own clients write, as a part of their retries. Nothing that is scheduled goes there.
NOT_SCHEDULED = tuple(sorted(_NOT_WRITABLE))
NOT_SCHEDULED_PREFIXES = (SYSTEM_PREFIX, RETRY_PREFIX, DLQ_PREFIX)


def reply_topic(cluster_name: str) -> str:
    """Return the topic that clients reply to requests in."""
    return f"{cluster_name}_REPLY_TOPIC"


def forbidden(topic: str) -> str | None:
    """Return why no client may send to this topic; None when it may. The code to it is NO_PERMISSION."""
    if topic in _NOT_WRITABLE or topic.startswith(SYSTEM_PREFIX):
        # RocketMQ's own sentences: its tools and clients show or compare them.
        return f"Sending message to topic[{topic}] is forbidden."
    return None


def conflict(topic: str) -> str | None:
    """Return why no client may create or delete this topic; None when it may. The code is INVALID_PARAMETER."""
    if topic in _SYSTEM or topic.startswith(SYSTEM_PREFIX):
        return f"The topic[{topic}] is conflict with system topic."
    return None
