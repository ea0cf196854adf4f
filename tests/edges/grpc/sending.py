"""Create and send messages like a RocketMQ 5 producer, and read the topic afterwards."""

from __future__ import annotations

import itertools
from typing import Any

from tests.edges.grpc.wire import Wire
from tests.node_fixture import RunningNode

from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc._generated import service_pb2 as service

BORN_MS = 1_761_000_000_123
_ids = itertools.count(1)


def message(
    body: bytes = b"body", *, topic: str = "orders", namespace: str = "", **fields: Any
) -> definition.Message:
    """Create a NORMAL message, or with `due_ms` a DELAY message.

    `fields` are system properties. `properties` are user properties.
    """
    due_ms, properties = fields.pop("due_ms", None), fields.pop("properties", {})
    system = definition.SystemProperties(**{"message_id": f"01{next(_ids):032X}", **fields})
    if "message_type" not in fields:
        system.message_type = definition.MessageType.NORMAL
    if "born_timestamp" not in fields:
        system.born_timestamp.FromMilliseconds(BORN_MS)
    if due_ms is not None:
        system.delivery_timestamp.FromMilliseconds(due_ms)
        system.message_type = definition.MessageType.DELAY
    resource = definition.Resource(name=topic, resource_namespace=namespace)
    return definition.Message(topic=resource, body=body, system_properties=system, user_properties=properties)


def send_request(*messages: definition.Message) -> service.SendMessageRequest:
    return service.SendMessageRequest(messages=messages)


def sent(wire: Wire, *messages: definition.Message) -> list[service.SendResultEntry]:
    """Send messages, which the broker must accept, and return the entries of the response."""
    response = wire.ask_ok("SendMessage", send_request(*messages))
    assert len(response.entries) == len(messages)
    assert {entry.status.code for entry in response.entries} == {definition.Code.OK}
    return list(response.entries)


def refused(wire: Wire, *messages: definition.Message) -> tuple[int, str]:
    """Send messages, which the broker must refuse, and return code and text of the status."""
    response = wire.ask("SendMessage", send_request(*messages))
    assert response.status.code != definition.Code.OK and not response.entries
    assert response.status.message
    return response.status.code, response.status.message


def rows(node: RunningNode, topic: str = "orders") -> list[dict[str, Any]]:
    """Read all messages in the queues of a topic."""
    result: list[dict[str, Any]] = []
    for queue, (low, high) in node.broker.queues(topic).items():
        result += node.run(node.broker.read_queue(topic, queue, low, high - low)).to_pylist()
    return result
