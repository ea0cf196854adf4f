"""Check the permissions that a call requires, before a handler runs.

The table lists the required permission of each call, and the fields that name its topic and group. A call without an
entry is for administrators. A Telemetry stream names its topics and its group inside the stream. So the handler that
reads the stream checks them (`check_settings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from timeball.broker.policy import Policy
from timeball.edges.grpc._generated.definition_pb2 import Resource, Settings
from timeball.edges.grpc.calls import Call, group_name, topic_name
from timeball.edges.grpc.codec.send_requests import topics_of
from timeball.model.access import ANONYMOUS, Caller, Verb

Topics = Callable[[Any], Iterable[Resource]]


class Need(NamedTuple):
    """The permission that a call requires, on which topics. `of_group`: also on the group in its field `group`."""

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
# An account is enough: these concern the client itself, or name their topics and groups later.
OF_ONESELF = frozenset({"Telemetry", "Heartbeat", "NotifyClientTermination"})


def check(policy: Policy, call: Call, name: str, request: Any) -> None:
    """Check a call against the policy. Raises Unauthorized, Forbidden, Refused."""
    if call.caller is ANONYMOUS or name in OF_ONESELF:
        return
    need = NEEDS.get(name, Need(Verb.ADMIN))
    group = group_name(request.group) if need.of_group else None
    topics: list[str | None] = [topic_name(topic) for topic in need.topics(request)]
    for topic in topics or [None]:
        policy.allow(call.caller, need.verb, topic=topic, group=group)


def check_settings(policy: Policy, caller: Caller, settings: Settings) -> None:
    """Check the topics and the group in a client's settings. Raises Forbidden, Unauthorized, Refused."""
    for topic in settings.publishing.topics:
        # Such a producer gets half messages of the topic when it is asked about their transactions.
        policy.allow(caller, Verb.SEND, topic=topic_name(topic))
    if settings.HasField("subscription"):
        policy.allow(caller, Verb.RECEIVE, group=group_name(settings.subscription.group))
