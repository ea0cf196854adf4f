# cython: language_level=3
"""C declarations of plain_pulls.pyx."""

from libc.stdint cimport int32_t, int64_t, uint32_t

from timeball.edges.remoting.codec.c_text cimport Text


cdef enum:
    NUMBERS = 7
    TEXTS = 4


cdef class PlainPull:
    cdef bytes data  # the received bytes that contain the frame
    cdef Py_ssize_t header_at, body_at, end  # positions in `data`
    cdef Text texts[TEXTS]
    cdef int64_t numbers[NUMBERS]
    cdef uint32_t seen  # bit i: the header has number or text i, in the order of NAMES
    cdef int32_t opaque


cdef PlainPull read_pull(bytes data, Py_ssize_t at, Py_ssize_t body_at, Py_ssize_t end, int form)
