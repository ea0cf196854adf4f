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
    """Encode the name of a queue as that of a topic and group, as in a URL: "mail.high" becomes "mail%2Ehigh"."""
    return _NOT_IN_NAME.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)


def topic_prefix(virtual_host: str) -> str:
    """Build the prefix of all names of a virtual host: "shop-" for timeball://host/shop, "" for none."""
    name = virtual_host.strip("/")
    return f"{topic_name(name)}-" if name else ""


def due_ms(eta: object) -> int:
    """Convert an ETA as Celery sends it to a due time, rounded up, so that no task runs early. Raises InvalidDelay."""
    try:
        at = datetime.fromisoformat(str(eta))
    except ValueError:
        raise InvalidDelay(f"eta {eta!r}: Celery sends a time such as 2027-01-31T09:30:00+00:00") from None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)  # as Celery's protocol defines it
    return -((_EPOCH - at) // timedelta(milliseconds=1))


def fields_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Build the arguments of `Timeball.send`, but the topic, for a message of kombu.

    Raises InvalidMessage for a message with a priority, and InvalidDelay for a wrong ETA.
    """
    headers, properties = message.get("headers") or {}, message["properties"]
    if properties.get("priority"):
        raise InvalidMessage(
            f"priority {properties['priority']}: Timeball has no priorities; leave it out, and send urgent tasks to a "
            "queue with workers of its own, as in apply_async(queue='urgent')"
        )
    sent_properties = {name: value for name, value in properties.items() if name != ID}
    fields = {
        "body": dumps({**message, "properties": sent_properties}),
        "tag": _label(headers.get("task"), limits.TAG_BYTES_MAX),
        "keys": key_of(headers.get("id")),
        "message_id": properties.get(ID),
    }
    if headers.get("eta"):
        fields["at"] = due_ms(headers["eta"])
    return fields


def key_of(task_id: object) -> str | None:
    """Return the key of the messages of a task, which is its id. None if it cannot be a key, such as "order 17"."""
    return _label(task_id, limits.UNIQUE_KEY_BYTES_MAX)


def _label(text: object, bytes_max: int) -> str | None:
    """Return a text that can be a tag or a key of at most `bytes_max` bytes. None for anything else."""
    if isinstance(text, str) and 0 < len(text.encode()) <= bytes_max and not _NOT_IN_LABEL.search(text):
        return text
    return None


def payload_of(
    body: bytes, message_id: str | None, message_properties: Mapping[str, str]
) -> dict[str, Any] | None:
    """Decode the body of a received message to the payload of kombu. None if it is no message of kombu.

    The payload has no ETA, because a released task is due: a worker whose clock is slow would wait again.
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
    """Set the id of the task of an occurrence, which is the same at each delivery, and its time of expiry, if any."""
    task_id = str(uuid.uuid5(_OCCURRENCES, message_id))
    headers["id"] = headers["root_id"] = properties["correlation_id"] = task_id
    expires_s, scheduled_ms = (message_properties.get(name) for name in (EXPIRES, SCHEDULED_MS))
    if expires_s and scheduled_ms:
        after = timedelta(milliseconds=int(scheduled_ms), seconds=float(expires_s))
        headers["expires"] = (_EPOCH + after).isoformat()


def leased_payload(message: Leased, delivery_tag: str) -> dict[str, Any] | None:
    """Build kombu's payload of a leased message, with its delivery tag. None if it is no message of kombu."""
    payload = payload_of(message.body, message.id, message.properties)
    if payload is not None:
        payload["properties"]["delivery_tag"] = delivery_tag
        if message.attempts:
            payload["properties"].setdefault("delivery_info", {})["redelivered"] = True
    return payload


def requeue_delay_ms(attempts: int) -> int:
    """Compute the delay of a message that was rejected with requeue, from the number of its earlier attempts.

    Redis delivers such a message at once, again and again. Here, too, the first requeue has no delay, for example after
    the death of a child process. But each requeue is an attempt, and after 17 attempts the message is a dead letter.
    Without delays, a task that waits for a lock would be one within a second. So the delays double up to 2 h, and are
    6 h in all.
    """
    return min(_REQUEUE_MS << (attempts - 1), _REQUEUE_MS_MAX) if attempts else 0
