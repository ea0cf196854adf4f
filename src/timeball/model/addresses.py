"""The rules for push URLs: which URLs a subscription may have, and which addresses a push may connect to.

This module does no I/O and resolves no names. It also checks the host names by which HTTP clients may call the broker
(`host_names`), with the same grammar.

A client chooses the URL of a subscription, but the broker opens it from inside the operator's network. Without these
rules the client could reach every server that the broker reaches (server-side request forgery). So addresses outside of
the public internet are refused, unless the operator allows them.

    URL         http or https; no user, no fragment; a host name, or an address in its standard form, because libraries
                read other forms of an address (0x7f.1, 017700000001, 2130706433) differently
    port        80, 443, or 1024 and up: mail, shells and name servers use lower ports, and some execute lines of a body
    address     checked for each connection after the name is resolved; the connection uses exactly this address

`--push-allow` lists exceptions. A network allows its addresses. A host name allows the private, loopback and CGNAT
addresses that it resolves to. Both allow any port (a network only in URLs that contain an address). Some addresses are
only allowed by a network, because the owner of a host name can make the name point at them. Examples are the metadata
addresses from which clouds give credentials to their machines.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from timeball.model import limits
from timeball.model.errors import InvalidMessage, SetupError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class _ClosedNetwork(NamedTuple):
    network: Network
    words: str  # the kind of network, for error texts
    allowed_by_name: bool  # whether a host name in --push-allow allows the network's addresses


def _closed_networks(words: str, *networks: str, by_name: bool = False) -> list[_ClosedNetwork]:
    return [_ClosedNetwork(ip_network(network), words, by_name) for network in networks]


# Networks that a push may not reach by default: IANA's registries of special-purpose addresses, and addresses that
# clouds use for metadata. The first entry that contains an address decides.
_CLOSED_NETWORKS = [
    *_closed_networks(
        "cloud metadata", "169.254.169.254/32", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32",
        "fd00:ec2::/32",
    ),
    *_closed_networks("loopback", "127.0.0.0/8", "::1/128", by_name=True),
    *_closed_networks("private", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", by_name=True),
    *_closed_networks("shared by a provider's customers (CGNAT)", "100.64.0.0/10", by_name=True),
    *_closed_networks("link-local", "169.254.0.0/16", "fe80::/10"),
    *_closed_networks("unspecified", "0.0.0.0/8", "::/128"),
    *_closed_networks("multicast", "224.0.0.0/4", "ff00::/8"),
    *_closed_networks("an IPv4 address inside an IPv6 one", "::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48"),
    *_closed_networks("an IPv4 address inside an IPv6 one (6to4, Teredo)", "2002::/16", "2001::/32", "192.88.99.0/24"),
    *_closed_networks(
        "for documentation and measurements", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24",
        "198.18.0.0/15", "2001:db8::/32", "3fff::/20",
    ),
    *_closed_networks("reserved", "192.0.0.0/24", "240.0.0.0/4", "2001::/23", "fec0::/10", "100::/64"),
]  # fmt: skip
_PUBLIC_IPV6 = ip_network("2000::/3")  # the only part of IPv6 from which public addresses are assigned

_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?"
    r"""(?P<rest>(?:[/?][!-~]*)?)"""
)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")
_FORBIDDEN_IN_PATH = frozenset('#\\"<>^`{|}')
_PORTS = (80, 443)
_PORT_MIN, _PORT_MAX = 1_024, 65_535
NAME_CHARACTERS_MAX = 253


class Target(NamedTuple):
    """The parts of a URL that a connection needs."""

    scheme: str
    host: str
    port: int
    address: Address | None  # the host, if it is an address


class Allowed:
    """The host names and networks that a push may reach besides the public internet (`--push-allow`)."""

    def __init__(self, names: frozenset[str], networks: tuple[Network, ...]) -> None:
        self._names, self._networks = names, networks

    @classmethod
    def parse(cls, text: str) -> Allowed:
        """Parse a setting: host names, addresses and networks, separated by commas. Raises SetupError."""
        names, networks = set[str](), list[Network]()
        for item in filter(None, (part.strip().lower() for part in text.split(","))):
            try:
                networks.append(ip_network(item))
            except ValueError as error:
                if not is_name(item):
                    raise SetupError(
                        f"--push-allow {item!r}: a host name, an address or a network such as 10.1.0.0/16 ({error})"
                    ) from error
                names.add(item)
        return cls(frozenset(names), tuple(networks))

    def check_url(self, url: str) -> Target:
        """Parse and check the URL of a subscription. Raises InvalidMessage if it is not allowed."""
        target = parse(url)
        if target.address is not None and (reason := self.refusal(target.host, target.address)) is not None:
            raise InvalidMessage(f"url: {reason}")
        if target.port not in _PORTS and target.port < _PORT_MIN and not self._lists_host(target):
            raise InvalidMessage(
                f"url: port {target.port}; 80, 443, or {_PORT_MIN} and up, unless --push-allow names the host"
            )
        return target

    def refusal(self, host: str, address: Address) -> str | None:
        """Explain why a push to this host may not connect to this address. None if it may."""
        if any(address in network for network in self._networks):
            return None
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            return f"{address} is of one link; give an address that --push-allow names"
        closed_network = next((entry for entry in _CLOSED_NETWORKS if address in entry.network), None)
        if closed_network is not None:
            if closed_network.allowed_by_name and host in self._names:
                return None
            return f"{address} is {closed_network.words}; the operator lets it pass with --push-allow"
        is_public = address in _PUBLIC_IPV6 if isinstance(address, IPv6Address) else True
        # The standard library's list may be newer than _CLOSED_NETWORKS, so it must agree.
        if not is_public or not address.is_global or address.is_multicast or address.is_reserved:
            return f"{address} is not of the open internet; the operator lets it pass with --push-allow"
        return None

    def _lists_host(self, target: Target) -> bool:
        if target.address is None:
            return target.host in self._names
        return any(target.address in network for network in self._networks)


def parse(url: str) -> Target:
    """Parse a URL. Raises InvalidMessage if libraries could read it in different ways."""
    if len(url) > limits.PUSH_URL_BYTES_MAX:
        raise InvalidMessage(f"url: {len(url)} characters; at most {limits.PUSH_URL_BYTES_MAX}")
    match = _URL.fullmatch(url)
    if match is None or _FORBIDDEN_IN_PATH.intersection(match["rest"]):
        raise InvalidMessage(
            "url: http://host:port/path or https://…, in ASCII (a name as xn--…, a path with %xx), without a user, a "
            "fragment, blanks or signs that a URL has not"
        )
    host = match["host"].lower()
    port = int(match["port"]) if match["port"] is not None else 443 if match["scheme"] == "https" else 80
    if not 0 < port <= _PORT_MAX:
        raise InvalidMessage(f"url: port {port}; 1 to {_PORT_MAX}")
    return Target(match["scheme"], host.strip("[]"), port, _address(host))


def is_name(host: str) -> bool:
    """Check whether a lower-case text is a host name that no library reads as an address."""
    labels = host.split(".")
    is_numeric = _NUMBER.fullmatch(labels[-1]) is not None
    return len(host) <= NAME_CHARACTERS_MAX and not is_numeric and all(map(_LABEL.fullmatch, labels))


def host_names(text: str) -> frozenset[str]:
    """Parse the setting `--http-hosts`: host names, separated by commas. Raises SetupError."""
    names = frozenset(filter(None, (part.strip().lower() for part in text.split(","))))
    for name in names:
        if not is_name(name):
            raise SetupError(
                f"--http-hosts {name!r}: a host name such as broker.example, without scheme and port. IP addresses are "
                "always accepted"
            )
    return names


def _address(host: str) -> Address | None:
    """Parse a host as an address. Returns None for a name. Raises InvalidMessage for an address in another form."""
    if is_name(host):
        return None
    try:
        if host.startswith("["):
            return IPv6Address(host.strip("[]"))
        # Only four decimal numbers without leading zeros: some libraries read other forms as octal, hexadecimal or as
        # one number.
        return IPv4Address(host)
    except ValueError as error:
        raise InvalidMessage(
            f"url: host {host[:80]!r} is neither a name nor an address; write an IPv4 address as four decimal numbers"
        ) from error


def parse_address(text: str) -> Address:
    """Parse an address from a resolver or a socket."""
    return ip_address(text)
