# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Convert a few rows (tuples of Python values) to the Arrow message of a frame, and back.

row_encoder.py describes the layout.

pyarrow makes the same message in two steps, an array of structs and its serialisation, which costs about thirty times
as much for one row. Values that do not have exactly the type of their column are left to pyarrow, whose error names the
fault.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int8_t, int32_t, int64_t
from libc.string cimport memcpy, memset

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) noexcept
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    void PyErr_Clear() noexcept

cdef inline Py_ssize_t padded(Py_ssize_t size) noexcept nogil:
    return (size + 7) & ~7


cdef class MessageEncoder:
    """Encodes and decodes messages of one schema.

    `head` is everything before the body of a message. `rows_at`, `nodes_at`, `buffers_at` and `body_at` are the byte
    positions in it of the row count, of the columns' row and null counts, of the buffers' positions and sizes, and of
    the body's length. `widths` are the bytes of each column's numbers, or TEXT or BINARY. In messages of at least
    `sharing_rows_min` rows, buffers of zeros overlap (row_encoder.py).
    """

    def __init__(
        self, bytes head, Py_ssize_t rows_at, Py_ssize_t nodes_at, Py_ssize_t buffers_at, Py_ssize_t body_at,
        list widths, Py_ssize_t sharing_rows_min,
    ):
        assert len(widths) <= COLUMNS_MAX
        self.sharing_rows_min = sharing_rows_min
        self.head, self.columns = head, len(widths)
        self.rows_at, self.nodes_at, self.buffers_at, self.body_at = rows_at, nodes_at, buffers_at, body_at
        for at, width in enumerate(widths):
            self.column[at].width = width

    def encode(self, list rows not None):
        """Encode rows as a message. None if a value does not have exactly its column's type, or is out of its range."""
        cdef Py_ssize_t at
        cdef Column* column
        for row in rows:
            if type(row) is not tuple or len(<tuple> row) != self.columns:
                return None
        for at in range(self.columns):
            if not measure(&self.column[at], rows, at):
                return None
        message = self.lay_out(len(rows))
        for at in range(self.columns):
            column = &self.column[at]
            if 0 < column.nulls < len(rows):
                write_validity(column.valid, rows, at)
            if column.width > 0 and column.is_zeros:
                continue  # `lay_out` has filled the message with zeros
            if column.width > 0:
                write_numbers(column.values, rows, at, column.width)
            else:
                write_texts(column.values, column.data, rows, at)
        return message

    def row(self, bytes message not None, Py_ssize_t at, int64_t seq):
        """Read row `at` of a message of this encoder: a tuple of `seq` and a value for each column."""
        cdef Py_ssize_t each
        # The list is made before `open` sets the columns: making it may start the garbage collector, and so let another
        # thread run, which sets the columns to another message.
        cdef list row = [seq]
        self.open(message, at)
        for each in range(self.columns):
            row.append(value_at(&self.column[each], at))
        return tuple(row)

    def number(self, bytes message not None, Py_ssize_t at, Py_ssize_t column):
        """Read the value of row `at` in a column of numbers."""
        assert column < self.columns and self.column[column].width > 0
        self.open(message, at)
        return value_at(&self.column[column], at)

    def text_bytes(self, bytes message not None, Py_ssize_t at, list columns not None):
        """Compute the total bytes of the texts of row `at` in these columns."""
        cdef Py_ssize_t size = 0, column
        cdef int32_t begin
        self.open(message, at)
        for column in columns:
            assert column < self.columns and self.column[column].width <= 0
            size += text_at(&self.column[column], at, &begin)
        return size

    def share(self, message not None):
        """Let the buffers of zeros in a message of pyarrow overlap. See `share_zeros` in row_encoder.py."""
        cdef Py_buffer view
        PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
        try:
            return self.shared(<const char*> view.buf)
        finally:
            PyBuffer_Release(&view)

    cdef bytes shared(self, const char* data):
        """Build a copy of the pyarrow message at `data` in which the buffers of zeros overlap."""
        cdef bint are_zeros[3 * COLUMNS_MAX]
        cdef Py_ssize_t head_bytes = len(self.head), buffers = 0, zeros = 0, done = 0, size, each, at
        cdef const char* old = data + self.buffers_at
        for each in range(self.columns):
            for at in range(2 if self.column[each].width > 0 else 3):
                size = padded(get64(old + 8))
                are_zeros[buffers] = at < 2 and size > 0 and is_zeros(data + head_bytes + get64(old), size)
                if are_zeros[buffers]:
                    zeros = max(zeros, size)
                else:
                    done += size
                buffers += 1
                old += 16
        message = PyBytes_FromStringAndSize(NULL, head_bytes + zeros + done)
        cdef char* out = PyBytes_AsString(message)
        cdef char* buffer = out + self.buffers_at
        old = data + self.buffers_at
        memcpy(out, data, head_bytes)
        put64(out + self.body_at, zeros + done)
        done = zeros
        with nogil:  # a message may have tens of megabytes
            memset(out + head_bytes, 0, zeros)
            for each in range(buffers):
                size = get64(old + 8)
                if not are_zeros[each]:
                    memcpy(out + head_bytes + done, data + head_bytes + get64(old), padded(size))
                buffer = place(buffer, &done, size, are_zeros[each])
                old += 16
        return message

    cdef int open(self, bytes message, Py_ssize_t at) except -1:
        """Set the columns to a message of this encoder. `at` must be one of its rows."""
        cdef char* data = PyBytes_AsString(message)
        cdef char* body = data + len(self.head)
        cdef char* node = data + self.nodes_at
        cdef char* buffer = data + self.buffers_at
        cdef Column* column
        cdef Py_ssize_t each
        assert len(message) > len(self.head) and 0 <= at < get64(data + self.rows_at)
        for each in range(self.columns):
            column = &self.column[each]
            column.valid = body + get64(buffer) if get64(node + 8) else NULL
            column.values = body + get64(buffer + 16)
            node += 16
            buffer += 32
            if column.width <= 0:
                column.data = body + get64(buffer)
                buffer += 16
        return 0

    cdef bytes lay_out(self, Py_ssize_t count):
        """Make a message for `count` rows, filled with zeros, and set the columns to the addresses of their buffers.

        `measure` must have set the null count and the text bytes of each column.
        """
        cdef Py_ssize_t at, head_bytes = len(self.head), body_bytes, zeros = 0, done
        cdef Column* column
        cdef bint shares = count >= self.sharing_rows_min
        for at in range(self.columns):
            column = &self.column[at]
            if column.width <= 0:
                column.is_zeros = column.size == 0
            if shares and column.is_zeros:
                zeros = max(zeros, padded(values_bytes(column, count)))
            elif shares and column.nulls == count:
                zeros = max(zeros, padded(valid_bytes(column, count)))
        body_bytes = done = zeros
        for at in range(self.columns):
            column = &self.column[at]
            if not (shares and column.nulls == count):
                body_bytes += padded(valid_bytes(column, count))
            if not (shares and column.is_zeros):
                body_bytes += padded(values_bytes(column, count))
            if column.width <= 0:
                body_bytes += padded(column.size)
        message = PyBytes_FromStringAndSize(NULL, head_bytes + body_bytes)
        cdef char* out = PyBytes_AsString(message)
        cdef char* node = out + self.nodes_at
        cdef char* buffer = out + self.buffers_at
        cdef char* body = out + head_bytes
        memcpy(out, PyBytes_AsString(self.head), head_bytes)
        memset(body, 0, body_bytes)
        put64(out + self.rows_at, count)
        put64(out + self.body_at, body_bytes)
        for at in range(self.columns):
            column = &self.column[at]
            put64(node, count)
            put64(node + 8, column.nulls)
            node += 16
            column.valid = body + done if column.nulls else NULL
            buffer = place(buffer, &done, valid_bytes(column, count), shares and column.nulls == count)
            column.values = body if shares and column.is_zeros else body + done
            buffer = place(buffer, &done, values_bytes(column, count), shares and column.is_zeros)
            if column.width <= 0:
                column.data = body + done
                buffer = place(buffer, &done, column.size, False)
        return message


