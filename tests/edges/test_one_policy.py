"""All edges answer sends, delayed sends and reads alike, for every kind of topic.

TABLE has the expected outcomes for all edges. Each edge uses its own topic of each kind, because a send may create it.
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
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topics import READ, WRITE, TopicConfig
from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc._generated import service_pb2 as service
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.model.access import ANONYMOUS
from timeball.model.errors import TimeballError

HOUR_MS = 3_600_000
GROUP = "readers"
OK, FORBIDDEN, NOT_FOUND, NO_GROUP, BAD_NAME = "ok", "forbidden", "not found", "no group", "bad name"

# The codes of each protocol by outcome.
REMOTING = {
    ResponseCode.SUCCESS: OK, ResponseCode.PULL_NOT_FOUND: OK, ResponseCode.PULL_OFFSET_MOVED: OK,
    ResponseCode.NO_PERMISSION: FORBIDDEN, ResponseCode.TOPIC_NOT_EXIST: NOT_FOUND,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: NO_GROUP, ResponseCode.INVALID_PARAMETER: BAD_NAME,
}  # fmt: skip
GRPC = {
    definition.Code.OK: OK, definition.Code.MESSAGE_NOT_FOUND: OK, definition.Code.FORBIDDEN: FORBIDDEN,
    definition.Code.TOPIC_NOT_FOUND: NOT_FOUND,
    definition.Code.CONSUMER_GROUP_NOT_FOUND: NO_GROUP, definition.Code.ILLEGAL_TOPIC: BAD_NAME,
}  # fmt: skip
CODES = {
    "forbidden": FORBIDDEN, "not_found": NOT_FOUND, "group_not_found": NO_GROUP, "invalid_name": BAD_NAME,
    "bad_request": BAD_NAME, "invalid_message": BAD_NAME,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of topic: how to prepare a topic of this kind, and the outcomes of a send, a read and a recall."""

    name: str
    prepare: Callable[[RunningNode, str], None]
    send: str
    read: str
    recall: str = OK  # of a delayed send's message


def configured(perm: int, **queues: int) -> Callable[[RunningNode, str], None]:
    """Return a preparation that creates the topic with these permissions and queues."""

    def prepare(node: RunningNode, name: str) -> None:
        """Create the topic."""
        config = TopicConfig(**{"read_queues": 1, "write_queues": 1, "perm": perm, **queues})
        node.run(_on_loop(lambda: node.broker.tables.topics.configure(name, config)))

    return prepare


def unprepared(node: RunningNode, name: str) -> None:
    """Leave the topic as it is, which mostly means missing."""


def deleted(node: RunningNode, name: str) -> None:
    """Create the topic, and delete it."""
    configured(READ | WRITE)(node, name)
    node.run(_on_loop(lambda: node.broker.tables.topics.delete(name, node.broker.log.writer.next_seq)))


def with_group(node: RunningNode, name: str) -> None:
    """Register the group of a retry or dead letter topic, and create a dead letter topic."""
    group = name.removeprefix("%RETRY%").removeprefix("%DLQ%")
    node.run(_on_loop(lambda: node.broker.policy.register(group, ANONYMOUS)))
    if name.startswith("%DLQ%"):
        configured(READ | WRITE)(node, name)


async def _on_loop(act: Callable[[], Any]) -> None:
    """Run an act in the node's loop."""
    act()


