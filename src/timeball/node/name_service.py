"""The name server of a process: it answers RocketMQ clients' look-ups for all groups of its cluster."""

from __future__ import annotations

import asyncio

from timeball.cluster.coordination.coordinator import Coordinator
from timeball.cluster.coordination.directory import Directory
from timeball.edges.remoting.name_server import GroupPlace, NameServer
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
            self._groups,
            tls=security.tls.context if security.tls else None,
            tls_to_brokers=load_client_tls(settings.replication_ca, "", "") if security.tls else None,
        )
        self._looking: asyncio.Task[None] | None = None

    @property
    def directory(self) -> Directory:
        """The leader and replicas of each group, kept up to date while the service runs."""
        return self._directory

    async def start(self) -> int:
        """Listen, unless the settings have no port for it. Returns the port, or -1. Raises SetupError."""
        settings, port = self._settings, -1
        if settings.name_server_port >= 0:
            port = await self._server.start(settings.host, settings.name_server_port)
        self._looking = asyncio.create_task(self._directory.run())
        return port

    async def close(self) -> None:
        """Stop listening and reading the directory."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._server.close()

    def status(self) -> dict[str, object]:
        """Return the fields of a cluster node's status about groups, in the form of answers.Status."""
        directory = self._directory
        kept = {group: directory.replicas(group, "flight") for group in sorted(directory.views)}
        found = [{"group": group, "addresses": addresses} for group, addresses in kept.items() if addresses]
        # None until the coordinator has been read: a reader must not take its group for the only one.
        return {"group": self._settings.group, "groups": found or None}

    def _groups(self) -> list[GroupPlace]:
        directory = self._directory
        return [GroupPlace(group, directory.address(group, "remoting")) for group in directory.views]