cdef bint is_zeros(const char* data, Py_ssize_t size) noexcept:
    """Check whether all bytes are 0. `size` is a multiple of 8."""
    cdef Py_ssize_t at
    for at in range(0, size, 8):
        if get64(data + at):
            return False
    return True


cdef inline void put64(char* to, int64_t number) noexcept nogil:
    memcpy(to, &number, 8)  # Arrow is little-endian, as the machines are that pyarrow is built for


cdef inline int64_t get64(const char* at) noexcept nogil:
    cdef int64_t number
    memcpy(&number, at, 8)
    return number


cdef inline int32_t text_at(Column* column, Py_ssize_t at, int32_t* begin) noexcept:
    """Return the length of a text, and set `begin` to its position in the column's data."""
    cdef int32_t end
    memcpy(begin, column.values + 4 * at, 4)
    memcpy(&end, column.values + 4 * (at + 1), 4)
    return end - begin[0]


cdef object value_at(Column* column, Py_ssize_t at):
    """Read the value of row `at` in a column that `open` has set. None if it is null."""
    cdef int64_t number
    cdef int32_t number32, begin, size
    if column.valid != NULL and not (column.valid[at >> 3] >> (at & 7)) & 1:
        return None
    if column.width == 8:
        return get64(column.values + 8 * at)
    if column.width == 4:
        memcpy(&number32, column.values + 4 * at, 4)
        return number32
    if column.width == 1:
        return <int8_t> column.values[at]
    size = text_at(column, at, &begin)
    if column.width == TEXT:
        return PyUnicode_DecodeUTF8(column.data + begin, size, NULL)
    return PyBytes_FromStringAndSize(column.data + begin, size)


