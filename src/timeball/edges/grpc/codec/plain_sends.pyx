# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Decode a plain SendMessageRequest from its bytes to a row: the compiled twin of protobuf and messages_in.py.

A send is plain if it has the form that RocketMQ's own producers usually write: one message, NORMAL or DELAY, with an
id, and with texts of printable ASCII. Only its topic, its due time and its caller remain to be checked. `read_plain`
returns None for all other requests, and the reference decodes them: a field that is present twice or not listed here, a
text with other characters, a number out of its range. Only the reference reports errors. So for any bytes, a plain send
equals the row that the reference creates (tests/edges/grpc/codec/test_send_requests.py).
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy

from timeball.model import limits
from timeball.edges.grpc._generated.definition_pb2 import MessageType
from timeball.edges.grpc.codec.messages_in import (
    TIMESTAMP_SECONDS_MAX, BORN_HOST_CHARACTERS_MAX, USER_PROPERTIES_BYTES_MAX,
)
from timeball.edges.grpc.codec.messages_out import DELIVER_MS, KEYS, RESERVED, TAGS, UNIQ_KEY
from timeball.model.send_options import EXPIRY_NAMES, ON_PENDING, UNIQUE_KEY
from timeball.model.time_parsing import LOCAL_TIME

cdef extern from "Python.h":
    object PyBytes_FromStringAndSize(const char* data, Py_ssize_t size)
    char* PyBytes_AsString(object data) except NULL
    object PyUnicode_FromStringAndSize(const char* data, Py_ssize_t size)

cdef enum:
    VARINT = 0
    TEXT = 2
    KEYS_MAX = 16  # of one message. A message with more is no plain send
    BODY_BYTES_MAX = 65535
    NORMAL = 1
    DELAY = 3
    IDENTITY = 1

assert (NORMAL, DELAY) == (MessageType.NORMAL, MessageType.DELAY)

cdef int64_t SECONDS_MAX = TIMESTAMP_SECONDS_MAX
cdef Py_ssize_t ID_MAX = limits.UNIQUE_KEY_BYTES_MAX
cdef Py_ssize_t TAG_MAX = limits.TAG_BYTES_MAX
cdef Py_ssize_t ALL_KEYS_MAX = min(limits.KEYS_BYTES_MAX, limits.PROPERTIES_BYTES_MAX)
cdef Py_ssize_t HOST_MAX = BORN_HOST_CHARACTERS_MAX
cdef Py_ssize_t USER_MAX = USER_PROPERTIES_BYTES_MAX
cdef Py_ssize_t PROPERTIES_MAX = limits.PROPERTIES_BYTES_MAX
cdef bytes _tags = TAGS.encode(), _keys = KEYS.encode(), _id = UNIQ_KEY.encode(), _deliver = DELIVER_MS.encode()

# Property names that the reference refuses, or that make a send no plain one.
NOT_PLAIN = RESERVED | EXPIRY_NAMES | {UNIQUE_KEY, ON_PENDING, LOCAL_TIME}

assert KEYS_MAX <= limits.KEYS_PER_MESSAGE_MAX and BODY_BYTES_MAX <= limits.BODY_BYTES_MAX


cdef struct Text:
    const char* at
    Py_ssize_t size


cdef struct Fields:
    # The fields of one message. A text of size 0 is missing. `space` is the namespace of the topic, `name` and `value`
    # are the user property.
    Text space, topic, name, value, tag, message_id, host, body
    Text keys[KEYS_MAX]
    int keys_count, properties
    uint64_t encoding, message_type
    int64_t born_ms, due_ms  # -1: missing


cdef class PlainSend:
    """A decoded plain send (see messages_in.PlainSend). `topic` is a namespace and a name."""

    cdef readonly tuple topic
    cdef readonly int message_type
    cdef readonly object due_ms
    cdef readonly bint needs_now
    cdef readonly Py_ssize_t size_bytes
    cdef object body, tag, keys, message_id, properties, born_ms, born_host

    def row(self, str topic, now_ms, str peer):
        """Create the row with the values of SEND_NAMES. `now_ms` and `peer` replace values that are not set."""
        return (
            topic, self.body, self.tag, self.keys, self.message_id, self.properties, -1,
            now_ms if self.born_ms is None else self.born_ms,
            peer if self.born_host is None else self.born_host,
            0, 0, 0, self.due_ms, None,
        )


def read_plain(bytes data not None):
    """Decode a plain send. Returns None for any other bytes."""
    cdef Fields fields
    cdef Text message, request
    cdef uint32_t field = 0
    cdef uint64_t number = 0
    request.at = PyBytes_AsString(data)
    request.size = len(data)
    if not next_field(&request, &field, &number, &message) or field != (1 << 3 | TEXT) or request.size:
        return None
    fields.space.size = fields.topic.size = fields.name.size = fields.value.size = fields.tag.size = 0
    fields.message_id.size = fields.host.size = fields.body.size = 0
    fields.keys_count = fields.properties = 0
    fields.encoding = fields.message_type = 0
    fields.born_ms = fields.due_ms = -1
    if not read_message(&fields, message) or not is_plain(&fields):
        return None
    return send_of(&fields)


