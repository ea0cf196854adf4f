"""Decisions from the bytes of a fuzzer, so that a change of a byte changes one decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Reads decisions from bytes, in their order. After the last byte, each number is 0 and each text is empty."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    @property
    def are_left(self) -> bool:
        """Check whether there are bytes that no decision has used."""
        return self._position < len(self._data)

    def bytes_of(self, size_bytes: int) -> bytes:
        """Take the next bytes, fewer at the end."""
        self._position += size_bytes
        return self._data[self._position - size_bytes : self._position]

    def byte(self) -> int:
        """Take the next byte as a number."""
        return int.from_bytes(self.bytes_of(1), "little")

    def number(self) -> int:
        """Take a signed number of 1 to 8 bytes. The first byte is the size."""
        return int.from_bytes(self.bytes_of(1 + self.byte() % 8), "little", signed=True)

    def pick(self, items: Sequence[T]) -> T:
        """Take one of these items, by the next byte."""
        return items[self.byte() % len(items)]

    def short_bytes(self) -> bytes:
        """Take a string of up to 255 bytes. The first byte is the size."""
        return self.bytes_of(self.byte())

    def text(self) -> str:
        """Take a text of up to 255 bytes of UTF-8."""
        return self.short_bytes().decode(errors="replace")

    def rest(self) -> bytes:
        """Take all bytes that are left."""
        return self.bytes_of(max(0, len(self._data) - self._position))

    def pieces(self, data: bytes) -> list[bytes]:
        """Cut bytes into pieces, whose sizes are the next decisions."""
        pieces = []
        while data and self.are_left:
            size_bytes = 1 + self.byte()
            pieces.append(data[:size_bytes])
            data = data[size_bytes:]
        return [*pieces, data]