cdef inline Py_ssize_t valid_bytes(Column* column, Py_ssize_t count) noexcept:
    """Return the bytes of a column's validity bitmap for `count` rows, without padding. 0 if no row is null."""
    return (count + 7) // 8 if column.nulls else 0


cdef inline Py_ssize_t values_bytes(Column* column, Py_ssize_t count) noexcept:
    """Return the bytes of a column's numbers, or of its text offsets, for `count` rows, without padding."""
    return column.width * count if column.width > 0 else 4 * (count + 1)


cdef inline char* place(char* buffer, Py_ssize_t* done, Py_ssize_t size, bint are_zeros) noexcept nogil:
    """Write a buffer's position and size into the metadata, and move `done`, the end of the buffers placed so far.

    A buffer of zeros (`are_zeros`) is at position 0. Returns the address of the next buffer's entry.
    """
    put64(buffer, 0 if are_zeros else done[0])
    put64(buffer + 8, size)
    if not are_zeros:
        done[0] += padded(size)
    return buffer + 16


cdef bint measure(Column* column, list rows, Py_ssize_t at) except -1:
    """Count the nulls and text bytes of column `at`, and find out whether its numbers are all 0 or null.

    Returns False if a value does not have exactly the column's type, or is out of its range.
    """
    cdef Py_ssize_t size = 0
    cdef int overflow = 0
    cdef long long number
    column.nulls = column.size = 0
    column.is_zeros = True
    for row in rows:
        value = (<tuple> row)[at]
        if value is None:
            column.nulls += 1
        elif column.width > 0:
            if type(value) is not int:
                return False
            number = PyLong_AsLongLongAndOverflow(value, &overflow)
            if overflow or (column.width == 4 and number != <int32_t> number):
                return False
            if column.width == 1 and number != <int8_t> number:
                return False
            column.is_zeros = column.is_zeros and number == 0
        elif column.width == TEXT:
            if type(value) is not str:
                return False
            if PyUnicode_AsUTF8AndSize(value, &size) == NULL:
                PyErr_Clear()  # half a surrogate pair
                return False
            column.size += size
        elif type(value) is not bytes:
            return False
        else:
            column.size += len(<bytes> value)
    return column.size < 2**31


cdef int write_validity(char* bits, list rows, Py_ssize_t at) except -1:
    """Set the bit of each row that has a value in column `at`. All bits must be 0 before."""
    cdef Py_ssize_t number = 0
    for row in rows:
        if (<tuple> row)[at] is not None:
            bits[number >> 3] |= 1 << (number & 7)
        number += 1
    return 0


cdef int write_numbers(char* out, list rows, Py_ssize_t at, int width) except -1:
    """Write the numbers of column `at`, `width` bytes each. A null leaves its bytes unchanged."""
    cdef int64_t number
    cdef int overflow = 0
    for row in rows:
        value = (<tuple> row)[at]
        if value is not None:
            number = PyLong_AsLongLongAndOverflow(value, &overflow)
            memcpy(out, &number, width)
        out += width
    return 0


cdef int write_texts(char* ends, char* data, list rows, Py_ssize_t at) except -1:
    """Write the texts of column `at` to `data`, and the end of each one to `ends`, behind the first offset, 0."""
    cdef Py_ssize_t size
    cdef int32_t end = 0
    cdef const char* text
    for row in rows:
        value = (<tuple> row)[at]
        ends += 4
        if value is not None:
            if type(value) is str:
                text = PyUnicode_AsUTF8AndSize(value, &size)
            else:
                text, size = PyBytes_AsString(value), len(<bytes> value)
            memcpy(data + end, text, size)
            end += <int32_t> size
        memcpy(ends, &end, 4)
    return 0
