"""`timeball topics`: list the topics of a broker, or the queues of one topic."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect
from timeball.cli.output import out, print_json, print_note


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
