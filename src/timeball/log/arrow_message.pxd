# cython: language_level=3
"""The C declarations of arrow_message.pyx, for other compiled modules."""

cdef enum:
    COLUMNS_MAX = 64
    TEXT = -1
    BINARY = -2


cdef struct Column:
    int width  # bytes of a number; TEXT or BINARY
    Py_ssize_t nulls
    Py_ssize_t size  # total bytes of the texts of all rows; unused for numbers
    bint is_zeros  # True if each number is 0 or null
    char* valid  # validity bitmap: a set bit for each row with a value; NULL if no row is null
    char* values  # the numbers, or the end offsets of the texts (int32, preceded by a 0)
    char* data  # the bytes of the texts


cdef class MessageEncoder:
    cdef bytes head
    cdef Py_ssize_t rows_at, nodes_at, buffers_at, body_at, sharing_rows_min
    cdef Py_ssize_t columns
    cdef Column column[COLUMNS_MAX]

    cdef int open(self, bytes message, Py_ssize_t at) except -1
    cdef bytes shared(self, const char* data)
    cdef bytes lay_out(self, Py_ssize_t count)
