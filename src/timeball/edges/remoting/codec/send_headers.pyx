# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Read the header of a plain send and its properties in C: the counterpart of sends.py and SendRows. See send_runs.pyx.

Each function returns False for a send that is not plain. `p` is the position of the next byte to read. `row` gets the
values of the send, `text` the decoded properties, which begin at the end of the buffer, and `topic` the topic's name.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memchr, memcmp, memcpy

from timeball.edges.remoting.codec.c_text cimport (
    Buffer, Text, is_ascii, more, read32, read_bare, read_number, read_plain, read_text, same,
)

from timeball.model import message, rules, send_options
from timeball.edges.remoting.codec import delays
from timeball.edges.remoting.codec.codes import CommandFlag, RequestCode
from timeball.edges.remoting.codec.sends import LONG_NAMES, SHORT_NAMES

cdef enum:
    NAMES_MAX = 16
    LEVEL_UNIT = -1
    INSTANT_UNIT = -2
    RECORD_BYTES = 22  # of a record in a batch, without its body and properties

cdef int32_t SEND = RequestCode.SEND_MESSAGE_V2, LONG_SEND = RequestCode.SEND_MESSAGE
cdef int32_t BATCH = RequestCode.SEND_BATCH_MESSAGE
cdef int32_t RESPONSE = CommandFlag.RESPONSE, ONE_WAY = CommandFlag.ONE_WAY
cdef Py_ssize_t TAG_MAX = rules.SAFE_LENGTHS["tag"], KEY_MAX = rules.SAFE_LENGTHS["unique_key"]
cdef Py_ssize_t KEYS_MAX = rules.SAFE_LENGTHS["keys"], TEXT_MAX = rules.SAFE_LENGTHS["properties"]
cdef int64_t DELAY_NUMBER_MAX = 10 ** 15
cdef int64_t INT32_MAX = (1 << 31) - 1, INT64_MAX = (1 << 63) - 1
NEVER = -INT64_MAX - 1

# Each C Text points into a Python object, which is kept so that its bytes stay valid.
cdef list _delays = [name.encode() for name in sorted(delays.NAMES)]
cdef dict _units_ms = {
    delays.LEVEL: LEVEL_UNIT, delays.TIMER_SECONDS: 1000, delays.TIMER_MS: 1, delays.TIMER_INSTANT: INSTANT_UNIT,
}
cdef list _long_names = [LONG_NAMES[name].encode() for name, _ in sorted(SHORT_NAMES.items(), key=lambda pair: pair[1])]
cdef bytes _priority = message.PRIORITY.encode(), _lite_topic = message.LITE_TOPIC.encode()
# The options of a send are properties that begin with this. A send with one of them is not plain.
cdef bytes _option = send_options.PREFIX.encode()
cdef Text OPTION = Text(_option, len(_option))
cdef Text PRIORITY = Text(_priority, len(_priority)), LITE_TOPIC = Text(_lite_topic, len(_lite_topic))
cdef Text DELAYS[NAMES_MAX]
cdef int64_t UNITS_MS[NAMES_MAX]  # unit of a delay's number in ms. 0: left to `delays.plan`
cdef Text FIELDS[NAMES_MAX]  # long names, in the order of the short names `a`, `b`, …
cdef int _at, DELAY_NAMES = len(_delays), FIELD_NAMES = len(_long_names)
for _at in range(DELAY_NAMES):
    DELAYS[_at] = Text(<bytes> _delays[_at], len(_delays[_at]))
    UNITS_MS[_at] = _units_ms.get(_delays[_at].decode(), 0)
for _at in range(FIELD_NAMES):
    FIELDS[_at] = Text(<bytes> _long_names[_at], len(_long_names[_at]))


