# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A few rows, tuples of Python's values, as the Arrow message of a frame, and back: row_encoder.py says of which layout.

A message that a client wrote is read as well, if pyarrow wrote it so: its numbers and buffers are believed only once
they have been compared with what came.

pyarrow makes the same of them in two steps, an array of structs and its serialisation, at some thirty times the cost
for one row. What is not of its column's very type is left to pyarrow, which alone names faults.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int8_t, int32_t, int64_t
from libc.string cimport memcmp, memcpy, memset

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) noexcept
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    void PyErr_Clear() noexcept

cdef inline Py_ssize_t padded(Py_ssize_t size) noexcept nogil:
    return (size + 7) & ~7


cdef class MessageEncoder:
    """Encodes rows of one schema. `head` is the metadata of any of its messages; the rest says where numbers go.

    From `sharing_rows_min` rows on the columns share their zeros (row_encoder.py).
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
            if 0 < column.nulls < len(rows):
                write_validity(column.valid, rows, at)
            if column.width > 0 and column.is_zeros:
                continue  # the message is all zero
            if column.width > 0:
                write_numbers(column.values, rows, at, column.width)
            else:
                write_texts(column.values, column.data, rows, at)
        return message

    def row(self, bytes message not None, Py_ssize_t at, int64_t seq):
        """Return a row of a message that was written here, behind its number: a value for each column."""
        cdef Py_ssize_t each
        # Before the columns are found: a new list may start the collector of cycles, and with it another thread, which
        # finds columns of its own.
        cdef list row = [seq]
        self.open(message, at)
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

    def sent_rows(self, bytes header not None, bytes body not None, list order not None, list required not None):
        """Return the rows of a message that a client wrote, each a value for every column of `order`; None for -1.

        None for what pyarrow is to read, which alone names faults: another layout than that of its own messages,
        buffers that are not sound, a text that is no UTF-8, a row without a value in a `required` column.
        """
        cdef Py_ssize_t count = self.open_sent(header, body), at, each
        cdef list found = [], row
        for each in required:
            if count < 0 or self.column[each].nulls:
                return None
        try:
            for at in range(count):
                row = []
                for each in order:
                    row.append(None if each < 0 else value_at(&self.column[each], at))
                found.append(tuple(row))
        except UnicodeDecodeError:
            return None
        return found

    cdef Py_ssize_t open_sent(self, bytes header, bytes body) except -2:
        """Find the columns of a message that a client wrote; return how many rows it has, -1 for what is not sound."""
        cdef Py_ssize_t size = len(header), head_bytes = len(self.head), buffers = 2 * self.columns, at, each
        cdef Py_ssize_t count, done = 0, nulls
        cdef Column* column
        if size > head_bytes - PREFIX_BYTES or size + 8 <= head_bytes - PREFIX_BYTES:  # padding aside
            return -1
        for each in range(self.columns):
            buffers += self.column[each].width <= 0
        given, wanted = PyBytes_FromStringAndSize(NULL, head_bytes), PyBytes_FromStringAndSize(NULL, head_bytes)
        cdef char* told = PyBytes_AsString(given)
        cdef char* form = PyBytes_AsString(wanted)
        memcpy(told, PyBytes_AsString(self.head), PREFIX_BYTES)
        memcpy(told + PREFIX_BYTES, PyBytes_AsString(header), size)
        memset(told + PREFIX_BYTES + size, 0, head_bytes - PREFIX_BYTES - size)
        # The same bytes but for the numbers, so they stand where those of the form do.
        memcpy(form, PyBytes_AsString(self.head), head_bytes)
        memcpy(form + self.rows_at, told + self.rows_at, 8)
        memcpy(form + self.body_at, told + self.body_at, 8)
        memcpy(form + self.nodes_at, told + self.nodes_at, 16 * self.columns)
        memcpy(form + self.buffers_at, told + self.buffers_at, 16 * buffers)
        if memcmp(form, told, head_bytes) or get64(told + self.body_at) != len(body):
            return -1
        count = get64(told + self.rows_at)
        if not 0 < count <= SENT_ROWS_MAX:
            return -1
        cdef char* begin = PyBytes_AsString(body)
        cdef char* node = told + self.nodes_at
        cdef char* buffer = told + self.buffers_at
        cdef Buffer found
        for each in range(self.columns):
            column = &self.column[each]
            nulls = get64(node + 8)
            if get64(node) != count or not 0 <= nulls <= count:
                return -1
            node += 16
            if not next_buffer(&buffer, len(body), &done, &found) or (nulls and 8 * found.size < count):
                return -1
            column.nulls, column.valid = nulls, begin + found.at if nulls else NULL
            if nulls:
                for at in range(count):
                    nulls -= not (column.valid[at >> 3] >> (at & 7)) & 1
                if nulls:
                    return -1
            if not next_buffer(&buffer, len(body), &done, &found):
                return -1
            column.values = begin + found.at
            if column.width > 0:
                if found.size < column.width * count:
                    return -1
                continue
            if found.size < 4 * (count + 1) or not next_buffer(&buffer, len(body), &done, &found):
                return -1
            column.data = begin + found.at
            if not are_ends(column.values, count, found.size):
                return -1
        return count

    def share(self, message not None):
        """Return what pyarrow has written with its zeros in one place; see message_form.share."""
        cdef Py_buffer view
        PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
        try:
            return self.shared(<const char*> view.buf)
        finally:
            PyBuffer_Release(&view)

    cdef bytes shared(self, const char* data):
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
        with nogil:  # tens of megabytes, sometimes
            memset(out + head_bytes, 0, zeros)
            for each in range(buffers):
                size = get64(old + 8)
                if not are_zeros[each]:
                    memcpy(out + head_bytes + done, data + head_bytes + get64(old), padded(size))
                buffer = place(buffer, &done, size, are_zeros[each])
                old += 16
        return message

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


cdef struct Buffer:
    Py_ssize_t at, size


cdef bint next_buffer(char** described, Py_ssize_t room, Py_ssize_t* done, Buffer* found) noexcept:
    """Read where the next buffer of a client's message lies; return whether it lies in the body, behind the last one."""
    cdef int64_t at = get64(described[0]), size = get64(described[0] + 8)
    described[0] += 16
    if at & 7 or at < done[0] or at > room or size < 0 or size > room - at:
        return False
    found.at, found.size = at, size
    done[0] = at + size
    return True


