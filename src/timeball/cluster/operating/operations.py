"""The commands with which an operator changes a cluster.

They only use the coordinator, so they run on any machine that reaches etcd. Changes of the set of replicas and
hand-overs are made by the leader. A command asks the leader with a wish, and the record shows the
outcome. The wish is bound to a lease of the command, so an interrupted command withdraws its wish, unless the leader
has carried it out already. The first record of a group and a forced record are written here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum

from timeball.cluster.coordination.coordinator import Coordinator, GroupView, Lease, Node, Wish
from timeball.cluster.operating.survey import survey
from timeball.cluster.protocol.replica import Record, Replica, Role, node_of
from timeball.model.errors import Conflict, LeaseLost, NotFound, RequestError, Unavailable

POLL_S = 1.0
WISH_TTL_MS = 10_000
ETCD_START_S = 10.0  # for an etcd that is being started, until its members have elected their leader
ETCD_PAUSE_S = 0.1  # between two attempts meanwhile
# A candidate without a majority holds the group for some seconds, then gives it up for a moment. Force waits for this
# moment.
FORCE_S = 15.0


class Operations:
    """The commands for one group."""

    def __init__(self, coordinator: Coordinator, group: str) -> None:
        self._coordinator, self._group = coordinator, group

    # -- the first record --------------------------------------------------------------------------------------------

    async def plan_first(self, names: Sequence[str], wait_s: float) -> Record:
        """Build the record of a new group, once these nodes have registered. Raises RequestError, Unavailable.

        If the group already has a record with these nodes, return it: a deployment may repeat its commands.
        """
        if not names or len(set(names)) != len(names):
            raise RequestError(f"--nodes {','.join(names)}: name each node once")
        view = await self._first_view(min(wait_s, ETCD_START_S))
        if view.record is not None:
            if {node_of(replica) for replica in view.record.replicas} == set(names):
                return view.record
            raise Conflict(
                f"group {self._group} has a record already, with replicas {_nodes(view.record.replicas)}: change them "
                "with 'timeball cluster add-replica' and 'remove-replica'"
            )
        registered = await self._registered(view, names, wait_s)
        nodes = [registered[name] for name in names]
        for node in nodes:
            if node.group not in ("", self._group):
                raise Conflict(f"node {node.name} keeps group {node.group}, not {self._group}")
        reports = await self._coordinator.reports()
        rows = {node.name: reports[node.name].log_seq if node.name in reports else 0 for node in nodes}
        filled, empty = ([name for name in rows if bool(rows[name]) is has] for has in (True, False))
        if filled and empty:
            # A majority of empty logs would elect a leader, which would cut the log that has data.
            raise Conflict(
                f"{', '.join(filled)} has data, {', '.join(empty)} has none: make the group with --nodes "
                f"{','.join(filled)}, then 'timeball cluster add-replica {empty[0]}'"
            )
        return Record(max(node.promised for node in nodes), "", tuple(node.replica for node in nodes))

    async def begin(self, record: Record) -> None:
        """Write the first record. Raises Conflict when another command has written one with other replicas."""
        swap = await self._coordinator.change(self._group, 0, record)
        if not swap.won:
            found = (await self._coordinator.read(self._group)).record
            if found is not None and set(found.replicas) == set(record.replicas):
                return
            raise Conflict(
                f"group {self._group} has got a record meanwhile: look with 'timeball cluster status'"
            )

    async def _first_view(self, wait_s: float) -> GroupView:
        """Read the group, from an etcd that may just have been started. Raises Unavailable after `wait_s`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while True:
            try:
                return await self._coordinator.read(self._group)
            except Unavailable:
                if loop.time() >= until_s:
                    raise
                await asyncio.sleep(ETCD_PAUSE_S)

    async def _registered(self, view: GroupView, names: Sequence[str], wait_s: float) -> dict[str, Node]:
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

    async def plan_add(self, name: str) -> tuple[GroupView, Wish | None]:
        """Build the wish for a set with this node (None: it is in the set). Raises RequestError, Unavailable."""
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
        kept = tuple(replica for replica in record.replicas if node_of(replica) != name)
        return self._may_ask(view), Wish((*kept, node.replica))

    async def plan_remove(self, name: str) -> tuple[GroupView, Wish | None]:
        """Build the wish for a set without this node (None: it is not in the set). Raises RequestError, Unavailable."""
        view, record = await self._group_record()
        kept = tuple(replica for replica in record.replicas if node_of(replica) != name)
        if kept == record.replicas:
            return view, None
        if not kept:
            raise Conflict(f"{name} is the only replica of group {self._group}: a group has one at least")
        if node_of(record.leader) == name:
            raise Conflict(
                f"{name} leads group {self._group}: 'timeball cluster hand-over --to {node_of(kept[0])}' first"
            )
        return self._may_ask(view), Wish(kept)

    async def plan_hand_over(self, name: str) -> tuple[GroupView, Wish | None]:
        """Build the wish that this node leads (None: it leads already). Raises RequestError, Unavailable.

        An empty name stands for the follower with the longest acknowledged log.
        """
        view, record = await self._group_record()
        self._may_ask(view)
        followers = [node for node in map(node_of, record.replicas) if node != view.leader]
        if not name:
            report = (await self._coordinator.reports()).get(view.leader)
            peers = {} if report is None else report.peers
            known = [node for node in followers if node in peers]
            if not known:
                raise Unavailable(f"no follower of group {self._group} is connected with {view.leader}")
            name = max(known, key=lambda node: peers[node].acked_seq)
        if name == view.leader:
            return view, None
        if name not in followers:
            raise NotFound(
                f"node {name} is no replica of group {self._group}; these are: {_nodes(record.replicas)}"
            )
        return view, Wish(hand_over_to=name)

    async def carry_out(self, view: GroupView, wish: Wish, wait_s: float) -> GroupView:
        """Write the wish for the leader and wait until it is fulfilled. Raises Conflict, Unavailable.

        The wish is withdrawn when the call is cancelled or `wait_s` has passed.
        """
        lease = await self._coordinator.grant(WISH_TTL_MS)
        try:
            swap = await self._coordinator.ask(self._group, view.revision, wish, lease)
            if not swap.won:
                what = "something else is asked for" if swap.view.asked else "its record has changed"
                raise Conflict(f"group {self._group}: {what} meanwhile; look with 'timeball cluster status'")
            async with asyncio.timeout(wait_s):
                return await self._until_true(swap.view, wish, lease)
        except TimeoutError:
            now = await self._coordinator.read(self._group)
            if is_true(now, wish):
                return now
            raise Unavailable(
                f"group {self._group}: not done within {wait_s:.0f} s, and taken back: {await self._hindrance(wish)}"
            ) from None
        finally:
            await asyncio.shield(self._coordinator.revoke(lease))

    async def _until_true(self, view: GroupView, wish: Wish, lease: Lease) -> GroupView:
        while not is_true(view, wish):
            await self._coordinator.wait_for_change(view.as_of, POLL_S)
            try:
                lease = await self._coordinator.renew(lease)
                view = await self._coordinator.read(self._group)
            except LeaseLost:
                raise Unavailable(
                    "etcd was out of reach for too long, and the wish is gone: ask again"
                ) from None
            except Unavailable:
                await asyncio.sleep(POLL_S)  # the lease (WISH_TTL_MS) outlasts several of these attempts
        return view

    async def _hindrance(self, wish: Wish) -> str:
        """Find the most likely obstacle, from the nodes' reports."""
        (found,) = [each for each in await survey(self._coordinator) if each.group == self._group]
        wanted = wish.hand_over_to or node_of(wish.replicas[-1])
        about = [problem for problem in found.problems if wanted in problem.split()]
        return (about or found.problems or [f"{wanted} has not caught up yet"])[0]

    # -- force -------------------------------------------------------------------------------------------------------

    async def plan_force(self, name: str) -> tuple[GroupView, Record]:
        """Build a record that names one replica only. Raises NotFound, or Conflict while the group has a holder."""
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
        report = (await self._coordinator.reports()).get(name)
        if report is None:
            raise NotFound(f"node {name} does not run: start it, so that it can lead")
        if report.replica not in record.replicas:
            raise Conflict(
                f"replica {report.replica} is not in the record of group {self._group} ({_nodes(record.replicas)}): it "
                "may lack nearly all"
            )
        epoch = max(record.epoch, report.promised)
        return view, Record(epoch, "", (report.replica,), record.generation + 1)

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
        view = await self._coordinator.read(self._group)
        if view.record is None:
            raise NotFound(
                f"group {self._group} has no record yet: 'timeball cluster init --nodes a,b,c' makes it"
            )
        return view, view.record

    def _may_ask(self, view: GroupView) -> GroupView:
        if not view.leader:
            raise Unavailable(
                f"group {self._group} has no leader that could do it: look with 'timeball cluster status'"
            )
        if view.asked is not None:
            raise Conflict(f"group {self._group}: {view.asked.wish.describe()} is asked for already")
        return view


