"""Dialing a broker: its address, the certificates to trust, and the credentials to send.

Credentials come from the caller or from the environment. So a secret need not be part of a command line, which other
users can see, or of a Spark job's options. The client sends them with each call. No repr and no error contains them.

    TIMEBALL_ACCESS_KEY, TIMEBALL_SECRET_KEY    for a broker with an access file; set both or none
    TIMEBALL_TLS_ROOTS                          a PEM file of the certificates to trust, for a broker at grpc+tls://
    TIMEBALL_TLS_NAME                           the name in the broker's certificate, when it is dialed by another name

gRPC does not survive a fork. In a child of a process that has dialed, calls hang longer than every time limit, even
calls of a client created in the child (also with GRPC_ENABLE_FORK_SUPPORT, tried with pyarrow 26). So in such a child
each call raises an error that states the remedy. A client dials at its first call, so a client that was created but not
used before the fork works in the child.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.flight as flight

from timeball.model.errors import RequestError

ACCESS_KEY, SECRET_KEY = "TIMEBALL_ACCESS_KEY", "TIMEBALL_SECRET_KEY"
TLS_ROOTS, TLS_NAME = "TIMEBALL_TLS_ROOTS", "TIMEBALL_TLS_NAME"


FORKED = (
    "this process was forked from one that had used a Timeball client, which gRPC does not survive: "
    "make the first call after the fork, or start processes by spawn"
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


class Credentials(NamedTuple):
    """The client's keys and the certificates it trusts. Empty values are not sent."""

    access_key: str = ""
    secret_key: str = ""
    tls_roots: bytes | None = None
    tls_name: str = ""

    def __repr__(self) -> str:
        return f"Credentials(access_key={self.access_key!r}, …)"


def credentials(
    access_key: str | None = None, secret_key: str | None = None, tls_roots: bytes | None = None
) -> Credentials:
    """Complete credentials from the environment.

    Raises RequestError if only one key is set, a key cannot be sent in a header, or the certificates cannot be read.
    """
    if (access_key is None) != (secret_key is None):
        raise RequestError("access_key and secret_key go together: give both, or none")
    key = os.environ.get(ACCESS_KEY, "") if access_key is None else access_key
    secret = os.environ.get(SECRET_KEY, "") if secret_key is None else secret_key
    if bool(key) != bool(secret):
        present, missing = (ACCESS_KEY, SECRET_KEY) if key else (SECRET_KEY, ACCESS_KEY)
        raise RequestError(f"{present} is set and {missing} is not: set both, or none")
    if not (f"{key}{secret}".isascii() and f"{key}{secret}a".isprintable()):
        raise RequestError("access key or secret: only printable ASCII can be sent")
    path = os.environ.get(TLS_ROOTS, "")
    if tls_roots is None and path:
        try:
            tls_roots = Path(path).read_bytes()
        except OSError as error:
            raise RequestError(f"{TLS_ROOTS}={path}: {error.strerror or error}") from error
    return Credentials(key, secret, tls_roots, os.environ.get(TLS_NAME, ""))


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
        self._call = _CredentialsMiddleware({"authorization": f"Bearer {who.access_key}:{who.secret_key}"})

    def start_call(self, info: Any) -> flight.ClientMiddleware:
        """Implement flight.ClientMiddlewareFactory."""
        return self._call


class _CredentialsMiddleware(flight.ClientMiddleware):
    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__()
        self._headers = headers

    def sending_headers(self) -> dict[str, str]:
        return self._headers
