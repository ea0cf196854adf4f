"""Bulk operations on the pending messages of a running broker, over HTTP.

timeball selections cancel   cancel all pending messages that meet a condition, or with --dry-run count them
timeball selections undo     make them pending again
timeball selections list, show
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect
from timeball.cli.output import show

if TYPE_CHECKING:
    from timeball.model.http_api import Selection

selections_app = typer.Typer(help="Cancel many pending messages at once.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the selection.")]


@selections_app.callback()
def _selections() -> None:
    pass


@selections_app.command()
def cancel(
    where: Annotated[
        str, typer.Option("--where", metavar="CONDITION", help="An SQL condition, as in \"region = 'eu'\".")
    ] = "",
    topic: Annotated[
        list[str] | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic. May be repeated.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Only messages due at this time or later.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="Only messages due before this time.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, only count.")] = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Cancel all pending messages that meet a condition. Messages that are sent later are not covered.

    \b
    Examples:
      timeball selections cancel --topic orders --where "region = 'eu'" --dry-run
      timeball selections cancel --topic orders --where "keys STARTSWITH 'order-'" --json | jq -r .id
    """
    with connect(endpoint) as client:
        if not dry_run:
            _show(client.selections.cancel(where, topics=topic or (), start=start, to=to), as_json)
            return
        found = client.selections.dry_run(where, topics=topic or (), start=start, to=to)
    lines = [f"{found.count:,} messages"]
    if found.count:
        lines[0] += f", due from {found.first_due} to {found.last_due}"
    lines += [f"  {each.due}  {each.topic}  {each.id or '-'}" for each in found.samples]
    show(found, lines, as_json=as_json)


@selections_app.command()
def undo(id: IdArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False) -> None:
    """Make the messages of a selection pending again, except those that were due since.

    \b
    Examples:
      timeball selections undo 4711
      timeball selections undo 4711 --json | jq -r .state
    """
    with connect(endpoint) as client:
        _show(client.selections.undo(id), as_json)


@selections_app.command("list")
def list_(endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False) -> None:
    """List the selections, the newest last.

    \b
    Examples:
      timeball selections list
      timeball selections list --json | jq -r 'select(.state == "active").id'
    """
    with connect(endpoint) as client:
        for selection in client.selections.all():
            _show(selection, as_json)


@selections_app.command("show")
def show_(id: IdArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False) -> None:
    """Show a selection.

    \b
    Examples:
      timeball selections show 4711
      timeball selections show 4711 --json | jq .count
    """
    with connect(endpoint) as client:
        _show(client.selections.get(id), as_json)


def _show(selection: Selection, as_json: bool) -> None:
    counted = "being counted" if selection.count is None else f"{selection.count:,} messages"
    condition = f", where {selection.where}" if selection.where else ""
    topics = f", topics {', '.join(selection.topics)}" if selection.topics else ""
    line = f"{selection.id}: {selection.action}, {selection.state}, {counted}{topics}{condition}"
    show(selection, [line], as_json=as_json)
