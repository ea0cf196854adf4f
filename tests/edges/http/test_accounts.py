"""Operations of accounts: each operation of the client needs its permission, and messages of others are not found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from tests.accounts import guarded_node, keys
from tests.node_fixture import RunningNode

from timeball import NotFound, Timeball
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.client.messages import Member
from timeball.client.network import run
from timeball.model.errors import Forbidden, RequestError


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with guarded_node(tmp_path_factory.mktemp("guarded")) as running:
        for topic in ("orders", "news"):
            running.run(running.broker.create_topic(topic, 2))
        yield running


@pytest.fixture
def shop(node: RunningNode) -> Iterator[Timeball]:
    with Timeball(node.http_endpoint, **keys("shop")) as ball:
        yield ball


@pytest.fixture
def other(node: RunningNode) -> Iterator[Timeball]:
    with Timeball(node.http_endpoint, **keys("other")) as ball:
        yield ball


@pytest.fixture
def root(node: RunningNode) -> Iterator[Timeball]:
    with Timeball(node.http_endpoint, **keys("root")) as ball:
        yield ball


def member(ball: Timeball) -> Member:
    """Return a member of the group `workers` for the topic `orders`."""
    return Member(ball._operations, "orders", "workers")


OPERATIONS: dict[str, Callable[[Timeball], object]] = {
    "status": lambda ball: ball.status(),
    "topics": lambda ball: ball.topics(),
    "groups": lambda ball: ball.groups(),
    "get": lambda ball: ball.get("nobody's"),
    "cancel": lambda ball: ball.cancel("nobody's"),
    "reschedule": lambda ball: ball.reschedule("nobody's", after="1s"),
    "send": lambda ball: ball.send("orders", "x"),
    "queues": lambda ball: ball.queues("orders"),
    "offsets": lambda ball: ball.offsets("workers", "orders"),
    "commit": lambda ball: ball.commit("orders", "workers", {0: 0}),
    "pull": lambda ball: ball.pull("orders", "workers", wait=0),
    "ack": lambda ball: run(member(ball).ack(["made up"])),
    "nack": lambda ball: run(member(ball).nack(["made up"], 0, "")),
    "extend": lambda ball: run(member(ball).extend(["made up"], 1_000)),
    "dead_letter": lambda ball: run(member(ball).dead_letter(["made up"])),
    "dead_letters": lambda ball: ball.dead_letters("workers"),
    "resend_dead_letters": lambda ball: ball.resend_dead_letters("workers"),
    "delete_dead_letters": lambda ball: ball.delete_dead_letters("workers"),
    "create_topic": lambda ball: ball.create_topic("orders", 2),
}
# The account `other` has no permission for the topic `orders` and the group `workers`.
OTHER_MAY = {"status", "topics", "groups", "get", "cancel", "reschedule"}
SHOP_MAY = OPERATIONS.keys() - {"resend_dead_letters", "delete_dead_letters", "create_topic"}


def may(ball: Timeball, name: str) -> bool:
    """Check whether the account of this client may carry out the operation."""
    try:
        OPERATIONS[name](ball)
    except Forbidden:
        return False
    except (NotFound, RequestError):
        pass  # allowed, but the operation has no valid subject
    return True


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_needs_its_permission(
    shop: Timeball, other: Timeball, root: Timeball, name: str
) -> None:
    assert may(root, name)
    assert may(shop, name) is (name in SHOP_MAY)
    assert may(other, name) is (name in OTHER_MAY)


async def create_retry_topic(node: RunningNode, group: str, topic: str) -> None:
    """Create the retry topic of a group: send a message, and give it back as a member of the group."""
    await node.broker.send(pa.RecordBatch.from_pydict({"topic": [topic], "body": [b"x"]}))
    received = await node.broker.consuming.receive(ReceiveRequest(group, topic, rows=1), 0)
    assert await node.broker.consuming.nack(received.receipts[0], 0)


def test_each_receive_needs_its_permission(
    node: RunningNode, shop: Timeball, other: Timeball, root: Timeball
) -> None:
    shop.send("orders", "read me")
    assert b"read me" in [message.body for message in shop.pull("orders", "workers")]
    for forbidden in (
        lambda: other.pull("orders", "readers", wait=0),
        lambda: shop.pull("orders", "readers", wait=0),
        lambda: shop.pull("made-up", "workers", wait="0.1s"),
    ):
        with pytest.raises(Forbidden):
            forbidden()
    node.run(create_retry_topic(node, "workers", "orders"))
    assert shop.topics().keys() == {"orders", "%RETRY%workers_orders"} and other.topics().keys() == {"news"}
    assert {"orders", "news"} <= root.topics().keys()
    assert "made-up" not in node.broker.topics()


def test_a_forbidden_send_is_not_stored_and_creates_no_topic(node: RunningNode, shop: Timeball) -> None:
    shop.send("orders", "1")
    before = node.broker.log.writer.next_seq
    with pytest.raises(Forbidden, match="news"):
        shop.send("news", "2")
    with pytest.raises(Forbidden, match="made-up"):
        shop.send("made-up", "3")
    assert node.broker.log.writer.next_seq == before and "made-up" not in node.broker.topics()
    assert shop.send("orders", "5").seq == before


def test_pending_messages_of_a_forbidden_topic_are_not_found(
    node: RunningNode, shop: Timeball, other: Timeball, root: Timeball
) -> None:
    mine = shop.send("orders", "mine", after="1h", keys="k-1")
    theirs = other.send("news", "theirs", after="1h", keys="k-1", message_id=mine.id)
    assert [verdict.verdict for verdict in other.cancel(ids=[mine.id])] == ["cancelled"], (
        "only the message of `other` with this id"
    )
    assert other.cancel(mine.id).seq == theirs.seq
    assert other.cancel(shop.send("orders", "x", after="1h").id).verdict == "not_found"
    caller = node.node.edges.flight.caller({"authorization": "Bearer other:other secret 2"})  # type: ignore[union-attr]
    by_number = node.run(node.broker.cancel(seqs=[mine.seq], caller=caller))
    assert [verdict.verdict for verdict in by_number] == ["not_found"]
    [verdict] = shop.cancel(key="k-1")
    assert (verdict.seq, verdict.verdict) == (mine.seq, "cancelled")
    assert {verdict.seq for verdict in root.cancel(key="k-1")} == {mine.seq, theirs.seq}


def test_pending_messages_of_a_forbidden_topic_are_not_rescheduled(
    node: RunningNode, shop: Timeball, other: Timeball
) -> None:
    mine = shop.send("orders", "mine", after="1h")
    assert other.reschedule(mine.id, after="2h").verdict == "not_found"
    caller = node.node.edges.flight.caller({"authorization": "Bearer other:other secret 2"})  # type: ignore[union-attr]
    (by_number,) = node.run(node.broker.reschedule(seqs=[mine.seq], delay_ms=5, caller=caller))
    assert by_number.verdict == "not_found"
    assert shop.reschedule(mine.id, after="2h").verdict == "rescheduled"
