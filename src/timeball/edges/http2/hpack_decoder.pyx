# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Header blocks of requests, read in C: HPACK's decoder (RFC 7541), the compiled twin of jh2's in header_blocks.py.

    field    1 index | 01 index or name, value: kept | 0000, 0001 the same: not kept | 001 size of the table
    text     a bit for Huffman's code, length, bytes
    number   the rest of its first byte, or bytes of seven bits each behind it

A block is read whole into a dict of the first value of each name, since nothing else of it is asked for. jh2 reads the
same, but for Huffman's padding, whose bits it does not look at (tests/edges/http2/test_header_blocks.py).
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from timeball.edges.http2.frames import BrokenRule, Fault

cdef extern from "Python.h":
    object PyBytes_FromStringAndSize(const char* data, Py_ssize_t size)
    char* PyBytes_AsString(object data) except NULL
    object PyUnicode_FromStringAndSize(const char* data, Py_ssize_t size)

cdef enum:
    TABLE_BYTES_MAX = 4096  # HTTP/2's default; we ask for no other
    FIELD_BYTES = 32  # of each field beside its name and value
    STATIC = 61
    CODE_BITS_MIN = 5
    CODE_BITS_MAX = 30
    EOS = 256

# RFC 7541, appendix A: the names, and behind "=" a value.
cdef list STATIC_TABLE = [
    (name, value, len(name) + len(value) + FIELD_BYTES)
    for name, _, value in (each.partition("=") for each in (
        ":authority|:method=GET|:method=POST|:path=/|:path=/index.html|:scheme=http|:scheme=https|"
        ":status=200|:status=204|:status=206|:status=304|:status=400|:status=404|:status=500|"
        "accept-charset|accept-encoding=gzip, deflate|accept-language|accept-ranges|accept|"
        "access-control-allow-origin|age|allow|authorization|cache-control|content-disposition|"
        "content-encoding|content-language|content-length|content-location|content-range|content-type|"
        "cookie|date|etag|expect|expires|from|host|if-match|if-modified-since|if-none-match|if-range|"
        "if-unmodified-since|last-modified|link|location|max-forwards|proxy-authenticate|"
        "proxy-authorization|range|referer|refresh|retry-after|server|set-cookie|"
        "strict-transport-security|transfer-encoding|user-agent|vary|via|www-authenticate"
    ).split("|"))
]
# Appendix B, whose codes are canonical: of each symbol how many bits its code has, "A" for five.
cdef bytes CODE_LENGTHS = (
    b"ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJBKABA"
    b"BABBBACCBBBABCBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRSVVPORSRU"
    b"VVVWWVTUOQVWWVWTQQVVXWWWPTPQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
cdef uint32_t first_code[CODE_BITS_MAX + 1]
cdef int first_symbol[CODE_BITS_MAX + 1]  # of this length, in `symbols`
cdef int codes[CODE_BITS_MAX + 1]  # how many have this length
cdef int symbols[EOS + 1]


cdef int number_codes() except -1:
    """Give the codes out: in the order of their lengths, and of their symbols."""
    cdef uint32_t code = 0
    cdef int bits, symbol, at = 0
    cdef const char* lengths = PyBytes_AsString(CODE_LENGTHS)
    assert len(CODE_LENGTHS) == EOS + 1 and len(STATIC_TABLE) == STATIC
    memset(codes, 0, sizeof(codes))
    for bits in range(CODE_BITS_MIN, CODE_BITS_MAX + 1):
        code <<= 1
        first_code[bits], first_symbol[bits] = code, at
        for symbol in range(EOS + 1):
            if lengths[symbol] - c"A" + CODE_BITS_MIN == bits:
                symbols[at] = symbol
                at += 1
                codes[bits] += 1
                code += 1
    return 0


number_codes()


cdef struct Block:
    const uint8_t* at
    const uint8_t* end


cdef class HpackDecoder:
    """The HeaderDecoder in C. `list_bytes_max`: a block that unpacks to more ends the connection."""

    cdef list table  # of (name, value, bytes); the newest is the last
    cdef Py_ssize_t table_bytes, table_bytes_max, list_bytes_max

    def __init__(self, Py_ssize_t list_bytes_max):
        self.table, self.table_bytes, self.table_bytes_max = [], 0, TABLE_BYTES_MAX
        self.list_bytes_max = list_bytes_max

    def decode(self, bytes data not None):
        """Return the first value of each name, and the size of all fields; raise BrokenRule."""
        try:
            return self.read(data)
        except UnicodeDecodeError as error:
            raise no_block(str(error)) from error

    cdef tuple read(self, bytes data):
        cdef Block block
        cdef dict headers = {}
        cdef Py_ssize_t total_bytes = 0, field_bytes
        cdef uint8_t first
        cdef uint32_t index
        cdef tuple field
        block.at = <const uint8_t*> PyBytes_AsString(data)
        block.end = block.at + len(data)
        while block.at < block.end:
            first = block.at[0]
            if first & 0x80:
                field = self.field(number(&block, 7))
                name, value = field[0], field[1]
                field_bytes = field[2]
            elif first & 0xE0 == 0x20:
                self.resize(number(&block, 5))
                continue
            else:
                index = number(&block, 6 if first & 0x40 else 4)
                field_bytes = FIELD_BYTES
                if index:
                    name = self.field(index)[0]
                    field_bytes += len(name) if name.isascii() else len(name.encode())
                else:
                    name = text(&block, &field_bytes)
                value = text(&block, &field_bytes)
                if first & 0x40:
                    self.keep(name, value, field_bytes)
            total_bytes += field_bytes
            if total_bytes > self.list_bytes_max:
                raise BrokenRule(Fault.ENHANCE_YOUR_CALM, "headers unpack to too many bytes")
            if name not in headers:
                headers[name] = value
        return headers, total_bytes

    cdef tuple field(self, uint32_t index):
        """Return a field of one of the two tables."""
        cdef Py_ssize_t behind
        if 0 < index <= STATIC:
            return <tuple> STATIC_TABLE[index - 1]
        behind = <Py_ssize_t> index - STATIC
        if not 0 < behind <= len(self.table):
            raise no_block("no field has this number")
        return <tuple> self.table[len(self.table) - behind]

    cdef int keep(self, object name, object value, Py_ssize_t field_bytes) except -1:
        """Keep a field as the newest; one that is too large for the table empties it."""
        self.table_bytes += field_bytes
        self.table.append((name, value, field_bytes))
        return self.shrink()

    cdef int resize(self, uint32_t bytes_max) except -1:
        if bytes_max > TABLE_BYTES_MAX:
            raise no_block("a table of more bytes than it may have")
        self.table_bytes_max = bytes_max
        return self.shrink()

    cdef int shrink(self) except -1:
        cdef Py_ssize_t gone = 0
        while self.table_bytes > self.table_bytes_max:
            self.table_bytes -= <Py_ssize_t> (<tuple> self.table[gone])[2]
            gone += 1
        if gone:
            del self.table[:gone]
        return 0


cdef object no_block(str reason):
    return BrokenRule(Fault.COMPRESSION_ERROR, f"no header block: {reason}")


cdef uint32_t number(Block* block, int bits) except? 0xFFFFFFFF:
    """Read a number whose first bits share a byte, which is there."""
    cdef uint32_t most = (1 << bits) - 1
    cdef uint64_t found = block.at[0] & most
    cdef int shift = 0
    cdef uint8_t byte
    block.at += 1
    if found < most:
        return <uint32_t> found
    while block.at < block.end and shift <= 21:
        byte = block.at[0]
        block.at += 1
        found += <uint64_t> (byte & 0x7F) << shift
        if byte < 0x80:
            return <uint32_t> found
        shift += 7
    raise no_block("a number that does not end")


cdef object text(Block* block, Py_ssize_t* size_bytes):
    """Read a text, and add its bytes."""
    cdef bint is_packed
    cdef Py_ssize_t size
    cdef const uint8_t* begin
    if block.at >= block.end:
        raise no_block("a field that does not end")
    is_packed = block.at[0] & 0x80
    size = number(block, 7)
    if size > block.end - block.at:
        raise no_block("a text that does not end")
    begin = block.at
    block.at += size
    if is_packed:
        return unpacked(begin, size, size_bytes)
    size_bytes[0] += size
    return PyUnicode_FromStringAndSize(<const char*> begin, size)


cdef object unpacked(const uint8_t* data, Py_ssize_t size, Py_ssize_t* size_bytes):
    """Read a text in Huffman's code."""
    cdef object held = PyBytes_FromStringAndSize(NULL, 8 * size // CODE_BITS_MIN + 1)
    cdef char* begin = PyBytes_AsString(held)
    cdef char* out = begin
    cdef uint64_t window = 0
    cdef int held_bits = 0, bits, symbol
    cdef uint32_t code = 0
    cdef Py_ssize_t at = 0
    while True:
        while held_bits <= 32 and at < size:
            window = window << 8 | data[at]
            held_bits += 8
            at += 1
        for bits in range(CODE_BITS_MIN, min(held_bits, <int> CODE_BITS_MAX) + 1):
            code = <uint32_t> (window >> (held_bits - bits)) & ((<uint32_t> 1 << bits) - 1)
            # Canonical: what begins a longer code is greater than all codes of this length.
            if code - first_code[bits] < <uint32_t> codes[bits]:
                break
        else:
            break
        symbol = symbols[first_symbol[bits] + <int> (code - first_code[bits])]
        if symbol == EOS:
            raise no_block("a text that ends within itself")
        out[0] = <char> symbol
        out += 1
        held_bits -= bits
    # What is left begins a code: all ones, and less than a byte.
    if held_bits > 7 or (window & ((1 << held_bits) - 1)) != <uint64_t> ((1 << held_bits) - 1):
        raise no_block("a text whose end is no padding")
    size_bytes[0] += out - begin
    return PyUnicode_FromStringAndSize(begin, out - begin)
