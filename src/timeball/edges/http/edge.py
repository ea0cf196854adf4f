"""The edge for HTTP: the server on the broker's event loop, the dashboard, and the table of paths.

    HttpEdge          one table of paths, served by uvicorn
    Dashboard         the dashboard's files
    collect_routes    all paths, with the handler of each method

Surplus connections are closed by shared_limits.py, as on every port.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple, cast

import msgspec
import uvicorn

from timeball.broker.service import Broker
from timeball.edges.http.codec import Answer, problem
from timeball.edges.http.connection import HttpConnection
from timeball.edges.http.handlers import receives
from timeball.edges.http.handlers.operators import (
    Campaigns,
    GroupQuestions,
    Groups,
    ManualTime,
    Operators,
    Status,
    Subscriptions,
)
from timeball.edges.http.handlers.receives import Events, Receives
from timeball.edges.http.handlers.schedules import Schedules
from timeball.edges.http.handlers.selections import Selections
from timeball.edges.http.handlers.sends import PendingMessages, Scheduled, Sends
from timeball.edges.http.recovering import BACKLOG, listen
from timeball.edges.http.requests import (
    Call,
    DirectHandler,
    Endpoint,
    ForeignPageCheck,
    Handler,
    Paths,
    PathTable,
    RequestLimits,
)
from timeball.edges.shared.first_byte import FirstByteServer
from timeball.io.security import OPEN, Security
from timeball.monitoring.metrics import Metrics

logger = logging.getLogger(__name__)

# ---- the server ----------------------------------------------------------------------------------------------

# The OpenAPI document: a file of the package, which `make openapi` writes.
OPENAPI = files("timeball.edges.http").joinpath("openapi.json").read_bytes()
IDLE_S = 75  # the longest pause between two requests of a connection
STOP_S = 1  # for requests under way at a stop; longer polls end without an answer


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with the broker's listener for TLS.

    The node handles signals.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End `serve` as soon as the requests under way have ended."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wait for `stop`. uvicorn wakes up ten times a second, also for settings that the broker does not use."""
        await self.on_tick(0)  # builds the default headers
        await self._stopping.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen.

        With TLS, FirstByteServer listens in place of uvicorn. It also logs clients that connect without TLS.
        """
        tls = self.config.ssl
        await super().startup(sockets=sockets if tls is None else [])
        if tls is None or sockets is None:
            return

        def connection() -> HttpConnection:
            return HttpConnection(self.config, self.server_state, self.lifespan.state)

        server = FirstByteServer(connection, tls, edge="http")
        server.listen_on(sockets, BACKLOG)
        self.servers.append(cast(asyncio.Server, server))  # uvicorn closes it at a stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def query_parameters(document: bytes) -> dict[str, dict[str, tuple[str, ...]]]:
    """Read the names of the query parameters from the OpenAPI document, by path and method."""
    return {
        path: {
            method.upper(): tuple(each["name"] for each in operation["parameters"] if each["in"] == "query")
            for method, operation in methods.items()
        }
        for path, methods in msgspec.json.decode(document)["paths"].items()
    }


QUERY_PARAMETERS = query_parameters(OPENAPI)


class HttpEdge:
    """Builds the table of paths, and starts and stops the server. Belongs to the broker's event loop."""

    def __init__(self, broker: Broker, metrics: Metrics, status: Status, security: Security = OPEN) -> None:
        self._settings, self._security, self._clock = broker.settings, security, broker.clock.clock
        self.limits, self.port = RequestLimits(), self._settings.http_port
        self._pages = ForeignPageCheck(
            self._settings,
            has_accounts=security.access is not None,
            cluster_hosts=metrics.replica.hosts if metrics.replica is not None else tuple,
        )
        self._collect_routes = partial(collect_routes, broker, metrics, status)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._server.server_state.connections) if self._server is not None else 0

    async def start(self, listening: socket.socket | None = None) -> None:
        """Serve on the socket `listening`, or on a new one. Raises SetupError when the port is taken."""
        if self.port < 0:
            return
        listening = listening or listen(self._settings)
        self.port = int(listening.getsockname()[1])
        config = uvicorn.Config(
            cast(Any, self._build_paths()),  # not an ASGI application: the connections alone use it
            http=HttpConnection,
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
            timeout_graceful_shutdown=STOP_S,
        )
        config.load()
        if self._security.tls is not None:
            config.ssl = self._security.tls.http
        # uvicorn logs a warning for each fault of a client, so unknown clients could fill the broker's log.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = _Server(config)
        # The socket listens already, so early clients wait in its backlog.
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        """Accept no more requests, wait up to STOP_S for requests under way, and close the connections."""
        if self._server is None or self._serving is None:
            return
        self._server.stop()
        await self._serving
        self._server = None

    def _build_paths(self) -> PathTable:
        """Build the endpoints of all paths. This takes milliseconds, so a broker without the port does not do it."""
        handlers = self._collect_routes()
        open_paths = handlers.open_paths | Dashboard().open_paths
        return PathTable(
            {
                **{
                    path: self._build_endpoint(
                        path, methods, former_methods=handlers.former_methods.get(path)
                    )
                    for path, methods in handlers.paths.items()
                },
                **{
                    path: self._build_endpoint(path, methods, is_open=True)
                    for path, methods in open_paths.items()
                },
                "/openapi.json": self._build_endpoint("/openapi.json", {"GET": self._openapi}, is_open=True),
            }
        )

    def _build_endpoint(
        self,
        path: str,
        methods: Mapping[str, Handler | DirectHandler],
        *,
        is_open: bool = False,
        former_methods: dict[str, str] | None = None,
    ) -> Endpoint:
        """Build the endpoint of one path, with the handlers of its methods."""
        return Endpoint(
            methods, self._security, self._pages, self._clock.wall_ms, self.limits, is_open=is_open,
            former_methods=former_methods or {}, parameters=QUERY_PARAMETERS.get(path.replace(":path}", "}"), {}),
        )  # fmt: skip

    async def _openapi(self, call: Call) -> Answer:
        return Answer(200, OPENAPI)


