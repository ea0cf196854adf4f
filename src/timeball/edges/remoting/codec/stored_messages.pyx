# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Encode rows as stored messages, in C: the compiled counterpart of `encode_each` and `StoredFrame` in records.py.

The buffers of Arrow columns are read in place: those of a frame in the mapped segment, without creating Arrow objects.
Invalid rows (a port that does not fit, properties of more than 65,535 bytes) are left to the reference, which raises
the error. records.py shows the layout of a message.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AsString, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memchr, memcmp, memcpy

from timeball.edges.remoting.codec.c_text cimport Buffer, Text, put, put_number, read64, same, write32
from timeball.edges.remoting.codec.record_batches cimport (
    TEXT_WIDTH, Column, Message, is_missing, number32, number64, read_column, read_message, text,
)

from timeball.log import format as fmt
from timeball.model.message import LOG_SCHEMA, READ_SCHEMA, with_seq
from timeball.edges.remoting.codec import records
from timeball.edges.remoting.codec.codes import MessageFlag

cdef enum:
    ENTRY_BYTES = 20  # of an entry in a queue's index, which begins with the sequence number: queue_entry.ENTRY
    FIXED_BYTES = 83  # of a message of version 1 with IPv4 hosts, without body, topic and properties
    ROWS_MIN = 4
    PROPERTIES_MAX = 65535
    TOPIC_MAX = 32767
    HOSTS_MAX = 4096  # cached born hosts
    COLUMNS = 17
    NAMED = 3  # properties that may be stored only in a column

cdef int32_t BORN_V6 = MessageFlag.BORN_HOST_V6, STORE_V6 = MessageFlag.STORE_HOST_V6
cdef int32_t TRANSACTION_BITS = MessageFlag.TRANSACTION_ROLLBACK, COMMITTED = MessageFlag.TRANSACTION_COMMIT
cdef uint32_t MAGIC_V1 = records.MAGIC_V1, MAGIC_V2 = records.MAGIC_V2
cdef Py_ssize_t TOPIC_V1_MAX = records.TOPIC_BYTES_V1_MAX


# Each with the separator of name and value.
cdef list _properties = [b"UNIQ_KEY\x01", b"TAGS\x01", b"KEYS\x01"]
cdef Text PROPERTIES[NAMED]
cdef int _name
for _name in range(NAMED):
    PROPERTIES[_name] = Text(<bytes> _properties[_name], len(_properties[_name]))


cdef bytes _timer = records.TIMER_PREFIX.encode(), _done = records.TIMER_DONE.encode()
cdef bytes _real = records.REAL_TOPIC.encode()
cdef Text TIMER_PREFIX = Text(_timer, len(_timer)), TIMER_DONE = Text(_done, len(_done))
cdef Text REAL_TOPIC = Text(_real, len(_real))
cdef bytes _region = b"\x02" + records.REGION
cdef Text REGION = Text(_region, len(_region))  # including the separator before it
cdef Py_ssize_t PROPERTIES_JAVA_MAX = records.PROPERTIES_JAVA_MAX


cdef struct Columns:  # in the order of NAMES
    Column topic, queue_id, queue_offset, body, properties, tag, keys, unique_key, born_ms, born_host, store_ms
    Column flag, sys_flag, times, source, due_ms, accepted_ms


# Born hosts as bytes. Cached, since parsing a host takes as long as encoding ten messages.
cdef dict HOSTS = {None: _host(records.NO_HOST)}
cdef list NAMES = [
    "topic", "queue_id", "queue_offset", "body", "properties", "tag", "keys", "unique_key", "born_ms", "born_host",
    "store_ms", "flag", "sys_flag", "reconsume_times", "source_seq", "due_ms", "accepted_ms",
]
cdef dict COLUMN_INDICES = {name: READ_SCHEMA.get_field_index(name) for name in READ_SCHEMA.names}

# For each of NAMES: the index of the column in a frame's message, its first buffer, and its width in bytes.
cdef int FIELDS[COLUMNS]
cdef int FIRST_BUFFERS[COLUMNS]
cdef int WIDTHS[COLUMNS]
cdef list _buffers = [field.type.num_buffers for field in LOG_SCHEMA]
cdef int FIELDS_ALL = len(_buffers), BUFFERS_ALL = sum(_buffers), _at
for _at in range(COLUMNS):
    FIELDS[_at] = LOG_SCHEMA.get_field_index(NAMES[_at])
    FIRST_BUFFERS[_at] = sum(_buffers[:FIELDS[_at]])
    WIDTHS[_at] = TEXT_WIDTH if _buffers[FIELDS[_at]] == 3 else LOG_SCHEMA.field(NAMES[_at]).type.bit_width // 8


