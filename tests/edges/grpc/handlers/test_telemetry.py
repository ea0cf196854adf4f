"""How a client makes itself known, over the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.edges.grpc.wire import Wire, consumer_settings, d, producer_settings, s
from tests.node_fixture import RunningNode, eventually

from timeball.broker.registry.groups import CustomizedRetry, RetryPolicy, SubscriptionGroup
from timeball.edges.grpc.handlers.telemetry import answered, attempts_max, duration
from timeball.edges.grpc.session import Client
from timeball.model import limits


def known(node: RunningNode, name: str) -> Client | None:
    assert node.node.edges is not None
    return node.node.edges.grpc.context.sessions.get(name)


def test_settings_are_answered_first(node: RunningNode, wire: Wire) -> None:
    stream = wire.telemetry()
    stream.send(s.TelemetryCommand(settings=producer_settings("orders")))
    answer = next(stream)
    assert answer.status.code == d.Code.OK
    assert answer.settings.publishing.max_body_size > 0
    client = known(node, "client-1")
    assert client is not None and len(client.streams) == 1 and not client.is_consumer


def test_settings_may_be_sent_again(node: RunningNode, wire: Wire) -> None:
    stream = wire.telemetry(consumer_settings("g"))
    stream.send(s.TelemetryCommand(settings=consumer_settings("h")))
    assert next(stream).settings.subscription.group.name == "h"
    client = known(node, "client-1")
    assert client is not None and len(client.streams) == 1


def test_what_is_no_settings_is_let_pass(wire: Wire) -> None:
    stream = wire.telemetry()
    stream.send(s.TelemetryCommand(thread_stack_trace=s.ThreadStackTrace(nonce="1")))
    stream.send(s.TelemetryCommand())
    stream.send(s.TelemetryCommand(settings=consumer_settings("g")))
    assert next(stream).settings.subscription.group.name == "g"


def test_a_stream_ends_when_its_client_ends_it(node: RunningNode, wire: Wire) -> None:
    stream = wire.telemetry(consumer_settings("g"))
    stream.end()
    assert list(stream) == []
    client = known(node, "client-1")
    assert client is not None and client.streams == []  # it may come again


def test_a_client_that_is_cut_off_has_no_stream(node: RunningNode, wire: Wire) -> None:
    wire.telemetry(consumer_settings("g")).cut()
    client = known(node, "client-1")
    assert client is not None
    eventually(lambda: not client.streams, "its stream is closed")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (d.Settings(), d.Code.UNRECOGNIZED_CLIENT_TYPE),
        (d.Settings(client_type=d.ClientType.LITE_PUSH_CONSUMER), d.Code.UNRECOGNIZED_CLIENT_TYPE),
        (consumer_settings("no name"), d.Code.ILLEGAL_CONSUMER_GROUP),
        (producer_settings("no/topic"), d.Code.ILLEGAL_TOPIC),
    ],
)
def test_bad_settings_are_refused_in_words(wire: Wire, settings: d.Settings, code: int) -> None:
    stream = wire.telemetry()
    stream.send(s.TelemetryCommand(settings=settings))
    answer = next(stream)
    assert answer.status.code == code and answer.status.message
    assert list(stream) == []


def test_a_client_without_a_name_is_refused(node: RunningNode) -> None:
    with Wire.to(node, client_id="") as wire:
        stream = wire.telemetry()
        stream.send(s.TelemetryCommand(settings=consumer_settings("g")))
        assert next(stream).status.code == d.Code.CLIENT_ID_REQUIRED
        assert wire.ask("Heartbeat", s.HeartbeatRequest()).status.code == d.Code.CLIENT_ID_REQUIRED


def test_heartbeats_count_once_there_are_settings(node: RunningNode, wire: Wire) -> None:
    beat = s.HeartbeatRequest(group=d.Resource(name="g"), client_type=d.ClientType.SIMPLE_CONSUMER)
    assert wire.ask("Heartbeat", beat).status.code == d.Code.UNRECOGNIZED_CLIENT_TYPE
    wire.telemetry(consumer_settings("g"))
    wire.ask_ok("Heartbeat", beat)


def test_a_good_bye_is_the_end(node: RunningNode, wire: Wire) -> None:
    wire.telemetry(consumer_settings("g"))
    wire.ask_ok("NotifyClientTermination", s.NotifyClientTerminationRequest(group=d.Resource(name="g")))
    assert known(node, "client-1") is None
    wire.ask_ok("NotifyClientTermination", s.NotifyClientTerminationRequest())  # again: nothing to do
    assert wire.ask("Heartbeat", s.HeartbeatRequest()).status.code == d.Code.UNRECOGNIZED_CLIENT_TYPE


def test_two_clients_are_two(node: RunningNode, wire: Wire) -> None:
    with Wire.to(node, "client-2") as other:
        wire.telemetry(consumer_settings("g"))
        other.telemetry(consumer_settings("g"))
        other.ask_ok("NotifyClientTermination", s.NotifyClientTerminationRequest())
        assert known(node, "client-1") is not None and known(node, "client-2") is None


@given(st.integers(0, limits.DELAY_MS_MAX))
def test_durations_come_back(ms: int) -> None:
    assert duration(ms).ToMilliseconds() == ms


def test_a_producer_hears_how_large_a_body_may_be() -> None:
    asked = producer_settings("orders")
    found = answered(asked, None, check_types=True)
    assert found.publishing.max_body_size == limits.BODY_BYTES_MAX  # told 0, a client can send nothing
    assert found.publishing.validate_message_type
    assert list(found.publishing.topics) == list(asked.publishing.topics)
    # The Java client takes no other for a producer.
    assert found.backoff_policy.WhichOneof("strategy") == "exponential_backoff"
    assert found.backoff_policy.max_attempts == 3
    assert asked == producer_settings("orders")  # what the client said stays as it is
    assert not answered(asked, None, check_types=False).publishing.validate_message_type


@pytest.mark.parametrize("in_order", [False, True])
def test_a_consumer_hears_how_its_group_consumes(in_order: bool) -> None:
    group = SubscriptionGroup("g", consume_message_orderly=in_order, retry_max_times=4)
    found = answered(consumer_settings("g"), group, check_types=True)
    assert found.subscription.fifo == in_order
    assert found.subscription.receive_batch_size > 0
    assert found.subscription.long_polling_timeout.ToMilliseconds() == 20_000
    assert found.subscription.group.name == "g"
    assert found.backoff_policy.max_attempts == 5  # once, and four times again
    assert found.backoff_policy.WhichOneof("strategy") is not None


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (RetryPolicy(), [1, 5, 10, 30, 60, 120, 180]),
        (RetryPolicy(customized_retry_policy=CustomizedRetry([7_000, 9_000])), [7, 9, 9, 9, 9, 9, 9]),
    ],
)
def test_a_push_consumer_hears_the_pauses_that_rocketmqs_proxy_tells(
    policy: RetryPolicy, seconds: list[int]
) -> None:
    group = SubscriptionGroup("g", retry_max_times=6, group_retry_policy=policy)
    told = answered(consumer_settings("g"), group, check_types=True).backoff_policy
    assert [each.ToMilliseconds() for each in told.customized_backoff.next] == [s * 1_000 for s in seconds]


def test_a_group_without_a_number_of_its_own_has_rocketmqs() -> None:
    assert attempts_max(SubscriptionGroup("g", retry_max_times=-1)) == 17
    assert attempts_max(SubscriptionGroup("g", retry_max_times=0)) == 1


def test_node_is_told_a_policy_that_it_can_read() -> None:
    """RocketMQ's Node client takes a customised policy for one attempt and no more."""
    group = SubscriptionGroup("g", retry_max_times=4)
    asked = consumer_settings("g")
    assert answered(asked, group, check_types=True).backoff_policy.HasField("customized_backoff")
    asked.user_agent.language = d.Language.NODE_JS
    policy = answered(asked, group, check_types=True).backoff_policy
    assert policy.HasField("exponential_backoff") and policy.max_attempts == 5


