# cython: language_level=3
"""C declarations of send_columns.pyx."""

from libc.stdint cimport int64_t

from timeball.edges.remoting.codec.c_text cimport Text
from timeball.edges.remoting.codec.send_headers cimport Row
from timeball.edges.remoting.codec.send_runs cimport SendRun


cdef enum Column:  # in the order of SEND_NAMES
    TOPIC, BODY, TAG, KEYS, UNIQUE_KEY, PROPERTIES, QUEUE_ID, BORN_MS, BORN_HOST, FLAG, SYS_FLAG, TIMES, DUE_MS, LEVEL


cdef Text text_of(SendRun run, Row* row, int column_id) noexcept
cdef int64_t number_of(Row* row, int column_id) noexcept