cdef uintptr_t address(buffer) except? 0:
    """Return the address of an Arrow buffer, 0 for None."""
    return 0 if buffer is None else buffer.address


cdef int columns_of(rows, Columns* columns) except -1:
    """Find the columns of READ_SCHEMA rows. The rows must live as long as the columns are used."""
    cdef Column* column = <Column*> columns
    for name in NAMES:
        array = rows.column(<int> COLUMN_INDICES[name])
        buffers = array.buffers()
        column.valid = <const uint8_t*> address(buffers[0]) if array.null_count else NULL
        column.values = <const char*> address(buffers[1])
        column.data = <const char*> address(buffers[2]) if len(buffers) > 2 else NULL
        column.offset = array.offset
        column += 1
    return 0


cdef bint columns_in(const char* payload, Py_ssize_t size, Py_ssize_t rows, Columns* columns) noexcept:
    """Find the columns in the payload of a frame, an Arrow message of `size` bytes with this number of rows.

    Returns False if the message has an unusual layout.
    """
    cdef Message message
    cdef Column* column = <Column*> columns
    cdef int index
    if not read_message(payload, size, FIELDS_ALL, BUFFERS_ALL, &message) or message.rows != rows:
        return False
    for index in range(COLUMNS):
        if not read_column(&message, FIELDS[index], FIRST_BUFFERS[index], WIDTHS[index], column + index):
            return False
    return True


cdef inline bint is_visible(Columns* columns, Py_ssize_t row) noexcept:
    """Return whether a row is a message in a queue."""
    return not (
        is_missing(&columns.queue_offset, row) or is_missing(&columns.topic, row) or is_missing(&columns.queue_id, row)
    )


def encode_each(rows, *, store_host, born_host=records.NO_HOST):
    """Encode each of these READ_SCHEMA rows as a stored message. See records.encode_each."""
    cdef Columns columns
    cdef Record record
    cdef Py_ssize_t row
    # For a few rows, Python is faster: finding the columns takes as long as encoding these rows.
    if rows.num_rows < ROWS_MIN or not rows.schema.equals(READ_SCHEMA) or any(
        rows.column(<int> COLUMN_INDICES[name]).null_count for name in ("seq", "topic", "queue_id")
    ):
        return records.encode_each(rows, store_host=store_host, born_host=born_host)
    columns_of(rows, &columns)
    seqs = rows.column(0)
    cdef const int64_t* seq = <const int64_t*> address(seqs.buffers()[1]) + <Py_ssize_t> seqs.offset
    cdef Hosts hosts = Hosts(store_host, born_host)
    cdef list messages = []
    for row in range(rows.num_rows):
        if not hosts.measure(&columns, row, &record):
            return records.encode_each(rows, store_host=store_host, born_host=born_host)
        data = PyBytes_FromStringAndSize(NULL, record.total)
        hosts.write(&columns, row, seq[row], &record, PyBytes_AsString(data))
        messages.append(data)
    return messages


