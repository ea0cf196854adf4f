"""The edge for HTTP: one table of paths, served by uvicorn on the broker's event loop.

Surplus connections are closed by strangers.py, as on every port.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from starlette.routing import BaseRoute, Route, Router

from timeball.broker.service import Broker
from timeball.edges.http.connection import BoundedHttp
from timeball.edges.http.dashboard import Dashboard
from timeball.edges.http.foreign_pages import ForeignPages
from timeball.edges.http.handlers.operators import Status
from timeball.edges.http.handlers.routes import routes as routes_of
from timeball.edges.http.openapi import document, parameters_of
from timeball.edges.http.problems import Answer
from timeball.edges.http.recovering import BACKLOG, listen
from timeball.edges.http.requests import Call, Endpoint, Handler, Room, not_found
from timeball.edges.shared.first_byte import FirstByteServer
from timeball.io.security import OPEN, Security
from timeball.monitoring.metrics import Metrics

logger = logging.getLogger(__name__)

IDLE_S = 75  # the longest pause between two requests of a connection
LAST_ANSWERS_S = 1  # after this time at a stop, waiting long polls end without an answer


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, because the node has its own, and with the broker's listener for TLS."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. The TLS listener logs clients that connect without TLS, for which uvicorn has no hook."""
        tls = self.config.ssl
        await super().startup(sockets=sockets if tls is None else [])
        if tls is None or sockets is None:
            return

        def connection() -> BoundedHttp:
            return BoundedHttp(self.config, self.server_state, self.lifespan.state)

        server = FirstByteServer(connection, tls, edge="http")
        server.listen_on(sockets, BACKLOG)
        self.servers.append(cast(asyncio.Server, server))  # uvicorn closes it at a stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


class HttpEdge:
    """Builds the paths, and starts and stops the server. Belongs to the broker's event loop."""

    def __init__(self, broker: Broker, metrics: Metrics, status: Status, security: Security = OPEN) -> None:
        self._settings, self._security, self._clock = (
            broker.parts.settings,
            security,
            broker.parts.clock.clock,
        )
        self.room, self.port = Room(), self._settings.http_port
        self._pages = ForeignPages(
            self._settings,
            has_accounts=security.access is not None,
            cluster_hosts=metrics.replica.hosts if metrics.replica is not None else tuple,
        )
        handlers = routes_of(broker, metrics, status)
        open_paths = handlers.open_paths | Dashboard().open_paths
        self._document: dict[str, Any] | None = None  # built at the first request for it
        routes: list[BaseRoute] = [
            *(
                self._route(path, methods, is_open=False, former=handlers.former.get(path))
                for path, methods in handlers.paths.items()
            ),
            *(self._route(path, methods, is_open=True) for path, methods in open_paths.items()),
            self._route("/openapi.json", {"GET": self._openapi}, is_open=True),
        ]
        self._app = Router(routes, redirect_slashes=False, default=not_found)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._server.server_state.connections) if self._server is not None else 0

    async def start(self, listening: socket.socket | None = None) -> None:
        """Serve on `listening`, or on a new socket. Raises SetupError when the port is taken."""
        if self.port < 0:
            return
        listening = listening or listen(self._settings)
        self.port = int(listening.getsockname()[1])
        config = uvicorn.Config(
            self._app,
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,  # no header may change the address of the caller
            backlog=BACKLOG,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=LAST_ANSWERS_S,
        )
        config.load()
        if self._security.tls is not None:
            config.ssl = self._security.tls.http
        # uvicorn logs a warning for each fault of a client, so unknown clients could fill the broker's log.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = _Server(config)
        # The port listens already, so early clients wait in the backlog.
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        """Accept no more requests, end the waiting ones, and close the connections."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        await self._serving
        self._server = None

    def _route(
        self,
        path: str,
        methods: dict[str, Handler],
        *,
        is_open: bool,
        former: dict[str, str] | None = None,
    ) -> Route:
        endpoint = Endpoint(
            methods, self._security, self._pages, self._clock.wall_ms, self.room, is_open=is_open,
            former=former or {}, parameters=parameters_of(path),
        )  # fmt: skip
        return Route(path, endpoint)

    async def _openapi(self, call: Call) -> Answer:
        if self._document is None:
            self._document = document()
        return Answer(200, self._document)
