"""Telemetry, Heartbeat and NotifyClientTermination: sessions begin and end, and settings are completed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.edges.grpc.wire import Wire, consumer_settings, definition, producer_settings, service
from tests.node_fixture import RunningNode, eventually

from timeball.broker.registry.groups import CustomizedRetry, RetryPolicy, SubscriptionGroup
from timeball.edges.grpc.calls import Client
from timeball.edges.grpc.handlers.telemetry import attempts_max, complete_settings, duration
from timeball.model import limits


def session_of(node: RunningNode, name: str) -> Client | None:
    """Return the session of a client by its id, None without a session."""
    assert node.node.edges is not None
    return node.node.edges.grpc.context.sessions.get(name)


def test_the_first_message_on_a_stream_answers_the_settings(node: RunningNode, wire: Wire) -> None:
    stream = wire.telemetry()
    stream.send(service.TelemetryCommand(settings=producer_settings("orders")))
    answer = next(stream)
    assert answer.status.code == definition.Code.OK
    assert answer.settings.publishing.max_body_size > 0
    client = session_of(node, "client-1")
    assert client is not None and len(client.streams) == 1 and not client.is_consumer


def test_settings_sent_again_replace_the_earlier_ones(node: RunningNode, wire: Wire) -> None:
    stream = wire.telemetry(consumer_settings("g"))
    stream.send(service.TelemetryCommand(settings=consumer_settings("h")))
    assert next(stream).settings.subscription.group.name == "h"
    client = session_of(node, "client-1")
    assert client is not None and len(client.streams) == 1


def test_commands_other_than_settings_are_ignored(wire: Wire) -> None:
    stream = wire.telemetry()
    stream.send(service.TelemetryCommand(thread_stack_trace=service.ThreadStackTrace(nonce="1")))
    stream.send(service.TelemetryCommand())
    stream.send(service.TelemetryCommand(settings=consumer_settings("g")))
    assert next(stream).settings.subscription.group.name == "g"


def test_a_stream_that_its_client_ends_is_ended(node: RunningNode, wire: Wire) -> None:
    stream = wire.telemetry(consumer_settings("g"))
    stream.end()
    assert list(stream) == []
    client = session_of(node, "client-1")
    # The session continues, so the client can open another stream.
    assert client is not None and client.streams == []


def test_a_cancelled_stream_is_removed_from_its_session(node: RunningNode, wire: Wire) -> None:
    wire.telemetry(consumer_settings("g")).cut()
    client = session_of(node, "client-1")
    assert client is not None
    eventually(lambda: not client.streams, "its stream is closed")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (definition.Settings(), definition.Code.UNRECOGNIZED_CLIENT_TYPE),
        (
            definition.Settings(client_type=definition.ClientType.LITE_PUSH_CONSUMER),
            definition.Code.UNRECOGNIZED_CLIENT_TYPE,
        ),
        (consumer_settings("no name"), definition.Code.ILLEGAL_CONSUMER_GROUP),
        (producer_settings("no/topic"), definition.Code.ILLEGAL_TOPIC),
    ],
)
def test_invalid_settings_are_refused_with_code_and_text(
    wire: Wire, settings: definition.Settings, code: int
) -> None:
    stream = wire.telemetry()
    stream.send(service.TelemetryCommand(settings=settings))
    answer = next(stream)
    assert answer.status.code == code and answer.status.message
    assert list(stream) == []


def test_a_client_without_an_id_is_refused(node: RunningNode) -> None:
    with Wire.to(node, client_id="") as wire:
        stream = wire.telemetry()
        stream.send(service.TelemetryCommand(settings=consumer_settings("g")))
        assert next(stream).status.code == definition.Code.CLIENT_ID_REQUIRED
        assert (
            wire.ask("Heartbeat", service.HeartbeatRequest()).status.code
            == definition.Code.CLIENT_ID_REQUIRED
        )


def test_a_heartbeat_is_refused_before_the_first_settings(node: RunningNode, wire: Wire) -> None:
    beat = service.HeartbeatRequest(
        group=definition.Resource(name="g"), client_type=definition.ClientType.SIMPLE_CONSUMER
    )
    assert wire.ask("Heartbeat", beat).status.code == definition.Code.UNRECOGNIZED_CLIENT_TYPE
    wire.telemetry(consumer_settings("g"))
    wire.ask_ok("Heartbeat", beat)


def test_notify_client_termination_ends_the_session(node: RunningNode, wire: Wire) -> None:
    wire.telemetry(consumer_settings("g"))
    wire.ask_ok(
        "NotifyClientTermination", service.NotifyClientTerminationRequest(group=definition.Resource(name="g"))
    )
    assert session_of(node, "client-1") is None
    # A second time it has no effect.
    wire.ask_ok("NotifyClientTermination", service.NotifyClientTerminationRequest())
    assert (
        wire.ask("Heartbeat", service.HeartbeatRequest()).status.code
        == definition.Code.UNRECOGNIZED_CLIENT_TYPE
    )


def test_the_end_of_one_client_does_not_affect_another(node: RunningNode, wire: Wire) -> None:
    with Wire.to(node, "client-2") as other:
        wire.telemetry(consumer_settings("g"))
        other.telemetry(consumer_settings("g"))
        other.ask_ok("NotifyClientTermination", service.NotifyClientTerminationRequest())
        assert session_of(node, "client-1") is not None and session_of(node, "client-2") is None


@given(st.integers(0, limits.DELAY_MS_MAX))
def test_a_duration_keeps_its_milliseconds(ms: int) -> None:
    assert duration(ms).ToMilliseconds() == ms


def test_a_producer_gets_body_size_type_checks_and_retry_policy() -> None:
    settings = producer_settings("orders")
    completed = complete_settings(settings, None, check_types=True)
    assert completed.publishing.max_body_size == limits.BODY_BYTES_MAX  # with 0 a client could send nothing
    assert completed.publishing.validate_message_type
    assert list(completed.publishing.topics) == list(settings.publishing.topics)
    # The Java client accepts no other strategy for a producer.
    assert completed.backoff_policy.WhichOneof("strategy") == "exponential_backoff"
    assert completed.backoff_policy.max_attempts == 3
    assert settings == producer_settings("orders")  # the client's settings are not changed
    assert not complete_settings(settings, None, check_types=False).publishing.validate_message_type


@pytest.mark.parametrize("in_order", [False, True])
def test_a_consumer_gets_the_settings_of_its_group(in_order: bool) -> None:
    group = SubscriptionGroup("g", consume_message_orderly=in_order, retry_max_times=4)
    completed = complete_settings(consumer_settings("g"), group, check_types=True)
    assert completed.subscription.fifo == in_order
    assert completed.subscription.receive_batch_size > 0
    assert completed.subscription.long_polling_timeout.ToMilliseconds() == 20_000
    assert completed.subscription.group.name == "g"
    assert completed.backoff_policy.max_attempts == 5  # the first delivery and four retries
    assert completed.backoff_policy.WhichOneof("strategy") is not None


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (RetryPolicy(), [1, 5, 10, 30, 60, 120, 180]),
        (RetryPolicy(customized_retry_policy=CustomizedRetry([7_000, 9_000])), [7, 9, 9, 9, 9, 9, 9]),
    ],
)
def test_a_consumer_gets_the_same_pauses_as_from_rocketmq_s_proxy(
    policy: RetryPolicy, seconds: list[int]
) -> None:
    group = SubscriptionGroup("g", retry_max_times=6, group_retry_policy=policy)
    backoff_policy = complete_settings(consumer_settings("g"), group, check_types=True).backoff_policy
    pauses = backoff_policy.customized_backoff.next
    assert [each.ToMilliseconds() for each in pauses] == [s * 1_000 for s in seconds]


def test_a_group_without_retry_max_times_has_rocketmq_s_number() -> None:
    assert attempts_max(SubscriptionGroup("g", retry_max_times=-1)) == 17
    assert attempts_max(SubscriptionGroup("g", retry_max_times=0)) == 1


def test_the_node_client_gets_an_exponential_policy() -> None:
    """RocketMQ's Node client would read one attempt from a customised policy."""
    group = SubscriptionGroup("g", retry_max_times=4)
    settings = consumer_settings("g")
    assert complete_settings(settings, group, check_types=True).backoff_policy.HasField("customized_backoff")
    settings.user_agent.language = definition.Language.NODE_JS
    policy = complete_settings(settings, group, check_types=True).backoff_policy
    assert policy.HasField("exponential_backoff") and policy.max_attempts == 5


