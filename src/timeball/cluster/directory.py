"""The groups of a cluster and who leads them, as the coordinator last said: read at each change, and once a second."""

from __future__ import annotations

import asyncio
import logging

from timeball.cluster.connections import Address, parse_address
from timeball.cluster.coordinator import Coordinator, GroupView, Node
from timeball.cluster.record import node_of
from timeball.errors import SetupError, Unavailable

logger = logging.getLogger(__name__)

POLL_S = 1.0
AGAIN_S = 0.1  # behind an answer that did not come


class Directory:
    """Belongs to the event loop. Names that are gone stay known, so that a route can say "no leader now"."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.views: dict[str, GroupView] = {}
        self.nodes: dict[str, Node] = {}

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                as_of = await self.read()
                await self._coordinator.wait_for_change(as_of, POLL_S)
            except (Unavailable, SetupError) as error:
                logger.warning("groups of the cluster not read reason=%s", error)
                await asyncio.sleep(AGAIN_S)

    async def read(self) -> int:
        """Read once; return what to wait for a change behind. Raises Unavailable and SetupError."""
        views = await self._coordinator.read_all()
        self.nodes |= await self._coordinator.nodes()
        self.views |= views
        return max((view.as_of for view in views.values()), default=0)

    def hosts(self) -> set[str]:
        """Return the names and addresses of the nodes that are known."""
        listening = (address for node in self.nodes.values() for address in node.addresses.values())
        return {parse_address(address)[0].lower() for address in listening}

    def leader(self, group: str) -> Node | None:
        """Return the node that leads a group; None while none does."""
        view = self.views.get(group)
        if view is None or view.record is None or view.holder is None:
            return None
        name = node_of(view.record.leader)
        return self.nodes.get(name) if view.holder.node == name else None

    def replicas(self, group: str, edge: str) -> list[str]:
        """Return where the nodes that keep a group listen for an edge, the leader first; none without a record."""
        view, leader = self.views.get(group), self.leader(group)
        if view is None or view.record is None:
            return []
        names = ([leader.name] if leader else []) + [node_of(each) for each in view.record.replicas]
        found = [self.nodes[name].addresses.get(edge) for name in dict.fromkeys(names) if name in self.nodes]
        return [address for address in found if address]

    def address(self, group: str, edge: str) -> Address | None:
        """Return where the leader of a group listens for an edge."""
        leader = self.leader(group)
        if leader is None or edge not in leader.addresses:
            return None
        return parse_address(leader.addresses[edge])
