"""Look-up of host names in separate threads, because a slow name server must not delay a commit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Resolved(NamedTuple):
    """The arguments for creating a socket, and the address to which it connects."""

    family: int
    kind: int
    number: int
    where: Any


class NameLookup:
    """Looks up host names. Belongs to one thread.

    Each look-up runs in a daemon thread, at most one per address at a time.
    """

    def __init__(self, when_done: Callable[[], None]) -> None:
        """Call `when_done`, in another thread, when a look-up has ended."""
        self._when_done = when_done
        self._answers: dict[tuple[str, int], Resolved | OSError | None] = {}  # None: the look-up runs

    def resolve(self, address: tuple[str, int]) -> Resolved | None:
        """Resolve an address, or return None while the look-up runs: then call again. Raises OSError.

        A result is returned once and then forgotten, because the name may move to another machine.
        """
        try:
            return _look_up(address, socket.AI_NUMERICHOST)
        except OSError:
            pass  # not a numeric address: look the name up
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
