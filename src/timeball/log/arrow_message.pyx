# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A few rows, tuples of Python's values, as the Arrow message of a frame, and back: few_rows.py says of which layout.

pyarrow makes the same of them in two steps, an array of structs and its serialisation, at some thirty times the cost
for one row. What is not of its column's very type is left to pyarrow, which alone names faults.
"""

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int8_t, int32_t, int64_t
from libc.string cimport memcpy, memset

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) noexcept
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    void PyErr_Clear() noexcept

cdef inline Py_ssize_t padded(Py_ssize_t size) noexcept:
    return (size + 7) & ~7


cdef class MessageEncoder:
    """Encodes rows of one schema. `head` is the metadata of any of its messages; the rest says where numbers go."""

    def __init__(
        self, bytes head, list widths, Py_ssize_t rows_at, Py_ssize_t nodes_at, Py_ssize_t buffers_at, Py_ssize_t body_at
    ):
        assert len(widths) <= COLUMNS_MAX
        self.head, self.columns = head, len(widths)
        self.rows_at, self.nodes_at, self.buffers_at, self.body_at = rows_at, nodes_at, buffers_at, body_at
        for at, width in enumerate(widths):
            self.column[at].width = width

    def encode(self, list rows not None):
        """Return the message; None when a value is not of its column's very type, or not in its range."""
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
            if column.nulls:
                write_validity(column.valid, rows, at)
            if column.width > 0:
                write_numbers(column.values, rows, at, column.width)
            else:
                write_texts(column.values, column.data, rows, at)
        return message

    def row(self, bytes message not None, Py_ssize_t at, int64_t seq):
        """Return a row of a message that was written here, behind its number: a value for each column."""
        cdef Py_ssize_t each
        self.open(message, at)
        cdef list row = [seq]
        for each in range(self.columns):
            row.append(value_at(&self.column[each], at))
        return tuple(row)

    def number(self, bytes message not None, Py_ssize_t at, Py_ssize_t column):
        """Return one value of a column of numbers that has all of them."""
        assert column < self.columns and self.column[column].width > 0
        self.open(message, at)
        return value_at(&self.column[column], at)

    def text_bytes(self, bytes message not None, Py_ssize_t at, list columns not None):
        """Return how many bytes these texts of a row have together."""
        cdef Py_ssize_t size = 0, column
        cdef int32_t begin
        self.open(message, at)
        for column in columns:
            assert column < self.columns and self.column[column].width <= 0
            size += text_at(&self.column[column], at, &begin)
        return size

    cdef int open(self, bytes message, Py_ssize_t at) except -1:
        """Find the columns of a message that was written here; the row must be one of it."""
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
        """Return a message of so many rows, all zero, and set where each column is to be written.

        The columns say how many values they lack, and how many bytes their texts have.
        """
        cdef Py_ssize_t at, head_bytes = len(self.head), body_bytes = 0, done = 0
        cdef Column* column
        for at in range(self.columns):
            column = &self.column[at]
            body_bytes += padded((count + 7) // 8) if column.nulls else 0
            if column.width > 0:
                body_bytes += padded(column.width * count)
            else:
                body_bytes += padded(4 * (count + 1)) + padded(column.size)
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
            buffer = place(buffer, &done, (count + 7) // 8 if column.nulls else 0)
            column.values = body + done
            buffer = place(buffer, &done, column.width * count if column.width > 0 else 4 * (count + 1))
            if column.width <= 0:
                column.data = body + done
                buffer = place(buffer, &done, column.size)
        return message


cdef inline void put64(char* to, int64_t number) noexcept:
    memcpy(to, &number, 8)  # Arrow is little-endian, as the machines are that pyarrow is built for


cdef inline int64_t get64(const char* at) noexcept:
    cdef int64_t number
    memcpy(&number, at, 8)
    return number


cdef inline int32_t text_at(Column* column, Py_ssize_t at, int32_t* begin) noexcept:
    """Return how long a text is, and where it begins."""
    cdef int32_t end
    memcpy(begin, column.values + 4 * at, 4)
    memcpy(&end, column.values + 4 * (at + 1), 4)
    return end - begin[0]


cdef object value_at(Column* column, Py_ssize_t at):
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


cdef inline char* place(char* buffer, Py_ssize_t* done, Py_ssize_t size) noexcept:
    """Write where a buffer lies in the body, and return where the next one is described."""
    put64(buffer, done[0])
    put64(buffer + 8, size)
    done[0] += padded(size)
    return buffer + 16


cdef bint measure(Column* column, list rows, Py_ssize_t at) except -1:
    """Count a column's nulls and bytes; return whether each value is of its type."""
    cdef Py_ssize_t size = 0
    cdef int overflow = 0
    cdef long long number
    column.nulls = column.size = 0
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
    cdef Py_ssize_t number = 0
    for row in rows:
        if (<tuple> row)[at] is not None:
            bits[number >> 3] |= 1 << (number & 7)
        number += 1
    return 0


cdef int write_numbers(char* out, list rows, Py_ssize_t at, int width) except -1:
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
