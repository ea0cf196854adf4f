# cython: language_level=3
"""C declarations of send_runs.pyx."""

from libc.stdint cimport int32_t

from timeball.edges.remoting.codec.c_text cimport Buffer, Text
from timeball.edges.remoting.codec.send_headers cimport Row


cdef enum:
    TOPICS_MAX = 16  # of a run


cdef class SendRun:
    cdef bytes data, born_host
    cdef Row* rows
    cdef Py_ssize_t count, capacity
    cdef Buffer text
    cdef Text names[TOPICS_MAX]  # of the topics
    cdef int32_t greatest[TOPICS_MAX]  # greatest requested queue id of each topic
    cdef int topics
    cdef int32_t end
    cdef readonly list destinations
    cdef readonly Py_ssize_t size_bytes  # of bodies and properties
    cdef readonly bint needs_time

    cdef Row* next_row(self) except NULL
    cdef bint add(self, const char* data, Py_ssize_t at, Py_ssize_t body_at, Py_ssize_t end, int form) except -1
    cdef bint add_batch(self, const char* data, Py_ssize_t at, Py_ssize_t end, Text topic) except -1
    cdef void add_topic(self, Row* row, Text topic) noexcept
    cdef int close(self, bytes data, Py_ssize_t end) except -1
    cdef object value(self, Row* row, int32_t at, int32_t size)
