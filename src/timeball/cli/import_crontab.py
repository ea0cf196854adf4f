"""`timeball schedules import crontab`: make a schedule of each entry of a crontab."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from timeball.cli.options import (
    BROKER,
    DEFAULT_ENDPOINT,
    EndpointOption,
    JsonOption,
    connect,
    is_third_party,
    not_installed,
)
from timeball.cli.output import ExitCode, print_note, show
from timeball.model.errors import RequestError, TimeballError

if TYPE_CHECKING:
    from timeball.broker.recurring.crontab import CrontabEntry
    from timeball.client import Timeball

_SYSTEM_FILES, _SYSTEM_FOLDER = ("/etc/crontab",), "cron.d"
_USER_PROPERTY = "crontab_user"

_FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A crontab. `crontab -l > FILE` writes that of a user.")
]
_Topic = typer.Option(
    "--topic", metavar="TOPIC", help="The topic of the messages. Their bodies are the commands."
)
_Zone = typer.Option(
    "--zone", metavar="ZONE", help="The zone of the machine that runs cron, as in Europe/Berlin."
)
_Prefix = typer.Option("--prefix", metavar="TEXT", help="The beginning of the names of the schedules.")
_System = typer.Option(
    "--system/--user", help="Whether a user stands before each command; else by the path (/etc/cron.d)."
)
_Dry = typer.Option("--dry-run", help="Show the schedules, and put none.")


def crontab(
    file: _FileArgument,
    topic: Annotated[str, _Topic],
    zone: Annotated[str, _Zone],
    prefix: Annotated[str, _Prefix] = "",
    system: Annotated[bool | None, _System] = None,
    dry_run: Annotated[bool, _Dry] = False,
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
    entries = _read(file, zone, is_system=_is_system(file) if system is None else system)
    outcomes = Counter[str]()
    if dry_run:
        for entry in entries:
            outcomes[_show(entry, prefix, "would be put" if entry.spec else "refused", as_json=as_json)] += 1
    else:
        with connect(endpoint) as client:
            for entry in entries:
                outcomes[_show(entry, prefix, _put(client, entry, topic, prefix), as_json=as_json)] += 1
    print_note(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "no entries")
    if outcomes["refused"]:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def _is_system(file: Path) -> bool:
    path = file.absolute()
    return str(path) in _SYSTEM_FILES or path.parent.name == _SYSTEM_FOLDER


def _read(file: Path, zone: str, *, is_system: bool) -> list[CrontabEntry]:
    try:
        from timeball.broker.recurring.crontab import read_crontab
    except ModuleNotFoundError as error:
        if not is_third_party(error):
            raise
        raise not_installed(error, BROKER) from error
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: {error}") from error
    return read_crontab(text, zone, has_user=is_system)


def _put(client: Timeball, entry: CrontabEntry, topic: str, prefix: str) -> str:
    """Put the schedule of an entry. Returns the outcome."""
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


def _show(entry: CrontabEntry, prefix: str, outcome: str, *, as_json: bool) -> str:
    """Print an entry and its outcome, which is also the result."""
    name, note = prefix + entry.name, f" ({entry.note})" if entry.note else ""
    document = {
        "name": name, "outcome": outcome, "rule": entry.spec, "body": entry.command, "user": entry.user or None,
        "note": entry.note or None,
    }  # fmt: skip
    rule = "" if entry.spec is None else f", {entry.spec['cron']} in {entry.spec['zone']}"
    show(document, [f"{name}: {outcome}{rule}{note}"], as_json=as_json)
    return outcome
