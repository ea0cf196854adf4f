"""Every edge against every kind of topic: whether it may be sent to, now and for later, and read, has one answer.

The answers stand in TABLE once, for all edges. Each edge has a topic of its own of each kind, as a send may make one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.edges.grpc import wire as grpc_wire
from tests.edges.grpc.sending import message, send_request
from tests.edges.remoting import wire as remoting_wire
from tests.edges.remoting.handlers.test_sends import sent
from tests.node_fixture import RunningNode, running_node

import timeball.edges
from timeball import Timeball
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topic import READ, WRITE, TopicConfig
from timeball.edges.grpc._generated import definition_pb2 as d
from timeball.edges.grpc._generated import service_pb2 as s
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.model.access import ANONYMOUS
from timeball.model.errors import TimeballError

HOUR_MS = 3_600_000
GROUP = "readers"
OK, FORBIDDEN, NOT_FOUND, NO_GROUP, BAD_NAME = "ok", "forbidden", "not found", "no group", "bad name"

# What each protocol's stock clients are told.
REMOTING = {
    ResponseCode.SUCCESS: OK, ResponseCode.PULL_NOT_FOUND: OK, ResponseCode.PULL_OFFSET_MOVED: OK,
    ResponseCode.NO_PERMISSION: FORBIDDEN, ResponseCode.TOPIC_NOT_EXIST: NOT_FOUND,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: NO_GROUP, ResponseCode.INVALID_PARAMETER: BAD_NAME,
}  # fmt: skip
GRPC = {
    d.Code.OK: OK, d.Code.MESSAGE_NOT_FOUND: OK, d.Code.FORBIDDEN: FORBIDDEN, d.Code.TOPIC_NOT_FOUND: NOT_FOUND,
    d.Code.CONSUMER_GROUP_NOT_FOUND: NO_GROUP, d.Code.ILLEGAL_TOPIC: BAD_NAME,
}  # fmt: skip
FLIGHT = {
    "forbidden": FORBIDDEN, "not_found": NOT_FOUND, "group_not_found": NO_GROUP, "invalid_name": BAD_NAME,
    "bad_request": BAD_NAME, "invalid_message": BAD_NAME,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of topic. `begin` makes one of this name; what is said of it: a send, a delayed one, a read, a cancel."""

    name: str
    begin: Callable[[RunningNode, str], None]
    send: str
    read: str
    recall: str = OK  # of what a delayed send has promised, once the topic is as `begin` has made it


def configured(perm: int, **queues: int) -> Callable[[RunningNode, str], None]:
    def begin(node: RunningNode, name: str) -> None:
        config = TopicConfig(**{"read_queues": 1, "write_queues": 1, "perm": perm, **queues})
        node.run(_on_loop(lambda: node.broker.tables.topics.configure(name, config)))

    return begin


def nothing(node: RunningNode, name: str) -> None:
    pass


def deleted(node: RunningNode, name: str) -> None:
    configured(READ | WRITE)(node, name)
    node.run(_on_loop(lambda: node.broker.tables.topics.delete(name, node.broker.log.writer.next_seq)))


def with_group(node: RunningNode, name: str) -> None:
    group = name.removeprefix("%RETRY%").removeprefix("%DLQ%")
    node.run(_on_loop(lambda: node.broker.policy.register(group, ANONYMOUS)))
    if name.startswith("%DLQ%"):
        configured(READ | WRITE)(node, name)


async def _on_loop(act: Callable[[], Any]) -> None:
    act()


# {edge} is the edge's own topic. With topics made on first use:
TABLE = [
    Kind("normal-{edge}", configured(READ | WRITE), OK, OK),
    Kind("read-only-{edge}", configured(READ), FORBIDDEN, OK),
    Kind("write-only-{edge}", configured(WRITE), OK, FORBIDDEN),
    Kind("closed-{edge}", configured(0), FORBIDDEN, FORBIDDEN),
    Kind("no-write-queue-{edge}", configured(READ | WRITE, write_queues=0), FORBIDDEN, OK),
    Kind("SCHEDULE_TOPIC_XXXX", nothing, FORBIDDEN, OK),
    Kind("RMQ_SYS_TRANS_HALF_TOPIC", nothing, FORBIDDEN, NOT_FOUND),
    Kind("RMQ_SYS_TRANS_OP_HALF_TOPIC", nothing, FORBIDDEN, NOT_FOUND),
    Kind("TRANS_CHECK_MAX_TIME_TOPIC", nothing, FORBIDDEN, NOT_FOUND),
    Kind("SELF_TEST_TOPIC", nothing, FORBIDDEN, NOT_FOUND),
    Kind("OFFSET_MOVED_EVENT", nothing, FORBIDDEN, NOT_FOUND),
    Kind("rmq_sys_wheel_timer", nothing, FORBIDDEN, NOT_FOUND),
    Kind("%RETRY%group-{edge}", with_group, OK, OK),
    Kind("%RETRY%nobody-{edge}", nothing, NO_GROUP, NOT_FOUND),
    Kind("%DLQ%group-{edge}", with_group, OK, OK),
    Kind("%DLQ%nobody-{edge}", nothing, OK, NOT_FOUND),
    Kind("unknown-{edge}", nothing, OK, NOT_FOUND),
    Kind("deleted-{edge}", deleted, OK, NOT_FOUND),
    Kind("t" * 126 + "-{edge}", nothing, BAD_NAME, NOT_FOUND),
    Kind("no name {edge}", nothing, BAD_NAME, NOT_FOUND),
]
# And where they are not, what differs:
NOT_MADE = {
    "%DLQ%nobody-{edge}": NOT_FOUND, "unknown-{edge}": NOT_FOUND, "deleted-{edge}": NOT_FOUND,
}  # fmt: skip


