"""Operation of a cluster: the commands that change it, the leader's reaction to them, and the state of all groups.

The commands use only the coordinator, so they run on any machine that reaches etcd. The leader itself changes the set
of replicas and hands over. A command writes a request (a key in etcd) to the leader, and the group's record shows the
outcome. The request is bound to a lease of the command, so an interrupted command withdraws its request, unless the
leader has carried it out already. The commands write only the first record of a group, and a forced record, themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from timeball.cluster.coordination.coordinator import Coordinator, GroupView, Lease, Node, OperatorRequest
from timeball.cluster.protocol.messages import Members
from timeball.cluster.protocol.replica import Record, Replica, Role, majority, node_of
from timeball.model.errors import Conflict, LeaseLost, NotFound, RequestError, Unavailable
from timeball.monitoring.figures import PeerFigures, ReplicaFigures, ReplicaGroup, ReplicaState

POLL_S = 1.0
REQUEST_TTL_MS = 10_000
ETCD_START_S = 10.0  # for an etcd that is being started, until its members have elected their leader
ETCD_PAUSE_S = 0.1  # pause between two attempts to reach an etcd that is being started
# A candidate without a majority holds the group for some seconds, then releases it for a moment. `force` waits for this
# moment.
FORCE_S = 15.0


class Operations:
    """The commands for one group."""

    def __init__(self, coordinator: Coordinator, group: str) -> None:
        self._coordinator, self._group = coordinator, group

    # -- the first record --------------------------------------------------------------------------------------------

    async def plan_first(self, names: Sequence[str], wait_s: float) -> tuple[int, Record]:
        """Build the record of a new group, once these nodes have registered.

        Raises RequestError, Conflict, Unavailable.

        Returns the revision for `begin`, and the record. If the group already has a record with these nodes, it returns
        revision 0 and that record, so that a deployment may repeat the command. A record that is older than a promise
        of the group's nodes is replaced: etcd was restored from an old copy, and no replica can become the leader by
        it.
        """
        if not names or len(set(names)) != len(names):
            raise RequestError(f"--nodes {','.join(names)}: name each node once")
        newest, view = await self._read_group(min(wait_s, ETCD_START_S))
        if view.record is not None and not newest.is_newer_than(view.record):
            if {node_of(replica) for replica in view.record.replicas} == set(names):
                return 0, view.record  # `begin` changes nothing
            raise Conflict(
                f"group {self._group} has a record already, with replicas {_node_names(view.record.replicas)}: change "
                "them with 'timeball cluster add-replica' and 'remove-replica'"
            )
        registered = await self._wait_for_nodes(view, names, wait_s)
        nodes = [registered[name] for name in names]
        for node in nodes:
            if node.group not in ("", self._group):
                raise Conflict(f"node {node.name} keeps group {node.group}, not {self._group}")
        reports = await self._coordinator.reports()
        log_rows = {node.name: reports[node.name].log_seq if node.name in reports else 0 for node in nodes}
        with_data = [name for name, rows in log_rows.items() if rows]
        empty = [name for name, rows in log_rows.items() if not rows]
        if with_data and empty:
            # A majority of empty logs would elect a leader, which would cut the log that has data.
            raise Conflict(
                f"{', '.join(with_data)} has data, {', '.join(empty)} has none: make the group with --nodes "
                f"{','.join(with_data)}, then 'timeball cluster add-replica {empty[0]}'"
            )
        # The promises of the reports are newer than those of the registrations, which are of the nodes' starts.
        newest = _newest_promise(self._group, await self._coordinator.reports())
        record = view.record or Record(0, "", (), 0)
        epoch = max(newest.epoch, record.epoch, *(node.promised for node in nodes))
        generation = max(newest.members.generation, record.generation)
        return view.revision, Record(epoch, "", tuple(node.replica for node in nodes), generation + 1)

    async def begin(self, revision: int, record: Record) -> None:
        """Write the first record. Raises Conflict when another command has written one with other replicas."""
        swap = await self._coordinator.change(self._group, revision, record)
        if not swap.won:
            current = (await self._coordinator.read(self._group)).record
            if current is not None and set(current.replicas) == set(record.replicas):
                return
            raise Conflict(
                f"group {self._group} has got a record meanwhile: look with 'timeball cluster status'"
            )

    async def _read_group(self, wait_s: float) -> tuple[NewestPromise, GroupView]:
        """Read the newest promise and the group, from an etcd that may just have been started.

        Raises Unavailable after `wait_s`.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while True:
            try:
                # In this order: an election swaps the record before its epoch is promised, so a record that is read
                # later and has a lower epoch is one of a restored etcd. The same holds for a set of replicas.
                newest = _newest_promise(self._group, await self._coordinator.reports())
                return newest, await self._coordinator.read(self._group)
            except Unavailable:
                if loop.time() >= until_s:
                    raise
                await asyncio.sleep(ETCD_PAUSE_S)

    async def _wait_for_nodes(self, view: GroupView, names: Sequence[str], wait_s: float) -> dict[str, Node]:
        """Wait until these nodes have registered and reported. Returns all registered nodes, by name.

        Raises Unavailable after `wait_s`.
        """
        loop = asyncio.get_running_loop()
        until_s, as_of = loop.time() + wait_s, view.as_of
        while True:
            nodes, reports = await self._coordinator.nodes(), await self._coordinator.reports()
            # A report is needed as well, for the length of the log. A node reports within 1 s of its registration.
            missing = [name for name in names if not (name in nodes and name in reports)]
            if not missing:
                return nodes
            if loop.time() >= until_s:
                raise Unavailable(
                    f"not registered with etcd: {', '.join(missing)}; start 'timeball serve --cluster … --node "
                    f"{missing[0]}' there, and look at its log"
                )
            await self._coordinator.wait_for_change(as_of, min(POLL_S, until_s - loop.time()))
            as_of = (await self._coordinator.read(self._group)).as_of

    # -- other replicas ----------------------------------------------------------------------------------------------

    async def plan_add(self, name: str) -> tuple[GroupView, OperatorRequest | None]:
        """Build the request to add this node, or None if the set has it already. Returns the group and the request.

        Raises NotFound, Conflict, Unavailable.
        """
        view, record = await self._group_record()
        node = (await self._coordinator.nodes()).get(name)
        if node is None:
            raise NotFound(
                f"node {name} is not registered with etcd: start 'timeball serve --cluster … --node {name}' there"
            )
        if node.group not in ("", self._group):
            raise Conflict(f"node {name} keeps group {node.group}, not {self._group}")
        if node.replica in record.replicas:
            return view, None
        remaining = tuple(replica for replica in record.replicas if node_of(replica) != name)
        return self._check_request_possible(view), OperatorRequest((*remaining, node.replica))

    async def plan_remove(self, name: str) -> tuple[GroupView, OperatorRequest | None]:
        """Build the request to remove this node, or None if the set lacks it. Returns the group and the request.

        Raises NotFound, Conflict, Unavailable.
        """
        view, record = await self._group_record()
        remaining = tuple(replica for replica in record.replicas if node_of(replica) != name)
        if remaining == record.replicas:
            return view, None
        if not remaining:
            raise Conflict(f"{name} is the only replica of group {self._group}: a group has one at least")
        if node_of(record.leader) == name:
            raise Conflict(
                f"{name} leads group {self._group}: 'timeball cluster hand-over --to {node_of(remaining[0])}' first"
            )
        return self._check_request_possible(view), OperatorRequest(remaining)

    async def plan_hand_over(self, name: str) -> tuple[GroupView, OperatorRequest | None]:
        """Build the request that this node leads, or None if it leads already. Returns the group and the request.

        An empty name stands for the follower with the longest acknowledged log. Raises NotFound, Conflict, Unavailable.
        """
        view, record = await self._group_record()
        self._check_request_possible(view)
        followers = [node for node in map(node_of, record.replicas) if node != view.leader]
        if not name:
            report = (await self._coordinator.reports()).get(view.leader)
            peers = {} if report is None else report.peers
            connected = [node for node in followers if node in peers]
            if not connected:
                raise Unavailable(f"no follower of group {self._group} is connected with {view.leader}")
            name = max(connected, key=lambda node: peers[node].acked_seq)
        if name == view.leader:
            return view, None
        if name not in followers:
            raise NotFound(
                f"node {name} is no replica of group {self._group}; these are: {_node_names(record.replicas)}"
            )
        return view, OperatorRequest(hand_over_to=name)

    async def carry_out(self, view: GroupView, request: OperatorRequest, wait_s: float) -> GroupView:
        """Write the request for the leader and wait until it is fulfilled. Raises Conflict, Unavailable.

        The request is withdrawn when the call is cancelled or `wait_s` has passed.
        """
        lease = await self._coordinator.grant(REQUEST_TTL_MS)
        try:
            swap = await self._coordinator.put_request(self._group, view.revision, request, lease)
            if not swap.won:
                reason = (
                    "something else is asked for" if swap.view.pending_request else "its record has changed"
                )
                raise Conflict(
                    f"group {self._group}: {reason} meanwhile; look with 'timeball cluster status'"
                )
            async with asyncio.timeout(wait_s):
                return await self._wait_until_fulfilled(swap.view, request, lease)
        except TimeoutError:
            current = await self._coordinator.read(self._group)
            if is_fulfilled(current, request):
                return current
            raise Unavailable(
                f"group {self._group}: not done within {wait_s:.0f} s, and taken back: "
                f"{await self._find_obstacle(request)}"
            ) from None
        finally:
            await asyncio.shield(self._coordinator.revoke(lease))

    async def _wait_until_fulfilled(
        self, view: GroupView, request: OperatorRequest, lease: Lease
    ) -> GroupView:
        """Renew the lease of the request until the record fulfils the request. Returns the group then.

        Raises Unavailable if the lease has ended, because the request is lost with it.
        """
        while not is_fulfilled(view, request):
            await self._coordinator.wait_for_change(view.as_of, POLL_S)
            try:
                lease = await self._coordinator.renew(lease)
                view = await self._coordinator.read(self._group)
            except LeaseLost:
                raise Unavailable(
                    "etcd was out of reach for too long, and the request is lost: ask again"
                ) from None
            except Unavailable:
                await asyncio.sleep(POLL_S)  # the lease (REQUEST_TTL_MS) outlasts several of these attempts
        return view

    async def _find_obstacle(self, request: OperatorRequest) -> str:
        """Find the most likely reason why the request is not fulfilled, from the nodes' reports."""
        (group,) = [surveyed for surveyed in await survey(self._coordinator) if surveyed.group == self._group]
        node = request.hand_over_to or node_of(request.replicas[-1])
        matching = [problem for problem in group.problems if node in problem.split()]
        return (matching or group.problems or [f"{node} has not caught up yet"])[0]

    # -- force -------------------------------------------------------------------------------------------------------

    async def plan_force(self, name: str) -> tuple[GroupView, Record]:
        """Build a record that names one replica only. Returns the group and the record.

        Raises NotFound if the node does not run, and Conflict if the group has a holder for FORCE_S or if the replica
        is not in the present record.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + FORCE_S
        while True:
            view, record = await self._group_record()
            if view.holder is None:
                break
            if loop.time() >= until_s:
                raise Conflict(
                    f"{view.holder.node} holds group {self._group}: a group that is led, or soon will be, is not "
                    "forced; change it with 'timeball cluster remove-replica'"
                )
            await self._coordinator.wait_for_change(view.as_of, POLL_S)
        reports = await self._coordinator.reports()
        report = reports.get(name)
        if report is None:
            raise NotFound(f"node {name} does not run: start it, so that it can lead")
        if report.replica not in record.replicas:
            raise Conflict(
                f"replica {report.replica} is not in the record of group {self._group} "
                f"({_node_names(record.replicas)}): it may lack nearly all"
            )
        epoch = max(record.epoch, report.promised)
        generation = max(record.generation, _newest_promise(self._group, reports).members.generation)
        return view, Record(epoch, "", (report.replica,), generation + 1)

    async def force(self, name: str) -> tuple[Record, Record]:
        """Swap the record for one that names one replica only, and return both, the old one first.

        Raises NotFound and Conflict as `plan_force` does, and Conflict when the record keeps changing for FORCE_S.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + FORCE_S
        while True:
            view, record = await self.plan_force(name)
            swap = await self._coordinator.force(self._group, view.revision, record)
            if swap.won:
                assert view.record is not None
                return view.record, record
            if loop.time() >= until_s:
                raise Conflict(
                    f"the record of group {self._group} changes all the time: it has a leader, or soon will"
                )

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _group_record(self) -> tuple[GroupView, Record]:
        """Read the group, which must have a record. Raises NotFound, Unavailable."""
        view = await self._coordinator.read(self._group)
        if view.record is None:
            raise NotFound(
                f"group {self._group} has no record yet: 'timeball cluster init --nodes a,b,c' makes it"
            )
        return view, view.record

    def _check_request_possible(self, view: GroupView) -> GroupView:
        """Return the view. Raises Unavailable if the group has no leader, Conflict if it has a request already."""
        if not view.leader:
            raise Unavailable(
                f"group {self._group} has no leader that could do it: look with 'timeball cluster status'"
            )
        if view.pending_request is not None:
            raise Conflict(
                f"group {self._group}: {view.pending_request.request.describe()} is asked for already"
            )
        return view


