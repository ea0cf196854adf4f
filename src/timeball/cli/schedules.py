"""Recurring schedules of a running broker, over HTTP.

timeball schedules put       create or replace one
timeball schedules preview   the next times of a rule, without storing it
timeball schedules list, show, history, pause, resume, run, delete
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect
from timeball.cli.output import show
from timeball.model.errors import RequestError
from timeball.model.values import CatchUp

if TYPE_CHECKING:
    from timeball.model.http_api import Schedule

schedules_app = typer.Typer(help="Send a message at each time of a rule.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]
CronOption = Annotated[
    str | None, typer.Option("--cron", metavar="EXPRESSION", help="Five fields, as in '0 9 * * 1-5'.")
]
EveryOption = Annotated[
    str | None, typer.Option("--every", metavar="DURATION", help="A fixed distance, as in 15m.")
]
ZoneOption = Annotated[
    str | None, typer.Option("--zone", metavar="ZONE", help="The zone of local times, as in Europe/Berlin.")
]
RuleOption = Annotated[
    str | None, typer.Option("--rule", metavar="JSON", help="Further keys of the rule, as a JSON object.")
]


@schedules_app.callback()
def _schedules() -> None:
    pass


def _rule_of(cron: str | None, every: str | None, zone: str | None, rule: str | None) -> dict[str, Any]:
    """Build a rule from the options. Raises RequestError for text that is no JSON object."""
    keys: dict[str, Any] = {}
    if rule is not None:
        try:
            keys = json.loads(rule)
        except ValueError as error:
            raise RequestError(f"--rule: {error}") from error
        if not isinstance(keys, dict):
            raise RequestError('--rule: a JSON object, as in \'{"rrule": "…"}\'')
    keys |= {name: value for name, value in (("cron", cron), ("every", every), ("zone", zone)) if value}
    return keys


@schedules_app.command()
def put(
    name: NameArgument,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic of the messages.")],
    body: Annotated[str, typer.Argument(metavar="BODY", help="The body of each message.")],
    cron: CronOption = None,
    every: EveryOption = None,
    zone: ZoneOption = None,
    rule: RuleOption = None,
    tag: Annotated[str | None, typer.Option("--tag", help="The tag of each message.")] = None,
    catch_up: Annotated[
        CatchUp, typer.Option("--catch-up", help="Missed times that are delivered: latest, all or none.")
    ] = "latest",
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Create or replace a schedule. With equal content nothing changes.

    \b
    Examples:
      timeball schedules put report reports 'make the report' --cron '0 9 * * 1-5' --zone Europe/Berlin
      timeball schedules put poll jobs poll --every 15m --catch-up none
    """
    wanted = _rule_of(cron, every, zone, rule)
    with connect(endpoint) as client:
        _show(client.schedules.put(name, wanted, topic=topic, body=body, tag=tag, catch_up=catch_up), as_json)


@schedules_app.command()
def preview(
    cron: CronOption = None,
    every: EveryOption = None,
    zone: ZoneOption = None,
    rule: RuleOption = None,
    count: Annotated[int, typer.Option("--count", min=1, max=1_000, help="How many times.")] = 10,
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
    wanted = _rule_of(cron, every, zone, rule)
    with connect(endpoint) as client:
        for time in client.schedules.preview(wanted, count=count, after=after):
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
    outcome = schedule.outcome or schedule.state
    following = f", next at {schedule.next.local} ({schedule.next.id})" if schedule.next is not None else ""
    error = f": {schedule.error}" if schedule.error else ""
    return f"{schedule.name}: {outcome}{following}, {schedule.runs:,} runs{error}"
