# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Decode and answer plain pulls in C: the compiled counterpart of `decode`, `PullFields` and `encode`.

A pull is plain if its header is JSON as consumers usually write it, all its fields are texts, and it expects an answer.
For anything else, `read_pull` returns None, and the reference handles the frame. The reference also handles a plain
pull that cannot be answered at once or is refused. Nothing is refused here.
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
    REQUIRED = 0b110000011  # bits of the first two numbers and the first two texts
    PIECES = 5

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

# The template of an answer: an answer of the reference, split at its four numbers.
cdef list _placeholders = [1111111111, 2222222222222222, 3333333333333333, 4444444444444444]
cdef bytes _rest = encode(
    Command(
        0, _placeholders[0], int(CommandFlag.RESPONSE),
        pull_fields(_placeholders[1], _placeholders[2], _placeholders[3]), version=BROKER_VERSION,
    )
)[8:]
cdef list _pieces = []
for _placeholder in _placeholders:
    _piece, _, _rest = _rest.partition(b"%d" % _placeholder)
    _pieces.append(_piece)
_pieces.append(_rest)
cdef Text ANSWER[PIECES]
for _at in range(PIECES):
    ANSWER[_at] = Text(<bytes> _pieces[_at], len(_pieces[_at]))
cdef Buffer HEADER  # of the answer that is being encoded
HEADER.data, HEADER.size, HEADER.capacity = NULL, 0, 0


cdef class PlainPull:
    """The fields of `PullFields`, and the opaque of the request. See implementation.PlainPull."""

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
        """Encode all fields except offsets, limits and opaque, as the key of a cached permission."""
        cdef int64_t[TEXTS + 4] head = [self.seen, self.numbers[0], self.numbers[3], self.numbers[5], 0, 0, 0, 0]
        cdef Py_ssize_t size = sizeof(head)
        cdef int at
        for at in range(TEXTS):
            head[4 + at] = self.texts[at].size
            size += self.texts[at].size
        key = PyBytes_FromStringAndSize(NULL, size)
        cdef char* to = PyBytes_AsString(key)
        memcpy(to, <const char*> head, sizeof(head))
        to += sizeof(head)
        for at in range(TEXTS):
            if self.texts[at].size:
                memcpy(to, self.texts[at].at, self.texts[at].size)
                to += self.texts[at].size
        return key

    def frame(self):
        """Return the original frame of the pull."""
        return Frame(FORM, self.data[self.header_at:self.body_at], self.data[self.body_at:self.end])

    def begin_answer(self, int64_t next_offset, int64_t min_offset, int64_t max_offset):
        """Encode the frame of an answer up to the stored messages, which the caller appends."""
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
        """Set the length of an answer from `begin_answer`, after the stored messages were appended."""
        write32(PyByteArray_AsString(answer), <uint32_t> (len(answer) - 4))


cdef PlainPull read_pull(bytes data, Py_ssize_t at, Py_ssize_t body_at, Py_ssize_t end, int form):
    """Read the plain pull in a frame. Returns None if the frame contains anything else.

    Its header begins at `at`, its body at `body_at`, and it ends at `end`. `form` is its serialisation.
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
    """Read the JSON header of a pull, in which the request code must be the first field. None if it is not plain."""
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
    # The C++ client writes a line feed after its header.
    if pull is None or p[0] != c"}" or not (p + 1 == end or (p + 2 == end and p[1] == c"\n")):
        return None
    pull.opaque = <int32_t> opaque
    return pull


cdef PlainPull read_fields(const char** p, const char* end):
    """Read the extFields of a pull, and move `p` past them. None if they are not plain."""
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
            # The value only matters for a pull that waits, which the reference handles. It must be a number anyway.
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
