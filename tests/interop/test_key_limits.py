"""A group with a limit for each key: it applies to stock consumers with leases, and not to those that pull."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from tests.interop.admin_tool import AdminTool
from tests.interop.conversation import JAVA5, Conversation
from tests.interop.drivers import Driver, Json
from tests.interop.grpc_conversation import WITH_GO, GrpcConversation
from tests.interop.stock_broker import StockBroker

pytestmark = pytest.mark.interop

LIMIT, ATTRIBUTE = 2, "+timeball.max.per.key"
BODIES = [f"{key} {number}" for number in range(5) for key in "abcd"]
WORK_MS = 500  # without a limit, the 20 threads of a consumer work on all messages at once
Talks = Callable[..., GrpcConversation]


def group_with(limit: int) -> Json:
    """Return the settings of a group with this limit for each key, 0 for none."""
    return {"consumeFromMinEnable": True, "attributes": {ATTRIBUTE: str(limit)}}


def highest_count(client: Driver, consumer: str) -> int:
    """Wait until all messages are consumed. Return the highest number of messages of one key in work at once."""

    def is_over() -> bool:
        return sum(step < 0 for _, step in client.work(consumer)) == len(BODIES)

    client.wait_until(is_over, lambda: f"all was consumed, not only {client.work(consumer)}")
    assert sorted(body for body, step in client.work(consumer) if step > 0) == sorted(BODIES)
    counts, highest = Counter[str](), 0
    for body, step in client.work(consumer):
        counts[body[0]] += step
        highest = max(highest, counts[body[0]])
    return highest


@pytest.mark.parametrize(
    ("mode", "limit", "is_limited"), [("POP", LIMIT, True), ("POP", 0, False), ("PULL", LIMIT, False)]
)
@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_the_limit_for_each_key_applies_to_remoting_consumers_that_pop(
    client: Driver,
    broker: StockBroker,
    name: str,
    mqadmin: AdminTool,
    mode: str,
    limit: int,
    is_limited: bool,
) -> None:
    talk = Conversation(client, broker, name, queues=2)
    of_group = ["-b", broker.remoting, "-g", talk.group]
    mqadmin(broker, "updateSubGroup", *of_group, "-m", "true", "--attributes", f"{ATTRIBUTE}={limit}")
    mqadmin(broker, "setConsumeMode", *of_group, "-t", talk.topic, "-m", mode, "-q", "8")
    for body in BODIES:
        talk.send(body, keys=body[0])
    consumer = talk.listen(server_rebalance=mode == "POP", work_ms=WORK_MS)
    assert (highest_count(client, consumer) <= LIMIT) == is_limited
    deliveries = client.deliveries(consumer)
    assert any("POP_CK" in m["properties"] for m in deliveries) == (mode == "POP")


@pytest.mark.parametrize(("limit", "is_limited"), [(LIMIT, True), (0, False)])
@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_the_limit_for_each_key_applies_to_grpc_push_consumers(
    talks: Talks, limit: int, is_limited: bool
) -> None:
    talk = talks(queues=2, group=group_with(limit))
    for body in BODIES:
        talk.send(body, keys=body[0])
    consumer = talk.listen(work_ms=WORK_MS)
    assert (highest_count(talk.client, consumer) <= LIMIT) == is_limited


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_a_grpc_simple_consumer_receives_no_message_of_a_key_at_its_limit(talks: Talks) -> None:
    talk = talks(group=group_with(LIMIT))
    for body in BODIES:
        talk.send(body, keys=body[0])
    consumer = talk.simple(wait_s=1)
    first = BODIES[: 4 * LIMIT]  # the first LIMIT messages of each of the four keys
    received = {message["body"]: message for message in talk.receive(consumer, first)}
    assert sorted(received) == sorted(first)
    assert talk.receive_once(consumer) == []
    talk.ack(consumer, received["c 0"])
    assert [message["body"] for message in talk.receive(consumer, ["c 2"])] == ["c 2"]
    assert talk.receive_once(consumer) == []