class Flight:
    """Timeball's own client."""

    def __init__(self, node: RunningNode) -> None:
        self.ball = Timeball(node.endpoint)
        self.close = self.ball.close

    def _told(self, ask: Callable[[], object]) -> str:
        try:
            ask()
        except TimeballError as error:
            return FLIGHT[error.code]
        return OK

    def send(self, topic: str) -> str:
        return self._told(lambda: self.ball.send(topic, b"x"))

    def later(self, topic: str) -> tuple[str, str | None]:
        ids: list[str] = []
        said = self._told(lambda: ids.append(self.ball.send(topic, b"x", after="3600s").id))
        if said != OK:
            return said, None
        return said, self.ball.cancel(ids[0]).verdict

    def read(self, topic: str) -> str:
        return self._told(lambda: self.ball.pull(topic, GROUP, wait=0))


class Remoting:
    """RocketMQ 4's and 5's Java client, as far as its frames."""

    def __init__(self, node: RunningNode) -> None:
        self.node, self.wire = node, remoting_wire.Wire.to(node)
        self.close = self.wire.close

    def send(self, topic: str) -> str:
        return REMOTING[ResponseCode(sent(self.wire, topic=topic).code)]

    def later(self, topic: str) -> tuple[str, str | None]:
        due_ms = self.node.broker.clock.now_ms() + HOUR_MS
        answer = sent(self.wire, topic=topic, properties={"TIMER_DELIVER_MS": str(due_ms)})
        if answer.code or "recallHandle" not in answer.ext:
            return REMOTING[ResponseCode(answer.code)], None
        recalled = self.wire.ask(
            RequestCode.RECALL_MESSAGE,
            producerGroup="p",
            topic=topic,
            recallHandle=answer.ext["recallHandle"],
        )
        return OK, "cancelled" if recalled.code == 0 else str(recalled.remark)

    def read(self, topic: str) -> str:
        fields = {"consumerGroup": GROUP, "topic": topic, "queueId": 0}
        pulled = self.wire.ask(
            RequestCode.PULL_MESSAGE, **fields, queueOffset=0, maxMsgNums=8, sysFlag=4, commitOffset=0,
            suspendTimeoutMillis=0, subscription="*", subVersion=0,
        )  # fmt: skip
        popped = self.wire.ask(
            RequestCode.POP_MESSAGE, **fields, maxMsgNums=8, invisibleTime=60_000, pollTime=0, bornTime=0,
            initMode=0, expType="TAG", exp="*",
        )  # fmt: skip
        said = {REMOTING[ResponseCode(answer.code)] for answer in (pulled, popped)}
        assert len(said) == 1, (
            f"{topic}: pull {pulled.code} {pulled.remark}, pop {popped.code} {popped.remark}"
        )
        return said.pop()


class Grpc:
    """RocketMQ 5's clients."""

    def __init__(self, node: RunningNode) -> None:
        self.node, self.wire = node, grpc_wire.Wire.to(node)
        self.close = self.wire.close

    def send(self, topic: str) -> str:
        response = self.wire.ask("SendMessage", send_request(message(topic=topic)))
        return GRPC[response.status.code]

    def later(self, topic: str) -> tuple[str, str | None]:
        due_ms = self.node.broker.clock.now_ms() + HOUR_MS
        response = self.wire.ask("SendMessage", send_request(message(topic=topic, due_ms=due_ms)))
        if response.status.code != d.Code.OK:
            return GRPC[response.status.code], None
        handle = response.entries[0].recall_handle
        request = s.RecallMessageRequest(topic=d.Resource(name=topic), recall_handle=handle)
        recalled = self.wire.ask("RecallMessage", request).status
        return OK, "cancelled" if recalled.code == d.Code.OK else recalled.message

    def read(self, topic: str) -> str:
        request = grpc_wire.receive_request(GROUP, topic, wait_ms=0)
        first = next(iter(self.wire.stream("ReceiveMessage", request)))
        return GRPC[first.status.code]


EDGES = {"flight": Flight, "remoting": Remoting, "grpc": Grpc}