cdef bint read_json(Row* row, Buffer* text, Text header, Text* topic) except -1:
    """Read a JSON header, in which the request code must be the first field."""
    cdef const char* p = header.at
    cdef const char* end = header.at + header.size
    cdef Text name, value
    cdef int64_t number, code
    cdef bint has_fields = False
    if header.size < 12 or memcmp(p, b'{"code":', 8) != 0:
        return False
    p += 8
    if not (read_bare(&p, end, &value) and read_number(value, LONG_SEND, BATCH, &code)):
        return False
    if not (code == SEND or code == LONG_SEND or code == BATCH) or p >= end or p[0] != c",":
        return False
    row.is_batch = code == BATCH
    while p[0] == c",":
        p += 1
        if not read_plain(&p, end, &name) or p >= end or p[0] != c":":
            return False
        p += 1
        if same(name, b"extFields", 9):
            if has_fields or not read_fields(row, text, &p, end, topic, code == LONG_SEND):
                return False
            has_fields = True
        elif same(name, b"opaque", 6) or same(name, b"flag", 4) or same(name, b"version", 7):
            if not read_bare(&p, end, &value) or not read_number(value, -INT32_MAX - 1, INT32_MAX, &number):
                return False
            if name.at[0] == c"o":
                row.opaque = <int32_t> number
            elif name.at[0] == c"f":
                if number & RESPONSE:
                    return False
                row.is_one_way = number & ONE_WAY != 0
        elif not (
            same(name, b"language", 8) or same(name, b"remark", 6) or same(name, b"serializeTypeCurrentRPC", 23)
        ):
            return False
        elif not read_plain(&p, end, &value) and not (read_bare(&p, end, &value) and same(value, b"null", 4)):
            return False
        if p >= end:
            return False
    # The C++ client writes a line feed after its header.
    return has_fields and p[0] == c"}" and (p + 1 == end or (p + 2 == end and p[1] == c"\n"))


cdef bint read_fields(
    Row* row, Buffer* text, const char** p, const char* end, Text* topic, bint is_long
) except -1:
    """Read the extFields of a JSON header, and move `p` past them. `is_long`: they have long names."""
    cdef Text name, value
    cdef uint32_t seen = 0
    cdef Py_ssize_t size
    cdef char letter
    cdef bint is_bare
    if p[0] >= end or p[0][0] != c"{":
        return False
    while True:
        p[0] += 1
        if not read_plain(p, end, &name) or p[0] >= end or p[0][0] != c":":
            return False
        p[0] += 1
        letter = letter_of(name, is_long)
        if letter == c"i":
            if row.text_bytes >= 0 or not read_text(p, end, more(text, end - p[0]), &size):
                return False
            row.text_bytes = size
        else:
            is_bare = not read_plain(p, end, &value)
            if is_bare and not read_bare(p, end, &value):
                return False
            if not set_field(row, topic, letter, value, is_bare, &seen):
                return False
        if p[0] >= end:
            return False
        if p[0][0] == c"}":
            p[0] += 1
            return True
        if p[0][0] != c",":
            return False


cdef bint read_binary(Row* row, Buffer* text, Text header, Text* topic) except -1:
    """Read a binary header. frame.py shows the layout."""
    cdef const char* p = header.at
    cdef const char* end = header.at + header.size
    cdef Text name, value
    cdef uint32_t seen = 0
    cdef char letter
    # code 2, language 1, version 2, opaque 4, flag 4, length of the remark 4, of the fields 4
    if header.size < 21 or read32(p + 13) != 0 or read32(p + 17) != header.size - 21:
        return False
    cdef int32_t code = read32(p) >> 16
    if not (code == SEND or code == LONG_SEND or code == BATCH) or read32(p + 9) & RESPONSE:
        return False
    row.is_batch = code == BATCH
    row.opaque, row.is_one_way = <int32_t> read32(p + 5), read32(p + 9) & ONE_WAY != 0
    p += 21
    while p < end:
        if end - p < 2:
            return False
        name.at, name.size = p + 2, <uint8_t> p[0] << 8 | <uint8_t> p[1]
        if end - name.at < name.size + 4:
            return False
        p = name.at + name.size
        value.at, value.size = p + 4, read32(p)
        if end - value.at < value.size or not is_ascii(name):
            return False
        p = value.at + value.size
        letter = letter_of(name, code == LONG_SEND)
        if letter == c"i":
            if row.text_bytes >= 0:
                return False
            memcpy(more(text, value.size), value.at, value.size)
            row.text_bytes = value.size
        elif not is_ascii(value) or not set_field(row, topic, letter, value, False, &seen):
            return False
    return True


