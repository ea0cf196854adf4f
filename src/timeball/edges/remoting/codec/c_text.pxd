# cython: language_level=3
"""Read and write bytes in the compiled codec: JSON strings, numbers, big-endian integers, and a growing buffer."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcmp, memcpy


cdef struct Text:
    const char* at
    Py_ssize_t size


cdef struct Buffer:
    char* data
    Py_ssize_t size
    Py_ssize_t capacity


cdef inline char* more(Buffer* to, Py_ssize_t size) except NULL:
    """Grow the buffer for `size` more bytes if necessary, and return the position of the first of them."""
    if to.data == NULL or to.size + size > to.capacity:
        capacity = max(2 * to.capacity, to.size + size, 512)
        data = <char*> realloc(to.data, capacity)
        if data == NULL:
            raise MemoryError
        to.data, to.capacity = data, capacity
    return to.data + to.size


cdef inline int put(Buffer* to, const char* data, Py_ssize_t size) except -1:
    """Append bytes."""
    memcpy(more(to, size), data, size)
    to.size += size
    return 0


cdef inline int put_number(Buffer* to, int64_t number) except -1:
    """Append a number in decimal."""
    cdef char digits[20]
    cdef int at = 20
    cdef uint64_t left = <uint64_t> number if number >= 0 else -(<uint64_t> number)
    while True:
        at -= 1
        digits[at] = <char> (48 + left % 10)
        left //= 10
        if left == 0:
            break
    if number < 0:
        at -= 1
        digits[at] = c"-"
    return put(to, digits + at, 20 - at)


cdef inline uint32_t read32(const char* at) noexcept:
    return (<uint32_t> <uint8_t> at[0] << 24 | <uint32_t> <uint8_t> at[1] << 16
            | <uint32_t> <uint8_t> at[2] << 8 | <uint8_t> at[3])


cdef inline int64_t read64(const char* at) noexcept:
    return <int64_t> (<uint64_t> read32(at) << 32 | read32(at + 4))


cdef inline void write32(char* at, uint32_t number) noexcept:
    at[0], at[1], at[2], at[3] = <char> (number >> 24), <char> (number >> 16), <char> (number >> 8), <char> number


cdef inline bint same(Text text, const char* data, Py_ssize_t size) noexcept:
    return text.size == size and memcmp(text.at, data, size) == 0


cdef inline bint is_ascii(Text text) noexcept:
    cdef Py_ssize_t at
    for at in range(text.size):
        if <uint8_t> text.at[at] >= 0x80:
            return False
    return True


cdef inline bint read_number(Text text, int64_t least, int64_t most, int64_t* result) noexcept:
    """Read a decimal number from `least` to `most`: no plus sign, no leading zeros, at most 18 digits. Else False."""
    cdef Py_ssize_t at = 1 if text.size and text.at[0] == c"-" else 0
    cdef bint is_negative = at
    cdef int64_t number = 0
    if not 0 < text.size - at <= 18 or (text.at[at] == c"0" and text.size > 1):
        return False
    for at in range(at, text.size):
        if not c"0" <= text.at[at] <= c"9":
            return False
        number = 10 * number + text.at[at] - c"0"
    result[0] = -number if is_negative else number
    return least <= result[0] <= most


# ---- JSON ------------------------------------------------------------------------------------------------------------


cdef inline bint read_plain(const char** p, const char* end, Text* result) noexcept:
    """Read a JSON string of ASCII characters without escapes, and move `p` past it. False for another value."""
    cdef const char* at = p[0]
    if at >= end or at[0] != c'"':
        return False
    at += 1
    result.at = at
    while at < end and 0x20 <= at[0] < 0x7F and at[0] != c'"' and at[0] != c"\\":
        at += 1
    if at >= end or at[0] != c'"':
        return False
    result.size = at - result.at
    p[0] = at + 1
    return True


cdef inline bint read_bare(const char** p, const char* end, Text* result) noexcept:
    """Read an unquoted JSON value: a number without a decimal point, or a word such as `true`. Move `p` past it."""
    result.at = p[0]
    while p[0] < end and (c"0" <= p[0][0] <= c"9" or c"a" <= p[0][0] <= c"z" or p[0][0] == c"-"):
        p[0] += 1
    result.size = p[0] - result.at
    return result.size > 0


cdef inline int hex_digit(char digit) noexcept:
    """Return the value of a hexadecimal digit, -1 for another character."""
    if c"0" <= digit <= c"9":
        return digit - c"0"
    digit |= 0x20
    return digit - c"a" + 10 if c"a" <= digit <= c"f" else -1


cdef inline bint read_text(const char** p, const char* end, char* to, Py_ssize_t* size) noexcept:
    """Read a JSON string into `to`, set `size` to its size in bytes, and move `p` past it.

    `to` must have space for all bytes up to `end`. Only ASCII may be escaped. False for another value.
    """
    cdef const char* at = p[0]
    cdef char* out = to
    cdef int high, low
    if at >= end or at[0] != c'"':
        return False
    at += 1
    while at < end and at[0] != c'"':
        if 0 <= at[0] < 0x20:
            return False
        if at[0] != c"\\":
            out[0] = at[0]
            at += 1
        elif end - at >= 6 and at[1] == c"u" and at[2] == c"0" and at[3] == c"0":
            high, low = hex_digit(at[4]), hex_digit(at[5])
            if not 0 <= high < 8 or low < 0:
                return False
            out[0] = <char> (16 * high + low)
            at += 6
        elif end - at >= 2 and (at[1] == c'"' or at[1] == c"\\" or at[1] == c"/"):
            out[0] = at[1]
            at += 2
        else:
            return False
        out += 1
    if at >= end:
        return False
    p[0] = at + 1
    size[0] = out - to
    return True