def test_different_topics_of_members_are_reported_as_a_conflict(node: RunningNode, wire: Wire) -> None:
    stream = None
    for topics in (["a"], ["a", "b"], ["a"]):
        settings = consumer_settings("different-topics")
        settings.subscription.subscriptions.extend(
            definition.SubscriptionEntry(topic=definition.Resource(name=topic)) for topic in topics
        )
        # Settings of the same stream count like those of another client.
        if stream is None:
            stream = wire.telemetry(settings)
        else:
            stream.send(service.TelemetryCommand(settings=settings))
            next(stream)
    subscriptions = node.node.broker.consuming.subscriptions
    assert [one.wanted for one in subscriptions.conflicts("different-topics")] == [["a", "a, b"]]


def test_subscriptions_are_reported_with_their_namespace(node: RunningNode, wire: Wire) -> None:
    """Members that use remoting send the namespace within the name. Both forms must be equal."""
    settings = consumer_settings("members")
    settings.subscription.group.resource_namespace = "shop"
    settings.subscription.subscriptions.append(
        definition.SubscriptionEntry(topic=definition.Resource(name="orders", resource_namespace="shop"))
    )
    subscriptions = node.node.broker.consuming.subscriptions
    subscriptions.hear_topics("shop%members", ["shop%orders"])
    wire.telemetry(settings)
    subscriptions.hear_topics("shop%members", ["shop%orders"])
    assert subscriptions.conflicts("shop%members") == []
    for topic in ("shop%others", "shop%orders"):
        subscriptions.hear_topics("shop%members", [topic])
    assert [one.wanted for one in subscriptions.conflicts("shop%members")] == [["shop%orders", "shop%others"]]
