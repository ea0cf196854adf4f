"""Workers that run the tasks of received messages: a `Worker` of the client for each queue.

A task that raises an exception is run again by the retry policy of its group, up to `max_attempts` times. Then its
message becomes a dead letter. A task may raise `timeball.Retry` and `timeball.Dead`, as a handler may. A task whose
return value is not JSON has failed, as in the backends of the framework, and is a dead letter at once.

Signals of the framework: `task_started` for each attempt, `task_finished` when the task has succeeded or is given up.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from traceback import format_exception
from types import FrameType
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
from timeball.client.worker import Dead, Worker
from timeball.model.time_parsing import After

logger = logging.getLogger(__name__)


class TaskHandler:
    """Runs the task that a message names. Can be sent to another process, where it sets Django up."""

    def __init__(self, alias: str) -> None:
        """`alias`: the name of the backend in the setting TASKS."""
        self._alias = alias

    def __reduce__(self) -> tuple[Any, ...]:
        return _handler_of_process, (self._alias,)

    def __call__(self, message: Message) -> None:
        """Run the task. Raises its exception, or Dead after the last attempt."""
        close_old_connections()
        try:
            self._run(message)
        finally:
            close_old_connections()

    def _run(self, message: Message) -> None:
        backend: TimeballBackend = task_backends[self._alias]
        result = backend.received(
            message.id or "", message.topic, message.body, message.attempts, message.due_ms
        )
        started = timezone.now()
        # A dead letter that was sent again begins anew, and the stored attempts are those before it.
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
        except BaseException as error:  # of any kind, as sys.exit() or the cancellation of a coroutine
            path = f"{type(error).__module__}.{type(error).__qualname__}"
            result.errors.append(
                TaskError(exception_class_path=path, traceback="".join(format_exception(error)))
            )
            is_last = isinstance(error, Dead) or result.attempts >= backend.config.max_attempts
            _update(result, status=TaskResultStatus.FAILED if is_last else TaskResultStatus.READY)
            _settle(backend, result)
            if is_last and not isinstance(error, Dead):
                raise Dead(reason_of(error)) from error
            if not isinstance(error, Exception):  # it would end the worker
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
    except Exception as error:  # of any kind of value
        # The task has done its work, so it must not run again. Its value would be the same.
        raise Dead(f"the return value is not JSON: {reason_of(error)}") from error


def _update(result: TaskResult, **values: Any) -> None:
    """Set fields of a result, which are read-only for applications."""
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
    if not apps.ready:
        django.setup()
    return TaskHandler(alias)


def make_workers(
    backend: TimeballBackend, queues: Sequence[str], threads: int, processes: int, lease: After
) -> list[Worker]:
    """Make a worker for each queue, with `threads` threads of each of `processes` processes (0: of this process).

    Raises RequestError for an argument that is out of range.
    """
    handler = TaskHandler(backend.alias)
    return [
        Worker(backend.ball, topic, topic, handler, threads=threads, processes=processes, lease=lease)
        for topic in map(backend.topic, queues)
    ]


def run(workers: Sequence[Worker]) -> None:
    """Run workers until SIGTERM or SIGINT, or until an error ends one of them, which is then raised. Blocks.

    Tasks that are running finish. Signals are handled only if `run` is called in the main thread.
    """

    def stop(_signal: int = 0, _frame: FrameType | None = None) -> None:
        # In threads, because a signal handler must not wait for a lock.
        for worker in workers:
            threading.Thread(target=worker.stop, name="timeball-worker-stop").start()

    with ExitStack() as old_handlers:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                old_handlers.callback(signal.signal, number, signal.signal(number, stop))
        with ThreadPoolExecutor(len(workers)) as pool:
            runs = [pool.submit(worker.run) for worker in workers]
            wait(runs, return_when=FIRST_COMPLETED)
            stop()
    for ended in runs:
        ended.result()
