"""The edge for RocketMQ's clients: two ports, one table of requests.

In RocketMQ, name server and broker are two programs. Here they are two ports. Both ports answer every request, since
the two sets of request codes do not overlap. Sends go to `Sends`, whose batches give the throughput. All other requests
go to the table (dispatch.py). With an access file, each request is decoded completely first, and the decoded command is
both checked and handled. Two readers of one header could read it differently.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from timeball.broker.service import Broker
from timeball.edges.remoting import required_permissions
from timeball.edges.remoting.calls import check_advertised
from timeball.edges.remoting.codec.frame import BadHeader, Frame, cut, decode
from timeball.edges.remoting.codec.implementation import PlainPull, codec_of
from timeball.edges.remoting.codec.sends import from_command, read_send
from timeball.edges.remoting.connection import CONNECTIONS_MAX, EXPIRY_MS, Connection, Member, Room
from timeball.edges.remoting.dispatch import Dispatch
from timeball.edges.remoting.handlers.admin.client_forwarding import ClientForwarding
from timeball.edges.remoting.handlers.admin.groups import GroupAdmin
from timeball.edges.remoting.handlers.admin.progress import Progress
from timeball.edges.remoting.handlers.admin.runtime import Runtime
from timeball.edges.remoting.handlers.admin.topics import TopicAdmin
from timeball.edges.remoting.handlers.heartbeats import HeartBeats
from timeball.edges.remoting.handlers.offsets import Offsets
from timeball.edges.remoting.handlers.pops import Pops
from timeball.edges.remoting.handlers.pulls import Pulls
from timeball.edges.remoting.handlers.queries import Queries
from timeball.edges.remoting.handlers.rebalance import Assignments, Locks
from timeball.edges.remoting.handlers.replies import Replies
from timeball.edges.remoting.handlers.retries import Retries
from timeball.edges.remoting.handlers.routes import Routes
from timeball.edges.remoting.handlers.sends import Sends
from timeball.edges.remoting.handlers.transactions import Transactions
from timeball.edges.shared import first_byte
from timeball.edges.shared.first_byte import Listening
from timeball.edges.shared.sessions import EdgeContext, Sessions
from timeball.io.security import OPEN, Security
from timeball.model.access import Access
from timeball.model.errors import SetupError, TimeballError

logger = logging.getLogger(__name__)

DEADLINES_LOOK_S = 1.0
BACKLOG = 1_024
LAST_ANSWERS_S = 2.0  # time at a stop for slow clients to read their last answers


class RemotingEdge:
    """Builds the handlers and listens on both ports. Belongs to the broker's event loop."""

    def __init__(self, broker: Broker, security: Security = OPEN) -> None:
        settings = broker.settings
        self._settings, self._security = settings, security
        sessions: Sessions[Connection, Member] = Sessions(EXPIRY_MS)
        self.context = context = EdgeContext(settings, broker, sessions)
        locks = Locks(context)
        retries = Retries(context, locks.is_held)
        self.codec = codec_of(settings.codec)
        self._sends = Sends(context, retries, self.codec)
        self._heartbeats = HeartBeats(context, locks)
        self._runtime = Runtime(context)
        self._pulls = Pulls(context, self.codec)
        self._dispatch = Dispatch(
            [
                Routes(context).handlers,
                Offsets(context).handlers,
                self._pulls.handlers,
                Pops(context, self.codec).handlers,
                Queries(context).handlers,
                self._sends.handlers,
                Replies(context).handlers,
                self._heartbeats.handlers,
                locks.handlers,
                retries.handlers,
                Assignments(context).handlers,
                Transactions(context).handlers,
                TopicAdmin(context).handlers,
                GroupAdmin(context).handlers,
                Progress(context).handlers,
                ClientForwarding(context).handlers,
                self._runtime.handlers,
            ]
        )
        self._connections: set[Connection] = set()
        self._room = Room()
        self._servers: list[Listening] = []
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises SetupError if a port is taken or the advertised host cannot be resolved."""
        settings = self._settings
        check_advertised(settings.advertise)
        self.context.name_server_port = await self._listen("name_server", settings.name_server_port)
        self.context.port = await self._listen("remoting", settings.remoting_port)
        self._watch = self.context.start_watch(self._watch_deadlines())

    async def _listen(self, edge: str, port: int) -> int:
        if port < 0:
            return port
        loop, access, tls = asyncio.get_running_loop(), self._security.access, self._security.tls
        receive = self._receive if access is None else partial(self._receive_signed, access)
        cuts = self.codec.cut if access is None else cut  # no runs: the signer of each frame is checked

        def connection() -> Connection:
            return Connection(receive, self._connections, loop, self._room, cuts, edge)

        try:
            server = await first_byte.listen(
                connection, self._settings.host, port, BACKLOG, tls.context if tls else None, edge=edge
            )
        except OSError as error:
            await self.close()
            raise SetupError(
                f"--{edge.replace('_', '-')}-port {port}: {error.strerror or error}; another broker may be running, "
                "choose another port"
            ) from error
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def _receive(self, connection: Connection, frames: list[Any]) -> None:
        pull = self.codec.pull
        for frame in frames:
            kind = type(frame)
            try:
                if kind is pull:
                    if not self._answers(connection, frame):
                        self._dispatch.receive(connection, frame.frame())
                    continue
                if kind is not Frame:
                    self._sends.put_run(connection, frame)
                    continue
                header = read_send(frame)
                if header is not None:
                    self._sends.put(connection, header, frame)
                else:
                    self._dispatch.receive(connection, frame)
            except BadHeader as error:
                self._dispatch.refuse(connection, error.request, error)

    def _answers(self, connection: Connection, pull: PlainPull) -> bool:
        try:
            return self._pulls.answer(connection, pull)
        # A fault of the broker: the log gets a trace, and the reference answers the client.
        except Exception:
            logger.exception("plain pull failed topic=%s queue=%d", pull.topic, pull.queue_id)
            return False

    def _receive_signed(self, access: Access, connection: Connection, frames: list[Frame]) -> None:
        for frame in frames:
            try:
                command = decode(frame)
            except BadHeader as error:
                self._dispatch.refuse(connection, error.request, error)
                continue
            if command.is_response:
                connection.answered(command)
                continue
            try:
                caller = connection.caller = required_permissions.signer(access, command)
                header = from_command(command)
                if header is not None or self._dispatch.offers(command.code):
                    required_permissions.check(caller, command)
            except TimeballError as error:
                self._dispatch.refuse(connection, command, error)
                continue
            if header is not None:
                self._sends.put(connection, header, frame)
            else:
                self._dispatch.handle(connection, command)

    async def _watch_deadlines(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(DEADLINES_LOOK_S)
            self._heartbeats.expire()
            self._runtime.sample()
            for connection in list(self._connections):
                connection.check_deadlines(loop.time(), must_sign=self._security.access is not None)
            self._make_room()

    def _make_room(self) -> None:
        """Close the most silent connections if nearly CONNECTIONS_MAX are open: live clients send heartbeats."""
        crowd = len(self._connections) - (CONNECTIONS_MAX - CONNECTIONS_MAX // 32)
        if crowd > 0:
            idle = sorted(
                (each for each in self._connections if not each.calls), key=lambda each: each.heard_s
            )
            logger.warning(
                "too many clients, the most idle ones are closed clients=%d", len(self._connections)
            )
            for connection in idle[:crowd]:
                connection.close()

    @property
    def pulls(self) -> dict[str, int]:
        """Return how many pulls were answered plainly, and how many by the reference."""
        return self._pulls.answered

    @property
    def connections(self) -> int:
        """Return the number of connected clients."""
        return len(self._connections)

    async def close(self) -> None:
        """Stop listening, end the waiting requests and close the connections."""
        for server in self._servers:
            server.close()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._dispatch.close()
        for connection in list(self._connections):
            connection.close()
        await self._let_go()
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    async def _let_go(self) -> None:
        """Let the last answers leave, for LAST_ANSWERS_S: since Python 3.12 a server waits for its clients forever."""
        if self._connections:
            await asyncio.wait([each.closed for each in self._connections], timeout=LAST_ANSWERS_S)
        for connection in list(self._connections):
            connection.abort()
