"""Where a push may go: which URLs it may name, and which addresses may be connected to. No I/O, no names resolved.

Also the names that HTTP clients may call the broker by (`host_names`), which are checked by the same grammar.

A subscription's URL comes from outside and is opened from inside: what it may reach, its author may reach. So an
address that is not on the open internet is refused (server-side request forgery), unless the operator allows it.

    URL         http or https; no user, no fragment; a name, or an address in its one usual form. Other forms of an
                address (0x7f.1, 017700000001, 2130706433) mean different things to different libraries
    port        80, 443, or 1024 and up: below are mail, shells and name servers, some of which obey lines of a body
    address     checked for each connection, after the name is resolved, and that address is the one connected to

What `--push-allow` names passes: a network lets its addresses pass, a host name those private and loopback addresses
that it resolves to, and both any port. The addresses by which clouds hand credentials to their machines, and others
that no service of a network has, pass by a network alone: a name may be made to point at them.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from timeball import limits
from timeball.errors import InvalidMessage, SetupError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class _Closed(NamedTuple):
    network: Network
    words: str
    opens_by_name: bool  # for a host that the operator has named


def _closed(words: str, *networks: str, by_name: bool = False) -> list[_Closed]:
    return [_Closed(ip_network(network), words, by_name) for network in networks]


# The first that holds an address counts. IANA's registries of special-purpose addresses, and what clouds have added.
_CLOSED = [
    *_closed(
        "cloud metadata", "169.254.169.254/32", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32",
        "fd00:ec2::/32",
    ),
    *_closed("loopback", "127.0.0.0/8", "::1/128", by_name=True),
    *_closed("private", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", by_name=True),
    *_closed("shared by a provider's customers (CGNAT)", "100.64.0.0/10", by_name=True),
    *_closed("link-local", "169.254.0.0/16", "fe80::/10"),
    *_closed("unspecified", "0.0.0.0/8", "::/128"),
    *_closed("multicast", "224.0.0.0/4", "ff00::/8"),
    *_closed("an IPv4 address inside an IPv6 one", "::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48"),
    *_closed("an IPv4 address inside an IPv6 one (6to4, Teredo)", "2002::/16", "2001::/32", "192.88.99.0/24"),
    *_closed(
        "for documentation and measurements", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24",
        "198.18.0.0/15", "2001:db8::/32", "3fff::/20",
    ),
    *_closed("reserved", "192.0.0.0/24", "240.0.0.0/4", "2001::/23", "fec0::/10", "100::/64"),
]  # fmt: skip
_OPEN_IPV6 = ip_network("2000::/3")  # all of IPv6 that has been given out

_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?"
    r"""(?P<rest>(?:[/?][!-~]*)?)"""
)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")
_NOT_IN_A_PATH = frozenset('#\\"<>^`{|}')
_PORTS = (80, 443)
_PORT_MIN, _PORT_MAX = 1_024, 65_535
NAME_CHARACTERS_MAX = 253


class Target(NamedTuple):
    """A URL, taken apart. `address`: of a host that is one."""

    scheme: str
    host: str
    port: int
    address: Address | None


class Allowed:
    """Names and networks that the operator lets a push reach besides the open internet."""

    def __init__(self, names: frozenset[str], networks: tuple[Network, ...]) -> None:
        self._names, self._networks = names, networks

    @classmethod
    def parse(cls, text: str) -> Allowed:
        """Return what a setting says: host names, addresses and networks, with commas between; raise SetupError."""
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
        """Return a URL taken apart; raise InvalidMessage for one that no push may have."""
        target = parse(url)
        if target.address is not None and (reason := self.refusal(target.host, target.address)) is not None:
            raise InvalidMessage(f"url: {reason}")
        if target.port not in _PORTS and target.port < _PORT_MIN and not self._names_host(target):
            raise InvalidMessage(
                f"url: port {target.port}; 80, 443, or {_PORT_MIN} and up, unless --push-allow names the host"
            )
        return target

    def refusal(self, host: str, address: Address) -> str | None:
        """Return why a push to this host may not connect to this address; None when it may."""
        if any(address in network for network in self._networks):
            return None
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            return f"{address} is of one link; give an address that --push-allow names"
        closed = next((each for each in _CLOSED if address in each.network), None)
        if closed is not None:
            if closed.opens_by_name and host in self._names:
                return None
            return f"{address} is {closed.words}; the operator lets it pass with --push-allow"
        is_open = address in _OPEN_IPV6 if isinstance(address, IPv6Address) else True
        # As the standard library has it, too, which may know of a network that is closed since this was written.
        if not is_open or not address.is_global or address.is_multicast or address.is_reserved:
            return f"{address} is not of the open internet; the operator lets it pass with --push-allow"
        return None

    def _names_host(self, target: Target) -> bool:
        if target.address is None:
            return target.host in self._names
        return any(target.address in network for network in self._networks)


def parse(url: str) -> Target:
    """Return a URL taken apart; raise InvalidMessage unless it has the one form that all libraries read alike."""
    if len(url) > limits.PUSH_URL_BYTES_MAX:
        raise InvalidMessage(f"url: {len(url)} characters; at most {limits.PUSH_URL_BYTES_MAX}")
    found = _URL.fullmatch(url)
    if found is None or _NOT_IN_A_PATH.intersection(found["rest"]):
        raise InvalidMessage(
            "url: http://host:port/path or https://…, in ASCII (a name as xn--…, a path with %xx), without a user, a "
            "fragment, blanks or signs that a URL has not"
        )
    host = found["host"].lower()
    port = int(found["port"]) if found["port"] is not None else 443 if found["scheme"] == "https" else 80
    if not 0 < port <= _PORT_MAX:
        raise InvalidMessage(f"url: port {port}; 1 to {_PORT_MAX}")
    return Target(found["scheme"], host.strip("[]"), port, _address(host))


def is_name(host: str) -> bool:
    """Return whether a text in lower case is a host name, and cannot be read as an address."""
    labels = host.split(".")
    is_numeric = _NUMBER.fullmatch(labels[-1]) is not None
    return len(host) <= NAME_CHARACTERS_MAX and not is_numeric and all(map(_LABEL.fullmatch, labels))


def host_names(text: str) -> frozenset[str]:
    """Return the names in the setting `--http-hosts`, with commas between; raise SetupError."""
    names = frozenset(filter(None, (part.strip().lower() for part in text.split(","))))
    for name in names:
        if not is_name(name):
            raise SetupError(
                f"--http-hosts {name!r}: a host name such as broker.example, without scheme and port. IP addresses are "
                "always accepted"
            )
    return names


def _address(host: str) -> Address | None:
    """Return the address that a host is, None for a name; raise InvalidMessage for one in another form."""
    if is_name(host):
        return None
    try:
        if host.startswith("["):
            return IPv6Address(host.strip("[]"))
        # Four decimal numbers without zeros in front: all else is read as octal, hexadecimal or one number by some.
        return IPv4Address(host)
    except ValueError as error:
        raise InvalidMessage(
            f"url: host {host[:80]!r} is neither a name nor an address; write an IPv4 address as four decimal numbers"
        ) from error


def parse_address(text: str) -> Address:
    """Return the address that a resolver or a socket has given."""
    return ip_address(text)