cdef char letter_of(Text name, bint is_long) noexcept:
    """Return the short name of a field (SHORT_NAMES in sends.py), `z` for a field that is not used."""
    cdef int at
    if not is_long:
        return name.at[0] if name.size == 1 and c"a" <= name.at[0] <= c"m" else c"z"
    for at in range(FIELD_NAMES):
        if same(name, FIELDS[at].at, FIELDS[at].size):
            return <char> (c"a" + at)
    return c"z"


cdef bint set_field(Row* row, Text* topic, char letter, Text value, bint is_bare, uint32_t* seen) noexcept:
    """Set the field with this short name. `is_bare`: `value` is a JSON value without quotes.

    `seen` has a bit for each field that was set already. Returns False for a repeated field or an unusual value.
    """
    cdef int64_t number
    cdef bint is_false = same(value, b"false", 5), is_true = same(value, b"true", 4)
    if letter == c"z":
        return not is_bare or is_false or is_true or read_number(value, -INT64_MAX, INT64_MAX, &number)
    if seen[0] >> (letter - c"a") & 1:
        return False
    seen[0] |= 1 << (letter - c"a")
    if letter == c"a" or letter == c"b" or letter == c"c":
        if letter == c"b":
            topic[0] = value
        return not is_bare
    if letter == c"k" or letter == c"m":
        is_false |= not is_bare and same(value, b"0", 1)
        is_true |= not is_bare and same(value, b"1", 1)
        row.is_batch |= is_true and letter == c"m"
        return is_false or is_true
    if letter == c"g":
        return read_number(value, NEVER, INT64_MAX, &row.born_ms)
    if not read_number(value, -INT32_MAX - 1, INT32_MAX, &number):
        return False
    if letter == c"e":
        row.queue_id = max(-1, <int32_t> number)
    elif letter == c"f":
        row.sys_flag = <int32_t> number
    elif letter == c"h":
        row.flag = <int32_t> number
    elif letter == c"j":
        row.times = <int32_t> number
    return True


cdef bint read_record(Row* row, Buffer* text, const char* data, Py_ssize_t* at, Py_ssize_t end) except -1:
    """Read the record of a batch at `at`, and move `at` past it. records.py shows the layout."""
    cdef const char* p = data + at[0]
    cdef int64_t total, body_bytes
    if end - at[0] < RECORD_BYTES:
        return False
    total, body_bytes = <int32_t> read32(p), <int32_t> read32(p + 16)
    if not RECORD_BYTES <= total <= end - at[0] or not 0 <= body_bytes <= total - RECORD_BYTES:
        return False
    row.flag, row.body_at, row.body_bytes = <int32_t> read32(p + 12), at[0] + 20, body_bytes
    p += 20 + body_bytes
    row.text_bytes = <uint8_t> p[0] << 8 | <uint8_t> p[1]
    if RECORD_BYTES + body_bytes + row.text_bytes != total:
        return False
    memcpy(more(text, row.text_bytes), p + 2, row.text_bytes)
    at[0] += total
    return read_properties(row, text) and row.delays == 0


# ---- properties ------------------------------------------------------------------------------------------------------