# ---- the dashboard -------------------------------------------------------------------------------------------
# The files are below /dashboard/. Browsers are redirected from `/` to it, and from `/docs` to the API's pages. The
# files contain no data, so they need no account. The requests that they make do. Each file is read from the installed
# package when it is first requested, by a name that cannot lead out of the package's folder.

FILES_PACKAGE = "timeball.dashboard"  # not imported, because it contains files and no code
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing from other hosts, and nothing inline: HTML that a message brings into the page can neither run nor send
# anything.
SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
SECURITY_HEADERS = (
    (b"content-security-policy", SECURITY_POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_FILE_NAME = re.compile(r"(?:[a-z_]+/)?[a-z_]+\.(html|css|js|svg)")


class Dashboard:
    """Serves the paths of the dashboard. Each file is read once."""

    def __init__(self) -> None:
        self._answers_by_file: dict[str, Answer] = {}  # the answers with files that were read, by file name
        self.open_paths: Paths = {
            "/": {"GET": self._root},
            "/dashboard": {"GET": self._redirect},
            "/docs": {"GET": self._redirect_to_reference},
            "/dashboard/{file:path}": {"GET": self._file},
        }

    async def _root(self, call: Call) -> Answer:
        """Redirect browsers to the dashboard. Other clients get 404 with advice."""
        if "text/html" in call.headers.get("accept", ""):
            return await self._redirect(call)
        return problem(
            404, "not_found", "no path '/'; GET /openapi.json has them all, and browsers have /dashboard/"
        )

    async def _redirect(self, call: Call) -> Answer:
        return _build_redirect(b"dashboard/")

    async def _redirect_to_reference(self, call: Call) -> Answer:
        return _build_redirect(b"dashboard/reference.html")

    async def _file(self, call: Call) -> Answer:
        """Answer with a file of the dashboard, by the name in the path."""
        name = call.path["file"] or "index.html"
        if name not in self._answers_by_file:
            name_match = _FILE_NAME.fullmatch(name)
            data = await asyncio.to_thread(_read_file, name) if name_match else None
            if name_match is None or data is None:
                return problem(404, "not_found", f"the dashboard has no file {name[:100]!r}")
            self._answers_by_file[name] = Answer(200, data, SECURITY_HEADERS, MEDIA_TYPES[name_match[1]])
        return self._answers_by_file[name]


def _build_redirect(location: bytes) -> Answer:
    """Build the answer that sends a browser to another path."""
    # The location is relative, so that it also works behind a proxy that adds a prefix.
    return Answer(307, b"", ((b"location", location),), MEDIA_TYPES["html"])


def _read_file(name: str) -> bytes | None:
    """Read a file of the dashboard. None if it does not exist."""
    try:
        return files(FILES_PACKAGE).joinpath(*name.split("/")).read_bytes()
    except OSError:
        return None


# ---- all paths -----------------------------------------------------------------------------------------------


class Routes(NamedTuple):
    """Handlers by path and method. `open_paths` need no account.

    `former_methods`: by path and method that only older versions offered, the advice for the client.
    """

    paths: Paths
    open_paths: Paths
    former_methods: dict[str, dict[str, str]]


def collect_routes(broker: Broker, metrics: Metrics, status: Status) -> Routes:
    """Collect the handlers of all paths."""
    operators = Operators(broker, metrics, status)
    paths: Paths = {}
    handlers = (
        operators,
        Sends(broker),
        Receives(broker),
        Scheduled(broker),
        PendingMessages(broker),
        Events(broker),
        Campaigns(broker),
        Groups(broker),
        GroupQuestions(broker),
        Subscriptions(broker, metrics.push),
        Schedules(broker),
        Selections(broker),
    )
    for handler in handlers:
        for path, methods in handler.paths.items():
            paths[path] = {**paths.get(path, {}), **methods}
    if broker.virtual_time is not None:
        paths.update(ManualTime(broker, broker.virtual_time).paths)
    return Routes(paths, operators.open_paths, receives.FORMER_METHODS)
