"""Import pending work from another system.

timeball import celery                   move pending tasks from Celery's Redis transport to a broker
timeball schedules import celery-beat    make a schedule of each entry of an app's `beat_schedule`
timeball schedules import crontab        make a schedule of each entry of a crontab
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from timeball.cli.options import (
    BROKER,
    CELERY,
    DEFAULT_ENDPOINT,
    EndpointOption,
    JsonOption,
    connect,
    needs,
    show_instant,
)
from timeball.cli.output import ExitCode, print_note, show
from timeball.model.errors import RequestError, TimeballError

if TYPE_CHECKING:
    from timeball.broker.recurring.crontab import CrontabEntry
    from timeball.client import Timeball
    from timeball.client.celery.redis_tasks import Moved

# ---- tasks of Celery ------------------------------------------------------------------------------------------

import_app = typer.Typer(no_args_is_help=True, help="Move pending work from another system to a broker.")

_FROM = typer.Option("--from", metavar="URL", help="The broker URL of Celery, redis://host:6379/0.")
_VIRTUAL_HOST = typer.Option(
    "--virtual-host", metavar="NAME", help="That of the new URL, timeball://host:7480/NAME."
)
_DRY_MOVE = typer.Option("--dry-run", help="Count the tasks, and move none.")
_FORCE = typer.Option("--force", help="Move although workers seem to run. They may run tasks a second time.")


@import_app.callback()
def _import_app() -> None:
    pass


@import_app.command("celery")
def celery(
    url: Annotated[str, _FROM],
    virtual_host: Annotated[str, _VIRTUAL_HOST] = "",
    dry_run: Annotated[bool, _DRY_MOVE] = False,
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
    with needs(CELERY):
        from timeball.client.celery.messages import topic_prefix
        from timeball.client.celery.redis_tasks import move
    with connect(endpoint) as client:
        moved = move(url, client, prefix=topic_prefix(virtual_host), is_dry_run=dry_run, force=force)
    show(msgspec.to_builtins(moved), _moved_lines(moved, dry_run), as_json=as_json)


def _moved_lines(moved: Moved, is_dry_run: bool) -> list[str]:
    """Format the outcome of a move for people: tasks by queue, all tasks, due times, and tasks that stay."""
    lines = [f"{queue}: {count}" for queue, count in sorted(moved.queues.items())]
    lines.append(f"{moved.moved} tasks {'would be moved' if is_dry_run else 'moved'}")
    if moved.first_due_ms is not None and moved.last_due_ms is not None:
        lines.append(f"due from {show_instant(moved.first_due_ms)} to {show_instant(moved.last_due_ms)}")
    if moved.left:
        lines.append(f"{moved.left} tasks without an ETA in the future stay in Redis")
    if moved.priorities:
        lines.append(f"{moved.priorities} moved tasks had a priority, and have none any more")
    return lines


# ---- schedules of celery beat ---------------------------------------------------------------------------------

_AppArgument = Annotated[str, typer.Argument(metavar="APP", help="The app, as for `celery -A`.")]
_DRY_PUT = typer.Option("--dry-run", help="Show the schedules, and put none.")


def celery_beat(
    app: _AppArgument,
    dry_run: Annotated[bool, _DRY_PUT] = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Make a schedule of each entry of an app's beat_schedule.

    The same as a start of celery beat with the scheduler class of Timeball: the
    broker then sends the tasks, and no beat has to run. Schedules of the app
    whose entries are gone are deleted. The command can be repeated.

    \b
    Examples:
      timeball schedules import celery-beat shop --dry-run
      timeball schedules import celery-beat shop:app --json
    """
    with needs(CELERY):
        from timeball.client.celery.schedulers import scheduler_of
    scheduler = scheduler_of(app)
    if dry_run:
        for schedule in scheduler.read():
            rule = ", ".join(f"{key} {value}" for key, value in schedule.rule.items())
            line = f"{schedule.name}: would be put, {rule}, {schedule.tag} to {schedule.topic}"
            show(schedule, [line], as_json=as_json)
        return
    with connect(endpoint) as client:
        changed, deleted = scheduler.store(client.schedules)
    lines = [*(f"{name}: put" for name in changed), *(f"{name}: deleted" for name in deleted)]
    show({"put": changed, "deleted": deleted}, lines or ["nothing has changed"], as_json=as_json)


