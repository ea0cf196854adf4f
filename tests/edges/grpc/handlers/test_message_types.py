"""What kind of messages a topic takes."""

from __future__ import annotations

import itertools

import pytest
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.registry.topic import TopicConfig
from timeball.edges.grpc._generated.definition_pb2 import Code, MessageType
from timeball.edges.grpc.handlers.sends import ALL, accepted_types, check_type
from timeball.edges.shared.error_codes import Refused


@on_node()
async def test_a_topic_of_a_type_takes_that_type_alone(world: World) -> None:
    for name, kind in itertools.product(["NORMAL", "FIFO", "DELAY", "TRANSACTION"], ALL):
        topic = world.broker.tables.topics.configure(
            name, TopicConfig(1, 1, attributes={"message.type": name})
        )
        assert accepted_types(topic) == [MessageType.Value(name)]
        if MessageType.Name(kind) == name:
            check_type(topic, name, kind)
            continue
        with pytest.raises(Refused, match=f"takes {name} messages") as refused:
            check_type(topic, name, kind)
        assert refused.value.protocol_code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


@pytest.mark.parametrize("value", ["MIXED", "UNSPECIFIED", None])
def test_any_other_topic_takes_all(value: str | None) -> None:
    @on_node()
    async def check(world: World) -> None:
        attributes = {"message.type": value} if value else {}
        topic = world.broker.tables.topics.configure("t", TopicConfig(1, 1, attributes=attributes))
        assert accepted_types(topic) == ALL
        for kind in ALL:
            check_type(topic, "t", kind)

    check()


def test_a_topic_that_is_not_made_yet_takes_all() -> None:
    assert accepted_types(None) == ALL


def test_a_type_that_is_none_is_refused_by_number() -> None:
    with pytest.raises(Refused, match="of type 77"):
        check_type(None, "t", 77)
