"""Celery's remote control with a revoke that reaches pending tasks."""

from __future__ import annotations

import logging
from typing import Any

import celery.app.control
from celery import states
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend

from timeball.model.answers import Verdict

logger = logging.getLogger(__name__)

# The states of a result that REVOKED may replace, as in Celery's own workers.
OPEN_STATES = (states.PENDING, states.RECEIVED, states.RETRY, states.REJECTED)


class Control(celery.app.control.Control):
    """Celery's `app.control`. Pass it to the app: `Celery(..., control=Control)`."""

    def revoke(self, task_id: str | list[str], *arguments: Any, **options: Any) -> list[Verdict]:
        """Cancel pending tasks at the broker, and tell the workers to revoke the others.

        The result of a cancelled task is REVOKED, so `AsyncResult.get` raises TaskRevokedError, except with `rpc://`.

        Args:
            task_id: The id of a task, or a list of ids.
            *arguments: Those of `celery.app.control.Control.revoke`, for tasks that workers may have.
            **options: The same, by name.

        Returns:
            A verdict for each id, in order. `cancelled` means that the task will not run. After `released` and
            `not_found` a worker may have it, so all workers are told to revoke it.
        """
        task_ids = [task_id] if isinstance(task_id, str) else list(task_id)
        verdicts = list[Verdict]()
        try:
            with self.app.connection_or_acquire(options.get("connection")) as connection:
                for single_id in task_ids:
                    verdicts.append(connection.default_channel.cancel(single_id))
        finally:  # an error must not leave the tasks that were cancelled before it without their states
            for verdict in verdicts:
                if verdict.cancelled:
                    self._store_revoked(verdict.subject)
        remaining_ids = [verdict.subject for verdict in verdicts if not verdict.cancelled]
        if remaining_ids:
            super().revoke(remaining_ids, *arguments, **options)
        return verdicts

    def _store_revoked(self, task_id: str) -> None:
        """Store the result that a worker stores when it revokes a task: no worker sees a cancelled one."""
        backend = self.app.backend
        if isinstance(backend, (DisabledBackend, RPCBackend)):  # rpc:// sends results from tasks only
            return
        try:
            if backend.get_state(task_id) in OPEN_STATES:
                backend.mark_as_revoked(task_id, reason="revoked")
        except Exception as error:  # each backend has errors of its own, and the task is cancelled
            logger.warning("task cancelled, result not stored id=%s reason=%s", task_id, error)