cdef bint are_ends(const char* ends, Py_ssize_t count, Py_ssize_t size) noexcept:
    """Return whether texts that end there lie one behind the other in so many bytes."""
    cdef int32_t last = 0, end
    cdef Py_ssize_t at
    for at in range(count + 1):
        memcpy(&end, ends + 4 * at, 4)
        if end < last or end > size:
            return False
        last = end
    return True


cdef bint is_zeros(const char* data, Py_ssize_t size) noexcept:
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


cdef inline Py_ssize_t valid_bytes(Column* column, Py_ssize_t count) noexcept:
    return (count + 7) // 8 if column.nulls else 0


cdef inline Py_ssize_t values_bytes(Column* column, Py_ssize_t count) noexcept:
    """Return how long a column's numbers are, or the places where its texts end."""
    return column.width * count if column.width > 0 else 4 * (count + 1)


cdef inline char* place(char* buffer, Py_ssize_t* done, Py_ssize_t size, bint are_zeros) noexcept nogil:
    """Write where a buffer lies in the body, and return where the next one is described."""
    put64(buffer, 0 if are_zeros else done[0])
    put64(buffer + 8, size)
    if not are_zeros:
        done[0] += padded(size)
    return buffer + 16


cdef bint measure(Column* column, list rows, Py_ssize_t at) except -1:
    """Count a column's nulls and bytes; return whether each value is of its type."""
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
