"""The name server of a cluster node: tells RocketMQ clients the leaders of all groups of the cluster."""

from __future__ import annotations

import asyncio

from timeball.cluster.coordination.coordinator import Coordinator, Directory
from timeball.edges.remoting.name_server import GroupLeader, NameServer
from timeball.io.security import Security, load_client_tls
from timeball.model.config import Settings


class NameService:
    """A name server and its directory of the cluster's groups.

    Belongs to the event loop. The caller closes the coordinator.
    """

    def __init__(self, settings: Settings, coordinator: Coordinator) -> None:
        self._settings = settings
        self._directory = Directory(coordinator)
        security = Security(settings)
        self._server = NameServer(
            self._group_leaders,
            tls=security.tls.context if security.tls else None,
            tls_to_brokers=load_client_tls(settings.replication_ca, "", "", purpose="replication")
            if security.tls
            else None,
        )
        self._directory_task: asyncio.Task[None] | None = None

    @property
    def directory(self) -> Directory:
        """The leader and the replicas of each group, kept up to date while the service runs."""
        return self._directory

    async def start(self) -> int:
        """Listen, unless the settings have no port for it. Returns the port, or -1. Raises SetupError."""
        settings, port = self._settings, -1
        if settings.name_server_port >= 0:
            port = await self._server.start(settings.host, settings.name_server_port)
        self._directory_task = asyncio.create_task(self._directory.run())
        return port

    async def close(self) -> None:
        """Stop listening and reading the directory."""
        if self._directory_task is not None:
            self._directory_task.cancel()
            await asyncio.gather(self._directory_task, return_exceptions=True)
        await self._server.close()

    def status(self) -> dict[str, object]:
        """Build the fields `group` and `groups` of a cluster node's status (answers.Status)."""
        directory = self._directory
        addresses_of = {group: directory.replicas(group, "flight") for group in sorted(directory.views)}
        groups = [
            {"group": group, "addresses": addresses} for group, addresses in addresses_of.items() if addresses
        ]
        # None until the directory has been read: a client must not believe that its group is the only one.
        return {"group": self._settings.group, "groups": groups or None}

    def _group_leaders(self) -> list[GroupLeader]:
        """List all groups, each with the address of its leader's remoting port."""
        directory = self._directory
        return [GroupLeader(group, directory.address(group, "remoting")) for group in directory.views]
