"""Refuses requests that a browser sends for a page of another site (CSRF, DNS rebinding). No I/O.

A page can make a browser send requests to every address that the browser reaches, including a broker on the same
machine. A broker without accounts would carry them out. Two checks prevent that:

    host    The name by which the client reached the broker. The owner of a name can point it to the broker's address
            (DNS rebinding), and the browser then treats the broker as the page's own site. So a broker without
            accounts only answers to names that are local or configured. With accounts, such a page lacks a key.
    page    The site of the page that sends the request, with accounts and without. `Sec-Fetch-Site` tells it. Browsers
            only send that to HTTPS and loopback addresses. Without it, `Origin` counts, which they send with everything
            but a plain GET. A plain GET without either is answered: GET changes nothing, and the page cannot read the
            answer.

An IP address in `Host` is always accepted: an address cannot be pointed to another one. Programs other than browsers
send neither of the two page headers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_address

from timeball.edges.shared.sessions import advertised
from timeball.model.addresses import host_names
from timeball.model.config import Settings
from timeball.model.errors import Forbidden

OWN_SITE_VALUES = ("same-origin", "none")  # `none`: the user typed the address
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
# Probes and load balancers use these paths under any host name. The answers contain no data.
_PATHS_FOR_ANY_HOST = ("/health/", "/leader/")
# A link from another site may lead to all paths but these: the dashboard and the pages of the API contain no data
# either.
_PATHS_WITHOUT_LINKS = ("/v1/", "/metrics")
_QUOTED_MAX = 80  # characters


class ForeignPageCheck:
    """Checks the requests to one broker or follower."""

    def __init__(
        self,
        settings: Settings,
        *,
        has_accounts: bool,
        cluster_hosts: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Collect the host names by which clients may address the broker.

        `cluster_hosts` returns the names of the cluster's other nodes, which forward their clients to this one.
        """
        self._has_accounts, self._cluster_hosts = has_accounts, cluster_hosts
        own_hosts = (settings.host, advertised(settings.advertise)[0])
        self._known_hosts = host_names(settings.http_hosts) | {name.lower() for name in own_hosts if name}

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raise Forbidden for a request that comes from a foreign page. The names of `headers` are in lower case."""
        host = headers.get("host", "")
        if not (self._has_accounts or path.startswith(_PATHS_FOR_ANY_HOST) or self._is_known_host(host)):
            name = _host_name(host)[:_QUOTED_MAX]
            raise Forbidden(
                f"host {name!r}: a broker without accounts answers to localhost, to IP addresses and to names that it "
                "is given. Start it with --http-hosts and this name, or with --access-file"
            )
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site in OWN_SITE_VALUES or (site is None and (origin is None or _is_same_origin(origin, host))):
            return
        if _is_navigation(method, headers) and not path.startswith(_PATHS_WITHOUT_LINKS):
            return
        page = f"a page of {origin[:_QUOTED_MAX]!r}" if origin else "a page of another site"
        raise Forbidden(
            f"{page} asks by a browser: this API answers to pages of its own address only. Ask it by a program, or "
            "through a proxy at the page's address"
        )

    def _is_known_host(self, host: str) -> bool:
        name = _host_name(host)
        # Browsers always send the header, so a request without it comes from another program.
        if not name or name == "localhost" or name.endswith(".localhost") or name in self._known_hosts:
            return True
        return _is_address(name) or name in self._cluster_hosts()


def _host_name(host: str) -> str:
    """Extract the host name or address from a `Host` header, without the port and in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_same_origin(origin: str, host: str) -> bool:
    """True if a page of `origin` was served by this host and port.

    The scheme is ignored, because a proxy may terminate HTTPS.
    """
    scheme, _, authority = origin.lower().partition("://")
    port = DEFAULT_PORTS.get(scheme, "")
    return bool(authority) and authority.removesuffix(port) == host.lower().removesuffix(port)


def _is_navigation(method: str, headers: Mapping[str, str]) -> bool:
    """True if the browser navigates to this URL, as after a click on a link."""
    return (method, headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == (
        "GET",
        "navigate",
        "document",
    )