def is_fulfilled(view: GroupView, request: OperatorRequest) -> bool:
    """Check whether the group's record fulfils the request."""
    if request.hand_over_to:
        return view.leader == request.hand_over_to
    return view.record is not None and _has_replicas(view.record, request.replicas)


def _has_replicas(record: Record, replicas: Sequence[str]) -> bool:
    """Check that the record has this set of replicas, and that the change to it has ended."""
    return set(record.replicas) == set(replicas) and not record.former


def _node_names(replicas: Sequence[str]) -> str:
    return ", ".join(map(node_of, replicas))


# ---- the leader's reaction to a request -------------------------------------------------------------------------
# The leader reads the request together with the record, until the request is removed. It passes the request (another
# set of replicas, or a hand-over) to the protocol, and removes it when the record shows that it is fulfilled. The
# request also disappears when the operator's command ends.


class RequestStep(StrEnum):
    """The leader's next action for a request."""

    NOTHING = "nothing"
    SETTLE = "settle"  # remove the request: it is fulfilled
    WANT = "want"  # pass the wanted set to the protocol
    FORGET = "forget"  # the request has been withdrawn: tell the protocol to drop the wanted set
    HAND_OVER = "hand over"  # begin the hand-over


def next_request_step(view: GroupView, state: Replica) -> RequestStep:
    """Choose the action for the group's request on a replica in this state."""
    lead, record = state.lead, view.record
    if lead is None or state.role is not Role.LEADER or record is None:
        return RequestStep.NOTHING
    if view.pending_request is None:
        return RequestStep.FORGET if lead.wanted else RequestStep.NOTHING
    request = view.pending_request.request
    if request.replicas:
        return RequestStep.SETTLE if _has_replicas(record, request.replicas) else RequestStep.WANT
    if request.hand_over_to == state.rules.node:
        return RequestStep.SETTLE
    peer = lead.peers.get(request.hand_over_to)
    # The node was sent everything and lacks at most the commit in flight, so the hand-over stops sends only briefly.
    is_ready = peer is not None and peer.acked is not None and peer.sent == state.log.end
    is_member = request.hand_over_to in map(node_of, record.replicas)
    return RequestStep.HAND_OVER if is_ready and is_member else RequestStep.NOTHING


