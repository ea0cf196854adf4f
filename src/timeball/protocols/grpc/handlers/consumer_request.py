"""What every consumer's call says: its group, a topic, what of it is wanted, and how long it waits.

A group is made by its first call; a topic is not, only a message makes one. The answer to a call that waits
comes a little before the client's deadline: one that comes behind it is lost, with all the messages in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf.duration_pb2 import Duration

from timeball import limits
from timeball.broker.filters import EVERYTHING, TAG, Filter
from timeball.broker.filters.compiling import SQL92
from timeball.broker.filters.kept import FiltersKept
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.reserved_topics import RETRY_PREFIX
from timeball.broker.registry.topics import Topic
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code, FilterExpression, FilterType, Resource
from timeball.protocols.grpc.calls import Call
from timeball.protocols.grpc.codec.names import group_name, topic_name
from timeball.protocols.grpc.site import Site

WAIT_MS_MAX = 20 * limits.SECOND_MS
MARGIN_MS, MARGIN_SHARE = (
    500,
    4,
)  # before the deadline: this much, or a quarter of what is left when that is less
REMAINING_S_MAX = 3_600.0  # more is as good as that
WAITS_PER_ADDRESS_MAX = (
    limits.PULLS_WAITING_MAX // 2
)  # no one address has all the places there are for waiting
MULTI_TAG = "MULTI_TAG"
_KINDS = {FilterType.FILTER_TYPE_UNSPECIFIED: TAG, FilterType.TAG: TAG, FilterType.SQL: SQL92}
# The ends of what protobuf's durations may say.
DURATION_SECONDS_MAX, NANOS_MAX = 315_576_000_000, 999_999_999


class Consuming:
    """See the module. Belongs to the event loop."""

    def __init__(self, site: Site) -> None:
        self._policy = site.broker.policy
        self._filters = FiltersKept()
        self._waits: Counter[str] = Counter()  # by address

    def group(self, resource: Resource) -> SubscriptionGroup:
        """The group, which may consume; raises Refused, Forbidden, OverLimit."""
        return self._policy.joined(group_name(resource))

    def topic(self, resource: Resource) -> Topic:
        """The topic, which may be read; raises Refused, NotFound, Forbidden."""
        return self._policy.readable(topic_name(resource))

    def wanted(self, expression: FilterExpression, topic: Topic) -> Filter:
        """The filter; raises Refused, InvalidFilter."""
        if topic.name.startswith(RETRY_PREFIX):
            return EVERYTHING  # what is there has been wanted once
        kind = _KINDS.get(expression.type)
        if kind is None:
            raise Refused(
                Code.ILLEGAL_FILTER_EXPRESSION,
                f"filter type {expression.type}: TAG ({FilterType.TAG}) or SQL",
            )
        return self._filters.get(expression.expression, kind, bit_mask=topic.filter_type == MULTI_TAG)

    @contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """The call may wait within; raises Refused."""
        if self._waits[call.peer] >= WAITS_PER_ADDRESS_MAX:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"{self._waits[call.peer]} calls from {call.peer} wait already; let some of them end",
            )
        self._waits[call.peer] += 1
        try:
            yield
        finally:
            self._waits[call.peer] -= 1
            if not self._waits[call.peer]:
                del self._waits[call.peer]


def wait_ms(call: Call, asked: Duration | None) -> int:
    """How long a call waits for its first message; None: as long as it may. Raises Refused."""
    waits = WAIT_MS_MAX
    if asked is not None:
        waits = min(waits, duration_ms(asked, Code.ILLEGAL_POLLING_TIME, "long_polling_timeout"))
    if waits < 0:
        raise Refused(
            Code.ILLEGAL_POLLING_TIME,
            f"long_polling_timeout of {waits} ms: 0 to {WAIT_MS_MAX}; more is as good as that",
        )
    if call.remaining_s is None:
        return waits
    left = int(1_000 * max(0.0, min(call.remaining_s, REMAINING_S_MAX)))
    return min(waits, left - min(MARGIN_MS, left // MARGIN_SHARE))


def duration_ms(duration: Duration, code: Code, what: str) -> int:
    """A duration that a client has sent, rounded down; raises Refused with this code when it is none."""
    seconds, nanos = duration.seconds, duration.nanos
    if abs(seconds) > DURATION_SECONDS_MAX or abs(nanos) > NANOS_MAX or seconds * nanos < 0:
        raise Refused(code, f"{what} of {seconds} s and {nanos} ns: no duration")
    return int(seconds * 1_000 + nanos // 1_000_000)