cdef class StoredFrame:
    """An opened frame of the log, read in place. See implementation.StoredFrame."""

    cdef Columns columns
    cdef object segment, frame
    cdef object owner  # the object that owns the memory of the columns
    cdef readonly int64_t first_seq
    cdef readonly int64_t end_seq

    def __init__(self, segment, frame):
        payload = segment.slice(frame.position + fmt.ALIGN, frame.payload)
        self.segment, self.frame, self.owner = segment, frame, payload
        self.first_seq, self.end_seq = frame.first_seq, frame.first_seq + frame.rows
        if not columns_in(<const char*> address(payload), payload.size, frame.rows, &self.columns):
            self.owner = with_seq(fmt.decode_rows(segment, frame), self.first_seq)
            columns_of(self.owner, &self.columns)

    def append_messages(self, bytearray out, seqs, Py_ssize_t begin, store_host, Py_ssize_t bytes_max):
        """Append the messages `seqs[begin:]` that are in this frame and fit. See implementation.StoredFrame."""
        cdef Py_buffer entries
        if type(seqs) is list:
            return self.append_rows(out, seqs, NULL, len(<list> seqs), begin, store_host, bytes_max)
        PyObject_GetBuffer(seqs, &entries, PyBUF_SIMPLE)
        try:
            return self.append_rows(
                out, seqs, <const char*> entries.buf, entries.len // ENTRY_BYTES, begin, store_host, bytes_max
            )
        finally:
            PyBuffer_Release(&entries)

    cdef object append_rows(
        self, bytearray out, seqs, const char* entries, Py_ssize_t count, Py_ssize_t begin, store_host,
        Py_ssize_t bytes_max
    ):
        """Implement `append_messages` for `count` sequence numbers in `entries` or, if that is NULL, in `seqs`."""
        cdef Record record
        cdef Py_ssize_t row, size = len(out), capacity = size, index = begin
        cdef int64_t seq
        cdef Hosts hosts = hosts_for(store_host)
        while index < count:
            seq = (<list> seqs)[index] if entries == NULL else read64(entries + ENTRY_BYTES * index)
            if not self.first_seq <= seq < self.end_seq:
                break
            row = seq - self.first_seq
            if not is_visible(&self.columns, row) or not hosts.measure(&self.columns, row, &record):
                # The reference raises the error of this row, or encodes it.
                PyByteArray_Resize(out, size)
                reference = records.StoredFrame(self.segment, self.frame)
                return reference.append_messages(out, seqs, index, store_host, bytes_max)
            if size + record.total > bytes_max and size:
                break
            if size + record.total > capacity:
                # Enough for all remaining messages if they have the same size, as in most cases.
                capacity = size + max(record.total, min((count - index) * record.total, bytes_max - size))
                PyByteArray_Resize(out, capacity)
            hosts.write(&self.columns, row, seq, &record, PyByteArray_AsString(out) + size)
            size += record.total
            index += 1
        PyByteArray_Resize(out, size)
        return index


# ---- one record ------------------------------------------------------------------------------------------------------


cdef struct Record:
    Py_ssize_t total  # size of the stored message in bytes
    bint is_v1  # the topic has a length of one byte
    int32_t sys_flag
    Text region  # the region property, appended to the properties