# ---- the state of a cluster, with a sentence for each problem ------------------------------------------------
# The state is read from the coordinator and the nodes' reports, which are up to 1 s old. The lag of each replica comes
# from the leader's report, so all lags are of the same time.

OFFSET_MS_MAX = 500.0  # a leader whose clock is ahead releases messages too early by this much
LAG_ROWS_MAX = 1_000_000


async def survey(coordinator: Coordinator) -> list[ReplicaGroup]:
    """Describe all groups by name, including those that have nodes but no record yet."""
    reports = await coordinator.reports()  # before the records, as in `Operations.plan_first`
    (views, _), nodes = await coordinator.read_all(), await coordinator.nodes()
    names = set(views) | {node.group for node in nodes.values() if node.group}
    return [_describe_group(name, views.get(name), nodes, reports) for name in sorted(names)]


def _describe_group(
    name: str, view: GroupView | None, nodes: dict[str, Node], reports: dict[str, ReplicaFigures]
) -> ReplicaGroup:
    """Describe one group. `view`: None while it has no record. `nodes` and `reports` are those of all groups, by name.

    A candidate that is still collecting promises has the holder's key, but is not shown as the leader.
    """
    record = view.record if view is not None else None
    holder = view.leader if view is not None else ""
    lead_report = reports.get(holder)
    is_sealing = (
        record is not None
        and lead_report is not None
        and lead_report.epoch == record.epoch
        and lead_report.role == "sealing"
    )
    leader = "" if is_sealing else holder
    members = record.replicas if record is not None else ()
    others = [node.replica for node in nodes.values() if node.group == name and node.replica not in members]
    replicas = [
        _describe_replica(replica, replica in members, nodes, reports, lead_report)
        for replica in (*members, *sorted(others))
    ]
    return ReplicaGroup(
        name,
        leader,
        record.epoch if record else 0,
        record.generation if record else 0,
        replicas,
        view.pending_request.request.describe()
        if view is not None and view.pending_request is not None
        else "",
        list(_group_problems(name, view, replicas, lead_report, leader, _newest_promise(name, reports))),
    )


