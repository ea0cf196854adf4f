"""Task messages of kombu as messages of Timeball, and back. No I/O.

The body of a message is JSON with kombu's body, headers and properties, as in Redis. Its tag is the name of the task
and its key the id of the task, so a pending task can be found and cancelled by its id.

All occurrences of a recurring schedule have the same body. Its task has no id and no time of expiry. They are made of
the id and the properties of the received message.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from kombu.utils.json import dumps, loads

from timeball.client.messages import Leased
from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage

ID = "timeball_id"  # the property that names one publish, and not its attempts; it is not sent
SCHEDULE, SCHEDULED_MS = "schedule", "scheduled_ms"  # properties by which the broker marks an occurrence
EXPIRES = "expires_s"  # the property with the seconds from the time of an occurrence to its expiry
_REQUEUE_MS, _REQUEUE_MS_MAX = 1_000, 2 * limits.HOUR_MS  # the second delay of a requeue, and the longest
_OCCURRENCES = uuid.UUID("1f0c5f0e-35d5-4d0b-9f5c-7d0f8f1f2f6a")  # the namespace of their task ids
_NOT_IN_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_NOT_IN_LABEL = re.compile(r"[\s|\x00-\x1f]")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def topic_name(name: str) -> str:
    """The name of the topic and group of a queue. Other characters are as in a URL: "mail.high" is "mail%2Ehigh"."""
    return _NOT_IN_NAME.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)


def topic_prefix(virtual_host: str) -> str:
    """The prefix of all names of a virtual host, "shop-" for the one of timeball://host/shop."""
    name = virtual_host.strip("/")
    return f"{topic_name(name)}-" if name else ""


def due_ms(eta: object) -> int:
    """The due time of an ETA as Celery sends it, rounded up: no task runs before its ETA. Raises InvalidDelay."""
    try:
        at = datetime.fromisoformat(str(eta))
    except ValueError:
        raise InvalidDelay(f"eta {eta!r}: Celery sends a time such as 2027-01-31T09:30:00+00:00") from None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)  # as Celery's protocol defines it
    return -((_EPOCH - at) // timedelta(milliseconds=1))


def fields_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Timeball.send` for a message of kombu. Raises InvalidMessage for one with a priority."""
    headers, properties = message.get("headers") or {}, message["properties"]
    if properties.get("priority"):
        raise InvalidMessage(
            f"priority {properties['priority']}: Timeball has no priorities; leave it out, and send urgent tasks to a "
            "queue with workers of its own, as in apply_async(queue='urgent')"
        )
    sent = {name: value for name, value in properties.items() if name != ID}
    fields = {
        "body": dumps({**message, "properties": sent}),
        "tag": _label(headers.get("task"), limits.TAG_BYTES_MAX),
        "keys": key_of(headers.get("id")),
        "message_id": properties.get(ID),
    }
    if headers.get("eta"):
        fields["at"] = due_ms(headers["eta"])
    return fields


def key_of(task_id: object) -> str | None:
    """The key of the messages of a task, which is its id. None for an id that cannot be a key, such as "order 17"."""
    return _label(task_id, limits.UNIQUE_KEY_BYTES_MAX)


def _label(text: object, bytes_max: int) -> str | None:
    if isinstance(text, str) and 0 < len(text.encode()) <= bytes_max and not _NOT_IN_LABEL.search(text):
        return text
    return None


def payload_of(
    body: bytes, message_id: str | None, message_properties: Mapping[str, str]
) -> dict[str, Any] | None:
    """Decode a message of kombu that has been received. None if the body is something else.

    The payload has no ETA: a released task is due, and a worker whose clock is slow would hold it.
    """
    try:
        payload = loads(body)
    except ValueError:
        return None
    if not (isinstance(payload, dict) and isinstance(payload.get("properties"), dict)):
        return None
    headers = payload.get("headers")
    if isinstance(headers, dict):
        if headers.get("eta"):
            headers["eta"] = None
        if SCHEDULE in message_properties and message_id is not None and not headers.get("id"):
            _complete_occurrence(headers, payload["properties"], message_id, message_properties)
    return payload


def _complete_occurrence(
    headers: dict[str, Any],
    properties: dict[str, Any],
    message_id: str,
    message_properties: Mapping[str, str],
) -> None:
    """Give the task of an occurrence its id, the same one for each delivery, and its time of expiry."""
    task_id = str(uuid.uuid5(_OCCURRENCES, message_id))
    headers["id"] = headers["root_id"] = properties["correlation_id"] = task_id
    expires_s, scheduled_ms = (message_properties.get(name) for name in (EXPIRES, SCHEDULED_MS))
    if expires_s and scheduled_ms:
        after = timedelta(milliseconds=int(scheduled_ms), seconds=float(expires_s))
        headers["expires"] = (_EPOCH + after).isoformat()


def received(message: Leased, delivery_tag: str) -> dict[str, Any] | None:
    """Build kombu's payload of a leased message. None if it is no message of kombu."""
    payload = payload_of(message.body, message.id, message.properties)
    if payload is not None:
        payload["properties"]["delivery_tag"] = delivery_tag
        if message.attempts:
            payload["properties"].setdefault("delivery_info", {})["redelivered"] = True
    return payload


def requeue_delay_ms(attempts: int) -> int:
    """The delay before a message that was rejected with requeue comes again, after so many earlier attempts.

    Redis delivers it at once and without end. So does the first requeue here, for example after the death of a child
    process. But each requeue is a counted attempt of 17: without delays, a task that waits for a lock would be a dead
    letter within a second. The delays double up to those of the broker's own retries, and are 6 h in all.
    """
    return min(_REQUEUE_MS << (attempts - 1), _REQUEUE_MS_MAX) if attempts else 0
