"""The message types that a topic accepts."""

from __future__ import annotations

import itertools

import pytest
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.registry.topics import TopicConfig
from timeball.edges.grpc._generated.definition_pb2 import Code, MessageType
from timeball.edges.grpc.handlers.sends import ALL_TYPES, accepted_types, check_type
from timeball.edges.shared.error_codes import Refused


@on_node()
async def test_a_topic_with_a_type_accepts_only_that_type(world: World) -> None:
    for name, message_type in itertools.product(["NORMAL", "FIFO", "DELAY", "TRANSACTION"], ALL_TYPES):
        topic = world.broker.tables.topics.configure(
            name, TopicConfig(1, 1, attributes={"message.type": name})
        )
        assert accepted_types(topic) == [MessageType.Value(name)]
        if MessageType.Name(message_type) == name:
            check_type(topic, name, message_type)
            continue
        with pytest.raises(Refused, match=f"takes {name} messages") as refused:
            check_type(topic, name, message_type)
        assert refused.value.protocol_code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


@pytest.mark.parametrize("value", ["MIXED", "UNSPECIFIED", None])
def test_a_topic_without_a_type_accepts_all_types(value: str | None) -> None:
    @on_node()
    async def check(world: World) -> None:
        attributes = {"message.type": value} if value else {}
        topic = world.broker.tables.topics.configure("t", TopicConfig(1, 1, attributes=attributes))
        assert accepted_types(topic) == ALL_TYPES
        for message_type in ALL_TYPES:
            check_type(topic, "t", message_type)

    check()


def test_a_topic_that_does_not_exist_accepts_all_types() -> None:
    assert accepted_types(None) == ALL_TYPES


def test_an_unknown_type_is_refused_with_its_number() -> None:
    with pytest.raises(Refused, match="of type 77"):
        check_type(None, "t", 77)
