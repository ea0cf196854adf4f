"""`timeball reschedule`: what waits is kept at another instant, with a definite verdict for each."""

from __future__ import annotations

from typing import Annotated

import typer

from timeball.cli.connection import connect
from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption
from timeball.cli.schedule import timing
from timeball.cli.verdicts import report
from timeball.client.instants import After
from timeball.errors import RequestError


def reschedule(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Message ids.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Move all that carry this business key.")] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="DURATION", help="From now: 250ms, 90s, 1h30m, 7d.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="INSTANT", help="ISO 8601 with a zone, or milliseconds since 1970."),
    ] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Move scheduled messages to another instant, by id or by key.

    Each is moved in one step: it comes at the new instant, once, and not at the old one. Exactly one of --after and
    --at is needed; an instant that has passed is now. A message that was released or cancelled before is left as
    it is, and its verdict says which; exit code 1 says that there was one, or one that is not known.

    \b
    Examples:
      timeball reschedule 0A1B2C3D4E5F60718293A4B5C6D7E8F9 --after 30m
      timeball reschedule --key order-17 --at 2030-01-31T09:00:00+01:00
      timeball schedule orders close --after 30m | xargs timeball reschedule --after 2h --json
    """
    if bool(ids) == (key is not None):
        raise RequestError("name either message ids or --key, not both and not neither")
    when = timing(after, at)
    delay: After | None = None if when["delay_ms"] is None else f"{when['delay_ms']}ms"
    with connect(endpoint) as ball:
        if key is not None:
            verdicts = ball.reschedule(key=key, after=delay, at=when["due_ms"])
        else:
            verdicts = ball.reschedule(ids=ids or [], after=delay, at=when["due_ms"])
    report(verdicts, fine={"rescheduled"}, as_json=as_json)
