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
        str | None, typer.Argument(metavar="[GROUP]", help="Only this group, topic by topic.")
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
    with connect(endpoint) as client:
        states = client.groups(group)
    if as_json:
        for state in states:
            print_json(state)
        return
    if not states:
        print_note("there are no groups yet: a group is created by its first member")
        return
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("group", "topic") else "right")
    for state in states:
        _add_rows(table, state, by_topic=group is not None)
    out().print(table)
    for state in states:
        for conflict in state.conflicts:
            subject = f"topic {conflict.topic}" if conflict.topic else "topics"
            print_note(
                f"group {state.group}: members want different {subject}: {'; '.join(conflict.wanted)}. "
                "Each loses messages: give all members of a group the same subscriptions"
            )


def _add_rows(table: Table, state: GroupState, *, by_topic: bool) -> None:
    topics = ", ".join(progress.topic for progress in state.topics)
    dead_letters = f"{state.dead_letters:,}"
    if state.expired_dead_letters:
        dead_letters += f" ({state.expired_dead_letters:,} expired)"
    counts = (
        f"{state.lag:,}",
        f"{state.in_flight:,}",
        f"{state.expired:,}",
        dead_letters,
        f"{state.attempts_max:,}",
    )
    table.add_row(state.group, "all" if by_topic and len(state.topics) > 1 else topics, *counts)
    if by_topic and len(state.topics) > 1:
        for progress in state.topics:
            table.add_row(
                "",
                progress.topic,
                f"{progress.lag:,}",
                f"{progress.in_flight:,}",
                f"{progress.expired:,}",
                "",
                "",
            )
