"""What an operator does with a cluster, by its coordinator alone: so from any machine that reaches etcd.

A change of the replicas and a hand-over are the leader's to make: it is asked by a wish (wishes.py), and the record
tells the outcome. The wish stands by a lease of the command that asks, so one that is interrupted takes it back, unless
the leader has carried it out already. The first record, and a forced one, are written here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from timeball.cluster.coordinator import Coordinator, GroupView, Lease, Node, Wish
from timeball.cluster.record import Record, node_of
from timeball.cluster.survey import survey
from timeball.errors import Conflict, LeaseLost, NotFound, RequestError, Unavailable

POLL_S = 1.0
WISH_TTL_MS = 10_000
ETCD_START_S = 10.0  # for members that are being started to elect their leader
ETCD_PAUSE_S = 0.1  # between two questions meanwhile
FORCE_S = 15.0  # a replica that stands in vain holds the group for some seconds, and then not for a moment


class Operations:
    """The commands of one group."""

    def __init__(self, coordinator: Coordinator, group: str) -> None:
        self._coordinator, self._group = coordinator, group

    # -- the first record --------------------------------------------------------------------------------------------

    async def plan_first(self, names: Sequence[str], wait_s: float) -> Record:
        """Return the record of a new group, once these nodes have registered; raises Conflict, Unavailable.

        A group that has a record of these nodes keeps it: a deployment gives its commands again.
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
            # A majority of empty logs would lead, and have the other one cut.
            raise Conflict(
                f"{', '.join(filled)} has data, {', '.join(empty)} has none: make the group with --nodes "
                f"{','.join(filled)}, then 'timeball cluster add-replica {empty[0]}'"
            )
        return Record(max(node.promised for node in nodes), "", tuple(node.replica for node in nodes))

    async def begin(self, record: Record) -> None:
        """Write the first record; raises Conflict when another command was faster, with other replicas."""
        swap = await self._coordinator.change(self._group, 0, record)
        if not swap.won:
            found = (await self._coordinator.read(self._group)).record
            if found is not None and set(found.replicas) == set(record.replicas):
                return
            raise Conflict(
                f"group {self._group} has got a record meanwhile: look with 'timeball cluster status'"
            )

    async def _first_view(self, wait_s: float) -> GroupView:
        """Return the group, of an etcd that may just have been started; raises Unavailable when the time is over."""
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
            # A node reports within a second of its registration.
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
        """Return the wish for a set with this node; None when it is in it. Raises RequestError, Unavailable."""
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
        """Return the wish for a set without this node; None when it is not in it. Raises RequestError, Unavailable."""
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
        """Return the wish that this node leads ("": the follower that has most); None when it does already."""
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
        """Ask the leader and wait until it is done; raises Conflict, Unavailable.

        When it is cancelled, or takes too long, the wish is taken back.
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
                await asyncio.sleep(POLL_S)  # the lease lives for some more of these
        return view

    async def _hindrance(self, wish: Wish) -> str:
        """Return what stands in the way, as far as the reports say."""
        (found,) = [each for each in await survey(self._coordinator) if each.group == self._group]
        wanted = wish.hand_over_to or node_of(wish.replicas[-1])
        about = [problem for problem in found.problems if wanted in problem.split()]
        return (about or found.problems or [f"{wanted} has not caught up yet"])[0]

    # -- force -------------------------------------------------------------------------------------------------------

    async def plan_force(self, name: str) -> tuple[GroupView, Record]:
        """Return the record that names one replica alone; raises Conflict while the group has a holder."""
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
        """Make the record name one replica alone; return the record before and after. Raises Conflict."""
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
    """Return whether the record says what was wished for."""
    if wish.hand_over_to:
        return view.leader == wish.hand_over_to
    return view.record is not None and set(view.record.replicas) == set(wish.replicas)


def _nodes(replicas: Sequence[str]) -> str:
    return ", ".join(map(node_of, replicas))
