"""`timeball cluster`: create, inspect and change a cluster, from any machine that reaches its etcd.

Only `timeball cluster drain` connects to a broker of the cluster instead of its etcd.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    DEFAULT_FLIGHT,
    EndpointOption,
    FlightEndpointOption,
    JsonOption,
    addresses_of,
    as_parameter,
    cluster_options,
    connect,
    parse_duration_ms,
    reach,
    show_wait,
)
from timeball.cli.output import ExitCode, print_json, print_line, print_note, progress_bar, show
from timeball.cluster.protocol.replica import Record, Role, majority, node_of
from timeball.io.clock import SystemClock
from timeball.model.config import Settings
from timeball.model.errors import RequestError, SetupError, TimeballError, Unavailable
from timeball.monitoring.figures import ReplicaGroup, ReplicaState

if TYPE_CHECKING:
    from timeball.cluster.coordination.coordinator import Coordinator, GroupView, OperatorRequest
    from timeball.cluster.operations import Operations
    from timeball.model.answers import Drained

# ---- hand over the pending messages of a group to another group -----------------------------------------------
# The leader of the drained group does the work (broker/groups/draining.py). This process repeats its request every
# `POLL_S` seconds until nothing is left to hand over, and shows the progress. If this process ends, the leader
# continues.

POLL_S = 0.5


def drain(
    group: Annotated[str, typer.Option("--group", metavar="GROUP", help="The group to drain.")],
    drain_target: Annotated[
        str, typer.Option("--to", metavar="GROUP", help="The group that receives the messages.")
    ],
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
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
        progress, problem = leader.drain(drain_target, dry_run=dry_run), ""
        with progress_bar(quiet=as_json) as display:
            task = display.add_task(f"{group} to {drain_target}")
            while not (dry_run or progress.is_done):
                display.update(
                    task, completed=progress.moved, total=progress.moved + progress.moving + progress.waiting
                )
                if progress.problem and progress.problem != problem:
                    print_note(f"group {group}: {progress.problem}; it tries again")
                problem = progress.problem
                if clock.boot_ms() >= until_ms:
                    raise Unavailable(
                        f"group {group} still hands over, {progress.moved:,} messages so far"
                        f"{': ' + problem if problem else ''}; it goes on by itself"
                    )
                time.sleep(POLL_S)
                progress = leader.drain(drain_target)
    document: dict[str, Any] = {**msgspec.structs.asdict(progress), "dry_run": dry_run}
    show(document, [_drain_sentence(progress, dry_run=dry_run)], as_json=as_json)


def _drain_sentence(progress: Drained, *, dry_run: bool) -> str:
    """Format the outcome of a drain, or with `dry_run` the plan of one."""
    if dry_run:
        return (
            f"group {progress.group} would hand over to {progress.heir}: {progress.waiting:,} messages wait"
        )
    remaining = (
        f"; {progress.waiting:,} stay, due within a minute or for its consumers" if progress.waiting else ""
    )
    return f"group {progress.group} is drained to {progress.heir}: {progress.moved:,} messages handed over{remaining}"


# ---- create, show and change groups ---------------------------------------------------------------------------


T = TypeVar("T")

cluster_app = typer.Typer(
    help="Create, inspect and change a cluster. Needs its etcd only.", no_args_is_help=True
)

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The node's name (its --node).")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be changed, and change nothing.")
]
WaitOption = Annotated[
    int,
    typer.Option(
        "--wait", parser=as_parameter(parse_duration_ms), metavar="DURATION", help="How long to wait at most."
    ),
]


@cluster_app.callback()
def _cluster() -> None:
    pass


@cluster_app.command()
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

    If etcd was restored from an old copy, its record of the group may be older
    than the nodes' data. Then the command replaces it. Name the nodes that were
    the group's replicas last.

    \b
    Examples:
      timeball cluster init --cluster shop --etcd http://etcd1:2379 --nodes a,b,c
      timeball cluster init --cluster shop --etcd http://etcd1:2379 --group g2 --nodes d,e,f --dry-run
      timeball cluster init --settings timeball.toml --nodes a,b,c --json
    """
    names = [name.strip() for name in nodes.split(",") if name.strip()]

    from timeball.cluster.operations import Operations

    async def create_group(coordinator: Coordinator) -> Record:
        """Create the group, or with `dry_run` only plan it. Returns its record."""
        operations = Operations(coordinator, settings.group)
        revision, record = await operations.plan_first(names, wait_ms / 1_000)
        if not dry_run:
            await operations.begin(revision, record)
        return record

    record = _run_with_coordinator(settings, create_group)
    verb = "would have" if dry_run else "has"
    text = f"group {settings.group} of cluster {settings.cluster} {verb} the replicas {', '.join(record.replicas)}"
    show(_record_document(settings, record, dry_run), [text], as_json=as_json)


