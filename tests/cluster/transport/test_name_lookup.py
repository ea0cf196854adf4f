"""Names are looked up in another thread. Each request gets its answer once."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from tests.bounds import BOUND_S

from timeball.cluster.transport.connections import NameLookup, Resolved

NAME = ("some.test", 7410)


class Names:
    """A resolver whose answers a test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests = 0
        self.answer: str | None = "127.0.0.1"  # None: there is no such name
        self.done = threading.Event()
        self._getaddrinfo = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._get)

    def _get(self, host: str, *args: Any, **options: Any) -> Any:
        """Stand in for `socket.getaddrinfo`."""
        if host == NAME[0] and not options.get("flags"):
            self.requests += 1
            if self.answer is None:
                raise socket.gaierror(socket.EAI_NONAME, "not known")
            host = self.answer
        return self._getaddrinfo(host, *args, **options)

    def resolve(self, lookup: NameLookup) -> Resolved | None:
        """Look NAME up, and wait for the answer."""
        self.done.clear()
        resolved = lookup.resolve(NAME)
        if resolved is None:
            assert self.done.wait(BOUND_S)
            resolved = lookup.resolve(NAME)
        return resolved


@pytest.mark.parametrize("address", [("127.0.0.1", 7410), ("::1", 7410)])
def test_a_numeric_address_needs_no_look_up(address: tuple[str, int]) -> None:
    resolved = NameLookup(lambda: pytest.fail("nothing is looked up")).resolve(address)
    assert (
        resolved is not None
        and resolved.address[:2] == address
        and resolved.socket_type == socket.SOCK_STREAM
    )


def test_a_name_is_looked_up_again_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    lookup = NameLookup(names.done.set)
    for number, ip in enumerate(("127.0.0.1", "127.0.0.2"), start=1):
        names.answer = ip
        resolved = names.resolve(lookup)
        assert resolved is not None and resolved.address == (ip, NAME[1]) and names.requests == number


def test_the_error_for_an_unknown_name_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    names.answer = None
    lookup = NameLookup(names.done.set)
    with pytest.raises(OSError, match="not known"):
        names.resolve(lookup)
    names.answer = "127.0.0.1"
    assert names.resolve(lookup) is not None
