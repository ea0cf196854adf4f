"""A backend of Django's Tasks framework: each task is a message that becomes visible at its `run_after`.

The queue `mail` is the topic `django-mail`. Its workers are the consumer group of the same name, so the tasks that they
give up are the dead letters of this group. The id of a task result is the message id. A send is repeated under it when
its answer is lost, and the broker accepts it once.

The state of a result is that of its message in the group. The broker stores no return values: with the option
`results`, workers store them in a cache of Django, with the exceptions and times of the attempts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Annotated, Any

import msgspec
from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from timeball.client.django.tasks_api import (
    BaseTaskBackend,
    Task,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_enqueued,
)
from timeball.client.identifiers import IDENTIFIERS
from timeball.client.timeball import ENDPOINT, Timeball
from timeball.model import limits
from timeball.model.answers import MessagePlace
from timeball.model.errors import NotFound, RequestError
from timeball.model.values import with_valid_fields

logger = logging.getLogger(__name__)

# The state of a visible message in the group of the workers -> the status of its task.
STATUSES = {
    "waiting": TaskResultStatus.READY,
    "leased": TaskResultStatus.RUNNING,
    "done": TaskResultStatus.SUCCESSFUL,
    "dead": TaskResultStatus.FAILED,
}
# The fields of a result that the broker does not know, and that a worker stores in a cache.
STORED = ("started_at", "last_attempted_at", "finished_at", "worker_ids", "_return_value")
NOT_STORED = object()  # the return value of a result without a stored one
# Caches that the worker does not share with other processes.
PRIVATE_CACHES = (
    "django.core.cache.backends.locmem.LocMemCache",
    "django.core.cache.backends.dummy.DummyCache",
)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The OPTIONS of a backend in the setting TASKS. docs/django.md describes them."""

    endpoint: str = ENDPOINT
    access_key: str | None = None
    secret_key: str | None = None
    timeout_ms: Annotated[int, msgspec.Meta(ge=1)] = 30_000
    prefix: str = "django-"
    max_attempts: Annotated[int, msgspec.Meta(ge=1)] = 17
    enqueue_on_commit: bool = True
    results: str | None = None
    results_s: Annotated[int, msgspec.Meta(ge=1)] = 86_400

    def client(self) -> Timeball:
        """Make a client. It connects at its first call. Raises RequestError for a malformed endpoint."""
        return Timeball(
            self.endpoint, timeout_ms=self.timeout_ms, access_key=self.access_key, secret_key=self.secret_key
        )


# Django makes a backend for each thread, and one client serves all threads. No lock guards this: after a fork, a lock
# could stay locked in the child.
CLIENTS: dict[Options, Timeball] = {}


class TaskMessage(msgspec.Struct):
    """The body of a message, in JSON as `_send` writes it: the path of the task, and its arguments."""

    task: str
    args: list[Any]
    kwargs: dict[str, Any]


class TimeballResult(TaskResult):
    """A result whose return value may not be stored."""

    __slots__ = ()

    @property
    def return_value(self) -> Any:
        """The return value. Raises ValueError if the task has not succeeded, or if its value cannot be read."""
        value = super().return_value
        if value is NOT_STORED:
            raise ValueError(
                "return values are not stored, or no longer, or the cache that OPTIONS['results'] names cannot be read"
            )
        return value


