"""`timeball cluster drain`: hand over the pending messages of a group to another group, and show the progress.

The leader of the group hands them over (broker/groups/draining.py). This process repeats its request every `LOOK_S`
seconds, until nothing is left to hand over. If this process ends, the leader continues.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    EndpointOption,
    JsonOption,
    addresses_of,
    as_parameter,
    reach,
)
from timeball.cli.output import print_note, progress_bar, show
from timeball.cli.units import parse_duration_ms
from timeball.io.clock import SystemClock
from timeball.model.errors import Unavailable

if TYPE_CHECKING:
    from timeball.model.wire import Drained

LOOK_S = 0.5


def drain(
    group: Annotated[str, typer.Option("--group", metavar="GROUP", help="The group to drain.")],
    heir: Annotated[str, typer.Option("--to", metavar="GROUP", help="The group that takes all over.")],
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    wait_ms: Annotated[
        int,
        typer.Option(
            "--wait",
            parser=as_parameter(parse_duration_ms),
            metavar="DURATION",
            help="How long to watch at most.",
        ),
    ] = "12h",  # type: ignore[assignment]  # Typer parses a default like a given value
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be handed over, and change nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Hand over all pending messages of a group to another group, so that its machines can be removed.

    From now on the group accepts no new messages, and its routes state this.
    Its queues can be read to their end. Messages due within a minute, and
    messages that wait for redelivery to consumers, stay and are released by the
    group. The leader continues after this command ends, and so does the next
    leader after a crash. Run the command again to see the progress. You cannot
    undo a drain, but you can drain the messages to yet another group. Any node
    of the cluster works as the endpoint.

    \b
    Examples:
      timeball cluster drain --group g2 --to g1 --dry-run
      timeball cluster drain --group g2 --to g1 --endpoint grpc://10.0.0.1:7400,10.0.0.2:7400
      timeball cluster drain --group g2 --to g1 --json | jq .moved
    """
    from timeball.spark.endpoint import Endpoint

    reach(endpoint)
    clock = SystemClock()
    until_ms = clock.boot_ms() + wait_ms
    # Calls are retried for the whole wait time: a group that has lost its leader soon has a new one.
    with Endpoint(f"{addresses_of(endpoint)}#{group}", patience_s=wait_ms / 1_000) as leader:
        found, problem = leader.drain(heir, dry_run=dry_run), ""
        with progress_bar(quiet=as_json) as bar:
            task = bar.add_task(f"{group} to {heir}")
            while not (dry_run or found.is_done):
                bar.update(task, completed=found.moved, total=found.moved + found.moving + found.waiting)
                if found.problem and found.problem != problem:
                    print_note(f"group {group}: {found.problem}; it tries again")
                problem = found.problem
                if clock.boot_ms() >= until_ms:
                    raise Unavailable(
                        f"group {group} still hands over, {found.moved:,} messages so far"
                        f"{': ' + problem if problem else ''}; it goes on by itself"
                    )
                time.sleep(LOOK_S)
                found = leader.drain(heir)
    document: dict[str, Any] = {**msgspec.structs.asdict(found), "dry_run": dry_run}
    show(document, [_sentence(found, dry_run=dry_run)], as_json=as_json)


def _sentence(found: Drained, *, dry_run: bool) -> str:
    if dry_run:
        return f"group {found.group} would hand over to {found.heir}: {found.waiting:,} messages wait"
    left = f"; {found.waiting:,} stay, due within a minute or for its consumers" if found.waiting else ""
    return f"group {found.group} is drained to {found.heir}: {found.moved:,} messages handed over{left}"
