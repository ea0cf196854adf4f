"""`timeball cluster`: create, inspect and change a cluster, from any machine that reaches its etcd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from timeball.cli.exit_codes import ExitCode
from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    EndpointOption,
    JsonOption,
    addresses_of,
    as_parameter,
    cluster_options,
    reach,
)
from timeball.cli.output import print_json, print_line, print_note, progress_bar, show
from timeball.cli.units import parse_duration_ms, show_wait
from timeball.cluster.protocol.replica import Record, majority, node_of
from timeball.io.clock import SystemClock
from timeball.model.config import Settings
from timeball.model.errors import RequestError, SetupError, Unavailable
from timeball.monitoring.replica_groups import ReplicaGroup, ReplicaState

# `timeball cluster drain`: hand over the pending messages of a group to another group, and show the progress.
#
# The leader of the group hands them over (broker/groups/draining.py). This process repeats its request every `LOOK_S`
# seconds, until nothing is left to hand over. If this process ends, the leader continues.

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


if TYPE_CHECKING:
    from timeball.cluster.coordination.coordinator import Coordinator, GroupView, Wish
    from timeball.cluster.operating.operations import Operations

T = TypeVar("T")

app = typer.Typer(help="Make, look at and change a cluster, by its etcd alone.", no_args_is_help=True)

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The node, by its --node.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be changed, and change nothing.")
]
WaitOption = Annotated[
    int,
    typer.Option(
        "--wait", parser=as_parameter(parse_duration_ms), metavar="DURATION", help="How long to wait at most."
    ),
]


@app.callback()
def _cluster() -> None:
    pass


@app.command()
@cluster_options
def init(
    settings: Settings,
    nodes: Annotated[
        str, typer.Option("--nodes", metavar="A,B,C", help="The nodes of the group's replicas.")
    ],
    wait_ms: WaitOption = "60s",  # type: ignore[assignment]  # Typer parses a default like a given value
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Create a group from running nodes.

    The command waits until all of the nodes have registered with etcd, and then
    writes the group's first record. An etcd that is still starting gets 10 s of
    the --wait time. If the group has a record of these nodes already, nothing
    changes, so you can repeat the command. Nodes with data and nodes without
    data cannot be mixed: create the group from the nodes with data, and then
    add the others.

    \b
    Examples:
      timeball cluster init --cluster shop --etcd http://etcd1:2379 --nodes a,b,c
      timeball cluster init --cluster shop --etcd http://etcd1:2379 --group g2 --nodes d,e,f --dry-run
      timeball cluster init --settings timeball.toml --nodes a,b,c --json
    """
    names = [name.strip() for name in nodes.split(",") if name.strip()]

    from timeball.cluster.operating.operations import Operations

    async def ask(coordinator: Coordinator) -> Record:
        operations = Operations(coordinator, settings.group)
        record = await operations.plan_first(names, wait_ms / 1_000)
        if not dry_run:
            await operations.begin(record)
        return record

    record = _asked(settings, ask)
    word = "would have" if dry_run else "has"
    text = f"group {settings.group} of cluster {settings.cluster} {word} the replicas {', '.join(record.replicas)}"
    show(_document(settings, record, dry_run), [text], as_json=as_json)


@app.command()
@cluster_options
def status(settings: Settings, as_json: JsonOption = False) -> None:
    """Show each group: its leader, how far each replica is, and each problem in a sentence.

    With --json, each group is one document.

    Exit code 3: a group has no leader, or there is no group. Exit code 1: there
    is another problem.

    \b
    Examples:
      timeball cluster status --cluster shop --etcd http://etcd1:2379
      timeball cluster status --settings timeball.toml --json | jq '{group, leader, problems}'
      watch timeball cluster status
    """
    from timeball.cli.cluster import lines
    from timeball.cluster.operating.survey import survey

    groups = _asked(settings, survey)
    for group in groups:
        if as_json:
            print_json(group)
        else:
            for line in lines(group, SystemClock().wall_ms()):
                print_line(line)
    if not groups:
        print_note(f"no node of cluster {settings.cluster} is registered, and it has no group")
    if not all(group.leader for group in groups) or not groups:
        raise typer.Exit(ExitCode.UNREACHABLE)
    if any(group.problems for group in groups):
        raise typer.Exit(ExitCode.CHECK_FAILED)


