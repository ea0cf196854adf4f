"""Moves pending tasks from Celery's Redis transport to Timeball.

Redis has a task with an ETA in one of two places. It is in the list of its queue, or of a priority step of the queue,
until a worker fetches it. From then on until its ETA it is in the hash `unacked`, also after the worker has died.

Each task is sent first and removed then. It is sent with an id of its own, by which the broker recognizes a repetition.
So a move that breaks off can be repeated, and no task is lost or doubled.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import redis
from kombu.utils.json import loads

from timeball.client.celery import messages
from timeball.client.timeball import Timeball
from timeball.io.clock import SystemClock
from timeball.model.errors import InvalidDelay, RequestError, SetupError

UNACKED, UNACKED_INDEX = "unacked", "unacked_index"
BINDINGS = "_kombu.binding."
SEPARATOR = "\x06\x16"
CHUNK = 1_000
_NAMESPACE = uuid.UUID("7c3cf3c0-7d0f-4b64-93a4-0d3c2b4f7d5b")  # of the ids of moved tasks


class Moved(msgspec.Struct):
    """The numbers of tasks that were moved, or with a dry run would be. Times are milliseconds since 1970 UTC."""

    moved: int = 0
    left: int = 0  # tasks without an ETA in the future, which stay for the workers of Redis
    priorities: int = 0  # moved tasks that had a priority and lost it
    queues: dict[str, int] = {}  # moved tasks by queue
    first_due_ms: int | None = None
    last_due_ms: int | None = None


class _Task(NamedTuple):
    """A task in Redis."""

    queue: str
    payload: dict[str, Any]
    remove: Callable[[], object]  # removes it from Redis


def move(
    url: str, ball: Timeball, *, prefix: str = "", is_dry_run: bool = False, force: bool = False
) -> Moved:
    """Move the tasks with an ETA in the future from the Redis at `url` to Timeball.

    The topic of a task is `prefix` and the encoded name of its queue. Raises SetupError if Redis does not answer,
    RequestError if workers seem to use it and not `force`, and the errors of a send.
    """
    client, report = redis.Redis.from_url(url), Moved()
    try:
        workers = _workers(client)
        if workers and not (force or is_dry_run):
            raise RequestError(
                f"{workers} connections of Celery workers to this Redis: stop the workers first, because they run the "
                "tasks that they hold"
            )
        now_ms = SystemClock().wall_ms()
        for task in _tasks(client):
            due_ms = _due_ms(task.payload)
            if due_ms is None or due_ms <= now_ms:
                report.left += 1
                continue
            if not is_dry_run:
                _send(ball, prefix, task, report)
                task.remove()
            _count(report, task.queue, due_ms)
    except redis.RedisError as error:
        raise SetupError(f"{url.rpartition('@')[2]}: {error}") from error
    finally:
        client.close()
    return report


def _send(ball: Timeball, prefix: str, task: _Task, report: Moved) -> None:
    """Send a task without its priority. Its message id depends on its delivery tag, so a repetition is recognized."""
    properties = task.payload["properties"]
    if properties.pop("priority", 0):
        report.priorities += 1
    properties[messages.ID] = uuid.uuid5(_NAMESPACE, str(properties.get("delivery_tag"))).hex
    ball.send(prefix + messages.topic_name(task.queue), retry=True, **messages.fields_of(task.payload))


def _count(report: Moved, queue: str, due_ms: int) -> None:
    """Count a moved task."""
    report.moved += 1
    report.queues[queue] = report.queues.get(queue, 0) + 1
    report.first_due_ms = min(due_ms, report.first_due_ms or due_ms)
    report.last_due_ms = max(due_ms, report.last_due_ms or due_ms)


def _due_ms(payload: dict[str, Any]) -> int | None:
    """Read the ETA of a task as a due time. None if it has none, or one that cannot be read."""
    eta = (payload.get("headers") or {}).get("eta")
    try:
        return messages.due_ms(eta) if eta else None
    except InvalidDelay:
        return None


def _workers(client: redis.Redis) -> int:
    """Count the connections to this database by which workers wait for tasks (brpop) or for remote control (psub)."""
    own_db = str(client.get_connection_kwargs().get("db") or 0)
    return sum(
        str(client_info.get("db")) == own_db
        and (client_info.get("cmd") == "brpop" or str(client_info.get("psub", "0")) != "0")
        for client_info in client.client_list()
    )


def _tasks(client: redis.Redis) -> Iterator[_Task]:
    """Yield all tasks. The caller may remove each task before it asks for the next one."""
    bindings = _bindings(client)
    queues = {queue for pairs in bindings.values() for _, queue in pairs}
    for key in sorted(_lists(client, queues)):
        queue = key.partition(SEPARATOR)[0]
        # The number of tasks that stay, at the end of the list: workers fetch there, producers add at the front.
        stay_count = 0
        while chunk := client.lrange(key, -(stay_count + CHUNK), -(stay_count + 1)):
            length_before = client.llen(key)
            for raw in reversed(chunk):
                payload = _payload(raw)
                if payload is not None:
                    yield _Task(queue, payload, partial(_remove_listed, client, key, raw))
            removed_count = length_before - client.llen(key)  # by the caller
            stay_count += len(chunk) - removed_count
    for tag, raw in list(client.hscan_iter(UNACKED)):
        payload, exchange, routing_key = loads(raw)
        for queue in _destinations(bindings, exchange, routing_key):
            yield _Task(queue, payload, partial(_remove_unacked, client, tag))


def _payload(raw: bytes | str) -> dict[str, Any] | None:
    """Decode an entry of a list. None if it is no message of kombu."""
    try:
        payload = loads(raw)
    except ValueError:
        return None
    return payload if isinstance(payload, dict) and isinstance(payload.get("properties"), dict) else None


def _remove_listed(client: redis.Redis, key: str, raw: bytes | str) -> None:
    # redis-py's annotation has no bytes here, although it takes them.
    client.lrem(key, -1, raw)  # type: ignore[arg-type]


def _remove_unacked(client: redis.Redis, tag: bytes | str) -> None:
    """Remove a task from the hash of unacknowledged tasks and from its index, as kombu does."""
    with client.pipeline() as pipeline:
        pipeline.zrem(UNACKED_INDEX, tag)
        pipeline.hdel(UNACKED, tag)
        pipeline.execute()


def _bindings(client: redis.Redis) -> dict[str, list[tuple[str, str]]]:
    """Read the bindings of each exchange: pairs of a routing key and a queue.

    kombu stores a binding as routing key, pattern and queue, with separators.
    """
    bindings: dict[str, list[tuple[str, str]]] = {}
    for key in client.scan_iter(f"{BINDINGS}*"):
        members = [_text(member).split(SEPARATOR) for member in client.smembers(key)]
        bindings[_text(key).removeprefix(BINDINGS)] = [(parts[0], parts[-1]) for parts in members]
    return bindings


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()


def _lists(client: redis.Redis, queues: set[str]) -> set[str]:
    """Find the keys of the lists of these queues, and of their priority steps (queue, separator, step)."""
    keys = {_text(key) for key in client.scan_iter(_type="list")}
    return {key for key in keys if key.partition(SEPARATOR)[0] in queues}


def _destinations(bindings: dict[str, list[tuple[str, str]]], exchange: str, routing_key: str) -> list[str]:
    """Find the queue of a task that a worker has fetched. Returns it in a list.

    It is the first queue that is bound by the routing key. If there is none, it has the routing key as its name.
    """
    if not exchange:
        return [routing_key]
    queues = [queue for key, queue in bindings.get(exchange, []) if key == routing_key]
    return queues[:1] or [routing_key]
