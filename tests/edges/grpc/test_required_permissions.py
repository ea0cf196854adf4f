"""Each call of the service with accounts that have the permission and accounts that do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.edges.grpc.wire import Wire, consumer_settings, producer_settings
from tests.edges.http2.raw_client import RawClient, fields
from tests.node_fixture import RunningNode, running_node

from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc._generated import service_pb2 as service
from timeball.edges.grpc.calls import Stream, choose_producer_stream
from timeball.edges.grpc.dispatch import ACCOUNT_ONLY, METHODS, REQUIRED_PERMISSIONS, SERVICE_NAME
from timeball.model.access import Verb

ACCESS = """
[[accounts]]
access_key = "shop"
secret_key = "shop's secret"
topics = { orders = "PUB" }

[[accounts]]
access_key = "billing"
secret_key = "billing's secret"
topics = { orders = "SUB" }
groups = { billing = "SUB" }

[[accounts]]
access_key = "root"
secret_key = "root's secret"
admin = true
"""

ORDERS, BILLING = definition.Resource(name="orders"), definition.Resource(name="billing")
QUEUE = definition.MessageQueue(topic=ORDERS)
REQUESTS = {
    "QueryRoute": service.QueryRouteRequest(topic=ORDERS),
    "QueryOffset": service.QueryOffsetRequest(message_queue=QUEUE),
    "SendMessage": service.SendMessageRequest(messages=[definition.Message(topic=ORDERS)]),
    "EndTransaction": service.EndTransactionRequest(topic=ORDERS),
    "RecallMessage": service.RecallMessageRequest(topic=ORDERS),
    "QueryAssignment": service.QueryAssignmentRequest(topic=ORDERS, group=BILLING),
    "AckMessage": service.AckMessageRequest(topic=ORDERS, group=BILLING),
    "ChangeInvisibleDuration": service.ChangeInvisibleDurationRequest(topic=ORDERS, group=BILLING),
    "ForwardMessageToDeadLetterQueue": service.ForwardMessageToDeadLetterQueueRequest(
        topic=ORDERS, group=BILLING
    ),
    "ReceiveMessage": service.ReceiveMessageRequest(message_queue=QUEUE, group=BILLING, batch_size=1),
    "PullMessage": service.PullMessageRequest(message_queue=QUEUE, group=BILLING),
    "UpdateOffset": service.UpdateOffsetRequest(message_queue=QUEUE, group=BILLING),
    "GetOffset": service.GetOffsetRequest(message_queue=QUEUE, group=BILLING),
    "SyncLiteSubscription": service.SyncLiteSubscriptionRequest(topic=ORDERS, group=BILLING),
    "Heartbeat": service.HeartbeatRequest(),
    "NotifyClientTermination": service.NotifyClientTerminationRequest(),
}
PRODUCER_CALLS = {"SendMessage", "EndTransaction", "RecallMessage", "QueryRoute", "QueryOffset"}
CONSUMER_CALLS = REQUIRED_PERMISSIONS.keys() - PRODUCER_CALLS | {"QueryRoute", "QueryOffset"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    folder = tmp_path_factory.mktemp("guarded")
    accounts = folder / "access.toml"
    accounts.write_text(ACCESS)
    accounts.chmod(0o600)
    with running_node(folder / "data", access_file=str(accounts)) as running:
        running.broker.tables.topics.ensure("orders", 1)
        yield running


def wire_of(node: RunningNode, name: str, secret: str = "") -> Wire:
    """Connect with the bearer token of an account."""
    secret = secret or f"{name}'s secret"
    return Wire.to(node, name, authorization=f"Bearer {name}:{secret}")


def code(wire: Wire, name: str) -> int:
    """Make a call with its request in REQUESTS, and return the code of its status."""
    request = REQUESTS[name]
    if METHODS[name].gives_stream:
        return next(iter(wire.stream(name, request))).status.code
    return int(wire.ask(name, request).status.code)


def test_every_call_has_a_required_permission() -> None:
    assert METHODS.keys() == REQUIRED_PERMISSIONS.keys() | ACCOUNT_ONLY | {"SyncLiteSubscription"}
    assert METHODS.keys() == REQUESTS.keys() | {"Telemetry"}
    assert all(required.verb is not Verb.ADMIN for required in REQUIRED_PERMISSIONS.values())


@pytest.mark.parametrize("name", REQUESTS)
def test_a_caller_without_a_valid_account_is_unauthorized(node: RunningNode, name: str) -> None:
    with Wire.to(node, "without-account") as nobody, wire_of(node, "shop", "another secret") as wrong:
        assert code(nobody, name) == code(wrong, name) == definition.Code.UNAUTHORIZED


@pytest.mark.parametrize("name", REQUIRED_PERMISSIONS)
def test_an_account_may_make_exactly_the_calls_that_its_rights_allow(node: RunningNode, name: str) -> None:
    for account, allowed_calls in (
        ("shop", PRODUCER_CALLS),
        ("billing", CONSUMER_CALLS),
        ("root", REQUIRED_PERMISSIONS.keys()),
    ):
        with wire_of(node, account) as wire:
            assert (code(wire, name) == definition.Code.FORBIDDEN) == (name not in allowed_calls), account


@pytest.mark.parametrize("name", sorted(REQUIRED_PERMISSIONS.keys() - {"ReceiveMessage", "PullMessage"}))
def test_rights_on_one_topic_do_not_allow_calls_on_another(node: RunningNode, name: str) -> None:
    request = type(REQUESTS[name])()
    request.CopyFrom(REQUESTS[name])
    for field, value in request.ListFields():
        if field.name == "topic":
            value.name = "secrets"
        elif field.name == "message_queue":
            value.topic.name = "secrets"
        elif field.name == "messages":
            value[0].topic.name = "secrets"
    for account in ("shop", "billing"):
        with wire_of(node, account) as wire:
            assert wire.ask(name, request).status.code == definition.Code.FORBIDDEN


def test_a_call_on_two_topics_requires_rights_on_both(node: RunningNode) -> None:
    messages = [
        definition.Message(topic=ORDERS),
        definition.Message(topic=definition.Resource(name="secrets")),
    ]
    with wire_of(node, "shop") as wire:
        assert (
            wire.ask("SendMessage", service.SendMessageRequest(messages=messages)).status.code
            == definition.Code.FORBIDDEN
        )


def test_settings_with_forbidden_topics_or_groups_are_refused(node: RunningNode) -> None:
    settings = {
        "shop": (producer_settings("orders"), consumer_settings("billing")),
        "billing": (consumer_settings("billing"), producer_settings("orders")),
    }
    for account, (allowed, forbidden) in settings.items():
        with wire_of(node, account) as wire:
            wire.telemetry(allowed).cut()
            refused = wire.telemetry()
            refused.send(service.TelemetryCommand(settings=forbidden))
            assert next(refused).status.code == definition.Code.FORBIDDEN


def test_a_heartbeat_for_a_forbidden_group_does_not_create_it(node: RunningNode) -> None:
    with wire_of(node, "billing") as wire:
        wire.telemetry(consumer_settings("billing")).cut()
        for group, expected in (("billing", definition.Code.OK), ("secrets", definition.Code.FORBIDDEN)):
            beat = service.HeartbeatRequest(group=definition.Resource(name=group))
            assert wire.ask("Heartbeat", beat).status.code == expected
    assert node.broker.tables.groups.find_group("secrets") is None


def test_clients_of_two_accounts_with_the_same_id_are_separate(node: RunningNode) -> None:
    """Otherwise a client of another account could end the session of a client with the same id, or get its commands."""
    headers = [f"Bearer {name}:{name}'s secret" for name in ("shop", "billing")]
    wires = [Wire.to(node, "namesake", authorization=header) for header in headers]
    with wires[0] as shop, wires[1] as other:
        mine = shop.telemetry(producer_settings("orders"))
        theirs = other.telemetry(consumer_settings("billing"))
        other.ask_ok("NotifyClientTermination", REQUESTS["NotifyClientTermination"])
        shop.ask_ok("Heartbeat", REQUESTS["Heartbeat"])
        assert node.node.edges is not None
        stream = choose_producer_stream(node.node.edges.grpc.context.sessions, "orders", lambda caller: True)
        assert stream is not None and stream.caller.name == "shop"
        mine.cut(), theirs.cut()


def test_a_stream_is_not_chosen_after_its_account_has_lost_the_right(tmp_path: Path) -> None:
    accounts = tmp_path / "access.toml"
    accounts.touch(0o600)
    accounts.write_text(ACCESS)
    with running_node(tmp_path / "data", access_file=str(accounts)) as node, wire_of(node, "shop") as shop:
        assert node.node.edges is not None
        clients, stream = node.node.edges.grpc.context.sessions, shop.telemetry(producer_settings("orders"))

        def producer() -> Stream | None:
            """Choose the stream of a producer for the topic."""
            return choose_producer_stream(
                clients, "orders", lambda caller: caller.may(Verb.SEND, topic="orders")
            )

        assert producer() is not None
        accounts.write_text(ACCESS.replace('orders = "PUB"', 'orders = "DENY"'))
        node.node.security.reload()
        assert producer() is None
        stream.cut()


def test_a_call_without_a_required_permission_needs_an_administrator(node: RunningNode) -> None:
    with wire_of(node, "shop") as shop, wire_of(node, "root") as root:
        assert code(shop, "SyncLiteSubscription") == definition.Code.FORBIDDEN
        assert code(root, "SyncLiteSubscription") == definition.Code.NOT_IMPLEMENTED


def test_without_an_access_file_every_call_is_allowed(tmp_path: Path) -> None:
    with running_node(tmp_path) as node, Wire.to(node) as wire:
        wire.ask_ok("QueryRoute", REQUESTS["QueryRoute"])


@pytest.mark.parametrize("name", ["Telemetry", "SendMessage", "ReceiveMessage"])
def test_an_unknown_caller_is_refused_before_its_request_is_received(node: RunningNode, name: str) -> None:
    edges = node.node.edges
    assert edges is not None
    with RawClient(node) as client:
        number = client.headers(headers=fields(f"/{SERVICE_NAME}/{name}", x_mq_client_id="without-account"))
        assert client.status(number)[0] == 0  # the refusal is in the response, as RocketMQ's clients expect
        assert not edges.grpc.service.call_limits.calls.taken


def test_one_account_alone_gets_half_of_the_calls(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    edges = node.node.edges
    assert edges is not None
    calls = edges.grpc.service.call_limits.calls
    monkeypatch.setattr(calls, "limit", 6)

    async def change_calls_of_other_addresses(take: bool) -> None:
        """Begin or end three calls of the account from other addresses."""
        for n in range(3):
            (calls.take if take else calls.give_back)(f"10.0.0.{n}", "shop")

    node.run(change_calls_of_other_addresses(True))
    try:
        with wire_of(node, "shop") as shop, wire_of(node, "root") as root:
            assert code(shop, "QueryRoute") == definition.Code.TOO_MANY_REQUESTS
            assert code(root, "QueryRoute") == definition.Code.OK
    finally:
        node.run(change_calls_of_other_addresses(False))
