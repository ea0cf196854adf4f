"""Recurring schedules and time zones of a running broker, over HTTP.

timeball schedules put       create or replace one
timeball schedules preview   the next times of a rule, without storing it
timeball schedules list, show, history, pause, resume, run, delete
timeball schedules import    make schedules of a crontab or of celery beat (imports.py)
timeball zones               the time zones in use, and the moves of the last update of tzdata
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from timeball.cli.imports import celery_beat, crontab
from timeball.cli.messages import KeysOption, PropertyOption, read_body, read_properties
from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect, show_instant
from timeball.cli.output import show
from timeball.cli.schedule_rules import RuleOptions, rule_options
from timeball.model.values import CatchUp

if TYPE_CHECKING:
    from timeball.model.http_api import Schedule, ZonesInUse

schedules_app = typer.Typer(help="Send a message at each time of a rule.", no_args_is_help=True)
import_app = typer.Typer(help="Make schedules of those of another scheduler.", no_args_is_help=True)
schedules_app.add_typer(import_app, name="import")
import_app.command("crontab")(crontab)
import_app.command("celery-beat")(celery_beat)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]


@schedules_app.callback()
def _schedules() -> None:
    pass


@import_app.callback()
def _import() -> None:
    pass


@schedules_app.command()
@rule_options
def put(
    name: NameArgument,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic of the messages.")],
    body: Annotated[str, typer.Argument(metavar="BODY", help="The body of each message; '-' reads stdin.")],
    rule: RuleOptions,
    tag: Annotated[str | None, typer.Option("--tag", help="The tag of each message.")] = None,
    keys: KeysOption = None,
    properties: PropertyOption = None,
    catch_up: Annotated[
        CatchUp, typer.Option("--catch-up", help="Missed times that are delivered: latest, all or none.")
    ] = "latest",
    catch_up_within: Annotated[
        str,
        typer.Option("--catch-up-within", metavar="DURATION", help="Older missed times are not delivered."),
    ] = "1d",
    skip_while_busy: Annotated[
        str,
        typer.Option(
            "--skip-while-busy",
            metavar="GROUP",
            help="Leave a time out while GROUP has not finished the last.",
        ),
    ] = "",
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Create or replace a schedule. With equal content nothing changes.

    \b
    Examples:
      timeball schedules put report reports 'make the report' --cron '0 9 * * 1-5' --zone Europe/Berlin
      timeball schedules put poll jobs poll --every 15m --catch-up none --skip-while-busy pollers
      timeball schedules put pay jobs pay --cron '0 9 L * *' --zone UTC --exclude-file holidays.ics --move before
    """
    rule_keys = rule.build()
    with connect(endpoint) as client:
        put_schedule = client.schedules.put(
            name, rule_keys, topic=topic, body=read_body(body), tag=tag, keys=keys or (),
            properties=read_properties(properties), catch_up=catch_up, catch_up_within=catch_up_within,
            overlap="skip" if skip_while_busy else "allow", group=skip_while_busy,
        )  # fmt: skip
        _show(put_schedule, as_json)


