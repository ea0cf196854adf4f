# cython: language_level=3
"""C declarations of send_headers.pyx."""

from libc.stdint cimport int32_t, int64_t

from timeball.edges.remoting.codec.c_text cimport Buffer, Text


cdef int64_t NEVER  # no due time


cdef struct Row:
    # Positions: of frame, payload and body in the run's `data`, and of the texts in the run's `text`.
    int32_t frame_at, payload_at, payload_bytes, body_at, body_bytes, text_at, text_bytes
    int32_t tag_at, tag_bytes, keys_at, keys_bytes, key_at, key_bytes  # -1 bytes: missing
    int32_t topic, opaque, queue_id, flag, sys_flag, times, level
    int64_t born_ms, due_ms
    int32_t delays, delay_at, delay_bytes  # number of delay properties, and the value of the last of them
    int delay  # index of the last one's name in DELAYS
    int32_t parts  # messages of the request: 1, or for a batch their number in its first row and 0 in the others
    bint is_binary, is_one_way, is_batch


cdef bint read_json(Row* row, Buffer* text, Text header, Text* topic) except -1
cdef bint read_binary(Row* row, Buffer* text, Text header, Text* topic) except -1
cdef bint read_record(Row* row, Buffer* text, const char* data, Py_ssize_t* at, Py_ssize_t end) except -1
cdef bint read_properties(Row* row, Buffer* text) except -1
cdef bint names_delay(Text properties) noexcept
cdef bint plan_plain(Row* row, Buffer* text, int64_t now_ms, int64_t delay_ms_max) noexcept
