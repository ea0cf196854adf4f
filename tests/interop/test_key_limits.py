"""A group with a limit for each key: stock consumers with leases keep it, and those that pull do not."""

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
WORK_MS = (
    500  # all messages are sent before, so without a limit the consumer's 20 threads work on all of them
)
Talks = Callable[..., GrpcConversation]


def group_with(limit: int) -> Json:
    return {"consumeFromMinEnable": True, "attributes": {ATTRIBUTE: str(limit)}}


def most_at_once(client: Driver, consumer: str) -> int:
    """Wait for the end of all work. Return how many messages with one key were in work at once, at most."""

    def is_over() -> bool:
        return sum(step < 0 for _, step in client.work(consumer)) == len(BODIES)

    client.wait_until(is_over, lambda: f"all was consumed, not only {client.work(consumer)}")
    assert sorted(body for body, step in client.work(consumer) if step > 0) == sorted(BODIES)
    now, most = Counter[str](), 0
    for body, step in client.work(consumer):
        now[body[0]] += step
        most = max(most, now[body[0]])
    return most


@pytest.mark.parametrize(
    ("mode", "limit", "is_kept"), [("POP", LIMIT, True), ("POP", 0, False), ("PULL", LIMIT, False)]
)
@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_a_consumer_for_remoting(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool, mode: str, limit: int, is_kept: bool
) -> None:
    talk = Conversation(client, broker, name, queues=2)
    of_group = ["-b", broker.remoting, "-g", talk.group]
    mqadmin(broker, "updateSubGroup", *of_group, "-m", "true", "--attributes", f"{ATTRIBUTE}={limit}")
    mqadmin(broker, "setConsumeMode", *of_group, "-t", talk.topic, "-m", mode, "-q", "8")
    for body in BODIES:
        talk.send(body, keys=body[0])
    consumer = talk.listen(server_rebalance=mode == "POP", work_ms=WORK_MS)
    assert (most_at_once(client, consumer) <= LIMIT) == is_kept
    tries = client.deliveries(consumer)
    assert any("POP_CK" in m["properties"] for m in tries) == (mode == "POP")


@pytest.mark.parametrize(("limit", "is_kept"), [(LIMIT, True), (0, False)])
@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_a_push_consumer_for_grpc(talks: Talks, limit: int, is_kept: bool) -> None:
    talk = talks(queues=2, group=group_with(limit))
    for body in BODIES:
        talk.send(body, keys=body[0])
    consumer = talk.listen(work_ms=WORK_MS)
    assert (most_at_once(talk.client, consumer) <= LIMIT) == is_kept


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_a_simple_consumer_for_grpc(talks: Talks) -> None:
    talk = talks(group=group_with(LIMIT))
    for body in BODIES:
        talk.send(body, keys=body[0])
    consumer = talk.simple(wait_s=1)
    first = BODIES[: 4 * LIMIT]
    found = {message["body"]: message for message in talk.receive(consumer, first)}
    assert sorted(found) == sorted(first)
    assert talk.receive_once(consumer) == []
    talk.ack(consumer, found["c 0"])
    assert [message["body"] for message in talk.receive(consumer, ["c 2"])] == ["c 2"]
    assert talk.receive_once(consumer) == []
