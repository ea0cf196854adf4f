"""The OpenAPI document: each path with its parameters, its bodies and its answers, from the structs of the codec."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from timeball import __version__
from timeball.protocols.http import codec
from timeball.protocols.http.codec import JSON, NDJSON

_REF = "#/components/schemas/{name}"
_GROUP = ("group", "The consumer group.", True)
_TOPIC_OF_ID = ("topic", "Only messages for this topic: producers of others may use the same id.", False)
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


class Operation(NamedTuple):
    """One method of one path. `query`: name, meaning, and whether it must be there."""

    method: str
    path: str
    name: str
    summary: str
    query: tuple[tuple[str, str, bool], ...] = ()
    request: tuple[Any, ...] = ()
    answer: tuple[Any, ...] = ()
    status: int = 200


OPERATIONS = (
    Operation("get", "/v1/topics", "topics", "The topics, and their numbers of queues."),
    Operation(
        "post", "/v1/topics/{topic}/messages", "send", "Send one message or many, for now or for later.",
        (), (codec.Message, list[codec.Message]), (codec.Sent, codec.SentMany), 201,
    ),
    Operation(
        "get", "/v1/topics/{topic}/messages", "receive", "Receive messages as a group, each leased for a time.",
        (
            _GROUP,
            ("max", "At most so many messages, 1 to 1024; 32 otherwise.", False),
            ("wait", "How long to wait for the first, up to 60s; not at all otherwise.", False),
            ("lease", "How long each is this consumer's, 1s to 12h; 60s otherwise.", False),
        ), (), (codec.LeasedMany,),
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
        "post", "/v1/topics/{topic}/extend", "extend", "Keep messages for longer.", (_GROUP,),
        (codec.Extending,), (codec.AnsweredMany,),
    ),
    Operation("get", "/v1/messages/{id}", "get", "Where a message is, and when.", (_TOPIC_OF_ID,)),
    Operation(
        "patch", "/v1/messages/{id}", "reschedule", "Move a scheduled message to another instant.",
        (_TOPIC_OF_ID,), (codec.Moving,),
    ),
    Operation("delete", "/v1/messages/{id}", "cancel", "Cancel a scheduled message.", (_TOPIC_OF_ID,)),
    Operation("get", "/metrics", "metrics", "The broker's figures, in Prometheus' text format."),
    Operation("get", "/health/live", "live", "Whether the process answers."),
    Operation("get", "/health/ready", "ready", "Whether messages are taken now."),
)  # fmt: skip


def document() -> dict[str, Any]:
    """Return the document, as OpenAPI 3.1 has it."""
    kinds = [kind for each in OPERATIONS for kind in each.request + each.answer]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(map(str, kinds), schemas, strict=True))
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
        {"name": name, "in": "query", "required": needed, "description": text, "schema": {"type": "string"}}
        for name, text, needed in each.query
    ]
    for name in ("topic", "id"):
        if f"{{{name}}}" in each.path:
            parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    if each.name == "send":
        text = "A send with the key of an earlier one gets its answer, and no message is sent twice."
        parameters.append(
            {"name": "Idempotency-Key", "in": "header", "description": text, "schema": {"type": "string"}}
        )
    found: dict[str, Any] = {
        "operationId": each.name,
        "summary": each.summary,
        "parameters": parameters,
        "responses": {
            str(each.status): {
                "description": "done",
                "content": {JSON: {"schema": _any_of(each.answer, schema_of)}},
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
        found["requestBody"] = {"required": True, "content": content}
    if each.path.startswith("/health"):
        found["security"] = []
    return found


def _any_of(kinds: tuple[Any, ...], schema_of: dict[str, Any]) -> dict[str, Any]:
    schemas = [schema_of[str(kind)] for kind in kinds]
    return {"anyOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else {}
