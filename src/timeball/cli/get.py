"""`timeball get`: show where a message is, by its id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect
from timeball.cli.output import show
from timeball.cli.units import show_instant

if TYPE_CHECKING:
    from timeball.model.wire import GroupPlace, MessagePlace


def get(
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The id that its sender was given.")],
    topic: Annotated[str | None, typer.Option("--topic", help="Of those sent to this topic.")] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Show where a message is (waiting, visible in a queue, cancelled or expired), and how far each group is with it.

    If several messages have this id, the newest is shown.

    \b
    Examples:
      timeball get 0d50af5b8e604b4ab4bf7a2f5b5f1f55
      timeball get order-17-reminder --topic orders
      timeball get 0d50af5b8e604b4ab4bf7a2f5b5f1f55 --json | jq .due_ms
    """
    with connect(endpoint) as ball:
        place = ball.get(message_id, topic)
    document = {"id": message_id, **msgspec.to_builtins(place)}
    show(document, _lines(place), as_json=as_json)


def _lines(place: MessagePlace) -> Iterator[str]:
    told = [place.state]
    if place.topic is not None:
        told.append(f"topic {place.topic}")
    if place.queue_id is not None:
        told.append(f"queue {place.queue_id} at {place.queue_offset}")
    if place.due_ms is not None:
        told.append(f"due {show_instant(place.due_ms)}")
    if place.at_ms is not None:
        told.append(f"since {show_instant(place.at_ms)}")
    if place.by is not None:
        told.append(f"by {place.by}")
    if place.reason is not None:
        told.append(f"reason: {place.reason}")
    yield ", ".join(told)
    for one in place.groups:
        yield ", ".join(_told_of(one))


def _told_of(one: GroupPlace) -> Iterator[str]:
    """Yield a consumer group's progress with the message, in parts."""
    yield f"  group {one.group}: {one.state}"
    if one.until_ms is not None:
        yield f"until {show_instant(one.until_ms)}"
    if one.attempts:
        yield f"attempt {one.attempts}"
