# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""An HPACK decoder (RFC 7541) in C, for the header blocks of requests: the compiled twin of connection.Jh2Decoder.

    field    1 index | 01 index or name, value: kept | 0000, 0001 the same: not kept | 001 size of the table
    text     a bit for Huffman's code, length, bytes
    number   the rest of its first byte, or bytes of seven bits each behind it

"Kept" fields are inserted into the dynamic table. A block is decoded to a dict with the first value of each name,
because Timeball uses nothing else. Both decoders give the same result, with one exception: jh2 does not check the
padding bits behind a Huffman code (tests/edges/http2/test_header_blocks.py).
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from timeball.edges.http2.frames import BrokenRule, Fault

cdef extern from "Python.h":
    object PyBytes_FromStringAndSize(const char* data, Py_ssize_t size)
    char* PyBytes_AsString(object data) except NULL
    object PyUnicode_FromStringAndSize(const char* data, Py_ssize_t size)

cdef enum:
    TABLE_BYTES_MAX = 4096  # HTTP/2's default. The server asks for no other size
    FIELD_BYTES = 32  # HPACK adds so many to the size of each field
    STATIC = 61  # fields of the static table
    CODE_BITS_MIN = 5
    CODE_BITS_MAX = 30
    EOS = 256

# RFC 7541, appendix A: the static table as (name, value, size). "=" separates a name from its value in the text.
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
# RFC 7541, appendix B: for each symbol the number of bits of its Huffman code, as a letter ("A" is five bits). The code
# is canonical, so the lengths determine all codes.
cdef bytes CODE_LENGTHS = (
    b"ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJBKABA"
    b"BABBBACCBBBABCBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRSVVPORSRU"
    b"VVVWWVTUOQVWWVWTQQVVXWWWPTPQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
# The first three arrays are indexed by the number of bits of a code.
cdef uint32_t first_code[CODE_BITS_MAX + 1]
cdef int first_symbol[CODE_BITS_MAX + 1]  # the index in `symbols` of the symbol with the first code
cdef int code_counts[CODE_BITS_MAX + 1]
cdef int symbols[EOS + 1]  # ordered by code


cdef int assign_codes() except -1:
    """Assign the canonical codes, in the order of their lengths, and within a length in the order of their symbols."""
    cdef uint32_t code = 0
    cdef int bits, symbol, index = 0
    cdef const char* lengths = PyBytes_AsString(CODE_LENGTHS)
    assert len(CODE_LENGTHS) == EOS + 1 and len(STATIC_TABLE) == STATIC
    memset(code_counts, 0, sizeof(code_counts))
    for bits in range(CODE_BITS_MIN, CODE_BITS_MAX + 1):
        code <<= 1
        first_code[bits], first_symbol[bits] = code, index
        for symbol in range(EOS + 1):
            if lengths[symbol] - c"A" + CODE_BITS_MIN == bits:
                symbols[index] = symbol
                index += 1
                code_counts[bits] += 1
                code += 1
    return 0


assign_codes()


cdef struct Block:
    const uint8_t* at  # the next byte to decode
    const uint8_t* end


cdef class HpackDecoder:
    """The HeaderDecoder in C. For a block that decodes to more than `list_bytes_max`, `decode` raises BrokenRule."""

    cdef list table  # the dynamic table, as (name, value, size). The newest field is the last
    cdef Py_ssize_t table_bytes, table_bytes_max, list_bytes_max

    def __init__(self, Py_ssize_t list_bytes_max):
        self.table, self.table_bytes, self.table_bytes_max = [], 0, TABLE_BYTES_MAX
        self.list_bytes_max = list_bytes_max

    def decode(self, bytes data not None):
        """Return the first value of each name, and the size of all fields in bytes. Raises BrokenRule."""
        try:
            return self.read_block(data)
        except UnicodeDecodeError as error:
            raise invalid_block(str(error)) from error

    cdef tuple read_block(self, bytes data):
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
                field = self.field(read_integer(&block, 7))
                name, value = field[0], field[1]
                field_bytes = field[2]
            elif first & 0xE0 == 0x20:
                self.resize(read_integer(&block, 5))
                continue
            else:
                index = read_integer(&block, 6 if first & 0x40 else 4)
                field_bytes = FIELD_BYTES
                if index:
                    name = self.field(index)[0]
                    field_bytes += len(name) if name.isascii() else len(name.encode())
                else:
                    name = read_string(&block, &field_bytes)
                value = read_string(&block, &field_bytes)
                if first & 0x40:
                    self.insert(name, value, field_bytes)
            total_bytes += field_bytes
            if total_bytes > self.list_bytes_max:
                raise BrokenRule(Fault.ENHANCE_YOUR_CALM, "headers decompress to too many bytes")
            if name not in headers:
                headers[name] = value
        return headers, total_bytes

    cdef tuple field(self, uint32_t index):
        """Find a field by its index: in the static table up to STATIC, above it in the dynamic table."""
        cdef Py_ssize_t dynamic_index  # 1 is the newest field
        if 0 < index <= STATIC:
            return <tuple> STATIC_TABLE[index - 1]
        dynamic_index = <Py_ssize_t> index - STATIC
        if not 0 < dynamic_index <= len(self.table):
            raise invalid_block("no field has this index")
        return <tuple> self.table[len(self.table) - dynamic_index]

    cdef int insert(self, object name, object value, Py_ssize_t field_bytes) except -1:
        """Insert a field into the dynamic table. A field larger than the table only empties it (RFC 7541, 4.4)."""
        self.table_bytes += field_bytes
        self.table.append((name, value, field_bytes))
        return self.evict()

    cdef int resize(self, uint32_t bytes_max) except -1:
        if bytes_max > TABLE_BYTES_MAX:
            raise invalid_block("a table size above the limit")
        self.table_bytes_max = bytes_max
        return self.evict()

    cdef int evict(self) except -1:
        """Remove the oldest fields until the dynamic table has its maximum size."""
        cdef Py_ssize_t evicted = 0
        while self.table_bytes > self.table_bytes_max:
            self.table_bytes -= <Py_ssize_t> (<tuple> self.table[evicted])[2]
            evicted += 1
        if evicted:
            del self.table[:evicted]
        return 0


cdef object invalid_block(str reason):
    return BrokenRule(Fault.COMPRESSION_ERROR, f"no header block: {reason}")


cdef uint32_t read_integer(Block* block, int bits) except? 0xFFFFFFFF:
    """Decode an integer whose prefix is the lower `bits` of the next byte (RFC 7541, 5.1). The caller has checked that
    there is a next byte.
    """
    cdef uint32_t prefix_max = (1 << bits) - 1
    cdef uint64_t value = block.at[0] & prefix_max
    cdef int shift = 0
    cdef uint8_t byte
    block.at += 1
    if value < prefix_max:
        return <uint32_t> value
    while block.at < block.end and shift <= 21:
        byte = block.at[0]
        block.at += 1
        value += <uint64_t> (byte & 0x7F) << shift
        if byte < 0x80:
            return <uint32_t> value
        shift += 7
    raise invalid_block("an integer that does not end")


cdef object read_string(Block* block, Py_ssize_t* size_bytes):
    """Decode a string, and add its decoded size to `size_bytes`."""
    cdef bint is_huffman
    cdef Py_ssize_t size
    cdef const uint8_t* begin
    if block.at >= block.end:
        raise invalid_block("a field that does not end")
    is_huffman = block.at[0] & 0x80
    size = read_integer(block, 7)
    if size > block.end - block.at:
        raise invalid_block("a string that does not end")
    begin = block.at
    block.at += size
    if is_huffman:
        return decode_huffman(begin, size, size_bytes)
    size_bytes[0] += size
    return PyUnicode_FromStringAndSize(<const char*> begin, size)


cdef object decode_huffman(const uint8_t* data, Py_ssize_t size, Py_ssize_t* size_bytes):
    """Decode a Huffman-coded string, and add its decoded size to `size_bytes`."""
    cdef object buffer = PyBytes_FromStringAndSize(NULL, 8 * size // CODE_BITS_MIN + 1)
    cdef char* begin = PyBytes_AsString(buffer)
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
            # In a canonical code, the first bits of a longer code are greater than all codes of this length.
            if code - first_code[bits] < <uint32_t> code_counts[bits]:
                break
        else:
            break
        symbol = symbols[first_symbol[bits] + <int> (code - first_code[bits])]
        if symbol == EOS:
            raise invalid_block("a string that contains the EOS symbol")
        out[0] = <char> symbol
        out += 1
        held_bits -= bits
    # The rest must be padding: less than a byte, and all ones (RFC 7541, 5.2).
    if held_bits > 7 or (window & ((1 << held_bits) - 1)) != <uint64_t> ((1 << held_bits) - 1):
        raise invalid_block("a string whose last bits are no padding")
    size_bytes[0] += out - begin
    return PyUnicode_FromStringAndSize(begin, out - begin)
