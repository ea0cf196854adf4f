"""Resources by name: a topic or group of a namespace is `<namespace>%<name>` in the broker, as RocketMQ's proxy has it.

The check of the name is here as well, because each kind has a code of its own, which clients turn into an exception
that says whose name was bad.
"""

from __future__ import annotations

from timeball import limits
from timeball.broker.registry.reserved_topics import RETRY_PREFIX
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code, Resource

BETWEEN = "%"


def topic_name(resource: Resource) -> str:
    """The topic's name in the broker; raises Refused."""
    name = _name(resource)
    is_own = name.startswith(RETRY_PREFIX)  # it may be longer: what is sent to it is checked by the broker
    most = limits.OWN_TOPIC_BYTES_MAX if is_own else limits.TOPIC_BYTES_MAX
    return _checked(resource, name, "topic", most, Code.ILLEGAL_TOPIC)


def group_name(resource: Resource) -> str:
    """The consumer group's name in the broker; raises Refused."""
    return _checked(
        resource, _name(resource), "consumer group", limits.GROUP_BYTES_MAX, Code.ILLEGAL_CONSUMER_GROUP
    )


def resource(name: str, namespace: str = "") -> Resource:
    """Inverse: what a client of this namespace knows the name as."""
    return Resource(
        resource_namespace=namespace, name=name.removeprefix(namespace + BETWEEN) if namespace else name
    )


def _name(resource: Resource) -> str:
    space = resource.resource_namespace
    return f"{space}{BETWEEN}{resource.name}" if space else resource.name


def _checked(resource: Resource, name: str, what: str, most: int, code: Code) -> str:
    if not resource.name or len(name) > most or not limits.NAME.fullmatch(name):
        raise Refused(code, f"{what} {name[:80]!r}: 1 to {most} of the characters % | a-z A-Z 0-9 _ -")
    return name