def is_true(view: GroupView, wish: Wish) -> bool:
    """Check whether the wish is fulfilled according to the record."""
    if wish.hand_over_to:
        return view.leader == wish.hand_over_to
    return view.record is not None and set(view.record.replicas) == set(wish.replicas)


def _nodes(replicas: Sequence[str]) -> str:
    return ", ".join(map(node_of, replicas))


# The leader's reaction to a wish of its operators: another set of replicas, or a hand-over to another node.
#
# The wish is read together with the record, at every read until it is gone. The leader passes it to the protocol and
# removes it when the record shows that it is fulfilled. The wish also disappears when the operator's command ends.


class Step(StrEnum):
    """The next action for a wish."""

    NOTHING = "nothing"
    SETTLE = "settle"  # remove the wish: it is fulfilled
    WANT = "want"  # pass the wanted set to the protocol
    FORGET = "forget"  # the wish is gone: the protocol is to drop the wanted set
    HAND_OVER = "hand over"  # begin the hand-over


def next_step(view: GroupView, state: Replica) -> Step:
    """Choose the action for the group's wish on a replica in this state."""
    lead, record = state.lead, view.record
    if lead is None or state.role is not Role.LEADER or record is None:
        return Step.NOTHING
    if view.asked is None:
        return Step.FORGET if lead.wanted else Step.NOTHING
    wish = view.asked.wish
    if wish.replicas:
        return Step.SETTLE if set(record.replicas) == set(wish.replicas) else Step.WANT
    if wish.hand_over_to == state.rules.node:
        return Step.SETTLE
    peer = lead.peers.get(wish.hand_over_to)
    # The node was sent everything and lacks at most the commit in flight, so the hand-over stops sends only briefly.
    is_ready = peer is not None and peer.acked is not None and peer.sent == state.log.end
    is_in = wish.hand_over_to in map(node_of, record.replicas)
    return Step.HAND_OVER if is_ready and is_in else Step.NOTHING