class NewestPromise(NamedTuple):
    """The greatest epoch that a running node of a group has promised, and the newest set that one knows."""

    epoch: int
    members: Members

    def is_newer_than(self, record: Record) -> bool:
        """Check whether the record is one of an etcd that was restored from an old copy."""
        return self.epoch > record.epoch or self.members.generation > record.generation


def _newest_promise(group: str, reports: dict[str, ReplicaFigures]) -> NewestPromise:
    """Find the newest promise of the group's running nodes."""
    of_group = [report for report in reports.values() if report.group == group]
    newest = max(of_group, key=lambda report: report.generation, default=None)
    members = Members() if newest is None else Members(newest.generation, newest.members)
    return NewestPromise(max((report.promised for report in of_group), default=0), members)


def _describe_replica(
    replica: str,
    is_in_record: bool,
    nodes: dict[str, Node],
    reports: dict[str, ReplicaFigures],
    lead_report: ReplicaFigures | None,
) -> ReplicaState:
    """Describe a replica: "gone" without its registration, "silent" without its report, else as reported.

    `replica`: node and incarnation. `lead_report`: the report of the node that holds the leader's key, which may still
    be a candidate. None without one. It gives the lag and the clock offset of its followers.
    """
    name = node_of(replica)
    node, report = nodes.get(name), reports.get(name)
    if node is None or node.replica != replica:
        return ReplicaState(name, replica, "gone", is_in_record)
    if report is None or report.replica != replica:
        return ReplicaState(name, replica, "silent", is_in_record)
    peer = _leader_figures_of(lead_report, report)
    lag = None if peer is None or lead_report is None else max(0, lead_report.log_seq - peer.acked_seq)
    return ReplicaState(
        name, replica, report.role, is_in_record, report.log_seq, report.committed_seq, report.applied_seq, lag,
        None if peer is None else peer.clock_offset_ms, report.version, report.since_ms, report.problem,
    )  # fmt: skip


