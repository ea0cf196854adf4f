# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Convert runs of sends to the columns of a batch, and encode the answers to them. See send_runs.pyx."""

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy, memset

from timeball.edges.remoting.codec.c_text cimport Buffer, Text, put, put_number, write32
from timeball.edges.remoting.codec.send_headers cimport NEVER, Row
from timeball.edges.remoting.codec.send_runs cimport SendRun

import pyarrow as pa

from timeball.model import message
from timeball.model.message import SEND_COLUMNS, SEND_NAMES, repeated
from timeball.edges.remoting.codec.frame import BINARY, JSON
from timeball.edges.remoting.codec.sends import encode_reply


cdef Py_ssize_t SMALL_ROWS = message.SMALL_ROWS

def join(list runs):
    """Convert runs to a batch: the same columns that `batch_of` creates from their rows."""
    cdef SendRun run
    cdef Py_ssize_t count = 0
    for run in runs:
        count += run.count
    names, columns = [], []
    for column_id, name in enumerate(SEND_NAMES):
        kind = SEND_COLUMNS[name]
        is_text = column_id <= PROPERTIES or column_id == BORN_HOST
        column = _texts(runs, count, column_id, kind) if is_text else _numbers(runs, count, column_id, kind)
        if column is not None:
            names.append(name)
            columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=names)


