# cython: language_level=3
"""Columns of an Arrow record batch as the compiled codec reads them, and where they stand in an IPC message.

An encapsulated message, little-endian; the metadata is a flatbuffer, `Message` with a `RecordBatch` in it:

    | FF FF FF FF | metadata bytes 4 | metadata | body |

Each place is checked to lie within the message. Anything unusual is left to pyarrow.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uintptr_t
from libc.string cimport memcpy

from timeball.edges.remoting.codec.c_text cimport Text


cdef enum:
    BATCH_TYPE = 3  # of a message whose header is a record batch
    HEADER_TYPE = 1  # numbers of the fields in a Message
    HEADER = 2
    LENGTH = 0  # and in a RecordBatch
    NODES = 1
    BUFFERS = 2
    COMPRESSION = 3
    TEXT_WIDTH = 0


cdef struct Column:
    const uint8_t* valid  # NULL: no value is missing
    const char* values  # numbers, or where texts end
    const char* data  # of texts
    Py_ssize_t offset


cdef inline bint is_missing(Column* of, Py_ssize_t row) noexcept:
    row += of.offset
    return of.valid != NULL and not of.valid[row >> 3] >> (row & 7) & 1


cdef inline int64_t number64(Column* of, Py_ssize_t row) noexcept:
    return 0 if is_missing(of, row) else (<const int64_t*> of.values)[row + of.offset]


cdef inline int32_t number32(Column* of, Py_ssize_t row) noexcept:
    return 0 if is_missing(of, row) else (<const int32_t*> of.values)[row + of.offset]


cdef inline Text text(Column* of, Py_ssize_t row) noexcept:
    cdef Text found
    cdef const int32_t* ends = <const int32_t*> of.values + of.offset + row
    found.at, found.size = NULL, 0
    if not is_missing(of, row) and ends[1] > ends[0]:
        found.at, found.size = of.data + ends[0], ends[1] - ends[0]
    return found


# ---- IPC messages ----------------------------------------------------------------------------------------------------


cdef struct Message:
    int64_t rows
    const char* nodes  # of each column: rows and nulls, 8 bytes each
    const char* buffers  # place in the body and size, 8 bytes each
    const char* body
    int64_t body_bytes


cdef inline uint32_t number_at(const char* at) noexcept:
    cdef uint32_t found
    memcpy(&found, at, 4)
    return found


cdef inline int64_t long_at(const char* at) noexcept:
    cdef int64_t found
    memcpy(&found, at, 8)
    return found


cdef inline int64_t field_at(const char* metadata, int64_t size, int64_t table, int field) noexcept:
    """Return where a field of a flatbuffer's table stands; 0 when it has its default, -1 for what is no table."""
    cdef int64_t fields
    cdef uint16_t fields_bytes, place
    if not 0 <= table <= size - 4:
        return -1
    fields = table - <int32_t> number_at(metadata + table)
    if not 0 <= fields <= size - 4:
        return -1
    memcpy(&fields_bytes, metadata + fields, 2)
    if fields + fields_bytes > size:
        return -1
    if 6 + 2 * field > fields_bytes:
        return 0
    memcpy(&place, metadata + fields + 4 + 2 * field, 2)
    if place == 0:
        return 0
    return table + place if table + place <= size - 8 else -1


cdef inline const char* vector_at(const char* metadata, int64_t size, int64_t at, int64_t count) noexcept:
    """Return the first of `count` pairs of numbers of 8 bytes; NULL when the vector is another one."""
    cdef int64_t vector
    if at <= 0:
        return NULL
    vector = at + number_at(metadata + at)
    if vector > size - 4 or number_at(metadata + vector) != count or vector + 4 + 16 * count > size:
        return NULL
    return metadata + vector + 4


cdef inline bint read_message(const char* at, int64_t size, int64_t columns, int64_t buffers, Message* found) noexcept:
    """Find a record batch of so many columns and buffers in an IPC message; False for an unusual one."""
    cdef const char* metadata = at + 8
    cdef int64_t metadata_bytes, message, batch, place
    if size < 16 or number_at(at) != ~<uint32_t> 0:
        return False
    metadata_bytes = <int32_t> number_at(at + 4)
    if not 8 <= metadata_bytes <= size - 8:
        return False
    message = number_at(metadata)
    place = field_at(metadata, metadata_bytes, message, HEADER_TYPE)
    if place <= 0 or metadata[place] != BATCH_TYPE:
        return False
    place = field_at(metadata, metadata_bytes, message, HEADER)
    if place <= 0:
        return False
    batch = place + number_at(metadata + place)
    place = field_at(metadata, metadata_bytes, batch, LENGTH)
    if place <= 0 or field_at(metadata, metadata_bytes, batch, COMPRESSION) != 0:
        return False
    found.rows = long_at(metadata + place)
    found.nodes = vector_at(metadata, metadata_bytes, field_at(metadata, metadata_bytes, batch, NODES), columns)
    found.buffers = vector_at(metadata, metadata_bytes, field_at(metadata, metadata_bytes, batch, BUFFERS), buffers)
    found.body, found.body_bytes = metadata + metadata_bytes, size - 8 - metadata_bytes
    return found.rows > 0 and found.nodes != NULL and found.buffers != NULL


cdef inline const char* buffer_at(Message* message, int buffer, int64_t bytes_min, int64_t* size) noexcept:
    """Return a buffer of at least so many bytes, with its size; NULL when there is none."""
    cdef int64_t at = long_at(message.buffers + 16 * buffer)
    size[0] = long_at(message.buffers + 16 * buffer + 8)
    if at < 0 or size[0] < bytes_min or size[0] > message.body_bytes or at > message.body_bytes - size[0]:
        return NULL
    # Numbers are read where they are: at their own boundaries.
    if <uintptr_t> (message.body + at) & 7:
        return NULL
    return message.body + at


cdef inline bint read_column(Message* message, int column, int buffer, int width, Column* found) noexcept:
    """Find a column whose first buffer is `buffer`: numbers of `width` bytes, or texts; False for an unusual one."""
    cdef int64_t nulls = long_at(message.nodes + 16 * column + 8), size
    found.valid, found.data, found.offset = NULL, NULL, 0
    if long_at(message.nodes + 16 * column) != message.rows or nulls < 0:
        return False
    if nulls:
        found.valid = <const uint8_t*> buffer_at(message, buffer, (message.rows + 7) // 8, &size)
        if found.valid == NULL:
            return False
    if width != TEXT_WIDTH:
        found.values = buffer_at(message, buffer + 1, message.rows * width, &size)
        return found.values != NULL
    found.values = buffer_at(message, buffer + 1, 4 * (message.rows + 1), &size)
    if found.values == NULL:
        return False
    found.data = buffer_at(message, buffer + 2, 0, &size)
    return found.data != NULL and (<const int32_t*> found.values)[message.rows] <= size
