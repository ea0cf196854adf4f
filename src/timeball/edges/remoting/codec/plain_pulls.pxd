# cython: language_level=3
"""A plain pull, as the compiled modules see it; see plain_pulls.pyx."""

from libc.stdint cimport int32_t, int64_t, uint32_t

from timeball.edges.remoting.codec.c_text cimport Text


cdef enum:
    NUMBERS = 7
    TEXTS = 4


cdef class PlainPull:
    cdef bytes data  # what it was cut out of
    cdef Py_ssize_t header_at, body_at, end  # where it stands there
    cdef Text texts[TEXTS]
    cdef int64_t numbers[NUMBERS]
    cdef uint32_t seen  # which of them its header has, a bit each
    cdef int32_t opaque


cdef PlainPull read_pull(bytes data, Py_ssize_t at, Py_ssize_t body_at, Py_ssize_t end, int form)
