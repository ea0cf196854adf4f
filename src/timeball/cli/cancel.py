"""`timeball cancel`: take back what has not happened yet, with a definite verdict for each."""

from __future__ import annotations

from typing import Annotated

import typer

from timeball.cli.connection import connect
from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption
from timeball.cli.verdicts import report
from timeball.errors import RequestError


def cancel(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Message ids.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Cancel all that carry this business key.")] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Cancel scheduled messages by id or by key.

    Each gets one verdict: cancelled, cancelled before, released (with the instant), no such promise, or one that
    waits no more and is older than what the broker keeps. Exit code 1 says that at least one was none of the first two.

    \b
    Examples:
      timeball cancel 0A1B2C3D4E5F60718293A4B5C6D7E8F9
      timeball cancel --key order-17
      timeball schedule orders close --after 30m | xargs timeball cancel --json
    """
    if bool(ids) == (key is not None):
        raise RequestError("name either message ids or --key, not both and not neither")
    with connect(endpoint) as ball:
        verdicts = ball.cancel(key=key) if key is not None else ball.cancel(ids=ids or [])
    report(verdicts, fine={"cancelled", "already_cancelled"}, as_json=as_json)
