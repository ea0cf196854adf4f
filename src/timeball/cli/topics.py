"""`timeball topics` and `timeball groups`: list the topics of a broker, and its consumer groups.

topics    all topics, or the queues of one topic
groups    how far consumer groups are behind
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect
from timeball.cli.output import out, print_json, print_note

# ---- topics ---------------------------------------------------------------------------------------------------


def topics(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Only this topic, queue by queue.")
    ] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """List the topics, with their queues and their stored visible messages.

    Pending messages are not counted here: `timeball pending` and `timeball
    forecast` count them.

    \b
    Examples:
      timeball topics
      timeball topics orders
      timeball topics --json | jq -r .topic
    """
    with connect(endpoint) as client:
        if topic is not None:
            queues: list[dict[str, object]] = [
                {"topic": topic, "queue": queue_id, "min": range_.min, "max": range_.max}
                for queue_id, range_ in sorted(client.queues(topic).items())
            ]
            _print(queues, ["queue", "min", "max"], as_json=as_json)
            return
        rows: list[dict[str, object]] = []
        for name, count in sorted(client.topics().items()):
            messages = sum(range_.max - range_.min for range_ in client.queues(name).values())
            rows.append({"topic": name, "queues": count, "messages": messages})
    _print(rows, ["topic", "queues", "messages"], as_json=as_json)
    if not rows and not as_json:
        print_note("there are no topics yet: a topic is created by its first message")


def _print(rows: list[dict[str, object]], columns: list[str], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print_json(row)
        return
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name == "topic" else "right")
    for row in rows:
        values = (row[name] for name in columns)
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in values))
    if rows:
        out().print(table)


# ---- groups ---------------------------------------------------------------------------------------------------

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
