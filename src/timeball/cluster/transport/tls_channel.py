"""TLS without a socket and without I/O: converts between plain and encrypted bytes. connections.py reads and writes.

Both sides present a certificate of the cluster's own authority, so a stranger cannot even send a HELLO.
"""

from __future__ import annotations

import ssl

from timeball.model.errors import PeerError

READ_BYTES = 1 << 20


class TlsChannel:
    """One side of one connection."""

    def __init__(self, context: ssl.SSLContext, host: str | None) -> None:
        """Begin as a client of `host`, or as the server when `host` is None."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )
        self.is_open = False
        self._plain: list[bytes | memoryview] = []  # to be sent when the handshake is done

    def receive(self, data: bytes | memoryview) -> bytes:
        """Decrypt bytes from the socket. Raises PeerError."""
        self._incoming.write(data)
        found = bytearray()
        try:
            self.begin()
            while self.is_open and (part := self._tls.read(READ_BYTES)):
                found += part
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise PeerError(f"TLS: {error.reason or error}") from error
        return bytes(found)

    def begin(self) -> None:
        """Continue the handshake as far as the bytes received so far allow. Raises PeerError."""
        if self.is_open:
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise PeerError(f"TLS: {error.reason or error}") from error
        self.is_open = True
        for part in self._plain:
            self._tls.write(part)
        self._plain.clear()

    def send(self, plain: bytes | memoryview) -> None:
        """Encrypt bytes for sending. Bytes before the end of the handshake are kept until then."""
        if self.is_open:
            self._tls.write(plain)
        else:
            self._plain.append(plain)

    def outgoing(self) -> bytes:
        """Take the encrypted bytes that are to be written to the socket. Empty when there are none."""
        return self._outgoing.read()
