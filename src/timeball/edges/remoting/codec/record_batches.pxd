# cython: language_level=3
"""Read the columns of an Arrow record batch in C, directly from the bytes of an IPC message. For the compiled codec.

An encapsulated message is little-endian. Its metadata is a flatbuffer: a `Message` that contains a `RecordBatch`.

    | FF FF FF FF | metadata bytes 4 | metadata | body |

All buffers are checked to be within the message, and of the offsets of a column of texts the last one. The other offsets
are not: only frames of the log with a right checksum come here. The caller leaves unusual messages to pyarrow.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uintptr_t
from libc.string cimport memcpy

from timeball.edges.remoting.codec.c_text cimport Text


cdef enum:
    BATCH_TYPE = 3  # type number of a message with a record batch
    HEADER_TYPE = 1  # field numbers of Message
    HEADER = 2
    LENGTH = 0  # field numbers of RecordBatch
    NODES = 1
    BUFFERS = 2
    COMPRESSION = 3
    TEXT_WIDTH = 0


cdef struct Column:
    const uint8_t* valid  # validity bitmap. NULL: no value is missing
    const char* values  # numbers, or the end offsets of texts
    const char* data  # bytes of texts
    Py_ssize_t offset


cdef inline bint is_missing(Column* of, Py_ssize_t row) noexcept:
    row += of.offset
    return of.valid != NULL and not of.valid[row >> 3] >> (row & 7) & 1


cdef inline int64_t number64(Column* of, Py_ssize_t row) noexcept:
    return 0 if is_missing(of, row) else (<const int64_t*> of.values)[row + of.offset]


cdef inline int32_t number32(Column* of, Py_ssize_t row) noexcept:
    return 0 if is_missing(of, row) else (<const int32_t*> of.values)[row + of.offset]


cdef inline Text text(Column* of, Py_ssize_t row) noexcept:
    cdef Text result
    cdef const int32_t* ends = <const int32_t*> of.values + of.offset + row
    result.at, result.size = NULL, 0
    if not is_missing(of, row) and ends[1] > ends[0]:
        result.at, result.size = of.data + ends[0], ends[1] - ends[0]
    return result


# ---- IPC messages ----------------------------------------------------------------------------------------------------


cdef struct Message:
    int64_t rows
    const char* nodes  # per column: number of rows and of nulls, 8 bytes each
    const char* buffers  # per buffer: offset in the body and size, 8 bytes each
    const char* body
    int64_t body_bytes


cdef inline uint32_t number_at(const char* at) noexcept:
    cdef uint32_t result
    memcpy(&result, at, 4)
    return result


cdef inline int64_t long_at(const char* at) noexcept:
    cdef int64_t result
    memcpy(&result, at, 8)
    return result


cdef inline int64_t field_at(const char* metadata, int64_t size, int64_t table, int field) noexcept:
    """Return the position of a field in a flatbuffer table: 0 if it has its default, -1 if the table is invalid."""
    cdef int64_t fields
    cdef uint16_t fields_bytes, position
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
    memcpy(&position, metadata + fields + 4 + 2 * field, 2)
    if position == 0:
        return 0
    return table + position if table + position <= size - 8 else -1


cdef inline const char* vector_at(const char* metadata, int64_t size, int64_t at, int64_t count) noexcept:
    """Return the start of a vector of `count` pairs of 8-byte numbers. NULL if the vector has another length."""
    cdef int64_t vector
    if at <= 0:
        return NULL
    vector = at + number_at(metadata + at)
    if vector > size - 4 or number_at(metadata + vector) != count or vector + 4 + 16 * count > size:
        return NULL
    return metadata + vector + 4


cdef inline bint read_message(const char* at, int64_t size, int64_t columns, int64_t buffers, Message* result) noexcept:
    """Find the record batch of an IPC message. False if it is unusual or has another number of columns or buffers."""
    cdef const char* metadata = at + 8
    cdef int64_t metadata_bytes, message, batch, position
    if size < 16 or number_at(at) != ~<uint32_t> 0:
        return False
    metadata_bytes = <int32_t> number_at(at + 4)
    if not 8 <= metadata_bytes <= size - 8:
        return False
    message = number_at(metadata)
    position = field_at(metadata, metadata_bytes, message, HEADER_TYPE)
    if position <= 0 or metadata[position] != BATCH_TYPE:
        return False
    position = field_at(metadata, metadata_bytes, message, HEADER)
    if position <= 0:
        return False
    batch = position + number_at(metadata + position)
    position = field_at(metadata, metadata_bytes, batch, LENGTH)
    if position <= 0 or field_at(metadata, metadata_bytes, batch, COMPRESSION) != 0:
        return False
    result.rows = long_at(metadata + position)
    result.nodes = vector_at(metadata, metadata_bytes, field_at(metadata, metadata_bytes, batch, NODES), columns)
    result.buffers = vector_at(metadata, metadata_bytes, field_at(metadata, metadata_bytes, batch, BUFFERS), buffers)
    result.body, result.body_bytes = metadata + metadata_bytes, size - 8 - metadata_bytes
    return result.rows > 0 and result.nodes != NULL and result.buffers != NULL


cdef inline const char* buffer_at(Message* message, int buffer, int64_t bytes_min, int64_t* size) noexcept:
    """Return a buffer and its size. NULL if it has fewer than `bytes_min` bytes or is not within the message."""
    cdef int64_t at = long_at(message.buffers + 16 * buffer)
    size[0] = long_at(message.buffers + 16 * buffer + 8)
    if at < 0 or size[0] < bytes_min or size[0] > message.body_bytes or at > message.body_bytes - size[0]:
        return NULL
    # Numbers are read in place, so they must be aligned.
    if <uintptr_t> (message.body + at) & 7:
        return NULL
    return message.body + at


cdef inline bint read_column(Message* message, int column, int buffer, int width, Column* result) noexcept:
    """Find a column whose first buffer is `buffer`: numbers of `width` bytes, or texts. False if it is unusual."""
    cdef int64_t nulls = long_at(message.nodes + 16 * column + 8), size
    result.valid, result.data, result.offset = NULL, NULL, 0
    if long_at(message.nodes + 16 * column) != message.rows or nulls < 0:
        return False
    if nulls:
        result.valid = <const uint8_t*> buffer_at(message, buffer, (message.rows + 7) // 8, &size)
        if result.valid == NULL:
            return False
    if width != TEXT_WIDTH:
        result.values = buffer_at(message, buffer + 1, message.rows * width, &size)
        return result.values != NULL
    result.values = buffer_at(message, buffer + 1, 4 * (message.rows + 1), &size)
    if result.values == NULL:
        return False
    result.data = buffer_at(message, buffer + 2, 0, &size)
    return result.data != NULL and (<const int32_t*> result.values)[message.rows] <= size