@app.command("add-replica")
@cluster_options
def add_replica(
    settings: Settings,
    node: NodeArgument,
    wait_ms: WaitOption = "1h",  # type: ignore[assignment]  # Typer parses a default like a given value
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a running node a replica of the group, once it has caught up.

    The leader first ships the log to the node, and then counts it as a replica.
    Ctrl-C withdraws the request. A node whose disk was replaced needs no
    command: it becomes a replica again by itself.

    \b
    Examples:
      timeball cluster add-replica d --cluster shop --etcd http://etcd1:2379
      timeball cluster add-replica d --settings timeball.toml --dry-run --json
    """
    _change(settings, lambda to: to.plan_add(node), wait_ms, dry_run=dry_run, as_json=as_json)


@app.command("remove-replica")
@cluster_options
def remove_replica(
    settings: Settings,
    node: NodeArgument,
    wait_ms: WaitOption = "60s",  # type: ignore[assignment]  # Typer parses a default like a given value
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a replica from the group, whether its node is running or not.

    The leader is refused: make another replica the leader first, with `timeball
    cluster hand-over`.

    \b
    Examples:
      timeball cluster remove-replica b --cluster shop --etcd http://etcd1:2379
      timeball cluster remove-replica b --settings timeball.toml --dry-run
    """
    _change(settings, lambda to: to.plan_remove(node), wait_ms, dry_run=dry_run, as_json=as_json)


@app.command("hand-over")
@cluster_options
def hand_over(
    settings: Settings,
    to: Annotated[
        str, typer.Option("--to", metavar="NODE", help="The next leader; without it, the one that has most.")
    ] = "",
    wait_ms: WaitOption = "30s",  # type: ignore[assignment]  # Typer parses a default like a given value
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make another replica the leader, without waiting for a lease to end.

    The leader finishes the operations in progress first.

    \b
    Examples:
      timeball cluster hand-over --to b --cluster shop --etcd http://etcd1:2379
      timeball cluster hand-over --settings timeball.toml       # before its machine is restarted
    """
    _change(settings, lambda group: group.plan_hand_over(to), wait_ms, dry_run=dry_run, as_json=as_json)


app.command("drain")(drain)


@app.command()
@cluster_options
def force(
    settings: Settings,
    node: NodeArgument,
    lose_acknowledged: Annotated[
        bool, typer.Option("--lose-acknowledged", help="What the other replicas alone have may be lost.")
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make one replica the whole group, when a majority of the group's disks is lost for good.

    Acknowledged messages and releases that this replica does not have are lost.
    With three replicas, these are the commits that the two others had and this
    one did not have. If one of the others can still be started, start it: that
    loses nothing. Afterwards, add replicas again, with empty data folders.

    \b
    Examples:
      timeball cluster force a --lose-acknowledged --dry-run --cluster shop --etcd http://etcd1:2379
      timeball cluster force a --lose-acknowledged --settings timeball.toml --json
    """
    if not lose_acknowledged:
        raise RequestError(
            "--lose-acknowledged is missing: what the other replicas have and this one has not, acknowledged messages "
            "among it, is lost by this. If one of them can be started, start it instead"
        )

    from timeball.cluster.operating.operations import Operations

    async def ask(coordinator: Coordinator) -> tuple[Record | None, Record]:
        operations = Operations(coordinator, settings.group)
        if not dry_run:
            return await operations.force(node)
        view, record = await operations.plan_force(node)
        return view.record, record

    before, record = _asked(settings, ask)
    left = [] if before is None else [each for each in before.replicas if each not in record.replicas]
    word = "would be" if dry_run else "is"
    text = f"group {settings.group} {word} replica {record.replicas[0]} alone; left out: {', '.join(left) or 'none'}"
    show(_document(settings, record, dry_run), [text], as_json=as_json)


def _change(
    settings: Settings,
    plan: Callable[[Operations], Awaitable[tuple[GroupView, Wish | None]]],
    wait_ms: int,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Ask the leader for a change, wait for the outcome, and print it. With `dry_run`, print the plan only."""
    from timeball.cluster.operating.operations import Operations

    async def ask(coordinator: Coordinator) -> tuple[GroupView, Record]:
        operations = Operations(coordinator, settings.group)
        view, wish = await plan(operations)
        assert view.record is not None
        if wish is None:
            return view, view.record
        wanted = _wanted(view.record, wish)
        if dry_run:
            return view, wanted
        if not as_json:
            print_note(f"asked {view.leader}, which leads, for {_told(wanted)}")
        done = await operations.carry_out(view, wish, wait_ms / 1_000)
        assert done.record is not None
        return view, done.record

    before, record = _asked(settings, ask)
    is_same = record == before.record
    word = "is so already" if is_same else "would be" if dry_run else "done"
    show(
        {**_document(settings, record, dry_run), "changed": not (is_same or dry_run)},
        [f"group {settings.group}: {_told(record)}: {word}", *_warnings(record)],
        as_json=as_json,
    )


def _wanted(record: Record, wish: Wish) -> Record:
    """Predict the group's record after the change, as far as it is known."""
    if wish.replicas:
        return Record(record.epoch, record.leader, wish.replicas, record.generation + 1)
    (leader,) = [replica for replica in record.replicas if node_of(replica) == wish.hand_over_to]
    return Record(record.epoch + 1, leader, record.replicas, record.generation)


def _told(record: Record) -> str:
    return f"leader {node_of(record.leader)}, replicas {', '.join(record.replicas)}"


def _warnings(record: Record) -> list[str]:
    count = len(record.replicas)
    spare = count - majority(record.replicas)
    return [] if spare else [f"with {count} replicas the loss of one stops the group: add another"]


def _document(settings: Settings, record: Record, dry_run: bool) -> dict[str, Any]:
    return {
        "cluster": settings.cluster,
        "group": settings.group,
        "epoch": record.epoch,
        "leader": node_of(record.leader),
        "replicas": record.replicas,
        "generation": record.generation,
        "dry_run": dry_run,
    }


def _asked(settings: Settings, ask: Callable[[Coordinator], Awaitable[T]]) -> T:
    """Run `ask` with the cluster's coordinator, and return its answer. Raises RequestError, SetupError, Unavailable."""
    if not settings.cluster:
        raise SetupError("which cluster? Name it with --cluster and --etcd, or with the --settings of a node")

    from timeball.cluster.coordination.etcd import coordinator_of

    async def run() -> T:
        coordinator = coordinator_of(settings, SystemClock())
        try:
            return await ask(coordinator)
        finally:
            await coordinator.close()

    return asyncio.run(run())


# Format the output of `timeball cluster status` for people.

HEADINGS = ("node", "role", "log", "committed", "applied", "lag", "clock", "version", "since")


def lines(group: ReplicaGroup, now_ms: int) -> Iterator[str]:
    """Yield the lines of one group, as of `now_ms` (wall clock)."""
    leader = f"leader {group.leader}, epoch {group.epoch}" if group.leader else "no leader"
    yield f"group {group.group}: {leader}"
    rows = [HEADINGS, *(_row(each, now_ms) for each in group.replicas)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if group.asked:
        yield f"  asked for: {group.asked}"
    for problem in group.problems:
        yield f"  ! {problem}"


def _row(each: ReplicaState, now_ms: int) -> tuple[str, ...]:
    role = each.role if each.is_in_record or each.role == "learner" else f"{each.role}, no replica"
    offset = "" if each.clock_offset_ms is None else f"{each.clock_offset_ms:+.1f} ms"
    since = "" if each.since_ms is None else show_wait(max(0, now_ms - each.since_ms))
    numbers = (each.log_seq, each.committed_seq, each.applied_seq, each.lag_rows)
    return (each.node, role, *(_count(number) for number in numbers), offset, each.version, since)


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
