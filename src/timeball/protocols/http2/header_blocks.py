"""The header blocks of requests: read in C (hpack_decoder.pyx) where the build had a compiler, by jh2 otherwise.

jh2's decoder is the reference, which `--codec python` forces. It makes a list of all fields; what is asked for here is
the first value of each name and the size of them all, and to find that in the list costs as much again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# Where jh2's compiled decoder is imported from, or the Python one of a build without it.
from jh2.connection import Decoder, HPACKError, OversizedHeaderListError

from timeball.config import CodecChoice
from timeball.protocols.http2.frames import BrokenRule, Fault

try:
    from timeball.protocols.http2.hpack_decoder import HpackDecoder  # type: ignore[import-not-found]
except ImportError:  # built without a compiler
    HpackDecoder = None

FIELD_BYTES = 32  # of each header beside its name and value, as HTTP/2 counts them

Headers = dict[str, str]  # the first value of each name
Fields = list[tuple[str, ...]]  # a name, a value, and perhaps whether it is secret


class HeaderDecoder(Protocol):
    """The header blocks of one connection, in their order: each may refer to what those before it said."""

    def decode(self, data: bytes, /) -> tuple[Headers, int]:
        """Return the headers, and the size of all fields; raise BrokenRule."""


class Jh2Decoder:
    """The HeaderDecoder of jh2. `list_bytes_max`: a block that unpacks to more ends the connection."""

    def __init__(self, list_bytes_max: int) -> None:
        self._decoder = Decoder(list_bytes_max)

    def decode(self, data: bytes) -> tuple[Headers, int]:
        """See HeaderDecoder."""
        try:
            fields: Fields = self._decoder.decode(data, False)
        except OversizedHeaderListError as error:
            raise BrokenRule(Fault.ENHANCE_YOUR_CALM, "headers unpack to too many bytes") from error
        except (HPACKError, UnicodeDecodeError) as error:
            raise BrokenRule(Fault.COMPRESSION_ERROR, f"no header block: {error}") from error
        except BaseException as error:
            # Rust's panic, at a block that ends within a field, is no Exception, and has no class to import.
            if type(error).__name__ != "PanicException":
                raise
            raise BrokenRule(Fault.COMPRESSION_ERROR, "a header block that ends within a field") from error
        texts = "".join([field[0] + field[1] for field in fields]).encode()
        size_bytes = len(texts) + FIELD_BYTES * len(fields)
        return {field[0]: field[1] for field in reversed(fields)}, size_bytes


def decoder_of(choice: CodecChoice) -> Callable[[int], HeaderDecoder]:
    """Return what makes a decoder with this setting."""
    compiled: Callable[[int], HeaderDecoder] | None = HpackDecoder
    return compiled if compiled is not None and choice == "auto" else Jh2Decoder
