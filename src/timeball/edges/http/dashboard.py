"""Serves the dashboard's files below /dashboard/. Redirects browsers: `/` to it, and `/docs` to the API's pages.

The files contain no data, so they need no account. The requests that they make do. Each file is read from the installed
package when it is first requested, by a name that cannot lead out of the package's folder.
"""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files

from timeball.edges.http.problems import Answer, problem
from timeball.edges.http.requests import Call, Handler

PACKAGE = "timeball.dashboard"  # named and not imported, because it contains data and no code
TYPES = {
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
HEADERS = (
    (b"content-security-policy", SECURITY_POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_NAME = re.compile(r"(?:[a-z_]+/)?[a-z_]+\.(html|css|js|svg)")


class Dashboard:
    """The paths of the dashboard. Each file is read once."""

    def __init__(self) -> None:
        self._read: dict[str, Answer] = {}  # by file name
        self.open_paths: dict[str, dict[str, Handler]] = {
            "/": {"GET": self._front},
            "/dashboard": {"GET": self._redirect},
            "/docs": {"GET": self._redirect_to_reference},
            "/dashboard/{file:path}": {"GET": self._file},
        }

    async def _front(self, call: Call) -> Answer:
        if "text/html" in call.headers.get("accept", ""):
            return await self._redirect(call)
        return problem(
            404, "not_found", "no path '/'; GET /openapi.json has them all, and browsers have /dashboard/"
        )

    async def _redirect(self, call: Call) -> Answer:
        return _redirection(b"dashboard/")

    async def _redirect_to_reference(self, call: Call) -> Answer:
        return _redirection(b"dashboard/reference.html")

    async def _file(self, call: Call) -> Answer:
        name = call.path["file"] or "index.html"
        if name not in self._read:
            matched = _NAME.fullmatch(name)
            data = await asyncio.to_thread(_bytes_of, name) if matched else None
            if matched is None or data is None:
                return problem(404, "not_found", f"the dashboard has no file {name[:100]!r}")
            self._read[name] = Answer(200, data, HEADERS, TYPES[matched[1]])
        return self._read[name]


def _redirection(location: bytes) -> Answer:
    # The location is relative, so that it also works behind a proxy that adds a prefix.
    return Answer(307, b"", ((b"location", location),), TYPES["html"])


def _bytes_of(name: str) -> bytes | None:
    try:
        return files(PACKAGE).joinpath(*name.split("/")).read_bytes()
    except OSError:
        return None