@cluster_app.command()
@cluster_options
def status(
    settings: Settings, endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False
) -> None:
    """Show each group: its leader, how far each replica is, and each problem in a sentence.

    With --json, each group is one document. If etcd does not answer, the
    command asks the nodes at --endpoint for the leader.

    Exit code 3: a group has no leader, or there is no group. Exit code 6: etcd
    does not answer, but the leader serves. Exit code 1: there is another
    problem.

    \b
    Examples:
      timeball cluster status --cluster shop --etcd http://etcd1:2379
      timeball cluster status --settings timeball.toml --json | jq '{group, leader, problems}'
      watch timeball cluster status
    """
    from timeball.cluster.operations import survey

    try:
        groups, is_etcd_lost = _run_with_coordinator(settings, survey), False
    except Unavailable as error:
        groups, is_etcd_lost = [_ask_leader(endpoint, error)], True
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
        raise typer.Exit(ExitCode.ETCD_LOST if is_etcd_lost else ExitCode.CHECK_FAILED)


def _ask_leader(endpoint: str, problem: Unavailable) -> ReplicaGroup:
    """Describe the group whose leader answers at `endpoint`. Raises Unavailable if no leader does.

    `problem`: the error of etcd, which becomes a problem of the group or a part of the error.
    """
    try:
        with connect(endpoint) as client:
            replica = client.status().get("replica")
    except TimeballError as error:
        raise Unavailable(f"{problem}. {error}") from error
    if replica is None or replica["role"] != Role.LEADER:
        raise problem
    leader = node_of(replica["replica"])
    return ReplicaGroup(
        group=replica["group"], leader=leader, epoch=replica["epoch"], generation=replica["generation"],
        replicas=[], asked="", problems=[f"{problem}. The leader serves; no other node can lead meanwhile"],
    )  # fmt: skip


@cluster_app.command("add-replica")
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
    _change(settings, lambda operations: operations.plan_add(node), wait_ms, dry_run=dry_run, as_json=as_json)


@cluster_app.command("remove-replica")
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
    _change(
        settings, lambda operations: operations.plan_remove(node), wait_ms, dry_run=dry_run, as_json=as_json
    )


@cluster_app.command("hand-over")
@cluster_options
def hand_over(
    settings: Settings,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="NODE", help="The next leader; by default the replica with the longest log."
        ),
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
    _change(
        settings, lambda operations: operations.plan_hand_over(to), wait_ms, dry_run=dry_run, as_json=as_json
    )


cluster_app.command("drain")(drain)


