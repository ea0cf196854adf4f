"""`timeball campaign`: the promises of one bulk write as one object.

Everything here runs in this process, without Spark and Java. Each command may be cut off and given again: it goes on
where it was (pipeline/jobs/campaign.py, pipeline/jobs/pause.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from timeball.cli.connection import connect
from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption
from timeball.cli.output import err, print_json, print_line
from timeball.cli.units import show_instant, show_ms

if TYPE_CHECKING:
    from timeball.pipeline.jobs.campaign import Campaign, Progress

app = typer.Typer(help="Look at bulk writes, pause, resume and cancel them.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The campaign's id.")]
TableOption = Annotated[
    str | None,
    typer.Option(
        "--table-uri",
        metavar="URI",
        help="Where this machine reaches the pending table, if not as the broker.",
    ),
]
STEPS = {"copy": "copying what waits", "cancel": "holding it", "write": "writing it again"}


@app.callback()
def _campaign() -> None:
    pass


@app.command("list")
def list_(
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """List all campaigns, the newest last, as they were left by the last command on them.

    \b
    Examples:
      timeball campaign list
      timeball campaign list --json | jq -r 'select(.state == "paused").campaign'
    """
    from timeball.pipeline.endpoint import Endpoint
    from timeball.pipeline.jobs.campaign import state
    from timeball.pipeline.jobs.campaigns import Campaigns, last

    _reach(endpoint)
    with Endpoint(endpoint) as broker:
        found = Campaigns(table_uri or broker.status().table.uri)
    events = found.events()
    for name in dict.fromkeys(event.campaign for event in events):
        own = [event for event in events if event.campaign == name]
        rows = (last(own, "attached") or own[0]).rows
        said = {"campaign": name, "state": state(own, False), "rows": rows, "planned_ms": own[0].at_ms}
        if as_json:
            print_json(said)
        else:
            print_line(f"{name}  {said['state']}  {rows:,} messages, of {show_instant(own[0].at_ms)}")
    if not events and not as_json:
        print_line("no campaigns yet: timeball bulk makes them")


@app.command("status")
def status(
    campaign: IdArgument,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how far a campaign is: released, cancelled, waiting and held make up all its rows.

    \b
    Examples:
      timeball campaign status spring-2027
      timeball campaign status spring-2027 --json | jq .percent
    """
    with _opened(endpoint, campaign, table_uri) as found, _busy("counting", as_json):
        progress = found.progress()
    if as_json:
        print_json(progress)
    else:
        for line in describe(progress):
            print_line(line)


@app.command("pause")
def pause(
    campaign: IdArgument,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold everything of a campaign that waits: nothing more of it is released until it is resumed.

    \b
    Examples:
      timeball campaign pause spring-2027
    """
    from timeball.pipeline.jobs import pause

    with _opened(endpoint, campaign, table_uri) as found, _busy("looking", as_json) as tell:
        paused = pause.pause(found, tell)
    if as_json:
        print_json(paused)
    else:
        before = "was paused before" if paused.repeated else "paused"
        print_line(f"{campaign}: {before}, {paused.held:,} messages are held")


@app.command("resume")
def resume(
    campaign: IdArgument,
    shift: Annotated[
        bool,
        typer.Option("--shift", help="Later by the length of the pause, instead of overdue ones at once."),
    ] = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Schedule what is held again: at its own instants, or all of it later by as long as the pause was.

    \b
    Examples:
      timeball campaign resume spring-2027
      timeball campaign resume spring-2027 --shift
    """
    from timeball.pipeline.jobs import pause

    with _opened(endpoint, campaign, table_uri) as found, _busy("looking", as_json) as tell:
        resumed = pause.resume(found, shift=shift, tell=tell)
    if as_json:
        print_json(resumed)
    elif resumed.repeated:
        print_line(f"{campaign}: nothing is held")
    else:
        later = f", each {show_ms(resumed.shift_ms)} later" if resumed.shift_ms else ""
        print_line(f"{campaign}: {resumed.rows:,} messages wait again{later}")


@app.command("cancel")
def cancel(
    campaign: IdArgument,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel everything of a campaign that waits or is held, for good, with a definite count.

    \b
    Examples:
      timeball campaign cancel spring-2027
      timeball campaign cancel spring-2027 --json | jq .cancelled
    """
    from timeball.pipeline.jobs import pause

    with _opened(endpoint, campaign, table_uri) as found, _busy("cancelling", as_json):
        done = pause.cancel(found)
    if as_json:
        print_json(done)
    else:
        print_line(
            f"{campaign}: {done.cancelled:,} of {done.rows:,} messages are cancelled, {done.newly:,} of them now; "
            f"{done.released:,} were released"
        )


# ---- for people -------------------------------------------------------------------------------------------


def describe(progress: Progress) -> Iterator[str]:
    """How far a campaign is, in some lines."""
    yield f"{progress.campaign}: {progress.state}, {progress.percent:g} % of {progress.rows:,} messages"
    yield (
        f"released {progress.released:,} + cancelled {progress.cancelled:,} "
        f"+ waiting {progress.waiting:,} + held {progress.held:,}"
    )
    if progress.next_due_ms is not None and progress.last_due_ms is not None:
        yield f"next at {show_instant(progress.next_due_ms)}, last at {show_instant(progress.last_due_ms)}"
    if not progress.whole:
        yield "retention has let go of a part of its log: what it says nothing of counts as released"


@contextmanager
def _opened(endpoint: str, campaign: str, table_uri: str | None) -> Iterator[Campaign]:
    from timeball.pipeline.endpoint import Endpoint
    from timeball.pipeline.jobs.campaign import Campaign

    _reach(endpoint)
    with Endpoint(endpoint) as broker:
        yield Campaign(broker, campaign, table_uri)


def _reach(endpoint: str) -> None:
    """The failure that a terminal meets most, in the words of all other commands."""
    with connect(endpoint) as ball:
        ball.status()


@contextmanager
def _busy(what: str, as_json: bool) -> Iterator[Any]:
    """Say on a terminal's stderr what is being done."""
    if as_json or not err.is_terminal:
        yield lambda step: None
        return
    with err.status(what) as shown:
        yield lambda step: shown.update(STEPS.get(step, step))