class TimeballBackend(BaseTaskBackend):
    """The backend for the setting TASKS."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = False  # the framework refuses a task with a priority: use a queue of its own

    @cached_property
    def config(self) -> Options:
        """The options. Raises ImproperlyConfigured for an unknown name or a wrong value."""
        try:
            return msgspec.convert(self.options, Options)
        except msgspec.ValidationError as error:
            text = with_valid_fields(str(error), Options)
            raise ImproperlyConfigured(f"TASKS[{self.alias!r}]['OPTIONS']: {text}") from error

    @property
    def ball(self) -> Timeball:
        """The client, which all threads share. Raises RequestError for a malformed endpoint."""
        config = self.config
        return CLIENTS.get(config) or CLIENTS.setdefault(config, config.client())

    def topic(self, queue_name: str) -> str:
        """The topic of a queue, which is also the name of the consumer group of its workers."""
        return f"{self.config.prefix}{queue_name}"

    # ---- enqueue ----------------------------------------------------------------------------------------

    def enqueue(
        self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any], *, result_id: str | None = None
    ) -> TaskResult:
        """Send a task: at once, or with the option `enqueue_on_commit` when the transaction is committed.

        Args:
            task: The task, with its queue and its `run_after`.
            args: The positional arguments.
            kwargs: The keyword arguments.
            result_id: The id of the result, for a send that a program may repeat after a restart. The broker accepts
                one task with this id in a queue. The default is a unique id.

        Returns:
            The result. Its `enqueued_at` is None until the task is sent.

        Raises:
            InvalidTask: The framework refuses the task (django-tasks calls it InvalidTaskError).
            Conflict: Another task was sent under this id.
            Unavailable: The broker cannot be reached, or the answer was lost.
        """
        self.validate_task(task)
        result = self._new_result(task, result_id or IDENTIFIERS.next_id(), args, kwargs)
        if self.config.enqueue_on_commit:
            transaction.on_commit(partial(self._send, result))
        else:
            self._send(result)
        return result

    def _send(self, result: TaskResult) -> None:
        """Send the message of a task, set `enqueued_at` of its result, and send the signal `task_enqueued`.

        Raises RequestError for a malformed endpoint, and the errors of `Timeball.send`.
        """
        task = result.task
        receipt = self.ball.send(
            self.topic(task.queue_name),
            json.dumps({"task": task.module_path, "args": result.args, "kwargs": result.kwargs}),
            at=_with_zone(task.run_after),
            message_id=result.id,
            retry=True,
        )
        # `object.__setattr__` here and below, because TaskResult is a frozen dataclass.
        object.__setattr__(result, "enqueued_at", _to_datetime(receipt.store_ms))
        task_enqueued.send(type(self), task_result=result)

    # ---- results ----------------------------------------------------------------------------------------

    def get_result(self, result_id: str) -> TaskResult:
        """Look a result up by its id.

        If the cache of the option `results` cannot be read, the result has its status, but no stored fields. Raises
        TaskResultDoesNotExist if the broker has no task with this id, has forgotten it, or if it was cancelled.
        """
        try:
            place = self.ball.get(result_id)
        except NotFound as error:
            raise TaskResultDoesNotExist(result_id) from error
        content, topic = place.content, place.topic or ""
        is_task = topic.startswith(self.config.prefix)
        # Only a waiting or visible message has content, and the broker cuts a long body.
        if not is_task or content is None or content.size_bytes > len(content.body):
            raise TaskResultDoesNotExist(result_id)
        status, attempts = _progress(place, topic)
        result = self.read_result(result_id, topic, content.body, attempts, place.due_ms)
        object.__setattr__(result, "status", status)
        if place.due_ms is None and place.at_ms is not None:
            object.__setattr__(result, "enqueued_at", _to_datetime(place.at_ms))
        return result

    def read_result(
        self, result_id: str, topic: str, body: bytes, attempts: int, due_ms: int | None
    ) -> TaskResult:
        """Build the result of a task from its message and from the stored fields. `attempts`: earlier ones.

        Raises ValueError if the message names no task, and ImportError if this program does not have the task.
        """
        message = msgspec.convert(json.loads(body), TaskMessage)
        task = import_string(message.task)
        if not isinstance(task, Task):  # the sender of a message must not choose any function
            raise ValueError(f"{message.task!r} is no task")
        task = task.using(
            backend=self.alias,
            queue_name=topic.removeprefix(self.config.prefix),
            run_after=None if due_ms is None else _to_datetime(due_ms),
        )
        result = self._new_result(task, result_id, message.args, message.kwargs)
        stored = self._read_stored(result_id)
        # A worker that was killed has not stored its attempt.
        workers = stored.get("worker_ids", [])
        stored["worker_ids"] = [""] * (attempts - len(workers)) + workers
        for name, value in ({"_return_value": NOT_STORED} | stored).items():
            object.__setattr__(result, name, value)
        return result

    def _new_result(
        self, task: Task, result_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TaskResult:
        """Create the result of a task that is not sent and has no attempts."""
        return TimeballResult(
            task=task, id=result_id, status=TaskResultStatus.READY, enqueued_at=None, started_at=None,
            finished_at=None, last_attempted_at=None, args=list(args), kwargs=dict(kwargs), backend=self.alias,
            errors=[], worker_ids=[],
        )  # fmt: skip

    def store(self, result: TaskResult) -> None:
        """Store the fields of a result that only its worker knows, if the option `results` names a cache."""
        if self.config.results is not None:
            values = {name: getattr(result, name) for name in STORED}
            fields = {name: value for name, value in values.items() if value is not NOT_STORED}
            fields["errors"] = [(error.exception_class_path, error.traceback) for error in result.errors]
            caches[self.config.results].set(f"timeball:{result.id}", fields, self.config.results_s)

    def _read_stored(self, result_id: str) -> dict[str, Any]:
        """Read the stored fields of a result by name. Empty if there are none, or if the cache cannot be read."""
        if self.config.results is None:
            return {}
        try:
            fields: dict[str, Any] = caches[self.config.results].get(f"timeball:{result_id}") or {}
            if "errors" in fields:
                fields["errors"] = [
                    TaskError(exception_class_path=path, traceback=traceback)
                    for path, traceback in fields["errors"]
                ]
        except Exception:  # of any cache: the task runs without it, and the broker has the status
            logger.exception("result not read id=%s", result_id)
            return {}
        return fields

    # ---- checks -----------------------------------------------------------------------------------------

    def check(self, **kwargs: Any) -> Iterator[checks.CheckMessage]:
        """Check the configuration, for `manage.py check`. Connects to no broker."""
        yield from super().check(**kwargs)
        place = f"TASKS[{self.alias!r}]"
        try:
            config = self.config
            self.ball  # noqa: B018  # raises for a malformed endpoint and for wrong keys
        except (ImproperlyConfigured, RequestError, ModuleNotFoundError) as error:
            yield checks.Error(str(error), hint=f"Correct {place}['OPTIONS'].", id="timeball.E001")
            return
        for queue in sorted(self.queues):
            topic = self.topic(queue)
            # The limit of a group's name is lower than that of a topic's.
            if not limits.NAME.fullmatch(topic) or len(topic) > limits.GROUP_BYTES_MAX:
                text = f"the topic {topic!r} is too long, or has other characters than % | a-z A-Z 0-9 _ -"
                yield checks.Error(text, hint=f"Rename the queue in {place}['QUEUES'].", id="timeball.E002")
        database = settings.DATABASES.get("default", {}).get("ENGINE", "django.db.backends.dummy")
        if config.enqueue_on_commit and database == "django.db.backends.dummy":
            hint = f"Set 'enqueue_on_commit': False in {place}['OPTIONS']."
            yield checks.Error("enqueue_on_commit needs the default database", hint=hint, id="timeball.E003")
        if config.results is not None and config.results not in settings.CACHES:
            text = f"CACHES has no {config.results!r}, which {place}['OPTIONS']['results'] names"
            yield checks.Error(text, id="timeball.E004")
        elif config.results is not None and settings.CACHES[config.results]["BACKEND"] in PRIVATE_CACHES:
            text = f"the web process does not see results in CACHES[{config.results!r}]"
            yield checks.Warning(text, hint="Use a cache that processes share.", id="timeball.W001")
        if not apps.is_installed("timeball.client.django"):
            text = "manage.py has no command timeball_worker"
            hint = "Add 'timeball.client.django' to INSTALLED_APPS."
            yield checks.Warning(text, hint=hint, id="timeball.W002")


def _progress(place: MessagePlace, group: str) -> tuple[TaskResultStatus, int]:
    """Find the status of a task and the number of its attempts, from the state of its message in `group`."""
    for group_place in place.groups:
        if group_place.group == group and place.state == "visible":
            # The broker does not count the attempt of a message that was acknowledged at its first delivery.
            return STATUSES[group_place.state], max(group_place.attempts, int(group_place.state != "waiting"))
    return TaskResultStatus.READY, 0  # no worker has received it yet


def _with_zone(run_after: datetime | None) -> datetime | None:
    """Add the zone of the project to a `run_after` without one, as in a project with USE_TZ = False."""
    has_zone = run_after is None or timezone.is_aware(run_after)
    return run_after if has_zone else timezone.make_aware(run_after)


def _to_datetime(time_ms: int) -> datetime:
    """Convert a time of the broker to a datetime with or without a zone, as `timezone.now()` returns it."""
    time = datetime.fromtimestamp(time_ms / 1000, UTC)
    return time if settings.USE_TZ else timezone.make_naive(time)