@cluster_app.command()
@cluster_options
def force(
    settings: Settings,
    node: NodeArgument,
    lose_acknowledged: Annotated[
        bool,
        typer.Option(
            "--lose-acknowledged", help="Accept that messages which only the other replicas have are lost."
        ),
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
            "--lose-acknowledged is missing: this command loses everything that only the other replicas have, "
            "including acknowledged messages. If one of them can be started, start it instead"
        )

    from timeball.cluster.operations import Operations

    async def force_group(coordinator: Coordinator) -> tuple[Record | None, Record]:
        """Return the record before the change, None without one, and the new or planned record."""
        operations = Operations(coordinator, settings.group)
        if not dry_run:
            return await operations.force(node)
        view, record = await operations.plan_force(node)
        return view.record, record

    before, record = _run_with_coordinator(settings, force_group)
    removed = (
        [] if before is None else [replica for replica in before.replicas if replica not in record.replicas]
    )
    verb = "would be" if dry_run else "is"
    text = f"group {settings.group} {verb} replica {record.replicas[0]} alone; left out: {', '.join(removed) or 'none'}"
    show(_record_document(settings, record, dry_run), [text], as_json=as_json)


def _change(
    settings: Settings,
    plan: Callable[[Operations], Awaitable[tuple[GroupView, OperatorRequest | None]]],
    wait_ms: int,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Request a change from the leader, wait for the outcome, and print it. With `dry_run`, print the plan only.

    `plan` reads the group, and returns it with the request. The request is None if the group is already as wanted.
    """
    from timeball.cluster.operations import Operations

    async def change_group(coordinator: Coordinator) -> tuple[GroupView, Record]:
        """Return the view of the group before the change, and the new or predicted record."""
        operations = Operations(coordinator, settings.group)
        view, request = await plan(operations)
        assert view.record is not None
        if request is None:
            return view, view.record
        predicted = _predict_record(view.record, request)
        if dry_run:
            return view, predicted
        if not as_json:
            print_note(f"asked {view.leader}, which leads, for {_record_text(predicted)}")
        changed = await operations.carry_out(view, request, wait_ms / 1_000)
        assert changed.record is not None
        return view, changed.record

    before, record = _run_with_coordinator(settings, change_group)
    is_same = record == before.record
    outcome = "is so already" if is_same else "would be" if dry_run else "done"
    show(
        {**_record_document(settings, record, dry_run), "changed": not (is_same or dry_run)},
        [f"group {settings.group}: {_record_text(record)}: {outcome}", *_warnings(record)],
        as_json=as_json,
    )


def _predict_record(record: Record, request: OperatorRequest) -> Record:
    """Predict the group's record after the change. Meanwhile the leader may change the record in another way."""
    if request.replicas:
        return Record(record.epoch, record.leader, request.replicas, record.generation + 1)
    (leader,) = [replica for replica in record.replicas if node_of(replica) == request.hand_over_to]
    return Record(record.epoch + 1, leader, record.replicas, record.generation)


def _record_text(record: Record) -> str:
    return f"leader {node_of(record.leader)}, replicas {', '.join(record.replicas)}"


def _warnings(record: Record) -> list[str]:
    count = len(record.replicas)
    spare = count - majority(record.replicas)
    return [] if spare else [f"with {count} replicas the loss of one stops the group: add another"]


def _record_document(settings: Settings, record: Record, dry_run: bool) -> dict[str, Any]:
    """Build the JSON document of a group's record."""
    return {
        "cluster": settings.cluster,
        "group": settings.group,
        "epoch": record.epoch,
        "leader": node_of(record.leader),
        "replicas": record.replicas,
        "generation": record.generation,
        "dry_run": dry_run,
    }


def _run_with_coordinator(settings: Settings, call: Callable[[Coordinator], Awaitable[T]]) -> T:
    """Run `call` with the cluster's coordinator. Returns its result. Raises RequestError, SetupError, Unavailable."""
    if not settings.cluster:
        raise SetupError(
            "name the cluster with --cluster and --etcd, or with --settings and a node's settings file"
        )

    from timeball.cluster.coordination.etcd import create_coordinator

    async def run() -> T:
        """Make the call, and close the connection to etcd."""
        coordinator = create_coordinator(settings, SystemClock())
        try:
            return await call(coordinator)
        finally:
            await coordinator.close()

    return asyncio.run(run())


# ---- the output of `timeball cluster status` for people -------------------------------------------------------

HEADINGS = ("node", "role", "log", "committed", "applied", "lag", "clock", "version", "since")


def lines(group: ReplicaGroup, now_ms: int) -> Iterator[str]:
    """Yield the lines of one group, as of `now_ms` (wall clock)."""
    leader = f"leader {group.leader}, epoch {group.epoch}" if group.leader else "no leader"
    yield f"group {group.group}: {leader}"
    rows = [HEADINGS, *(_row(replica, now_ms) for replica in group.replicas)] if group.replicas else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if group.asked:
        yield f"  asked for: {group.asked}"
    for problem in group.problems:
        yield f"  ! {problem}"


def _row(replica: ReplicaState, now_ms: int) -> tuple[str, ...]:
    """Build the cells of a replica, in the order of HEADINGS. An unknown value is an empty text."""
    role = (
        replica.role if replica.is_in_record or replica.role == "learner" else f"{replica.role}, no replica"
    )
    offset = "" if replica.clock_offset_ms is None else f"{replica.clock_offset_ms:+.1f} ms"
    since = "" if replica.since_ms is None else show_wait(max(0, now_ms - replica.since_ms))
    numbers = (replica.log_seq, replica.committed_seq, replica.applied_seq, replica.lag_rows)
    return (replica.node, role, *(_count(number) for number in numbers), offset, replica.version, since)


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