@schedules_app.command()
@rule_options
def preview(
    rule: RuleOptions,
    count: Annotated[int, typer.Option("--count", min=1, max=1_000, help="How many times to show.")] = 10,
    after: Annotated[str | None, typer.Option("--after", help="Later than this time; else than now.")] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Show the next times of a rule. Nothing is stored.

    \b
    Examples:
      timeball schedules preview --cron '0 9 * * 1-5' --zone Europe/Berlin
      timeball schedules preview --every 90m --count 3 --json | jq .local
    """
    rule_keys = rule.build()
    with connect(endpoint) as client:
        for time in client.schedules.preview(rule_keys, count=count, after=after):
            show(time, [time.local], as_json=as_json)


@schedules_app.command("list")
def list_(
    topic: Annotated[str | None, typer.Option("--topic", help="Only schedules of this topic.")] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """List schedules by name.

    \b
    Examples:
      timeball schedules list
      timeball schedules list --json | jq -r 'select(.state == "failed").name'
    """
    with connect(endpoint) as client:
        for schedule in client.schedules.all(topic):
            show(schedule, [_line(schedule)], as_json=as_json)


@schedules_app.command("show")
def show_(
    name: NameArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False
) -> None:
    """Show a schedule and its progress.

    \b
    Examples:
      timeball schedules show report
      timeball schedules show report --json | jq .next
    """
    with connect(endpoint) as client:
        _show(client.schedules.get(name), as_json)


@schedules_app.command()
def history(
    name: NameArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False
) -> None:
    """Show what became of the last ten times of a schedule, the newest first.

    \b
    Examples:
      timeball schedules history report
      timeball schedules history report --json | jq .state
    """
    with connect(endpoint) as client:
        for past in client.schedules.history(name):
            reason = f" ({past.reason})" if past.reason else ""
            show(past, [f"{past.local}  {past.state}{reason}"], as_json=as_json)


@schedules_app.command()
def pause(
    name: NameArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False
) -> None:
    """Cancel the pending occurrence of a schedule, and deliver nothing until it is resumed.

    \b
    Examples:
      timeball schedules pause report
      timeball schedules pause report --json | jq .state
    """
    with connect(endpoint) as client:
        _show(client.schedules.pause(name), as_json)


@schedules_app.command()
def resume(
    name: NameArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False
) -> None:
    """Continue a paused or failed schedule. Its catch-up decides about missed times.

    \b
    Examples:
      timeball schedules resume report
      timeball schedules resume report --json | jq .next.local
    """
    with connect(endpoint) as client:
        _show(client.schedules.resume(name), as_json)


@schedules_app.command()
def run(name: NameArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False) -> None:
    """Send a message of a schedule now. Its next time stays.

    \b
    Examples:
      timeball schedules run report
      timeball schedules run report --json | jq -r .id
    """
    with connect(endpoint) as client:
        message_id = client.schedules.run(name)
    show({"name": name, "id": message_id}, [f"{name}: sent {message_id}"], as_json=as_json)


@schedules_app.command()
def delete(
    name: NameArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False
) -> None:
    """Delete a schedule, and cancel its pending occurrence.

    \b
    Examples:
      timeball schedules delete report
      timeball schedules delete report --json
    """
    with connect(endpoint) as client:
        client.schedules.delete(name)
    show({"name": name, "verdict": "deleted"}, [f"{name}: deleted"], as_json=as_json)


def _show(schedule: Schedule, as_json: bool) -> None:
    show(schedule, [_line(schedule)], as_json=as_json)


def _line(schedule: Schedule) -> str:
    """Format a schedule as a line: outcome of a change or state, next time and its message, runs, and error."""
    outcome = schedule.outcome or schedule.state
    following = f", next at {schedule.next.local} ({schedule.next.id})" if schedule.next is not None else ""
    error = f": {schedule.error}" if schedule.error else ""
    return f"{schedule.name}: {outcome}{following}, {schedule.runs:,} runs{error}"


def zones(endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False) -> None:
    """Show the time zones in use, and the moves of the last update of tzdata.

    Due times that were given as local times, and recurring schedules, follow the
    broker's tzdata. After an update of tzdata, its next start moves them.

    \b
    Examples:
      timeball zones
      timeball zones --json | jq .update.moved
    """
    with connect(endpoint) as client:
        zones_in_use = client.schedules.zones()
    show(zones_in_use, _zone_lines(zones_in_use), as_json=as_json)


def _zone_lines(zones_in_use: ZonesInUse) -> Iterator[str]:
    """Yield the version of tzdata, the zones, and the moves of the last update, if there was one."""
    yield f"tzdata {zones_in_use.tzdata}"
    for zone in zones_in_use.zones:
        yield f"  {zone.zone}"
    if (update := zones_in_use.update) is None:
        return
    yield f"updated from {update.former or 'an unknown version'} at {show_instant(update.at_ms)}"
    for moved in update.moved:
        yield (
            f"  {moved.zone}: {moved.messages:,} messages and {moved.schedules:,} schedules moved, the first from "
            f"{moved.before} to {moved.after}"
        )
    if not update.moved:
        yield "  nothing moved"
