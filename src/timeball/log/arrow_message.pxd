# cython: language_level=3
"""An Arrow message that is being written or read, as the compiled modules see it; see arrow_message.pyx."""

cdef enum:
    COLUMNS_MAX = 64
    TEXT = -1
    BINARY = -2
    PREFIX_BYTES = 8  # before the metadata: a mark, and its length
    SENT_ROWS_MAX = 16  # of a client's message: its rows may come to share a batch of columns, which they then cost more


cdef struct Column:
    int width  # bytes of a number; TEXT or BINARY
    Py_ssize_t nulls
    Py_ssize_t size  # of the values of all rows, if they are texts
    bint is_zeros  # all rows are 0 or have no value, if they are numbers
    char* valid  # a bit for each row that has a value; NULL when all have
    char* values  # numbers, or where texts end
    char* data  # of texts


cdef class MessageEncoder:
    cdef bytes head
    cdef Py_ssize_t rows_at, nodes_at, buffers_at, body_at, sharing_rows_min
    cdef Py_ssize_t columns
    cdef Column column[COLUMNS_MAX]

    cdef Py_ssize_t open_sent(self, bytes header, bytes body) except -2
    cdef int open(self, bytes message, Py_ssize_t at) except -1
    cdef bytes shared(self, const char* data)
    cdef bytes lay_out(self, Py_ssize_t count)