cdef object _texts(list runs, Py_ssize_t count, int column_id, object kind):
    """Build a column of texts from all rows of the runs, `count` in total. `kind` is its Arrow type.

    Returns None if no row has a value.
    """
    cdef SendRun run
    cdef Py_ssize_t at, row = 0, nulls = 0, size = 0
    cdef Text first, text
    cdef bint differs = False
    first.at = text.at = NULL
    first.size = text.size = -1
    for run in runs:
        for at in range(run.count):
            text = text_of(run, run.rows + at, column_id)
            if row == 0:
                first = text
            elif not differs:
                differs = text.size != first.size or (text.size > 0 and memcmp(text.at, first.at, text.size) != 0)
            if text.size < 0:
                nulls += 1
            else:
                size += text.size
            row += 1
    if nulls == count:
        return None
    # `repeated` caches such columns by their value and row count. The key of a single send is not worth a cache entry.
    if not differs and 1 < count <= SMALL_ROWS and column_id != BODY:
        return repeated(first.at[:first.size].decode(), kind, count)
    ends, data = PyBytes_FromStringAndSize(NULL, 4 * (count + 1)), PyBytes_FromStringAndSize(NULL, size)
    valid = None if nulls == 0 else PyBytes_FromStringAndSize(NULL, (count + 7) // 8)
    cdef int32_t* end = <int32_t*> PyBytes_AsString(ends)
    cdef char* out = PyBytes_AsString(data)
    cdef char* bits = NULL if nulls == 0 else PyBytes_AsString(valid)
    if nulls:
        memset(bits, 0, (count + 7) // 8)
    row = size = end[0] = 0
    for run in runs:
        for at in range(run.count):
            text = text_of(run, run.rows + at, column_id)
            if text.size > 0:
                memcpy(out + size, text.at, text.size)
                size += text.size
            if nulls and text.size >= 0:
                bits[row >> 3] |= 1 << (row & 7)
            row += 1
            end[row] = size
    buffers = [None if valid is None else pa.py_buffer(valid), pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, count, buffers, nulls)


cdef Text text_of(SendRun run, Row* row, int column_id) noexcept:
    """Return a text of a row, with a size of -1 if the row has none."""
    cdef Text result
    if column_id == BODY:
        result.at, result.size = <const char*> run.data + row.body_at, row.body_bytes
    elif column_id == TOPIC:
        result = run.names[row.topic]
    elif column_id == BORN_HOST:
        result.at, result.size = <const char*> run.born_host, len(run.born_host)
    elif column_id == TAG:
        result.at, result.size = run.text.data + row.tag_at, row.tag_bytes
    elif column_id == KEYS:
        result.at, result.size = run.text.data + row.keys_at, row.keys_bytes
    elif column_id == UNIQUE_KEY:
        result.at, result.size = run.text.data + row.key_at, row.key_bytes
    else:
        result.at, result.size = run.text.data + row.text_at, row.text_bytes
    return result


cdef object _numbers(list runs, Py_ssize_t count, int column_id, object kind):
    """Build a column of numbers from all rows of the runs, `count` in total. `kind` is its Arrow type.

    Returns None if no row has a value.
    """
    cdef SendRun run
    cdef Py_ssize_t at, row = 0, nulls = 0
    cdef int64_t first = 0, number
    cdef bint differs = False, is_wide = column_id == BORN_MS or column_id == DUE_MS
    values = PyBytes_FromStringAndSize(NULL, count * (8 if is_wide else 4))
    valid = PyBytes_FromStringAndSize(NULL, (count + 7) // 8)
    cdef char* out = PyBytes_AsString(values)
    cdef char* bits = PyBytes_AsString(valid)
    memset(bits, 0, (count + 7) // 8)
    for run in runs:
        for at in range(run.count):
            number = number_of(run.rows + at, column_id)
            if row == 0:
                first = number
            differs |= number != first
            if number == NEVER:
                nulls += 1
                number = 0
            else:
                bits[row >> 3] |= 1 << (row & 7)
            if is_wide:
                (<int64_t*> out)[row] = number
            else:
                (<int32_t*> out)[row] = <int32_t> number
            row += 1
    if nulls == count:
        return None
    if not differs:
        return repeated(first, kind, count)
    return pa.Array.from_buffers(kind, count, [pa.py_buffer(valid) if nulls else None, pa.py_buffer(values)], nulls)


cdef int64_t number_of(Row* row, int column_id) noexcept:
    """Return a number of a row, NEVER if the row has none."""
    if column_id == QUEUE_ID:
        return row.queue_id
    if column_id == BORN_MS:
        return row.born_ms
    if column_id == FLAG:
        return row.flag
    if column_id == SYS_FLAG:
        return row.sys_flag
    if column_id == TIMES:
        return row.times
    if column_id == DUE_MS:
        return row.due_ms
    return row.level or NEVER


# ---- answers ---------------------------------------------------------------------------------------------------------


def _pieces(form, handle):
    """Split an answer of the reference at its values. Returns the pieces between them, as a template of answers.

    `form` is the serialisation of the answer. `handle`: with a recall handle.
    """
    values = [b"%d" % (1_000_000_000 + at) for at in range(6)]
    queue_id, ids, offset, key, recall, opaque = values
    rest = encode_reply(
        int(opaque), form, int(queue_id), int(offset), ids.decode(), key.decode(), recall.decode() if handle else ""
    )
    pieces = []
    for value in [queue_id, ids, offset, key, *([recall] if handle else []), *([opaque] if form == JSON else [])]:
        piece, _, rest = rest.partition(value)
        pieces.append(piece)
    return [*pieces, rest]


cdef list _JSON = _pieces(JSON, False), _JSON_RECALL = _pieces(JSON, True)
cdef list _BINARY = _pieces(BINARY, False), _BINARY_RECALL = _pieces(BINARY, True)
# Positions in a binary answer: the opaque, the length of the extFields, and their start.
cdef enum:
    OPAQUE_AT = 13, FIELDS_BYTES_AT = 25, FIELDS_AT = 29


def encode_replies(SendRun run, bytes host, int64_t first_seq, Py_ssize_t at, list queue_ids, list offsets, handle):
    """Encode the answers to the requests of a run that are not one-way, in order. See `encode_reply`.

    `at` is the index of the run's first row in `queue_ids` and `offsets`. Its sequence number is `first_seq` plus `at`.
    `host` is the first part of the message ids. `handle` creates a recall handle from topic, due time and unique key.
    """
    cdef Buffer out
    cdef Row* row
    cdef bytes recall
    cdef int64_t queue_id
    out.data, out.size, out.capacity = NULL, 0, 0
    try:
        for row in run.rows[:run.count]:
            if row.parts and not row.is_one_way:
                recall = b""
                if row.due_ms != NEVER:
                    recall = handle(run.destinations[row.topic][0], row.due_ms, _key(run, row).decode()).encode()
                queue_id = row.queue_id if row.queue_id >= 0 else max(0, <int64_t> queue_ids[at])
                if row.is_binary:
                    _put_binary(&out, run, row, queue_id, host, first_seq + at, offsets[at], recall)
                elif _has_plain_keys(run, row):
                    _put_json(&out, run, row, queue_id, host, first_seq + at, offsets[at], recall)
                else:
                    ids = ",".join(f"{host.decode()}{first_seq + at + n:016X}" for n in range(row.parts))
                    keys = ",".join([_key(run, row + n).decode() for n in range(row.parts)])
                    _put_bytes(&out, encode_reply(
                        row.opaque, JSON, queue_id, offsets[at], ids, keys, recall.decode()
                    ))
            at += 1
        return out.data[:out.size]
    finally:
        free(out.data)


cdef bytes _key(SendRun run, Row* row):
    return run.text.data[row.key_at:row.key_at + row.key_bytes]


cdef bint _has_plain_keys(SendRun run, Row* row) noexcept:
    """Return whether the unique keys of a request need no escapes in JSON."""
    cdef Py_ssize_t at
    cdef const char* key
    cdef Row* each
    for each in row[:row.parts]:
        key = run.text.data + each.key_at
        for at in range(each.key_bytes):
            if not 0x20 <= key[at] < 0x7F or key[at] == c'"' or key[at] == c"\\":
                return False
    return True


cdef int _put_json(
    Buffer* out, SendRun run, Row* row, int64_t queue_id, bytes host, uint64_t seq, int64_t offset, bytes recall
) except -1:
    """Append the answer to one request, whose first row is `row`, with a JSON header.

    `seq` and `offset` are those of the first row. `recall` is a recall handle, or empty.
    """
    cdef Py_ssize_t begin = out.size
    cdef list pieces = _JSON_RECALL if recall else _JSON
    _put_bytes(out, pieces[0])
    put_number(out, queue_id)
    _put_bytes(out, pieces[1])
    _put_ids(out, row, host, seq)
    _put_bytes(out, pieces[2])
    put_number(out, offset)
    _put_bytes(out, pieces[3])
    _put_keys(out, run, row)
    if recall:
        _put_bytes(out, pieces[4])
        _put_bytes(out, recall)
    _put_bytes(out, pieces[len(pieces) - 2])
    put_number(out, row.opaque)
    _put_bytes(out, pieces[len(pieces) - 1])
    write32(out.data + begin, out.size - begin - 4)
    write32(out.data + begin + 4, out.size - begin - 8)
    return 0


cdef int _put_binary(
    Buffer* out, SendRun run, Row* row, int64_t queue_id, bytes host, uint64_t seq, int64_t offset, bytes recall
) except -1:
    """Append the answer to one request with a binary header. See `_put_json`.

    In the binary header, the length of each value precedes it. It is set after the value is written.
    """
    cdef Py_ssize_t begin = out.size, value_at
    cdef list pieces = _BINARY_RECALL if recall else _BINARY
    cdef int at
    for at in range(len(pieces) - 1):
        _put_bytes(out, pieces[at])
        value_at = out.size
        if at == 0:
            put_number(out, queue_id)
        elif at == 1:
            _put_ids(out, row, host, seq)
        elif at == 2:
            put_number(out, offset)
        elif at == 3:
            _put_keys(out, run, row)
        else:
            _put_bytes(out, recall)
        write32(out.data + value_at - 4, out.size - value_at)
    write32(out.data + begin, out.size - begin - 4)
    write32(out.data + begin + 4, 1 << 24 | <int32_t> (out.size - begin - 8))
    write32(out.data + begin + OPAQUE_AT, row.opaque)
    write32(out.data + begin + FIELDS_BYTES_AT, out.size - begin - FIELDS_AT)
    return 0


cdef int _put_ids(Buffer* out, Row* row, bytes host, uint64_t seq) except -1:
    """Write the message ids of a request, separated by commas."""
    cdef int32_t at
    for at in range(row.parts):
        if at:
            put(out, b",", 1)
        _put_bytes(out, host)
        _put_hex(out, seq + at)
    return 0


cdef int _put_keys(Buffer* out, SendRun run, Row* row) except -1:
    """Write the unique keys of a request, separated by commas."""
    cdef int32_t at
    for at in range(row.parts):
        if at:
            put(out, b",", 1)
        put(out, run.text.data + row[at].key_at, row[at].key_bytes)
    return 0


cdef int _put_bytes(Buffer* out, bytes data) except -1:
    return put(out, data, len(data))


cdef int _put_hex(Buffer* out, uint64_t number) except -1:
    """Write a number as 16 hexadecimal digits, in capitals."""
    cdef char digits[16]
    cdef int at, digit
    for at in range(16):
        digit = number >> (60 - 4 * at) & 15
        digits[at] = digit + (48 if digit < 10 else 55)
    return put(out, digits, 16)
