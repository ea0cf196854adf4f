"""The OpenAPI document: each path with its parameters, bodies and answers, made from the structs of the codec."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from timeball import __version__
from timeball.broker.revoking import group_questions
from timeball.edges.http import (
    answers_codec,
    codec,
    events_codec,
    send_codec,
    subscription_codec,
    waiting_codec,
)
from timeball.edges.http.codec import JSON, NDJSON
from timeball.model.answers import GroupState

_REF = "#/components/schemas/{name}"
_GROUP = ("group", "The consumer group.", True)
_TOPIC_OF_ID = ("topic", "Only messages for this topic: producers of others may use the same id.", False)
_PATH: dict[str, dict[str, Any]] = {
    "topic": {"type": "string", "pattern": "^[%|a-zA-Z0-9_-]{1,127}$"},
    "id": {"type": "string", "minLength": 1},
    "group": {"type": "string", "pattern": "^[%|a-zA-Z0-9_-]{1,255}$"},
    "campaign": {"type": "string", "minLength": 1, "maxLength": 100},
    "name": {"type": "string", "pattern": "^[%|a-zA-Z0-9_-]{1,120}$"},
}
# The examples in the requests that the pages of the API show (dashboard/reference.js).
_EXAMPLES: dict[str, dict[str, Any]] = {
    "Message": {"body": "hello", "key": "order-17", "after": "30m"},
    "Moving": {"after": "2h"},
    "TopicMade": {"queues": 8},
    "Answering": {"receipts": ["RECEIPT"]},
    "GivingBack": {"receipts": ["RECEIPT"], "after": "10s", "reason": "the shop answered 500"},
    "GivingUp": {"receipts": ["RECEIPT"], "reason": "no such order"},
    "Extending": {"receipts": ["RECEIPT"], "lease": "5m"},
    "Resolving": {"all": True},
    "Nothing": {},
    "Resuming": {"shift": True},
    "CancelHere": {"ask": "cancel", "keys": ["order-17"]},
    "RescheduleHere": {"ask": "reschedule", "keys": ["order-17"], "delay_ms": 1_800_000},
    "FindHere": {"ask": "find", "id": "order-17"},
    "RecallHere": {"ask": "recall", "topic": "orders", "handle": "HANDLE"},
    "RouteHere": {"ask": "route", "topic": "orders"},
    "Subscribing": {"topic": "orders", "group": "billing", "url": "https://billing.example/hooks/orders"},
}
_SEND_HEADERS = {
    "Idempotency-Key": "A send with the key of an earlier one sends nothing: it is told what became of those messages.",
    "Idempotency-Attempt": "A text of the client's, new for each attempt, and the same when the attempt is repeated.",
    "Idempotency-If-Settled": "'send' sends anew, as another attempt, if no message of the earlier send waits.",
}
_PARAMETER_EXAMPLES = {
    "topic": "orders",
    "group": "billing",
    "id": "order-17",
    "campaign": "spring",
    "name": "billing",
    "key": "order-17",
    "tag": "red || blue",
    "sql": "region = 'eu' AND total > 100",
    "by": "hour",
    "wait": "30s",
    "lease": "5m",
    "start": "latest",
    "from": "2027-01-31T00:00:00Z",
    "to": "2027-02-01T00:00:00Z",
}
# A request has exactly one of these fields, which the type of a struct cannot express.
_ONE_OF = {"Message": ("body", "json", "base64"), "Moving": ("at", "after")}
_SUBSCRIBED = (subscription_codec.Subscribed,)
_UNSUBSCRIBED = (answers_codec.SubscriptionDeleted,)
_SPAN = {"type": "string", "pattern": "^([0-9]+([.][0-9]+)?(ms|s|m|h|d)|0|PT[0-9]+[HMS])$"}
_INSTANT = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "integer", "minimum": 0}]}
_QUERY: dict[str, dict[str, Any]] = {
    "group": _PATH["group"],
    "max": {"type": "integer", "minimum": 1},
    "wait": _SPAN,
    "lease": _SPAN,
    "from": _INSTANT,
    "to": _INSTANT,
    "by": {"type": "string", "enum": ["second", "minute", "hour", "day"]},
}
_WINDOW = (
    ("from", "Due at this instant or later: RFC 3339 with a zone, or milliseconds since 1970.", False),
    ("to", "Due before this instant.", False),
)
_PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "code", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "As in docs/operations.md; never changes."},
        "detail": {"type": "string"},
    },
}


class Broker(msgspec.Struct):
    """The figures of `status` (docs/flight.md), of which only this one is described here.

    `may_admin`: true if the caller may administer.
    """

    may_admin: bool


class Operation(NamedTuple):
    """One method of one path. `query` holds the name, the meaning, and whether the parameter is required."""

    method: str
    path: str
    name: str
    summary: str
    query: tuple[tuple[str, str, bool], ...] = ()
    request: tuple[Any, ...] = ()
    answer: tuple[Any, ...] = ()
    status: int = 200
    media_type: str = JSON


OPERATIONS = (
    Operation(
        "get", "/v1/broker", "broker", "How the broker is, and whether the caller may change things.",
        answer=(Broker,),
    ),
    Operation(
        "get", "/v1/cluster", "cluster", "The groups of the cluster: leaders, replicas, and what is wrong.",
        answer=(answers_codec.ReplicaGroups,),
    ),
    Operation("get", "/v1/topics", "topics", "The topics, with queues and messages.", (), (), (codec.Topics,)),
    Operation(
        "put", "/v1/topics/{topic}", "create_topic", "Make a topic, or give it more queues.",
        (), (codec.TopicMade,),
        answer=(answers_codec.TopicSize,),
    ),
    Operation(
        "delete", "/v1/topics/{topic}", "delete_topic", "Delete a topic with its messages.",
        answer=(answers_codec.TopicDeleted,),
    ),
    Operation(
        "post", "/v1/topics/{topic}/messages", "send", "Send one message or many, for now or for later.",
        (), (send_codec.Message, list[send_codec.Message]),
        (send_codec.Sent, send_codec.SentMany, send_codec.SentRows), 201,
    ),
    Operation(
        "post", "/v1/topics/{topic}/receive", "receive", "Receive messages as a group, each leased for a time.",
        (
            _GROUP,
            ("max", "At most so many messages, 1 to 1024; 32 otherwise.", False),
            ("wait", "How long to wait for the first, up to 60s; not at all otherwise.", False),
            ("lease", "How long each is this consumer's, 1s to 12h; 60s otherwise.", False),
            ("start", "Where a new group begins: earliest (or without it), latest, or an instant.", False),
            ("tag", "Only messages with one of these tags, as in red || blue; the group passes the others by.", False),
            ("sql", "Only messages whose properties fulfil this condition, in place of tag.", False),
        ), (), (codec.LeasedMany,),
    ),
    Operation(
        "get", "/v1/topics/{topic}/events", "events", "A live tail of visible messages, as server-sent events.",
        (("tag", "Only messages with one of these tags, as in red || blue.", False),),
        media_type=events_codec.EVENTS,
    ),
    Operation(
        "post", "/v1/topics/{topic}/ack", "ack", "Say that messages are dealt with.", (_GROUP,),
        (codec.Answering,), (codec.AnsweredMany,),
    ),
    Operation(
        "post", "/v1/topics/{topic}/nack", "nack", "Give messages back as attempts that failed.", (_GROUP,),
        (codec.GivingBack,), (codec.AnsweredMany,),
    ),
    Operation(
        "post", "/v1/topics/{topic}/dead-letter", "dead_letter", "Give messages up: they are dead letters.",
        (_GROUP,), (codec.GivingUp,), (codec.AnsweredMany,),
    ),
    Operation(
        "post", "/v1/topics/{topic}/extend", "extend", "Keep messages for longer.", (_GROUP,),
        (codec.Extending,), (codec.AnsweredMany,),
    ),
    Operation(
        "get", "/v1/messages", "list", "What waits, by due time.",
        (
            ("topic", "Only messages for this topic.", False),
            ("key", "Only messages with this business key.", False),
            *_WINDOW,
            ("max", "At most so many messages, 1 to 1000; 100 otherwise.", False),
            ("page", "The next_page of the page before.", False),
        ), (), (waiting_codec.WaitingPage,),
    ),
    Operation(
        "get", "/v1/forecast", "forecast", "How many messages are due when, by topic.",
        (
            ("by", "second, minute, hour (otherwise) or day, in UTC.", False),
            *_WINDOW,
            ("topic", "Only messages for this topic.", False),
        ), (), (waiting_codec.Forecast,),
    ),
    Operation(
        "get", "/v1/messages/{id}", "get", "Where a message is, and when.", (_TOPIC_OF_ID,),
        answer=(answers_codec.Places,),
    ),
    Operation(
        "patch", "/v1/messages/{id}", "reschedule", "Move a scheduled message to another instant.",
        (_TOPIC_OF_ID,), (codec.Moving,),
        answer=(answers_codec.Granted,),
    ),
    Operation(
        "delete", "/v1/messages/{id}", "cancel", "Cancel a scheduled message.", (_TOPIC_OF_ID,),
        answer=(answers_codec.Granted,),
    ),
    Operation(
        "get", "/v1/groups", "groups", "The consumer groups, by name: lags, messages in hand, dead letters.",
        (("max", "At most so many; 1000 otherwise.", False), ("page", "The next_page of an answer.", False)),
        answer=(answers_codec.Groups,),
    ),
    Operation("get", "/v1/groups/{group}", "group", "One consumer group.", answer=(GroupState,)),
    Operation(
        "get", "/v1/groups/{group}/dead-letters", "dead_letters", "What a group has given up.",
        (("max", "At most so many; 50 otherwise.", False), ("page", "The next_page of an answer.", False)),
        answer=(answers_codec.DeadLetters,),
    ),
    Operation(
        "post", "/v1/groups/{group}/dead-letters/resend", "resend_dead_letters", "Send them to the group again.", (),
        (codec.Resolving,),
        answer=(answers_codec.DealtMany,),
    ),
    Operation(
        "post", "/v1/groups/{group}/dead-letters/delete", "delete_dead_letters", "Put them aside for good.", (),
        (codec.Resolving,),
        answer=(answers_codec.DealtMany,),
    ),
    Operation(
        "get", "/v1/campaigns", "campaigns", "Bulk writes as objects, and how each was left.",
        answer=(answers_codec.Campaigns,),
    ),
    Operation(
        "get", "/v1/campaigns/{campaign}", "campaign", "One campaign, with its ranges of rows.",
        answer=(answers_codec.CampaignShown,),
    ),
    Operation(
        "post", "/v1/campaigns/{campaign}/pause", "pause_campaign", "Hold what of it waits.", (), (codec.Nothing,),
        answer=(answers_codec.CampaignShown,),
    ),
    Operation(
        "post", "/v1/campaigns/{campaign}/resume", "resume_campaign", "Let what is held wait again.", (),
        (codec.Resuming,),
        answer=(answers_codec.CampaignShown,),
    ),
    Operation(
        "post", "/v1/campaigns/{campaign}/cancel", "cancel_campaign", "End what of it waits.", (), (codec.Nothing,),
        answer=(answers_codec.CampaignShown,),
    ),
    Operation(
        "get", "/v1/jobs", "jobs", "The jobs of the pipeline beside this broker, and the last audit.",
        answer=(answers_codec.Jobs,),
    ),
    Operation(
        "post", "/v1/cluster/{group}", "ask_group",
        "Ask one group of a cluster, and no other; the nodes ask each other so, as their callers.",
        (), (group_questions.CancelHere, group_questions.RescheduleHere, group_questions.FindHere,
             group_questions.RecallHere, group_questions.RouteHere),
        (group_questions.GroupAnswer,),
    ),
    Operation(
        "get", "/v1/subscriptions", "subscriptions", "The push subscriptions.", (), (),
        (subscription_codec.SubscribedMany,),
    ),
    Operation(
        "put", "/v1/subscriptions/{name}", "subscribe",
        "Have messages of a topic sent to a URL. A new subscription (201) is answered with its secret, once.",
        (), (subscription_codec.Subscribing,), (subscription_codec.Subscribed,),
    ),
    *(
        Operation(method, f"/v1/subscriptions/{{name}}{path}", name, summary, (), (), answer)
        for method, path, name, summary, answer in (
            ("get", "", "subscription", "A push subscription, and how it goes.", _SUBSCRIBED),
            ("delete", "", "unsubscribe", "Delete a push subscription; its group stays.", _UNSUBSCRIBED),
            ("post", "/pause", "pause_subscription", "Send nothing more for now.", _SUBSCRIBED),
            ("post", "/resume", "resume_subscription", "Go on sending, at once.", _SUBSCRIBED),
        )
    ),
    Operation(
        "get", "/metrics", "metrics", "The broker's figures, in Prometheus' text format.",
        media_type="text/plain",
    ),
    Operation("get", "/health/live", "live", "Whether the process answers.", answer=(answers_codec.Health,)),
    Operation("get", "/health/ready", "ready", "Whether messages are taken now.", answer=(answers_codec.Health,)),
    Operation(
        "get", "/leader/{group}", "leads", "Whether this node of a cluster leads a group: 200, or 503.",
        answer=(answers_codec.Leads,),
    ),
)  # fmt: skip


def parameters_of(path: str) -> dict[str, tuple[str, ...]]:
    """List the names of the query parameters of a path, by method. Empty for a path that is not in the document."""
    path = path.replace(":path}", "}")  # the router's notation for an id that may contain slashes
    return {
        each.method.upper(): tuple(name for name, *_ in each.query)
        for each in OPERATIONS
        if each.path == path
    }


def document() -> dict[str, Any]:
    """Build the document as OpenAPI 3.1."""
    kinds = [kind for each in OPERATIONS for kind in each.request + each.answer]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(map(str, kinds), schemas, strict=True))
    for name, fields in _ONE_OF.items():
        components[name]["oneOf"] = [{"required": [field]} for field in fields]
    for name, example in _EXAMPLES.items():
        components[name]["examples"] = [example]
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Timeball", "version": __version__},
        "paths": paths,
        "security": [{"account": []}],
        "components": {
            "schemas": {**components, "Problem": _PROBLEM},
            "securitySchemes": {
                "account": {"type": "http", "scheme": "bearer", "bearerFormat": "access key:secret key"}
            },
        },
    }


def _operation(each: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {
            "name": name,
            "in": "query",
            "required": needed,
            "description": text,
            "schema": _QUERY.get(name, {"type": "string"}),
        }
        for name, text, needed in each.query
    ]
    for name in ("topic", "id", "name", "campaign", "group"):
        if f"{{{name}}}" in each.path:
            parameters.append({"name": name, "in": "path", "required": True, "schema": _PATH[name]})
    if each.name == "send":
        for name, text in _SEND_HEADERS.items():
            parameters.append(
                {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
            )
    if each.name == "events":
        text = "The id of an event: the stream goes on behind it. Without one it begins with what comes now."
        parameters.append(
            {"name": "Last-Event-ID", "in": "header", "description": text, "schema": {"type": "string"}}
        )
    for parameter in parameters:
        if parameter["name"] in _PARAMETER_EXAMPLES:
            parameter["example"] = _PARAMETER_EXAMPLES[parameter["name"]]
    found: dict[str, Any] = {
        "operationId": each.name,
        "tags": [each.path.removeprefix("/v1").split("/")[1]],
        "summary": each.summary,
        "parameters": parameters,
        "responses": {
            str(each.status): {
                "description": "done",
                "content": {each.media_type: {"schema": _any_of(each.answer, schema_of)}},
            },
            "default": {
                "description": "a problem (RFC 9457)",
                "content": {"application/problem+json": {"schema": {"$ref": _REF.format(name="Problem")}}},
            },
        },
    }
    if each.request:
        content = {JSON: {"schema": _any_of(each.request, schema_of)}}
        if each.name == "send":
            content[NDJSON] = {"schema": {"type": "string", "description": "one message a line"}}
            content[send_codec.ARROW] = {"schema": {"type": "string", "format": "binary"}}
            names = ", ".join(f"`{send_codec.HEADER}{one}`" for one in send_codec.RAW_HEADERS)
            text = f"One message: the body as it is, of any type. The headers {names} say the rest."
            content["application/octet-stream"] = {
                "schema": {"type": "string", "format": "binary", "description": text}
            }
        found["requestBody"] = {"required": True, "content": content}
    # A send may repeat an earlier one (200), and a subscription may be new (201).
    if other := {"send": "200", "subscribe": "201"}.get(each.name):
        found["responses"][other] = found["responses"][str(each.status)]
    if each.path.startswith(("/health", "/leader")):
        found["security"] = []
    return found


def _any_of(kinds: tuple[Any, ...], schema_of: dict[str, Any]) -> dict[str, Any]:
    schemas = [schema_of[str(kind)] for kind in kinds]
    return {"anyOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else {}
