"""The messages in the bytes of one connection."""

from __future__ import annotations

from collections.abc import Iterator

from timeball.cluster.messages import HEADER, Header, Message, read_header, read_message


class Receiver:
    """Turns the bytes of one connection into messages. It holds at most one message that is not whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: Header | None = None  # of the message whose payload is awaited

    def receive(self, data: bytes | memoryview) -> Iterator[Message]:
        """Take bytes as they came, and yield the messages that are whole now; raises PeerError.

        `data` may be overwritten once all were taken.
        """
        # Nearly always nothing is held, and a payload is copied once: out of what the socket has brought.
        held, place = self._buffer, 0
        if held:
            held += data
        with memoryview(held or data) as view:
            while True:
                if self._header is None:
                    if len(view) - place < HEADER.size:
                        break
                    # Checked before its payload is awaited: a length out of bounds must not make this buffer grow.
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
