"""Host names looked up in threads of their own: a name server that is slow must not hold up a commit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Resolved(NamedTuple):
    """The arguments of a socket, and where to connect it."""

    family: int
    kind: int
    number: int
    where: Any


class NameLookup:
    """Belongs to one thread; at most one look-up of an address is on its way, in a daemon thread."""

    def __init__(self, when_done: Callable[[], None]) -> None:
        """Call `when_done`, in another thread, when an answer is there."""
        self._when_done = when_done
        self._answers: dict[tuple[str, int], Resolved | OSError | None] = {}  # None: on its way

    def resolve(self, address: tuple[str, int]) -> Resolved | None:
        """Return where an address is; None while that is looked up: ask again. Raises OSError.

        An answer is given once, and the next question is looked up anew: a name may move to another machine.
        """
        try:
            return _look_up(address, socket.AI_NUMERICHOST)
        except OSError:
            pass  # a name, or nothing
        if address not in self._answers:
            self._answers[address] = None
            threading.Thread(target=self._run, args=(address,), name="name look-up", daemon=True).start()
        answer = self._answers[address]
        if answer is None:
            return None
        del self._answers[address]
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _run(self, address: tuple[str, int]) -> None:
        answer: Resolved | OSError
        try:
            answer = _look_up(address)
        except OSError as error:
            answer = error
        self._answers[address] = answer
        self._when_done()


def _look_up(address: tuple[str, int], flags: int = 0) -> Resolved:
    family, kind, number, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=flags)[0]
    return Resolved(family, kind, number, where)