cdef bint read_properties(Row* row, Buffer* text) except -1:
    """Find the properties of a message that are stored in columns (tag, keys, unique key), and its delay properties.

    They are the next `row.text_bytes` bytes of `text`. A property with an effect beyond these makes the send not plain.
    """
    cdef char* begin = text.data + text.size
    cdef const char* at = begin
    cdef const char* end = begin + row.text_bytes
    cdef const char* stop
    cdef const char* middle
    cdef Text name
    cdef int32_t value_at, value_bytes
    cdef int delay
    name.at, name.size = begin, row.text_bytes
    if row.text_bytes > TEXT_MAX or not (is_ascii(name) or is_utf8(name)):
        return False
    row.text_at = text.size
    while at < end:
        stop = <const char*> memchr(at, 2, end - at)
        if stop == NULL:
            stop = end
        middle = <const char*> memchr(at, 1, stop - at)
        if middle != NULL:
            name.at, name.size = at, middle - at
            value_at, value_bytes = row.text_at + (middle + 1 - begin), stop - middle - 1
            if same(name, b"UNIQ_KEY", 8):
                row.key_at, row.key_bytes = value_at, value_bytes
            elif same(name, b"TAGS", 4):
                row.tag_at, row.tag_bytes = value_at, value_bytes
            elif same(name, b"KEYS", 4):
                row.keys_at, row.keys_bytes = value_at, value_bytes
            elif same(name, b"REPLY_TO_CLIENT", 15) or same(name, PRIORITY.at, PRIORITY.size):
                return False
            elif same(name, LITE_TOPIC.at, LITE_TOPIC.size):
                return False
            elif name.size > OPTION.size and memcmp(name.at, OPTION.at, OPTION.size) == 0:
                return False
            else:
                for delay in range(DELAY_NAMES):
                    if same(name, DELAYS[delay].at, DELAYS[delay].size):
                        row.delays += 1
                        row.delay, row.delay_at, row.delay_bytes = delay, value_at, value_bytes
        at = stop + 1
    if has_separator(begin, row.key_at, row.key_bytes, row.text_at) or has_separator(
        begin, row.tag_at, row.tag_bytes, row.text_at
    ):
        return False
    if has_separator(begin, row.keys_at, row.keys_bytes, row.text_at):
        return False
    return 0 < row.key_bytes <= KEY_MAX and row.tag_bytes <= TAG_MAX and row.keys_bytes <= KEYS_MAX


cdef bint has_separator(const char* begin, int32_t at, int32_t size_bytes, int32_t begin_at) noexcept:
    """Return whether a value contains \\x01, the separator of name and value, which the broker refuses."""
    return size_bytes > 0 and memchr(begin + (at - begin_at), 1, size_bytes) != NULL


cdef bint names_delay(Text properties) noexcept:
    """Return whether one of these properties is a delay property."""
    cdef const char* at = properties.at
    cdef const char* end = properties.at + properties.size
    cdef const char* stop
    cdef const char* middle
    cdef int delay
    while at < end:
        stop = <const char*> memchr(at, 2, end - at)
        if stop == NULL:
            stop = end
        middle = <const char*> memchr(at, 1, stop - at)
        if middle != NULL:
            for delay in range(DELAY_NAMES):
                if same(Text(at, middle - at), DELAYS[delay].at, DELAYS[delay].size):
                    return True
        at = stop + 1
    return False


cdef bint is_utf8(Text text) except -1:
    """Return whether these bytes are valid UTF-8."""
    try:
        text.at[:text.size].decode()
    except UnicodeDecodeError:
        return False
    return True


cdef bint plan_plain(Row* row, Buffer* text, int64_t now_ms, int64_t delay_ms_max) noexcept:
    """Compute the delay of a row from its only delay property. False: left to `delays.plan`, which may refuse it."""
    cdef Text value = Text(text.data + row.delay_at, row.delay_bytes)
    cdef int64_t number, unit_ms = UNITS_MS[row.delay]
    if row.delays != 1 or not unit_ms or not read_number(value, 1, DELAY_NUMBER_MAX, &number):
        return False
    if unit_ms == LEVEL_UNIT:
        row.level = <int32_t> number
        return number <= INT32_MAX
    row.due_ms = number if unit_ms == INSTANT_UNIT else now_ms + number * unit_ms
    return row.due_ms - now_ms <= delay_ms_max
