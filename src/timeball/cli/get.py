"""`timeball get`: show the state of a message, by its id, and the progress of each consumer group with it."""

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
    message_id: Annotated[
        str, typer.Argument(metavar="ID", help="The message's id, as printed by send and schedule.")
    ],
    topic: Annotated[str | None, typer.Option("--topic", help="Only a message of this topic.")] = None,
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
    with connect(endpoint) as client:
        located = client.get(message_id, topic)
    document = {"id": message_id, **msgspec.to_builtins(located)}
    show(document, _lines(located), as_json=as_json)


def _lines(located: MessagePlace) -> Iterator[str]:
    words = [located.state]
    if located.topic is not None:
        words.append(f"topic {located.topic}")
    if located.queue_id is not None:
        words.append(f"queue {located.queue_id} at {located.queue_offset}")
    if located.due_ms is not None:
        words.append(f"due {show_instant(located.due_ms)}")
    if located.at_ms is not None:
        words.append(f"since {show_instant(located.at_ms)}")
    if located.by is not None:
        words.append(f"by {located.by}")
    if located.reason is not None:
        words.append(f"reason: {located.reason}")
    yield ", ".join(words)
    for group in located.groups:
        yield ", ".join(_group_words(group))


def _group_words(progress: GroupPlace) -> Iterator[str]:
    """Yield the words about a consumer group's progress with the message."""
    yield f"  group {progress.group}: {progress.state}"
    if progress.until_ms is not None:
        yield f"until {show_instant(progress.until_ms)}"
    if progress.attempts:
        yield f"attempt {progress.attempts}"
