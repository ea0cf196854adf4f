"""Decode the header blocks of requests: in C (hpack_decoder.pyx) if the build had a compiler, otherwise by jh2.

jh2's decoder is the reference, and `--codec python` forces it. It returns a list of all header fields. Timeball needs
only the first value of each name and the total size of the fields. To get these from the list takes as much time as the
decoding. The decoder in C returns them directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# jh2's compiled decoder, or its Python decoder if jh2 was built without a compiler.
from jh2.connection import Decoder, HPACKError, OversizedHeaderListError

from timeball.edges.http2.frames import BrokenRule, Fault
from timeball.model.config import CodecChoice

try:
    from timeball.edges.http2.hpack_decoder import HpackDecoder  # type: ignore[import-not-found]
except ImportError:  # The build had no compiler.
    HpackDecoder = None

FIELD_BYTES = 32  # HTTP/2 adds so many to the name and value of each header, when it counts a header list

Headers = dict[str, str]  # the first value of each name
Fields = list[tuple[str, ...]]  # a name, a value, and perhaps whether it is secret


class HeaderDecoder(Protocol):
    """Decodes the header blocks of one connection, in order, because a block may refer to fields of earlier ones."""

    def decode(self, data: bytes, /) -> tuple[Headers, int]:
        """Return the first value of each name, and the size of all fields in bytes. Raises BrokenRule."""


class Jh2Decoder:
    """The HeaderDecoder of jh2. For a block that decodes to more than `list_bytes_max`, `decode` raises BrokenRule."""

    def __init__(self, list_bytes_max: int) -> None:
        self._decoder = Decoder(list_bytes_max)

    def decode(self, data: bytes) -> tuple[Headers, int]:
        """Decode one block. See HeaderDecoder."""
        try:
            fields: Fields = self._decoder.decode(data, False)
        except OversizedHeaderListError as error:
            raise BrokenRule(Fault.ENHANCE_YOUR_CALM, "headers decompress to too many bytes") from error
        except (HPACKError, UnicodeDecodeError) as error:
            raise BrokenRule(Fault.COMPRESSION_ERROR, f"no header block: {error}") from error
        except BaseException as error:
            # At a block that ends within a field, jh2 panics in Rust. The panic is no Exception, and its class cannot
            # be imported.
            if type(error).__name__ != "PanicException":
                raise
            raise BrokenRule(Fault.COMPRESSION_ERROR, "a header block that ends within a field") from error
        texts = "".join([field[0] + field[1] for field in fields]).encode()
        size_bytes = len(texts) + FIELD_BYTES * len(fields)
        return {field[0]: field[1] for field in reversed(fields)}, size_bytes


def choose_decoder(choice: CodecChoice) -> Callable[[int], HeaderDecoder]:
    """Return the decoder class for this setting. Its argument is `list_bytes_max`."""
    compiled: Callable[[int], HeaderDecoder] | None = HpackDecoder
    return compiled if compiled is not None and choice == "auto" else Jh2Decoder