# {edge} is replaced by a name for each edge and verb. The outcomes if topics are created on first use:
TABLE = [
    Kind("normal-{edge}", configured(READ | WRITE), OK, OK),
    Kind("read-only-{edge}", configured(READ), FORBIDDEN, OK),
    Kind("write-only-{edge}", configured(WRITE), OK, FORBIDDEN),
    Kind("closed-{edge}", configured(0), FORBIDDEN, FORBIDDEN),
    Kind("no-write-queue-{edge}", configured(READ | WRITE, write_queues=0), FORBIDDEN, OK),
    Kind("SCHEDULE_TOPIC_XXXX", unprepared, FORBIDDEN, OK),
    Kind("RMQ_SYS_TRANS_HALF_TOPIC", unprepared, FORBIDDEN, NOT_FOUND),
    Kind("RMQ_SYS_TRANS_OP_HALF_TOPIC", unprepared, FORBIDDEN, NOT_FOUND),
    Kind("TRANS_CHECK_MAX_TIME_TOPIC", unprepared, FORBIDDEN, NOT_FOUND),
    Kind("SELF_TEST_TOPIC", unprepared, FORBIDDEN, NOT_FOUND),
    Kind("OFFSET_MOVED_EVENT", unprepared, FORBIDDEN, NOT_FOUND),
    Kind("rmq_sys_wheel_timer", unprepared, FORBIDDEN, NOT_FOUND),
    Kind("%RETRY%group-{edge}", with_group, OK, OK),
    Kind("%RETRY%nobody-{edge}", unprepared, NO_GROUP, NOT_FOUND),
    Kind("%DLQ%group-{edge}", with_group, OK, OK),
    Kind("%DLQ%nobody-{edge}", unprepared, OK, NOT_FOUND),
    Kind("unknown-{edge}", unprepared, OK, NOT_FOUND),
    Kind("deleted-{edge}", deleted, OK, NOT_FOUND),
    Kind("t" * 126 + "-{edge}", unprepared, BAD_NAME, NOT_FOUND),
    Kind("no name {edge}", unprepared, BAD_NAME, NOT_FOUND),
]
# The outcomes of sends that differ if topics are not created on first use:
WITHOUT_AUTO_CREATION = {
    "%DLQ%nobody-{edge}": NOT_FOUND, "unknown-{edge}": NOT_FOUND, "deleted-{edge}": NOT_FOUND,
}  # fmt: skip


class Http:
    """Timeball's client, over HTTP.

    As in the other three classes, `send` and `read` return the outcome of one call, and `delayed_send` that of a send
    and the verdict of a cancel or recall after it (None without a message).
    """

    def __init__(self, node: RunningNode) -> None:
        self.node, self.ball = node, node.client()
        self.close = self.ball.close

    def _outcome(self, act: Callable[[], object]) -> str:
        """Return OK, or the outcome of the error that an act raises."""
        try:
            act()
        except TimeballError as error:
            return CODES[error.code]
        return OK

    def send(self, topic: str) -> str:
        return self._outcome(lambda: self.ball.send(topic, b"x"))

    def delayed_send(self, topic: str) -> tuple[str, str | None]:
        ids: list[str] = []
        outcome = self._outcome(lambda: ids.append(self.ball.send(topic, b"x", after="3600s").id))
        if outcome != OK:
            return outcome, None
        return outcome, self.ball.cancel(ids[0]).verdict

    def read(self, topic: str) -> str:
        return self._outcome(lambda: self.ball.pull(topic, GROUP, wait=0))


class Flight(Http):
    """Timeball's client, with columns over Flight."""

    def send(self, topic: str) -> str:
        return self._outcome(lambda: self.ball.send_many(pa.table({"body": [b"x"] * 300}), topic=topic))

    def delayed_send(self, topic: str) -> tuple[str, str | None]:
        ids, due_ms = [f"of {topic}"], pa.array([self.node.broker.clock.now_ms() + HOUR_MS], pa.int64())
        rows = pa.table({"body": [b"x"], "unique_key": ids, "due_ms": due_ms})
        outcome = self._outcome(lambda: self.ball.send_many(rows, topic=topic))
        return outcome, None if outcome != OK else self.ball.cancel(ids[0]).verdict

    def read(self, topic: str) -> str:
        return self._outcome(lambda: self.ball.browse(topic, GROUP))


