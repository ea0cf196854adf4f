"""Dialing a broker over Flight, with the credentials of the client, and what remains of it after a fork.

gRPC does not survive a fork. In a child of a process that has dialed, calls hang longer than every time limit, even
calls of a client created in the child (also with GRPC_ENABLE_FORK_SUPPORT, tried with pyarrow 26). So in such a child
each call raises an error that states the remedy. A client dials at its first call, so a client that was created but not
used before the fork works in the child.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import pyarrow.flight as flight

from timeball.client.credentials import Credentials, credentials
from timeball.model.errors import RequestError

FORKED = (
    "this process was forked from one that had used columns over Flight, which gRPC does not survive: "
    "make the first call for columns after the fork, or start processes by spawn"
)


class _Process:
    """The connections that this process, or the process that it was forked from, has dialed."""

    def __init__(self) -> None:
        self.dialled: weakref.WeakSet[Any] = weakref.WeakSet()
        # `inherited`: whether the parent process had dialed before the fork
        self.has_dialled = self.inherited = False

    def after_fork(self) -> None:
        """Keep the parent's connections alive in a child process, because freeing them hangs as well."""
        self.inherited = self.has_dialled
        for client in list(self.dialled):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.after_fork)


def check_process() -> None:
    """Raise RequestError in a child of a process that had dialed. Call this before waiting for any lock."""
    if _PROCESS.inherited:
        raise RequestError(FORKED)


def is_inherited() -> bool:
    """Check whether a parent process had dialed before this process was forked from it."""
    return _PROCESS.inherited


def dial(endpoint: str, who: Credentials | None = None, **options: Any) -> Any:
    """Create a FlightClient that sends credentials: `who`, or those of the environment.

    The client connects at its first call. Raises RequestError, and Flight's errors for a malformed address.
    """
    check_process()
    who = credentials() if who is None else who
    if who.access_key:
        options["middleware"] = [_CredentialsFactory(who)]
    if who.tls_roots is not None:
        options["tls_root_certs"] = who.tls_roots
    if who.tls_name:
        options["override_hostname"] = who.tls_name
    _PROCESS.has_dialled = True  # set before dialing, because a fork may happen in between
    client = flight.FlightClient(endpoint.replace("grpc://", "grpc+tcp://", 1), **options)
    _PROCESS.dialled.add(client)
    return client


class _CredentialsFactory(flight.ClientMiddlewareFactory):
    """Adds the credentials to each call."""

    def __init__(self, who: Credentials) -> None:
        super().__init__()
        self._call = _CredentialsMiddleware({"authorization": who.authorization})

    def start_call(self, info: Any) -> flight.ClientMiddleware:
        """Implement flight.ClientMiddlewareFactory."""
        return self._call


class _CredentialsMiddleware(flight.ClientMiddleware):
    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__()
        self._headers = headers

    def sending_headers(self) -> dict[str, str]:
        return self._headers
