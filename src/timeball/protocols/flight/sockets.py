"""Two things gRPC's server does not offer: to say that a port is taken, and to let go of a client.

gRPC binds with SO_REUSEPORT, so a second broker on the same port would start without a word and take half of
the connections. And its shutdown waits for every open call, so one idle stream would keep a broker from
stopping. Both are answered by the sockets themselves.
"""

from __future__ import annotations

import errno
import os
import socket

from timeball import descriptors
from timeball.errors import SetupError


def check_free(host: str, port: int) -> None:
    """Raise SetupError if someone listens on this address, or it is not ours; port 0 is always free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SetupError(f"--host {host}: no such address ({error})") from error
    with socket.socket(family, kind, protocol) as probe:
        # Not a listening one, but a connection of the last run in TIME_WAIT, is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise SetupError(f"--port {port} on {host} cannot be used: {error.strerror}") from error


def cut_connections(port: int) -> int:
    """Shut down every TCP connection of this process accepted on `port`; returns how many.

    Works on duplicates, so that a descriptor closed and used again by another thread is not hit.
    """
    cut = 0
    for descriptor in descriptors.in_use():
        try:
            copy = os.dup(descriptor)
        except OSError as error:
            if error.errno == errno.EMFILE:  # there is none for a copy
                cut += _cut(descriptor, port)
            continue  # gone meanwhile
        try:
            cut += _cut(copy, port)
        finally:
            os.close(copy)
    return cut


def _cut(descriptor: int, port: int) -> bool:
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return False  # not a socket
    try:
        listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        inet = connection.family in (socket.AF_INET, socket.AF_INET6)
        if listening or not inet or connection.getsockname()[1] != port:
            return False
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # already disconnected
    finally:
        connection.detach()  # the caller closes it
    return True
