"""`timeball dead-letters`: list, resend and delete the messages that a consumer group has given up."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect, show_instant
from timeball.cli.output import ExitCode, print_json, print_line, print_note, show
from timeball.model.errors import RequestError

if TYPE_CHECKING:
    from timeball.model.wire import DeadLetterRow, Resolved

dead_letters_app = typer.Typer(
    help="List, resend and delete the messages that a group has given up.", no_args_is_help=True
)

PAGE_ROWS = 100
BODY_SHOWN = 60  # characters in the output for people (--json prints all that the broker returns)

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")]
NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[DEAD_LETTER]...", help="Names of dead letters, as `list` prints them."),
]
AllOption = Annotated[bool, typer.Option("--all", help="All remaining dead letters.")]


@dead_letters_app.callback()
def _dead_letters() -> None:
    pass


@dead_letters_app.command("list")
def list_(
    group: GroupArgument,
    max_messages: Annotated[int, typer.Option("--max", min=1, help="At most this many.")] = PAGE_ROWS,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """List the remaining dead letters of a group, the oldest first in each queue.

    \b
    Examples:
      timeball dead-letters list billing
      timeball dead-letters list billing --max 1000 --json | jq -r 'select(.topic == "orders").dead_letter'
    """
    remaining, after, count = max_messages, None, 0
    with connect(endpoint) as client:
        while remaining:
            page = client.dead_letters(group, max_messages=min(remaining, PAGE_ROWS), after=after)
            for row in page.dead_letters:
                _print(row, as_json=as_json)
            count += len(page.dead_letters)
            remaining, after = remaining - len(page.dead_letters), page.next_page
            if after is None:
                break
    if not as_json:
        print_note(f"{count:,} dead letters" + (", there are more" if after is not None else ""))


@dead_letters_app.command()
def resend(
    group: GroupArgument,
    names: NamesArgument = None,
    all_left: AllOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Send dead letters to their group again, with all attempts ahead.

    Exit code 1: a dead letter that you named does not exist any more.

    \b
    Examples:
      timeball dead-letters resend billing --all
      timeball dead-letters list billing --json | jq -r .dead_letter | xargs timeball dead-letters resend billing
    """
    selected = _select_names(names, all_left=all_left)
    with connect(endpoint) as client:
        _report(client.resend_dead_letters(group, selected), "sent again", as_json=as_json)


@dead_letters_app.command()
def delete(
    group: GroupArgument,
    names: NamesArgument = None,
    all_left: AllOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Delete dead letters for good.

    Exit code 1: a dead letter that you named does not exist any more.

    \b
    Examples:
      timeball dead-letters delete billing --all
      timeball dead-letters delete billing 0.17 --json
    """
    selected = _select_names(names, all_left=all_left)
    with connect(endpoint) as client:
        _report(client.delete_dead_letters(group, selected), "deleted", as_json=as_json)


def _select_names(names: list[str] | None, *, all_left: bool) -> list[str] | None:
    """Check that either names or --all is given, and return the names, or None for all. Raises RequestError."""
    if bool(names) == all_left:
        raise RequestError(
            "give either names of dead letters, as `timeball dead-letters list` prints them, or --all"
        )
    return names or None


def _report(resolved: Resolved, outcome: str, *, as_json: bool) -> None:
    missing = resolved.found.count(False)
    lines = [f"{resolved.rows:,} {outcome}"] + ([f"{missing:,} not there any more"] if missing else [])
    show(resolved, lines, as_json=as_json)
    if missing:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def _print(row: DeadLetterRow, *, as_json: bool) -> None:
    try:
        text: str | None = row.body.decode()
    except UnicodeDecodeError:
        text = None
    if as_json:
        fields = msgspec.structs.asdict(row)
        del fields["body"]
        body = {"body": text} if text is not None else {"body_base64": base64.b64encode(row.body).decode()}
        print_json(fields | body)
        return
    readable = text if text is not None else repr(row.body)
    excerpt = readable if len(readable) <= BODY_SHOWN else f"{readable[:BODY_SHOWN]}…"
    print_line(
        f"{row.dead_letter}  {show_instant(row.died_ms)}  {row.topic}  {row.attempts} attempts  {row.id}  {excerpt!r}"
    )
