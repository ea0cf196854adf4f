"""The groups of a cluster and their leaders, read from the coordinator at each change and at least once a second."""

from __future__ import annotations

import asyncio
import logging

from timeball.cluster.coordination.coordinator import Coordinator, GroupView, Node
from timeball.cluster.protocol.replica import node_of
from timeball.cluster.transport.connections import Address, parse_address
from timeball.model.errors import SetupError, Unavailable

logger = logging.getLogger(__name__)

POLL_S = 1.0
RETRY_S = 0.1  # pause after a request without an answer


class Directory:
    """The groups and nodes as last read. Belongs to the event loop.

    Groups and nodes that have disappeared stay listed, so that a request for them is answered with "no leader now".
    """

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
                await asyncio.sleep(RETRY_S)

    async def read(self) -> int:
        """Read once. Returns the revision for `wait_for_change`. Raises Unavailable and SetupError."""
        views = await self._coordinator.read_all()
        self.nodes |= await self._coordinator.nodes()
        self.views |= views
        return max((view.as_of for view in views.values()), default=0)

    def hosts(self) -> set[str]:
        """Collect the host names and addresses of all known nodes, in lower case."""
        addresses = (address for node in self.nodes.values() for address in node.addresses.values())
        return {parse_address(address)[0].lower() for address in addresses}

    def leader(self, group: str) -> Node | None:
        """Find the node that leads a group. None while there is none."""
        view = self.views.get(group)
        if view is None or view.record is None or view.holder is None:
            return None
        name = node_of(view.record.leader)
        return self.nodes.get(name) if view.holder.node == name else None

    def replicas(self, group: str, edge: str) -> list[str]:
        """List the addresses for an edge of a group's nodes, the leader first. Empty without a record."""
        view, leader = self.views.get(group), self.leader(group)
        if view is None or view.record is None:
            return []
        names = ([leader.name] if leader else []) + [node_of(replica) for replica in view.record.replicas]
        addresses = [
            self.nodes[name].addresses.get(edge) for name in dict.fromkeys(names) if name in self.nodes
        ]
        return [address for address in addresses if address]

    def address(self, group: str, edge: str) -> Address | None:
        """Find the address of a group's leader for an edge (such as "http"). None while there is no leader."""
        leader = self.leader(group)
        if leader is None or edge not in leader.addresses:
            return None
        return parse_address(leader.addresses[edge])
