"""What the broker said of each promise, as a sentence or as JSON, and whether the command did what it was asked to."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from timeball.cli.exit_codes import ExitCode
from timeball.cli.messages import show_instant
from timeball.cli.output import print_json, print_line
from timeball.client.answers import Verdict

SENTENCES = {
    "cancelled": "{subject}: cancelled",
    "rescheduled": "{subject}: rescheduled, due {due}",
    "already_cancelled": "{subject}: was cancelled before",
    "released": "{subject}: too late, released at {at}",
    "expired": "{subject}: waits no more; what became of it is older than what the broker keeps",
    "not_found": "{subject}: no such promise",
}


def report(verdicts: Iterable[Verdict], *, fine: set[str], as_json: bool) -> None:
    """Print each verdict; exit code 1 when one is none of those that are `fine`."""
    failed = False
    for verdict in verdicts:
        failed |= verdict.verdict not in fine
        if as_json:
            print_json(verdict)
        else:
            print_line(sentence(verdict))
    if failed:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def sentence(verdict: Verdict) -> str:
    """For people."""
    return SENTENCES[verdict.verdict].format(
        subject=verdict.subject, at=_instant(verdict.at_ms), due=_instant(verdict.due_ms)
    )


def _instant(instant_ms: int | None) -> str:
    return "an unknown instant" if instant_ms is None else show_instant(instant_ms)