def test_members_with_different_topics_are_told_of(node: RunningNode, wire: Wire) -> None:
    stream = None
    for topics in (["a"], ["a", "b"], ["a"]):
        said = consumer_settings("different-topics")
        said.subscription.subscriptions.extend(
            d.SubscriptionEntry(topic=d.Resource(name=topic)) for topic in topics
        )
        # What another client says counts the same.
        if stream is None:
            stream = wire.telemetry(said)
        else:
            stream.send(s.TelemetryCommand(settings=said))
            next(stream)
    subscriptions = node.node.broker.consuming.subscriptions
    assert [one.wanted for one in subscriptions.conflicts("different-topics")] == [["a", "a, b"]]


def test_a_topic_is_named_with_its_namespace(node: RunningNode, wire: Wire) -> None:
    """As by members that use remoting, which have the namespace in the name."""
    said = consumer_settings("members")
    said.subscription.group.resource_namespace = "shop"
    said.subscription.subscriptions.append(
        d.SubscriptionEntry(topic=d.Resource(name="orders", resource_namespace="shop"))
    )
    subscriptions = node.node.broker.consuming.subscriptions
    subscriptions.hear_topics("shop%members", ["shop%orders"])
    wire.telemetry(said)
    subscriptions.hear_topics("shop%members", ["shop%orders"])
    assert subscriptions.conflicts("shop%members") == []
    for topic in ("shop%others", "shop%orders"):
        subscriptions.hear_topics("shop%members", [topic])
    assert [one.wanted for one in subscriptions.conflicts("shop%members")] == [["shop%orders", "shop%others"]]