def _leader_figures_of(lead_report: ReplicaFigures | None, report: ReplicaFigures) -> PeerFigures | None:
    """Find the leader's figures of a replica. The leader itself has lag 0 and clock offset 0."""
    if lead_report is None:
        return None
    if lead_report.replica == report.replica:
        return PeerFigures(lead_report.replica, lead_report.log_seq, 0.0)
    peer = lead_report.peers.get(node_of(report.replica))
    return peer if peer is not None and peer.replica == report.replica else None


def _group_problems(
    group: str,
    view: GroupView | None,
    replicas: list[ReplicaState],
    lead_report: ReplicaFigures | None,
    leader: str,
    newest: NewestPromise,
) -> Iterator[str]:
    """Yield a sentence for each problem of a group, a problem that stops the group before the other ones.

    `leader`: "" while none serves. `newest`: the newest promise of the group's running nodes.
    """
    if view is None or view.record is None:
        names = ",".join(map(node_of, newest.members.replicas)) or ",".join(
            replica.node for replica in replicas
        )
        yield f"group {group} has no record yet: 'timeball cluster init --group {group} --nodes {names}' makes it"
        return
    members = [replica for replica in replicas if replica.is_in_record]
    running = [replica for replica in members if replica.role not in ("gone", "silent", "stopped")]
    if not leader and newest.is_newer_than(view.record):
        yield _old_record_problem(group, view.record, newest)
    if view.record.former:
        yield f"the change of the replicas waits for a majority of {_node_names(view.record.former)} to store it"
    if not leader:
        yield f"group {group} has no leader: nothing is accepted or released"
    if len(running) < majority(view.record.replicas):
        yield (
            f"{len(running)} of {len(members)} replicas run, and {majority(view.record.replicas)} are needed: start "
            "the others; if their disks are gone for good, see 'timeball cluster force --help'"
        )
    for replica in replicas:
        yield from _replica_problems(replica, lead_report)
    if len(members) < 3:
        yield f"replicas: {len(members)}; with fewer than three the loss of one stops the group"
    versions = sorted({replica.version for replica in replicas if replica.version})
    if len(versions) > 1:
        yield f"replicas run versions {', '.join(versions)}: finish the upgrade"


