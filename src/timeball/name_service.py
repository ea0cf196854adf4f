"""The name server of a process, over all groups of its cluster."""

from __future__ import annotations

import asyncio

from timeball.cluster.coordinator import Coordinator
from timeball.cluster.directory import Directory
from timeball.config import Settings
from timeball.protocols.remoting.name_server import GroupPlace, NameServer
from timeball.security import Security, load_client_tls


class NameService:
    """A name server and what it knows. Belongs to the event loop; the coordinator is its caller's to close."""

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
        """Return who leads which group, read for as long as this runs."""
        return self._directory

    async def start(self) -> int:
        """Listen, unless there is no port for it; return the port. Raises SetupError."""
        settings, port = self._settings, -1
        if settings.name_server_port >= 0:
            port = await self._server.start(settings.host, settings.name_server_port)
        self._looking = asyncio.create_task(self._directory.run())
        return port

    async def close(self) -> None:
        """Stop listening."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._server.close()

    def status(self) -> dict[str, object]:
        """Return what the status of a cluster's node says of groups, as answers.Status has it."""
        directory = self._directory
        kept = {group: directory.replicas(group, "flight") for group in sorted(directory.views)}
        found = [{"group": group, "addresses": addresses} for group, addresses in kept.items() if addresses]
        # Before the coordinator was read there are none, and a reader must not take its group for the only one.
        return {"group": self._settings.group, "groups": found or None}

    def _groups(self) -> list[GroupPlace]:
        directory = self._directory
        return [GroupPlace(group, directory.address(group, "remoting")) for group in directory.views]
