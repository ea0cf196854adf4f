"""`timeball campaign`: list, count, pause, resume and cancel the scheduled messages of one bulk write.

The broker carries out the changes. This process requests them, and counts without Spark and Java
(spark/jobs/campaign.py). Each command may be interrupted and run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, reach
from timeball.cli.output import err, print_json, print_line, show
from timeball.cli.units import show_instant, show_ms

if TYPE_CHECKING:
    from timeball.spark.jobs.campaign import Progress
    from timeball.spark.jobs.campaign_groups import CampaignParts

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


@app.callback()
def _campaign() -> None:
    pass


@app.command("list")
def list_(endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False) -> None:
    """List all campaigns, the newest last.

    \b
    Examples:
      timeball campaign list
      timeball campaign list --json | jq -r 'select(.state == "paused").campaign'
    """
    from timeball.spark.endpoint import Endpoint, read_groups

    reach(endpoint)
    groups, found = read_groups(endpoint), []
    for group in groups:
        with Endpoint(group.endpoint) as broker:
            found += [(group.name, each) for each in broker.campaigns()]
    for name, each in found:
        if as_json:
            shown = {field: getattr(each, field) for field in ("campaign", "state", "rows", "planned_ms")}
            print_json({**shown, "group": name} if len(groups) > 1 else shown)
        else:
            where = f", in group {name}" if len(groups) > 1 else ""
            print_line(
                f"{each.campaign}  {each.state}  {each.rows:,} messages, of {show_instant(each.planned_ms)}{where}"
            )
    if not found and not as_json:
        print_line("no campaigns yet: timeball bulk makes them")


@app.command("status")
def status(
    campaign: IdArgument,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of a campaign: how many of its rows are released, cancelled, waiting and held.

    The four counts add up to all rows.

    \b
    Examples:
      timeball campaign status spring-2027
      timeball campaign status spring-2027 --json | jq .percent
    """
    with _opened(endpoint, campaign, table_uri) as found, _busy("counting", as_json):
        progress = found.progress()
    show(progress, describe(progress), as_json=as_json)


@app.command("pause")
def pause(
    campaign: IdArgument,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold all pending messages of a campaign: none of them is released until you resume it.

    \b
    Examples:
      timeball campaign pause spring-2027
    """
    with _opened(endpoint, campaign, table_uri) as found, _busy("holding it", as_json):
        paused = found.pause()
    before = "was paused before" if paused.repeated else "paused"
    show(paused, [f"{campaign}: {before}, {paused.held:,} messages are held"], as_json=as_json)


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
    """Schedule held messages again: at their own due times, or all of them later by the length of the pause.

    \b
    Examples:
      timeball campaign resume spring-2027
      timeball campaign resume spring-2027 --shift
    """
    with _opened(endpoint, campaign, table_uri) as found, _busy("writing it again", as_json):
        resumed = found.resume(shift=shift)
    later = f", each {show_ms(resumed.shift_ms)} later" if resumed.shift_ms else ""
    said = "nothing is held" if resumed.repeated else f"{resumed.rows:,} messages wait again{later}"
    show(resumed, [f"{campaign}: {said}"], as_json=as_json)


@app.command("cancel")
def cancel(
    campaign: IdArgument,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    table_uri: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel all pending and held messages of a campaign for good, and show an exact count.

    \b
    Examples:
      timeball campaign cancel spring-2027
      timeball campaign cancel spring-2027 --json | jq .cancelled
    """
    with _opened(endpoint, campaign, table_uri) as found, _busy("cancelling", as_json):
        done = found.cancel()
    said = (
        f"{campaign}: {done.cancelled:,} of {done.rows:,} messages are cancelled, {done.newly:,} of them now; "
        f"{done.released:,} were released"
    )
    show(done, [said], as_json=as_json)


# ---- for people -------------------------------------------------------------------------------------------


def describe(progress: Progress) -> Iterator[str]:
    """Yield the progress of a campaign for people, line by line."""
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
def _opened(endpoint: str, campaign: str, table_uri: str | None) -> Iterator[CampaignParts]:
    from timeball.spark.jobs.campaign_groups import CampaignParts, open_parts

    reach(endpoint)
    with open_parts(endpoint, campaign, table_uri) as parts:
        yield CampaignParts(parts)


@contextmanager
def _busy(what: str, as_json: bool) -> Iterator[None]:
    """Show the current activity on stderr, if that is a terminal and the output is not JSON."""
    if as_json or not err().is_terminal:
        yield
        return
    with err().status(what):
        yield
