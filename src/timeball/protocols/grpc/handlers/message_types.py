"""What kind of messages a topic is for: RocketMQ's topic attribute `message.type`, and what its check says.

A topic of a type takes that type and no other, MIXED takes all; a message of another type is
MESSAGE_PROPERTY_CONFLICT_WITH_TYPE. A topic without the attribute takes all as well. (In RocketMQ it is NORMAL then,
and refuses every delayed message until somebody has changed it, which is what its users stumble over.)
"""

from __future__ import annotations

from timeball.broker.registry.topics import Topic
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code, MessageType

ATTRIBUTE = "message.type"
ALL = [MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION]
_OF_NAME = {MessageType.Name(each): [each] for each in ALL}


def accepted_types(topic: Topic | None) -> list[MessageType]:
    """The types that a topic takes; all of them for one that has not been made."""
    name = "" if topic is None else topic.config.attributes.get(ATTRIBUTE, "")
    return _OF_NAME.get(name, ALL)


def check_type(topic: Topic | None, name: str, message_type: MessageType) -> None:
    """Raise Refused when the topic does not take messages of this type."""
    accepted = accepted_types(topic)
    if message_type not in accepted:
        names = ", ".join(MessageType.Name(each) for each in accepted)
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"topic {name!r} takes {names} messages, and this is {_name(message_type)}; use another topic, change its "
            f"{ATTRIBUTE}, or start the broker with --no-check-message-types",
        )


def _name(message_type: MessageType) -> str:
    known = MessageType.values()
    return MessageType.Name(message_type) if message_type in known else f"of type {message_type}"
