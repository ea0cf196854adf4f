# cython: language_level=3, boundscheck=False, wraparound=False, annotation_typing=False
"""An HPACK decoder (RFC 7541), for the header blocks of requests.

The first bits of each entry of a block tell its kind:

    1             a field of the static or dynamic table, by its index (7 bits)
    01            a field that is inserted into the dynamic table: the index of its name (6 bits) or 0 and the name as
                  text, then the value as text
    0000, 0001    a field that is not inserted, in the same form (index of 4 bits)
    001           a new maximum size of the dynamic table (5 bits), in front of all fields

    text          a bit for Huffman's code, length (7 bits), bytes
    number        the lower bits of its first byte. If they are all ones, bytes with seven further bits each follow

A block is decoded to a dict with the first value of each name, because Timeball uses nothing else. `is_malformed` tells
whether its names break a rule of requests (RFC 9113, 8.2 and 8.3): an uppercase letter, or a pseudo-header that is
unknown, sent twice, or behind another field.

If the build has a C compiler, it compiles this module with the types of hpack_decoder.pxd. Otherwise Python interprets
it, which takes four to ten times as long.
"""

from __future__ import annotations

from timeball.edges.http2.frames import BrokenRule, Fault

TABLE_BYTES_MAX = 4096  # HTTP/2's default. The server asks for no other size
FIELD_BYTES = 32  # bytes that HPACK adds to the size of each field
STATIC = 61  # fields of the static table
CODE_BITS_MIN, CODE_BITS_MAX = 5, 30
EOS = 256

Headers = dict[str, str]  # the first value of each name
PSEUDO_HEADERS = frozenset({":method", ":scheme", ":authority", ":path"})

# RFC 7541, appendix A: the names and values of the static table, with "=" between name and value.
STATIC_FIELDS = (
    ":authority|:method=GET|:method=POST|:path=/|:path=/index.html|:scheme=http|:scheme=https|"
    ":status=200|:status=204|:status=206|:status=304|:status=400|:status=404|:status=500|"
    "accept-charset|accept-encoding=gzip, deflate|accept-language|accept-ranges|accept|"
    "access-control-allow-origin|age|allow|authorization|cache-control|content-disposition|"
    "content-encoding|content-language|content-length|content-location|content-range|content-type|"
    "cookie|date|etag|expect|expires|from|host|if-match|if-modified-since|if-none-match|if-range|"
    "if-unmodified-since|last-modified|link|location|max-forwards|proxy-authenticate|"
    "proxy-authorization|range|referer|refresh|retry-after|server|set-cookie|"
    "strict-transport-security|transfer-encoding|user-agent|vary|via|www-authenticate"
)
# As (name, value, size). The dynamic table has the same form.
STATIC_TABLE = [
    (name, value, len(name) + len(value) + FIELD_BYTES)
    for name, _, value in (each.partition("=") for each in STATIC_FIELDS.split("|"))
]


