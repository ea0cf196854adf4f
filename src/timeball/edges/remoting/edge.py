"""The edge for RocketMQ's clients. It listens on two ports and passes each request to its handler.

RocketMQ's name server and broker are two programs. Here they are two ports of one process. Both ports answer every
request, since the request codes of the two do not overlap.

Sends bypass the table of handlers (calls.py): `Sends` batches them for throughput. With an access file, each request
is decoded completely, and the same decoded command is checked and then handled. If two decoders read the header, a
client could find one that they read differently, and so pass the check with another request.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from timeball.broker.service import Broker
from timeball.edges.remoting import calls
from timeball.edges.remoting.calls import Dispatch, check_advertised
from timeball.edges.remoting.codec.frame import BadHeader, Frame, cut, decode
from timeball.edges.remoting.codec.implementation import CODEC, Codec, PlainPull
from timeball.edges.remoting.codec.sends import from_command, read_send
from timeball.edges.remoting.connection import CONNECTIONS_MAX, EXPIRY_MS, Connection, Member, MemoryLimits
from timeball.edges.remoting.handlers.admin.groups import ClientForwarding, GroupAdmin
from timeball.edges.remoting.handlers.admin.progress import Progress
from timeball.edges.remoting.handlers.admin.topics import Runtime, TopicAdmin
from timeball.edges.remoting.handlers.heartbeats import Assignments, HeartBeats, Locks
from timeball.edges.remoting.handlers.pops import Pops
from timeball.edges.remoting.handlers.pulls import Offsets, Pulls
from timeball.edges.remoting.handlers.queries import Queries, Routes
from timeball.edges.remoting.handlers.retries import Replies, Retries
from timeball.edges.remoting.handlers.sends import Sends, Transactions
from timeball.edges.shared import first_byte
from timeball.edges.shared.first_byte import Listening
from timeball.edges.shared.sessions import EdgeContext, Sessions
from timeball.io.security import OPEN, Security
from timeball.model.access import Access
from timeball.model.errors import SetupError, TimeballError

logger = logging.getLogger(__name__)

DEADLINES_CHECK_S = 1.0
BACKLOG = 1_024
LAST_ANSWERS_S = 2.0  # for clients to read their last answers when the edge stops


class RemotingEdge:
    """Creates the handlers and listens on both ports. Belongs to the broker's event loop."""

    def __init__(self, broker: Broker, security: Security = OPEN, codec: Codec = CODEC) -> None:
        settings, self.codec = broker.settings, codec
        self._settings, self._security = settings, security
        sessions: Sessions[Connection, Member] = Sessions(EXPIRY_MS)
        self.context = context = EdgeContext(settings, broker, sessions)
        locks = Locks(context)
        retries = Retries(context, locks.is_held)
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
        self._memory_limits = MemoryLimits()
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
        """Listen on one port and return its number. A negative port disables listening. Raises SetupError."""
        if port < 0:
            return port
        loop, access, tls = asyncio.get_running_loop(), self._security.access, self._security.tls
        receiver = self._receive if access is None else partial(self._receive_signed, access)
        # With an access file, each request is checked, so sends are not joined to runs.
        cut_function = self.codec.cut if access is None else cut

        def create_connection() -> Connection:
            return Connection(receiver, self._connections, loop, self._memory_limits, cut_function, edge)

        try:
            server = await first_byte.listen(
                create_connection, self._settings.host, port, BACKLOG, tls.context if tls else None, edge=edge
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
        """Handle the frames, runs of sends and plain pulls of one read, as the codec has split them."""
        plain_pull_type = self.codec.pull
        for frame in frames:
            frame_type = type(frame)
            try:
                if frame_type is plain_pull_type:
                    if not self._answer_plain_pull(connection, frame):
                        self._dispatch.receive(connection, frame.frame())
                    continue
                if frame_type is not Frame:
                    self._sends.put_run(connection, frame)
                    continue
                header = read_send(frame)
                if header is not None:
                    self._sends.put(connection, header, frame)
                else:
                    self._dispatch.receive(connection, frame)
            except BadHeader as error:
                self._dispatch.refuse(connection, error.request, error)

    def _answer_plain_pull(self, connection: Connection, pull: PlainPull) -> bool:
        """Answer a pull from memory. Returns False if the handler in the table must answer it."""
        try:
            return self._pulls.answer_plain(connection, pull)
        # A fault of the broker: it is logged, and the handler in the table answers the client.
        except Exception:
            logger.exception("plain pull failed topic=%s queue=%d", pull.topic, pull.queue_id)
            return False

    def _receive_signed(self, access: Access, connection: Connection, frames: list[Frame]) -> None:
        """Handle the frames of one read. The signature and the permissions of each request are checked first."""
        for frame in frames:
            try:
                command = decode(frame)
            except BadHeader as error:
                self._dispatch.refuse(connection, error.request, error)
                continue
            if command.is_response:
                connection.receive_answer(command)
                continue
            try:
                caller = connection.caller = calls.verify_signer(access, command)
                header = from_command(command)
                if header is not None or self._dispatch.has_handler(command.code):
                    calls.check_permission(caller, command)
            except TimeballError as error:
                self._dispatch.refuse(connection, command, error)
                continue
            if header is not None:
                self._sends.put(connection, header, frame)
            else:
                self._dispatch.handle(connection, command)

    async def _watch_deadlines(self) -> None:
        """Once a second: expire silent clients, update the rates, and close late and surplus connections."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(DEADLINES_CHECK_S)
            self._heartbeats.expire()
            self._runtime.sample()
            for connection in list(self._connections):
                connection.check_deadlines(loop.time(), must_sign=self._security.access is not None)
            self._close_surplus()

    def _close_surplus(self) -> None:
        """Close the most idle connections if nearly CONNECTIONS_MAX are open. Live clients send heartbeats."""
        surplus = len(self._connections) - (CONNECTIONS_MAX - CONNECTIONS_MAX // 32)
        if surplus > 0:
            idle = sorted(
                (connection for connection in self._connections if not connection.calls),
                key=lambda connection: connection.heard_s,
            )
            logger.warning(
                "too many clients, the most idle ones are closed clients=%d", len(self._connections)
            )
            for connection in idle[:surplus]:
                connection.close()

    @property
    def pulls(self) -> dict[str, int]:
        """Numbers of pulls since the start: `plain`, answered by the compiled codec, and `other`."""
        return self._pulls.answered_counts

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return len(self._connections)

    async def close(self) -> None:
        """Stop listening, cancel pending requests and close the connections."""
        for server in self._servers:
            server.close()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._dispatch.close()
        for connection in list(self._connections):
            connection.close()
        await self._wait_for_clients()
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    async def _wait_for_clients(self) -> None:
        """Wait up to LAST_ANSWERS_S until clients have read their last answers, then abort the connections.

        Without the abort, `wait_closed` would wait for clients without end since Python 3.12.
        """
        if self._connections:
            await asyncio.wait(
                [connection.closed for connection in self._connections], timeout=LAST_ANSWERS_S
            )
        for connection in list(self._connections):
            connection.abort()