class Remoting:
    """The remoting frames of RocketMQ's Java client."""

    def __init__(self, node: RunningNode) -> None:
        self.node, self.wire = node, remoting_wire.Wire.to(node)
        self.close = self.wire.close

    def send(self, topic: str) -> str:
        return REMOTING[ResponseCode(sent(self.wire, topic=topic).code)]

    def delayed_send(self, topic: str) -> tuple[str, str | None]:
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
        outcomes = {REMOTING[ResponseCode(answer.code)] for answer in (pulled, popped)}
        assert len(outcomes) == 1, (
            f"{topic}: pull {pulled.code} {pulled.remark}, pop {popped.code} {popped.remark}"
        )
        return outcomes.pop()


class Grpc:
    """The gRPC calls of RocketMQ 5's clients."""

    def __init__(self, node: RunningNode) -> None:
        self.node, self.wire = node, grpc_wire.Wire.to(node)
        self.close = self.wire.close

    def send(self, topic: str) -> str:
        response = self.wire.ask("SendMessage", send_request(message(topic=topic)))
        return GRPC[response.status.code]

    def delayed_send(self, topic: str) -> tuple[str, str | None]:
        due_ms = self.node.broker.clock.now_ms() + HOUR_MS
        response = self.wire.ask("SendMessage", send_request(message(topic=topic, due_ms=due_ms)))
        if response.status.code != definition.Code.OK:
            return GRPC[response.status.code], None
        handle = response.entries[0].recall_handle
        request = service.RecallMessageRequest(topic=definition.Resource(name=topic), recall_handle=handle)
        recalled = self.wire.ask("RecallMessage", request).status
        return OK, "cancelled" if recalled.code == definition.Code.OK else recalled.message

    def read(self, topic: str) -> str:
        request = grpc_wire.receive_request(GROUP, topic, wait_ms=0)
        first = next(iter(self.wire.stream("ReceiveMessage", request)))
        return GRPC[first.status.code]


EDGES = {"http": Http, "flight": Flight, "remoting": Remoting, "grpc": Grpc}


@pytest.fixture(scope="module", params=[True, False], ids=["auto-create", "no-auto-create"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(
        tmp_path_factory.mktemp("node") / "data", auto_create_topics=request.param, queues_per_topic=1
    ) as running:
        running.run(running.broker.create_topic("levels", 1))
        running.run(running.broker.send(_by_level()))  # makes SCHEDULE_TOPIC_XXXX
        yield running


def _by_level() -> Any:
    """Return a message with a delay level."""
    return pa.record_batch({"topic": ["levels"], "body": [b"x"], "delay_level": pa.array([18], pa.int32())})


@pytest.fixture(scope="module")
def edges(node: RunningNode) -> Iterator[dict[str, Any]]:
    clients = {name: edge_class(node) for name, edge_class in EDGES.items()}
    yield clients
    for edge in clients.values():
        edge.close()


def outcomes_by_edge(node: RunningNode, edges: dict[str, Any], kind: Kind, verb: str) -> dict[str, Any]:
    """Return the outcome of a verb (read, send or delayed_send) by edge, each with a topic of this kind."""
    outcomes = {}
    for name, edge in edges.items():
        # The first letters of the verbs differ, and those of the edges, too.
        topic = kind.name.format(edge=f"{verb[0]}{name[0]}")
        kind.prepare(node, topic)
        outcomes[name] = getattr(edge, verb)(topic)
    return outcomes


def expected_send(node: RunningNode, kind: Kind) -> str:
    """Return the expected outcome of a send to a topic of this kind."""
    return kind.send if node.settings.auto_create_topics else WITHOUT_AUTO_CREATION.get(kind.name, kind.send)


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name[:40])
def test_all_edges_answer_a_send_alike(node: RunningNode, edges: dict[str, Any], kind: Kind) -> None:
    assert outcomes_by_edge(node, edges, kind, "send") == dict.fromkeys(EDGES, expected_send(node, kind))


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name[:40])
def test_all_edges_answer_a_delayed_send_and_its_cancel_alike(
    node: RunningNode, edges: dict[str, Any], kind: Kind
) -> None:
    outcomes = outcomes_by_edge(node, edges, kind, "delayed_send")
    assert {name: outcome for name, (outcome, _) in outcomes.items()} == dict.fromkeys(
        EDGES, expected_send(node, kind)
    )
    if expected_send(node, kind) == OK and not kind.name.startswith("%"):
        # Messages for a retry topic get no recall handle over remoting, and no id by which they could be cancelled.
        assert {name: verdict for name, (_, verdict) in outcomes.items()} == dict.fromkeys(EDGES, "cancelled")


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name[:40])
def test_all_edges_answer_a_read_alike(node: RunningNode, edges: dict[str, Any], kind: Kind) -> None:
    before = set(node.broker.topics())
    outcomes = outcomes_by_edge(node, edges, kind, "read")
    if kind.read == NOT_FOUND:
        assert set(outcomes.values()) <= {NOT_FOUND, BAD_NAME}, outcomes
        assert set(node.broker.topics()) <= before, "a read creates no topic"
    else:
        assert outcomes == dict.fromkeys(EDGES, kind.read)