cdef bint next_number(Text* data, uint64_t* number) noexcept:
    """Read a varint and advance `data` past it. Returns False if it is incomplete or longer than necessary."""
    cdef int shift = 0
    cdef uint8_t byte
    number[0] = 0
    while data.size and shift < 63:
        byte = <uint8_t> data.at[0]
        data.at += 1
        data.size -= 1
        number[0] |= <uint64_t> (byte & 0x7F) << shift
        if byte < 0x80:
            return byte or not shift  # a last byte of 0 is not necessary
        shift += 7
    return False


cdef bint next_field(Text* data, uint32_t* field, uint64_t* number, Text* value) noexcept:
    """Read one field and advance `data` past it: its key to `field`, and its number or its bytes."""
    cdef uint64_t key = 0
    if not next_number(data, &key) or key > 0x7FFF or not next_number(data, number):
        return False
    field[0] = <uint32_t> key
    if key & 7 == VARINT:
        return True
    if key & 7 != TEXT or number[0] > <uint64_t> data.size:
        return False
    value.at, value.size = data.at, <Py_ssize_t> number[0]
    data.at += value.size
    data.size -= value.size
    return True


cdef bint read_message(Fields* fields, Text data) noexcept:
    """Read a Message. Like all functions below, returns False if the send is not plain."""
    cdef uint32_t field = 0, seen = 0
    cdef uint64_t number = 0
    cdef Text value
    value.size = 0
    while data.size:
        if not next_field(&data, &field, &number, &value) or field & 7 != TEXT or not 8 < field < 40:
            return False
        if seen & 1 << (field >> 3):
            return False  # also a second property: protobuf orders several properties in its own way
        seen |= 1 << (field >> 3)
        if field >> 3 == 1:
            if not read_pair(value, &fields.space, &fields.topic):
                return False
        elif field >> 3 == 2:
            fields.properties = 1
            if not read_pair(value, &fields.name, &fields.value):
                return False
        elif field >> 3 == 3:
            if not read_system(fields, value):
                return False
        else:
            fields.body = value
    return True


cdef bint read_pair(Text data, Text* first, Text* second) noexcept:
    """Read a protobuf message whose fields 1 and 2 are texts."""
    cdef uint32_t field = 0
    cdef uint64_t number = 0
    cdef Text value
    value.size = 0
    while data.size:
        if not next_field(&data, &field, &number, &value) or not value.size:
            return False
        if field == (1 << 3 | TEXT) and not first.size and not second.size:
            first[0] = value
        elif field == (2 << 3 | TEXT) and not second.size:
            second[0] = value
        else:
            return False
    return True


cdef bint read_system(Fields* fields, Text data) noexcept:
    """Read the SystemProperties."""
    cdef uint32_t field = 0, seen = 0, field_number
    cdef uint64_t number = 0
    cdef Text value
    value.size = 0
    while data.size:
        if not next_field(&data, &field, &number, &value):
            return False
        field_number = field >> 3
        if field == (2 << 3 | TEXT):
            if fields.keys_count == KEYS_MAX or not value.size:  # the reference omits empty keys, but counts them
                return False
            fields.keys[fields.keys_count] = value
            fields.keys_count += 1
            continue
        if field_number > 13 or seen & 1 << field_number:
            return False
        seen |= 1 << field_number
        if field == (1 << 3 | TEXT):
            fields.tag = value
        elif field == (3 << 3 | TEXT):
            fields.message_id = value
        elif field == (5 << 3 | VARINT):
            fields.encoding = number
        elif field == (6 << 3 | VARINT):
            fields.message_type = number
        elif field == (7 << 3 | TEXT):
            if not read_timestamp(value, &fields.born_ms, 0):
                return False
        elif field == (8 << 3 | TEXT):
            fields.host = value
        elif field == (11 << 3 | TEXT):
            if not read_timestamp(value, &fields.due_ms, 999999):
                return False
        elif field != (13 << 3 | VARINT):  # a queue id has no effect, because the broker chooses the queue
            return False
    return True


cdef bint read_timestamp(Text data, int64_t* time_ms, int64_t round_up_ns) noexcept:
    """Read a timestamp after 1970 as ms. It is rounded down after `round_up_ns` is added (999,999: rounded up)."""
    cdef uint32_t field = 0
    cdef uint64_t number = 0, seconds = 0, nanos = 0
    cdef Text value
    while data.size:
        if not next_field(&data, &field, &number, &value):
            return False
        if field == 1 << 3 and not seconds and not nanos:
            seconds = number
        elif field == 2 << 3 and not nanos:
            nanos = number
        else:
            return False
    if not 0 < seconds <= <uint64_t> SECONDS_MAX or nanos >= 1000000000:
        return False
    time_ms[0] = <int64_t> seconds * 1000 + (<int64_t> nanos + round_up_ns) // 1000000
    return True


