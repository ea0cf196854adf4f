# cython: language_level=3
"""A run of plain sends, as the compiled modules see it; see send_runs.pyx."""

from libc.stdint cimport int32_t, int64_t

from timeball.protocols.remoting.codec.c_text cimport Buffer, Text


cdef enum:
    TOPICS_MAX = 16  # of a run

cdef int64_t NEVER  # no instant


cdef struct Row:
    # Offsets: of the frame's parts in the run's data, of the texts behind them in the run's own text.
    int32_t frame_at, body_at, body_bytes, text_at, text_bytes
    int32_t tag_at, tag_bytes, keys_at, keys_bytes, key_at, key_bytes  # -1 bytes: there is none
    int32_t topic, opaque, queue_id, flag, sys_flag, times, level
    int64_t born_ms, due_ms
    int32_t delays, delay_at, delay_bytes  # properties that name one, and where the last of them has its value
    int delay  # of which name: its place in DELAYS
    bint is_binary, is_one_way


cdef class SendRun:
    cdef bytes data, born_host
    cdef Row* rows
    cdef Py_ssize_t count, room
    cdef Buffer text
    cdef Text names[TOPICS_MAX]  # of the topics, while the run is cut out
    cdef int32_t greatest[TOPICS_MAX]  # queue that is asked for of each
    cdef int topics
    cdef int32_t end
    cdef readonly list destinations
    cdef readonly Py_ssize_t size_bytes  # of bodies and properties

    cdef bint add(self, const char* data, Py_ssize_t at, Py_ssize_t body_at, Py_ssize_t end, int form) except -1
    cdef bint read_json(self, Row* row, Text header, Text* topic) except -1
    cdef bint read_fields(self, Row* row, const char** p, const char* end, Text* topic, bint is_long) except -1
    cdef bint read_binary(self, Row* row, Text header, Text* topic) except -1
    cdef bint read_properties(self, Row* row) except -1
    cdef void add_topic(self, Row* row, Text topic) noexcept
    cdef int close(self, bytes data, Py_ssize_t end) except -1
    cdef bint plan_plain(self, Row* row, int64_t now_ms, int64_t delay_ms_max) noexcept
    cdef object value(self, Row* row, int32_t at, int32_t size)
