"""`manage.py timeball_worker`: run the tasks of a Timeball backend until SIGTERM or Ctrl-C."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from timeball.client.django.backend import TimeballBackend
from timeball.client.django.tasks_api import task_backends
from timeball.client.django.worker import make_workers, run
from timeball.model.errors import TimeballError
from timeball.model.values import valid


class Command(BaseCommand):
    """The command. Each queue has its own threads."""

    help = "Run the tasks of a Timeball backend until SIGTERM or Ctrl-C. Running tasks then finish."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--backend", default="default", help="the name in the setting TASKS")
        parser.add_argument(
            "--queue", action="append", dest="queues", help="a queue; may be repeated (default: QUEUES)"
        )
        parser.add_argument("--threads", type=int, default=4, help="tasks at the same time, of each queue")
        parser.add_argument(
            "--processes", type=int, default=0, help="processes of so many threads (default: this process)"
        )
        parser.add_argument("--lease", default="60s", help="a dead worker's tasks run again after this time")

    def handle(
        self,
        *,
        backend: str,
        queues: list[str] | None,
        threads: int,
        processes: int,
        lease: str,
        **_options: Any,
    ) -> None:
        """Run the workers. Raises CommandError for a wrong option, and if the broker refuses a worker."""
        try:
            tasks = task_backends[backend]
        except ImproperlyConfigured as error:
            raise CommandError(f"TASKS[{backend!r}]: {error}") from error
        if not isinstance(tasks, TimeballBackend):
            raise CommandError(f"TASKS[{backend!r}] is no TimeballBackend")
        names = queues or sorted(tasks.queues)
        if not names:
            raise CommandError(f"TASKS[{backend!r}] accepts any queue: name those to work on, with --queue")
        for name in names:
            if tasks.queues and name not in tasks.queues:
                raise CommandError(
                    f"TASKS[{backend!r}]['QUEUES'] has no {name!r}: {valid(name, sorted(tasks.queues))}"
                )
        try:
            workers = make_workers(tasks, names, threads, processes, lease)
            self.stdout.write(f"working on {', '.join(names)} of {tasks.config.endpoint}")
            run(workers)
        except TimeballError as error:
            raise CommandError(str(error)) from error
