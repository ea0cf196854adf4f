# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Rows as stored messages, in C: the compiled twin of `encode_each`; records.py draws the layout.

Reads the buffers of Arrow columns as they are. Rows that are out of order (a host without a port that fits, properties
of more than 65,535 bytes) are left to the reference, whose error is the right one.
"""

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memchr, memcmp, memcpy

from timeball.protocols.remoting.codec.c_text cimport Buffer, Text, put, write32

from zlib import crc32

from timeball.message import READ_SCHEMA
from timeball.protocols.remoting.codec import records
from timeball.protocols.remoting.codec.codes import MessageFlag

cdef enum:
    FIXED_BYTES = 83  # of version 1: all but the addresses, the body, the topic and the properties
    ROWS_MIN = 4
    PROPERTIES_MAX = 65535
    TOPIC_MAX = 32767

cdef int32_t BORN_V6 = MessageFlag.BORN_HOST_V6, STORE_V6 = MessageFlag.STORE_HOST_V6
cdef int32_t ENDED = MessageFlag.TRANSACTION_ROLLBACK, COMMITTED = MessageFlag.TRANSACTION_COMMIT
cdef uint32_t MAGIC_V1 = records.MAGIC_V1, MAGIC_V2 = records.MAGIC_V2
cdef Py_ssize_t TOPIC_V1_MAX = records.TOPIC_BYTES_V1_MAX
cdef dict PLACES = {name: READ_SCHEMA.get_field_index(name) for name in READ_SCHEMA.names}


cdef struct Column:
    const uint8_t* valid  # NULL: no value is missing
    const char* values  # numbers, or where texts end
    const char* data  # of texts
    Py_ssize_t offset


cdef struct Columns:
    Column seq, topic, queue_id, queue_offset, body, properties, tag, keys, unique_key, born_ms, born_host, store_ms
    Column flag, sys_flag, times, source


cdef Column column(rows, str name) except *:
    cdef Column found
    array = rows.column(PLACES[name])
    buffers = array.buffers()
    found.valid = <const uint8_t*> address(buffers[0]) if array.null_count else NULL
    found.values = <const char*> address(buffers[1])
    found.data = <const char*> address(buffers[2]) if len(buffers) > 2 else NULL
    found.offset = array.offset
    return found


cdef uintptr_t address(buffer) except? 0:
    return 0 if buffer is None else buffer.address


cdef inline bint is_missing(Column* of, Py_ssize_t row) noexcept:
    row += of.offset
    return of.valid != NULL and not of.valid[row >> 3] >> (row & 7) & 1


cdef inline int64_t number64(Column* of, Py_ssize_t row) noexcept:
    return 0 if is_missing(of, row) else (<const int64_t*> of.values)[row + of.offset]


cdef inline int32_t number32(Column* of, Py_ssize_t row) noexcept:
    return 0 if is_missing(of, row) else (<const int32_t*> of.values)[row + of.offset]


cdef inline Text text(Column* of, Py_ssize_t row) noexcept:
    cdef Text found
    cdef const int32_t* ends = <const int32_t*> of.values + of.offset + row
    found.at, found.size = NULL, 0
    if not is_missing(of, row) and ends[1] > ends[0]:
        found.at, found.size = of.data + ends[0], ends[1] - ends[0]
    return found


def encode_each(rows, *, store_host, born_host=records.NO_HOST):
    """Return a stored message for each of these READ_SCHEMA rows; see records.encode_each."""
    cdef Columns columns
    cdef Buffer properties
    cdef Py_ssize_t row
    # To look at the columns costs as much as a few rows do in Python.
    if rows.num_rows < ROWS_MIN or not rows.schema.equals(READ_SCHEMA) or any(
        rows.column(PLACES[name]).null_count for name in ("seq", "topic", "queue_id")
    ):
        return records.encode_each(rows, store_host=store_host, born_host=born_host)
    columns = Columns(
        column(rows, "seq"), column(rows, "topic"), column(rows, "queue_id"), column(rows, "queue_offset"),
        column(rows, "body"), column(rows, "properties"), column(rows, "tag"), column(rows, "keys"),
        column(rows, "unique_key"), column(rows, "born_ms"), column(rows, "born_host"), column(rows, "store_ms"),
        column(rows, "flag"), column(rows, "sys_flag"), column(rows, "reconsume_times"), column(rows, "source_seq"),
    )
    cdef bytes store = _host(store_host), born
    cdef dict hosts = {None: _host(born_host)}
    cdef list found = []
    properties.data, properties.size, properties.room = NULL, 0, 0
    try:
        for row in range(rows.num_rows):
            name = None
            if not is_missing(&columns.born_host, row):
                host = text(&columns.born_host, row)
                name = host.at[:host.size]
            born = hosts.get(name)
            if born is None:
                born = hosts[name] = _host(records.parse_host(name.decode(), born_host))
            record = _record(&columns, row, &properties, born, store) if born and store else None
            if record is None:
                return records.encode_each(rows, store_host=store_host, born_host=born_host)
            found.append(record)
    finally:
        free(properties.data)
    return found


def _host(host):
    """Return a host as it stands in a record; empty when its port does not fit."""
    return host.address + host.port.to_bytes(4, "big", signed=True) if -(1 << 31) <= host.port < 1 << 31 else b""


cdef object _record(Columns* of, Py_ssize_t row, Buffer* properties, bytes born, bytes store):
    """Return one stored message; None when it does not fit the layout."""
    cdef Text topic = text(&of.topic, row), body = text(&of.body, row), given = text(&of.properties, row)
    cdef int32_t sys_flag = number32(&of.sys_flag, row)
    cdef int64_t prepared = number64(&of.source, row) if sys_flag & ENDED == COMMITTED else 0
    properties.size = 0
    if given.size:
        put(properties, given.at, given.size)
    _add(properties, b"UNIQ_KEY\x01", text(&of.unique_key, row))
    _add(properties, b"TAGS\x01", text(&of.tag, row))
    _add(properties, b"KEYS\x01", text(&of.keys, row))
    if properties.size > PROPERTIES_MAX or topic.size > TOPIC_MAX:
        return None
    sys_flag &= ~(BORN_V6 | STORE_V6)
    sys_flag |= (BORN_V6 if len(born) > 8 else 0) | (STORE_V6 if len(store) > 8 else 0)
    cdef bint is_v1 = topic.size <= TOPIC_V1_MAX
    cdef Py_ssize_t total = (
        FIXED_BYTES + len(born) - 4 + len(store) - 4 + body.size + topic.size + properties.size + (not is_v1)
    )
    record = PyBytes_FromStringAndSize(NULL, total)
    cdef char* at = PyBytes_AsString(record)
    at = _put32(at, total)
    at = _put32(at, MAGIC_V1 if is_v1 else MAGIC_V2)
    at = _put32(at, <uint32_t> crc32(body.at[:body.size]) & 0x7FFFFFFF)
    at = _put32(at, number32(&of.queue_id, row))
    at = _put32(at, number32(&of.flag, row))
    at = _put64(at, number64(&of.queue_offset, row))
    at = _put64(at, number64(&of.seq, row))
    at = _put32(at, sys_flag)
    at = _put64(at, number64(&of.born_ms, row))
    at = _put(at, born, len(born))
    at = _put64(at, number64(&of.store_ms, row))
    at = _put(at, store, len(store))
    at = _put32(at, number32(&of.times, row))
    at = _put64(at, prepared)
    at = _put32(at, body.size)
    at = _put(at, body.at, body.size)
    if not is_v1:
        at[0] = <char> (topic.size >> 8)
        at += 1
    at[0] = <char> topic.size
    at = _put(at + 1, topic.at, topic.size)
    at[0], at[1] = <char> (properties.size >> 8), <char> properties.size
    at = _put(at + 2, properties.data, properties.size)
    assert at == PyBytes_AsString(record) + total
    return record


cdef int _add(Buffer* properties, bytes name, Text value) except -1:
    """Add a property that stands in a column only; `name` with its end."""
    cdef const char* at = properties.data
    cdef const char* end = at + properties.size
    cdef Py_ssize_t size = len(name)
    cdef const char* wanted = name
    if value.size == 0:
        return 0
    while end - at >= size:
        if memcmp(at, wanted, size) == 0:
            return 0
        at = <const char*> memchr(at, 2, end - at)
        if at == NULL:
            break
        at += 1
    if properties.size and (end - 1)[0] != 2:
        put(properties, b"\x02", 1)
    put(properties, wanted, size)
    put(properties, value.at, value.size)
    return put(properties, b"\x02", 1)


cdef inline char* _put(char* to, const char* data, Py_ssize_t size) noexcept:
    if size:
        memcpy(to, data, size)
    return to + size


cdef inline char* _put32(char* to, uint32_t number) noexcept:
    write32(to, number)
    return to + 4


cdef inline char* _put64(char* to, int64_t number) noexcept:
    write32(to, <uint32_t> (number >> 32))
    write32(to + 4, <uint32_t> number)
    return to + 8
