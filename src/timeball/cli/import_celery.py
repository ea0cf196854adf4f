"""`timeball import celery`: move pending tasks from Celery's Redis transport to a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from timeball.cli.options import (
    CELERY,
    DEFAULT_ENDPOINT,
    EndpointOption,
    JsonOption,
    connect,
    is_third_party,
    not_installed,
    show_instant,
)
from timeball.cli.output import show

if TYPE_CHECKING:
    from timeball.client.celery.redis_tasks import Moved

import_app = typer.Typer(no_args_is_help=True, help="Move pending work from another system to a broker.")

_FROM = typer.Option("--from", metavar="URL", help="The broker URL of Celery, redis://host:6379/0.")
_HOST = typer.Option("--virtual-host", metavar="NAME", help="That of the new URL, timeball://host:7480/NAME.")
_DRY = typer.Option("--dry-run", help="Count the tasks, and move none.")
_FORCE = typer.Option("--force", help="Move although workers seem to run. They may run tasks a second time.")


@import_app.callback()
def _import_app() -> None:
    pass


@import_app.command("celery")
def celery(
    url: Annotated[str, _FROM],
    virtual_host: Annotated[str, _HOST] = "",
    dry_run: Annotated[bool, _DRY] = False,
    force: Annotated[bool, _FORCE] = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Move tasks with an ETA in the future from Redis to a broker.

    First let producers send to the broker, and stop the workers of Redis. Tasks
    without an ETA, or with one that has passed, stay in Redis. Each task is
    removed from Redis after the broker has it on its disk. The command can be
    repeated, also after it broke off.

    \b
    Examples:
      timeball import celery --from redis://localhost:6379/0 --dry-run
      timeball import celery --from redis://localhost:6379/0
    """
    try:
        from timeball.client.celery.messages import topic_prefix
        from timeball.client.celery.redis_tasks import move
    except ModuleNotFoundError as error:
        if not is_third_party(error):
            raise
        raise not_installed(error, CELERY) from error
    with connect(endpoint) as client:
        moved = move(url, client, prefix=topic_prefix(virtual_host), is_dry_run=dry_run, force=force)
    show(msgspec.to_builtins(moved), _lines(moved, dry_run), as_json=as_json)


def _lines(moved: Moved, is_dry_run: bool) -> list[str]:
    lines = [f"{queue}: {count}" for queue, count in sorted(moved.queues.items())]
    lines.append(f"{moved.moved} tasks {'would be moved' if is_dry_run else 'moved'}")
    if moved.first_due_ms is not None and moved.last_due_ms is not None:
        lines.append(f"due from {show_instant(moved.first_due_ms)} to {show_instant(moved.last_due_ms)}")
    if moved.left:
        lines.append(f"{moved.left} tasks without an ETA in the future stay in Redis")
    if moved.priorities:
        lines.append(f"{moved.priorities} moved tasks had a priority, and have none any more")
    return lines
