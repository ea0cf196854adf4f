"""Bulk operations on the pending messages of a running broker, over HTTP.

timeball selections cancel, shift, pause, resume, release, move
                             change all pending messages that meet a condition, or with --dry-run count them
timeball selections undo     make its messages pending again, except those that were due since
timeball selections list, show
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect, with_options
from timeball.cli.output import show
from timeball.model.time_parsing import duration_text

if TYPE_CHECKING:
    from timeball.model.http_api import Action, Selection

selections_app = typer.Typer(help="Change many pending messages at once.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the selection.")]


@selections_app.callback()
def _selections() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """Which messages a selection covers, at which broker, and how the result is printed."""

    where: Annotated[
        str, typer.Option("--where", metavar="CONDITION", help="An SQL condition, as in \"region = 'eu'\".")
    ] = ""
    topics: Annotated[
        list[str] | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic. May be repeated.")
    ] = None
    start: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Only messages due at this time or later.")
    ] = None
    to: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="Only messages due before this time.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, only count.")] = False
    endpoint: EndpointOption = DEFAULT_ENDPOINT
    as_json: JsonOption = False


# Gives `command(…, options, …)` the options of a selection in place of the parameter `options`.
selection_options = with_options("options", SelectionOptions)


@selections_app.command()
@selection_options
def cancel(options: SelectionOptions) -> None:
    """Cancel all pending messages that meet a condition. Messages that are sent later are not covered.

    \b
    Examples:
      timeball selections cancel --topic orders --where "region = 'eu'" --dry-run
      timeball selections cancel --topic orders --where "keys STARTSWITH 'order-'" --json | jq -r .id
    """
    _select("cancel", options)


@selections_app.command(context_settings={"ignore_unknown_options": True})
@selection_options
def shift(
    by: Annotated[str, typer.Argument(metavar="BY", help="A duration: later, or with a minus earlier.")],
    options: SelectionOptions,
) -> None:
    """Make all pending messages that meet a condition due later or earlier, but not before now.

    \b
    Examples:
      timeball selections shift 2h --topic orders
      timeball selections shift -30m --topic orders --json | jq -r .id
    """
    _select("shift", options, by=by)


@selections_app.command()
@selection_options
def pause(options: SelectionOptions) -> None:
    """Hold all pending messages that meet a condition until they are resumed.

    \b
    Examples:
      timeball selections pause --topic orders
      timeball selections pause --topic orders --json | jq -r .id
    """
    _select("pause", options)


@selections_app.command()
@selection_options
def resume(options: SelectionOptions) -> None:
    """Release held messages that meet a condition at their due times, or at once.

    \b
    Examples:
      timeball selections resume --topic orders
      timeball selections resume --topic orders --json | jq -r .id
    """
    _select("resume", options)


@selections_app.command()
@selection_options
def release(options: SelectionOptions) -> None:
    """Release all pending messages that meet a condition now, also held ones.

    \b
    Examples:
      timeball selections release --topic orders --where "region = 'eu'"
      timeball selections release --topic orders --dry-run --json | jq .count
    """
    _select("release", options)


@selections_app.command()
@selection_options
def move(
    to_topic: Annotated[str, typer.Argument(metavar="TO_TOPIC", help="The topic of the release.")],
    options: SelectionOptions,
) -> None:
    """Release all pending messages that meet a condition to another topic when they are due.

    \b
    Examples:
      timeball selections move orders-eu --topic orders --where "region = 'eu'"
      timeball selections move orders-eu --topic orders --json | jq -r .id
    """
    _select("move", options, to_topic=to_topic)


@selections_app.command()
def undo(id: IdArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False) -> None:
    """Undo a selection for all of its messages that were not due since.

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
    """Print a selection: all fields as JSON, or a line with the main ones."""
    counted = "being counted" if selection.count is None else _count_text(selection.count)
    condition = f", where {selection.where}" if selection.where else ""
    topics = f", topics {', '.join(selection.topics)}" if selection.topics else ""
    action = f"{selection.action} {selection.to_topic}" if selection.to_topic else selection.action
    action += f" by {duration_text(selection.shift_ms)}" if selection.shift_ms else ""
    line = f"{selection.id}: {action}, {selection.state}, {counted}{topics}{condition}"
    show(selection, [line], as_json=as_json)


def _count_text(count: int) -> str:
    return f"{count:,} message{'' if count == 1 else 's'}"


def _select(action: Action, options: SelectionOptions, *, by: str | None = None, to_topic: str = "") -> None:
    """Make a selection, or with --dry-run count its messages, and print the result.

    `by` is the duration of a shift, and `to_topic` the topic of a move. Raises TimeballError.
    """
    bounds: Any = {"topics": options.topics or (), "start": options.start, "to": options.to}
    with connect(options.endpoint) as client:
        selections = client.selections
        if not options.dry_run:
            # Only a shift and a move have an argument before the condition.
            operand = () if by is None and not to_topic else (by or to_topic,)
            select = getattr(selections, action)
            _show(select(*operand, options.where, **bounds), options.as_json)
            return
        counted = selections.dry_run(options.where, action=action, by=by, to_topic=to_topic, **bounds)
    lines = [_count_text(counted.count)]
    if counted.count:
        lines[0] += f", due from {counted.first_due} to {counted.last_due}"
    lines += [f"  {message.due}  {message.topic}  {message.id or '-'}" for message in counted.samples]
    show(counted, lines, as_json=options.as_json)
