"""`timeball cluster`: create, inspect and change a cluster, from any machine that reaches its etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from timeball.cli.cluster_drain import drain
from timeball.cli.exit_codes import ExitCode
from timeball.cli.options import JsonOption, as_parameter, cluster_options
from timeball.cli.output import print_json, print_line, print_note, show
from timeball.cli.units import parse_duration_ms
from timeball.cluster.protocol.record import Record, majority, node_of
from timeball.io.clock import SystemClock
from timeball.model.config import Settings
from timeball.model.errors import RequestError, SetupError

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
    from timeball.cli.cluster_status import lines
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

    from timeball.cluster.coordination.connect import coordinator_of

    async def run() -> T:
        coordinator = coordinator_of(settings, SystemClock())
        try:
            return await ask(coordinator)
        finally:
            await coordinator.close()

    return asyncio.run(run())
