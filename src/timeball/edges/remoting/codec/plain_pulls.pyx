# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Plain pulls, read and answered in C: the compiled twin of `decode`, `PullFields` and `encode` for the usual one.

A pull is plain when its header is JSON as consumers write it, all its fields are texts, and it waits for an answer. All
else is None here and goes the way of the reference, as a frame; so does a plain one that cannot be answered at once,
with what it was refused for. Nothing is refused here.
"""

from cpython.bytearray cimport PyByteArray_AsString, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcmp, memcpy

from timeball.edges.remoting.codec.c_text cimport (
    Buffer, Text, put, put_number, read_bare, read_number, read_plain, same, write32,
)

from timeball.edges.remoting.codec.codes import BROKER_VERSION, CommandFlag, RequestCode
from timeball.edges.remoting.codec.frame import JSON, Command, Frame, encode
from timeball.edges.remoting.codec.records import pull_fields

cdef enum:
    HEADER_MAX = 4096
    FIELDS_MAX = 64
    REQUIRED = 0b110000011  # the first two numbers, the first two texts
    PARTS = 5

cdef int64_t INT32_MAX = (1 << 31) - 1, INT64_MAX = (1 << 63) - 1
cdef int32_t PULL = RequestCode.PULL_MESSAGE, LITE_PULL = RequestCode.LITE_PULL_MESSAGE
cdef int32_t NOT_PLAIN = CommandFlag.RESPONSE | CommandFlag.ONE_WAY
cdef int FORM = JSON

cdef list _names = [  # numbers, then texts
    b"queueId", b"queueOffset", b"maxMsgNums", b"sysFlag", b"commitOffset", b"subVersion", b"maxMsgBytes",
    b"consumerGroup", b"topic", b"subscription", b"expressionType",
]
cdef Text NAMES[NUMBERS + TEXTS]
cdef int _at
for _at in range(NUMBERS + TEXTS):
    NAMES[_at] = Text(<bytes> _names[_at], len(_names[_at]))

# The reference's own answer, cut where its numbers stand.
cdef list _marks = [1111111111, 2222222222222222, 3333333333333333, 4444444444444444]
cdef bytes _left = encode(
    Command(0, _marks[0], int(CommandFlag.RESPONSE), pull_fields(_marks[1], _marks[2], _marks[3]), version=BROKER_VERSION)
)[8:]
cdef list _parts = []
for _mark in _marks:
    _part, _, _left = _left.partition(b"%d" % _mark)
    _parts.append(_part)
_parts.append(_left)
cdef Text ANSWER[PARTS]
for _at in range(PARTS):
    ANSWER[_at] = Text(<bytes> _parts[_at], len(_parts[_at]))
cdef Buffer HEADER  # of the answer that is being written
HEADER.data, HEADER.size, HEADER.room = NULL, 0, 0


cdef class PlainPull:
    """What `PullFields` has of a pull, and the number of its request."""

    @property
    def queue_id(self):
        return self.numbers[0]

    @property
    def queue_offset(self):
        return self.numbers[1]

    @property
    def max_msg_nums(self):
        return self.numbers[2]

    @property
    def sys_flag(self):
        return self.numbers[3]

    @property
    def commit_offset(self):
        return self.numbers[4]

    @property
    def sub_version(self):
        return self.numbers[5]

    @property
    def max_msg_bytes(self):
        return self.numbers[6] if self.seen >> 6 & 1 else None

    @property
    def consumer_group(self):
        return self.texts[0].at[:self.texts[0].size].decode()

    @property
    def topic(self):
        return self.texts[1].at[:self.texts[1].size].decode()

    @property
    def subscription(self):
        return self.texts[2].at[:self.texts[2].size].decode() if self.seen >> (NUMBERS + 2) & 1 else None

    @property
    def expression_type(self):
        return self.texts[3].at[:self.texts[3].size].decode() if self.seen >> (NUMBERS + 3) & 1 else None

    @property
    def subject(self):
        """Return all but offsets, bounds and the number of the request, as bytes."""
        cdef int64_t[TEXTS + 4] parts = [self.seen, self.numbers[0], self.numbers[3], self.numbers[5], 0, 0, 0, 0]
        cdef Py_ssize_t size = sizeof(parts)
        cdef int at
        for at in range(TEXTS):
            parts[4 + at] = self.texts[at].size
            size += self.texts[at].size
        found = PyBytes_FromStringAndSize(NULL, size)
        cdef char* to = PyBytes_AsString(found)
        memcpy(to, <const char*> parts, sizeof(parts))
        to += sizeof(parts)
        for at in range(TEXTS):
            if self.texts[at].size:
                memcpy(to, self.texts[at].at, self.texts[at].size)
                to += self.texts[at].size
        return found

    def frame(self):
        """Return the frame that the pull was read in."""
        return Frame(FORM, self.data[self.header_at:self.body_at], self.data[self.body_at:self.end])

    def begin_answer(self, int64_t next_offset, int64_t min_offset, int64_t max_offset):
        """Return the frame that answers the pull, up to the stored messages."""
        cdef Buffer* header = &HEADER
        cdef int64_t[4] numbers = [self.opaque, next_offset, min_offset, max_offset]
        cdef int at
        header.size = 0
        for at in range(4):
            put(header, ANSWER[at].at, ANSWER[at].size)
            put_number(header, numbers[at])
        put(header, ANSWER[4].at, ANSWER[4].size)
        answer = PyByteArray_FromStringAndSize(NULL, 8 + header.size)
        cdef char* to = PyByteArray_AsString(answer)
        write32(to + 4, <uint32_t> (FORM << 24 | header.size))
        memcpy(to + 8, header.data, header.size)
        return answer

    def end_answer(self, bytearray answer not None):
        """Complete what `begin_answer` has begun, once the stored messages are there."""
        write32(PyByteArray_AsString(answer), <uint32_t> (len(answer) - 4))


cdef PlainPull read_pull(bytes data, Py_ssize_t at, Py_ssize_t body_at, Py_ssize_t end, int form):
    """Return the plain pull whose header begins at `at` and whose body, of a frame up to `end`, at `body_at`.

    None when the frame holds anything else.
    """
    cdef const char* p = <const char*> data + at
    cdef const char* header_end = <const char*> data + body_at
    cdef PlainPull pull
    if form != FORM:
        return None
    pull = read_header(p, header_end)
    if pull is not None:
        pull.data, pull.header_at, pull.body_at, pull.end = data, at, body_at, end
    return pull


cdef PlainPull read_header(const char* p, const char* end):
    cdef Text name, value
    cdef int64_t number, opaque = 0
    cdef PlainPull pull = None
    if end - p < 12 or end - p > HEADER_MAX or memcmp(p, b'{"code":', 8) != 0:
        return None
    p += 8
    if not (read_bare(&p, end, &value) and read_number(value, 0, LITE_PULL, &number)):
        return None
    if number != PULL and number != LITE_PULL or p >= end:
        return None
    while p[0] == c",":
        p += 1
        if not read_plain(&p, end, &name) or p >= end or p[0] != c":":
            return None
        p += 1
        if same(name, b"extFields", 9):
            if pull is not None:
                return None
            pull = read_fields(&p, end)
            if pull is None:
                return None
        elif same(name, b"opaque", 6) or same(name, b"flag", 4) or same(name, b"version", 7):
            if not read_bare(&p, end, &value) or not read_number(value, -INT32_MAX - 1, INT32_MAX, &number):
                return None
            if name.at[0] == c"o":
                opaque = number
            elif name.at[0] == c"f" and number & NOT_PLAIN:
                return None
        elif not (
            same(name, b"language", 8) or same(name, b"remark", 6) or same(name, b"serializeTypeCurrentRPC", 23)
        ):
            return None
        elif not read_plain(&p, end, &value) and not (read_bare(&p, end, &value) and same(value, b"null", 4)):
            return None
        if p >= end:
            return None
    # The C++ client ends its header with a line feed.
    if pull is None or p[0] != c"}" or not (p + 1 == end or (p + 2 == end and p[1] == c"\n")):
        return None
    pull.opaque = <int32_t> opaque
    return pull


cdef PlainPull read_fields(const char** p, const char* end):
    """Read the extFields of a pull."""
    cdef Text name, value
    cdef Text[TEXTS] texts = [Text(NULL, 0), Text(NULL, 0), Text(NULL, 0), Text(NULL, 0)]
    cdef int64_t[NUMBERS] numbers = [0, 0, 32, 0, 0, 0, 0]  # the defaults of PullFields
    cdef int64_t suspend_ms
    cdef uint32_t seen = 0
    cdef int at, count = 0
    while p[0] < end and p[0][0] == (c"," if count else c"{") and count < FIELDS_MAX:
        p[0] += 1
        count += 1
        if not read_plain(p, end, &name) or p[0] >= end or p[0][0] != c":":
            return None
        p[0] += 1
        if not read_plain(p, end, &value):
            return None
        if same(name, b"suspendTimeoutMillis", 20):
            # Only who waits looks at it; but it must be a number.
            if not read_number(value, -INT64_MAX, INT64_MAX, &suspend_ms):
                return None
            continue
        at = 0
        while at < NUMBERS + TEXTS and not same(name, NAMES[at].at, NAMES[at].size):
            at += 1
        if at == NUMBERS + TEXTS:
            continue
        if seen >> at & 1:
            return None
        seen |= 1 << at
        if at >= NUMBERS:
            texts[at - NUMBERS] = value
        elif not read_number(value, -INT64_MAX, INT64_MAX, &numbers[at]):
            return None
    if p[0] >= end or p[0][0] != c"}" or seen & REQUIRED != REQUIRED:
        return None
    p[0] += 1
    cdef PlainPull pull = PlainPull.__new__(PlainPull)
    for at in range(NUMBERS):
        pull.numbers[at] = numbers[at]
    for at in range(TEXTS):
        pull.texts[at] = texts[at]
    pull.seen = seen
    return pull