cdef bint is_printable(Text text) noexcept:
    """Return whether all characters are printable ASCII."""
    cdef Py_ssize_t at
    for at in range(text.size):
        if not 0x20 <= <uint8_t> text.at[at] < 0x7F:
            return False
    return True


cdef bint is_word(Text text) noexcept:
    """Return whether a text is printable and contains no blank."""
    return is_printable(text) and memchr(text.at, c" ", text.size) == NULL


cdef bint is_plain(Fields* fields) noexcept:
    """Return whether the reference would accept these fields without an error or a special case."""
    cdef int at
    cdef Py_ssize_t keys_bytes = 0
    if fields.message_type == DELAY:
        if fields.due_ms < 0:
            return False
    elif fields.message_type != NORMAL or fields.due_ms >= 0:
        return False
    if not 0 < fields.body.size <= BODY_BYTES_MAX or fields.encoding > IDENTITY or fields.host.size > HOST_MAX:
        return False
    if not 0 < fields.message_id.size <= ID_MAX or not is_word(fields.message_id):
        return False
    if not is_printable(fields.space) or not is_printable(fields.topic) or not is_printable(fields.host):
        return False
    if fields.tag.size:
        if fields.tag.size > TAG_MAX or not is_word(fields.tag) or memchr(fields.tag.at, c"|", fields.tag.size):
            return False
    for at in range(fields.keys_count):
        keys_bytes += fields.keys[at].size + 1
        if not is_word(fields.keys[at]):
            return False
    if keys_bytes > ALL_KEYS_MAX:
        return False
    if fields.properties and (not fields.name.size or not is_printable(fields.name) or not is_printable(fields.value)):
        return False
    return fields.name.size + fields.value.size + fields.tag.size + keys_bytes <= USER_MAX


cdef object text_of(Text text):
    return PyUnicode_FromStringAndSize(text.at, text.size)


cdef object send_of(Fields* fields):
    """Create the PlainSend. Returns None if the property has a reserved name, or if all properties are too large."""
    cdef PlainSend send
    cdef str keys = ""
    if fields.properties and text_of(fields.name) in NOT_PLAIN:
        return None
    send = PlainSend.__new__(PlainSend)
    send.topic = (text_of(fields.space) if fields.space.size else "", text_of(fields.topic) if fields.topic.size else "")
    send.message_type = <int> fields.message_type
    send.due_ms = None if fields.due_ms < 0 else fields.due_ms
    send.born_ms = None if fields.born_ms < 0 else fields.born_ms
    send.needs_now = fields.due_ms >= 0 or fields.born_ms < 0
    send.body = PyBytes_FromStringAndSize(fields.body.at, fields.body.size)
    send.tag = text_of(fields.tag) if fields.tag.size else None
    if fields.keys_count:
        keys = " ".join([text_of(fields.keys[at]) for at in range(fields.keys_count)])
    send.keys = keys or None
    send.message_id = text_of(fields.message_id)
    send.born_host = text_of(fields.host) if fields.host.size else None
    send.properties = properties_of(fields, keys)
    send.size_bytes = fields.body.size + len(<str> send.properties)
    return None if len(<str> send.properties) > PROPERTIES_MAX else send


cdef struct Out:
    char* at


cdef inline void put(Out* out, const char* name, Py_ssize_t name_size, const char* value, Py_ssize_t size) noexcept:
    """Append a property as name, byte 1, value, byte 2."""
    memcpy(out.at, name, name_size)
    out.at[name_size] = 1
    memcpy(out.at + name_size + 1, value, size)
    out.at[name_size + 1 + size] = 2
    out.at += name_size + size + 2


cdef object properties_of(Fields* fields, str keys):
    """Encode all properties in the order of the reference: user property, tag, `keys`, message id, due time."""
    cdef bytes due = str(fields.due_ms).encode() if fields.due_ms >= 0 else b""
    cdef bytes joined = keys.encode()
    cdef Py_ssize_t size = (
        fields.name.size + fields.value.size + fields.tag.size + len(joined) + fields.message_id.size + len(due) + 10
        + len(_tags) + len(_keys) + len(_id) + len(_deliver)
    )
    cdef object buffer = PyBytes_FromStringAndSize(NULL, size)
    cdef char* begin = PyBytes_AsString(buffer)
    cdef Out out
    out.at = begin
    if fields.properties:
        put(&out, fields.name.at, fields.name.size, fields.value.at, fields.value.size)
    if fields.tag.size:
        put(&out, PyBytes_AsString(_tags), len(_tags), fields.tag.at, fields.tag.size)
    if joined:
        put(&out, PyBytes_AsString(_keys), len(_keys), PyBytes_AsString(joined), len(joined))
    put(&out, PyBytes_AsString(_id), len(_id), fields.message_id.at, fields.message_id.size)
    if due:
        put(&out, PyBytes_AsString(_deliver), len(_deliver), PyBytes_AsString(due), len(due))
    return PyUnicode_FromStringAndSize(begin, out.at - begin)