@pytest.mark.parametrize("name", EDGES)
def test_a_disabled_group_is_forbidden_to_read(node: RunningNode, edges: dict[str, Any], name: str) -> None:
    configured(READ | WRITE)(node, "for-groups")
    groups = node.broker.tables.groups
    assert edges[name].read("for-groups") == OK
    node.run(_on_loop(lambda: groups.update(SubscriptionGroup(GROUP, consume_enable=False))))
    try:
        # A new client, because a browser asks for the offsets of its group only once.
        new_client = EDGES[name](node)
        assert new_client.read("for-groups") == FORBIDDEN
        new_client.close()
    finally:
        node.run(_on_loop(lambda: groups.update(SubscriptionGroup(GROUP))))


# ---- no edge checks permissions itself ----------------------------------------------------------------------

# Patterns of code that checks permissions.
CHECKS = {
    "a topic's permission": r"\.perm\b\s*[&|]",
    "a group's switches": r"\.consume_(broadcast_)?enable\b",
    "a reserved name": r"\b(rules|reserved)\.(forbidden|conflict)\b|import .*\b(forbidden|conflict)\b",
    "an account": r"\b(caller|principal)\.(check|may)\(|\bPrincipal\b",
}


def checks_in(source: str) -> set[str]:
    """Return the kinds of permission checks in this source code."""
    return {name for name, pattern in CHECKS.items() if re.search(pattern, source)}


def test_no_edge_checks_permissions_itself() -> None:
    edges = Path(timeball.edges.__file__).parent
    checks_by_file = {
        str(path.relative_to(edges)): checks
        for path in edges.rglob("*.py")
        if "_generated" not in path.parts and (checks := checks_in(path.read_text()))
    }
    # Tools read and change the settings of groups, which is no check.
    assert checks_by_file.keys() <= {"remoting/handlers/admin/groups.py"}, checks_by_file


@pytest.mark.parametrize(
    "source",
    [
        "if not topic.perm & WRITE:",
        "if not group.consume_enable:",
        "reason = reserved.forbidden(name)",
        "reason = rules.forbidden(name)",
        "from timeball.model.rules import conflict",
        "call.caller.check(Verb.SEND, topic=topic)",
    ],
)
def test_code_that_checks_permissions_is_found(source: str) -> None:
    assert checks_in(source)


def test_the_table_sees_an_edge_that_goes_its_own_way(
    node: RunningNode, edges: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: if the broker's `ensure_topics` checks nothing, the outcome of columns differs from the others."""
    kind = next(kind for kind in TABLE if kind.name.startswith("read-only"))
    monkeypatch.setattr(node.broker.policy, "ensure_topics", lambda names, queues=None, caller=None: None)
    assert outcomes_by_edge(node, edges, kind, "send") == {
        "http": FORBIDDEN,
        "flight": OK,
        "remoting": FORBIDDEN,
        "grpc": FORBIDDEN,
    }
