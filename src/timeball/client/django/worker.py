"""Workers that run the tasks of received messages: a `Worker` of the client for each queue.

A task that raises an exception is run again by the retry policy of its group, up to `max_attempts` times. Then its
message becomes a dead letter. A task may raise `timeball.Retry` and `timeball.Dead`, as a handler may. A task whose
return value is not JSON has failed, as in the backends of the framework, and is a dead letter at once.

Signals of the framework: `task_started` for each attempt, `task_finished` when the task has succeeded or is given up.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from traceback import format_exception
from typing import Any

import django
from django.apps import apps
from django.db import close_old_connections
from django.utils import timezone

from timeball.client.django.backend import TimeballBackend
from timeball.client.django.tasks_api import (
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_backends,
    task_finished,
    task_started,
)
from timeball.client.messages import Message, reason_of
from timeball.client.worker import Dead, Worker, stop_on_signals
from timeball.model.time_parsing import After

logger = logging.getLogger(__name__)


class TaskHandler:
    """A handler that runs the task of a message. Can be sent to another process, where it sets Django up."""

    def __init__(self, alias: str) -> None:
        """`alias`: the name of the backend in the setting TASKS."""
        self._alias = alias

    def __reduce__(self) -> tuple[Any, ...]:
        return _handler_of_process, (self._alias,)

    def __call__(self, message: Message) -> None:
        """Run the task of a message. Raises its exception, or Dead after the last attempt."""
        close_old_connections()
        try:
            self._run(message)
        finally:
            close_old_connections()

    def _run(self, message: Message) -> None:
        """Run the task, store its result, and send the signals. Raises as `__call__`."""
        backend: TimeballBackend = task_backends[self._alias]
        result = backend.read_result(
            message.id or "", message.topic, message.body, message.attempts, message.due_ms
        )
        started = timezone.now()
        # The attempts of a dead letter that was resent begin at 0 again: the stored ones from there on are older.
        result.worker_ids[message.attempts :] = [f"{socket.gethostname()}:{os.getpid()}"]
        _update(
            result,
            status=TaskResultStatus.RUNNING,
            started_at=result.started_at or started,
            last_attempted_at=started,
        )
        # A receiver that raises an error must not repeat the task: Django logs the error.
        task_started.send_robust(type(backend), task_result=result)
        try:
            value = _call(result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of any kind, for example of sys.exit() or of a cancelled coroutine
            path = f"{type(error).__module__}.{type(error).__qualname__}"
            result.errors.append(
                TaskError(exception_class_path=path, traceback="".join(format_exception(error)))
            )
            is_last = isinstance(error, Dead) or result.attempts >= backend.config.max_attempts
            _update(result, status=TaskResultStatus.FAILED if is_last else TaskResultStatus.READY)
            _settle(backend, result)
            if is_last and not isinstance(error, Dead):
                raise Dead(reason_of(error)) from error
            if not isinstance(error, Exception):  # the error itself would end the worker
                raise RuntimeError(reason_of(error)) from error
            raise
        _update(result, status=TaskResultStatus.SUCCESSFUL, _return_value=value)
        _settle(backend, result)


def _call(result: TaskResult) -> Any:
    """Call the task, and return its value in the types of JSON. Raises Dead for a value that is not JSON."""
    context = (TaskContext(task_result=result),) if result.task.takes_context else ()
    value = result.task.call(*context, *result.args, **result.kwargs)
    try:
        return normalize_json(value)
    except Exception as error:  # a value of any type may raise any error
        # The task has done its work, and would return such a value again. So it must not run again.
        raise Dead(f"the return value is not JSON: {reason_of(error)}") from error


def _update(result: TaskResult, **values: Any) -> None:
    """Set fields of a result, with `object.__setattr__`, because TaskResult is a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def _settle(backend: TimeballBackend, result: TaskResult) -> None:
    """Store the result of an attempt, and send the signal if it was the last one."""
    if result.is_finished:
        _update(result, finished_at=timezone.now())
    try:
        backend.store(result)
    except Exception:  # of any cache: the outcome of the task stands
        logger.exception("result not stored id=%s", result.id)
    if result.is_finished:
        task_finished.send_robust(type(backend), task_result=result)


def _handler_of_process(alias: str) -> TaskHandler:
    """Create the copy of a pickled handler, and set Django up in a new process."""
    if not apps.ready:
        django.setup()
    return TaskHandler(alias)


def make_workers(
    backend: TimeballBackend, queues: Sequence[str], threads: int, processes: int, lease: After
) -> list[Worker]:
    """Make a worker for each queue. `threads`, `processes` and `lease` are those of Worker.

    Raises RequestError for an argument that is out of range.
    """
    handler = TaskHandler(backend.alias)
    return [
        Worker(backend.ball, topic, topic, handler, threads=threads, processes=processes, lease=lease)
        for topic in map(backend.topic, queues)
    ]


def run(workers: Sequence[Worker]) -> None:
    """Run workers until SIGTERM or SIGINT, or until an error ends one of them. Blocks. Raises that error.

    Tasks that are running finish. Signals are handled only if `run` is called in the main thread.
    """
    with stop_on_signals(workers), ThreadPoolExecutor(len(workers)) as pool:
        runs = [pool.submit(worker.run) for worker in workers]
        wait(runs, return_when=FIRST_COMPLETED)
        for worker in workers:
            worker.stop()
    for worker_run in runs:
        worker_run.result()  # raises the error of the worker
