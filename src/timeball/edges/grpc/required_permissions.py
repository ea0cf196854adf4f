"""Check the permissions that a call requires, before a handler runs.

REQUIRED_PERMISSIONS lists the permission that each call requires, and the fields that name its topics and group. A call
without an entry requires ADMIN. A Telemetry stream names its topics and its group in its messages. So the handler that
reads the stream checks them (`check_settings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from timeball.broker.policy import Policy
from timeball.edges.grpc._generated.definition_pb2 import Resource, Settings
from timeball.edges.grpc.calls import Call, group_name, topic_name
from timeball.edges.grpc.codec.send_requests import topics_in_send
from timeball.model.access import ANONYMOUS, Caller, Verb

FindTopics = Callable[[Any], Iterable[Resource]]  # finds the topics in a request


class RequiredPermission(NamedTuple):
    """The permission that a call requires on its topics. `on_group`: also on the group in its field `group`."""

    verb: Verb
    find_topics: FindTopics = lambda request: ()
    on_group: bool = False


def _topic_field(request: Any) -> list[Resource]:
    return [request.topic]


def _topic_of_queue(request: Any) -> list[Resource]:
    return [request.message_queue.topic]


REQUIRED_PERMISSIONS = {
    "QueryRoute": RequiredPermission(Verb.LOOK, _topic_field),
    "QueryOffset": RequiredPermission(Verb.LOOK, _topic_of_queue),
    "SendMessage": RequiredPermission(Verb.SEND, topics_in_send),
    "EndTransaction": RequiredPermission(Verb.SEND, _topic_field),
    "RecallMessage": RequiredPermission(Verb.CANCEL, _topic_field),
    "QueryAssignment": RequiredPermission(Verb.RECEIVE, _topic_field, on_group=True),
    "AckMessage": RequiredPermission(Verb.RECEIVE, _topic_field, on_group=True),
    "ChangeInvisibleDuration": RequiredPermission(Verb.RECEIVE, _topic_field, on_group=True),
    "ForwardMessageToDeadLetterQueue": RequiredPermission(Verb.RECEIVE, _topic_field, on_group=True),
    "ReceiveMessage": RequiredPermission(Verb.RECEIVE, _topic_of_queue, on_group=True),
    "PullMessage": RequiredPermission(Verb.RECEIVE, _topic_of_queue, on_group=True),
    "UpdateOffset": RequiredPermission(Verb.RECEIVE, _topic_of_queue, on_group=True),
    "GetOffset": RequiredPermission(Verb.RECEIVE, _topic_of_queue, on_group=True),
}
# Calls that any account may make: they concern the client itself, or name their topics and groups in later messages.
ACCOUNT_ONLY = frozenset({"Telemetry", "Heartbeat", "NotifyClientTermination"})


def check(policy: Policy, call: Call, name: str, request: Any) -> None:
    """Check that the caller has the permissions that the call requires. Raises Unauthorized, Forbidden, Refused."""
    if call.caller is ANONYMOUS or name in ACCOUNT_ONLY:
        return
    required = REQUIRED_PERMISSIONS.get(name, RequiredPermission(Verb.ADMIN))
    group = group_name(request.group) if required.on_group else None
    topics: list[str | None] = [topic_name(topic) for topic in required.find_topics(request)]
    for topic in topics or [None]:
        policy.allow(call.caller, required.verb, topic=topic, group=group)


def check_settings(policy: Policy, caller: Caller, settings: Settings) -> None:
    """Check that the caller may use the topics and the group in its settings.

    Raises Unauthorized, Forbidden, Refused.
    """
    for topic in settings.publishing.topics:
        # A producer of the topic is sent half messages of it, when it is asked about their transactions.
        policy.allow(caller, Verb.SEND, topic=topic_name(topic))
    if settings.HasField("subscription"):
        policy.allow(caller, Verb.RECEIVE, group=group_name(settings.subscription.group))
