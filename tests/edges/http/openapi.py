"""Builds the OpenAPI document: each path with its parameters, bodies and answers, from the structs of the codecs.

The server serves the document as a file of the package. `make openapi` writes this file, and test_openapi.py compares
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from timeball import __version__
from timeball.broker.revoking import group_questions
from timeball.edges.http import answers_codec, codec, send_codec
from timeball.edges.http.codec import JSON, NDJSON
from timeball.edges.http.handlers import operators
from timeball.model import http_api
from timeball.model.answers import GroupState

FILE = Path(__file__).parents[3] / "src/timeball/edges/http/openapi.json"

_SCHEMA_REF = "#/components/schemas/{name}"
_GROUP_PARAMETER = ("group", "The consumer group.", True)
_TOPIC_PARAMETER = ("topic", "Only messages for this topic: producers of others may use the same id.", False)
_PATH_SCHEMAS: dict[str, dict[str, Any]] = {
    "topic": {"type": "string", "pattern": "^[%|a-zA-Z0-9_-]{1,127}$"},
    "id": {"type": "string", "minLength": 1},
    "group": {"type": "string", "pattern": "^[%|a-zA-Z0-9_-]{1,255}$"},
    "campaign": {"type": "string", "minLength": 1, "maxLength": 100},
    "selection": {"type": "string", "minLength": 1, "maxLength": 100},
    "name": {"type": "string", "pattern": "^[%|a-zA-Z0-9_-]{1,120}$"},
}
# example requests, by struct; the pages of the API show them (dashboard/reference.js)
_REQUEST_EXAMPLES: dict[str, dict[str, Any]] = {
    "Message": {"body": "hello", "key": "order-17", "after": "30m"},
    "Moving": {"after": "2h"},
    "TopicMade": {"queues": 8},
    "GroupLimits": {"max_per_key": 1},
    "Answering": {"receipts": ["RECEIPT"]},
    "GivingBack": {"receipts": ["RECEIPT"], "after": "10s", "reason": "the shop answered 500"},
    "GivingUp": {"receipts": ["RECEIPT"], "reason": "no such order"},
    "Extending": {"receipts": ["RECEIPT"], "lease": "5m"},
    "Resolving": {"all": True},
    "CancellingMany": {"keys": ["order-17"]},
    "ReschedulingMany": {"ids": ["order-17"], "after": "2h"},
    "Committing": {"offsets": {"0": 0}},
    "Nothing": {},
    "Resuming": {"shift": True},
    "CancelHere": {"ask": "cancel", "keys": ["order-17"]},
    "RescheduleHere": {"ask": "reschedule", "keys": ["order-17"], "delay_ms": 1_800_000},
    "FindHere": {"ask": "find", "id": "order-17"},
    "RecallHere": {"ask": "recall", "topic": "orders", "handle": "HANDLE"},
    "RouteHere": {"ask": "route", "topic": "orders"},
    "Subscribing": {"topic": "orders", "group": "billing", "url": "https://billing.example/hooks/orders"},
    "SchedulePut": {
        "rule": {"cron": "0 9 * * 1-5", "zone": "Europe/Berlin"},
        "topic": "orders",
        "body": "close open orders",
    },
    "Previewing": {"rule": {"every": "15m"}, "count": 3},
    "Selecting": {"action": "cancel", "topics": ["orders"], "where": "region = 'eu'"},
}
_SEND_HEADERS = {
    "Idempotency-Key": "A repeated key sends nothing. The answer has the states of the earlier messages.",
    "Idempotency-Attempt": "A text of the client: new for each attempt, the same for a repeated attempt.",
    "Idempotency-If-Settled": "'send' sends again, as a new attempt, if no earlier message is pending.",
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
# by struct: exactly one of these fields is required, which the type of a struct cannot express
_EXACTLY_ONE_OF = {
    "Message": ("body", "json", "base64"),
    "SchedulePut": ("body", "json", "base64"),
    "Moving": ("at", "after"),
}
_SUBSCRIBED = (operators.Subscribed,)
_UNSUBSCRIBED = (answers_codec.SubscriptionDeleted,)
_SCHEDULE = (http_api.Schedule,)
_DURATION_SCHEMA = {"type": "string", "pattern": "^([0-9]+([.][0-9]+)?(ms|s|m|h|d)|0|PT[0-9]+[HMS])$"}
_TIME_SCHEMA = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "integer", "minimum": 0}]}
_QUERY_SCHEMAS: dict[str, dict[str, Any]] = {
    "group": _PATH_SCHEMAS["group"],
    "max": {"type": "integer", "minimum": 1},
    "wait": _DURATION_SCHEMA,
    "lease": _DURATION_SCHEMA,
    "from": _TIME_SCHEMA,
    "to": _TIME_SCHEMA,
    "by": {"type": "string", "enum": ["second", "minute", "hour", "day"]},
}
_WINDOW_PARAMETERS = (
    ("from", "Due at this time or later: RFC 3339 with a zone, or milliseconds since 1970.", False),
    ("to", "Due before this time.", False),
)
_PROBLEM_SCHEMA = {
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
    """The figures of `status` (docs/flight.md). Only `may_admin` is described here.

    `may_admin`: true if the caller may administer.
    """

    may_admin: bool


class Operation(NamedTuple):
    """One method of one path. `query` has for each parameter: its name, its description, and whether it is required."""

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
        "get", "/v1/broker", "broker", "The figures of the broker, and whether the caller may administer.",
        answer=(Broker,),
    ),
    Operation(
        "get", "/v1/cluster", "cluster", "The groups of the cluster: leaders, replicas and problems.",
        answer=(answers_codec.ReplicaGroups,),
    ),
    Operation("get", "/v1/topics", "topics", "The topics, with queues and messages.", (), (), (http_api.Topics,)),
    Operation(
        "get", "/v1/topics/{topic}", "queues", "The offsets that the queues of a topic keep.",
        answer=(http_api.TopicQueues,),
    ),
    Operation(
        "get", "/v1/topics/{topic}/offsets", "offsets", "The offsets that a group has committed in a topic.",
        (_GROUP_PARAMETER,),
        answer=(http_api.GroupOffsets,),
    ),
    Operation(
        "put", "/v1/topics/{topic}", "create_topic", "Create a topic, or give it more queues.",
        (), (http_api.TopicMade,),
        answer=(answers_codec.TopicSize,),
    ),
    Operation(
        "put", "/v1/topics/{topic}/offsets", "commit", "Set the offsets at which a group goes on in a topic.",
        (_GROUP_PARAMETER,), (http_api.Committing,),
        answer=(http_api.GroupOffsets,),
    ),
    Operation(
        "delete", "/v1/topics/{topic}", "delete_topic", "Delete a topic with its messages.",
        answer=(answers_codec.TopicDeleted,),
    ),
    Operation(
        "post", "/v1/topics/{topic}/messages", "send", "Send one or several messages, with or without a delay.",
        (), (http_api.Message, list[http_api.Message]),
        (http_api.Sent, http_api.SentMany, send_codec.SentRows), 201,
    ),
    Operation(
        "post", "/v1/topics/{topic}/receive", "receive", "Receive messages as a consumer group, each with a lease.",
        (
            _GROUP_PARAMETER,
            ("max", "The maximum number of messages, 1 to 1024; default 32.", False),
            ("wait", "How long to wait for the first message, up to 60s; by default, do not wait.", False),
            ("lease", "The duration of the leases, 1s to 12h; default 60s.", False),
            ("start", "Where a new group begins: earliest (the default), latest, or a time.", False),
            ("tag", "Only messages with one of these tags, as in red || blue. The group skips the others.", False),
            ("sql", "Only messages whose properties fulfil this SQL condition; instead of tag.", False),
        ), (), (http_api.LeasedMany,),
    ),
    Operation(
        "post", "/v1/topics/{topic}/stream", "stream",
        "Receive messages as they become visible: a line of JSON for each, and empty lines while there is none.",
        (
            _GROUP_PARAMETER,
            ("credit", "The largest number of messages in flight, 1 to 10000; default 256.", False),
            ("lease", "The duration of the leases, 1s to 12h; default 60s.", False),
            ("start", "Where a new group begins: earliest (the default), latest, or a time.", False),
            ("tag", "Only messages with one of these tags, as in red || blue. The group skips the others.", False),
            ("sql", "Only messages whose properties fulfil this SQL condition; instead of tag.", False),
        ), (), (http_api.Leased,), media_type=NDJSON,
    ),
    Operation(
        "get", "/v1/topics/{topic}/events", "events", "A live tail of visible messages, as server-sent events.",
        (("tag", "Only messages with one of these tags, as in red || blue.", False),),
        media_type=answers_codec.EVENTS,
    ),
    Operation(
        "post", "/v1/topics/{topic}/ack", "ack", "Acknowledge messages.", (_GROUP_PARAMETER,),
        (http_api.Answering,), (http_api.AnsweredMany,),
    ),
    Operation(
        "post", "/v1/topics/{topic}/nack", "nack", "Give messages back as failed attempts.", (_GROUP_PARAMETER,),
        (http_api.GivingBack,), (http_api.AnsweredMany,),
    ),
    Operation(
        "post", "/v1/topics/{topic}/dead-letter", "dead_letter", "Move messages to the dead letters of the group.",
        (_GROUP_PARAMETER,), (http_api.GivingUp,), (http_api.AnsweredMany,),
    ),
    Operation(
        "post", "/v1/topics/{topic}/extend", "extend", "Extend the leases of messages.", (_GROUP_PARAMETER,),
        (http_api.Extending,), (http_api.AnsweredMany,),
    ),
    Operation(
        "get", "/v1/messages", "list", "Pending messages, by due time.",
        (
            ("topic", "Only messages for this topic.", False),
            ("key", "Only messages with this business key.", False),
            *_WINDOW_PARAMETERS,
            ("max", "The maximum number of messages, 1 to 1000; default 100.", False),
            ("page", "The next_page of the previous page.", False),
        ), (), (answers_codec.WaitingPage,),
    ),
    Operation(
        "get", "/v1/forecast", "forecast", "How many messages are due when, by topic.",
        (
            ("by", "The length of the buckets: second, minute, hour (the default) or day, in UTC.", False),
            *_WINDOW_PARAMETERS,
            ("topic", "Only messages for this topic.", False),
        ), (), (answers_codec.Forecast,),
    ),
    Operation(
        "get", "/v1/messages/{id}", "get", "The state of a message, and its location.", (_TOPIC_PARAMETER,),
        answer=(http_api.Places,),
    ),
    Operation(
        "patch", "/v1/messages/{id}", "reschedule", "Change the due time of a scheduled message.",
        (_TOPIC_PARAMETER,), (codec.Moving,),
        answer=(answers_codec.Granted,),
    ),
    Operation(
        "delete", "/v1/messages/{id}", "cancel", "Cancel a scheduled message.", (_TOPIC_PARAMETER,),
        answer=(answers_codec.Granted,),
    ),
    Operation(
        "post", "/v1/cancel", "cancel_many", "Cancel scheduled messages, by their ids or by keys.", (),
        (http_api.CancellingMany,),
        answer=(http_api.SettledMany,),
    ),
    Operation(
        "post", "/v1/reschedule", "reschedule_many",
        "Change the due time of scheduled messages, by their ids or by keys.", (), (http_api.ReschedulingMany,),
        answer=(http_api.SettledMany,),
    ),
    Operation(
        "get", "/v1/groups", "groups", "The consumer groups, by name: lags, leased messages, dead letters.",
        (("max", "The maximum number of groups; default 1000.", False), ("page", "The next_page of an answer.", False)),
        answer=(http_api.Groups,),
    ),
    Operation("get", "/v1/groups/{group}", "group", "One consumer group.", answer=(GroupState,)),
    Operation(
        "put", "/v1/groups/{group}", "limit_group", "Set the limits of a consumer group.", (),
        (http_api.GroupLimits,),
        answer=(http_api.GroupLimits,),
    ),
    Operation(
        "get", "/v1/groups/{group}/dead-letters", "dead_letters", "The dead letters of a group.",
        (("max", "The maximum number; default 50.", False), ("page", "The next_page of an answer.", False)),
        answer=(http_api.DeadLetters,),
    ),
    Operation(
        "post", "/v1/groups/{group}/dead-letters/resend", "resend_dead_letters", "Deliver dead letters again.",
        (), (http_api.Resolving,),
        answer=(http_api.DealtMany,),
    ),
    Operation(
        "post", "/v1/groups/{group}/dead-letters/delete", "delete_dead_letters", "Delete dead letters.", (),
        (http_api.Resolving,),
        answer=(http_api.DealtMany,),
    ),
    Operation(
        "get", "/v1/campaigns", "campaigns", "The campaigns (bulk writes) and their states.",
        answer=(answers_codec.Campaigns,),
    ),
    Operation(
        "get", "/v1/campaigns/{campaign}", "campaign", "One campaign, with its ranges of rows.",
        answer=(answers_codec.CampaignShown,),
    ),
    Operation(
        "post", "/v1/campaigns/{campaign}/pause", "pause_campaign", "Hold the pending messages of a campaign.",
        (), (codec.Nothing,),
        answer=(answers_codec.CampaignShown,),
    ),
    Operation(
        "post", "/v1/campaigns/{campaign}/resume", "resume_campaign", "Resume a paused campaign.",
        (), (codec.Resuming,),
        answer=(answers_codec.CampaignShown,),
    ),
    Operation(
        "post", "/v1/campaigns/{campaign}/cancel", "cancel_campaign", "Cancel the pending messages of a campaign.",
        (), (codec.Nothing,),
        answer=(answers_codec.CampaignShown,),
    ),
    Operation(
        "get", "/v1/clock", "clock", "The time of a manual clock. Only with --clock manual.",
        answer=(answers_codec.ClockState,),
    ),
    Operation(
        "post", "/v1/clock/advance", "advance_clock",
        "Advance a manual clock, and list the messages that became visible. Only with --clock manual.",
        (), (codec.Moving,),
        answer=(answers_codec.ClockState,),
    ),
    Operation(
        "get", "/v1/jobs", "jobs", "The jobs of the broker's pipeline, and the report of the last audit.",
        answer=(answers_codec.Jobs,),
    ),
    Operation(
        "post", "/v1/cluster/{group}", "ask_group",
        "Ask a single group of a cluster. Nodes use this on behalf of their callers.",
        (), (group_questions.CancelHere, group_questions.RescheduleHere, group_questions.FindHere,
             group_questions.RecallHere, group_questions.RouteHere),
        (group_questions.GroupAnswer,),
    ),
    Operation(
        "get", "/v1/subscriptions", "subscriptions", "The push subscriptions.", (), (),
        (operators.SubscribedMany,),
    ),
    Operation(
        "put", "/v1/subscriptions/{name}", "subscribe",
        "Send the messages of a topic to a URL. The answer to a new subscription (201) contains its secret, once.",
        (), (operators.Subscribing,), (operators.Subscribed,),
    ),
    *(
        Operation(method, f"/v1/subscriptions/{{name}}{path}", name, summary, (), (), answer)
        for method, path, name, summary, answer in (
            ("get", "", "subscription", "A push subscription and its figures.", _SUBSCRIBED),
            ("delete", "", "unsubscribe", "Delete a push subscription. Its consumer group is kept.", _UNSUBSCRIBED),
            ("post", "/pause", "pause_subscription", "Pause a push subscription.", _SUBSCRIBED),
            ("post", "/resume", "resume_subscription", "Resume a push subscription at once.", _SUBSCRIBED),
        )
    ),
    Operation(
        "get", "/v1/schedules", "schedules", "The recurring schedules, by name.",
        (
            ("topic", "Only schedules of this topic.", False),
            ("max", "The maximum number of schedules, 1 to 1000; default 100. A page may be shorter.", False),
            ("page", "The next_page of the previous page.", False),
        ), (), (http_api.SchedulePage,),
    ),
    Operation(
        "put", "/v1/schedules/{name}", "put_schedule",
        "Create or replace a schedule (a new one: 201). With equal content nothing changes.",
        (), (http_api.SchedulePut,), _SCHEDULE,
    ),
    *(
        Operation(method, f"/v1/schedules/{{name}}{path}", name, summary, (), (), answer, status)
        for method, path, name, summary, answer, status in (
            ("get", "", "schedule", "A schedule and its progress.", _SCHEDULE, 200),
            ("delete", "", "delete_schedule", "Delete a schedule, and cancel its pending occurrence.",
             (http_api.ScheduleDeleted,), 200),
            ("post", "/pause", "pause_schedule", "Pause a schedule: cancel its pending occurrence.", _SCHEDULE, 200),
            ("post", "/resume", "resume_schedule", "Resume a paused or failed schedule.", _SCHEDULE, 200),
            ("post", "/run", "run_schedule", "Send a message of the template now.",
             (http_api.ScheduleRun,), 201),
            ("get", "/history", "schedule_history", "The last times of a schedule, and the states of their messages.",
             (http_api.History,), 200),
        )
    ),
    Operation(
        "post", "/v1/preview", "preview", "The next times of a rule. Nothing is stored.",
        (), (http_api.Previewing,), (http_api.Times,),
    ),
    Operation(
        "get", "/v1/zones", "zones",
        "The version of tzdata, the time zones in use, and the moves of the last update of tzdata.",
        (), (), (http_api.ZonesInUse,),
    ),
    Operation(
        "get", "/v1/selections", "selections", "The selections (bulk operations), the newest last.",
        answer=(http_api.SelectionList,),
    ),
    Operation(
        "post", "/v1/selections", "select",
        "Cancel, shift, pause, resume, release or move all pending messages that meet a condition.",
        (), (http_api.Selecting,), (http_api.Selection,), 201,
    ),
    Operation(
        "post", "/v1/selections/dry-run", "dry_run_selection",
        "Count the pending messages that meet a condition. Nothing changes.",
        (), (http_api.Selecting,), (http_api.DryRun,),
    ),
    Operation(
        "get", "/v1/selections/{selection}", "selection", "One selection.", answer=(http_api.Selection,)
    ),
    Operation(
        "post", "/v1/selections/{selection}/undo", "undo_selection",
        "Take back the effect of a selection on all messages that have not ended since.",
        answer=(http_api.Selection,),
    ),
    Operation(
        "get", "/metrics", "metrics", "The broker's figures, in Prometheus' text format.",
        media_type="text/plain",
    ),
    Operation("get", "/health/live", "live", "Whether the process answers.", answer=(answers_codec.Health,)),
    Operation("get", "/health/ready", "ready", "Whether the broker accepts messages.", answer=(answers_codec.Health,)),
    Operation(
        "get", "/leader/{group}", "leads", "Whether this node of a cluster leads a group: 200, or 503.",
        answer=(answers_codec.Leads,),
    ),
)  # fmt: skip


def document() -> dict[str, Any]:
    """Build the document as OpenAPI 3.1."""
    types = [type_ for operation in OPERATIONS for type_ in operation.request + operation.answer]
    schemas, components = msgspec.json.schema_components(types, ref_template=_SCHEMA_REF)
    schema_of = dict(zip(map(str, types), schemas, strict=True))
    for name, fields in _EXACTLY_ONE_OF.items():
        components[name]["oneOf"] = [{"required": [field]} for field in fields]
    for name, example in _REQUEST_EXAMPLES.items():
        components[name]["examples"] = [example]
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Timeball", "version": __version__},
        "paths": paths,
        "security": [{"account": []}],
        "components": {
            "schemas": {**components, "Problem": _PROBLEM_SCHEMA},
            "securitySchemes": {
                "account": {"type": "http", "scheme": "bearer", "bearerFormat": "access key:secret key"}
            },
        },
    }


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    """Build the Parameter objects of an operation: query, path and headers."""
    parameters = [
        {
            "name": name,
            "in": "query",
            "required": is_required,
            "description": text,
            "schema": _QUERY_SCHEMAS.get(name, {"type": "string"}),
        }
        for name, text, is_required in operation.query
    ]
    for name in ("topic", "id", "name", "campaign", "selection", "group"):
        if f"{{{name}}}" in operation.path:
            parameters.append({"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]})
    if operation.name == "send":
        for name, text in _SEND_HEADERS.items():
            parameters.append(
                {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
            )
    if operation.name == "events":
        text = "The id of an event: the stream continues after it. Without an id it begins with new messages."
        parameters.append(
            {"name": "Last-Event-ID", "in": "header", "description": text, "schema": {"type": "string"}}
        )
    for parameter in parameters:
        if parameter["name"] in _PARAMETER_EXAMPLES:
            parameter["example"] = _PARAMETER_EXAMPLES[parameter["name"]]
    return parameters


def _describe(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    """Build the Operation object of OpenAPI. `schemas` has the schema of each struct."""
    description: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.path.removeprefix("/v1").split("/")[1]],
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": {
            str(operation.status): {
                "description": "done",
                "content": {operation.media_type: {"schema": _any_of(operation.answer, schemas)}},
            },
            "default": {
                "description": "a problem (RFC 9457)",
                "content": {
                    "application/problem+json": {"schema": {"$ref": _SCHEMA_REF.format(name="Problem")}}
                },
            },
        },
    }
    if operation.request:
        content = {JSON: {"schema": _any_of(operation.request, schemas)}}
        if operation.name == "send":
            content[NDJSON] = {"schema": {"type": "string", "description": "one message a line"}}
            content[send_codec.ARROW] = {"schema": {"type": "string", "format": "binary"}}
            names = ", ".join(f"`{send_codec.HEADER}{header}`" for header in send_codec.RAW_HEADERS)
            text = f"One message: a body of any type. The headers {names} have its other fields."
            content["application/octet-stream"] = {
                "schema": {"type": "string", "format": "binary", "description": text}
            }
        description["requestBody"] = {"required": True, "content": content}
    # A send may repeat an earlier send (200), and a subscription or a schedule may be new (201).
    if other_status := {"send": "200", "subscribe": "201", "put_schedule": "201"}.get(operation.name):
        description["responses"][other_status] = description["responses"][str(operation.status)]
    if operation.path.startswith(("/health", "/leader")):
        description["security"] = []
    return description


def _any_of(types: tuple[Any, ...], schemas: dict[str, Any]) -> dict[str, Any]:
    """Build the schema of a value of one of these types."""
    alternatives = [schemas[str(type_)] for type_ in types]
    return {"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0] if alternatives else {}


def encoded() -> bytes:
    """Encode the document as in the file: indented, so that a change of it can be read."""
    return msgspec.json.format(msgspec.json.encode(document()), indent=1) + b"\n"


if __name__ == "__main__":
    FILE.write_bytes(encoded())