cdef class Hosts:
    """Encodes messages with one store host, and caches born hosts. Holds the properties of the current message."""

    cdef bytes store, born  # the encoded hosts
    cdef object otherwise  # the born host of a message without an IP address
    cdef dict known  # encoded born hosts by their texts
    cdef Text name  # the text of `born`. Size -1: none
    cdef Text properties  # in the row, or in `added`
    cdef Buffer added  # a copy of the properties, with those that are stored only in columns

    def __cinit__(self, store_host, born_host):
        self.store, self.otherwise = _host(store_host), born_host
        self.known = HOSTS if born_host == records.NO_HOST else {None: _host(born_host)}
        self.name.size = -1
        self.added.data, self.added.size, self.added.capacity = NULL, 0, 0

    def __dealloc__(self):
        free(self.added.data)

    cdef int find_born(self, Columns* of, Py_ssize_t row) except -1:
        """Set `born` to the born host of a row."""
        cdef Text host = text(&of.born_host, row)
        name = None
        if is_missing(&of.born_host, row):
            self.name.size = -1
        elif self.name.size == host.size and same(host, self.name.at, self.name.size):
            return 0  # consecutive rows are mostly from one connection
        else:
            self.name, name = host, host.at[:host.size]
        self.born = self.known.get(name)
        if self.born is None:
            if len(self.known) >= HOSTS_MAX:
                self.known.clear()
                self.known[None] = _host(self.otherwise)
            self.born = self.known[name] = _host(records.parse_host(name.decode(), self.otherwise))
        return 0

    cdef Text add(self, int name, Text value) except *:
        """Append a property that is stored only in a column, and return its text with its name.

        `name` is an index of PROPERTIES.
        """
        cdef Buffer* added = &self.added
        cdef Text own = self.properties
        cdef Py_ssize_t begin
        if own.at != added.data or added.data == NULL:  # the first property that is added to this row
            added.size = 0
            if own.size:
                put(added, own.at, own.size)
        if added.size and added.data[added.size - 1] != 2:
            put(added, b"\x02", 1)
        begin = added.size
        put(added, PROPERTIES[name].at, PROPERTIES[name].size)
        put(added, value.at, value.size)
        put(added, b"\x02", 1)
        self.properties = Text(added.data, added.size)
        return Text(added.data + begin, added.size - begin)

    cdef int add_timer(self, Columns* of, Py_ssize_t row, Text topic) except -1:
        """Append the properties that RocketMQ's timer adds to a message when it delivers it."""
        cdef Buffer* added = &self.added
        cdef Text own = self.properties
        if own.at != added.data or added.data == NULL:
            added.size = 0
            if own.size:
                put(added, own.at, own.size)
        if added.data[added.size - 1] != 2:
            put(added, b"\x02", 1)
        put(added, b"TIMER_OUT_MS\x01", 13)
        put_number(added, number64(&of.due_ms, row))
        put(added, b"\x02REAL_TOPIC\x01", 12)
        put(added, topic.at, topic.size)
        put(added, b"\x02REAL_QID\x01", 10)
        put_number(added, number32(&of.queue_id, row))
        put(added, b"\x02TIMER_ENQUEUE_MS\x01", 18)
        put_number(added, number64(&of.accepted_ms, row))
        put(added, b"\x02TIMER_DEQUEUE_MS\x01", 18)
        put_number(added, number64(&of.store_ms, row))
        put(added, b"\x02", 1)
        self.properties = Text(added.data, added.size if added.size <= PROPERTIES_JAVA_MAX else own.size)
        return 0

    cdef bint measure(self, Columns* of, Py_ssize_t row, Record* record) except -1:
        """Compute the size of a stored message, and prepare its hosts and properties for `write`.

        Returns False if a value does not fit into the layout.
        """
        cdef Text topic = text(&of.topic, row)
        cdef Text[NAMED] values = [text(&of.unique_key, row), text(&of.tag, row), text(&of.keys, row)]
        cdef int at, missing = 0  # `missing`: bit i for PROPERTIES[i], which has a value only in its column
        self.find_born(of, row)
        self.properties = text(&of.properties, row)
        for at in range(NAMED):
            missing |= (values[at].size > 0) << at
        missing &= ~names_in(self.properties, missing)
        for at in range(NAMED):
            if missing >> at & 1:
                # A value may contain text that looks like a property. As in the reference, that property counts as set.
                missing &= ~names_in(self.add(at, values[at]), missing)
        if not (is_missing(&of.due_ms, row) or is_missing(&of.accepted_ms, row)) and has_timer(self.properties):
            self.add_timer(of, row, topic)
        if self.properties.size > PROPERTIES_MAX or topic.size > TOPIC_MAX or not self.born or not self.store:
            return False
        record.region = region_to_append(self.properties)
        record.is_v1 = topic.size <= TOPIC_V1_MAX
        record.sys_flag = number32(&of.sys_flag, row) & ~(BORN_V6 | STORE_V6)
        record.sys_flag |= (BORN_V6 if len(self.born) > 8 else 0) | (STORE_V6 if len(self.store) > 8 else 0)
        record.total = (
            FIXED_BYTES + len(self.born) - 4 + len(self.store) - 4 + text(&of.body, row).size + topic.size
            + self.properties.size + record.region.size + (not record.is_v1)
        )
        return True

    cdef int write(self, Columns* of, Py_ssize_t row, int64_t seq, Record* record, char* begin) except -1:
        """Write the message of the last call of `measure` to `begin`. records.py shows the layout."""
        cdef Text topic = text(&of.topic, row), body = text(&of.body, row)
        cdef char* at = begin
        cdef bint is_committed = record.sys_flag & TRANSACTION_BITS == COMMITTED
        cdef Py_ssize_t properties_size = self.properties.size + record.region.size
        at = _put32(at, record.total)
        at = _put32(at, MAGIC_V1 if record.is_v1 else MAGIC_V2)
        at = _put32(at, checksum(body) & 0x7FFFFFFF)
        at = _put32(at, number32(&of.queue_id, row))
        at = _put32(at, number32(&of.flag, row))
        at = _put64(at, number64(&of.queue_offset, row))
        at = _put64(at, seq)
        at = _put32(at, record.sys_flag)
        at = _put64(at, number64(&of.born_ms, row))
        at = _put(at, self.born, len(self.born))
        at = _put64(at, number64(&of.store_ms, row))
        at = _put(at, self.store, len(self.store))
        at = _put32(at, number32(&of.times, row))
        at = _put64(at, number64(&of.source, row) if is_committed else 0)
        at = _put32(at, body.size)
        at = _put(at, body.at, body.size)
        if not record.is_v1:
            at[0] = <char> (topic.size >> 8)
            at += 1
        at[0] = <char> topic.size
        at = _put(at + 1, topic.at, topic.size)
        at[0], at[1] = <char> (properties_size >> 8), <char> properties_size
        at = _put(at + 2, self.properties.at, self.properties.size)
        at = _put(at, record.region.at, record.region.size)
        assert at == begin + record.total
        return 0


cdef Hosts _pulled  # of the last pull. The next one mostly has the same store host
cdef object _pulled_host = None


