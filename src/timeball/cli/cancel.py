"""`timeball cancel`: take back what has not happened yet, with a definite verdict for each."""

from __future__ import annotations

from typing import Annotated

import typer

from timeball.cli.connection import connect
from timeball.cli.exit_codes import ExitCode
from timeball.cli.messages import show_instant
from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption
from timeball.cli.output import print_json, print_line
from timeball.errors import RequestError

_SENTENCES = {
    "cancelled": "{subject}: cancelled",
    "already_cancelled": "{subject}: was cancelled before",
    "released": "{subject}: too late, released at {at}",
    "not_found": "{subject}: no such promise",
}


def cancel(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Message ids.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Cancel all that carry this business key.")] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Cancel scheduled messages by id or by key.

    Each gets one verdict: cancelled, cancelled before, released (with the instant), or no such promise.
    Exit code 1 says that at least one was released or not found.

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
    for verdict in verdicts:
        if as_json:
            print_json(verdict)
        else:
            at = show_instant(verdict.at_ms) if verdict.at_ms is not None else "an unknown instant"
            print_line(_SENTENCES[verdict.verdict].format(subject=verdict.subject, at=at))
    if any(verdict.verdict in ("released", "not_found") for verdict in verdicts):
        raise typer.Exit(ExitCode.CHECK_FAILED)
