"""What a client is told of itself: its own words, and what the broker decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocols.grpc.wire import consumer_settings, d, producer_settings

from timeball import limits
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.protocols.grpc.handlers.client_settings import answered, attempts_max, duration


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