@pytest.fixture(scope="module", params=[True, False], ids=["auto-create", "no-auto-create"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(
        tmp_path_factory.mktemp("node") / "data", auto_create_topics=request.param, queues_per_topic=1
    ) as running:
        running.run(running.broker.create_topic("levels", 1))
        running.run(running.broker.send(_by_level()))  # makes SCHEDULE_TOPIC_XXXX
        yield running


def _by_level() -> Any:
    return pa.record_batch({"topic": ["levels"], "body": [b"x"], "delay_level": pa.array([18], pa.int32())})


@pytest.fixture(scope="module")
def edges(node: RunningNode) -> Iterator[dict[str, Any]]:
    made = {name: kind(node) for name, kind in EDGES.items()}
    yield made
    for edge in made.values():
        edge.close()


def answers(node: RunningNode, edges: dict[str, Any], kind: Kind, verb: str) -> dict[str, Any]:
    """What each edge says; `verb`: read, send or later."""
    found = {}
    for name, edge in edges.items():
        topic = kind.name.format(edge=f"{verb[0]}{name[0]}")
        kind.begin(node, topic)
        found[name] = getattr(edge, verb)(topic)
    return found


def expected(node: RunningNode, kind: Kind) -> str:
    makes = node.settings.auto_create_topics
    return kind.send if makes else NOT_MADE.get(kind.name, kind.send)


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name[:40])
def test_one_answer_to_a_send(node: RunningNode, edges: dict[str, Any], kind: Kind) -> None:
    assert answers(node, edges, kind, "send") == dict.fromkeys(EDGES, expected(node, kind))


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name[:40])
def test_one_answer_to_a_delayed_send_and_its_cancel(
    node: RunningNode, edges: dict[str, Any], kind: Kind
) -> None:
    found = answers(node, edges, kind, "later")
    assert {name: said for name, (said, _) in found.items()} == dict.fromkeys(EDGES, expected(node, kind))
    if expected(node, kind) == OK and not kind.name.startswith("%"):
        # What is on its way back to a group has no handle over remoting, and no id by which Flight would cancel it.
        assert {name: verdict for name, (_, verdict) in found.items()} == dict.fromkeys(EDGES, "cancelled")


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name[:40])
def test_one_answer_to_a_reader(node: RunningNode, edges: dict[str, Any], kind: Kind) -> None:
    before = set(node.broker.topics())
    found = answers(node, edges, kind, "read")
    if kind.read == NOT_FOUND:
        assert set(found.values()) <= {NOT_FOUND, BAD_NAME}, found
        assert set(node.broker.topics()) <= before, "reading makes no topic"
    else:
        assert found == dict.fromkeys(EDGES, kind.read)


@pytest.mark.parametrize("name", EDGES)
def test_a_group_that_is_switched_off_reads_nothing(
    node: RunningNode, edges: dict[str, Any], name: str
) -> None:
    configured(READ | WRITE)(node, "for-groups")
    groups = node.broker.tables.groups
    assert edges[name].read("for-groups") == OK
    node.run(_on_loop(lambda: groups.update(SubscriptionGroup(GROUP, consume_enable=False))))
    try:
        fresh = EDGES[name](node)  # Flight asks for its group's offsets when it begins
        assert fresh.read("for-groups") == FORBIDDEN
        fresh.close()
    finally:
        node.run(_on_loop(lambda: groups.update(SubscriptionGroup(GROUP))))


# ---- no edge decides ----------------------------------------------------------------------------------------

ASKS_ITSELF = {
    "a topic's permission": r"\.perm\b\s*[&|]",
    "a group's switches": r"\.consume_(broadcast_)?enable\b",
    "a reserved name": r"\breserved(_topics)?\.(forbidden|conflict)\b|import .*\b(forbidden|conflict)\b",
    "an account": r"\b(caller|principal)\.(check|may)\(|\bPrincipal\b",
}


def asked_by(source: str) -> set[str]:
    return {what for what, pattern in ASKS_ITSELF.items() if re.search(pattern, source)}


def test_no_edge_asks_by_itself() -> None:
    edges = Path(timeball.edges.__file__).parent
    found = {
        str(path.relative_to(edges)): asked
        for path in edges.rglob("*.py")
        if "_generated" not in path.parts and (asked := asked_by(path.read_text()))
    }
    # A group's own settings are told and changed by tools; of a message's hidden copy nothing is decided here.
    assert found.keys() <= {"remoting/handlers/admin/groups.py"}, found


@pytest.mark.parametrize(
    "source",
    [
        "if not topic.perm & WRITE:",
        "if not group.consume_enable:",
        "reason = reserved.forbidden(name)",
        "from timeball.broker.reserved_topics import conflict",
        "call.caller.check(Verb.SEND, topic=topic)",
    ],
)
def test_an_edge_that_asks_is_seen(source: str) -> None:
    assert asked_by(source)


def test_the_table_sees_an_edge_that_goes_its_own_way(
    node: RunningNode, edges: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the broker's verb as it was, which asked nothing; the edges of RocketMQ asked by themselves."""
    kind = next(kind for kind in TABLE if kind.name.startswith("read-only"))
    monkeypatch.setattr(node.broker.policy, "admit", lambda names, queues=None, caller=None: None)
    assert answers(node, edges, kind, "send") == {"flight": OK, "remoting": FORBIDDEN, "grpc": FORBIDDEN}
