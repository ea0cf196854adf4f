"""`timeball schedule`: a message that becomes visible at an instant, not before and hardly after."""

from __future__ import annotations

from typing import Annotated

import typer

from timeball.cli.connection import connect
from timeball.cli.messages import (
    BodyArgument,
    IdOption,
    KeysOption,
    LinesOption,
    PropertyOption,
    TagOption,
    TopicArgument,
    naming,
    only_lines,
    read_body,
    read_properties,
    report,
    send_lines,
)
from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption
from timeball.cli.quantities import parse_duration_ms, parse_instant_ms
from timeball.cli.send import encode_columns
from timeball.errors import InvalidDelay


def schedule(
    topic: TopicArgument,
    body: BodyArgument = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="DURATION", help="Delay: 250ms, 90s, 1h30m, 7d.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="INSTANT", help="ISO 8601 with a zone, or milliseconds since 1970."),
    ] = None,
    tag: TagOption = None,
    keys: KeysOption = None,
    properties: PropertyOption = None,
    message_id: IdOption = None,
    lines: LinesOption = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Schedule a message, and print the id by which it can be cancelled.

    Exactly one of --after and --at is needed. An instant needs a time zone: a local time would fire at
    another instant on another machine.

    \b
    Examples:
      timeball schedule orders 'close order 17 if unpaid' --after 30m --keys order-17
      timeball schedule licences 'renew' --at 2030-01-31T09:00:00+01:00
      timeball schedule reminders --lines people.txt --after 7d
      timeball schedule orders hello --after 250ms --json
    """
    when = timing(after, at)
    only_lines(lines, body, message_id)
    with connect(endpoint) as ball:
        if lines is not None:
            columns = encode_columns(topic, tag, keys, properties) | when
            send_lines(ball, lines, columns, as_json=as_json)
            return
        due_ms, delay_ms = when["due_ms"], when["delay_ms"]
        receipt = ball.send(
            topic,
            read_body(body),
            tag=tag,
            keys=keys,
            properties=read_properties(properties),
            after=None if delay_ms is None else delay_ms / 1000,
            at=due_ms,
            message_id=message_id,
        )
        report(receipt, as_json=as_json)


# A bare number is refused here, since it could be meant as seconds; so it is not advised either.
AFTER_ADVICE = "write 250ms, 90s, 1h30m or 7d, or an instant with --at"


def timing(after: str | None, at: str | None) -> dict[str, int | None]:
    """The instant or the delay as columns, of which one is null; InvalidDelay unless exactly one is given."""
    if (after is None) == (at is None):
        raise InvalidDelay(
            "say when: exactly one of --after (such as 30m) and --at (such as 2030-01-31T09:00:00Z)"
        )
    if after is None:
        assert at is not None
        with naming("--at"):
            return {"due_ms": parse_instant_ms(at), "delay_ms": None}
    if after.strip().isdecimal():
        raise InvalidDelay(f"--after {after}: add a unit, such as {after}s or {after}ms")
    with naming("--after"):
        return {"due_ms": None, "delay_ms": parse_duration_ms(after, AFTER_ADVICE)}