# ---- schedules of a crontab -----------------------------------------------------------------------------------

_SYSTEM_FILES, _SYSTEM_FOLDER = ("/etc/crontab",), "cron.d"
_USER_PROPERTY = "crontab_user"

_FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A crontab. `crontab -l > FILE` writes that of a user.")
]
_TOPIC = typer.Option(
    "--topic", metavar="TOPIC", help="The topic of the messages. Their bodies are the commands."
)
_ZONE = typer.Option(
    "--zone", metavar="ZONE", help="The zone of the machine that runs cron, as in Europe/Berlin."
)
_PREFIX = typer.Option("--prefix", metavar="TEXT", help="The beginning of the names of the schedules.")
_SYSTEM = typer.Option(
    "--system/--user", help="Whether a user stands before each command; else by the path (/etc/cron.d)."
)


def crontab(
    file: _FileArgument,
    topic: Annotated[str, _TOPIC],
    zone: Annotated[str, _ZONE],
    prefix: Annotated[str, _PREFIX] = "",
    system: Annotated[bool | None, _SYSTEM] = None,
    dry_run: Annotated[bool, _DRY_PUT] = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Make a schedule of each entry of a crontab.

    Each time, a message is sent to the topic: its body is the command, and the
    property crontab_user the user. Your consumer runs the command. Names of
    schedules are made of the commands, so the command can be repeated. A line
    CRON_TZ sets the zone of the entries below it. Other variables are left out.

    Exit code 1: an entry was refused, such as one with @reboot.

    \b
    Examples:
      timeball schedules import crontab /etc/cron.d/certbot --topic jobs --zone Europe/Berlin --dry-run
      crontab -l > mine; timeball schedules import crontab mine --topic jobs --zone UTC --json
    """
    entries = _read_entries(file, zone, is_system=_is_system(file) if system is None else system)
    outcomes = Counter[str]()
    if dry_run:
        for entry in entries:
            outcome = "would be put" if entry.spec else "refused"
            _show_entry(entry, prefix, outcome, as_json=as_json)
            outcomes[outcome] += 1
    else:
        with connect(endpoint) as client:
            for entry in entries:
                outcome = _put_entry(client, entry, topic, prefix)
                _show_entry(entry, prefix, outcome, as_json=as_json)
                outcomes[outcome] += 1
    print_note(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "no entries")
    if outcomes["refused"]:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def _is_system(file: Path) -> bool:
    """True if this file names a user before each command: /etc/crontab and the files of a folder cron.d."""
    path = file.absolute()
    return str(path) in _SYSTEM_FILES or path.parent.name == _SYSTEM_FOLDER


def _read_entries(file: Path, zone: str, *, is_system: bool) -> list[CrontabEntry]:
    """Read the entries of a crontab. Raises RequestError if the file cannot be read, or for an unknown zone."""
    with needs(BROKER):
        from timeball.broker.recurring.crontab import read_crontab
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: {error}") from error
    return read_crontab(text, zone, has_user=is_system)


def _put_entry(client: Timeball, entry: CrontabEntry, topic: str, prefix: str) -> str:
    """Put the schedule of an entry. Returns the outcome: created, replaced, unchanged or refused.

    A refused entry has no schedule, and is not sent. Raises the error of the broker, with the entry's name.
    """
    if entry.spec is None:
        return "refused"
    properties = {_USER_PROPERTY: entry.user} if entry.user else {}
    try:
        put = client.schedules.put(
            prefix + entry.name, entry.spec, topic=topic, body=entry.command, properties=properties
        )
    except TimeballError as error:
        raise type(error)(f"{entry.name}: {error}") from error
    return put.outcome or put.state


def _show_entry(entry: CrontabEntry, prefix: str, outcome: str, *, as_json: bool) -> None:
    """Print an entry with its outcome."""
    name, note = prefix + entry.name, f" ({entry.note})" if entry.note else ""
    document = {
        "name": name, "outcome": outcome, "rule": entry.spec, "body": entry.command, "user": entry.user or None,
        "note": entry.note or None,
    }  # fmt: skip
    rule = "" if entry.spec is None else f", {entry.spec['cron']} in {entry.spec['zone']}"
    show(document, [f"{name}: {outcome}{rule}{note}"], as_json=as_json)
