"""Celery's remote control with a revoke that reaches pending tasks."""

from __future__ import annotations

from typing import Any

import celery.app.control

from timeball.model.answers import Verdict


class Control(celery.app.control.Control):
    """Celery's `app.control`. Pass it to the app: `Celery(..., control=Control)`."""

    def revoke(self, task_id: str | list[str], *arguments: Any, **options: Any) -> list[Verdict]:
        """Cancel pending tasks at the broker, and tell the workers to revoke the others.

        Args:
            task_id: The id of a task, or a list of ids.
            *arguments: Those of `celery.app.control.Control.revoke`, for tasks that workers may have.
            **options: The same, by name.

        Returns:
            A verdict for each id, in order. `cancelled` means that the task will not run. After `released` and
            `not_found` a worker may have it, so all workers are told to revoke it.
        """
        task_ids = [task_id] if isinstance(task_id, str) else list(task_id)
        with self.app.connection_or_acquire(options.get("connection")) as connection:
            verdicts: list[Verdict] = connection.default_channel.cancel(task_ids)
        left = [verdict.subject for verdict in verdicts if not verdict.cancelled]
        if left:
            super().revoke(left, *arguments, **options)
        return verdicts