cdef Hosts hosts_for(store_host):
    """Return an encoder for pulls with this store host, without state of the last message."""
    global _pulled, _pulled_host
    if store_host is not _pulled_host:
        _pulled, _pulled_host = Hosts(store_host, records.NO_HOST), store_host
    # The cached name points into the frame of the last pull, whose memory may have been freed.
    _pulled.name.size = -1
    return _pulled


cdef bytes _host(host):
    """Encode a host as in a record. Empty if its port does not fit."""
    return host.address + host.port.to_bytes(4, "big", signed=True) if -(1 << 31) <= host.port < 1 << 31 else b""


# zlib's CRC-32, 16 bytes per step. Calling zlib, with a Python object for the bytes, would take as long as a message.
cdef enum:
    STEP = 16
cdef uint32_t CRCS[STEP][256]
cdef uint32_t _crc
cdef int _byte, _bit, _step
for _byte in range(256):
    _crc = _byte
    for _bit in range(8):
        _crc = _crc >> 1 ^ (0xEDB88320 if _crc & 1 else 0)
    CRCS[0][_byte] = _crc
for _step in range(1, STEP):
    for _byte in range(256):
        _crc = CRCS[_step - 1][_byte]
        CRCS[_step][_byte] = _crc >> 8 ^ CRCS[0][_crc & 0xFF]


cdef uint32_t checksum(Text of) noexcept:
    """Compute the CRC-32 of a text, as zlib.crc32 does."""
    cdef const uint8_t* at = <const uint8_t*> of.at
    cdef const uint8_t* end = at + of.size
    cdef uint32_t crc = ~<uint32_t> 0
    while end - at >= STEP:
        crc ^= at[0] | <uint32_t> at[1] << 8 | <uint32_t> at[2] << 16 | <uint32_t> at[3] << 24
        # The terms that do not depend on the previous crc come first, so that the CPU can compute them earlier.
        crc = (
            (CRCS[11][at[4]] ^ CRCS[10][at[5]] ^ CRCS[9][at[6]] ^ CRCS[8][at[7]])
            ^ (CRCS[7][at[8]] ^ CRCS[6][at[9]] ^ CRCS[5][at[10]] ^ CRCS[4][at[11]])
            ^ (CRCS[3][at[12]] ^ CRCS[2][at[13]] ^ CRCS[1][at[14]] ^ CRCS[0][at[15]])
            ^ ((CRCS[15][crc & 0xFF] ^ CRCS[14][crc >> 8 & 0xFF]) ^ (CRCS[13][crc >> 16 & 0xFF] ^ CRCS[12][crc >> 24]))
        )
        at += STEP
    while at < end:
        crc = crc >> 8 ^ CRCS[0][(crc ^ at[0]) & 0xFF]
        at += 1
    return ~crc


cdef inline Text region_to_append(Text properties) noexcept:
    """Return the region property to append to these properties, empty if it does not fit. See records.REGION."""
    cdef bint is_ended = properties.size == 0 or properties.at[properties.size - 1] == 2
    if properties.size + REGION.size - is_ended > PROPERTIES_JAVA_MAX:
        return Text(NULL, 0)
    return Text(REGION.at + is_ended, REGION.size - is_ended)


cdef bint has_timer(Text properties) noexcept:
    """Return whether a released message was sent with one of RocketMQ's timer properties. See records.py."""
    cdef const char* at = properties.at
    cdef const char* end = at + properties.size
    cdef bint found = False
    while at < end:
        if begins(at, end, TIMER_DONE) or begins(at, end, REAL_TOPIC):
            return False
        found |= begins(at, end, TIMER_PREFIX)
        at = <const char*> memchr(at, 2, end - at)
        if at == NULL:
            break
        at += 1
    return found


cdef inline bint begins(const char* at, const char* end, Text name) noexcept:
    """Return whether the bytes from `at` to `end` begin with this name."""
    return end - at >= name.size and at[0] == name.at[0] and memcmp(at, name.at, name.size) == 0


cdef int names_in(Text properties, int wanted) noexcept:
    """Return which of the wanted names are among the properties, as bits in the order of PROPERTIES."""
    cdef const char* at = properties.at
    cdef const char* end = at + properties.size
    cdef int name, found = 0
    while found != wanted:
        for name in range(NAMED):
            # Compare the first letter first: one call of memcmp takes as long as all these comparisons.
            if at < end and at[0] == PROPERTIES[name].at[0] and end - at >= PROPERTIES[name].size:
                if memcmp(at, PROPERTIES[name].at, PROPERTIES[name].size) == 0:
                    found |= wanted & 1 << name
        at = <const char*> memchr(at, 2, end - at) if at < end else NULL
        if at == NULL:
            break
        at += 1
    return found


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
