"""`timeball cancel` and `timeball reschedule`: cancel or move pending messages, with one verdict for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from timeball.cli.exit_codes import ExitCode
from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect
from timeball.cli.output import show
from timeball.cli.send import AfterOption, AtOption, parse_due
from timeball.cli.units import show_instant
from timeball.model.errors import RequestError

if TYPE_CHECKING:
    from timeball.model.wire import Verdict

SENTENCES = {
    "cancelled": "{subject}: cancelled",
    "rescheduled": "{subject}: rescheduled, due {due}",
    "already_cancelled": "{subject}: was cancelled before",
    "released": "{subject}: too late, released at {at}",
    "expired": "{subject}: waits no more; what became of it is older than what the broker keeps",
    "not_found": "{subject}: no such scheduled message",
    "handed": "{subject}: is pending in another group of the cluster; use its id or key",
    "unavailable": "{subject}: a group of the cluster did not answer; try again",
}

IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Message ids.")]


def cancel(
    ids: IdsArgument = None,
    key: Annotated[str | None, typer.Option("--key", help="Cancel all that carry this business key.")] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Cancel scheduled messages by id or by key.

    Each message gets one verdict: cancelled, cancelled before, released (with
    the time), not found, or expired. Expired means: the message is not pending,
    and its outcome is older than the broker keeps. In a cluster, a verdict can
    also state that a group did not answer.

    Exit code 1: at least one verdict was neither cancelled nor cancelled
    before.

    \b
    Examples:
      timeball cancel 0A1B2C3D4E5F60718293A4B5C6D7E8F9
      timeball cancel --key order-17
      timeball schedule orders close --after 30m | xargs timeball cancel --json
    """
    if bool(ids) == (key is not None):
        raise RequestError("give either message ids or --key")
    with connect(endpoint) as client:
        verdicts = client.cancel(key=key) if key is not None else client.cancel(ids=ids or [])
    report_ends(verdicts, success_verdicts={"cancelled", "already_cancelled"}, as_json=as_json)


def reschedule(
    ids: IdsArgument = None,
    key: Annotated[str | None, typer.Option("--key", help="Move all that carry this business key.")] = None,
    after: AfterOption = None,
    at: AtOption = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Move scheduled messages to another due time, by id or by key.

    Each message moves in one step: it is released once, at the new due time and
    not at the old one. Give exactly one of --after and --at. A time in the past
    means now. A message that was released or cancelled before stays as it is,
    and its verdict states which.

    Exit code 1: at least one message was not moved.

    \b
    Examples:
      timeball reschedule 0A1B2C3D4E5F60718293A4B5C6D7E8F9 --after 30m
      timeball reschedule --key order-17 --at 2030-01-31T09:00:00+01:00
      timeball schedule orders close --after 30m | xargs timeball reschedule --after 2h --json
    """
    if bool(ids) == (key is not None):
        raise RequestError("give either message ids or --key")
    due = parse_due(after, at)
    delay = None if due["delay_ms"] is None else f"{due['delay_ms']}ms"
    with connect(endpoint) as client:
        if key is not None:
            verdicts = client.reschedule(key=key, after=delay, at=due["due_ms"])
        else:
            verdicts = client.reschedule(ids=ids or [], after=delay, at=due["due_ms"])
    report_ends(verdicts, success_verdicts={"rescheduled"}, as_json=as_json)


def report_ends(verdicts: Iterable[Verdict], *, success_verdicts: set[str], as_json: bool) -> None:
    """Print each verdict, as a sentence or as JSON, and exit with code 1 when one is not in `success_verdicts`."""
    failed = False
    for verdict in verdicts:
        failed |= verdict.verdict not in success_verdicts
        show(verdict, [sentence(verdict)], as_json=as_json)
    if failed:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def sentence(verdict: Verdict) -> str:
    """Format a verdict as a line for people."""
    return SENTENCES[verdict.verdict].format(
        subject=verdict.subject, at=_time_text(verdict.at_ms), due=_time_text(verdict.due_ms)
    )


def _time_text(time_ms: int | None) -> str:
    return "an unknown time" if time_ms is None else show_instant(time_ms)
