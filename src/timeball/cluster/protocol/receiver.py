"""Decoder of the byte stream of one connection into messages."""

from __future__ import annotations

from collections.abc import Iterator

from timeball.cluster.protocol.messages import HEADER, Header, Message, read_header, read_message


class Receiver:
    """Converts the bytes of one connection into messages. It buffers at most one incomplete message."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: Header | None = None  # of the message whose payload has not arrived completely

    def receive(self, data: bytes | memoryview) -> Iterator[Message]:
        """Take bytes from the socket and yield the messages that are complete now. Raises PeerError.

        The caller may overwrite `data` once the iterator is exhausted.
        """
        # The buffer is nearly always empty. Then each payload is copied only once, out of `data`.
        held, place = self._buffer, 0
        if held:
            held += data
        with memoryview(held or data) as view:
            while True:
                if self._header is None:
                    if len(view) - place < HEADER.size:
                        break
                    # Check the header before its payload has arrived: a bad length must not make the buffer grow.
                    self._header = read_header(view[place : place + HEADER.size])
                    place += HEADER.size
                header = self._header
                if len(view) - place < header.length:
                    break
                payload = bytes(view[place : place + header.length])
                place += header.length
                self._header = None
                yield read_message(header, payload)
        if held:
            del held[:place]
        else:
            held += data[place:]
