"""Which call needs what of an account: decided by the policy before a handler runs.

Each call of the service stands in the table with what it needs and which of its fields name the topic and the group; a
call that does not is an administrator's. Telemetry names its topics and its group inside the stream, so the room
that reads it asks again (`check_settings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from timeball.access import ANONYMOUS, Caller, Verb
from timeball.broker.policy import Policy
from timeball.protocols.grpc._generated.definition_pb2 import Resource, Settings
from timeball.protocols.grpc.calls import Call, group_name, topic_name
from timeball.protocols.grpc.codec.send_requests import topics_of

Topics = Callable[[Any], Iterable[Resource]]


class Need(NamedTuple):
    """The right that a call needs, on which topics; `of_group`: on the group in its field `group` too."""

    verb: Verb
    topics: Topics = lambda request: ()
    of_group: bool = False


def _own(request: Any) -> list[Resource]:
    return [request.topic]


def _of_queue(request: Any) -> list[Resource]:
    return [request.message_queue.topic]


NEEDS = {
    "QueryRoute": Need(Verb.LOOK, _own),
    "QueryOffset": Need(Verb.LOOK, _of_queue),
    "SendMessage": Need(Verb.SEND, topics_of),
    "EndTransaction": Need(Verb.SEND, _own),
    "RecallMessage": Need(Verb.CANCEL, _own),
    "QueryAssignment": Need(Verb.RECEIVE, _own, of_group=True),
    "AckMessage": Need(Verb.RECEIVE, _own, of_group=True),
    "ChangeInvisibleDuration": Need(Verb.RECEIVE, _own, of_group=True),
    "ForwardMessageToDeadLetterQueue": Need(Verb.RECEIVE, _own, of_group=True),
    "ReceiveMessage": Need(Verb.RECEIVE, _of_queue, of_group=True),
    "PullMessage": Need(Verb.RECEIVE, _of_queue, of_group=True),
    "UpdateOffset": Need(Verb.RECEIVE, _of_queue, of_group=True),
    "GetOffset": Need(Verb.RECEIVE, _of_queue, of_group=True),
}
# An account is enough: they are about the client itself, or say what they are about later on.
OF_ONESELF = frozenset({"Telemetry", "Heartbeat", "NotifyClientTermination"})


def check(policy: Policy, call: Call, name: str, request: Any) -> None:
    """Have the policy decide about a call; raises Unauthorized, Forbidden, Refused."""
    if call.caller is ANONYMOUS or name in OF_ONESELF:
        return
    need = NEEDS.get(name, Need(Verb.ADMIN))
    group = group_name(request.group) if need.of_group else None
    topics: list[str | None] = [topic_name(topic) for topic in need.topics(request)]
    for topic in topics or [None]:
        policy.allow(call.caller, need.verb, topic=topic, group=group)


def check_settings(policy: Policy, caller: Caller, settings: Settings) -> None:
    """Have the policy decide whether a client may be what its settings say; raises Forbidden, Unauthorized, Refused."""
    for topic in settings.publishing.topics:
        # It will be asked about the topic's transactions.
        policy.allow(caller, Verb.SEND, topic=topic_name(topic))
    if settings.HasField("subscription"):
        policy.allow(caller, Verb.RECEIVE, group=group_name(settings.subscription.group))
