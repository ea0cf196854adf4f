"""`timeball groups`: show how far consumer groups are behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect
from timeball.cli.output import out, print_json, print_note

if TYPE_CHECKING:
    from timeball.model.wire import GroupState

COLUMNS = ("group", "topic", "lag", "in flight", "expired", "dead letters", "attempts")


def groups(
    group: Annotated[
        str | None, typer.Argument(metavar="[GROUP]", help="Only this one, topic by topic.")
    ] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """List the consumer groups: how many messages each is behind, messages in flight, and dead letters.

    A message is in flight while a member of the group holds it. "expired"
    counts the messages that retention, or the deletion of a topic, removed
    before the group read them.

    \b
    Examples:
      timeball groups
      timeball groups billing
      timeball groups --json | jq -r 'select(.dead_letters > 0).group'
    """
    with connect(endpoint) as ball:
        found = ball.groups(group)
    if as_json:
        for state in found:
            print_json(state)
        return
    if not found:
        print_note("there are no groups yet: the first member makes one")
        return
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("group", "topic") else "right")
    for state in found:
        _add(table, state, by_topic=group is not None)
    out().print(table)
    for state in found:
        for conflict in state.conflicts:
            of_topic = f"topic {conflict.topic}" if conflict.topic else "topics"
            print_note(
                f"group {state.group}: members want different {of_topic}: {'; '.join(conflict.wanted)}. "
                "Each loses messages: give all members of a group the same subscriptions"
            )


def _add(table: Table, state: GroupState, *, by_topic: bool) -> None:
    topics = ", ".join(each.topic for each in state.topics)
    letters = f"{state.dead_letters:,}"
    if state.expired_dead_letters:
        letters += f" ({state.expired_dead_letters:,} expired)"
    counts = (
        f"{state.lag:,}",
        f"{state.in_flight:,}",
        f"{state.expired:,}",
        letters,
        f"{state.attempts_max:,}",
    )
    table.add_row(state.group, "all" if by_topic and len(state.topics) > 1 else topics, *counts)
    if by_topic and len(state.topics) > 1:
        for each in state.topics:
            table.add_row("", each.topic, f"{each.lag:,}", f"{each.in_flight:,}", f"{each.expired:,}", "", "")