def _old_record_problem(group: str, record: Record, newest: NewestPromise) -> str:
    """Describe a record that is older than a promise of the group's nodes, and the command that renews it."""
    members, reason = record.members, f"epoch {record.epoch}, but a replica has promised {newest.epoch}"
    if newest.members.generation > record.generation:
        members = newest.members
        reason = f"set {record.generation} of its replicas, but one of them knows set {members.generation}"
    names = ",".join(map(node_of, members.replicas))
    return (
        f"etcd has an old record of group {group} ({reason}), as after a restore of etcd from a copy. If its replicas "
        f"were {names}: 'timeball cluster init --group {group} --nodes {names}' renews it"
    )


def _replica_problems(replica: ReplicaState, lead_report: ReplicaFigures | None) -> Iterator[str]:
    """Yield a sentence for each problem of a replica. `lead_report`: None while the group has no leader."""
    if replica.role == "gone":
        yield f"replica {replica.node} ({replica.replica}) is missing: its node does not run, or does not reach etcd"
    elif replica.role == "silent":
        yield f"replica {replica.node} has not reported yet"
    elif replica.problem:
        stepped_down = "has stepped down: " if replica.role == "stopped" else ""
        yield f"replica {replica.node} {stepped_down}{replica.problem}"
    elif not replica.is_in_record:
        yield (
            f"node {replica.node} is a learner and counts for nothing yet: 'timeball cluster add-replica "
            f"{replica.node}' makes it a replica"
        )
    elif lead_report is not None and replica.lag_rows is None:
        yield f"replica {replica.node} is not connected with the leader: look at its --replication-port"
    elif replica.lag_rows is not None and replica.lag_rows > LAG_ROWS_MAX:
        yield f"replica {replica.node} is {replica.lag_rows:,} rows behind"
    if replica.clock_offset_ms is not None and abs(replica.clock_offset_ms) > OFFSET_MS_MAX:
        yield (
            f"the clock of {replica.node} is {replica.clock_offset_ms / 1_000:+.1f} s off the leader's: "
            "look at its NTP"
        )
