"""Names are looked up in another thread. Each question gets its answer once."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from tests.bounds import BOUND_S

from timeball.cluster.transport.connections import NameLookup, Resolved

NAME = ("some.test", 7410)


class Names:
    """A name server that answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.answer: str | None = "127.0.0.1"  # None: there is no such name
        self.done = threading.Event()
        self._known = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._get)

    def _get(self, host: str, *args: Any, **options: Any) -> Any:
        if host == NAME[0] and not options.get("flags"):
            self.asked += 1
            if self.answer is None:
                raise socket.gaierror(socket.EAI_NONAME, "not known")
            host = self.answer
        return self._known(host, *args, **options)

    def resolved(self, lookup: NameLookup) -> Resolved | None:
        """Ask, and once more when the answer is there."""
        self.done.clear()
        found = lookup.resolve(NAME)
        if found is None:
            assert self.done.wait(BOUND_S)
            found = lookup.resolve(NAME)
        return found


@pytest.mark.parametrize("address", [("127.0.0.1", 7410), ("::1", 7410)])
def test_a_numeric_address_needs_no_look_up(address: tuple[str, int]) -> None:
    found = NameLookup(lambda: pytest.fail("nothing was asked")).resolve(address)
    assert found is not None and found.address[:2] == address and found.socket_type == socket.SOCK_STREAM


def test_a_name_is_looked_up_anew_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    lookup = NameLookup(names.done.set)
    for number, there in enumerate(("127.0.0.1", "127.0.0.2"), start=1):
        names.answer = there
        found = names.resolved(lookup)
        assert found is not None and found.address == (there, NAME[1]) and names.asked == number


def test_the_error_for_an_unknown_name_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    names.answer = None
    lookup = NameLookup(names.done.set)
    with pytest.raises(OSError, match="not known"):
        names.resolved(lookup)
    names.answer = "127.0.0.1"
    assert names.resolved(lookup) is not None
