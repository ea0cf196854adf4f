"""`timeball campaign`: list, count, pause, resume and cancel the scheduled messages of one bulk write.

The broker carries out the changes. This process requests them, and counts without Spark and Java
(spark/jobs/campaign.py). Each command may be interrupted and run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, reach, show_instant, show_ms
from timeball.cli.output import err, print_json, print_line, show

if TYPE_CHECKING:
    from timeball.spark.jobs.campaign import CampaignParts, Progress

app = typer.Typer(help="Inspect, pause, resume and cancel bulk writes.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The campaign's id.")]
TableOption = Annotated[
    str | None,
    typer.Option(
        "--table-uri",
        metavar="URI",
        help="The pending table's URI on this machine, if it differs from the broker's.",
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
    groups, campaigns = read_groups(endpoint), []
    for group in groups:
        with Endpoint(group.endpoint) as broker:
            campaigns += [(group.name, row) for row in broker.campaigns()]
    for name, row in campaigns:
        if as_json:
            document = {field: getattr(row, field) for field in ("campaign", "state", "rows", "planned_ms")}
            print_json({**document, "group": name} if len(groups) > 1 else document)
        else:
            in_group = f", in group {name}" if len(groups) > 1 else ""
            print_line(
                f"{row.campaign}  {row.state}  {row.rows:,} messages, of {show_instant(row.planned_ms)}{in_group}"
            )
    if not campaigns and not as_json:
        print_line("no campaigns yet: create one with timeball bulk")


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
    with _open_campaign(endpoint, campaign, table_uri) as campaign_jobs, _busy("counting", as_json):
        progress = campaign_jobs.progress()
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
    with _open_campaign(endpoint, campaign, table_uri) as campaign_jobs, _busy("pausing", as_json):
        paused = campaign_jobs.pause()
    outcome = "was already paused" if paused.repeated else "paused"
    show(paused, [f"{campaign}: {outcome}, {paused.held:,} messages are held"], as_json=as_json)


@app.command("resume")
def resume(
    campaign: IdArgument,
    shift: Annotated[
        bool,
        typer.Option(
            "--shift",
            help="Move all due times by the length of the pause. Else overdue messages go out at once.",
        ),
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
    with _open_campaign(endpoint, campaign, table_uri) as campaign_jobs, _busy("scheduling again", as_json):
        resumed = campaign_jobs.resume(shift=shift)
    later = f", each {show_ms(resumed.shift_ms)} later" if resumed.shift_ms else ""
    outcome = "nothing is held" if resumed.repeated else f"{resumed.rows:,} messages wait again{later}"
    show(resumed, [f"{campaign}: {outcome}"], as_json=as_json)


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
    with _open_campaign(endpoint, campaign, table_uri) as campaign_jobs, _busy("cancelling", as_json):
        report = campaign_jobs.cancel()
    summary = (
        f"{campaign}: {report.cancelled:,} of {report.rows:,} messages are cancelled, {report.newly:,} of them now; "
        f"{report.released:,} were released"
    )
    show(report, [summary], as_json=as_json)


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
        yield "retention has deleted a part of the campaign's log: messages without a record count as released"


@contextmanager
def _open_campaign(endpoint: str, campaign: str, table_uri: str | None) -> Iterator[CampaignParts]:
    """Open the campaign in all groups of the cluster. Raises Unavailable when no broker answers."""
    from timeball.spark.jobs.campaign import CampaignParts, open_parts

    reach(endpoint)
    with open_parts(endpoint, campaign, table_uri) as groups:
        yield CampaignParts(groups)


@contextmanager
def _busy(activity: str, as_json: bool) -> Iterator[None]:
    """Show the current activity on stderr, if that is a terminal and the output is not JSON."""
    if as_json or not err().is_terminal:
        yield
        return
    with err().status(activity):
        yield