class HpackDecoder:
    """Decodes the header blocks of one connection, in order, because a block may refer to fields of earlier ones.

    For a block that decodes to more than `list_bytes_max`, `decode` raises BrokenRule.
    """

    def __init__(self, list_bytes_max: int) -> None:
        # The dynamic table, as (name, value, size). The newest field is the last.
        self._table: list[tuple[str, str, int]] = []
        self._table_bytes, self._table_bytes_max, self._list_bytes_max = 0, TABLE_BYTES_MAX, list_bytes_max
        # The block, the next byte to decode, and the block's length.
        self._data, self._at, self._end = b"", 0, 0
        self._text_bytes = 0  # the size of the text that was decoded last
        self.is_malformed = False  # of the block that was decoded last

    def decode(self, data: bytes) -> tuple[Headers, int]:
        """Decode one block. Returns the first value by name, and the size of all fields in bytes. Raises BrokenRule.

        The size of a field is the size of its name and value, plus FIELD_BYTES (RFC 7541, 4.1).
        """
        self._data, self._at, self._end, self.is_malformed = data, 0, len(data), False
        try:
            return self._read_block()
        except UnicodeDecodeError as error:
            raise invalid_block(str(error)) from error
        finally:
            self._data = b""

    def _read_block(self) -> tuple[Headers, int]:
        """Decode the entries of the block in `_data`, as `decode` does. Also raises UnicodeDecodeError."""
        headers: Headers = {}
        total_bytes, has_regular_field = 0, False
        while self._at < self._end:
            first = self._data[self._at]
            if first & 0x80:
                name, value, field_bytes = self._field(self._read_number(7))
            elif first & 0xE0 == 0x20:
                if total_bytes:
                    raise invalid_block("a table size behind a field")
                self._resize(self._read_number(5))
                continue
            else:
                index = self._read_number(6 if first & 0x40 else 4)
                field_bytes = FIELD_BYTES
                if index:
                    name = self._field(index)[0]
                    field_bytes += len(name) if name.isascii() else len(name.encode())
                else:
                    name = self._read_text()
                    field_bytes += self._text_bytes
                    if not name.islower() and name != name.lower():
                        self.is_malformed = True
                value = self._read_text()
                field_bytes += self._text_bytes
                if first & 0x40:
                    self._insert(name, value, field_bytes)
            total_bytes += field_bytes
            if total_bytes > self._list_bytes_max:
                raise BrokenRule(Fault.ENHANCE_YOUR_CALM, "headers decompress to too many bytes")
            if not name or name[0] != ":":
                has_regular_field = True
            elif has_regular_field or name in headers or name not in PSEUDO_HEADERS:
                self.is_malformed = True
            if name not in headers:
                headers[name] = value
        return headers, total_bytes

    def _field(self, index: int) -> tuple[str, str, int]:
        """Find a field by its index, from 1: in the static table up to STATIC, above it in the dynamic table.

        STATIC + 1 is the newest field. Returns (name, value, size). Raises BrokenRule if there is no such field.
        """
        if 0 < index <= STATIC:
            return STATIC_TABLE[index - 1]
        at = len(self._table) + STATIC - index
        if index == 0 or at < 0:
            raise invalid_block("no field has this index")
        return self._table[at]

    def _insert(self, name: str, value: str, field_bytes: int) -> None:
        """Insert a field into the dynamic table. A field larger than the table only empties it (RFC 7541, 4.4)."""
        self._table_bytes += field_bytes
        self._table.append((name, value, field_bytes))
        self._evict()

    def _resize(self, bytes_max: int) -> None:
        """Set the maximum size of the dynamic table. Raises BrokenRule above TABLE_BYTES_MAX."""
        if bytes_max > TABLE_BYTES_MAX:
            raise invalid_block("a table size above the limit")
        self._table_bytes_max = bytes_max
        self._evict()

    def _evict(self) -> None:
        """Remove the oldest fields until the dynamic table has its maximum size."""
        evicted = 0
        while self._table_bytes > self._table_bytes_max:
            self._table_bytes -= self._table[evicted][2]
            evicted += 1
        if evicted:
            del self._table[:evicted]

    def _read_number(self, bits: int) -> int:
        """Decode a number whose prefix is the lower `bits` of the next byte (RFC 7541, 5.1).

        The caller has checked that there is a next byte. Raises BrokenRule if the number does not end in the block, or
        has more than four further bytes.
        """
        prefix_max = (1 << bits) - 1
        value = self._data[self._at] & prefix_max
        self._at += 1
        if value < prefix_max:
            return value
        shift = 0
        while self._at < self._end and shift <= 21:
            byte = self._data[self._at]
            self._at += 1
            value += (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise invalid_block("an integer that does not end")

    def _read_text(self) -> str:
        """Decode a text, and store its decoded size in `_text_bytes`. Raises BrokenRule and UnicodeDecodeError."""
        if self._at >= self._end:
            raise invalid_block("a field that does not end")
        is_huffman = self._data[self._at] & 0x80
        size = self._read_number(7)
        if size > self._end - self._at:
            raise invalid_block("a string that does not end")
        begin = self._at
        self._at += size
        if is_huffman:
            return self._decode_huffman(begin)
        self._text_bytes = size
        return self._data[begin : self._at].decode()

    def _decode_huffman(self, begin: int) -> str:
        """Decode the Huffman-coded text from `begin` to `_at`, and store its decoded size in `_text_bytes`.

        Each half byte is one step of the automaton of `build_automaton`. Raises BrokenRule and UnicodeDecodeError.
        """
        data, following, symbols, emits = self._data, NEXT, SYMBOLS, EMITS  # pointers, if compiled
        buffer = bytearray(8 * (self._at - begin) // CODE_BITS_MIN + 1)
        out, size, state, seen = buffer, 0, 0, 0
        for at in range(begin, self._at):
            byte = data[at]
            step = state << 4 | byte >> 4
            if emits[step]:
                out[size] = symbols[step]
                size += 1
                seen |= emits[step]
            step = following[step] << 4 | byte & 15
            if emits[step]:
                out[size] = symbols[step]
                size += 1
                seen |= emits[step]
            state = following[step]
        if seen & FAILS or not ENDS[state]:
            raise invalid_block("a string with the EOS symbol, or whose last bits are no padding")
        self._text_bytes = size
        return out[:size].decode()


def invalid_block(reason: str) -> BrokenRule:
    """Build the error for a block that breaks the rules of HPACK."""
    return BrokenRule(Fault.COMPRESSION_ERROR, f"no header block: {reason}")


# ---- Huffman's code ------------------------------------------------------------------------------------------
# RFC 7541, appendix B: for each symbol the number of bits of its code, as a letter ("A" is five bits). The code is
# canonical, so the lengths determine all codes.

CODE_LENGTHS = (
    b"ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJBKABA"
    b"BABBBACCBBBABCBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRSVVPORSRU"
    b"VVVWWVTUOQVWWVWTQQVVXWWWPTPQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
EMITTED, FAILS = 1, 2  # FAILS: the symbol is EOS, which no text may contain


def build_automaton() -> tuple[bytes, bytes, bytes, bytes]:
    """Build the automaton that decodes four bits at a time.

    A state is an inner node of the code's tree, 0 its root. Four bits complete one symbol at most, because a code has
    at least five. A step is `state << 4 | bits`. Returns four tables:

        next state    by step
        symbol        by step, if the step completes one
        emits         by step: 0 without a symbol, EMITTED, or FAILS for the symbol EOS
        ends          by state: 1 if a text may end there, which is behind fewer than eight ones (RFC 7541, 5.2)
    """
    children = [[0, 0]]  # for each state, by a bit: the next state, or ~symbol
    code = 0
    for bits in range(CODE_BITS_MIN, CODE_BITS_MAX + 1):
        code <<= 1
        for symbol in range(EOS + 1):
            if CODE_LENGTHS[symbol] - ord("A") + CODE_BITS_MIN != bits:
                continue
            state = 0
            for shift in range(bits - 1, 0, -1):
                bit = code >> shift & 1
                if not children[state][bit]:
                    children[state][bit] = len(children)
                    children.append([0, 0])
                state = children[state][bit]
            children[state][code & 1] = ~symbol
            code += 1
    following, symbols, emits = (bytearray(16 * len(children)) for _ in range(3))
    for step in range(16 * len(children)):
        state = step >> 4
        for shift in (3, 2, 1, 0):
            state = children[state][step >> shift & 1]
            if state < 0:
                symbols[step], emits[step] = ~state & 0xFF, FAILS if ~state == EOS else EMITTED
                state = 0
                if emits[step] == FAILS:
                    break
        following[step] = state
    ends, state = bytearray(len(children)), 0
    for _ in range(8):
        ends[state] = 1
        state = children[state][1]
    return bytes(following), bytes(symbols), bytes(emits), bytes(ends)


NEXT, SYMBOLS, EMITS, ENDS = build_automaton()
